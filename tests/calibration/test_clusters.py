"""`python -m calibration --cluster`: queries that come in clusters, from a table to the report."""

import io
import json
import re
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import rcir
from calibration import CalibrationConfig, EvaluationConfig, calibrate, evaluate_retriever
from calibration.__main__ import main
from rcir.data import DataConfig, load_splits
from rcir.encoders import EncoderConfig
from rcir.errors import InvalidData
from rcir.runs.results import TEST, RunResults
from training import train

DELTA = 0.1
LEVELS = ["--alphas", "[0.01, 0.6, 0.8]", "--delta", "0.1"]


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
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        return train(tiny("drawn", epochs=2, data=data, encoder=EncoderConfig(dim=8)))


@pytest.fixture(scope="module")
def clustered(run, tracking_uri, tmp_path_factory):
    """What the command wrote and printed."""
    output, screen = tmp_path_factory.mktemp("clustered"), io.StringIO()
    command = ["--run", str(run.path), "--output", str(output), "--depth", "60"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(screen):
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
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
        missed = np.array(
            [
                test.label_names[each] not in answer.labels
                for each, answer in zip(test.labels.tolist(), answers, strict=True)
            ]
        )
        shares = [missed[names == name].mean() for name in people(test)]
        assert row["test_risk"] == pytest.approx(np.mean(shares))
        assert row["mean_size"] == pytest.approx(np.mean([answer.size for answer in answers]))
        assert (row["bound"], row["guarantee"]) == ("betting", "miss")
        assert answers[0].guarantee.threshold == row["threshold"]
        assert str(answers[0].guarantee).startswith(
            "With probability at least 0.9, a true match is missing from at most "
            f"{row['alpha']:g} of the sets returned to queries of any further cluster like the "
            f"{len(people(divided.calibration))} of the {len(divided.calibration)} calibration "
            "queries, each cluster counted alike ("
        )


def test_the_numbers_say_how_many_clusters_there_are(clustered, divided):
    results = json.loads((clustered[0] / "results.json").read_text())
    assert results["cluster"] == "cluster"
    assert results["n_clusters"] == len(people(divided.calibration))
    assert results["n_test_clusters"] == len(people(divided.test))
    assert results["n_calibration"] == len(divided.calibration)
    assert (results["repeats"], results["repeats_by_delta"]) == (None, None)
    guarantees = dict.fromkeys(row["guarantee"] for row in results["others"])
    assert list(guarantees) == [
        *("miss, distinct labels", "recall", "false discovery"),
        *("miss, group north", "miss, group south", "miss, any mix of groups"),
    ]
    kinds = dict.fromkeys(part["kind"] for part in results["parts"])
    assert list(kinds) == ["uncertainty", "class", "group"]
    assert {part["low"] for part in results["parts"]} == {None}
    assert {part["high"] for part in results["parts"]} == {None}


def test_the_page_speaks_of_further_clusters_and_has_no_divisions(clustered, divided):
    page = (clustered[0] / "report.html").read_text(encoding="utf-8")
    said = " ".join(page.split())
    n, tests = len(people(divided.calibration)), len(people(divided.test))
    assert (
        f"With probability at least 0.9 over the {n} clusters (cluster) of the "
        f"{len(divided.calibration)} calibration queries, the returned set holds no true match for "
        "at most a fraction alpha of the queries of any further cluster like these, each cluster "
        f"counted alike. Measured on {len(divided.test)} test queries of {tests} others, counted "
        "likewise, that neither"
    ) in said
    sections = re.findall("<h2>(.*?)</h2>", page)
    assert "Risk and size" not in sections
    assert sections[:5] == [
        *("Other guarantees", "Choice of the score function", "Whom it serves less", "Sizes"),
        "Retrieval and uncertainty",
    ]
    _, table = said.split("<h2>Whom it serves less</h2>")
    table, _ = table.split("<h2>Sizes</h2>")
    assert "95% interval" not in table
    assert 'class="no"' not in table
    assert "Queries of one cluster depend on each other: these risks" in table
    assert "abstain=True" not in said
    for alt in ("risk over divisions against alpha", "mean set size over divisions against alpha"):
        assert f'alt="{alt}"' not in page
    assert 'alt="distribution of set sizes"' in page


def test_the_screen_speaks_of_further_clusters(clustered, divided):
    said = " ".join(clustered[1].split())
    n, tests = len(people(divided.calibration)), len(people(divided.test))
    assert (
        "With probability at least 0.9, a true match is missing from at most a fraction alpha of "
        f"the sets returned to queries of any further cluster like the {n} of the "
        f"{len(divided.calibration)} calibration queries, each cluster counted alike ("
    ) in said
    assert f"held-out queries of {tests} others, counted likewise:" in said
    assert "betting bound)" in said


@pytest.mark.usefixtures("undrawn")
def test_an_evaluation_measures_the_same_again(clustered, tmp_path):
    copy = shutil.copytree(clustered[0] / "retriever", tmp_path / "kept" / "retriever")
    evaluate_retriever(EvaluationConfig(str(copy), alphas=(0.01, 0.6, 0.8), delta=DELTA))
    first, second = (
        json.loads((folder / "results.json").read_text())
        for folder in (clustered[0], copy.parent / "evaluation")
    )
    for results in (first, second):
        del results["seconds"], results["score_function_comparison"]
    assert second == first


def test_their_sizes_are_not_compared_as_those_of_independent_queries(clustered, tmp_path, capsys):
    from rcir.cli import main as rcir_command

    assert RunResults.read(clustered[0] / TEST).parts == []
    copies = [shutil.copytree(clustered[0], tmp_path / name) for name in ("one", "two")]
    rcir_command(["compare", *map(str, copies)])
    assert "no certified sizes on test queries: one, two" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        rcir_command(["compare", "--choose", *map(str, copies)])
    assert re.match(
        r"error: the calibration queries of \S+one come in clusters: sizes are compared of indep",
        capsys.readouterr().err,
    )


@pytest.mark.usefixtures("undrawn")
def test_clusters_that_are_not_named_are_warned_of(run, capsys):
    calibrate(CalibrationConfig(str(run.path), "plain", "constant", depth=60, alphas=(0.6,)))
    said = capsys.readouterr().err
    assert re.match(r"warning: the \d+ calibration queries come in \d+ clusters \(cluster\)", said)
    assert "name it: --cluster cluster" in said
    assert rcir.load("plain/retriever").controllers[None].cluster is None


@pytest.mark.usefixtures("never_embedded")
def test_a_cluster_that_the_queries_do_not_have_is_refused(run, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--run", str(run.path), "--output", "refused", "--cluster", "video"])
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert "cluster is 'video', but the queries have no such attribute; they have" in said
    assert not Path("refused").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_retriever_that_was_extended_is_not_measured_on_what_may_have_extended_it(
    run, divided, tmp_path
):
    outcome = calibrate(
        CalibrationConfig(str(run.path), str(tmp_path / "plain"), "constant", alphas=(0.6,))
    )
    own = rcir.load(outcome.folder)
    with pytest.warns(UserWarning, match="name them with cluster='cluster'"):
        own.extend_calibration(own.search_labelled(outcome.splits.test))
    folder = rcir.retrieval.storage.save(own, tmp_path / "grown")
    with pytest.raises(
        InvalidData, match=r"calibration queries were added to .*: the test queries"
    ):
        evaluate_retriever(EvaluationConfig(str(folder), alphas=(0.6,)))
    assert not (tmp_path / "evaluation").exists()
