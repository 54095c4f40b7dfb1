"""What MLflow is told, against a local store and against a real server."""

import os
import subprocess
import sys
from pathlib import Path

import mlflow
import numpy as np
import pytest
from filelock import FileLock
from mlflow import MlflowClient

import rcir
from calibration import CalibrationConfig, calibrate
from rcir import tracking
from rcir.data import load_splits
from rcir.errors import TrackingUnavailable
from rcir.files import owner
from rcir.registry.register import register
from rcir.runs.folder import RunFolder
from rcir.runs.trained_on import TrainedOn
from tests.kills import DEAD, Killed
from training import train
from training.folder import create_run
from tuning import Records, TuningConfig
from tuning.sweep import start_sweep

# Each waits, all imported, until the last of them is there.
START = """
import sys, time
from pathlib import Path
from rcir import tracking
from rcir.tracking.store import mlflow_package

mlflow_package()
mine, others = Path(sys.argv[1]), sys.argv[2:]
mine.touch()
while not all(map(Path.exists, map(Path, others))):
    time.sleep(0.001)
tracking.start_run(mine.name, {}, None)
"""


@pytest.fixture
def client():
    return MlflowClient(mlflow.get_tracking_uri())


def test_a_parameter_keeps_its_first_value(client):
    run = tracking.start_run("params", {})
    run.log_params({"a": 1, "b": None})
    run.log_params({"a": 2, "c": (3, 4)})
    assert client.get_run(run.id).data.params == {"a": "1", "b": "None", "c": "(3, 4)"}


def test_metrics_tags_and_files_arrive(client, tmp_path):
    run = tracking.start_run("all", {"given": "tag"})
    for step in (1, 2):
        run.log_metrics({"m": step / 2}, step)
    run.log_tags({"later": "tag"})
    run.log_figure("<svg>drawn</svg>", "drawn")
    (tmp_path / "one.txt").write_text("1")
    run.log_file(tmp_path / "one.txt")
    history = client.get_metric_history(run.id, "m")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 1.0)]
    tags = client.get_run(run.id).data.tags
    assert (tags["given"], tags["later"]) == ("tag", "tag")
    assert tracking.run_tag(run, "later") == "tag"
    assert tracking.run_tag(run, "never") is None
    assert {item.path for item in client.list_artifacts(run.id)} == {"figures", "one.txt"}
    drawn = client.download_artifacts(run.id, "figures/drawn.svg", str(tmp_path))
    assert Path(drawn).read_text() == "<svg>drawn</svg>"


def test_more_metrics_than_a_call_takes_arrive_all(client):
    """MLflow refuses more than 1,000 in one call."""
    run = tracking.start_run("many", {})
    given = {f"m{number}": number / 8 for number in range(1001)}
    run.log_metrics(given)
    assert client.get_run(run.id).data.metrics == given


def test_a_part_is_below_its_whole_in_the_same_store(client, monkeypatch):
    parent = tracking.start_run("whole", {})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///elsewhere.db")
    child = tracking.start_run("part", {}, parent)
    assert child.uri == parent.uri
    assert client.get_run(child.id).data.tags["mlflow.parentRunId"] == parent.id


