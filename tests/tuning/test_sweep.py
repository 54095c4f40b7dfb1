"""Sweeps from their start to what they leave behind; in the first, one trial diverges."""

import csv
import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import mlflow
import numpy as np
import pytest
import yaml
from mlflow import MlflowClient
from PIL import Image
from sklearn.datasets import load_digits

from calibration import CalibrationConfig, calibrate
from rcir.cli import main
from rcir.config import flatten, parse
from rcir.data import DataConfig, Preprocessing, load_splits
from rcir.errors import InvalidConfig, InvalidImage
from rcir.retrieval.retriever import Retriever
from rcir.runs.folder import read_run
from rcir.runs.results import VALIDATION, RunResults
from tests.methods import config_of
from tests.training.conftest import skip_figures
from tests.training.helpers import ON_RAY
from training import TrainingConfig, train
from tuning import TuningConfig, sweep

pytestmark = [pytest.mark.usefixtures("ray_cluster", "store"), *ON_RAY]

ALPHA, DELTA = 0.15, 0.2
RATES = (1e-7, 3e-3, 1e20)  # nothing is learned, something is learned, it diverges


@pytest.fixture(scope="module")
def config(small):
    space = {"optimizer.lr": {"grid": list(RATES)}, "loss.margin": {"uniform": [0.05, 0.2]}}
    return TuningConfig(small("sweep", epochs=1), space, trials=1, alpha=ALPHA, delta=DELTA)


@pytest.fixture(scope="module")
def records(ray_cluster, store, config):
    return sweep(config)


def trial_of(records, rate):
    """The trial of a learning rate."""
    (trial,) = [t for t in records.trials.values() if t.values["optimizer.lr"] == rate]
    return trial


def assert_same_results(first, second):
    """Two runs measured the same on the validation images."""
    ours, theirs = (RunResults.read(folder / VALIDATION) for folder in (first, second))
    assert ours.metrics == theirs.metrics
    assert ours.queries == theirs.queries
    for one, other in zip(ours.parts, theirs.parts, strict=True):
        np.testing.assert_array_equal(one.scores, other.scores)
        np.testing.assert_array_equal(one.candidate_scores, other.candidate_scores)


def test_trials_are_ranked_by_the_size_they_certify_on_the_validation_images(records, certified):
    learned, unlearned = trial_of(records, 3e-3), trial_of(records, 1e-7)
    for trial in (learned, unlearned):
        assert (trial.state, trial.epochs, trial.reason) == ("finished", 1, "")
        expected = certified(records.folder / trial.name, ALPHA, DELTA)
        assert trial.certified_size == pytest.approx(expected)
        for alpha in (0.05, 0.1, 0.2):
            expected = certified(records.folder / trial.name, alpha, 0.1)
            assert trial.metrics.get(f"certified_size_{alpha:g}") == pytest.approx(expected)
        results = RunResults.read(records.folder / trial.name / VALIDATION)
        assert trial.metrics["recall_at_1"] == results.metrics["recall_at_1"]
    assert learned.certified_size < unlearned.certified_size
    assert records.ranked() == [learned, unlearned, trial_of(records, 1e20)]


def test_a_trial_that_diverges_is_recorded_and_does_not_end_the_sweep(records):
    trial = trial_of(records, 1e20)
    assert trial.state == "failed"
    assert trial.reason.startswith("TrainingDiverged: ")
    assert trial.certified_size == np.inf
    assert records.finished  # it would diverge again
    assert not (records.folder / trial.name / "encoder.safetensors").exists()


def test_best_yaml_trains_what_the_best_trial_is(records, monkeypatch):
    skip_figures(monkeypatch)
    config = parse(TrainingConfig, ["--config", str(records.folder / "best.yaml")], "prog")
    assert config.name == "sweep-best"
    assert config.optimizer.lr == 3e-3
    run = train(config)
    assert run.path == records.folder.parent / "sweep-best"
    assert_same_results(run.path, records.folder / records.ranked()[0].name)


