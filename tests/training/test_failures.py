"""Workers, nodes and drivers that are killed while they train: the steps stay the same."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict

import pytest
import yaml
from safetensors.torch import load_file

from rcir.data import DataConfig
from rcir.errors import WorkersLost
from rcir.runs.folder import read_run
from tests.training.helpers import ON_RAY, assert_close, processes_on, steps
from training import train
from training.checkpoint import last_epoch

pytestmark = [pytest.mark.slow, *ON_RAY]

PARTS = {"train": 2000, "validation": 100, "gallery": 100, "tuning": 100, "test": 100}
RUN = {
    "epochs": 4,
    "micro_batches": 2,
    "batch": 16,
    "data": DataConfig("digits", options={**PARTS, "calibration": 100}),
}


@pytest.fixture(scope="module")
def cluster(new_cluster):
    """A head and a second node, one CPU each, to which this process is connected."""
    # How long Ray waits for a lost node to come back; a minute by itself.
    with new_cluster(1, RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="30") as nodes:
        nodes.second = nodes.add_node(num_cpus=1)
        yield nodes


def after(checkpoint, action):
    """Do something once a checkpoint appears, while training goes on."""

    def wait():
        while not checkpoint.is_dir():
            time.sleep(0.05)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def assert_same_weights(run, expected):
    ours, theirs = (load_file(each.path / "encoder.safetensors") for each in (run, expected))
    for name, values in theirs.items():
        assert_close(ours[name], values)


@pytest.fixture(scope="module")
def undisturbed(tiny, train_apart):
    """The training in this process, where nothing happens to it."""
    return train_apart(tiny("undisturbed", **RUN))


def test_lost_nodes_and_workers_are_replaced(cluster, undisturbed, tiny, tmp_path, capsys):
    checkpoints = tmp_path / "runs" / "lost" / "checkpoints"
    remover = after(
        checkpoints / "epoch-0001",
        lambda: cluster.remove_node(cluster.second, allow_graceful=False),
    )
    with pytest.raises(WorkersLost, match="workers failed"):
        train(tiny("lost", **RUN, num_workers=2, max_failures=0))
    remover.join()
    half = read_run(tmp_path / "runs" / "lost")
    reached = last_epoch(half.path)
    assert 1 <= reached < 4
    assert not half.finished

    killer = after(
        checkpoints / f"epoch-{reached + 1:04d}",
        lambda: os.kill(processes_on(cluster.address, "RayTrainWorker")[0], signal.SIGKILL),
    )
    # As many as there still may be, and another one in place of the one that is killed.
    run = train(tiny("lost", **RUN, num_workers=(1, 2)))
    killer.join()
    assert "training continues" in capsys.readouterr().out
    assert steps(run) == [1, 2, 3, 4]
    assert run.mlflow_run == half.mlflow_run
    assert_same_weights(run, undisturbed)


def test_a_killed_driver_is_started_again(cluster, undisturbed, tiny, tmp_path):
    """The process that waits for the workers; they end with it, and another one continues."""
    # Not a range of workers: Ray keeps what such a driver reserved for three more minutes.
    config = tiny("driven", **RUN, num_workers=1)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    command = [sys.executable, "-m", "training", "--config", "config.yaml"]
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
    assert 1 <= last_epoch(run) < 4  # which MLflow may not have heard of
    again = train(config)
    assert steps(again) == [1, 2, 3, 4]
    assert_same_weights(again, undisturbed)
