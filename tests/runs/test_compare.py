"""`rcir compare`: runs beside each other, and whether they differ by more than noise."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from calibration import CalibrationConfig, calibrate
from rcir.cli import main
from rcir.index import IndexConfig
from rcir.risk import Certified
from rcir.runs.folder import RunFolder
from rcir.runs.results import TEST, VALIDATION, RunResults
from training import train

ALPHAS = ("0.2", "0.3")
LEVELS = ["--alphas", *ALPHAS, "--delta", "0.05"]


@pytest.fixture(scope="module")
def calibrated(trained, tiny, tracking_uri, tmp_path_factory):
    """Two trainings, calibrated each in a folder of its own; the other is of half the size."""
    folder = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        patch.setattr("calibration.drawing.draw_figures", lambda *_: {})
        config = tiny("other", seed=4)
        other = train(replace(config, epochs=1, encoder=replace(config.encoder, dim=4)))
        for run, name in ((trained, "first"), (other, "second")):
            levels = {"alphas": (0.2, 0.3), "delta": 0.05}
            calibrate(CalibrationConfig(str(run.path), str(folder / name), **levels))
    return folder / "first", folder / "second"


def shown(capsys, *arguments):
    assert main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def compared(capsys, *arguments):
    return json.loads(shown(capsys, *arguments, "--json"))


def refused(capsys, *arguments):
    """The one line that the command ends with."""
    with pytest.raises(SystemExit) as stop:
        main(["compare", *map(str, arguments)])
    assert stop.value.code == 1
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


def measured(rank, on="validation", queries="q", scale=1.0, recall=0.5):
    """Of 400 queries that calibrate and 400 that are measured, all of them need this rank."""
    scores = np.full(400, (rank - 1) * scale, np.float32)
    candidate_scores = np.tile(np.arange(20, dtype=np.float32) * np.float32(scale), (400, 1))
    return RunResults(
        on,
        queries,
        [Certified(scores, candidate_scores)],
        {"recall_at_1": recall, "ece": 0.25},
        "constant",
    )


def a_run(folder, found=(), finished=True, **options):
    """A run in a folder, and what was measured of it."""
    folder.mkdir(parents=True)
    config = {"name": folder.name, "storage": str(folder.parent), **options}
    RunFolder(folder, config, "0" * 32, "sqlite:///none.db", finished).write()
    for one in found:
        one.write(folder / {"validation": VALIDATION, "test": TEST}[one.on])
    return folder


def a_sweep(folder, trials, alpha=0.1, delta=0.1):
    """A sweep of (state, rank that all queries need or None, options) in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for number, (state, rank, options) in enumerate(trials):
        found = () if rank is None else (measured(rank),)
        a_run(folder / f"trial-{number:03d}", found, state == "finished", **options)
        listed.append({"folders": [f"trial-{number:03d}"], "state": state, "number": number})
    written = {"config": {"alpha": alpha, "delta": delta}, "trials": listed}
    (folder / "sweep.json").write_text(json.dumps(written))
    return folder


def test_sizes_and_metrics_are_those_of_the_calibrations(calibrated, capsys):
    found = compared(capsys, *calibrated, *LEVELS)
    text = shown(capsys, *calibrated, *LEVELS)
    assert (found["split"], found["first"], found["delta"]) == ("test", "first", 0.05)
    assert "measured on test queries" in text
    for folder, run in zip(calibrated, found["runs"], strict=True):
        results = json.loads((folder / "results.json").read_text())
        assert run["recall_at_1"] == results["quality"]["recall_at_1"]
        assert run["ece"] == pytest.approx(results["quality"]["ece_btl_width_at_1"])
        assert run["score_function"] == results["rows"][0]["score_function"]
        (line,) = (x for x in text.splitlines() if x.split()[:2] == [folder.name, "calibrated"])
        assert f" {run['recall_at_1']:.3f} " in line
        for row in results["rows"]:
            size = run["sizes"][f"{row['alpha']:g}"]
            assert size["value"] == pytest.approx(row["mean_size"], rel=1e-12)
            assert size["low"] < size["value"] < size["high"]
            assert f" {rounded(row['mean_size'])} [{rounded(size['low'])}, " in line


