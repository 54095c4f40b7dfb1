"""`mlflow models serve` of the champion, on loopback."""

import base64
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

import pytest

from rcir.registry.register import register
from tests.registry.test_model import png

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
ROOT = Path(__file__).parents[2]


def asked(address, payload):
    """Status and body of the answer to a request."""
    request = urllib.request.Request(
        f"{address}/invocations",
        json.dumps(payload).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.fixture
def address(pictured, tmp_path):
    """Of a server of the champion."""
    register(str(pictured.folder), "served", "champion")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [
        *(sys.executable, "-m", "mlflow", "models", "serve", "--model-uri"),
        *("models:/served@champion", "--env-manager", "local"),
        *("--host", "127.0.0.1", "--port", port),
    ]
    # MLflow starts "uvicorn" as the shell finds it.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        for _ in range(1800):
            assert process.poll() is None, log.read_text()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=1):
                    break
            except (urllib.error.URLError, TimeoutError):
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def test_the_server_answers_what_the_retriever_answers(pictured, address):
    rows = [{"image": base64.b64encode(png(query)).decode()} for query in pictured.queries]
    status, found = asked(address, {"dataframe_records": rows, "params": {"alpha": 0.3}})
    assert status == 200
    expected = pictured.retriever.retrieve(pictured.queries, 0.3, 0.1)
    for row, answer in zip(found["predictions"], expected, strict=True):
        assert tuple(row["ids"]) == answer.ids
        assert tuple(row["labels"]) == answer.labels
        assert row["distances"] == pytest.approx(answer.distances.tolist(), abs=1e-6)
        assert (row["size"], row["abstained"]) == (answer.size, answer.abstained)
        assert row["guarantee"] == str(answer.guarantee)

    asking = {"dataframe_records": rows[:1], "params": {"alpha": 0.001}}
    status, found = asked(address, asking)
    assert status == 400
    assert "stack_trace" not in found
    assert "RiskUnattainable: alpha = 0.001 at delta = 0.1 cannot be certified" in found["message"]
    status, found = asked(address, {"dataframe_records": [{"image": "bm90aGluZw=="}]})
    assert status == 400
    assert "InvalidImage" in found["message"]
