"""`rcir serve` as a process: started, told to stop, killed."""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from rcir.serving.store import Store
from tests.serving.conftest import drawn

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
BODY = {"vector": drawn(1, 5)[0][0].tolist(), "alpha": 0.2}


@contextmanager
def served(place, *options, **environment):
    """The process of a server, and its address."""
    rcir = Path(sys.executable).with_name("rcir")
    command = [rcir, "serve", place, "--port", "0", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | environment, **pipes) as process:
        try:
            lines = [process.stdout.readline() for _ in range(2)]
            yield process, lines[1].rpartition(" ")[2].strip()
        finally:
            process.kill()


def test_what_was_accepted_is_answered_before_it_stops(place, tmp_path):
    with served(place, "--feedback", tmp_path / "feedback.db") as (process, address):
        answers, stop = [], threading.Event()

        def ask():
            with httpx.Client(base_url=address) as client:
                while not stop.is_set():
                    try:
                        answers.append(client.post("/retrieve", json=BODY).status_code)
                    except httpx.ConnectError:  # it takes no more
                        return
                    except httpx.TransportError as error:
                        answers.append(error)
                        return

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        while len(answers) < 50:
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM  # which uvicorn passes on in the end
        stop.set()
        for thread in threads:
            thread.join()
        assert process.stderr.read() == ""
    # A connection that waits for its next request may be closed before it is sent.
    lost = [one for one in answers if one not in (200, 503)]
    assert all(isinstance(one, httpx.RemoteProtocolError | httpx.ReadError) for one in lost)
    with Store(tmp_path / "feedback.db")._using():
        pass
    kept = Store(tmp_path / "feedback.db")._connection.execute("SELECT count(*) FROM answers")
    assert kept.fetchone()[0] == answers.count(200)


def test_feedback_survives_a_kill(place, tmp_path):
    file = tmp_path / "feedback.db"
    with served(place, "--feedback", file) as (process, address):
        with httpx.Client(base_url=address) as client:
            for query in drawn(20, 6)[0].tolist():
                answer = client.post("/retrieve", json=BODY | {"vector": query}).json()["answer"]
                said = client.post("/feedback", json={"answer": answer, "match": False})
                assert said.json()["accepted"]
            answer = client.post("/retrieve", json=BODY).json()["answer"]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with served(place, "--feedback", file) as (_, address):
        rows = httpx.get(f"{address}/monitor").json()["guarantees"]
        assert (rows[0]["n"], rows[0]["misses"]) == (20, 20)
        said = httpx.post(f"{address}/feedback", json={"answer": answer, "match": True})
        assert said.json() == {"accepted": True, "new": True, "watched": True, "alarm": True}


def refused(place, *options, **environment):
    """The words where no server can be started."""
    rcir = Path(sys.executable).with_name("rcir")
    done = subprocess.run(
        [rcir, "serve", place, *map(str, options)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_what_cannot_be_served_is_said_in_one_line(place, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "another --port" in refused(place, "--port", port)
    assert "RCIR_TOKEN" in refused(place, "--host", "0.0.0.0")
    assert "no retriever" in refused(tmp_path / "nothing", "--port", 0)
    (tmp_path / "poem.txt").write_text("a poem, " * 100)
    said = refused(place, "--port", 0, "--feedback", tmp_path / "poem.txt")
    assert "not a database" in said
