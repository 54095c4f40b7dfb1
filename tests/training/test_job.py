"""Trainings and sweeps submitted to a Ray cluster as jobs, as docs/cluster.md says."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from mlflow import MlflowClient

from rcir.runs.folder import read_run

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
PORTS = ("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port")
SMALL = '{"train": 300, "validation": 100, "gallery": 100, "tuning": 100, "calibration": 100}'


def free_ports(count):
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


def answers(port):
    """Whether a server is there; without the token it says no more than that."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/api/jobs/", timeout=5)
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False
    raise AssertionError("it lets in who has no token")


def stop(process):
    """`ray start` ends what it started; should it leave something, its group is ended."""
    process.terminate()
    try:
        process.wait(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What stands for the storage that all nodes see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def environment(shared, patient, tmp_path_factory, new_store):
    """That of every node, and of who submits."""
    token = tmp_path_factory.mktemp("secret") / "token"
    token.write_text(os.urandom(32).hex())
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        **patient,
        "PATH": f"{RAY.parent}{os.pathsep}{os.environ['PATH']}",
        "MLFLOW_TRACKING_URI": new_store(shared / "mlflow.db"),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # no job is left to wait for
        # Else Ray puts the address that other machines know in place of 127.0.0.1.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


@pytest.fixture(scope="module")
def address(environment, tmp_path_factory):
    """The job server of a cluster of its own: one node on loopback with two CPUs."""
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    options = [f"--{name}={port}" for name, port in ports.items()]
    servers = ports["dashboard-port"], ports["dashboard-agent-listen-port"]  # and who starts jobs
    log = tmp_path_factory.mktemp("log") / "ray.log"
    with TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:  # sockets: short
        options += ["--num-cpus=2", f"--temp-dir={folder}", "--disable-usage-stats"]
        options += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", "--block"]
        with log.open("w") as output:
            process = subprocess.Popen(
                [RAY, "start", "--head", *options],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            until = time.monotonic() + 120
            while not all(map(answers, servers)):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            yield f"http://127.0.0.1:{servers[0]}"
        finally:
            stop(process)


def submit(address, environment, *command, **variables):
    """`ray job submit` of the working tree, and what the job printed."""
    job = [RAY, "job", "submit", "--address", address, "--working-dir", "."]
    job += ["--runtime-env-json", json.dumps({"env_vars": variables})]
    return subprocess.run(
        [*job, "--", *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def command(shared):
    """Two epochs of two workers."""
    changes = ["--name", "submitted", "--epochs", "2", "--encoder.dim", "8"]
    changes += ["--data.options", SMALL]
    where = ["--storage", str(shared / "runs"), "--num_workers", "2"]
    return ["python", "-m", "training", "--config", "configs/digits-btl.yaml", *changes, *where]


@pytest.fixture(scope="module")
def job(address, environment, command):
    """The job, when it is over."""
    return submit(address, environment, *command)


def tracked(store):
    """All MLflow runs."""
    client = MlflowClient(store)
    (experiment,) = client.search_experiments(filter_string="name = 'rcir'")
    return client, client.search_runs([experiment.experiment_id])


@pytest.mark.parametrize(
    ("credentials", "answer"),
    [({"RAY_AUTH_MODE": "disabled"}, "Unauthorized"), ({"RAY_AUTH_TOKEN": "guess"}, "Forbidden")],
)
def test_who_has_not_the_token_submits_nothing(address, environment, tmp_path, credentials, answer):
    mark = tmp_path / "mark"
    refused = submit(address, environment | credentials, "touch", str(mark))
    assert refused.returncode != 0
    assert answer in refused.stdout
    assert not mark.exists()


def test_a_submitted_training_is_finished_on_the_shared_storage(job, shared):
    assert job.returncode == 0, job.stdout
    run = read_run(shared / "runs" / "submitted")
    assert run is not None
    assert run.finished
    assert run.encoder().config.dim == 8


def test_a_submitted_training_is_one_finished_mlflow_run(job, environment, shared):
    assert job.returncode == 0, job.stdout
    client, (run,) = tracked(environment["MLFLOW_TRACKING_URI"])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.step for metric in history] == [1, 2]
    assert run.data.tags["rcir.folder"] == str(shared / "runs" / "submitted")
    assert run.data.params["num_workers"] == "2"


def test_what_is_run_is_what_was_submitted(job, environment):
    """Not what is installed on the nodes: the copy that Ray made of the working tree."""
    assert job.returncode == 0, job.stdout
    _, (run,) = tracked(environment["MLFLOW_TRACKING_URI"])
    source = Path(run.data.tags["mlflow.source.name"])
    assert "working_dir_files" in source.parts
    assert source.parts[-2:] == ("training", "__main__.py")


def test_submitted_again_it_is_trained_already(job, address, environment, command, shared):
    assert job.returncode == 0, job.stdout
    weights = shared / "runs" / "submitted" / "encoder.safetensors"
    before = weights.stat().st_mtime_ns
    again = submit(address, environment, *command)
    assert again.returncode == 0, again.stdout
    assert f"{shared / 'runs' / 'submitted'} is trained already" in again.stdout
    assert weights.stat().st_mtime_ns == before
    _, (run,) = tracked(environment["MLFLOW_TRACKING_URI"])
    assert run.info.status == "FINISHED"


def test_a_submitted_sweep_trains_in_the_cluster_that_it_was_submitted_to(
    address, environment, shared, new_store
):
    store = new_store(shared / "sweeps.db")
    command = ["python", "-m", "tuning", "--config", "configs/tune-digits-btl.yaml"]
    changes = {"trials": 2, "interval": 1, "training.name": "swept", "training.epochs": 2}
    changes["training.data.options"] = SMALL.replace('"validation": 100', '"validation": 400')
    changes["training.storage"] = shared / "runs"
    options = [f"--{name}={value}" for name, value in changes.items()]
    swept = submit(address, environment, *command, *options, MLFLOW_TRACKING_URI=store)
    assert swept.returncode == 0, swept.stdout
    assert (shared / "runs" / "swept" / "best.yaml").is_file()
    _, runs = tracked(store)
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert [run.data.tags["rcir.sweep"] for run in parents] == ["swept"]
    children = {run.info.run_name for run in runs} - {"swept"}
    assert children == {"trial-000", "trial-001"}
