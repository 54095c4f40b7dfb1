"""`rcir serve` under mixed requests while its folder is replaced and its process killed."""

import http.client
import json
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from copy import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from rcir.data import Preprocessing
from rcir.data.records import ImageSet
from rcir.encoders import build_encoder
from rcir.retrieval.retriever import Retriever
from rcir.serving.sources import source_of
from tests.methods import CERTAIN, TRAINED, config_of
from tests.serving.conftest import drawn, png

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
CLIENTS, PAUSE = 8, 2.0  # seconds between swaps
CLASSES, SHAPE = 5, (8, 16)
ALPHA, DELTA = 0.3, 0.1
KILLS, REQUESTS, SWAPS = 6, 7000, 6  # at least, for each kind
JSON = {"content-type": "application/json"}
VECTORS = drawn(40, 11)[0]


def images(n, seed, prefix):
    """Noisy pictures of a few labels, which networks with random weights tell apart roughly."""
    rng = np.random.default_rng(seed)
    patterns = np.random.default_rng(0).uniform(0, 255, (CLASSES, *SHAPE))
    labels = rng.integers(CLASSES, size=n)
    pixels = patterns[labels] + 110 * rng.standard_normal((n, *SHAPE))
    ids = [f"{prefix} {row}" for row in range(n)]
    return ImageSet(pixels.clip(0, 255).astype(np.uint8), labels, ids)


GALLERY, TUNING, CALIBRATION = images(60, 1, "old"), images(40, 2, "t"), images(80, 3, "c")
PICTURES = images(12, 5, "query").images


