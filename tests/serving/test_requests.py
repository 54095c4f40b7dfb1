"""Requests over HTTP: the retriever's answers, refusals, and limits on size and access."""

import asyncio
import json
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from copy import copy
from urllib.parse import quote

import numpy as np
import pytest

from rcir.data import images
from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.retrieval.retriever import Retriever
from rcir.serving import Settings, create_app
from rcir.serving.batching import PreparedRequest, answer_batch
from rcir.serving.errors import Busy, TooLarge, TooSlow
from rcir.serving.middleware import Bounded
from rcir.serving.schemas import Terms
from rcir.serving.served import Served
from rcir.serving.sources import source_of
from tests.serving.conftest import drawn, listening, png

VECTOR = drawn(1, 5)[0][0]
QUERY = VECTOR.tolist()
JSON = {"content-type": "application/json"}
OPTIONS = (
    {"alpha": 0.2, "delta": 0.1},
    {"alpha": 0.3, "delta": 0.05, "distinct": "label"},
    {"alpha": 0.3, "delta": 0.1, "risk": "recall"},
    {"alpha": 0.5, "delta": 0.1, "abstain": True},
    {"alpha": 0.2, "delta": 0.1, "simultaneous": True},
    {"alpha": 0.2, "delta": None},
    {"alpha": {"miss": 0.3, "false-discovery": 0.9}, "delta": 0.1},
)


def assert_same(response, answer):
    """Assert that a response holds what the retriever answers."""
    expected = answer.to_dict()
    # A batch of another size may add in another order.
    for name in ("distances", "uncertainty", "probabilities"):
        np.testing.assert_allclose(response[name], expected.pop(name), atol=1e-3)
    likely = expected.pop("match_probability")
    assert response["match_probability"] == pytest.approx(likely, abs=1e-3)
    assert {name: response[name] for name in expected} == expected
    assert response["sentence"] == str(answer.guarantee)


def refusal(response):
    return response.status_code, response.json()["error"]


# Answers


def test_vectors_get_the_sets_of_the_retriever(vectors, place, serving):
    queries = drawn(5, 6)[0]
    with serving(place) as client:
        for options in OPTIONS:
            response = client.post("/retrieve", json={"vector": QUERY, **options})
            assert_same(response.json(), vectors.retrieve(VECTOR, **options))
        body = {"vectors": queries.tolist(), "alpha": 0.2}
        batch = client.post("/retrieve/batch", json=body).json()["answers"]
    for response, answer in zip(batch, vectors.retrieve(queries, 0.2, 0.1), strict=True):
        assert_same(response, answer)


def test_pictures_get_the_sets_of_the_retriever(retriever, folder, splits, serving):
    large = np.kron(splits.test.images[0], np.ones((40, 40), np.uint8))
    pictures = [png(picture) for picture in (large, *splits.test.images[:4])]
    with serving(folder) as client:
        for options in ({"alpha": 0.6}, {"alpha": "0.7", "delta": "0.2", "group": "True"}):
            terms = {"delta": 0.1} | {
                name: text if name == "group" else float(text) for name, text in options.items()
            }
            for picture in pictures[:2]:
                response = client.post("/retrieve", data=options, files={"picture": picture})
                assert_same(response.json(), retriever.retrieve(picture, **terms))
        files = [("pictures", picture) for picture in pictures]
        batch = client.post("/retrieve/batch", data={"alpha": 0.6}, files=files).json()["answers"]
    for response, answer in zip(batch, retriever.retrieve(pictures, 0.6, 0.1), strict=True):
        assert_same(response, answer)
    assert len({response["answer"] for response in batch}) == len(pictures)


def test_concurrent_requests_get_their_own_answers(vectors, place, serving):
    queries = drawn(60, 7)[0]
    options = [(*OPTIONS[:3], {"alpha": 0.2, "uncertainty": 1.0})[row % 4] for row in range(60)]
    with serving(place) as client, ThreadPoolExecutor(16) as pool:

        def ask(row):
            return client.post("/retrieve", json={"vector": queries[row].tolist(), **options[row]})

        responses = list(pool.map(ask, range(60)))
        metrics = client.get("/metrics").text
    for query, terms, response in zip(queries, options, responses, strict=True):
        if "uncertainty" in terms:  # it was calibrated without; others of its batch are answered
            assert refusal(response) == (400, "invalid-data")
        else:
            assert_same(response.json(), vectors.retrieve(query, **terms))
    assert "rcir_batch_queries_sum 45.0" in metrics