def test_a_sweep_is_one_mlflow_run_with_one_below_it_for_each_trial(
    records, config, store, runs_in
):
    parent = runs_in(store)["sweep"]
    assert parent.info.run_id == records.mlflow_run
    assert parent.info.status == "FINISHED"
    tags = {"rcir.folder": str(records.folder), "kind": "sweep", "dataset": "digits"}
    assert parent.data.tags.items() >= tags.items()
    options = {name: value for name, value in asdict(config).items() if name != "training"}
    assert parent.data.params.keys() == flatten(options).keys()

    runs = runs_in(store, records.mlflow_run)
    assert sorted(runs) == ["trial-000", "trial-001", "trial-002"]
    for trial in records.trials.values():
        run = runs[trial.name]
        for name in ("optimizer.lr", "loss.margin"):
            assert run.data.params[name] == str(trial.values[name])
            assert run.data.params[f"sweep/{name}"] == str(trial.values[name])
        metrics = run.data.metrics
        if trial.state == "failed":
            assert run.info.status == "FAILED"
            assert run.data.tags["rcir.state"] == f"failed: {trial.reason}"
            assert "sweep/certified_size" not in metrics
        else:
            assert run.info.status == "FINISHED"
            assert run.data.tags["rcir.state"] == "finished"
            assert metrics["sweep/certified_size"] == trial.certified_size
            assert metrics["sweep/recall_at_1"] == trial.metrics["recall_at_1"]
    best = records.ranked()[0]
    assert parent.data.tags["rcir.best"] == best.name
    assert parent.data.metrics["sweep/certified_size"] == best.certified_size


def test_table_and_best_configuration_are_artifacts(records, store, tmp_path):
    client = MlflowClient(store)
    names = {file.path for file in client.list_artifacts(records.mlflow_run)}
    assert names == {"best.yaml", "sweep.json", "trials.csv"}
    table = Path(client.download_artifacts(records.mlflow_run, "trials.csv", str(tmp_path)))
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [float(row["optimizer.lr"]) for row in rows] == [3e-3, 1e-7, 1e20]
    assert [row["state"] for row in rows] == ["finished", "finished", "failed"]
    assert float(rows[0]["certified_size"]) == trial_of(records, 3e-3).certified_size
    assert rows[2]["certified_size"] == ""
    assert rows[2]["reason"] == trial_of(records, 1e20).reason


