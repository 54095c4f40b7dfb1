"""Other score functions, bounds and encoders; requests that cannot be met; what is refused."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from scipy.stats import binom

import rcir
from calibration import CalibrationConfig, calibrate, print_table
from calibration.__main__ import main
from rcir.cli import main as rcir_command
from rcir.data import load_splits
from rcir.encoders import EncoderConfig, batches, embedder
from rcir.errors import CorruptRetriever, InvalidConfig, InvalidData
from training import train


def calibrated(run, output="output", **options):
    return calibrate(CalibrationConfig(str(run.path), output, **options))


@pytest.mark.usefixtures("undrawn")
def test_constant_sizes_are_the_same_for_all_and_equal_the_one_to_beat(trained):
    outcome = calibrated(trained, score_function="constant", alphas=(0.2, 0.3))
    others = outcome.evaluation.others
    assert {row.score_function for row in others} == {"constant"}
    for row in (*outcome.evaluation.rows, *(row for row in others if row.constant_size)):
        if row.guarantee == "miss":
            assert row.mean_size == row.constant_size == row.threshold + 1
        assert row.mean_size == pytest.approx(row.constant_size)
        assert row.score_function == "constant"
    answers = rcir.load(outcome.folder).retrieve(list(outcome.splits.test.images[:9]), 0.3, 0.1)
    assert len({answer.size for answer in answers}) == 1


@pytest.mark.usefixtures("undrawn")
def test_quantile_sizes_depend_on_the_order_of_uncertainties_alone(trained):
    outcome = calibrated(trained, score_function="quantile", alphas=(0.3,))
    retriever = outcome.retriever
    sample = np.sort(retriever.search(outcome.splits.tuning.images).uncertainty)
    (row,) = outcome.evaluation.rows
    # Whatever rounding does to the uncertainty of a picture: a thousandth.
    below = [np.sum(sample <= 1.001 * value) for value in outcome.test.uncertainty]
    share = np.maximum(below, 1) / 300
    # Threshold pays for K images if it is at least the threshold that asks for them, but for a
    # thousandth.
    expected = (np.arange(200) / share[:, None] <= row.threshold * (1 + 1e-3)).sum(axis=1)
    assert row.mean_size == pytest.approx(expected.mean())


@pytest.mark.usefixtures("undrawn")
def test_hoeffding_allows_fewer_misses_than_the_exact_bound(trained):
    rows = [
        calibrated(trained, bound=bound, alphas=(0.3,)).evaluation.rows[0]
        for bound in ("binomial", "hoeffding")
    ]
    assert rows[1].threshold > rows[0].threshold
    assert [row.bound for row in rows] == ["binomial", "hoeffding"]
    loaded = rcir.load("output/retriever")
    assert loaded.controllers[None].bound == "hoeffding"


@pytest.mark.usefixtures("undrawn")
def test_group_and_score_function_are_named_on_the_command_line(trained, capsys):
    command = ["--run", str(trained.path), "--output", "grouped", "--alphas", "[0.3]"]
    assert (
        main([*command, "--group", "occluded", "--score_function", "learned", "--delta", "0.2"])
        == 0
    )
    printed = re.sub(r"[^\w.,-]+", " ", capsys.readouterr().out)
    assert "learned sizes, binomial bound, 300 calibration queries" in printed
    assert "miss, group False 0.3 " in printed
    assert "miss, group True 0.3 " in printed
    assert "was chosen" not in printed
    splits = load_splits(trained.data)
    occluded = splits.calibration.attributes["occluded"]
    loaded = rcir.load("grouped/retriever")
    for group in ("True", "False"):
        guarantee = loaded.retrieve(splits.test.images[0], 0.3, 0.2, group=group).guarantee
        assert (guarantee.group, guarantee.score_function) == (group, "learned")
        assert guarantee.n_calibration == np.sum(occluded == (group == "True"))
    rows = json.loads(Path("grouped/results.json").read_text())["others"]
    # Who is the first match says nothing of the others: these risks have a score of their own.
    own = {"recall", "false discovery"}
    assert {row["score_function"] for row in rows if row["guarantee"] not in own} == {"learned"}
    assert {row["score_function"] for row in rows if row["guarantee"] in own} == {
        "match-probability"
    }
    assert [row["guarantee"] for row in rows[-3:]] == [
        *("miss, group False", "miss, group True", "miss, any mix of groups")
    ]


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--group", "camera"], 1, "no attribute 'camera'; they have occluded"),
        (["--score_function", "best"], 2, "score_function"),
        (["--bound", "chernoff"], 2, "bound"),
    ],
    ids=str,
)
def test_groups_score_functions_and_bounds_that_do_not_exist_are_named(
    trained, capsys, options, status, said
):
    with pytest.raises(SystemExit) as stop:
        main(["--run", str(trained.path), "--output", "refused", *options])
    assert stop.value.code == status
    assert said in capsys.readouterr().err
    assert not Path("refused").exists()


@pytest.mark.usefixtures("undrawn")
def test_queries_in_clusters_are_warned_of(trained, capsys, monkeypatch):
    calibrated(trained, score_function="constant")
    assert capsys.readouterr().err == ""

    def in_clusters(config, *_):
        splits = load_splits(config)
        hands = {**splits.calibration.attributes, "hand": np.arange(300) % 12}
        queries = replace(splits.calibration, attributes=hands, cluster="hand")
        return replace(splits, calibration=queries)

    monkeypatch.setattr("calibration.pipeline.load_splits", in_clusters)
    calibrated(trained, score_function="constant")
    said = "warning: the 300 calibration queries come in 12 clusters (hand)"
    assert capsys.readouterr().err.startswith(said)


def test_by_default_the_score_function_with_the_smallest_sets_is_taken(chosen):
    """Smallest on average over the levels, in ratio to equal sizes, and never above them."""
    evaluation = chosen.evaluation
    constant = evaluation.comparison["constant"]
    assert set(constant) == {0.2, 0.3}
    ratios = {
        name: np.array([sizes[alpha] / constant[alpha] for alpha in constant])
        for name, sizes in evaluation.comparison.items()
    }
    allowed = {name: np.prod(each) for name, each in ratios.items() if each.max() <= 1}
    taken = min(allowed, key=allowed.get)
    assert {row.score_function for row in evaluation.rows} == {taken}
    assert rcir.load(chosen.folder).controllers[None].score_function.name == taken
    results = json.loads((chosen.folder.parent / "results.json").read_text())
    assert results["score_function_comparison"] == {
        name: {str(alpha): size for alpha, size in sizes.items()}
        for name, sizes in evaluation.comparison.items()
    }


@pytest.mark.parametrize("name", ["constant", "minmax", "quantile"])
def test_what_score_functions_are_compared_by_is_cross_fitted_on_the_tuning_split(chosen, name):
    """Every fifth query is sized by what the others say; the calibration queries have no part."""
    splits = chosen.splits
    found = chosen.retriever.search(splits.tuning.images)
    relevant = splits.gallery.labels[found.positions] == splits.tuning.labels[:, None]
    ranks = np.where(relevant.any(1), relevant.argmax(1) + 1.0, np.inf)
    scale = np.ones(300)
    for fold in range(5):
        inside = np.arange(300) % 5 == fold
        others, own = found.uncertainty[~inside], found.uncertainty[inside]
        if name == "minmax":
            scale[inside] = np.clip((own - others.min()) / np.ptp(others), 1 / 240, 1)
        elif name == "quantile":
            scale[inside] = [max(1, np.sum(others <= 1.001 * value)) / 240 for value in own]
    prices = (ranks - 1) / scale
    for alpha, size in chosen.evaluation.comparison[name].items():
        threshold = next(
            threshold
            for threshold in np.unique(prices)
            if binom.cdf(np.sum(prices > threshold), 300, alpha) <= 0.1
        )
        paid = np.arange(200) / scale[:, None] <= threshold * (1 + 1e-3)
        assert size == pytest.approx(paid.sum(axis=1).mean())


@pytest.mark.usefixtures("undrawn")
def test_an_encoder_without_uncertainty_calibrates_by_its_nearest_distance(tiny):
    run = train(tiny("plain", epochs=1, encoder=EncoderConfig("deterministic", dim=8)))
    outcome = calibrated(run, alphas=(0.4,), uncertainty="own")
    gallery = outcome.retriever
    query = outcome.splits.test.images[:1]
    nearest = gallery.search(query).distances[0, 0]
    answer = rcir.load(outcome.folder).retrieve(query[0], 0.4, 0.1)
    assert answer.uncertainty == pytest.approx(nearest**2 / 2, rel=1e-4)
    assert outcome.evaluation.rows[0].threshold is not None
    assert 0 < outcome.evaluation.quality.numbers["auroc_miss"] < 1


def test_a_report_of_nothing_certified_is_still_a_report(trained):
    outcome = calibrated(trained, alphas=(0.001, 0.002))
    assert all(row.threshold is None for row in outcome.evaluation.rows)
    page = outcome.report.read_text()
    assert all(row.threshold is None for row in outcome.evaluation.others)
    # Two levels of the miss risk, and of five other guarantees.
    assert page.count('class="no"') == 2 + 2 * 5
    assert "With probability at least" not in page
    said = " ".join(page.split())
    assert "With 300 calibration queries, nothing is certified with probability 0.9." in said
    # (1 - 0.002)**n <= 0.1 from n = 1151 on.
    assert "Of the largest alpha: alpha = 0.002 at delta = 0.1 cannot be certified" in said
    assert "The most certain queries" not in page
    with pytest.raises(rcir.RiskUnattainable):
        rcir.load(outcome.folder).retrieve(outcome.splits.test.images[0], 0.001, 0.1)
    rows = json.loads((outcome.report.parent / "results.json").read_text())["rows"]
    assert {row["threshold"] for row in rows} == {None}


@pytest.mark.usefixtures("undrawn")
def test_an_index_of_ones_own_is_named_on_the_command_line(trained):
    own = ("--index.kind", "tests.index.brute:BruteIndex", "--index.options", '{"block": 50}')
    assert main(["--run", str(trained.path), "--output", "own", "--alphas", "[0.3]", *own]) == 0
    loaded = rcir.load("own/retriever")
    assert type(loaded.index).__name__ == "BruteIndex"
    assert loaded.index.options.block == 50


@pytest.mark.usefixtures("undrawn")
def test_where_nothing_is_certified_the_screen_says_why_and_the_status_is_3(trained, capsys):
    command = ["--run", str(trained.path), "--output", "none", "--depth", "3"]
    assert main([*command, "--alphas", "[0.001]", "--score_function", "constant"]) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "With probability at least" not in printed
    assert "Nothing is certified with probability 0.9" in printed
    assert "search deeper than 3 candidates" in printed
    results = json.loads(Path("none/results.json").read_text())
    assert f"{results['beyond_depth']} of 300 test queries have no true match within" in printed
    assert results["rows"][0]["refusal"] in printed
    with pytest.raises(SystemExit) as stop:
        rcir_command(["evaluate", "--retriever", "none/retriever", "--alphas", "0.001"])
    assert stop.value.code == 3


@pytest.mark.usefixtures("undrawn")
def test_a_shallow_search_leaves_queries_unmatched_and_says_so(trained):
    outcome = calibrated(trained, depth=3, alphas=(0.1,))
    unmatched = np.isinf(outcome.test.ranks).sum()
    assert outcome.evaluation.beyond_depth == unmatched > 30
    assert outcome.evaluation.rows[0].threshold is None
    page = outcome.report.read_text()
    assert f"{unmatched} of 300 test queries have no true match within the search depth" in page
    assert "search deeper (depth)" in page


def test_a_run_of_its_own_in_mlflow_gets_retriever_report_and_numbers(trained, tracking_uri):
    outcome = calibrated(trained, alphas=(0.2,))
    again = calibrated(trained, alphas=(0.3,))
    client = MlflowClient(tracking_uri)
    run = client.get_run(outcome.mlflow_run)
    assert run.data.tags["mlflow.parentRunId"] == trained.mlflow_run
    assert (run.info.status, run.data.params["alphas"]) == ("FINISHED", "(0.2,)")
    metrics = run.data.metrics
    assert not any("alpha-0.3/threshold" in name for name in metrics)
    assert "test/alpha-0.3/threshold" in client.get_run(again.mlflow_run).data.metrics
    assert not any("test/" in name for name in client.get_run(trained.mlflow_run).data.metrics)
    (row,) = outcome.evaluation.rows
    assert metrics["test/recall_at_1"] == outcome.evaluation.quality.numbers["recall_at_1"]
    assert metrics["test/alpha-0.2/threshold"] == row.threshold
    assert metrics["test/alpha-0.2/mean_size"] == row.mean_size
    figures = {item.path for item in client.list_artifacts(outcome.mlflow_run, "figures")}
    assert {f"figures/{name}.svg" for name in ("risk", "size", "sizes", "reliability")} <= figures
    loaded = rcir.load(f"runs:/{outcome.mlflow_run}/retriever")
    assert loaded.fingerprints() == outcome.retriever.fingerprints()


@pytest.mark.usefixtures("undrawn")
def test_a_run_is_named_by_its_mlflow_id_as_well(trained, capsys):
    assert main(["--run", trained.mlflow_run, "--output", "by-id", "--alphas", "[0.3]"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "retriever: by-id/retriever" in printed
    assert rcir.load("by-id/retriever").controllers[None].miss().n_calibration == 300


@pytest.mark.usefixtures("undrawn")
def test_without_an_output_everything_lands_in_the_run(trained, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(trained.path, moved)
    outcome = calibrate(CalibrationConfig(str(moved), alphas=(0.3,)))
    assert outcome.folder == moved / "retriever"
    added = {path.name for path in moved.iterdir()} - {path.name for path in trained.path.iterdir()}
    assert added == {"retriever", "report.html", "results.json", "test.safetensors"}


def test_a_run_that_is_not_finished_is_refused(trained, tmp_path):
    unfinished = replace(trained, path=tmp_path, finished=False)
    unfinished.write()
    with pytest.raises(InvalidData, match="not finished"):
        calibrated(unfinished)
    assert not (tmp_path / "output").exists()


@pytest.mark.usefixtures("never_embedded")
def test_a_place_that_holds_something_else_is_left_alone(trained, tmp_path):
    place = tmp_path / "output" / "retriever"
    place.mkdir(parents=True)
    (place / "thesis.txt").write_text("mine")
    with pytest.raises(CorruptRetriever, match="is left alone"):
        calibrated(trained)
    assert {path.name for path in place.parent.iterdir()} == {"retriever"}
    assert [path.name for path in place.iterdir()] == ["thesis.txt"]
    assert (place / "thesis.txt").read_text() == "mine"


@pytest.mark.usefixtures("undrawn")
def test_an_earlier_retriever_is_replaced_as_a_whole(trained):
    first = calibrated(trained, score_function="quantile", alphas=(0.3,))
    second = calibrated(trained, score_function="constant", alphas=(0.3,))
    assert first.folder == second.folder
    assert rcir.load(second.folder).controllers[None].score_function.name == "constant"
    assert {path.name for path in second.folder.parent.iterdir()} == {
        *("retriever", "report.html", "results.json", "test.safetensors")
    }


@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_calibration_embeds_what_is_missing(trained, monkeypatch, capsys):
    output = Path("output")
    blocks = []
    fill = batches.embed_block

    def interrupted(encoder, preprocessing, images, batch):
        if len(blocks) == 7:
            raise KeyboardInterrupt
        blocks.append(len(images))
        return fill(encoder, preprocessing, images, batch)

    monkeypatch.setattr(batches, "CHUNK", 100)
    with monkeypatch.context() as patch:
        patch.setattr(embedder, "embed_block", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calibrated(trained, alphas=(0.3,))
    # Three blocks of the gallery, three of the tuning split, one of the calibration split.
    assert [path.name for path in output.iterdir()] == ["embeddings"]
    assert len(list((output / "embeddings").iterdir())) == 7
    rest = []
    monkeypatch.setattr(
        embedder, "embed_block", lambda *given: rest.append(len(given[2])) or fill(*given)
    )
    monkeypatch.setattr("calibration.progress.LONG", 0)
    capsys.readouterr()
    again = calibrated(trained, alphas=(0.3,))
    assert rest == [100] * 5
    written = {"retriever", "report.html", "results.json", "test.safetensors"}
    assert {path.name for path in output.iterdir()} == written
    shown = re.sub(r"  [\d.]+ s$", "", capsys.readouterr().out, flags=re.MULTILINE)
    assert shown.splitlines() == [
        "gallery: 300 images embedded (300 of them before)",
        "tuning queries: 300 images embedded (300 of them before)",
        "calibration queries: 300 images embedded (100 of them before)",
        "test queries: 300 images embedded",
    ]
    monkeypatch.setattr(batches, "CHUNK", 1000)
    whole = calibrated(trained, "whole", alphas=(0.3,))
    assert whole.retriever.fingerprints() == again.retriever.fingerprints()
    assert whole.evaluation.rows == again.evaluation.rows


@pytest.mark.usefixtures("undrawn")
def test_gallery_and_queries_are_embedded_by_as_many_workers_as_asked(trained, monkeypatch):
    asked = []

    def embed_on_replicas(encoder, preprocessing, blocks, count, use_gpu, batch):
        asked.append((sum(map(len, blocks.values())), count, use_gpu))
        for number, images in reversed(blocks.items()):
            yield number, batches.embed_block(encoder, preprocessing, images, batch)

    command = ["--run", str(trained.path), "--output", "output", "--alphas", "[0.3]"]
    with monkeypatch.context() as patch:
        patch.setattr("rcir.encoders.replicas.embed_on_replicas", embed_on_replicas)
        patch.setattr(batches, "CHUNK", 100)
        assert main([*command, "--num_workers", "3", "--use_gpu", "true"]) == 0
    assert asked == [(300, 3, True)] * 4
    alone = calibrated(trained, "alone", alphas=(0.3,))
    loaded = rcir.load("output/retriever")
    assert loaded.fingerprints() == alone.retriever.fingerprints()


@pytest.mark.usefixtures("never_embedded")
def test_workers_that_cannot_be_are_refused(trained, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InvalidConfig, match="num_workers is -1"):
        calibrated(trained, num_workers=-1)
    with pytest.raises(InvalidConfig, match="no CUDA device"):
        calibrated(trained, use_gpu=True)
    assert not Path("output").exists()


@pytest.mark.parametrize("name", ["report.html", "test.safetensors"])
def test_a_file_of_something_else_is_left_alone(trained, tmp_path, name):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / name).write_text("mine")
    with pytest.raises(InvalidData, match=f"{name} of something else"):
        calibrated(trained)
    assert [path.name for path in (tmp_path / "output").iterdir()] == [name]
    assert (tmp_path / "output" / name).read_text() == "mine"


@pytest.mark.usefixtures("never_embedded")
def test_an_output_that_is_occupied_is_refused_before_anything_is_embedded(trained, tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    (output / "results.json").write_text("[]")
    with pytest.raises(InvalidData, match=r"results.json of something else"):
        calibrated(trained)
    with pytest.raises(InvalidData, match=r"results.json is a file"):
        calibrated(trained, output=str(output / "results.json"))
    assert (output / "results.json").read_text() == "[]"


@pytest.mark.usefixtures("never_embedded")
def test_other_data_that_do_not_exist_are_refused_before_anything_is_embedded(trained):
    with pytest.raises(InvalidConfig, match="'birdsong' is unknown"):
        calibrated(trained, ood="birdsong")
    assert not Path("output").exists()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("kind", ["own", "cosine", "vote"])
def test_sizes_go_by_the_uncertainty_that_is_asked_for(trained, kind, capsys):
    outcome = calibrated(trained, uncertainty=kind, score_function="minmax", alphas=(0.4,))
    numbers = outcome.evaluation.quality.numbers
    assert numbers["auroc_miss"] == numbers[f"auroc_miss_{kind}"]
    print_table(outcome.evaluation)
    shown = capsys.readouterr().out
    assert f"Sizes go by the uncertainty {kind!r}" in shown
    assert f"{kind} {numbers['auroc_miss']:.3f}" in shown
    assert ("no better than chance" in shown) == (numbers["auroc_miss"] < 0.55)
    loaded = rcir.load(outcome.folder)
    image = outcome.splits.test.images[3]
    answer = loaded.retrieve(image, 0.4, 0.1)
    assert answer.uncertainty == pytest.approx(outcome.test.uncertainty[3], rel=1e-4, abs=1e-6)