def test_an_exploration_gives_the_simultaneous_set_of_every_alpha(vectors, place, serving):
    with serving(place) as client:
        explored = client.post("/explore", json={"vector": QUERY}).json()
        for more in ({"alpha": 0.1}, {"risk": "recall"}, {"abstain": True}, {"delta": None}):
            response = client.post("/explore", json={"vector": QUERY} | more)
            assert refusal(response) == (400, "invalid-request")
        body = {"vector": QUERY, "delta": 0.2, "distinct": None}
        assert client.post("/explore", json=body).status_code == 200
    columns = (explored[name] for name in ("alphas", "sizes", "match_probabilities"))
    for alpha, size, likely in list(zip(*columns, strict=True))[::10]:
        answer = vectors.retrieve(VECTOR, alpha, 0.1, simultaneous=True)
        assert answer.size == size
        assert likely == pytest.approx(answer.match_probability, abs=1e-3)
        assert list(answer.ids) == explored["largest"]["ids"][:size]


def test_guarantees_and_ranks_are_those_of_the_calibration(vectors, place, serving):
    with serving(place) as client:
        found = client.get("/guarantees").json()
        response = client.post("/retrieve", json={"vector": QUERY, "alpha": 0.2}).json()
    rows = {row["alpha"]: row for row in found["levels"]["item"]}
    results = vectors.search_labelled(vectors.calibration.calibration_queries)
    answers = vectors.retrieve(results.results.require("queries"), 0.2, 0.1)
    assert rows[0.2]["mean_size"] == pytest.approx(np.mean([one.size for one in answers]))
    assert sum(found["histogram"]["counts"]) == found["n_calibration"] == 630
    assert rows[0.01]["certified"] is (rows[0.01]["mean_size"] is not None)
    uncertainties = vectors.calibration.miss_rule.evidence.uncertainty
    share = np.mean(uncertainties < vectors.retrieve(VECTOR, 0.2, 0.1).uncertainty)
    assert response["uncertainty_rank"] == pytest.approx(share)


# Refusals

INVALID = {
    "too short": ({"vector": [1.0, 2.0]}, "invalid-data"),
    "no numbers": ({"vector": "much"}, "invalid-request"),
    "zero": ({"vector": [0.0] * 8}, "invalid-data"),
    "no level": ({"vector": QUERY, "alpha": 2}, "invalid-level"),
    "an unknown field": ({"vector": QUERY, "alhpa": 0.1}, "invalid-request"),
    "half a letter": (b'{"vector": [1.0], "group": "\\ud800"}', "invalid-request"),
    "no JSON": (b'{"vector": [1.0', "invalid-request"),
    "a truth value as a number": ({"vector": QUERY, "max_size": True}, "invalid-request"),
    "text as a number": ({"vector": QUERY, "alpha": "0.1"}, "invalid-request"),
    "an unknown risk": ({"vector": QUERY, "risk": "luck"}, "invalid-request"),
    "an unknown group": ({"vector": QUERY, "group": "night"}, "invalid-request"),
    "an uncertainty without calibration": ({"vector": QUERY, "uncertainty": 0.5}, "invalid-data"),
}


def test_an_invalid_request_is_refused_and_an_unattainable_alpha_too(vectors, place, serving):
    with pytest.raises(RiskUnattainable) as unattainable:
        vectors.retrieve(VECTOR, 1e-5, 0.1)
    with serving(place) as client:
        for name, (body, kind) in INVALID.items():
            content = body if isinstance(body, bytes) else json.dumps(body)
            response = client.post("/retrieve", content=content, headers=JSON)
            assert refusal(response) == (400, kind), name
            assert len(response.json()["message"]) > 20
        response = client.post("/retrieve", json={"vector": QUERY, "alpha": 1e-5})
    assert refusal(response) == (409, "risk-unattainable")
    assert response.json()["minimum_alpha"] == unattainable.value.minimum_alpha