def test_the_difference_is_paired_and_the_options_that_differ_are_named(calibrated, capsys):
    found = compared(capsys, *calibrated, *LEVELS)
    first, second = found["runs"]
    assert first["options"] == {"epochs": 4, "encoder.dim": 8}
    assert second["options"] == {"epochs": 1, "encoder.dim": 4}
    assert first["differences"] == {}
    for alpha in ALPHAS:
        difference = second["differences"][alpha]
        own = [run["sizes"][alpha] for run in (first, second)]
        assert difference["value"] == pytest.approx(own[1]["value"] - own[0]["value"])
        widths = [size["high"] - size["low"] for size in own]
        assert 0 < difference["high"] - difference["low"] < sum(widths)
        assert difference["beyond_noise"] == (not difference["low"] <= 0 <= difference["high"])


@pytest.mark.usefixtures("undrawn")
def test_depths_that_differ_are_named(calibrated, trained, tmp_path, capsys):
    calibrate(CalibrationConfig(str(trained.path), str(tmp_path / "deep"), depth=200))
    calibrate(CalibrationConfig(str(trained.path), str(tmp_path / "flat"), depth=50))
    found = compared(capsys, tmp_path / "deep", tmp_path / "flat", "--alphas", "0.3")
    assert [run["options"] for run in found["runs"]] == [
        {"calibration.depth": 200},
        {"calibration.depth": 50},
    ]


@pytest.mark.usefixtures("undrawn")
def test_indexes_and_score_functions_that_differ_are_named(trained, tmp_path, capsys):
    own = IndexConfig("tests.index.brute:BruteIndex", {"block": 50})
    for name, index, score_function in (
        ("flat", IndexConfig(), "quantile"),
        ("brute", own, "minmax"),
    ):
        options = {"index": index, "score_function": score_function}
        calibrate(CalibrationConfig(str(trained.path), str(tmp_path / name), **options))
    found = compared(capsys, tmp_path / "flat", tmp_path / "brute", "--alphas", "0.3")
    first, second = ({k: v for k, v in run["options"].items() if v} for run in found["runs"])
    assert first == {"calibration.score_function": "quantile", "calibration.index.kind": "flat"}
    assert second == {
        "calibration.score_function": "minmax",
        "calibration.index.kind": own.kind,
        "calibration.index.options.block": 50,
    }


def rounded(size):
    return f"{size:.2f}" if size < 10 else f"{size:.1f}"


def test_a_run_does_not_differ_from_itself(calibrated, capsys):
    first, _ = calibrated
    text = shown(capsys, first, first, *LEVELS)
    lines = [line.split() for line in text.splitlines() if "+0.00" in line]
    assert lines == [[str(first), *(["+0.00", "[+0.00,", "+0.00]"] * len(ALPHAS))]]
    assert "Options that differ" not in text


def test_the_options_of_a_calibration_elsewhere_are_not_known(calibrated, tmp_path, capsys):
    """Another machine has neither the run nor its MLflow run: sizes are shown all the same."""
    for folder in calibrated:
        shutil.copytree(folder, tmp_path / folder.name)
        path = tmp_path / folder.name / "retriever" / "retriever.json"
        path.write_text(json.dumps({"origin": {"run": "0" * 32}}))
    (tmp_path / "second" / "retriever" / "retriever.json").unlink()
    there = compared(capsys, *(tmp_path / folder.name for folder in calibrated), *LEVELS)
    here = compared(capsys, *calibrated, *LEVELS)
    for one, other in zip(there["runs"], here["runs"], strict=True):
        assert one["options"] == {}
        for name in ("name", "state", "recall_at_1", "sizes", "differences"):
            assert one[name] == other[name]


def test_a_training_is_found_by_its_folder_and_by_its_mlflow_id(trained, tracking_uri, capsys):
    by_folder = compared(capsys, trained.path, "--alphas", "0.9")
    assert compared(capsys, trained.mlflow_run, "--alphas", "0.9") == by_folder
    (run,) = by_folder["runs"]
    assert (by_folder["split"], run["name"], run["state"]) == ("validation", "tiny", "finished")
    logged = MlflowClient(tracking_uri).get_run(trained.mlflow_run).data.metrics
    assert run["recall_at_1"] == logged["chosen/recall_at_1"]
    assert run["ece"] == logged["chosen/ece"]
    assert run["sizes"]["0.9"]["value"] >= 1


