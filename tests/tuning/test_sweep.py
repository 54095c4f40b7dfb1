"""A sweep from its start to what it leaves behind; one of its trials diverges."""

import csv
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from rcir.config import flatten, parse
from rcir.data import load_splits
from rcir.errors import InvalidConfig
from rcir.runs.folder import read_run
from rcir.runs.results import VALIDATION, RunResults
from training import TrainingConfig, train
from tuning import TuningConfig, sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]

ALPHA, DELTA = 0.15, 0.2
RATES = (1e-7, 1e20, 3e-3)  # nothing is learned, it diverges, something is learned


@pytest.fixture(scope="module")
def config(small):
    space = {"optimizer.lr": {"grid": list(RATES)}, "loss.margin": {"uniform": [0.05, 0.2]}}
    return TuningConfig(small("sweep"), space, trials=1, alpha=ALPHA, delta=DELTA)


@pytest.fixture(scope="module")
def records(ray_cluster, store, config):
    return sweep(config)


def named(records, rate):
    """The trial of a learning rate."""
    (found,) = [t for t in records.trials.values() if t.values["optimizer.lr"] == rate]
    return found


def test_trials_are_compared_by_the_size_they_certify_on_the_validation_images(records, certified):
    learned, unlearned = named(records, 3e-3), named(records, 1e-7)
    for trial in (learned, unlearned):
        assert (trial.state, trial.epochs, trial.reason) == ("finished", 2, "")
        expected = certified(records.folder / trial.name, ALPHA, DELTA)
        assert trial.certified_size == pytest.approx(expected)
    assert learned.certified_size < unlearned.certified_size
    assert records.ranked() == [learned, unlearned, named(records, 1e20)]


def test_the_other_numbers_of_a_trial_are_those_of_its_encoder(records, certified):
    trial = named(records, 3e-3)
    for alpha in (0.05, 0.1, 0.2):
        expected = certified(records.folder / trial.name, alpha, 0.1)
        assert trial.metrics.get(f"certified_size_{alpha:g}") == pytest.approx(expected)
    run = read_run(records.folder / trial.name)
    images = load_splits(run.data).validation
    vectors = run.encoder().embed(run.preprocessing(images.images)).vectors.numpy()
    apart = np.linalg.norm(vectors[:, None] - vectors, axis=2)
    np.fill_diagonal(apart, np.inf)
    matched = (images.labels[:, None] == images.labels).sum(1) > 1
    right = images.labels[apart.argmin(1)] == images.labels
    assert trial.metrics["recall_at_1"] == pytest.approx(right[matched].mean())


def test_a_trial_that_diverges_is_recorded_and_ends_nothing(records):
    trial = named(records, 1e20)
    assert trial.state == "failed"
    assert trial.reason.startswith("TrainingDiverged: ")
    assert trial.certified_size == np.inf
    assert records.finished  # it would diverge again
    assert not (records.folder / trial.name / "encoder.safetensors").exists()


def test_best_yaml_trains_what_the_best_trial_is(records):
    config = parse(TrainingConfig, ["--config", str(records.folder / "best.yaml")], "prog", "")
    best = records.folder / records.ranked()[0].name
    assert config.name == "sweep-best"
    assert config.optimizer.lr == 3e-3
    run = train(config)
    assert run.path == records.folder.parent / "sweep-best"
    found, expected = RunResults.read(run.path / VALIDATION), RunResults.read(best / VALIDATION)
    assert found.metrics == expected.metrics
    for ours, theirs in zip(found.parts, expected.parts, strict=True):
        np.testing.assert_array_equal(ours.scores, theirs.scores)
        np.testing.assert_array_equal(ours.candidate_scores, theirs.candidate_scores)


