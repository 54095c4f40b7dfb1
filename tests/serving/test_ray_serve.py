"""Replicas on Ray Serve answer as one server does."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

import rcir
from tests.serving.conftest import drawn
from tests.serving.test_answers import same

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def free_port():
    """A port that Ray's own servers do not take meanwhile, as they do with those of the system."""
    for port in range(18_000, 19_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def test_replicas_answer_swap_and_know_of_each_other_s_feedback(vectors, place, tmp_path):
    port, command = free_port(), Path(sys.executable).with_name("rcir")
    options = ["--port", port, "--replicas", 2, 2, "--poll", 0.5, "--feedback", tmp_path / "f.db"]
    arguments = [command, "serve", place, *options]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    with (
        (tmp_path / "screen").open("w") as screen,
        subprocess.Popen(
            list(map(str, arguments)), stdout=screen, stderr=screen, env=environment
        ) as process,
    ):
        try:
            address, end = f"http://127.0.0.1:{port}", time.monotonic() + 240
            while True:
                try:
                    if httpx.get(f"{address}/ready", timeout=5).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                assert process.poll() is None, (tmp_path / "screen").read_text()
                assert time.monotonic() < end, (tmp_path / "screen").read_text()
                time.sleep(0.5)
            queries = drawn(40, 5)[0]
            ids = []
            for query in queries:
                body = {"vector": query.tolist(), "alpha": 0.2}
                found = httpx.post(f"{address}/retrieve", json=body, timeout=30).json()
                assert same(found, vectors.retrieve(query, 0.2, 0.1))
                ids.append(found["answer"])
            for own in ids:
                said = {"answer": own, "match": False}
                assert httpx.post(f"{address}/feedback", json=said, timeout=30).json()["new"]
            time.sleep(2)
            for _ in range(10):  # whichever replica answers
                rows = httpx.get(f"{address}/monitor", timeout=30).json()["guarantees"]
                assert [(row["n"], row["alarm"]) for row in rows] == [(40, True)]
            retriever = rcir.load(place)
            retriever.remove([str(retriever.ids[-1])])
            retriever.recalibrate()
            retriever.save(place)
            time.sleep(5)
            sizes = {
                httpx.get(f"{address}/guarantees", timeout=30).json()["n_items"] for _ in range(10)
            }
            assert sizes == {499}
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
