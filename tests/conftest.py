"""Fixtures that several test packages share."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import gammaln, xlogy
from scipy.stats import beta

from rcir.data import DataConfig, Preprocessing, load_splits
from rcir.encoders import EncoderConfig, build_encoder
from rcir.mining import MiningConfig
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import save

# On tensors this small, more threads only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def _crossing(n, level):
    m = np.arange(n)
    bounds, factorial = beta.isf(level, m + 1, n - m), gammaln(np.arange(n + 1) + 1)
    first = np.zeros(n)
    for k in m:
        # Below its bound are exactly k: for the first time, or since it was so at an earlier bound.
        start, before = np.append(0, m[:k]), np.append(0, bounds[:k])
        share = (bounds[k] - before) / (1 - before)
        log = factorial[n - start] - factorial[k - start] - factorial[n - k]
        back = np.exp(log + xlogy(k - start, share) + xlogy(n - k, 1 - share))
        first[k] = back[0] - first[:k] @ back[1:]
    return first.sum()


@pytest.fixture(scope="session")
def naive_crossing():
    """P(some number of misses certifies less than the risk, each judged at a level), as a sum.

    Over the m that is the first at which at most m of n uniform variables are below their bound.
    """
    return _crossing


@pytest.fixture(scope="session")
def naive_local_level():
    """The level at which that probability is delta."""
    return lambda n, delta: brentq(lambda x: _crossing(n, x) - delta, delta / n, delta, xtol=1e-13)


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
    parts = {"train": 400, "validation": 100, "gallery": 300, "tuning": 200, "test": 100}
    return load_splits(DataConfig("digits", options={**parts, "calibration": 400}))


@pytest.fixture(scope="session")
def retriever(splits):
    """An untrained but calibrated retriever; tests that change one load `folder` instead."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = build_encoder(EncoderConfig("mc-dropout", options={"passes": 3}), 1, (8, 16))
    built = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=150)
    built.calibrate(
        built.judge(splits.tuning, "occluded"),
        built.judge(splits.calibration, "occluded"),
        score_function="quantile",
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

    parts = {"train": 300, "validation": 100, "gallery": 300, "tuning": 300, "test": 300}
    defaults = {
        "epochs": 4,
        "batch": 32,
        "data": DataConfig("digits", options={**parts, "calibration": 300}),
        "encoder": EncoderConfig(dim=8),
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


@pytest.fixture(scope="session")
def forgotten():
    """`forgotten()` removes what Ray leaves of its processes, which would warn in a later test."""

    def forget():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    return forget


@pytest.fixture(scope="module")
def ray_cluster(forgotten):
    """A Ray cluster on this machine, in a folder with a short name (its sockets)."""
    import ray

    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.chdir(folder)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        # For every training, Ray starts a process that watches for machines being taken back.
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        yield
        ray.shutdown()
        forgotten()


class Server:
    """A real `mlflow server` on loopback that can be stopped and started again."""

    def __init__(self, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self._folder = folder
        self._command = [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"),
            *("--port", str(port), "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{folder / 'server.db'}"),
            *("--artifacts-destination", str(folder / "artifacts")),
        ]
        self._process = None

    def start(self):
        log = (self._folder / "server.log").open("a")
        with log:
            self._process = subprocess.Popen(
                self._command,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "0",
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for _ in range(600):
            assert self._process.poll() is None, (self._folder / "server.log").read_text()
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=1):
                    return
            except (urllib.error.URLError, TimeoutError):
                time.sleep(0.1)

    def stop(self):
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGTERM)  # the server and its worker
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A tracking server, which MLFLOW_TRACKING_URI names."""
    started = Server(tmp_path)
    try:
        started.start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", started.address)
        yield started
    finally:
        started.stop()