def test_a_body_of_many_parts_or_faults_is_refused_in_a_few_words(place, serving):
    """To parse them, or to name them all, would keep everybody else waiting."""
    many, most = 2**17, 2**16 - 100
    fields = [", ".join(f'"x{n}": 1' for n in range(n_fields)) for n_fields in (1000, many)]
    bodies = {
        "wrong numbers": f'{{"vectors": [[{"null, " * most} 0]]}}',
        "many dimensions": f'{{"vectors": [[{"0, " * many} 0]]}}',
        "many values": f'{{"vectors": [[0]], "uncertainty": [{"0," * 2**22} 0]}}',
        "empty vectors": f'{{"vectors": [{"[], " * many} [0]]}}',
        "vectors that are none": f'{{"vectors": [{"null, " * most} [0]]}}',
        "unknown fields": f'{{"vectors": [[0]], {fields[0]}}}',
        "many unknown fields": f'{{"vectors": [[0]], {fields[1]}}}',
    }
    with serving(place) as client:
        for name, body in bodies.items():
            response = client.post("/retrieve/batch", content=body, headers=JSON)
            assert refusal(response) == (400, "invalid-request"), name
            assert len(response.json()["message"]) < 200, name
        label = {"answer": "x", "match": True, "label": [1] * most}
        response = client.post("/feedback", json=label)
        assert refusal(response) == (400, "invalid-request")
        assert len(response.json()["message"]) < 500


