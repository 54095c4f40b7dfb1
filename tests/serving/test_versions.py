"""A new version of the retriever, in a folder or in MLflow's registry, replaces the served one."""

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import rcir
from calibration import CertificationConfig, certify
from rcir import api
from rcir.errors import InvalidConfig, NoRetriever
from rcir.registry import register
from rcir.retrieval.retriever import Retriever
from rcir.serving import service
from rcir.serving.errors import StoreUnavailable
from rcir.serving.sources import ready_to_serve, source_of
from rcir.store.folder import current_version
from tests.serving.conftest import drawn

VECTOR = drawn(1, 5)[0][0]
QUERY = {"vector": VECTOR.tolist(), "alpha": 0.2}


def ready(client):
    return client.get("/ready").json()


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def change(place):
    """Save another version of the retriever in a folder; return it."""
    retriever = rcir.load(place)
    retriever.remove([str(retriever.ids[-1])])
    retriever.recalibrate()
    retriever.save(place)
    return retriever


def test_a_new_version_takes_over_while_requests_are_answered(place, serving):
    def threshold(retriever):
        return retriever.retrieve(VECTOR, 0.2, 0.1).guarantee.threshold

    with serving(place, poll=0.05) as client, ThreadPoolExecutor(4) as pool:
        before, stop = ready(client)["version"], threading.Event()
        expected = {before: threshold(rcir.load(place))}

        def ask():
            responses = []
            while not stop.is_set():
                responses.append(client.post("/retrieve", json=QUERY))
            return responses

        asking = [pool.submit(ask) for _ in range(4)]
        retriever = change(place)
        until(lambda: ready(client)["version"] != before)
        stop.set()
        responses = [response for future in asking for response in future.result()]
        responses.append(client.post("/retrieve", json=QUERY))
        assert {response.status_code for response in responses} == {200}
        expected[ready(client)["version"]] = threshold(retriever)
        answers = [response.json() for response in responses]
        assert {answer["version"] for answer in answers} == set(expected)
        for answer in answers:
            assert answer["guarantee"]["threshold"] == pytest.approx(expected[answer["version"]])
        assert client.get("/guarantees").json()["n_items"] == 499
        metrics = client.get("/metrics").text
    assert 'rcir_swaps_total{outcome="taken"} 1.0' in metrics
    assert f'rcir_model{{version="{before}"}}' not in metrics


def damage(place):
    version = current_version(place)
    (version / "retriever.safetensors").write_bytes(b"nothing")
    manifest = json.loads((version / "manifest.json").read_text())
    (version / "manifest.json").write_text(json.dumps(manifest | {"note": "x"}))


def save_uncalibrated(place):
    gallery, labels = drawn(50, 1)
    Retriever.from_embeddings(gallery, labels=labels).save(place)


@pytest.mark.parametrize("spoil", [damage, save_uncalibrated, shutil.rmtree])
def test_an_invalid_version_is_refused_and_the_previous_one_stays(vectors, place, serving, spoil):
    with serving(place, poll=0.05) as client:
        before = ready(client)
        assert before["trouble"] is None
        spoil(place)
        until(lambda: ready(client)["trouble"] is not None)
        after = ready(client)
        assert after["version"] == before["version"]
        assert before["version"] in after["trouble"]
        assert client.post("/retrieve", json=QUERY).status_code == 200
        shutil.rmtree(place, ignore_errors=True)
        vectors.save(place)
        until(lambda: ready(client)["trouble"] is None)


def test_a_refused_version_is_tried_again(place, serving, monkeypatch):
    monkeypatch.setattr(service, "RETRY_SECONDS", 0.2)
    with serving(place, poll=0.05) as client:
        before = ready(client)["version"]
        attempts = []

        def full_at_first(*arguments):
            attempts.append(arguments)
            if len(attempts) == 1:
                raise StoreUnavailable("the disk is full for a moment")
            return ready_to_serve(*arguments)

        monkeypatch.setattr(service, "ready_to_serve", full_at_first)
        change(place)
        until(lambda: ready(client)["trouble"] is not None)
        until(lambda: ready(client)["version"] != before)
        assert ready(client)["trouble"] is None
        assert len(attempts) == 2


def test_feedback_on_an_earlier_version_is_kept_but_not_evidence_on_this_one(place, serving):
    with serving(place, poll=0.05) as client:
        before = ready(client)["version"]
        answer = client.post("/retrieve", json=QUERY).json()["answer"]
        change(place)
        until(lambda: ready(client)["version"] != before)
        labelled = {"answer": answer, "match": False, "label": 3}
        refused = client.post("/feedback", json=labelled)
        assert (refused.status_code, refused.json()["error"]) == (400, "invalid-data")
        outcome = client.post("/feedback", json={"answer": answer, "match": False}).json()
        assert outcome == {"accepted": True, "new": True, "watched": False, "alarm": False}
        assert client.get("/monitor").json()["guarantees"] == []


def test_a_stopping_server_is_not_ready(place, serving):
    with serving(place) as client:
        client.portal.call(client.app.state.service.batcher.stop)
        response = client.get("/ready")
        assert (response.status_code, response.json()["ready"]) == (503, False)
        assert client.post("/retrieve", json=QUERY).status_code == 503


# MLflow's registry


@pytest.fixture
def certified(tmp_path, new_store, monkeypatch):
    """`certified(name)`: a tracked calibration of the same vectors, in a folder of that name."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_store(tmp_path / "registry.db"))
    for name, n, seed in (("gallery", 300, 1), ("queries", 900, 2)):
        vectors, labels = drawn(n, seed)
        ids = [f"{name} {row}" for row in range(n)]
        np.savez(tmp_path / f"{name}.npz", vector=vectors, label=labels, id=ids)

    def certified(name):
        files = (str(tmp_path / f"{part}.npz") for part in ("gallery", "queries"))
        config = CertificationConfig(*files, output=str(tmp_path / name), score_function="quantile")
        return certify(config).folder.parent

    return certified


@pytest.mark.slow
def test_a_server_follows_an_alias_and_stays_up_without_the_registry(
    certified, serving, monkeypatch
):
    first, second = certified("first"), certified("second")
    with pytest.raises(NoRetriever, match="rcir register"):
        source_of("models:/kinds@champion").version()
    with pytest.raises(InvalidConfig, match="NAME@ALIAS"):
        source_of("runs:/abc/retriever")
    register(str(first), "kinds", "champion")
    with serving("models:/kinds@champion", poll=0.1) as client:
        assert ready(client)["version"].startswith("kinds/1-")
        register(str(second), "kinds", "champion")
        until(lambda: ready(client)["version"].startswith("kinds/2-"))
        assert client.post("/retrieve", json=QUERY).json()["version"].startswith("kinds/2-")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        until(lambda: ready(client)["trouble"] is not None)
        assert "127.0.0.1:9" in ready(client)["trouble"]
        assert client.post("/retrieve", json=QUERY).status_code == 200


def test_replicas_with_a_gpu_embed_on_it(place, monkeypatch):
    moved = []
    encoder = SimpleNamespace(cuda=lambda: moved.append(True))
    for retriever in (SimpleNamespace(encoder=encoder), SimpleNamespace(encoder=None)):
        monkeypatch.setattr(api, "load", lambda place, retriever=retriever: retriever)
        for on_gpu in (False, True):
            source = source_of(place, on_gpu)
            assert source.load(source.version()).retriever is retriever
            assert len(moved) == (on_gpu and retriever.encoder is not None)
        moved.clear()
