"""Tracking of runs with MLflow, in a local store and on a real server."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from urllib.parse import parse_qs

import mlflow
import numpy as np
import pytest
from filelock import FileLock
from mlflow import MlflowClient
from sqlalchemy import make_url

import rcir
from calibration import CalibrationConfig, calibrate
from rcir import tracking
from rcir.cli import main
from rcir.data import load_splits
from rcir.errors import TrackingUnavailable, UntrustedFolder
from rcir.files import owner
from rcir.registry import register
from rcir.runs.folder import RunFolder, TrainedOn
from rcir.tracking import MetricQueue, without_credentials
from rcir.tracking.runs import SHORT_WAITS, settings
from tests.kills import DEAD, Killed
from training import train
from training.run import create_run

# Each process imports everything, and waits for the others.
START = """
import sys, time
from pathlib import Path
from rcir import tracking
from rcir.tracking.runs import mlflow_package

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


def test_first_value_of_a_parameter_is_kept(client):
    run = tracking.start_run("params", {})
    run.log_params({"a": 1, "b": None})
    run.log_params({"a": 2, "c": (3, 4)})
    assert client.get_run(run.id).data.params == {"a": "1", "b": "None", "c": "(3, 4)"}


def test_metrics_tags_and_files_are_logged(client, tmp_path):
    run = tracking.start_run("all", {"first": "tag"})
    for step in (1, 2):
        run.log_metrics({"m": step / 2}, step)
    many = {f"m{number}": number / 8 for number in range(1001)}  # one call takes at most 1,000
    run.log_metrics(many)
    run.log_tags({"later": "tag"})
    run.log_figure("<svg>figure</svg>", "figure")
    (tmp_path / "one.txt").write_text("1")
    run.log_file(tmp_path / "one.txt")
    history = client.get_metric_history(run.id, "m")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 1.0)]
    data = client.get_run(run.id).data
    assert data.metrics == many | {"m": 1.0}
    assert (data.tags["first"], data.tags["later"]) == ("tag", "tag")
    assert run.tag("later") == "tag"
    assert run.tag("never") is None
    assert {item.path for item in client.list_artifacts(run.id)} == {"figures", "one.txt"}
    figure = client.download_artifacts(run.id, "figures/figure.svg", str(tmp_path))
    assert Path(figure).read_text() == "<svg>figure</svg>"


def test_child_run_is_in_the_store_of_its_parent(client, monkeypatch):
    parent = tracking.start_run("whole", {})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///elsewhere.db")
    child = tracking.start_run("part", {}, parent)
    assert tracking.table_link([parent, tracking.start_run("alone", {})], "loss") is None
    assert child.uri == parent.uri
    assert client.get_run(child.id).data.tags["mlflow.parentRunId"] == parent.id