def times(folder):
    """When each file was written last."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def nothing_starts(monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("it starts something")

    for name in ("_run", "start_sweep", "join_cluster", "publish", "load_splits"):
        monkeypatch.setattr(sys.modules["tuning.run"], name, start)


@pytest.mark.usefixtures("nothing_starts")
def test_a_finished_sweep_starts_nothing_again_and_another_one_is_refused(records, config):
    before = times(records.folder)
    again = sweep(config)
    assert (again.ranked(), again.mlflow_run) == (records.ranked(), records.mlflow_run)
    # How it is computed may differ.
    training = replace(config.training, num_workers=2, threads=2)
    assert sweep(replace(config, training=training, calibrate=True)).ranked() == records.ranked()
    for changed, name in (
        (replace(config, alpha=0.2), "alpha"),
        (replace(config, seeds=2), "seeds"),
        (replace(config, space={"loss.margin": {"uniform": [0.1, 0.2]}}), "space.loss.margin"),
        (replace(config, training=replace(config.training, epochs=3)), "training.epochs"),
    ):
        with pytest.raises(InvalidConfig, match=name):
            sweep(changed)
    # Nor does a sweep go into the folder of a training.
    training = replace(config.training, name="trial-000", storage=str(records.folder))
    with pytest.raises(InvalidConfig, match="training run"):
        sweep(replace(config, training=training))
    assert times(records.folder) == before


@pytest.mark.parametrize("resources", [{"num_workers": (1, 4)}, {"use_gpu": True}])
def test_a_trial_that_the_cluster_cannot_hold_is_refused_before_anything_is_written(
    records, config, store, runs_in, tmp_path, monkeypatch, resources
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    training = replace(config.training, name="large", storage=str(tmp_path / "runs"), **resources)
    before = runs_in(store, records.mlflow_run).keys()
    with pytest.raises(InvalidConfig, match="PU"):
        sweep(replace(config, training=training))
    assert runs_in(store, records.mlflow_run).keys() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_finalists_train_with_more_seeds_and_are_chosen_by_their_mean(
    small, runs_in, certified, capsys
):
    space = {"optimizer.lr": {"grid": [1e-7, 2e-3, 3e-3]}}
    training = small("finals", epochs=1)
    config = TuningConfig(training, space, 1, finalists=2, final_seeds=2, alpha=ALPHA, delta=DELTA)
    records = sweep(config)
    unlearned = trial_of(records, 1e-7)
    assert records.finished
    assert not unlearned.confirmed
    best, second, last = records.ranked()
    assert last == unlearned
    assert best.certified_size <= second.certified_size
    for trial in (best, second):
        folders = [records.folder / trial.name, records.folder / f"{trial.name}-seed-1"]
        sizes = [certified(folder, ALPHA, DELTA) for folder in folders]
        assert trial.confirmed
        assert trial.certified_size == pytest.approx(np.mean(sizes))
        deviation = trial.metrics["certified_size_deviation"]
        assert deviation == pytest.approx(np.std(sizes, ddof=1))
    assert f"{best.name}-seed-1" in runs_in(records.tracking_uri, records.mlflow_run)
    # Killed before one was confirmed, the next start trains what is missing, which is nothing here.
    records.trials[second.number] = replace(second, confirmed=False)
    records.finished = False
    records.write()
    capsys.readouterr()
    assert sweep(config).ranked() == [best, second, last]
    assert f"finalists: {second.name}\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "option", "values"),
    [
        ("deep-ensemble", "encoder.options.combination", ["distance", "aligned"]),
        ("tests.toy:Toy", "encoder.options.width", [4, 6]),
    ],
)
def test_trials_differ_by_an_option_of_their_method(method, option, values, small):
    encoder = config_of(method, dim=8)
    training = small(f"sweep-{method.replace(':', '-')}", epochs=1, encoder=encoder)
    records = sweep(TuningConfig(training, {option: {"grid": values}}, trials=1, alpha=0.3))
    trials = list(records.trials.values())
    assert {trial.state for trial in trials} == {"finished"}
    assert sorted(str(trial.values[option]) for trial in trials) == sorted(map(str, values))
    assert len({tuple(sorted(trial.metrics.items())) for trial in trials}) == len(values)


@pytest.mark.slow
def test_no_run_on_a_server_has_more_than_30_metrics(server, small, tmp_path):
    # More than 50 steps, so that losses of steps are logged.
    training = small("many", epochs=1, batch=4, storage=str(tmp_path))
    space = {"optimizer.lr": {"grid": [1e-3, 3e-3]}}
    records = sweep(TuningConfig(training, space, trials=1, seeds=2, alpha=ALPHA, delta=DELTA))
    best = records.ranked()[0].name
    calibrate(CalibrationConfig(str(records.folder / best), alphas=(0.2, 0.3)))
    six = config_of("deep-ensemble", dim=8, options={"members": 6})
    train(replace(training, name="ensemble", encoder=six, loss={}))

    def found(query):
        runs = mlflow.search_runs(
            experiment_names=["rcir"], filter_string=query, output_format="list"
        )
        return {run.info.run_name: run.data.metrics.keys() for run in runs}

    every = found("")
    assert len(every) == 1 + 2 * 2 + 1 + 1 + 6  # sweep, trials, calibration, ensemble, members
    assert max(map(len, every.values())) <= 30
    assert found("metrics.`sweep/certified_size` >= 1 and tags.kind = 'trial'").keys() == {
        *("trial-000", "trial-000-seed-1"),
        *("trial-001", "trial-001-seed-1"),
    }
    # The one with the most of them has each kind.
    (name,) = found(
        "metrics.`train/loss_step` > 0 and metrics.`certified/alpha_0.2/mean_size` >= 1 and "
        "metrics.`chosen/certified_size_0.2` >= 1 and metrics.`sweep/recall_at_1` > 0"
    )
    assert name == best
    assert found("metrics.`loss/member-4` > 0").keys() == {"ensemble"}
    assert not found("metrics.`loss/member-5` > 0")


@pytest.fixture
def pictures(tmp_path):
    """Handwritten digits as files, in the layout of a set that is published with its parts."""
    digits, rows = load_digits(), iter(np.random.default_rng(0).permutation(1797))
    # A third of the training images validates.
    for part, number in (("train", 600), ("gallery", 100), ("query", 200)):
        for row in (next(rows) for _ in range(number)):
            path = tmp_path / "pictures" / part / str(digits.target[row]) / f"{row}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((digits.images[row] * 15).astype(np.uint8)).save(path)
    return DataConfig("folder", str(tmp_path), options={"path": "pictures", "validation": 200})


@pytest.mark.slow
def test_a_sweep_reads_training_and_validation_images_alone(pictures, small, tmp_path):
    common = {"data": pictures, "preprocessing": Preprocessing((8, 8)), "storage": str(tmp_path)}
    space = {"optimizer.lr": {"grid": [1e-3, 3e-3]}}
    config = TuningConfig(small("before", **common), space, trials=1)
    before = sweep(config)

    splits = load_splits(pictures)
    others = [splits.gallery, splits.tuning, splits.calibration, splits.test]
    assert sum(map(len, others)) == 300
    for images in others:
        for path in images.images:
            path.write_text("no picture")
        with pytest.raises(InvalidImage, match="image"):
            config.training.preprocessing(images.images[:1])

    after = sweep(replace(config, training=small("after", **common)))
    assert [trial.state for trial in after.trials.values()] == ["finished", "finished"]
    for trial in after.trials.values():
        assert_same_results(after.folder / trial.name, before.folder / trial.name)


@pytest.mark.slow
def test_the_command_shows_a_sweep_and_calibrates_its_best_trial(tmp_path, capsys):
    parts = {"train": 300, "validation": 400, "gallery": 200, "tuning": 200, "test": 300}
    options = {
        "training": {
            **{"name": "sweep", "epochs": 2, "batch": 32},
            "data": {"options": {**parts, "calibration": 400}},
            "encoder": {"dim": 8},
        },
        "space": {"optimizer.lr": {"grid": [1e-7, 3e-3]}},
        **{"trials": 1, "alpha": 0.2},
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(options))
    arguments = ["tune", "--config", str(tmp_path / "sweep.yaml")]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    folder = tmp_path / "runs" / "sweep"
    stored = json.loads((folder / "sweep.json").read_text())
    best, other = sorted(stored["trials"], key=lambda trial: trial["metrics"]["certified_size"])
    assert best["values"]["optimizer.lr"] == 3e-3
    lines = output.splitlines()
    names = [trial["folders"][0] for trial in (best, other)]
    first, second = (next(line for line in lines if line.startswith(name)) for name in names)
    assert lines.index(first) < lines.index(second)
    assert f"{best['metrics']['certified_size']:.2f}" in first
    assert f"rcir calibrate --run {folder / names[0]}" in output
    assert not list(folder.rglob("retriever"))

    # Given again, the sweep has nothing left to train.
    assert main([*arguments, "--calibrate"]) == 0
    output = capsys.readouterr().out
    assert first in output
    rows = json.loads((folder / names[0] / "results.json").read_text())["rows"]
    (size,) = (row["mean_size"] for row in rows if row["alpha"] == 0.2)
    both = (best["metrics"]["certified_size"], size)
    (line,) = (line for line in output.splitlines() if line.startswith(f"{names[0]}, mean set"))
    assert [float(number) for number in re.findall(r"\d+\.\d\d", line)] == [
        pytest.approx(number, abs=0.005) for number in both
    ]
    logged = MlflowClient().get_run(stored["mlflow_run"]).data.metrics
    assert (logged["sweep/certified_size"], logged["sweep/test_size"]) == both
    run = read_run(folder / names[0])
    retriever, test = Retriever.load(run.path / "retriever"), load_splits(run.data).test
    answers = retriever.retrieve(list(test.images), alpha=0.3, delta=0.1)
    missed = [label not in one.labels for one, label in zip(answers, test.labels, strict=True)]
    assert 0 < np.mean(missed) < 0.3 + 3 * (0.3 * 0.7 / 300) ** 0.5
