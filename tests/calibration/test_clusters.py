"""`rcir calibrate --cluster`: queries that come in clusters, from a table to the report."""

import io
import json
import re
import shutil
from contextlib import redirect_stdout

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import rcir
from calibration import CalibrationConfig, EvaluationConfig, calibrate, evaluate_retriever
from rcir.cli import main
from rcir.data import DataConfig, load_splits
from rcir.encoders import EncoderConfig
from rcir.errors import InvalidData
from rcir.runs.results import TEST, RunResults
from training import train

DELTA = 0.1
LEVELS = ["--alpha", "0.01", "0.6", "0.8", "--delta", "0.1"]


@pytest.fixture(scope="module")
def run(splits, tiny, tracking_uri, tmp_path_factory):
    """A training on a table of numbers by their tens, drawn by 90 people in two sites."""
    folder = tmp_path_factory.mktemp("drawn")
    images = np.concatenate([splits.train.images, splits.calibration.images])
    numbers = np.concatenate([splits.train.labels, splits.calibration.labels])
    rng = np.random.default_rng(0)
    order, person = rng.permutation(800), rng.integers(0, 90, 800)
    rows = []
    for row, chosen in enumerate(order.tolist()):
        Image.fromarray(images[chosen]).save(folder / f"{row}.png")
        split = "train" if row < 150 else "gallery" if row < 300 else "query"
        # Who draws a query draws nothing that is searched.
        name = f"p{person[row]}" if split == "query" else f"q{row}"
        label = f"tens {numbers[chosen] // 10}"
        rows.append((f"{row}.png", label, split, name, ["north", "south"][row % 2]))
    columns = ["path", "label", "split", "cluster", "group"]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "table.csv", index=False)
    data = DataConfig("table", root=str(folder), options={"path": "table.csv"})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return train(tiny("drawn", epochs=1, data=data, encoder=EncoderConfig(dim=8)))


@pytest.fixture(scope="module")
def clustered(run, tracking_uri, tmp_path_factory):
    """The files and output of the command."""
    output, screen = tmp_path_factory.mktemp("clustered"), io.StringIO()
    command = ["calibrate", "--run", str(run.path), "--output", str(output), "--depth", "60"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(screen):
        patch.setattr("calibration.pipeline.draw_figures", lambda *_: {})
        assert main([*command, *LEVELS, "--cluster", "cluster", "--group", "group"]) == 0
    return output, screen.getvalue()


@pytest.fixture(scope="module")
def divided(clustered):
    """The splits that the retriever says it was calibrated on."""
    return load_splits(DataConfig(**rcir.load(clustered[0] / "retriever").origin["data"]))


def people(images):
    return set(images.attributes["cluster"].tolist())


def test_no_cluster_is_in_two_splits_and_training_stays_the_same(run, divided):
    parts = [people(part) for part in (divided.tuning, divided.calibration, divided.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) > 80
    plain = load_splits(run.data)
    for name in ("train", "validation", "gallery"):
        assert getattr(plain, name).ids == getattr(divided, name).ids
    assert set(plain.calibration.ids) != set(divided.calibration.ids)


def test_risks_are_means_over_people_of_what_the_retriever_answers(clustered, divided):
    results = json.loads((clustered[0] / "results.json").read_text())
    loaded, test = rcir.load(clustered[0] / "retriever"), divided.test
    names = test.attributes["cluster"]
    refused, *certified = results["rows"]
    assert refused["threshold"] is None
    for row in certified:
        answers = loaded.retrieve(list(test.images), row["alpha"], DELTA)
        labels = [test.label_names[each] for each in test.labels.tolist()]
        missed = np.array(
            [each not in answer.labels for each, answer in zip(labels, answers, strict=True)]
        )
        shares = [missed[names == name].mean() for name in people(test)]
        assert row["test_risk"] == pytest.approx(np.mean(shares))
        assert row["mean_size"] == pytest.approx(np.mean([answer.size for answer in answers]))
        assert (row["bound"], row["guarantee"]) == ("betting", "miss")
        assert answers[0].guarantee.threshold == row["threshold"]
    assert f"further cluster like the {len(people(divided.calibration))} of" in str(
        answers[0].guarantee
    )


def test_results_page_and_screen_count_clusters_and_omit_what_needs_independence(
    clustered, divided
):
    folder, screen = clustered
    results = json.loads((folder / "results.json").read_text())
    n, tests = len(people(divided.calibration)), len(people(divided.test))
    assert (results["n_clusters"], results["n_test_clusters"]) == (n, tests)
    assert results["n_calibration"] == len(divided.calibration)
    guarantees = {row["guarantee"] for row in results["others"]}
    assert guarantees == {
        *("miss, distinct labels", "miss, each quarter of the uncertainty"),
        *("recall", "false discovery", "miss, group north", "miss, group south"),
    }
    assert {(part["low"], part["high"]) for part in results["parts"]} == {(None, None)}
    page = " ".join((folder / "report.html").read_text(encoding="utf-8").split())
    screen = " ".join(screen.split())
    for text in (page, screen):
        assert f"{len(divided.calibration)} calibration queries in {n} clusters" in text
        assert f"{len(divided.test)} test queries in {tests} clusters" in text
    assert "abstain=True" not in page


def test_their_sizes_are_not_compared_as_those_of_independent_queries(clustered, tmp_path, capsys):
    assert RunResults.read(clustered[0] / TEST).parts == []
    copies = [shutil.copytree(clustered[0], tmp_path / name) for name in ("one", "two")]
    main(["compare", *map(str, copies)])
    assert "no certified sizes on test queries: one, two" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["compare", "--choose", *map(str, copies)])
    assert "clusters" in capsys.readouterr().err


@pytest.mark.usefixtures("no_figures")
def test_clusters_that_are_not_named_are_warned_of_and_never_extended(run, tmp_path, capsys):
    outcome = calibrate(CalibrationConfig(str(run.path), "plain", "constant", alphas=(0.6,)))
    error = capsys.readouterr().err
    assert re.match(r"warning: the \d+ calibration queries come in \d+ clusters \(cluster\)", error)
    assert "--cluster cluster" in error
    loaded = rcir.load(outcome.folder)
    assert loaded.calibration.miss_rule.evidence.population.clusters is None
    # The test queries of the data set may have extended the calibration.
    with pytest.warns(UserWarning, match="cluster='cluster'"):
        loaded.extend_calibration(loaded.search_labelled(outcome.splits.data.test))
    folder = loaded.save(tmp_path / "grown")
    with pytest.raises(InvalidData, match="were added"):
        evaluate_retriever(EvaluationConfig(str(folder), alphas=(0.6,)))
    assert not (tmp_path / "evaluation").exists()


@pytest.mark.usefixtures("no_figures")
def test_queries_of_new_labels_are_found_again_by_the_origin(run, tmp_path, capsys):
    folder, levels = str(tmp_path / "new"), (0.6,)
    outcome = calibrate(
        CalibrationConfig(str(run.path), folder, "constant", queries="new-labels", alphas=levels)
    )
    assert "no test query has the label of a calibration query" in capsys.readouterr().err
    splits = outcome.splits.data
    labels = [set(part.labels) for part in (splits.tuning, splits.calibration, splits.test)]
    assert sum(map(len, labels)) == len(set.union(*labels))
    evaluated = evaluate_retriever(EvaluationConfig(str(outcome.folder), alphas=levels))
    assert evaluated.splits.data.test.ids == splits.test.ids
    assert evaluated.evaluation.rows == outcome.evaluation.rows