@pytest.mark.parametrize(
    ("error", "status"), [(None, "FINISHED"), (OSError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_status_states_how_a_run_ended(client, error, status):
    run = tracking.start_run("status", {})
    with pytest.raises(error) if error else nullcontext(), run.active():
        assert client.get_run(run.id).info.status == "RUNNING"
        if error:
            raise error
    assert client.get_run(run.id).info.status == status


def test_the_load_of_the_machine_is_logged_if_mlflow_is_told_to(client, monkeypatch):
    pytest.importorskip("psutil")
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    run = tracking.start_run("load", {})
    until = time.monotonic() + 60
    with run.active():
        while not client.get_run(run.id).data.metrics and time.monotonic() < until:
            time.sleep(0.1)
    data = client.get_run(run.id)
    assert data.info.status == "FINISHED"
    assert 0 <= data.data.metrics["system/cpu_utilization_percentage"] <= 100
    assert all(name.startswith("system/") for name in data.data.metrics)


def test_options_of_mlflow_hold_until_the_last_thread_that_set_them_is_done(monkeypatch):
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "9")
    first, second = settings(SHORT_WAITS), settings(SHORT_WAITS)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "10"
    second.__exit__(None, None, None)
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "9"


def test_status_set_by_another_process_is_kept(client):
    run = tracking.start_run("stopped", {})
    with pytest.raises(OSError), run.active():  # noqa: PT012
        client.set_terminated(run.id, "KILLED")
        raise OSError
    assert tracking.find_tracked_run(run.id).status == "KILLED"
    assert tracking.find_tracked_run("0123456789abcdef0123456789abcdef") is None


@pytest.mark.slow
@pytest.mark.distributed
def test_retriever_loaded_from_a_server_equals_the_local_one(server, tiny, capsys):
    run = train(tiny(epochs=1))
    outcome = calibrate(CalibrationConfig(run.mlflow_run))
    loaded = rcir.load(f"runs:/{outcome.mlflow_run}/retriever")
    local = rcir.load(outcome.folder)
    queries = list(outcome.splits.data.test.images[:20])
    for answer, expected in zip(
        loaded.retrieve(queries, 0.2, 0.1), local.retrieve(queries, 0.2, 0.1), strict=True
    ):
        assert answer.ids == expected.ids
        np.testing.assert_array_equal(answer.distances, expected.distances)
        assert answer.guarantee == expected.guarantee

    client = MlflowClient(server.address)
    stored = client.get_run(run.mlflow_run)
    assert stored.info.status == "FINISHED"
    assert stored.data.params["data.options.train"] == "300"
    recall = outcome.evaluation.quality.numbers["recall_at_1"]
    assert client.get_run(outcome.mlflow_run).data.metrics["quality/recall_at_1"] == recall
    paths = {item.path for item in client.list_artifacts(run.mlflow_run)}
    assert "checkpoint" in paths
    paths = {item.path for item in client.list_artifacts(outcome.mlflow_run)}
    assert {"report.html", "results.json"} <= paths
    version = register(outcome.mlflow_run, "from-a-server", "champion")
    assert rcir.load(version.uri).ids.tolist() == local.ids.tolist()
    with pytest.raises(rcir.NoRetriever, match="nonsense"):
        rcir.load("runs:/nonsense/retriever")

    other = calibrate(CalibrationConfig(run.mlflow_run, "other", score_function="constant"))
    assert main(["compare", str(run.path), "other"]) == 0
    (link,) = re.findall(r"In MLflow: (\S+)", capsys.readouterr().out)
    page, _, query = link.partition("?")
    experiment = stored.info.experiment_id
    assert page == f"{server.address}/#/experiments/{experiment}/runs"
    values = {name: value for name, (value,) in parse_qs(query).items()}
    assert values["orderByAsc"] == "true"
    # MLflow's own search, of which its table is a view, finds these runs in this order.
    order, metric = [f"{values['orderByKey']} ASC"], re.findall("`(.*)`", values["orderByKey"])[0]
    found = client.search_runs([experiment], values["searchFilter"], order_by=order)
    assert {each.info.run_id for each in found} == {outcome.mlflow_run, other.mlflow_run}
    sizes = [each.data.metrics[metric] for each in found]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("uri", ["./mlruns", "foo://bar"])
def test_store_that_mlflow_refuses_is_an_error_that_names_the_variable(uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(TrackingUnavailable, match="MLFLOW_TRACKING_URI"):
        tracking.start_run("refused", {})


def restore(command):
    """Run one of MLflow's commands in this process; its whole command line takes seconds."""
    _, group, *arguments = command.split()
    import_module(f"mlflow.{group}").commands(arguments, standalone_mode=False)


def test_a_deleted_experiment_is_named_with_the_command_that_restores_it(
    tmp_path, monkeypatch, new_store
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_store(tmp_path / "deleted.db"))
    client = MlflowClient(mlflow.get_tracking_uri())
    run = tracking.start_run("before", {})
    experiment = client.get_experiment_by_name("rcir").experiment_id
    client.delete_experiment(experiment)
    command = f"mlflow experiments restore --experiment-id {experiment}"
    for act in (
        lambda: tracking.start_run("new", {}),
        lambda: tracking.start_run("part", {}, run),
        tracking.require_experiment,
        run.require_active,
        lambda: run.log_metrics({"loss": 1.0}),
        lambda: run.end("FINISHED"),
    ):
        with pytest.raises(TrackingUnavailable, match=command):
            act()
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "another")
    elsewhere = tracking.start_run("new", {})
    part = tracking.start_run("part", {}, elsewhere)
    another = client.get_experiment_by_name("another").experiment_id
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    part_of_part = tracking.start_run("part of part", {}, part)
    runs = (elsewhere, part, part_of_part)
    assert {client.get_run(each.id).info.experiment_id for each in runs} == {another}
    restore(command)
    run.log_metrics({"loss": 1.0})
    assert client.get_run(run.id).data.metrics == {"loss": 1.0}


def test_a_deleted_run_is_named_with_the_command_that_restores_it(client):
    run = tracking.start_run("deleted", {})
    client.delete_run(run.id)
    command = f"mlflow runs restore --run-id {run.id}"
    for act in (
        run.require_active,
        lambda: run.log_params({"lr": 1}),
        lambda: run.log_tags({"a": "b"}),
        lambda: run.end("FINISHED"),
    ):
        with pytest.raises(TrackingUnavailable, match=command):
            act()
    restore(command)
    run.log_params({"lr": 1})
    assert client.get_run(run.id).data.params == {"lr": "1"}


def test_calibration_of_a_deleted_run_fails_before_anything_is_computed(client, tmp_path):
    run = tracking.start_run("deleted", {})
    client.delete_run(run.id)
    RunFolder(tmp_path, {}, run.id, run.uri, finished=True).write()
    with pytest.raises(TrackingUnavailable, match=f"restore --run-id {run.id}"):
        calibrate(CalibrationConfig(str(tmp_path), str(tmp_path / "calibrated")))


@pytest.mark.parametrize("kind", [HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN])
def test_a_server_that_refuses_the_account_is_not_said_to_be_down(kind, monkeypatch):
    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(kind)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as refusing:
        threading.Thread(target=refusing.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{refusing.server_port}")
        with pytest.raises(TrackingUnavailable, match="MLFLOW_TRACKING_USERNAME"):
            tracking.start_run("refused", {})
        refusing.shutdown()


@pytest.mark.parametrize(
    "address",
    [
        "https://s3cret@example.org",
        "http://user:s3cret@@example.org",
        "http://user:%40s3cret@example.org/a@b",
        "postgresql://user:x/s3cret@example.org/runs",
        "mysql://user:s3cret#x@example.org:3306/runs",
        "postgresql://user@example.org/runs?sslmode=require&password=s3cret",
    ],
)
def test_addresses_are_shown_and_stored_without_credentials(address):
    shown = without_credentials(address)
    assert "s3cret" not in shown
    parts, expected = make_url(shown), make_url(address.replace("@@", "%40@"))
    assert (parts.drivername, parts.host, parts.port, parts.database) == (
        *(expected.drivername, expected.host),
        *(expected.port, expected.database),
    )
    assert (parts.username, parts.password) == (None, None)
    assert without_credentials(f"failed: '{address}', later") == f"failed: '{shown}', later"


def test_addresses_without_credentials_are_left_alone():
    for address in (
        *("http://example.org:5000/a@b", "http://[::1]:5000/a@b"),
        *("sqlite:////home/me@work/mlflow.db", "file:///home/me@work:x/mlruns"),
        *("models:/name@champion", "databricks://profile"),
    ):
        assert without_credentials(address) == address


def test_credentials_are_in_no_error_of_an_unreachable_store(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:s3cret@127.0.0.1:{port}")
    run = tracking.TrackedRun("0" * 32, mlflow.get_tracking_uri())
    for act in (
        lambda: tracking.start_run("away", {}),
        lambda: tracking.find_tracked_run("0" * 32),
        lambda: run.log_metrics({"loss": 1.0}),
        lambda: rcir.load(f"runs:/{'0' * 32}/retriever"),
        lambda: register(tmp_path, "name"),
    ):
        with pytest.raises(rcir.RcirError) as error:
            act()
        assert "s3cret" not in "".join(traceback.format_exception(error.value))
    folder = RunFolder(tmp_path, {}, "0" * 32, f"http://user:s3cret@elsewhere:{port}")
    with pytest.raises(UntrustedFolder) as error:
        _ = folder.tracked
    assert "s3cret" not in str(error.value)
    assert "s3cret" not in repr(folder)


@pytest.mark.slow
def test_credentials_reach_the_server_and_are_neither_printed_nor_stored(
    server, tiny, tmp_path, monkeypatch, capfd
):
    address = server.address.replace("://", "://user:s3cret@")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.delenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", raising=False)
    config = tiny("secret", epochs=1, storage=str(tmp_path))
    (tmp_path / "secret").mkdir()
    create_run(config, None, TrainedOn.from_splits(load_splits(config.data)))
    written = json.loads((tmp_path / "secret" / "run.json").read_text())
    assert written["tracking_uri"] == server.address
    run = train(config)  # continues with the address that is set, which has the password
    assert run.finished
    assert run.tracked.uri == address
    outcome = calibrate(CalibrationConfig(str(run.path), str(tmp_path / "calibrated")))
    assert outcome.mlflow_run
    link = tracking.table_link([run.tracked], "loss")
    assert link.startswith(f"{server.address}/#/experiments/")
    screen = capfd.readouterr()
    assert "s3cret" not in screen.out + screen.err + link
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if b"s3cret" in path.read_bytes()] == []


def test_relative_store_stays_the_same_in_another_folder(tmp_path, monkeypatch, new_store):
    new_store(tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    run = tracking.start_run("here", {})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run.log_metrics({"seen": 1.0})
    assert MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").get_run(run.id).data.metrics
    assert not (tmp_path / "elsewhere" / "mlflow.db").exists()


def test_git_revision_is_logged():
    root = Path(tracking.__file__).parents[1]
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("the code is not in a git checkout")
    run = tracking.start_run("revision", {})
    assert run.tag("mlflow.source.git.commit") == head.stdout.strip()


def test_next_start_marks_only_runs_of_dead_processes_as_killed(client, monkeypatch):
    """Not runs of living processes, of other hosts or of an unknown process, nor ended runs."""
    living = tracking.start_run("living", {})
    host, _, rest = owner().partition("-")
    unfinished = {}
    for name, process in (("dead", DEAD), ("other host", f"{int(host, 16) ^ 1:08x}-{rest}")):
        with monkeypatch.context() as patch:
            patch.setattr("rcir.tracking.runs.owner", lambda process=process: process)
            unfinished[name] = tracking.start_run(name, {})
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
    with unfinished["dead"].active():  # this process continues it
        tracking.start_run("meanwhile", {})
        assert client.get_run(unfinished["dead"].id).info.status == "RUNNING"
    assert client.get_run(unfinished["dead"].id).info.status == "FINISHED"
    for run in (living, again, unfinished["other host"]):
        run.end("FINISHED")


def test_a_start_that_was_killed_is_taken_up_by_the_next_one(client, monkeypatch, tmp_path):
    """Killed after MLflow created the run, and before its id is in the folder."""
    with monkeypatch.context() as patch, pytest.raises(Killed):  # noqa: PT012
        patch.setattr("rcir.tracking.runs.owner", lambda: DEAD)
        with tracking.started_once(tmp_path, "once", {}) as first:
            raise Killed
    with tracking.started_once(tmp_path, "once", {}) as again:
        assert again.id == first.id
    with again.active():
        assert client.get_run(again.id).info.status == "RUNNING"
    with tracking.started_once(tmp_path, "once", {}) as other:
        assert other.id != again.id


def test_waiting_for_a_locked_store_ends(tmp_path, monkeypatch, new_store):
    monkeypatch.setattr("rcir.tracking.runs.LOCK_TIMEOUT", 0.1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_store(tmp_path / "locked.db"))
    with FileLock(tmp_path / ".locked.db.lock"):
        assert tracking.start_run("locked", {}).status == "RUNNING"


@pytest.mark.slow
def test_processes_that_start_together_share_a_new_store(tmp_path):
    store = f"sqlite:///{tmp_path / 'new.db'}"
    marks = [str(tmp_path / name) for name in ("one", "two", "three")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START, mark, *marks],
            env=os.environ | {"MLFLOW_TRACKING_URI": store},
            stderr=subprocess.PIPE,
            text=True,
        )
        for mark in marks
    ]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    client = MlflowClient(store)
    (experiment,) = client.search_experiments(filter_string="name = 'rcir'")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name for run in runs} == {"one", "two", "three"}


def test_a_closed_queue_logs_no_further_steps(monkeypatch, capsys):
    class Slow:
        """A store that takes its time and fails at last, after everything was closed."""

        def __init__(self):
            self.logged, self.closed = [], threading.Event()

        def steps(self, _):
            return set()

        def log_metrics(self, metrics, step, at):
            self.closed.wait(10)
            self.logged.append(step)
            raise TrackingUnavailable("too late")

    monkeypatch.setattr("rcir.tracking.runs.DRAIN_S", 0.05)
    run = Slow()
    queue = MetricQueue(run)
    for step in range(4):
        queue.put("loss", step, {"loss": 1.0}, 0.0)
    queue.close()
    run.closed.set()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "rcir-metrics"]
    thread.join(10)
    assert not thread.is_alive()
    assert run.logged == [0]  # which was under way
    assert capsys.readouterr().out == ""