def test_a_clear_difference_is_more_than_noise(tmp_path, capsys):
    folders = [a_run(tmp_path / f"rank{rank}", [measured(rank)]) for rank in (3, 5, 2)]
    found = compared(capsys, *folders, "--alphas", "0.1")
    assert [run["sizes"]["0.1"]["value"] for run in found["runs"]] == [3, 5, 2]
    differences = [run["differences"].get("0.1") for run in found["runs"]]
    assert differences[0] is None
    for difference, value in zip(differences[1:], (2, -1), strict=True):
        assert difference == {"value": value, "low": value, "high": value, "beyond_noise": True}
    text = shown(capsys, *folders, "--alphas", "0.1")
    assert "less that of rank3, paired on the same queries" in text
    ends = [line.split(maxsplit=1) for line in text.splitlines() if ".00] *" in line]
    assert [[name, " ".join(rest.split())] for name, rest in ends] == [
        ["rank5", "+2.00 [+2.00, +2.00] *"],
        ["rank2", "-1.00 [-1.00, -1.00] *"],
    ]


def test_of_few_queries_there_is_no_interval_and_the_screen_and_json_say_why(tmp_path, capsys):
    folders = []
    for rank in (3, 5):
        whole = measured(rank)
        few = [Certified(whole.parts[0].scores[:45], whole.parts[0].candidate_scores)]
        folders.append(a_run(tmp_path / f"rank{rank}", [replace(whole, parts=few)]))
    levels = ("--alphas", "0.05", "0.2")
    reason = (
        "no interval: 45 calibration queries allow no miss at alpha 0.05, so that one query "
        "decides the size (184 would give an interval)"
    )
    found = compared(capsys, *folders, *levels)
    assert found["notes"] == [reason]
    first, second = found["runs"]
    assert first["sizes"] == {
        "0.05": {"value": 3, "low": None, "high": None},
        "0.2": {"value": 3, "low": 3, "high": 3},
    }
    none = {"value": 2, "low": None, "high": None, "beyond_noise": False}
    assert second["differences"]["0.05"] == none
    assert second["differences"]["0.2"]["beyond_noise"]
    text = shown(capsys, *folders, *levels)
    assert reason in text
    assert "* is more than noise, of those without one nothing is known)" in text
    (line,) = (line for line in text.splitlines() if line.startswith("rank5") and "+" in line)
    assert line.split() == ["rank5", "+2.00", "(no", "interval)", "+2.00", "[+2.00,", "+2.00]", "*"]


def test_other_queries_are_said_to_differ_and_nothing_is_compared(tmp_path, capsys):
    folders = [
        a_run(tmp_path / name, [measured(rank, queries=queries)])
        for name, rank, queries in (("a", 3, "x"), ("b", 5, "y"), ("c", 2, "x"))
    ]
    text = shown(capsys, *folders, "--alphas", "0.1")
    assert "their validation queries differ (those with the same: a, c; b)" in text
    assert "noise, all else within it" not in text
    found = compared(capsys, *folders, "--alphas", "0.1")
    assert [run["sizes"]["0.1"]["value"] for run in found["runs"]] == [3, 5, 2]
    assert [run["differences"] for run in found["runs"]] == [{}, {}, {}]


def test_another_number_of_calibration_queries_is_another_set_of_queries(tmp_path, capsys):
    other = measured(5)
    fewer = [Certified(other.parts[0].scores[:300], other.parts[0].candidate_scores)]
    folders = [
        a_run(tmp_path / "a", [measured(3)]),
        a_run(tmp_path / "b", [replace(other, parts=fewer)]),
    ]
    assert "validation queries differ (those with the same: a; b)" in shown(capsys, *folders)


