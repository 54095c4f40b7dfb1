"""A Ray cluster that does not answer at RAY_ADDRESS is named within seconds."""

import socket
import threading
import time
from concurrent import futures
from contextlib import closing
from pathlib import Path

import grpc
import pytest

import rcir
from rcir.cluster import join_cluster, require_cluster
from rcir.errors import InvalidConfig

LIMIT_S = 30  # Ray itself tries for minutes


@pytest.fixture
def port():
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        number = free.getsockname()[1]
    return number


def refused(monkeypatch, address, match):
    monkeypatch.setenv("RAY_ADDRESS", address)
    begun = time.monotonic()
    with pytest.raises(InvalidConfig, match=match):
        join_cluster()
    assert time.monotonic() - begun < LIMIT_S


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_cluster_that_is_gone_is_named(form, port, monkeypatch):
    refused(monkeypatch, form.format(port), str(port))


def test_invalid_addresses_are_named(monkeypatch):
    for address in ("nonsense", "127.0.0.1", "127.0.0.1:port", "127.0.0.1:99999"):
        refused(monkeypatch, address, "RAY_ADDRESS")
    refused(monkeypatch, "http://127.0.0.1:8265", "submitted")


def test_address_file_of_a_killed_cluster_is_seen_through(port, tmp_path, monkeypatch):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{port}")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    # Ray prefers a cluster that runs on this machine, such as that of another test process.
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    refused(monkeypatch, "auto", "RAY_ADDRESS")


@pytest.mark.parametrize("answer", [None, b"-ERR unknown command 'PRI'\r\n"])
def test_another_program_at_the_port_is_not_taken_for_a_cluster(answer, monkeypatch):
    monkeypatch.setattr("rcir.cluster.PROBE_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def reply():
            connection, _ = listening.accept()
            with connection:
                connection.sendall(answer)

        if answer:
            threading.Thread(target=reply, daemon=True).start()
        refused(monkeypatch, f"127.0.0.1:{listening.getsockname()[1]}", "RAY_ADDRESS")


def test_server_that_speaks_ray_s_protocol_may_be_a_cluster(monkeypatch):
    """By the server of another library, whose first frame the standard prescribes."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    try:
        require_cluster()
    finally:
        server.stop(None)


def test_ray_is_started_in_one_place():
    """Elsewhere, the address file of a killed cluster would decide what is joined."""
    root = Path(rcir.__file__).parents[1]
    packages = ("rcir", "training", "calibration", "tuning", "benchmarks", "examples")
    scripts = [path for package in packages for path in (root / package).rglob("*.py")]
    callers = [path for path in scripts if "ray.init(" in path.read_text()]
    assert callers == [root / "rcir" / "cluster.py"]
