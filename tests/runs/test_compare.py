"""`rcir compare`: runs beside each other, and whether they differ by more than noise."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from rcir.risk import Certified
from rcir.runs.folder import RunFolder
from rcir.runs.results import TEST, VALIDATION, RunResults
from rcir.store.folder import current_version
from tests.runs.conftest import BRUTE

ALPHAS = ("0.3", "0.4")
LEVELS = ("--alpha", *ALPHAS)


def measured(rank, on="validation", queries="q", recall=0.5):
    """Results where each of 400 calibration and of 400 other queries needs so many candidates."""
    scores = np.full(400, rank - 1, np.float32)
    part = Certified(scores, np.tile(np.arange(20, dtype=np.float32), (400, 1)))
    metrics = {"recall_at_1": recall, "ece": 0.25}
    return RunResults(on, queries, [part], metrics, "constant")


def make_run(folder, results=(), finished=True, **options):
    """A run in a folder, with what was measured of it."""
    folder.mkdir(parents=True)
    config = {"name": folder.name, "storage": str(folder.parent), **options}
    RunFolder(folder, config, "0" * 32, "sqlite:///none.db", finished).write()
    for one in results:
        one.write(folder / {"validation": VALIDATION, "test": TEST}[one.on])
    return folder


def make_sweep(folder, trials, alpha=0.1, delta=0.1):
    """A sweep of (state, rank that all queries need or None, options) in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, (state, rank, options) in enumerate(trials):
        results = () if rank is None else (measured(rank),)
        make_run(folder / f"trial-{number:03d}", results, state == "finished", **options)
        rows.append({"folders": [f"trial-{number:03d}"], "state": state, "number": number})
    content = {"config": {"alpha": alpha, "delta": delta}, "trials": rows}
    (folder / "sweep.json").write_text(json.dumps(content))
    return folder


def names(comparison):
    return [run["name"] for run in comparison["runs"]]


def sizes(comparison, alpha="0.1"):
    return [run["sizes"].get(alpha, {}).get("value") for run in comparison["runs"]]


def differences(comparison, alpha="0.1"):
    return [run["differences"].get(alpha, {}).get("value") for run in comparison["runs"]]


# Calibrations and trainings


def test_sizes_and_metrics_are_those_of_the_calibrations(calibrations, compare):
    before = {path: path.stat().st_mtime_ns for one in calibrations for path in one.rglob("*")}
    comparison = compare.json(*calibrations, *LEVELS)
    assert comparison["split"] == "test"
    for folder, run in zip(calibrations, comparison["runs"], strict=True):
        results = json.loads((folder / "results.json").read_text())
        assert run["recall_at_1"] == results["quality"]["recall_at_1"]
        assert run["score_function"] == results["rows"][0]["score_function"]
        for row in results["rows"]:
            size = run["sizes"][f"{row['alpha']:g}"]
            assert size["value"] == pytest.approx(row["mean_size"])
            assert size["low"] <= size["value"] <= size["high"]
    after = {path: path.stat().st_mtime_ns for one in calibrations for path in one.rglob("*")}
    assert after == before
    assert list(Path.cwd().iterdir()) == []


def test_differences_are_paired_and_options_that_differ_are_named(calibrations, compare):
    one, two, three = calibrations
    first, second = compare.json(one, two, *LEVELS)["runs"]
    assert first["options"] == {"epochs": 4, "encoder.dim": 8}
    assert second["options"] == {"epochs": 1, "encoder.dim": 4}
    assert first["differences"] == {}
    for alpha in ALPHAS:
        difference = second["differences"][alpha]
        values = [run["sizes"][alpha]["value"] for run in (first, second)]
        assert difference["value"] == pytest.approx(values[1] - values[0])
        assert difference["beyond_noise"] == (not difference["low"] <= 0 <= difference["high"])
    first, second = compare.json(one, three, *LEVELS)["runs"]
    assert {name: value for name, value in second["options"].items() if value} == {
        "calibration.depth": 150,
        "calibration.score_function": "constant",
        "calibration.index.kind": BRUTE.kind,
        "calibration.index.options.block": 50,
    }
    assert first["options"]["calibration.score_function"] == "quantile"
    first, second = compare.json(one, one, *LEVELS)["runs"]
    for alpha in ALPHAS:
        difference = {"value": 0, "low": 0, "high": 0, "beyond_noise": False}
        assert second["differences"][alpha] == difference
    assert second["options"] == {}