def png_header(width, height):
    """A PNG file that declares a size, and holds nothing."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    declared = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", declared) + chunk(b"IEND", b"")


def test_an_unusable_picture_is_refused(folder, serving, splits, tmp_path):
    pictures = {
        b"a poem": (400, "invalid-image"),
        b"": (400, "invalid-image"),
        png(splits.test.images[0])[:-40]: (400, "invalid-image"),
        png_header(9000, 9000): (413, "too-large"),
        png_header(60_000, 60_000): (413, "too-large"),
    }
    path = tmp_path / "secret.png"
    path.write_bytes(png(splits.test.images[0]))
    with serving(folder) as client:
        for picture, outcome in pictures.items():
            response = client.post("/retrieve", data={"alpha": 0.6}, files={"picture": picture})
            assert refusal(response) == outcome
        # A path is never read.
        assert client.post("/retrieve", data={"picture": str(path)}).status_code == 415
        response = client.post("/retrieve", files={"picture": (None, str(path))})
        assert refusal(response) == (400, "invalid-request")


def test_vectors_and_pictures_are_distinguished(folder, place, serving):
    with serving(place) as client:
        picture = client.post("/retrieve", files={"picture": png_header(8, 8)})
        neither = client.post("/retrieve", content=b"x", headers={"content-type": "image/png"})
        for item in ("3", "abc"):
            assert client.get(f"/items/{item}/image").status_code == 404
    with serving(folder) as client:
        vector = client.post("/retrieve", json={"vector": [1.0]})
    assert (picture.status_code, vector.status_code, neither.status_code) == (400, 400, 415)
    assert "vector" in picture.json()["message"]
    assert "picture" in vector.json()["message"]


def test_items_whose_names_are_no_files_have_no_pictures(tmp_path, serving, splits):
    names = ["nul\0", "long" * 100, "loop", "..", "a/b", "real"]
    gallery, labels = drawn(500, 1)
    ids = [*names, *map(str, range(494))]
    made = Retriever.from_embeddings(gallery, ids, labels)
    made.calibrate(*drawn(900, 2), score_function="quantile")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "loop").symlink_to("loop")
    (tmp_path / "pictures" / "real").write_bytes(png(splits.test.images[0]))
    with serving(made.save(tmp_path / "made"), pictures=tmp_path / "pictures") as client:
        for name in names:
            response = client.get(f"/items/{quote(name, safe='')}/image")
            assert response.status_code == (200 if name == "real" else 404), name


def test_a_client_that_goes_away_leaves_no_traceback(place, caplog):
    async def scenario():
        async def receive():
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        headers = [(b"host", b"localhost"), (b"content-type", b"multipart/form-data; boundary=x")]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/retrieve"}
        scope |= {"headers": headers, "query_string": b"", "client": ("127.0.0.1", 1)}
        await create_app(source_of(place), Settings(poll=0))(scope, receive, send)

    asyncio.run(scenario())
    assert not caplog.records


def test_an_uncalibrated_retriever_is_not_served_and_a_stale_one_refuses(place, tmp_path, serving):
    gallery, labels = drawn(50, 1)
    bare = Retriever.from_embeddings(gallery, labels=labels).save(tmp_path / "bare")
    with pytest.raises(Exception, match="not calibrated"), serving(bare):
        pass
    with serving(place) as client:
        retriever = client.app.state.service.served.retriever
        retriever.remove([str(retriever.ids[0])])
        response = client.post("/retrieve", json={"vector": QUERY, "alpha": 0.2})
    assert refusal(response) == (409, "stale-calibration")


# Limits of size


def test_the_body_and_the_pictures_of_a_request_are_bounded(folder, serving):
    with serving(folder, most_bytes=1000) as client:
        whole = client.post("/retrieve", files={"picture": b"x" * 2000})
        content = iter([b"x" * 600, b"y" * 600])
        streamed = client.post("/retrieve", content=content, headers=JSON)
    with serving(folder, most_pixels=10_000) as client:
        files = [("pictures", png_header(100, 100))] * 9
        together = client.post("/retrieve/batch", data={"alpha": 0.6}, files=files)
    for response in (whole, streamed, together):
        assert refusal(response) == (413, "too-large")


def test_others_are_answered_while_a_picture_is_decoded(folder, serving, splits, monkeypatch):
    picture, decode, read = png(splits.test.images[0]), threading.Event(), images.read_image

    def slow(*arguments):
        decode.wait(10)
        return read(*arguments)

    def ask():
        return client.post("/retrieve", data={"alpha": 0.6}, files={"picture": picture})

    with serving(folder, capacity=4) as client, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(images, "read_image", slow)
        slowly = [pool.submit(ask) for _ in range(2)]
        service, until = client.app.state.service, time.monotonic() + 10
        while service.undecoded.used < 2:
            assert time.monotonic() < until
            time.sleep(0.001)
        assert client.get("/health").status_code == 200
        assert refusal(ask()) == (429, "busy")  # one client has half of the capacity
        assert "2 queries wait to be decoded for testclient, and 1 more" in ask().text
        assert not any(one.done() for one in slowly)
        decode.set()
        assert [one.result().status_code for one in slowly] == [200, 200]
        assert ask().status_code == 200


def test_the_time_for_decoding_is_limited_and_includes_the_wait_for_a_thread(
    folder, serving, splits
):
    class Slow(ThreadPoolExecutor):
        def submit(self, work, /, *arguments):
            return super().submit(lambda: (time.sleep(0.3), work(*arguments))[1])

    with serving(folder, decode_seconds=0.25) as client, Slow(1) as slow:
        client.app.state.service.decoders = slow
        files = {"picture": png(splits.test.images[0])}
        assert refusal(client.post("/retrieve", files=files)) == (400, "invalid-image")


@pytest.mark.parametrize("declared", [None, b"55", b"5"])
def test_bodies_in_progress_are_limited_together_and_by_client_and_end_in_time(declared):
    headers = [] if declared is None else [(b"content-length", declared)]  # it may be wrong

    async def scenario():
        received = []

        def receiving(n):
            """A client that sends n bytes, and then stalls."""
            messages = [{"type": "http.request", "body": b"x" * n, "more_body": True}]

            async def receive():
                if not messages:
                    await asyncio.Event().wait()
                return messages.pop()

            return receive

        async def app(scope, receive, send):
            received.append((scope["client"][0], len((await receive())["body"])))
            await receive()

        async def send(*requests):
            outcomes = await asyncio.gather(
                *(
                    bounded({"type": "http", "headers": headers, "client": (client, 1)}, receive, 0)
                    for client, receive in ((client, receiving(n)) for client, n in requests)
                ),
                return_exceptions=True,
            )
            return [type(outcome) for outcome in outcomes]

        bounded = Bounded(app, limit=60, total=120, seconds=0.1)
        outcomes = await send(("slow", 55), ("slow", 55), ("other", 60), ("slow", 5), ("third", 5))
        assert outcomes == [TooSlow, Busy, TooSlow, TooSlow, Busy]
        assert received == [("slow", 55), ("other", 60), ("slow", 5)]
        assert await send(("slow", 61), ("slow", 60)) == [TooLarge, TooSlow]  # there is room again

    asyncio.run(scenario())


@pytest.fixture
def address():
    """`address(**settings)`: of a server that answers "ok" by uvicorn, with the guards of ours."""
    with ExitStack() as stack:

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ok"})

        def start(**settings):
            server = listening(app, Settings(port=0, **settings), lifespan="off")
            return "127.0.0.1", stack.enter_context(server)

        yield start


def connect(address, text=b""):
    connection = socket.create_connection(address, timeout=10)
    connection.sendall(text)
    return connection


REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


def test_a_connection_without_headers_is_closed_in_time(address):
    place = address(header_seconds=0.3)
    whole = connect(place, REQUEST + b"\r\n")
    assert whole.recv(1000).startswith(b"HTTP/1.1 200")
    whole.sendall(REQUEST)  # the next one, whose end does not come
    for connection in (connect(place), connect(place, REQUEST), whole):
        began = time.monotonic()
        with connection:
            assert connection.recv(1000) == b""
        assert time.monotonic() - began < 4  # before uvicorn closes it between two requests


def test_a_client_has_so_many_connections_at_once(address):
    place = address(client_connections=2)
    idle = [connect(place, REQUEST) for _ in range(2)]
    with connect(place) as third, suppress(ConnectionResetError):
        assert third.recv(1000) == b""
    idle.pop().close()
    until, answer = time.monotonic() + 10, b""
    while not answer and time.monotonic() < until:  # the server notices the closed one soon
        with connect(place) as again, suppress(ConnectionError):
            again.sendall(REQUEST + b"\r\n")
            answer = again.recv(1000)
    assert answer.startswith(b"HTTP/1.1 200")
    idle.pop().close()


# Access


def test_a_token_is_required_where_one_is_set(place, serving):
    token = "0123456789abcdef"
    with serving(place, token=token) as client:
        body = {"vector": QUERY, "alpha": 0.2}
        for value in (None, "Bearer wrong", token, f"Basic {token}"):
            headers = {} if value is None else {"authorization": value}
            response = client.post("/retrieve", json=body, headers=headers)
            assert refusal(response) == (401, "unauthorized")
        for scheme in ("Bearer", "bearer"):
            headers = {"authorization": f"{scheme} {token}"}
            assert client.post("/retrieve", json=body, headers=headers).status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/health").status_code == client.get("/").status_code == 200


def test_hosts_other_than_loopback_need_a_token():
    with pytest.raises(InvalidConfig, match="RCIR_TOKEN"):
        Settings(host="0.0.0.0")
    for token in ("short", "sixteen letters o", "sechzehn-Zeichen-ü"):
        with pytest.raises(InvalidConfig, match="16"):
            Settings(host="0.0.0.0", token=token)
    assert Settings(host="0.0.0.0", token="0123456789abcdef").local is False
    assert Settings(host="::1").local


def test_other_host_names_and_pages_of_other_sites_are_refused(place, serving):
    local = {"origin": "http://localhost", "sec-fetch-site": "same-origin"}
    with serving(place) as client:
        for host in ("127.0.0.1:8000", "localhost", "[::1]:80"):
            assert client.get("/guarantees", headers={"host": host}).status_code == 200
        for host in ("evil.example", "[::1"):
            response = client.get("/guarantees", headers={"host": host})
            assert refusal(response) == (403, "forbidden")
        for headers, status in (
            ({"origin": "http://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"sec-fetch-site": "cross-site"}, 403),
            (local, 200),
        ):
            body = {"vector": QUERY, "alpha": 0.2}
            assert client.post("/retrieve", json=body, headers=headers).status_code == status
        picture = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        assert client.get("/items/3/image", headers=picture).status_code == 403
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert client.get("/", headers=link).status_code == 200
    with serving(place, host="127.0.0.2") as client:
        assert client.get("/guarantees", headers={"host": "127.0.0.2:8000"}).status_code == 200


def test_keys_and_encounters_get_the_sets_of_the_retriever(tmp_path, serving):
    gallery, labels = drawn(500, 1)
    queries, query_labels = (np.repeat(values, 2, axis=0) for values in drawn(300, 2))
    queries = queries + 0.1 * np.random.default_rng(0).normal(size=queries.shape)
    sites, visits = np.resize(["north", "south"], 600), np.repeat(np.arange(300), 2).astype(str)
    keys = np.repeat(sites[:300], 2)
    retriever = Retriever.from_embeddings(
        gallery, labels=labels, keys=np.resize(sites, 500), key="site"
    )
    retriever.calibrate(queries, query_labels, keys=keys, encounters=visits)
    folder = retriever.save(tmp_path / "keyed")
    new = drawn(4, 3)[0]
    with serving(folder) as client:
        sent = {"vectors": new.tolist(), "alpha": 0.4, "key": "south", "together": True}
        (answer,) = client.post("/retrieve/batch", json=sent).json()["answers"]
        expected = retriever.retrieve(new, 0.4, 0.1, key="south", together=True)
        assert answer["ids"] == list(expected.ids)
        names, each = ["a", "b", "a", "b"], ["north", "south", "north", "south"]
        sent |= {"key": each, "together": names}
        answers = client.post("/retrieve/batch", json=sent).json()["answers"]
        expected = retriever.retrieve(new, 0.4, 0.1, key=each, together=names)
        assert [answer["ids"] for answer in answers] == [list(each.ids) for each in expected]
        assert [answer["encounter"] for answer in answers] == ["a", "b"]
        reported = {"answer": answer["answer"], "match": True}
        assert client.post("/feedback", json=reported).json()["watched"]
        del sent["key"]
        assert "site" in client.post("/retrieve/batch", json=sent).json()["message"]
        alone = {"vector": new[0].tolist(), "alpha": 0.4, "key": "north"}
        assert "encounters" in client.post("/retrieve", json=alone).json()["message"]


def test_several_pictures_of_one_query_are_sent_as_a_form(retriever, splits, tmp_path, serving):
    labels = np.repeat(splits.calibration.labels[::2], 2)
    visits = np.repeat(np.arange(len(labels) // 2), 2).astype(str)
    of_encounters, pictures = copy(retriever), list(splits.calibration.images[: len(visits)])
    of_encounters.calibrate(pictures, labels[: len(visits)], encounters=visits)
    folder = of_encounters.save(tmp_path / "encounters")
    sent = [("picture", png(np.asarray(image))) for image in splits.test.images[:3]]
    fields = {"alpha": "0.5", "together": "true"}
    expected = of_encounters.retrieve(list(splits.test.images[:3]), 0.5, 0.1, together=True)
    with serving(folder) as client:
        answer = client.post("/retrieve", files=sent, data=fields).json()
        assert answer["ids"] == list(expected.ids)
        levels = client.post("/explore", files=sent, data={"together": "true"}).json()
        assert levels["largest"]["size"] >= answer["size"]
        refused = client.post("/retrieve", files=sent, data={"alpha": "0.5"})
        assert refusal(refused) == (400, "invalid-request")


def test_requests_that_are_answered_together_keep_their_keys_and_encounters():
    gallery, labels = drawn(500, 1)
    queries, query_labels = drawn(400, 2)
    keys = np.resize(["north", "south"], 500)
    retriever = Retriever.from_embeddings(gallery, labels=labels, keys=keys, key="site")
    retriever.calibrate(
        queries, query_labels, keys=keys[:400], encounters=np.arange(400).astype(str)
    )
    served = Served(retriever, version="", manifest="")
    new = drawn(3, 3)[0]
    asked = [("north", True), ("south", True), ("south", ["a", "b", "a"]), ("east", True)]
    batch = [
        PreparedRequest(
            served,
            served.vectors(new.tolist(), None, None),
            Terms(alpha=0.4, key=key, together=together),
        )
        for key, together in asked
    ]
    *outcomes, refused = answer_batch(batch)
    assert isinstance(refused, InvalidData)
    for (key, together), (stored, answers) in zip(asked, outcomes, strict=False):
        expected = retriever.retrieve(new, 0.4, 0.1, key=key, together=together)
        expected = expected if isinstance(expected, list) else [expected]
        assert [answer.ids for answer in answers] == [each.ids for each in expected]
        assert (stored.keys == key).all()
        assert len(stored) == len(answers)
