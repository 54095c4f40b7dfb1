"""What can go wrong while workers train, provoked for real: they still take the same steps."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import ray
from mlflow import MlflowClient
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

from rcir.data import DataConfig
from rcir.errors import WorkersLost
from rcir.runs.folder import read_run
from training import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's own processes
]

PARTS = {"train": 2000, "validation": 100, "gallery": 100, "tuning": 100, "test": 100}
RUN = {
    "epochs": 4,
    "micro_batches": 2,
    "batch": 16,
    "data": DataConfig("digits", options={**PARTS, "calibration": 100}),
}


@pytest.fixture(scope="module")
def cluster(patient, forgotten):
    """A head and a second node, one CPU each, to which this process is connected."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.chdir(folder)
        for name, value in patient.items():
            patch.setenv(name, value)
        # How long Ray waits for a lost node to come back; a minute by itself.
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "30")
        # Where Ray notes which cluster it started last: /tmp/ray need not be there.
        patch.setenv("RAY_TMPDIR", folder)
        session = Path(folder, "ray")
        session.mkdir()
        head = {"num_cpus": 1, "temp_dir": str(session), "include_dashboard": False}
        nodes = Cluster(initialize_head=True, head_node_args=head)
        nodes.second = nodes.add_node(num_cpus=1)
        ray.init(nodes.address, log_to_driver=False)
        yield nodes
        ray.shutdown()
        nodes.shutdown()
        forgotten()


def workers_of(cluster):
    """Process ids of the cluster's training workers: children of its nodes' raylets."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may be gone by now
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            raylet = Path("/proc", parent, "cmdline").read_bytes()
            name = (folder / "cmdline").read_bytes()
            if b"RayTrainWorker" in name and cluster.address.encode() in raylet:
                found.append(int(folder.name))
    return found


def after(checkpoint, action):
    """Do something shortly after a checkpoint appears, while training goes on."""

    def wait():
        while not checkpoint.is_dir():
            time.sleep(0.05)
        time.sleep(0.3)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def steps(run, name="loss"):
    history = MlflowClient(run.tracking_uri).get_metric_history(run.mlflow_run, name)
    return [metric.step for metric in history]


def assert_same_weights(found, expected):
    ours, theirs = (load_file(run.path / "encoder.safetensors") for run in (found, expected))
    for key, values in theirs.items():
        assert (ours[key] - values).norm() <= 1e-3 * values.norm() + 1e-6, key


@pytest.fixture(scope="module")
def undisturbed(tiny, tracking_uri, tmp_path_factory):
    """The training in this process, where nothing happens to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("undisturbed"))
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        return train(tiny("undisturbed", **RUN))


def test_nodes_and_workers_may_be_lost(cluster, undisturbed, tiny, tmp_path, capsys):
    checkpoints = tmp_path / "runs" / "lost" / "checkpoints"
    remover = after(
        checkpoints / "epoch-0001",
        lambda: cluster.remove_node(cluster.second, allow_graceful=False),
    )
    with pytest.raises(WorkersLost, match=r"workers failed after epoch .*give the same command"):
        train(tiny("lost", **RUN, num_workers=2, max_failures=0))
    remover.join()
    half = read_run(tmp_path / "runs" / "lost")
    reached = max(steps(half))
    assert 1 <= reached < 4
    assert not half.finished

    killer = after(
        checkpoints / f"epoch-{reached + 1:04d}",
        lambda: os.kill(workers_of(cluster)[0], signal.SIGKILL),
    )
    # As many as there still may be, and another one in place of the one that is killed.
    found = train(tiny("lost", **RUN, num_workers=(1, 2)))
    killer.join()
    assert "training continues from there" in capsys.readouterr().out
    assert steps(found) == [1, 2, 3, 4]
    assert found.mlflow_run == half.mlflow_run
    assert_same_weights(found, undisturbed)


def test_a_killed_driver_is_started_again(cluster, undisturbed, tiny, tmp_path):
    """The process that waits for the workers; they end with it, and another one continues."""
    # Not a range of workers: Ray keeps what such a driver reserved for three more minutes.
    config = tiny("driven", **RUN, num_workers=1)
    options = {
        **{"name": "driven", "epochs": 4, "micro_batches": 2, "batch": 16, "num_workers": 1},
        "data.options": json.dumps(config.data.options),
        "encoder.dim": 8,
        **{"mining.positive": "nearest", "mining.negatives": "hardest"},
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "training", *arguments]
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    run = tmp_path / "runs" / "driven"
    while not (run / "checkpoints" / "epoch-0001").is_dir():
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.05)
    first.kill()
    first.communicate()
    reached = max(steps(read_run(run)))
    assert reached < 4
    found = train(config)
    assert steps(found) == [1, 2, 3, 4]
    assert_same_weights(found, undisturbed)