def test_the_options_of_a_calibration_from_another_machine_are_unknown(copies, compare):
    """That machine has neither the run nor its MLflow run; sizes are compared all the same."""
    here = compare.json(*copies[:2], *LEVELS)
    for folder in copies[:2]:
        path = current_version(folder / "retriever") / "retriever.json"
        path.write_text(json.dumps({"origin": {"run": "0" * 32}}))
    path.write_text(json.dumps({"origin": {"run": "x" * 300}}))  # the name cannot be looked up
    there = compare.json(*copies[:2], *LEVELS)
    for one, other in zip(there["runs"], here["runs"], strict=True):
        assert one["options"] == {}
        for name in ("name", "state", "recall_at_1", "sizes", "differences"):
            assert one[name] == other[name]


def test_damaged_validation_results_of_a_calibrated_training_are_refused(copies, compare, tmp_path):
    training = make_run(tmp_path / "training", [measured(3)])
    path = current_version(copies[0] / "retriever") / "retriever.json"
    path.write_text(json.dumps({"origin": {"run": str(training)}}))
    assert compare.json(*copies[:2], *LEVELS)["split"] == "test"
    (training / VALIDATION).write_bytes(b"damaged")
    assert str(training / VALIDATION) in compare.refused(*copies[:2], *LEVELS)


def test_a_training_is_found_by_its_folder_and_by_its_mlflow_run(trained, tracking_uri, compare):
    comparison = compare.json(trained.path, "--alpha", "0.9")
    assert compare.json(trained.mlflow_run, "--alpha", "0.9") == comparison
    (run,) = comparison["runs"]
    assert (comparison["split"], run["name"], run["state"]) == ("validation", "tiny", "finished")
    metrics = MlflowClient(tracking_uri).get_run(trained.mlflow_run).data.metrics
    assert run["recall_at_1"] == metrics["chosen/recall_at_1"]
    assert run["ece"] == metrics["chosen/ece"]


# Noise


def test_a_clear_difference_is_beyond_noise(tmp_path, compare):
    folders = [make_run(tmp_path / f"rank{rank}", [measured(rank)]) for rank in (3, 5, 2)]
    comparison = compare.json(*folders, "--alpha", "0.1")
    assert sizes(comparison) == [3, 5, 2]
    for run, value in zip(comparison["runs"][1:], (2, -1), strict=True):
        expected = {"value": value, "low": value, "high": value, "beyond_noise": True}
        assert run["differences"]["0.1"] == expected
    screen = compare.screen(*folders, "--alpha", "0.1")
    lines = [" ".join(line.split()) for line in screen.splitlines() if ".00] *" in line]
    assert lines == ["rank5 +2.00 [+2.00, +2.00] *", "rank2 -1.00 [-1.00, -1.00] *"]


def test_few_queries_give_no_interval_and_the_reason_is_reported(tmp_path, compare):
    folders = []
    for rank in (3, 5):
        results = measured(rank)
        part = Certified(results.parts[0].scores[:45], results.parts[0].candidate_scores)
        folders.append(make_run(tmp_path / f"rank{rank}", [replace(results, parts=[part])]))
    levels = ("--alpha", "0.05", "0.2")
    comparison = compare.json(*folders, *levels)
    first, second = comparison["runs"]
    assert first["sizes"] == {
        "0.05": {"value": 3, "low": None, "high": None},
        "0.2": {"value": 3, "low": 3, "high": 3},
    }
    unknown = {"value": 2, "low": None, "high": None, "beyond_noise": False}
    assert second["differences"]["0.05"] == unknown
    assert second["differences"]["0.2"]["beyond_noise"]
    (note,) = comparison["notes"]
    # Beyond 45 queries: the fewest of which one may miss, by the binomial distribution.
    assert "45 calibration queries" in note
    assert "184" in note
    assert note in compare.screen(*folders, *levels)


def test_an_unattainable_level_has_no_size(tmp_path, compare):
    served, unserved = measured(3), measured(3)
    unserved.parts[0].scores[:100] = np.inf
    folders = [
        make_run(tmp_path / "a", [served]),
        make_run(tmp_path / "b", [unserved]),
        make_run(tmp_path / "c", [replace(served, parts=[])]),
    ]
    comparison = compare.json(*folders, "--alpha", "0.1", "0.4")
    assert (sizes(comparison), sizes(comparison, "0.4")) == ([3, None, None], [3, 3, None])
    assert differences(comparison) == [None, None, None]
    assert differences(comparison, "0.4") == [None, 0, None]
    assert "not certified" in compare.screen(*folders, "--alpha", "0.1", "0.4")


# Queries