@pytest.mark.parametrize(
    ("tests", "split", "sizes"),
    [
        (("x", "x"), "test", [7, 8]),
        (("x", "y"), "validation", [3, 5]),
        (("x", None), "validation", [3, 5]),
    ],
)
def test_runs_are_compared_on_test_queries_where_these_are_the_same(
    tmp_path, capsys, tests, split, sizes
):
    folders = []
    for number, queries in enumerate(tests):
        found = [measured(3 + 2 * number)]
        if queries is not None:
            found.append(measured(7 + number, "test", queries))
        folders.append(a_run(tmp_path / str(number), found))
    found = compared(capsys, *folders, "--alphas", "0.1")
    assert found["split"] == split
    assert [run["sizes"]["0.1"]["value"] for run in found["runs"]] == sizes
    assert found["runs"][1]["differences"]["0.1"]["value"] == sizes[1] - sizes[0]


def test_test_queries_that_differ_are_shown_where_there_are_no_others(tmp_path, capsys):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        measured(3, "test", folder.name).write(folder / TEST)
    text = shown(capsys, *folders)
    assert "their test queries differ (those with the same: a; b)" in text
    assert text.count("3.00 [3.00, 3.00]") == 6


def test_a_sweep_is_its_trials_the_best_first(tmp_path, capsys):
    options = [{"loss": {"margin": margin}, "seed": 0} for margin in (0.1, 0.2, 0.3, 0.4)]
    states = ("finished", "failed", "stopped", "finished")
    trials = list(zip(states, (4, None, 9, 2), options, strict=True))
    folder = a_sweep(tmp_path / "sweep", trials)
    plain = a_run(tmp_path / "plain", [measured(3)], loss={"margin": 0.1}, seed=1)
    found = compared(capsys, folder, plain, "--alphas", "0.1")
    names = ["trial-003", "trial-000", "trial-002", "trial-001", "plain"]
    assert [run["name"] for run in found["runs"]] == names
    states = ["finished", "finished", "stopped", "failed", "finished"]
    assert [run["state"] for run in found["runs"]] == states
    margins = [run["options"]["loss.margin"] for run in found["runs"]]
    assert margins == [0.4, 0.1, 0.3, 0.2, 0.1]
    differences = [run["differences"].get("0.1", {}).get("value") for run in found["runs"]]
    assert differences == [None, 2, 7, None, 1]
    text = shown(capsys, folder, plain)
    (line,) = (line for line in text.splitlines() if line.startswith("trial-001  failed"))
    assert line.split()[2:] == ["-"] * 5
    assert "no certified sizes on validation queries: trial-001" in text
    assert "the first looks better than it is" in text
    assert "looks better" not in shown(capsys, plain)


def test_the_levels_of_the_sweep_decide_which_trial_is_best(tmp_path, capsys):
    """At 0.1 the first has smaller sets, at 0.3 the second."""
    easy, hard = np.repeat([0, 8], [200, 200]), np.repeat([0, 4], [100, 300])
    for alpha, names in ((0.1, ["trial-001", "trial-000"]), (0.7, ["trial-000", "trial-001"])):
        folder = a_sweep(tmp_path / str(alpha), [("finished", 1, {})] * 2, alpha)
        for number, scores in enumerate((easy, hard)):
            one = measured(1)
            part = Certified(scores.astype(np.float32), one.parts[0].candidate_scores)
            replace(one, parts=[part]).write(folder / f"trial-00{number}" / VALIDATION)
        found = compared(capsys, folder, "--alphas", "0.1")
        assert [run["name"] for run in found["runs"]] == names


def test_the_best_trial_is_the_one_that_the_sweep_says(tmp_path, capsys):
    """Of several seeds, it knows more than the first run shows."""
    folder = a_sweep(tmp_path, [("finished", 2, {}), ("finished", 3, {}), ("stopped", None, {})])
    written = json.loads((folder / "sweep.json").read_text())
    for trial, size in zip(written["trials"], (4.5, 3.5, 1.5), strict=True):
        trial["metrics"] = {"certified_size": size}
    (folder / "sweep.json").write_text(json.dumps(written))
    found = compared(capsys, folder, "--alphas", "0.1")["runs"]
    assert [run["name"] for run in found] == ["trial-001", "trial-000", "trial-002"]
    assert [run["sizes"].get("0.1", {}).get("value") for run in found] == [3, 2, None]


