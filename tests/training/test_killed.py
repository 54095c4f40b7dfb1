"""A training process that is killed in the middle of an epoch, and started again."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

import training
from tests.kills import DEAD

pytestmark = pytest.mark.slow  # in one process it is tested in test_continued.py

CONFIG = """
name: run
epochs: 3
batch: 32
data: {options: {train: 3000, validation: 100, gallery: 100, tuning: 100, calibration: 100}}
augmentation: {occlusion: 0.2}
encoder: {dim: 8}
"""


def start(folder):
    """`python -m training` in a folder of its own, tracked there."""
    (folder / "config.yaml").write_text(CONFIG)
    tracking = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}"}
    return subprocess.Popen(
        [sys.executable, "-m", "training", "--config", "config.yaml"],
        cwd=folder,
        env={**os.environ, **tracking, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_in_second_epoch(process, run):
    """SIGKILL after the first checkpoint is there and before the second is."""
    while not (run / "checkpoints" / "epoch-0001").is_dir():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (run / "checkpoints" / "epoch-0002").exists()


def finish(process):
    """The numbers of the epochs that a process did."""
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    return [int(number) for number in re.findall(r"^epoch (\d)/3", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, new_store):
    """Folders of a killed and continued and of an undisturbed run, and the epochs of both."""
    killed, whole = (tmp_path_factory.mktemp(name) for name in ("killed", "whole"))
    for folder in (killed, whole):
        new_store(folder / "mlflow.db")
    undisturbed, first = start(whole), start(killed)
    try:
        kill_in_second_epoch(first, killed / "runs" / "run")
        # What a process that is killed while it writes a checkpoint leaves.
        half = killed / "runs" / "run" / "checkpoints" / f".epoch-0002-{DEAD}-0123abcd"
        half.mkdir()
        (half / "state.json").write_text("{")
        return killed, whole, finish(start(killed)), finish(undisturbed)
    finally:
        for process in (undisturbed, first):
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture(scope="module")
def client(outcome):
    return MlflowClient(f"sqlite:///{outcome[0] / 'mlflow.db'}")


@pytest.fixture(scope="module")
def tracked(client):
    """The one MLflow run of both processes."""
    (experiment,) = client.search_experiments(filter_string="name = 'rcir'")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def test_no_epoch_is_repeated(outcome, client, tracked):
    assert outcome[2:] == ([2, 3], [1, 2, 3])
    history = client.get_metric_history(tracked.info.run_id, "loss")
    assert [metric.step for metric in history] == [1, 2, 3]


def test_both_processes_are_one_finished_mlflow_run(outcome, tracked):
    assert tracked.info.status == "FINISHED"
    assert tracked.data.tags["rcir.folder"] == str(outcome[0] / "runs" / "run")


@pytest.mark.parametrize(
    "name", ["encoder.safetensors", "checkpoints/epoch-0003/optimizer.safetensors"]
)
def test_weights_are_those_of_the_undisturbed_run(outcome, name):
    found, expected = (load_file(folder / "runs" / "run" / name) for folder in outcome[:2])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], values) for key, values in expected.items())


def test_the_run_names_the_revision_of_the_code(tracked):
    """MLflow finds it from the file that is run, wherever the working directory is."""
    git = ["git", "-C", str(Path(training.__file__).parent), "rev-parse", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    expected = found.stdout.strip() if found.returncode == 0 else None
    assert tracked.data.tags.get("mlflow.source.git.commit") == expected