def test_runs_on_other_queries_are_shown_but_not_compared(tmp_path, compare):
    fewer = measured(2, queries="x")
    part = Certified(fewer.parts[0].scores[:300], fewer.parts[0].candidate_scores)
    folders = [
        make_run(tmp_path / "a", [measured(3, queries="x")]),
        make_run(tmp_path / "b", [measured(5, queries="y")]),
        make_run(tmp_path / "c", [measured(2, queries="x")]),
        make_run(tmp_path / "d", [replace(fewer, parts=[part])]),
    ]
    nan = replace(measured(4), metrics={"ece": float("nan")})
    folders.append(make_run(tmp_path / "e", [nan]))
    comparison = compare.json(*folders, "--alpha", "0.1")
    metrics = [(run["recall_at_1"], run["ece"]) for run in comparison["runs"]]
    assert metrics == [(0.5, 0.25)] * 4 + [(None, None)]
    assert sizes(comparison) == [3, 5, 2, 2, 4]
    assert differences(comparison) == [None] * 5
    assert any("a, c; b; d" in note for note in comparison["notes"])


@pytest.mark.parametrize(
    ("tests", "split", "expected"),
    [
        (("x", "x"), "test", [7, 8]),
        (("x", "y"), "validation", [3, 5]),
        (("x", None), "validation", [3, 5]),
    ],
)
def test_runs_are_compared_on_test_queries_that_they_share(
    tmp_path, compare, tests, split, expected
):
    folders = []
    for number, queries in enumerate(tests):
        results = [measured(3 + 2 * number)]
        if queries is not None:
            results.append(measured(7 + number, "test", queries))
        folders.append(make_run(tmp_path / str(number), results))
    comparison = compare.json(*folders, "--alpha", "0.1")
    assert comparison["split"] == split
    assert sizes(comparison) == expected
    assert differences(comparison)[1] == expected[1] - expected[0]


# Sweeps


def test_a_sweep_is_its_trials_the_best_first(tmp_path, compare):
    options = [{"loss": {"margin": margin}, "seed": 0} for margin in (0.1, 0.2, 0.3, 0.4)]
    states = ("finished", "failed", "stopped", "finished")
    trials = list(zip(states, (4, None, 9, 2), options, strict=True))
    folder = make_sweep(tmp_path / "sweep", trials)
    plain = make_run(tmp_path / "plain", [measured(3)], loss={"margin": 0.1}, seed=1)
    comparison = compare.json(folder, plain, "--alpha", "0.1")
    assert names(comparison) == ["trial-003", "trial-000", "trial-002", "trial-001", "plain"]
    states = [run["state"] for run in comparison["runs"]]
    assert states == ["finished", "finished", "stopped", "failed", "finished"]
    margins = [run["options"]["loss.margin"] for run in comparison["runs"]]
    assert margins == [0.4, 0.1, 0.3, 0.2, 0.1]
    assert differences(comparison) == [None, 2, 7, None, 1]
    assert "looks better" in compare.screen(folder, plain)
    assert "looks better" not in compare.screen(plain)


def test_the_levels_or_metrics_of_the_sweep_decide_which_trial_is_best(tmp_path, compare):
    """At 0.1 the second has smaller sets, at 0.7 the first."""
    easy, hard = np.repeat([0, 8], [200, 200]), np.repeat([0, 4], [100, 300])
    for alpha, order in ((0.1, ["trial-001", "trial-000"]), (0.7, ["trial-000", "trial-001"])):
        folder = make_sweep(tmp_path / str(alpha), [("finished", 1, {})] * 2, alpha)
        for number, scores in enumerate((easy, hard)):
            results = measured(1)
            part = Certified(scores.astype(np.float32), results.parts[0].candidate_scores)
            replace(results, parts=[part]).write(folder / f"trial-00{number}" / VALIDATION)
        assert names(compare.json(folder, "--alpha", "0.1")) == order
    # Metrics are means over several seeds, of which the run shows the first.
    content = json.loads((folder / "sweep.json").read_text())
    for trial, size in zip(content["trials"], (4.5, 3.5), strict=True):
        trial["metrics"] = {"certified_size": size}
    (folder / "sweep.json").write_text(json.dumps(content))
    assert names(compare.json(folder, "--alpha", "0.1")) == ["trial-001", "trial-000"]


# Refusals


def test_runs_that_cannot_be_compared_are_refused(tmp_path, compare):
    assert "not a folder" in compare.refused("nowhere")
    assert "no run" in compare.refused(tmp_path)
    begun = make_run(tmp_path / "begun", finished=False)
    assert "nothing was measured" in compare.refused(begun)
    assert "alpha is 2.0" in compare.refused(begun, "--alpha", "2")
    assert "delta is 0.0" in compare.refused(begun, "--delta", "0")
    (begun / VALIDATION).write_bytes(b"not this")
    assert "damaged" in compare.refused(begun)
    assert "no trial" in compare.refused(make_sweep(tmp_path / "sweep", []))
    for content in ("", "[]", '{"trials": []}', '{"alpha": 1, "delta": 1, "trials": [1]}'):
        (tmp_path / "sweep.json").write_text(content)
        assert "damaged" in compare.refused(tmp_path)