def test_twelve_trials_fit_into_a_hundred_columns(tmp_path, capsys):
    rng = np.random.default_rng(0)
    trials = []
    for number in range(12):
        mining = {"positive": ["farthest", "nearest"][number % 2], "negatives": "margin-violating"}
        rates = dict(zip(("lr", "weight_decay"), rng.uniform(1e-5, 1e-3, 2).tolist(), strict=True))
        loss = {"margin": float(rng.uniform()), "kl_scale": 1e-6, "prior_variance": 0.1 + number}
        options = {"mining": mining, "optimizer": rates, "loss": loss, "encoder": {"dim": number}}
        trials.append(("finished", 10 + number % 3, options))
    text = shown(capsys, a_sweep(tmp_path / "sweep", trials))
    tables = text[: text.index("the trials are in the order")]
    assert max(map(len, tables.splitlines())) <= 100
    assert "margin-violating" not in tables, "it is the same in all"
    for number in range(12):
        lines = [line for line in tables.splitlines() if f"trial-{number:03d}  " in line]
        assert len(lines) == 2 + (number > 0), (
            "one line in each table, the first without difference"
        )
        assert lines[0].count("[") == 3


def test_what_cannot_be_certified_has_no_size(tmp_path, capsys):
    served, unserved = measured(3), measured(3)
    unserved.parts[0].scores[:100] = np.inf
    folders = [
        a_run(tmp_path / "a", [served]),
        a_run(tmp_path / "b", [unserved]),
        a_run(tmp_path / "c", [replace(served, parts=[])]),
    ]
    found = compared(capsys, *folders, "--alphas", "0.1", "0.4")
    assert [sorted(run["sizes"]) for run in found["runs"]] == [["0.1", "0.4"], ["0.4"], []]
    assert [sorted(run["differences"]) for run in found["runs"]] == [[], ["0.4"], []]
    lines = shown(capsys, *folders, "--alphas", "0.1", "0.4").splitlines()
    assert [line.split("0.250")[1].split() for line in lines[3:6]] == [
        ["3.00", "[3.00,", "3.00]", "3.00", "[3.00,", "3.00]"],
        ["not", "certified", "3.00", "[3.00,", "3.00]"],
        ["-", "-"],
    ]


def test_metrics_that_are_missing_or_no_numbers_are_left_out(tmp_path, capsys):
    folder = a_run(tmp_path / "a", [replace(measured(3), metrics={"ece": float("nan")})])
    (run,) = compared(capsys, folder)["runs"]
    assert (run["recall_at_1"], run["ece"]) == (None, None)


def test_what_is_not_there_is_one_line(tmp_path, capsys):
    assert "nowhere is no folder, and MLflow has no such id" in refused(capsys, "nowhere")
    assert "holds no run (run.json, sweep.json or test.safetensors)" in refused(capsys, tmp_path)
    begun = a_run(tmp_path / "begun", finished=False)
    assert "nothing was measured of begun: finish the training" in refused(capsys, begun)
    assert "alpha is 2.0" in refused(capsys, begun, "--alphas", "2")
    assert "delta is 0.0" in refused(capsys, begun, "--delta", "0")
    (begun / VALIDATION).write_bytes(b"not this")
    assert "validation.safetensors is damaged" in refused(capsys, begun)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"trials": [], "alpha": 0.1}', '{"alpha": 1, "delta": 1, "trials": [1]}']
)
def test_a_damaged_sweep_is_one_line(tmp_path, capsys, content):
    (tmp_path / "sweep.json").write_text(content)
    assert "sweep.json is damaged" in refused(capsys, tmp_path)


def test_a_sweep_without_trials_is_one_line(tmp_path, capsys):
    assert "lists no trial" in refused(capsys, a_sweep(tmp_path / "sweep", []))


def test_a_comparison_imports_no_job():
    code = "import rcir.runs.compare, rcir.runs.compare_table, sys; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    names = {name.partition(".")[0] for name in process.stdout.split()}
    assert "rcir" in names
    assert names.isdisjoint({"training", "calibration", "tuning", "ray", "matplotlib"})


def test_compared_folders_stay_as_they_are(calibrated, capsys):
    before = {path: path.stat().st_mtime_ns for one in calibrated for path in one.rglob("*")}
    shown(capsys, *calibrated, *LEVELS)
    after = {path: path.stat().st_mtime_ns for one in calibrated for path in one.rglob("*")}
    assert after == before
    assert list(Path.cwd().iterdir()) == []