@pytest.mark.parametrize(
    ("error", "status"), [(None, "FINISHED"), (OSError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_the_status_says_how_a_run_ended(client, error, status):
    run = tracking.start_run("status", {})
    if error is None:
        with run.active():
            assert client.get_run(run.id).info.status == "RUNNING"
    else:
        with pytest.raises(error), run.active():
            raise error
    assert client.get_run(run.id).info.status == status


def test_a_run_that_another_process_ended_stays_as_it_is(client):
    run = tracking.start_run("stopped", {})

    def stopped():
        client.set_terminated(run.id, "KILLED")
        raise OSError

    with pytest.raises(OSError), run.active():
        stopped()
    assert client.get_run(run.id).info.status == "KILLED"


def test_an_id_that_mlflow_does_not_know_is_no_run():
    assert tracking.find_tracked_run("0123456789abcdef0123456789abcdef") is None
    run = tracking.start_run("known", {})
    assert tracking.find_tracked_run(run.id).id == run.id


@pytest.mark.slow
@pytest.mark.distributed
def test_a_retriever_comes_back_from_a_server_as_it_was_calibrated(server, tiny):
    run = train(tiny(epochs=1))
    outcome = calibrate(CalibrationConfig(run.mlflow_run))
    loaded = rcir.load(f"runs:/{outcome.mlflow_run}/retriever")
    local = rcir.load(outcome.folder)
    queries = list(outcome.splits.test.images[:20])
    for found, expected in zip(
        loaded.retrieve(queries, 0.2, 0.1), local.retrieve(queries, 0.2, 0.1), strict=True
    ):
        assert found.ids == expected.ids
        np.testing.assert_array_equal(found.distances, expected.distances)
        assert found.guarantee == expected.guarantee

    client = MlflowClient(server.address)
    stored = client.get_run(run.mlflow_run)
    assert stored.info.status == "FINISHED"
    assert stored.data.params["data.options.train"] == "300"
    recall = outcome.evaluation.quality.numbers["recall_at_1"]
    measured = client.get_run(outcome.mlflow_run).data.metrics
    assert measured["test/recall_at_1"] == recall
    paths = {item.path for item in client.list_artifacts(run.mlflow_run)}
    assert paths == {"checkpoint", "figures"}
    paths = {item.path for item in client.list_artifacts(outcome.mlflow_run)}
    assert paths == {"figures", "report.html", "results.json"}
    paths = {item.path for item in client.list_artifacts(outcome.mlflow_run, "retriever")}
    assert {
        "retriever/MLmodel",
        "retriever/artifacts",
    } < paths  # the model, and in it the retriever
    version = register(outcome.mlflow_run, "from-a-server", "champion")
    assert rcir.load(version.uri).ids.tolist() == local.ids.tolist()
    with pytest.raises(rcir.NoRetriever, match="runs:/nonsense/retriever"):
        rcir.load("runs:/nonsense/retriever")


@pytest.mark.parametrize("uri", ["./mlruns", "foo://bar"])
def test_a_store_that_mlflow_refuses_is_named_with_what_to_do(uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(TrackingUnavailable, match=r"MLFLOW_TRACKING_URI to another"):
        tracking.start_run("refused", {})


def test_a_relative_store_is_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    run = tracking.start_run("here", {})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run.log_metrics({"seen": 1.0})
    assert (tmp_path / "mlflow.db").is_file()
    assert not (tmp_path / "elsewhere" / "mlflow.db").exists()


def test_the_git_revision_is_tracked_whatever_was_started():
    root = Path(tracking.__file__).parents[1]
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("the code is in no git checkout")
    run = tracking.start_run("revision", {})
    assert tracking.run_tag(run, "mlflow.source.git.commit") == head.stdout.strip()


def test_runs_of_dead_processes_are_marked_as_killed_at_the_next_start(client, monkeypatch):
    """Not those of living processes, of other hosts, or of an earlier version; nor what ended."""
    living = tracking.start_run("living", {})
    host, _, rest = owner().partition("-")
    begun = {}
    for name, process in (("dead", DEAD), ("other host", f"{int(host, 16) ^ 1:08x}-{rest}")):
        with monkeypatch.context() as patch:
            patch.setattr("rcir.tracking.runs.owner", lambda process=process: process)
            begun[name] = tracking.start_run(name, {})
    client.delete_tag(living.id, "rcir.process")
    ended = tracking.start_run("ended", {})
    ended.end("FAILED")
    again = tracking.start_run("living too", {})
    status = {
        run.info.run_name: run.info.status
        for run in client.search_runs([client.get_experiment_by_name("rcir").experiment_id])
    }
    assert status["dead"] == "KILLED"
    assert {status[name] for name in ("living", "living too", "other host")} == {"RUNNING"}
    assert status["ended"] == "FAILED"
    with begun["dead"].active():  # it is taken up by this process
        tracking.start_run("meanwhile", {})
        assert client.get_run(begun["dead"].id).info.status == "RUNNING"
    assert client.get_run(begun["dead"].id).info.status == "FINISHED"
    for run in (living, again, begun["other host"]):
        run.end("FINISHED")


def killed_before_noting(kind, start, monkeypatch):
    """Die where MLflow has made a run, and no folder says yet which it is."""

    def killed(_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("rcir.tracking.runs.owner", lambda: DEAD)
        patch.setattr(kind, "write", killed)
        with pytest.raises(Killed):
            start()


def test_a_sweep_killed_at_its_start_has_one_run(client, tiny, monkeypatch, tmp_path):
    config = TuningConfig(tiny("swept", storage=str(tmp_path)), {"optimizer.lr": {"grid": [1e-3]}})
    folder = tmp_path / "swept"
    folder.mkdir()
    killed_before_noting(Records, lambda: start_sweep(config, folder), monkeypatch)
    records = start_sweep(config, folder)
    experiment = client.get_experiment_by_name("rcir").experiment_id
    (found,) = client.search_runs([experiment], "tags.`rcir.sweep` = 'swept'")
    assert found.info.run_id == records.mlflow_run
    assert [path.name for path in folder.iterdir()] == ["sweep.json"]


def test_a_training_killed_at_its_start_has_one_run(client, tiny, monkeypatch, tmp_path):
    config = tiny("once", storage=str(tmp_path))
    trained_on = TrainedOn.of(load_splits(config.data))
    for name in ("once", "another"):
        (tmp_path / name).mkdir()
    killed_before_noting(RunFolder, lambda: create_run(config, None, trained_on), monkeypatch)
    run = create_run(config, None, trained_on)
    folder = str(tmp_path / "once")
    experiment = client.get_experiment_by_name("rcir").experiment_id
    (found,) = client.search_runs([experiment], f"tags.`rcir.folder` = '{folder}'")
    assert found.info.run_id == run.mlflow_run
    assert sorted(path.name for path in (tmp_path / "once").iterdir()) == [
        "run.json",
        "trained_on.json",
    ]
    with run.tracked.active():
        assert client.get_run(run.mlflow_run).info.status == "RUNNING"
    other = create_run(tiny("another", storage=str(tmp_path)), None, trained_on)
    assert other.mlflow_run != run.mlflow_run


def test_a_store_that_stays_locked_is_not_waited_for_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr("rcir.tracking.store.LOCK_TIMEOUT", 0.1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'held.db'}")
    with FileLock(tmp_path / ".held.db.lock"):
        assert tracking.start_run("held", {}).status == "RUNNING"


@pytest.mark.slow
def test_processes_that_start_together_share_a_new_store(tmp_path):
    store = f"sqlite:///{tmp_path / 'new.db'}"
    marks = [str(tmp_path / name) for name in ("one", "two", "three")]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", START, mark, *marks],
            env=os.environ | {"MLFLOW_TRACKING_URI": store},
            stderr=subprocess.PIPE,
            text=True,
        )
        for mark in marks
    ]
    said = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    client = MlflowClient(store)
    (experiment,) = client.search_experiments(filter_string="name = 'rcir'")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name for run in runs} == {"one", "two", "three"}