def built(method):
    """A calibrated retriever with random weights, which is left in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TRAINED.index(method))
        encoder = build_encoder(config_of(method, dim=6), 1, SHAPE)
    if method == "lam":
        encoder.prior_precision.fill_(1.0)  # as if it was fitted: it then has an uncertainty
    retriever = Retriever.build(encoder, Preprocessing(), GALLERY, depth=40)
    retriever.calibrate_splits(
        retriever.search_labelled(TUNING),
        retriever.search_labelled(CALIBRATION),
        "learned",
        query_uncertainty="cosine" if method in CERTAIN else "encoder",
    )
    encoder.train()
    return retriever


def answers_of(retriever):
    """What the retriever answers to each query, alone."""
    return [retriever.retrieve(picture, ALPHA, DELTA).to_dict() for picture in PICTURES]


def differences(answer, expected):
    """The parts in which an answer differs from an expected one by more than rounding."""
    differing = {name for name in ("ids", "guarantee") if answer[name] != expected[name]}
    for name in ("distances", "uncertainty"):
        values = [np.asarray(each[name]) for each in (answer, expected)]
        if values[0].shape != values[1].shape or not np.allclose(*values, rtol=1e-4, atol=1e-5):
            differing.add(name)
    return differing


def body_of(picture):
    """A multipart body with a picture, and the headers for it."""
    fields = {"alpha": ALPHA, "delta": DELTA}
    parts = [
        f'--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    head = b'--x\r\ncontent-disposition: form-data; name="picture"; filename="q"\r\n\r\n'
    return b"".join([*parts, head, png(picture), b"\r\n--x--\r\n"])


BODIES = [body_of(picture) for picture in PICTURES]
HEADERS = {"content-type": "multipart/form-data; boundary=x"}


class Server:
    """The process of a server, which is killed and started again at the same port.

    Attributes:
        down: (from, until) of the times at which it may be unreachable.
    """

    def __init__(self, folder, store, log):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        command = [Path(sys.executable).with_name("rcir"), "serve", folder, "--feedback", store]
        self._command = [*map(str, command), "--port", str(self.port), "--poll", "0.3"]
        self._log, self.down = log, []
        self.start()

    def start(self):
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True
            )
        lines = [self._process.stdout.readline() for _ in range(2)]
        assert "serving on" in lines[1], self._log.read_text()

    def stop(self, by=signal.SIGTERM):
        self._process.send_signal(by)
        self._process.wait(120)
        self._process.stdout.close()

    def restart(self):
        began = time.monotonic()
        self.stop(signal.SIGKILL)
        self.start()
        self.down.append((began, time.monotonic()))


class Client:
    """Sends valid and invalid requests, one after the other, and counts what comes back."""

    def __init__(self, server, requests, seed):
        self._server, self._requests, self._rng = server, requests, np.random.default_rng(seed)
        self.counts, self.unexpected = Counter(), []
        self.answers, self.acknowledged, self.errors = [], {}, []
        self._open = []  # ids of answers without feedback

    def act(self):
        name, (path, body, headers, status) = self._next()
        began = time.monotonic()
        try:
            with closing(
                http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=120)
            ) as connection:
                if name == "an aborted upload":
                    self._abort(connection, path, body, headers)
                    self.counts[name] += 1
                    return
                if name == "a body that is too long":
                    connection.putrequest("POST", path)
                    for header in headers.items():
                        connection.putheader(*header)
                    connection.endheaders()
                else:
                    connection.request("POST", path, body, headers)
                response = connection.getresponse()
                answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.errors.append((began, time.monotonic(), repr(error)))
            time.sleep(0.1)
            return
        self.counts[f"{name}: {response.status}"] += 1
        if response.status != status:
            self.unexpected.append((name, response.status, answer))
        elif name == "a query":
            self.answers.append((int(headers["x-query"]), answer))
            if answer["answer"] is not None:  # None if the file was locked for too long
                self._open.append(answer["answer"])
        elif name == "feedback":
            feedback = json.loads(body)
            self.acknowledged[feedback["answer"]] = feedback["match"]

    def _next(self):
        if self._open and self._rng.random() < 0.25:
            answer = self._open.pop(self._rng.integers(len(self._open)))
            feedback = {"answer": answer, "match": bool(self._rng.random() < 0.8)}
            return "feedback", ("/feedback", json.dumps(feedback), JSON, 200)
        queries, invalid = self._requests
        if self._rng.random() < 0.6:
            query = int(self._rng.integers(len(queries)))
            body, headers = queries[query]
            return "a query", ("/retrieve", body, headers | {"x-query": str(query)}, 200)
        names = list(invalid)
        name = names[self._rng.integers(len(names))]
        return name, invalid[name]

    @staticmethod
    def _abort(connection, path, body, headers):
        connection.putrequest("POST", path)
        for header in (headers | {"content-length": str(len(body))}).items():
            connection.putheader(*header)
        connection.endheaders(body[: len(body) // 2])


def invalid_requests(body, headers, other_body, other_headers):
    """Requests that are refused, each with its status; bodies are those of this and another kind
    of retriever.
    """
    form = {"content-type": "multipart/form-data; boundary=x"}
    too_long = JSON | {"content-length": str(40 * 2**20)}
    return {
        "a query of another kind": ("/retrieve", other_body, other_headers, 400),
        "half a JSON text": ("/retrieve", b'{"vector": [1.0, ', JSON, 400),
        "bytes that are no text": ("/retrieve", b"\xff\xfe{", JSON, 400),
        "wrong types": ("/retrieve", b'{"vector": "much", "alpha": [1]}', JSON, 400),
        "many wrong numbers": ("/retrieve", b'{"vector": [' + b"null," * 9999 + b"0]}", JSON, 400),
        "an unknown field": ("/retrieve", b'{"vector": [1.0], "alhpa": 0.1}', JSON, 400),
        "half a multipart body": ("/retrieve", BODIES[0][: len(BODIES[0]) // 2], form, 400),
        "a multipart body without its boundary": ("/retrieve", b"--y\r\n\r\nz", form, 400),
        "a form without a picture": (
            "/retrieve",
            b'--x\r\ncontent-disposition: form-data; name="alpha"\r\n\r\n0.3\r\n--x--\r\n',
            form,
            400,
        ),
        "text": ("/retrieve", b"hello", {"content-type": "text/plain"}, 415),
        "feedback on no answer": ("/feedback", b'{"answer": "none", "match": true}', JSON, 404),
        "feedback without a match": ("/feedback", b'{"answer": "none"}', JSON, 400),
        "a body that is too long": ("/retrieve", b"", too_long, 413),
        "an aborted upload": ("/retrieve", body, headers, None),
    }


def of_vectors(vectors):
    """Versions of a retriever of vectors, their answers, and requests."""
    versions = [vectors]
    for removed in (slice(0, 100), slice(100, 200, 2)):
        changed = copy(vectors)
        with changed.update() as next_version:
            next_version.remove(vectors.ids[removed].tolist())
        versions.append(changed)
    answers = [
        [version.retrieve(vector, ALPHA, DELTA).to_dict() for vector in VECTORS]
        for version in versions
    ]
    fields = ({"vector": vector.tolist(), "alpha": ALPHA, "delta": DELTA} for vector in VECTORS)
    queries = [(json.dumps(each).encode(), JSON) for each in fields]
    return versions, answers, (queries, invalid_requests(*queries[0], BODIES[0], HEADERS))


def of_pictures():
    """Retrievers of pictures by several methods, their answers, and requests."""
    versions = [built(method) for method in ("mc-dropout", "btl", "lam")]
    queries = [(body, HEADERS) for body in BODIES]
    vector = json.dumps({"vector": VECTORS[0].tolist()}).encode()
    invalid = invalid_requests(*queries[0], vector, JSON)
    return versions, [answers_of(version) for version in versions], (queries, invalid)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["vectors", "pictures"])
def test_kills_swaps_and_invalid_requests_lose_nothing(kind, vectors, tmp_path):
    folder, store, log = (tmp_path / name for name in ("retriever", "feedback.db", "log"))
    versions, expected, requests = of_vectors(vectors) if kind == "vectors" else of_pictures()
    names, swaps, done = {}, 0, threading.Event()

    def save(number):
        copy(versions[number]).save(folder)
        names[source_of(folder).version()] = number

    save(0)
    server = Server(folder, store, log)
    clients = [Client(server, requests, seed) for seed in range(CLIENTS)]

    def work(client):
        while not done.is_set():
            client.act()

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        until = time.monotonic() + 1500
        while (
            (n := sum(client.counts.total() for client in clients)) < REQUESTS
            or swaps < SWAPS
            or len(server.down) < KILLS
        ):
            assert time.monotonic() < until, f"{n} requests, {swaps} swaps"
            time.sleep(PAUSE)
            swaps += 1
            save(swaps % len(versions))
            if n > REQUESTS * len(server.down) / KILLS and len(server.down) < KILLS:
                server.restart()
    finally:
        done.set()
        for thread in threads:
            thread.join()
        server.stop()
    counts = sum((client.counts for client in clients), Counter())
    acknowledged = {
        answer: match for client in clients for answer, match in client.acknowledged.items()
    }
    answers = [answer for client in clients for answer in client.answers]
    print(f"{counts.total()} requests, {swaps} swaps, {len(acknowledged)} acknowledged")
    print(*sorted(counts.items()), sep="\n")

    assert [unexpected for client in clients for unexpected in client.unexpected] == []
    assert [
        (query, answer)
        for query, answer in answers
        if differences(answer, expected[names[answer["version"]]][query])
    ] == []
    assert {names[answer["version"]] for _, answer in answers} == {*range(len(versions))}
    with sqlite3.connect(store) as connection:
        feedback = dict(connection.execute("SELECT answer, match FROM feedback"))
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert len(acknowledged) > REQUESTS / 10
    assert {answer: bool(feedback[answer]) for answer in acknowledged} == acknowledged
    assert [
        error
        for client in clients
        for error in client.errors
        if not any(error[0] <= until and began <= error[1] for began, until in server.down)
    ] == []
    assert "Traceback" not in log.read_text()
