"""A new version takes over between two batches; a bad one is refused."""

import json
import shutil
import threading
import time

import pytest

import rcir
from rcir.retrieval.retriever import Retriever
from rcir.serving import service
from rcir.serving.sources import ready_to_serve
from rcir.serving.store import StoreUnavailable
from tests.serving.conftest import drawn

QUERY = {"vector": drawn(1, 5)[0][0].tolist(), "alpha": 0.2}


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def changed(place):
    """Another version of the retriever in a folder."""
    retriever = rcir.load(place)
    retriever.remove([str(retriever.ids[-1])])
    retriever.recalibrate()
    retriever.save(place)
    return retriever


def test_a_new_version_is_served_while_requests_come(place, serving):
    with serving(place, poll=0.05) as client:
        before = client.get("/ready").json()["version"]
        stop, statuses = threading.Event(), []

        def ask():
            while not stop.is_set():
                statuses.append(client.post("/retrieve", json=QUERY).status_code)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        retriever = changed(place)
        until(lambda: client.get("/ready").json()["version"] != before)
        stop.set()
        for thread in threads:
            thread.join()
        assert len(statuses) > 20
        assert set(statuses) == {200}
        answer = client.post("/retrieve", json=QUERY).json()
        assert (
            answer["guarantee"]["threshold"]
            == retriever.retrieve(drawn(1, 5)[0][0], 0.2, 0.1).guarantee.threshold
        )
        assert client.get("/guarantees").json()["n_items"] == 499
        metrics = client.get("/metrics").text
    assert 'rcir_swaps_total{outcome="taken"} 1.0' in metrics
    assert f'rcir_model{{version="{before}"}}' not in metrics


def damaged(place):
    (place / "norms.npy").write_bytes(b"nothing")
    manifest = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps(manifest | {"note": "x"}))


def uncalibrated(place):
    bare = Retriever.from_embeddings(drawn(50, 1)[0], labels=drawn(50, 1)[1])
    bare.save(place)


def gone(place):
    shutil.rmtree(place)


@pytest.mark.parametrize("spoil", [damaged, uncalibrated, gone])
def test_a_bad_version_is_refused_and_the_old_one_goes_on(vectors, place, serving, spoil):
    with serving(place, poll=0.05) as client:
        before = client.get("/ready").json()
        assert before["trouble"] is None
        spoil(place)
        until(lambda: client.get("/ready").json()["trouble"] is not None)
        after = client.get("/ready").json()
        assert after["version"] == before["version"]
        assert f"{before['version']} goes on" in after["trouble"]
        assert client.post("/retrieve", json=QUERY).status_code == 200
        if spoil is gone:
            vectors.save(place)
        else:
            shutil.rmtree(place)
            vectors.save(place)
        until(lambda: client.get("/ready").json()["trouble"] is None)


def test_feedback_on_an_earlier_version_is_kept_and_does_not_speak_of_this_one(place, serving):
    with serving(place, poll=0.05) as client:
        before = client.get("/ready").json()["version"]
        answer = client.post("/retrieve", json=QUERY).json()["answer"]
        changed(place)
        until(lambda: client.get("/ready").json()["version"] != before)
        labelled = {"answer": answer, "match": False, "label": 3}
        refused = client.post("/feedback", json=labelled)
        assert (refused.status_code, refused.json()["error"]) == (400, "invalid-data")
        assert "without a label" in refused.json()["message"]
        said = client.post("/feedback", json={"answer": answer, "match": False}).json()
        assert said == {"accepted": True, "new": True, "watched": False, "alarm": False}
        assert client.get("/monitor").json()["guarantees"] == []


def test_a_version_that_was_refused_is_tried_again(vectors, place, serving, monkeypatch):
    monkeypatch.setattr(service, "AGAIN", 0.2)
    with serving(place, poll=0.05) as client:
        before = client.get("/ready").json()["version"]
        tried = []

        def ready(*given):
            tried.append(given)
            if len(tried) == 1:
                raise StoreUnavailable("the disk is full for a moment")
            return ready_to_serve(*given)

        monkeypatch.setattr(service, "ready_to_serve", ready)
        changed(place)
        until(lambda: client.get("/ready").json()["trouble"] is not None)
        until(lambda: client.get("/ready").json()["version"] != before)
        assert client.get("/ready").json()["trouble"] is None
        assert len(tried) == 2


def test_while_it_stops_it_is_not_ready(place, serving):
    with serving(place) as client:
        client.portal.call(client.app.state.service.batcher.stop)
        found = client.get("/ready")
        assert (found.status_code, found.json()["ready"]) == (503, False)
        assert client.post("/retrieve", json=QUERY).status_code == 503
