"""Fixtures that several test packages share."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from rcir.data import DataConfig, Preprocessing, load_splits
from rcir.encoders import EncoderConfig, build_encoder
from rcir.mining import MiningConfig
from rcir.retriever import Retriever
from rcir.storage import save

# On tensors this small, more threads only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_root():
    """The folder of the real data sets."""
    root = os.environ.get("RCIR_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("RCIR_DATA does not name the folder of the data sets")
    return Path(root).absolute()


@pytest.fixture(scope="session")
def splits():
    """A small draw of two-digit numbers."""
    parts = {"train": 400, "validation": 100, "gallery": 300, "adapter": 200, "test": 100}
    return load_splits(DataConfig("digits", options={**parts, "calibration": 400}))


@pytest.fixture(scope="session")
def retriever(splits):
    """An untrained but calibrated retriever; tests that change one load `folder` instead."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = build_encoder(EncoderConfig("mc-dropout", passes=3), 1, (8, 16))
    built = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=150)
    built.calibrate(
        built.judge(splits.adapter, "occluded"),
        built.judge(splits.calibration, "occluded"),
        adapter="quantile",
    )
    return built


@pytest.fixture
def folder(retriever, tmp_path):
    """The retriever, saved."""
    return save(retriever, tmp_path / "retriever")


@pytest.fixture(scope="session")
def tiny():
    """Configurations of trainings that take a second: `tiny(name, **changes)`."""
    from training import TrainingConfig

    parts = {"train": 300, "validation": 100, "gallery": 300, "adapter": 300, "test": 300}
    defaults = {
        "epochs": 4,
        "batch": 32,
        "data": DataConfig("digits", options={**parts, "calibration": 300}),
        "encoder": EncoderConfig(dim=8, members=2, passes=3),
        "mining": MiningConfig("nearest", "hardest"),
    }
    return lambda name="tiny", **changes: TrainingConfig(name, **(defaults | changes))


@pytest.fixture(scope="session")
def trained(tiny, tracking_uri, tmp_path_factory):
    """A finished training run, to be read only."""
    from training import train

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trained"))
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        return train(tiny(seed=4))


@pytest.fixture(scope="module")
def ray_cluster():
    """Two CPUs of this machine as a Ray cluster, in a folder with a short name (its sockets)."""
    import ray

    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.chdir(folder)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        yield
        ray.shutdown()
