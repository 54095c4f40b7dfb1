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
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def answers(port):
    """Return whether a server is there; without the token it says no more than that."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/api/jobs/", timeout=5)
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False
    raise AssertionError("it answers without a token")


def stop(process):
    """End `ray start`, which ends what it started; and its group, should it leave something."""
    process.terminate()
    try:
        process.wait(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder for the storage that all nodes see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def environment(shared, ray_settings, tmp_path_factory, new_store):
    """The environment of every node, and of whoever submits."""
    token = tmp_path_factory.mktemp("secret") / "token"
    token.write_text(os.urandom(32).hex())
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        **ray_settings,
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
            pipes = {"stdout": output, "stderr": output, "start_new_session": True}
            command = [RAY, "start", "--head", *options]
            process = subprocess.Popen(command, env=environment, **pipes)
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
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run([*job, "--", *command], cwd=ROOT, env=environment, check=False, **pipes)


def tracked(store):
    """All MLflow runs."""
    client = MlflowClient(store)
    (experiment,) = client.search_experiments(filter_string="name = 'rcir'")
    return client, client.search_runs([experiment.experiment_id])


def test_a_submitted_training_ends_on_the_shared_storage_and_is_not_repeated(
    address, environment, shared
):
    folder = shared / "runs" / "submitted"
    changes = ["--name", "submitted", "--epochs", "2", "--encoder.dim", "8"]
    changes += ["--data.options", SMALL, "--storage", str(folder.parent), "--num_workers", "2"]
    command = ["python", "-m", "training", "--config", "configs/digits-btl.yaml", *changes]
    job = submit(address, environment, *command)
    assert job.returncode == 0, job.stdout
    assert read_run(folder).finished
    assert read_run(folder).encoder().config.dim == 8
    client, (run,) = tracked(environment["MLFLOW_TRACKING_URI"])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [metric.step for metric in history] == [1, 2]
    assert run.data.tags["rcir.folder"] == str(folder)
    # Not what is installed on the nodes is run, but the copy that Ray made of the working tree.
    source = Path(run.data.tags["mlflow.source.name"])
    assert "working_dir_files" in source.parts
    assert source.parts[-2:] == ("training", "__main__.py")

    before = (folder / "encoder.safetensors").stat().st_mtime_ns
    again = submit(address, environment, *command)
    assert again.returncode == 0, again.stdout
    assert "trained already" in again.stdout
    assert (folder / "encoder.safetensors").stat().st_mtime_ns == before
    _, (run,) = tracked(environment["MLFLOW_TRACKING_URI"])
    assert run.info.status == "FINISHED"


def test_a_submitted_sweep_trains_in_the_cluster_of_the_job(
    address, environment, shared, new_store
):
    store = new_store(shared / "sweeps.db")
    command = ["python", "-m", "tuning", "--config", "configs/tune-digits-btl.yaml"]
    changes = {"trials": 2, "interval": 1, "training.name": "swept", "training.epochs": 2}
    changes["training.data.options"] = SMALL.replace('"validation": 100', '"validation": 400')
    changes["training.storage"] = shared / "runs"
    options = [f"--{name}={value}" for name, value in changes.items()]
    job = submit(address, environment, *command, *options, MLFLOW_TRACKING_URI=store)
    assert job.returncode == 0, job.stdout
    assert (shared / "runs" / "swept" / "best.yaml").is_file()
    names = {run.info.run_name for run in tracked(store)[1]}
    assert names == {"swept", "trial-000", "trial-001"}
