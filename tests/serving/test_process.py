"""`rcir serve` as a process, as replicas on Ray, as an image; requests of every described kind."""

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import hypothesis
import numpy as np
import psutil
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import rcir
from rcir.cli import main
from rcir.cli.retrieval import add_serve_arguments
from rcir.serving import Settings, create_app
from rcir.serving.sources import source_of
from tests.serving.conftest import drawn
from tests.serving.test_requests import assert_same

BODY = {"vector": drawn(1, 5)[0][0].tolist(), "alpha": 0.2}
ROOT = Path(__file__).parents[2]
slow, distributed = pytest.mark.slow, pytest.mark.distributed


@contextmanager
def served(place, *options):
    """The process of a server, and its address."""
    command = [Path(sys.executable).with_name("rcir"), "serve", place, "--port", "0", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            lines = [process.stdout.readline() for _ in range(2)]
            yield process, lines[1].rpartition(" ")[2].strip()
        finally:
            process.kill()


@slow
@distributed
def test_accepted_requests_are_answered_before_it_stops(place, tmp_path):
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
        until = time.monotonic() + 300
        while len(answers) < 50:
            assert time.monotonic() < until, answers
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == -signal.SIGTERM  # uvicorn raises it again in the end
        stop.set()
        for thread in threads:
            thread.join()
        assert process.stderr.read() == ""
    # A connection that waits for its next request may be closed before it is sent.
    lost = [one for one in answers if one not in (200, 503)]
    assert all(isinstance(one, httpx.RemoteProtocolError | httpx.ReadError) for one in lost)
    with sqlite3.connect(tmp_path / "feedback.db") as connection:
        ((n_answers,),) = connection.execute("SELECT count(*) FROM answers")
    assert n_answers == answers.count(200)


def test_a_server_that_cannot_start_reports_it_in_one_line(place, tmp_path, capsys):
    (tmp_path / "poem.txt").write_text("a poem, " * 100)
    with socket.create_server(("127.0.0.1", 0)) as other:
        for options, word in (
            ([place, "--port", other.getsockname()[1]], "--port"),
            ([place, "--host", "0.0.0.0"], "RCIR_TOKEN"),
            ([tmp_path / "nothing", "--port", 0], "no retriever"),
            ([place, "--port", 0, "--feedback", tmp_path / "poem.txt"], "not a database"),
        ):
            with pytest.raises(SystemExit) as stop:
                main(["serve", *map(str, options)])
            error = capsys.readouterr().err
            assert stop.value.code == 1
            assert re.fullmatch(r"error: .*\n", error)
            assert word in error


# Replicas on Ray Serve


def free_port():
    """A port outside the range from which the system, and so Ray, takes ports."""
    for port in range(18_000, 19_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


@contextmanager
def replicated(place, log, *options):
    """A client of two replicas of a server, `until(condition)`, and the process that started them.

    Calls of `until` wait for a condition, and fail if the process ends.
    """
    port = free_port()
    command = [Path(sys.executable).with_name("rcir"), "serve", place, "--port", port]
    command = [str(part) for part in (*command, "--replicas", 2, 2, *options)]
    with (
        log.open("w") as screen,
        subprocess.Popen(command, stdout=screen, stderr=screen) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):

        def until(condition):
            end = time.monotonic() + 240
            while not condition():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.5)

        def ready():  # one replica answers while the other is still being deployed
            with suppress(httpx.TransportError):
                deployed = "serving on" in log.read_text()
                return deployed and client.get("/ready").status_code == 200

        try:
            until(ready)
            yield client, until, process
        finally:
            process.terminate()
            try:
                process.wait(120)
            finally:
                process.kill()


def shrunk(place):
    """The retriever of a folder without its last item."""
    retriever = rcir.load(place)
    retriever.remove([str(retriever.ids[-1])])
    retriever.recalibrate()
    return retriever


@slow
@distributed
def test_replicas_answer_follow_versions_and_share_feedback(vectors, place, tmp_path):
    options = ["--poll", 0.5, "--feedback", tmp_path / "f.db"]
    with replicated(place, tmp_path / "screen", *options) as (client, until, _):

        def all_replicas(path):
            return [client.get(path).json() for _ in range(10)]  # whichever answers

        names = []
        for query in drawn(40, 5)[0]:
            body = {"vector": query.tolist(), "alpha": 0.2}
            response = client.post("/retrieve", json=body).json()
            assert_same(response, vectors.retrieve(query, 0.2, 0.1))
            names.append(response["answer"])
        for name in names:
            feedback = {"answer": name, "match": False}
            assert client.post("/feedback", json=feedback).json()["new"]
        until(
            lambda: all(
                [(row["n"], row["alarm"]) for row in monitor["guarantees"]] == [(40, True)]
                for monitor in all_replicas("/monitor")
            )
        )
        shrunk(place).save(place)
        until(lambda: {one["n_items"] for one in all_replicas("/guarantees")} == {499})


@slow
@distributed
def test_replicas_survive_kills_and_a_damaged_folder(vectors, place, tmp_path):
    with replicated(place, tmp_path / "screen", "--poll", 0.2) as (client, until, process):

        def replicas():
            running = psutil.Process(process.pid).children(recursive=True)
            return [one for one in running if "ServeReplica:rcir" in " ".join(one.cmdline())]

        def answered(seconds):
            """Query for some seconds; the answers that are given are right."""
            codes, end = [], time.monotonic() + seconds
            while time.monotonic() < end:
                try:
                    response = client.post("/retrieve", json=BODY)
                except httpx.TransportError:
                    codes.append("connection lost")
                    continue
                codes.append(response.status_code)
                if response.status_code == 200:
                    assert_same(response.json(), expected)
            return set(codes)

        expected = vectors.retrieve(np.array(BODY["vector"], np.float32), 0.2, 0.1)
        until(lambda: len(replicas()) == 2)
        before = {one.pid for one in replicas()}
        replicas()[0].kill()
        assert answered(3) <= {200, 503, "connection lost"}
        until(lambda: len(replicas()) == 2 and {one.pid for one in replicas()} != before)
        assert answered(2) == {200}
        # In place of its folder there is nothing, a damaged version, then a whole one.
        damaged = Path(shrunk(place).save(shutil.copytree(place, tmp_path / "damaged")))
        whole = shutil.copytree(damaged, tmp_path / "whole")
        for file in damaged.rglob("retriever.safetensors"):
            file.write_bytes(b"damaged")
        place.rename(tmp_path / "away")
        assert answered(2) == {200}
        damaged.rename(place)
        assert answered(2) == {200}
        shutil.rmtree(place)
        whole.rename(place)
        until(lambda: client.get("/guarantees").json()["n_items"] == 499)


# The image


DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_command_of_the_image_is_one_of_this_version():
    def words(instruction):
        lines = re.findall(rf"^{instruction} (\[.*\])$", DOCKERFILE, re.MULTILINE)
        return json.loads(lines[-1])  # of the last stage

    assert words("ENTRYPOINT") == ["rcir", "serve"]
    parser = ArgumentParser()
    add_serve_arguments(parser)
    options = parser.parse_args(words("CMD"))
    assert (options.retriever, options.host, options.port) == ("/retriever", "0.0.0.0", 8000)


@slow
def test_the_files_that_the_image_copies_are_enough_to_install_it(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for line in re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        for name in line.split():
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, source / name)
    uv = Path(sys.executable).with_name("uv")
    install = (uv, "pip", "install", "--python", sys.executable, "--no-deps", "--target", target)
    subprocess.run([*install, source], check=True, capture_output=True)
    page = target / "rcir" / "serving" / "page"
    assert {path.name for path in page.iterdir()} >= {"index.html", "explorer.js", "explorer.css"}
    command = [sys.executable, "-m", "rcir.cli", "serve", "--help"]
    environment = os.environ | {"PYTHONPATH": str(target)}
    help_text = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert "models:/NAME@ALIAS" in help_text


# Requests generated from the OpenAPI description

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
TOKEN = "a-token-of-enough-letters"  # with a token, any host is answered
BEARER = {"authorization": f"Bearer {TOKEN}"}
OPERATIONS = {
    *("POST /retrieve", "POST /retrieve/batch", "POST /explore", "GET /guarantees"),
    *("GET /items/{item}/image", "GET /sample", "POST /feedback", "GET /monitor"),
    *("GET /health", "GET /ready", "GET /metrics"),
}


@slow
@pytest.mark.parametrize("kind", ["vectors", "retriever"])
def test_a_server_answers_as_its_description_states(kind, request, tmp_path):
    place = request.getfixturevalue(kind).save(tmp_path / kind)
    settings = Settings(store=tmp_path / "feedback.db", poll=0, token=TOKEN)
    app = create_app(source_of(place), settings)
    description = schemathesis.openapi.from_asgi("/openapi.json", app, headers=BEARER)
    tested = set()
    for operation in description.get_all_operations():
        valid = operation.ok()

        @hypothesis.given(case=valid.as_strategy())
        @hypothesis.settings(
            max_examples=20,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def each(case):
            case.call_and_validate(checks=CHECKS, headers=BEARER)

        each()
        tested.add(valid.label)
    assert tested == OPERATIONS
