"""Queries to try, candidates outside sets and pictures of items, as the page requests them."""

import io

import numpy as np
import pytest
from PIL import Image

from rcir.data import Preprocessing
from rcir.encoders import EncoderConfig
from rcir.encoders.batches import embed
from rcir.retrieval.fingerprints import model_digest
from rcir.retrieval.retriever import Retriever
from rcir.serving.served import Served
from tests.encoders.small import build
from tests.serving.conftest import drawn, png

IDS = [f"a/{n}.png" for n in range(900)]
VISITS = np.arange(900) // 3  # three pictures of each
LABELS = np.array([f"kind {n}" for n in np.repeat(drawn(300, 1)[1], 3)])
VECTORS = drawn(900, 3)[0]
SHADES = np.random.default_rng(0).integers(256, size=(600, 900, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    """The folder of a retriever that half of its items calibrated, and that names pictures."""
    options = {"metric": "cosine", "leave_one_out": True, "depth": 150}
    visits, folder = VISITS.astype(str), tmp_path_factory.mktemp("items")
    made = Retriever.from_embeddings(VECTORS, IDS, LABELS, clusters=visits, **options)
    made.calibrate(VECTORS[:450], LABELS[:450], "quantile", clusters=visits[:450])
    (folder / "pictures" / "a").mkdir(parents=True)
    Image.fromarray(SHADES).save(folder / "pictures" / IDS[0])
    Image.fromarray(SHADES[:8, :16]).save(folder / "pictures" / IDS[1])
    made.origin = {"pictures": str(folder / "pictures")}
    return made.save(folder / "retriever")


def test_a_random_item_did_not_calibrate_and_is_searched_without_its_cluster(items, serving):
    unit = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
    with serving(items) as client:
        for _ in range(20):
            sample = client.get("/sample").json()
            row = IDS.index(sample["item"])
            assert row >= 450
            assert (sample["new"], sample["label"]) == (True, LABELS[row])
            body = {"item": sample["item"], "alpha": 0.5, "outside": 20}
            answer = client.post("/retrieve", json=body).json()
            distances = np.linalg.norm(unit - unit[row], axis=1)
            distances[VISITS[row] == VISITS] = np.inf
            nearest = [IDS[place] for place in np.argsort(distances)[: answer["size"] + 20]]
            assert answer["ids"] + answer["outside"]["ids"] == nearest


def test_candidates_outside_follow_in_the_order_of_the_search(vectors, place, serving):
    query = drawn(1, 5)[0]
    rows = vectors.search(query).positions[0]
    body = {"vector": query[0].tolist()}
    with serving(place) as client:
        assert "outside" not in client.post("/retrieve", json=body | {"alpha": 0.5}).json()
        answer = client.post("/retrieve", json=body | {"alpha": 0.5, "outside": 7}).json()
        largest = client.post("/explore", json=body | {"outside": 5}).json()["largest"]
        for more in ({"outside": 101}, {"item": "0"}, {"vector": None}):
            assert client.post("/explore", json=body | more).status_code == 400
        sample = client.get("/sample").json()
    following = rows[answer["size"] :][:7]
    assert answer["outside"]["ids"] == vectors.ids[following].tolist()
    assert answer["outside"]["labels"] == vectors.labels[following].tolist()
    assert (np.diff(answer["outside"]["probabilities"]) <= 0).all()
    first = vectors.ids[rows[: largest["size"] + 5]].tolist()
    assert largest["ids"] + largest["outside"]["ids"] == first
    calibration = vectors.calibration.calibration_queries
    row = (calibration.vectors == np.float32(sample["vector"])).all(axis=1).argmax()
    assert (sample["label"], sample["new"]) == (calibration.population.labels[row], False)


def test_large_pictures_become_small_and_small_ones_stay_as_they_are(items, serving):
    with serving(items) as client:
        assert client.get("/guarantees").json()["pictures"]
        large, small, none = (client.get(f"/items/a%2F{n}.png/image") for n in range(3))
    assert (large.headers["content-type"], none.status_code) == ("image/jpeg", 404)
    assert Image.open(io.BytesIO(large.content)).size == (480, 320)
    assert np.array_equal(Image.open(io.BytesIO(small.content)), SHADES[:8, :16])


def test_vectors_and_pictures_of_one_model_are_answered_together():
    encoder, preprocessing = build(EncoderConfig("deterministic")).eval(), Preprocessing()
    pictures = SHADES[:200, :128, 0].reshape(-1, 8, 16)
    vectors = embed(encoder, preprocessing, pictures).vectors.numpy()
    model = f"small@{model_digest(encoder, preprocessing)}"
    made = Retriever.from_embeddings(vectors, model=model)
    made.attach_encoder(encoder, preprocessing)
    served = Served(made, version="", manifest="")
    files = served.pictures([png(picture) for picture in pictures[1:3]], 1000, np.inf)
    embedded, first = served.queries([files, made.searcher.prepare(vectors[:1])])
    found = np.concatenate([first.vectors, embedded.vectors])
    np.testing.assert_allclose(found, vectors[:3], atol=1e-5)
