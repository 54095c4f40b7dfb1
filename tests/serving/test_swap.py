"""A new version takes over between two batches; a bad one is refused."""

import json
import shutil
import threading
import time

import pytest

import rcir
from rcir.retrieval.retriever import Retriever
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
        said = client.post("/feedback", json={"answer": answer, "match": False}).json()
        assert said == {"accepted": True, "new": True, "watched": False, "alarm": False}
        assert client.get("/monitor").json()["guarantees"] == []
