"""Fixtures that several test packages share."""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from conftest import group_of
from tests.kills import kill  # noqa: F401  (a fixture)

# The process that hands out the tests imports this file, too: fixtures import what takes seconds.

# They add a device to PyTorch, which belongs into a process of its own.
collect_ignore = ["simulated_gpu.py", "training/on_simulated_gpu.py"]

# Tests send nothing to Ray's makers, and Ray Data starts no thread that looks for Prometheus.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def pytest_make_parametrize_id(config, val, argname):
    """Name cases after their values, which pytest would number."""
    if val is None or isinstance(val, str | bytes | int | float | set) or callable(val):
        return None
    return " ".join(re.sub(r" at 0x\w+", "", str(val)).split())[:60]


@pytest.fixture(autouse=True)
def _seeded():
    if find_spec("torch") is None:  # in the environment of `make test-lowest`
        return
    import torch

    # `torch.manual_seed` notes the traceback for a GPU that is used later, ten times as slow.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(scope="session")
def data_root():
    """The folder of the real data sets."""
    root = os.environ.get("RCIR_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("RCIR_DATA does not name the folder of the data sets")
    return Path(root).absolute()


@pytest.fixture
def no_figures(monkeypatch):
    """Calibrate without figures, which take most of the time."""
    monkeypatch.setattr("calibration.pipeline.draw_figures", lambda *_: {})


@pytest.fixture(scope="session")
def splits():
    """A small draw of two-digit numbers."""
    from rcir.data import DataConfig, load_splits

    parts = {"train": 400, "validation": 100, "gallery": 300, "tuning": 200, "test": 100}
    return load_splits(DataConfig("digits", options={**parts, "calibration": 400}))


@pytest.fixture(scope="session")
def retriever(splits):
    """An untrained but calibrated retriever; tests that change one load `folder` instead."""
    import torch

    from rcir.data import Preprocessing
    from rcir.encoders import EncoderConfig, build_encoder
    from rcir.retrieval.retriever import Retriever

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = build_encoder(EncoderConfig("mc-dropout", options={"passes": 3}), 1, (8, 16))
    built = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=150)
    built.calibrate_splits(
        built.search_labelled(splits.tuning, "occluded"),
        built.search_labelled(splits.calibration, "occluded"),
        score_function="quantile",
        query_uncertainty="encoder",
    )
    return built


@pytest.fixture
def folder(retriever, tmp_path):
    """The retriever, saved."""
    return retriever.save(tmp_path / "retriever")


@pytest.fixture(scope="session")
def tiny():
    """Configurations of trainings that take a second: `tiny(name, **changes)`."""
    from rcir.data import DataConfig
    from rcir.encoders import EncoderConfig
    from rcir.mining import MiningConfig
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
def s3_server(tmp_path_factory):
    """A real S3 server on loopback."""
    from tests.s3_server import Server

    server = Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture
def bucket(s3_server, tmp_path, monkeypatch):
    """The URI of an empty bucket, which the environment leads to."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RCIR_CACHE", str(tmp_path / "cache"))
    return s3_server.bucket()


@pytest.fixture(scope="session")
def trained(tiny, tracking_uri, tmp_path_factory):
    """A finished training run, to be read only."""
    from training import train

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trained"))
        return train(tiny(seed=4))


# On a busy machine, Ray's processes get their share of time and have minutes to start.
RAY_SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_worker_register_timeout_seconds": "120",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_gcs_server_port_wait_time_s": "120",
    # Without it, Ray starts a process for every training that watches for preempted machines.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # The interval at which workers are polled; two seconds by default.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.05",
}
RUNNING_CLUSTER = ExitStack()  # closing it ends the cluster, if there is one


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """End the cluster after the files that use it: idle, it would slow the other tests down."""
    try:
        return (yield)
    finally:
        if nextitem is None or group_of(nextitem.path) != "ray_cluster":
            RUNNING_CLUSTER.close()


@pytest.fixture(scope="session")
def ray_settings():
    """Return environment variables for a Ray cluster on a busy machine."""
    return RAY_SETTINGS


@contextmanager
def _new_cluster(cpus, **variables):
    import ray
    from ray.cluster_utils import Cluster

    # A short path: the names of Ray's sockets contain it.
    folder = TemporaryDirectory(ignore_cleanup_errors=True)
    with folder as name, pytest.MonkeyPatch.context() as patch:
        patch.chdir(name)
        # Processes that are not given an address look for a cluster in RAY_TMPDIR.
        for variable, value in (RAY_SETTINGS | variables | {"RAY_TMPDIR": name}).items():
            patch.setenv(variable, value)
        # Workers import methods that tests define.
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        session = Path(name, "ray")
        session.mkdir()
        head = {"num_cpus": cpus, "temp_dir": str(session), "include_dashboard": False}
        nodes = Cluster(initialize_head=True, head_node_args=head)
        try:
            ray.init(nodes.address, log_to_driver=False)
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()
            with warnings.catch_warnings():  # what Ray leaves would warn in a later test
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()


@pytest.fixture(scope="session")
def new_cluster():
    """Start a cluster: `with new_cluster(cpus, **variables)`, to which this process is connected.

    The variables are added to the environment of its processes.
    """
    return _new_cluster


@pytest.fixture(scope="session")
def ray_cluster(new_cluster):
    """Return the address of a cluster of three CPUs, to which this process is connected."""
    yield RUNNING_CLUSTER.enter_context(new_cluster(3)).address
    RUNNING_CLUSTER.close()


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
        path = self._folder / "server.log"
        settings = {"OMP_NUM_THREADS": "1", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "0"}
        with path.open("a") as log:
            options = {"stdout": log, "stderr": log, "start_new_session": True}
            self._process = subprocess.Popen(self._command, env=os.environ | settings, **options)
        until = time.monotonic() + 300
        while True:
            assert self._process.poll() is None, path.read_text()
            assert time.monotonic() < until, path.read_text()
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
def server(tmp_path, monkeypatch, new_store):
    """A tracking server, which MLFLOW_TRACKING_URI names."""
    new_store(tmp_path / "server.db")
    started = Server(tmp_path)
    try:
        started.start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", started.address)
        yield started
    finally:
        started.stop()