def test_a_sweep_is_one_run_in_mlflow_with_one_below_it_for_each_trial(
    records, config, store, runs_in
):
    runs = runs_in(store)
    runs.pop("sweep-best", None)  # of another test
    parent = runs.pop("sweep")
    assert parent.info.run_id == records.mlflow_run
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["rcir.sweep"] == "sweep"
    assert parent.data.tags["rcir.folder"] == str(records.folder)
    assert parent.data.params["space.optimizer.lr.grid"] == str(list(RATES))
    own = {name: value for name, value in asdict(config).items() if name != "training"}
    assert parent.data.params.keys() == flatten(own).keys()

    assert sorted(runs) == ["trial-000", "trial-001", "trial-002"]
    for trial in records.trials.values():
        run = runs[trial.name]
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.tags["rcir.sweep"] == "sweep"
        assert run.data.tags["rcir.trial"] == f"{trial.number:03d}"
        for name in ("optimizer.lr", "loss.margin"):
            assert run.data.params[name] == str(trial.values[name])
            assert run.data.params[f"sweep/{name}"] == str(trial.values[name])
        assert run.data.params["encoder.dim"] == "8"
        if trial.state == "failed":
            assert run.info.status == "FAILED"
            assert run.data.tags["rcir.state"] == f"failed: {trial.reason}"
            assert "sweep/certified_size" not in run.data.metrics
        else:
            assert run.info.status == "FINISHED"
            assert run.data.tags["rcir.state"] == "finished"
            assert run.data.metrics["sweep/certified_size"] == trial.certified_size
            assert run.data.metrics["sweep/recall_at_1"] == trial.metrics["recall_at_1"]
    best = records.ranked()[0]
    assert parent.data.tags["rcir.best"] == best.name
    assert parent.data.metrics["sweep/certified_size"] == best.certified_size


def test_table_figures_and_best_configuration_are_artifacts_of_the_sweep(records, store, tmp_path):
    client = MlflowClient(store)
    names = {file.path for file in client.list_artifacts(records.mlflow_run)}
    assert names == {"best.yaml", "figures", "sweep.json", "trials.csv"}
    figures = {file.path for file in client.list_artifacts(records.mlflow_run, "figures")}
    assert figures == {"figures/parallel_coordinates.svg", "figures/pareto.svg"}
    table = Path(client.download_artifacts(records.mlflow_run, "trials.csv", str(tmp_path)))
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [float(row["optimizer.lr"]) for row in rows] == [3e-3, 1e-7, 1e20]
    assert [row["state"] for row in rows] == ["finished", "finished", "failed"]
    assert float(rows[0]["certified_size"]) == named(records, 3e-3).certified_size
    assert rows[2]["certified_size"] == ""
    assert rows[2]["reason"] == named(records, 1e20).reason


def times(folder):
    """When each file was written last."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def nothing_starts(monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("it starts something")

    for name in ("_run", "start_sweep", "join_cluster", "publish_sweep", "load_splits"):
        monkeypatch.setattr(sys.modules["tuning.sweep"], name, start)


@pytest.mark.usefixtures("nothing_starts")
def test_a_finished_sweep_given_again_starts_nothing(records, config, monkeypatch):
    before = times(records.folder)
    again = sweep(config)
    assert (again.ranked(), again.mlflow_run) == (records.ranked(), records.mlflow_run)
    # How it is computed may differ.
    training = replace(config.training, num_workers=2, threads=2)
    assert sweep(replace(config, training=training, calibrate=True)).ranked() == records.ranked()
    assert times(records.folder) == before


@pytest.mark.usefixtures("nothing_starts")
def test_another_sweep_of_the_same_name_is_refused(records, config):
    before = times(records.folder)
    for changed, name in (
        (replace(config, alpha=0.2), "alpha"),
        (replace(config, seeds=2), "seeds"),
        (replace(config, space={"loss.margin": {"uniform": [0.1, 0.2]}}), "space.loss.margin"),
        (replace(config, training=replace(config.training, epochs=3)), "training.epochs"),
    ):
        with pytest.raises(InvalidConfig, match=rf"holds a sweep with another .*{name}"):
            sweep(changed)
    assert times(records.folder) == before


@pytest.mark.usefixtures("nothing_starts")
def test_a_sweep_does_not_go_into_the_folder_of_a_training(records, config):
    storage = str(records.folder)
    training = replace(config.training, name="trial-000", storage=storage)
    with pytest.raises(InvalidConfig, match="trial-000 holds a training run"):
        sweep(replace(config, training=training))


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"num_workers": 4}, "a trial needs 4 CPUs, and Ray's cluster has 3"),
        ({"num_workers": (1, 4)}, "a trial needs 4 CPUs"),
        (
            {"use_gpu": True},
            "a trial needs 1 CPUs and 1 GPUs, and Ray's cluster has 3 CPUs, 0 GPUs",
        ),
        ({"use_gpu": True, "num_workers": 2}, "a trial needs 2 GPUs"),
    ],
)
def test_what_the_cluster_has_not_is_refused_before_anything_is_written(
    config, store, runs_in, tmp_path, monkeypatch, resources, message
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    training = replace(config.training, name="large", storage=str(tmp_path / "runs"), **resources)
    before = runs_in(store).keys()
    with pytest.raises(InvalidConfig, match=message):
        sweep(replace(config, training=training))
    assert runs_in(store).keys() == before
    assert list(tmp_path.iterdir()) == []
