"""Refusals over HTTP: with a status, a kind, and words."""

import asyncio
import json
import struct
import zlib

import pytest

from rcir.errors import InvalidConfig
from rcir.retrieval.retriever import Retriever
from rcir.serving import Settings
from rcir.serving.guards import Bounded, Overloaded
from tests.serving.conftest import drawn, png

QUERY = drawn(1, 5)[0][0].tolist()


def header_of(width, height):
    """A PNG file that declares a size, and holds nothing."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    declared = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", declared) + chunk(b"IEND", b"")


VECTORS = {
    "too short": ({"vector": [1.0, 2.0]}, 400, "invalid-data"),
    "no numbers": ({"vector": "much"}, 400, "invalid-request"),
    "zero": ({"vector": [0.0] * 8}, 400, "invalid-data"),
    "no level": ({"vector": QUERY, "alpha": 2}, 400, "invalid-level"),
    "an unknown field": ({"vector": QUERY, "alhpa": 0.1}, 400, "invalid-request"),
    "half a letter": (b'{"vector": [1.0], "group": "\\ud800"}', 400, "invalid-request"),
    "no JSON": (b'{"vector": [1.0', 400, "invalid-request"),
    "an unknown risk": ({"vector": QUERY, "risk": "luck"}, 400, "invalid-request"),
    "an unknown group": ({"vector": QUERY, "group": "night"}, 400, "invalid-request"),
    "uncertainty that was not calibrated with": (
        {"vector": QUERY, "uncertainty": 0.5},
        400,
        "invalid-data",
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_a_request_that_cannot_be_answered_is_refused_in_words(place, serving, name):
    body, status, kind = VECTORS[name]
    with serving(place) as client:
        sent = body if isinstance(body, bytes) else json.dumps(body)
        headers = {"content-type": "application/json"}
        found = client.post("/retrieve", content=sent, headers=headers)
    assert (found.status_code, found.json()["error"]) == (status, kind)
    assert len(found.json()["message"]) > 20


def test_a_bad_request_spoils_no_other_of_its_batch(vectors, place, serving):
    with serving(place) as client:
        service = client.app.state.service
        asked = [{"vector": QUERY}, {"vector": QUERY, "uncertainty": 1.0}, {"vector": QUERY}]
        from rcir.serving.answering import PreparedRequest, answered
        from rcir.serving.terms import Terms

        served, terms = service.served, Terms(alpha=0.2)
        prepared = [
            served.vectors([one["vector"]], [one["uncertainty"]] if len(one) > 1 else None, None)
            for one in asked
        ]
        outcomes = answered([PreparedRequest(served, one, terms) for one in prepared])
    size = vectors.retrieve(drawn(1, 5)[0][0], 0.2, 0.1).size
    assert [outcomes[row][1][0].size for row in (0, 2)] == [size, size]
    assert isinstance(outcomes[1], Exception)


def test_an_exploration_takes_no_alpha(place, serving):
    with serving(place) as client:
        for more in ({"alpha": 0.1}, {"risk": "recall"}, {"abstain": True}, {"delta": None}):
            found = client.post("/explore", json={"vector": QUERY} | more)
            assert (found.status_code, found.json()["error"]) == (400, "invalid-request")
        asked = {"vector": QUERY, "delta": 0.2, "distinct": None}
        assert client.post("/explore", json=asked).status_code == 200


PICTURES = {
    "no picture": (b"a poem", 400, "invalid-image"),
    "nothing": (b"", 400, "invalid-image"),
    "more pixels than are decoded": (header_of(9000, 9000), 413, "too-large"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_that_cannot_be_used_is_refused_in_words(folder, serving, name):
    picture, status, kind = PICTURES[name]
    with serving(folder) as client:
        found = client.post("/retrieve", data={"alpha": 0.6}, files={"picture": picture})
    assert (found.status_code, found.json()["error"]) == (status, kind)


def test_a_truncated_picture_is_refused(folder, serving, splits):
    cut = png(splits.test.images[0])[:-40]
    with serving(folder) as client:
        found = client.post("/retrieve", data={"alpha": 0.6}, files={"picture": cut})
    assert (found.status_code, found.json()["error"]) == (400, "invalid-image")


def test_a_body_is_bounded(folder, serving):
    with serving(folder, most_bytes=1000) as client:
        found = client.post("/retrieve", files={"picture": b"x" * 2000})
        streamed = client.post(
            "/retrieve",
            content=iter([b"x" * 600, b"y" * 600]),
            headers={"content-type": "application/json"},
        )
    assert (found.status_code, found.json()["error"]) == (413, "too-large")
    assert streamed.status_code == 413
    assert "1,000 bytes" in found.json()["message"]


def test_the_pictures_of_a_request_are_bounded_together(folder, serving):
    with serving(folder, most_pixels=10_000) as client:
        files = [("pictures", header_of(100, 100))] * 9
        found = client.post("/retrieve/batch", data={"alpha": 0.6}, files=files)
    assert (found.status_code, found.json()["error"]) == (413, "too-large")
    assert "90,000 pixels together" in found.json()["message"]


def test_the_bodies_of_all_requests_under_way_are_bounded():
    sizes, held = [], []

    async def app(scope, receive, send):
        sizes.append(len((await receive())["body"]))
        await held[-1].wait()

    async def receive():
        return {"type": "http.request", "body": b"x" * 60, "more_body": False}

    async def scenario(headers):
        bounded = Bounded(app, most=60, most_together=100)
        scope = {"type": "http", "headers": headers}
        held.append(asyncio.Event())
        first = asyncio.create_task(bounded(scope, receive, None))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="more than 100 bytes"):
            await bounded(scope, receive, None)
        held[-1].set()
        await first
        await bounded(scope, receive, None)  # there is room again

    # A body that is chunked may be longer than it declares.
    for headers in ([], [(b"content-length", b"60")], [(b"content-length", b"5")]):
        sizes.clear()
        asyncio.run(scenario(headers))
        assert sizes == [60, 60]


def test_vectors_and_pictures_are_told_apart(folder, place, serving):
    with serving(place) as client:
        picture = client.post("/retrieve", files={"picture": header_of(8, 8)})
        neither = client.post("/retrieve", content=b"x", headers={"content-type": "image/png"})
    with serving(folder) as client:
        vector = client.post("/retrieve", json={"vector": [1.0]})
    assert picture.status_code == vector.status_code == 400
    assert neither.status_code == 415
    assert "vector" in picture.json()["message"]
    assert "picture" in vector.json()["message"]


def test_a_path_that_is_given_as_picture_is_not_read(folder, serving, tmp_path, splits):
    (tmp_path / "secret.png").write_bytes(png(splits.test.images[0]))
    with serving(folder) as client:
        path = str(tmp_path / "secret.png")
        urlencoded = client.post("/retrieve", data={"picture": path})
        multipart = client.post("/retrieve", files={"picture": (None, path)})
    assert urlencoded.status_code == 415
    assert (multipart.status_code, multipart.json()["error"]) == (400, "invalid-request")


def test_a_token_is_asked_for_where_one_is_set(place, serving):
    token = "0123456789abcdef"
    with serving(place, token=token) as client:
        body = {"vector": QUERY, "alpha": 0.2}
        for given in (None, "Bearer wrong", token):
            headers = {} if given is None else {"authorization": given}
            found = client.post("/retrieve", json=body, headers=headers)
            assert (found.status_code, found.json()["error"]) == (401, "unauthorized")
        bearer = {"authorization": f"Bearer {token}"}
        assert client.post("/retrieve", json=body, headers=bearer).status_code == 200
        assert client.get("/metrics").status_code == 401
        assert client.get("/health").status_code == client.get("/").status_code == 200


def test_others_than_loopback_need_a_token():
    with pytest.raises(InvalidConfig, match="RCIR_TOKEN"):
        Settings(host="0.0.0.0")
    for token in ("short", "sixteen letters o", "sechzehn-Zeichen-ü"):
        with pytest.raises(InvalidConfig, match="16 or more"):
            Settings(host="0.0.0.0", token=token)
    assert Settings(host="0.0.0.0", token="0123456789abcdef").local is False
    assert Settings(host="::1").local


def test_a_name_from_elsewhere_that_points_here_is_refused(place, serving):
    with serving(place) as client:
        refused = client.get("/guarantees", headers={"host": "evil.example"})
        assert (refused.status_code, refused.json()["error"]) == (403, "forbidden")
        for own in ("127.0.0.1:8000", "localhost", "[::1]:80"):
            assert client.get("/guarantees", headers={"host": own}).status_code == 200
    with serving(place, host="127.0.0.2") as client:
        assert client.get("/guarantees", headers={"host": "127.0.0.2:8000"}).status_code == 200


def test_a_page_from_elsewhere_may_not_ask(place, serving):
    with serving(place) as client:
        for headers, status in (
            ({"origin": "http://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"sec-fetch-site": "cross-site"}, 403),
            ({"origin": "http://localhost", "sec-fetch-site": "same-origin"}, 200),
        ):
            body = {"vector": QUERY, "alpha": 0.2}
            assert client.post("/retrieve", json=body, headers=headers).status_code == status
        picture = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        assert client.get("/items/3/image", headers=picture).status_code == 403
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert client.get("/", headers=link).status_code == 200


def test_a_retriever_that_is_not_calibrated_is_not_served(vectors, tmp_path, serving):
    bare = Retriever.from_embeddings(drawn(50, 1)[0], labels=drawn(50, 1)[1])
    place = bare.save(tmp_path / "bare")
    with pytest.raises(Exception, match="not calibrated"), serving(place):
        pass


def test_a_stale_calibration_is_refused(place, serving):
    with serving(place) as client:
        retriever = client.app.state.service.served.retriever
        retriever.remove([str(retriever.ids[0])])
        found = client.post("/retrieve", json={"vector": QUERY, "alpha": 0.2})
    assert (found.status_code, found.json()["error"]) == (409, "stale-calibration")


def test_items_without_pictures_are_said_to_have_none(place, serving):
    with serving(place) as client:
        none = client.get("/items/3/image")
        unknown = client.get("/items/abc/image")
    assert (none.status_code, unknown.status_code) == (404, 404)
    assert "--pictures" in none.json()["message"]
    assert "no item" in unknown.json()["message"]
