"""Answers over HTTP are those of the retriever."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from tests.serving.conftest import drawn, png

OPTIONS = (
    {"alpha": 0.2, "delta": 0.1},
    {"alpha": 0.3, "delta": 0.05, "distinct": "label"},
    {"alpha": 0.3, "delta": 0.1, "risk": "recall"},
    {"alpha": 0.5, "delta": 0.1, "abstain": True},
    {"alpha": 0.2, "delta": 0.1, "simultaneous": True},
    {"alpha": 0.2, "delta": None},
    {"alpha": {"miss": 0.3, "false-discovery": 0.9}, "delta": 0.1},
)


def same(found, answer):
    """Whether a response says what an answer does."""
    expected = answer.to_dict()
    # A batch of another size may add in another order.
    np.testing.assert_allclose(found["distances"], expected.pop("distances"), atol=1e-5)
    np.testing.assert_allclose(found["uncertainty"], expected.pop("uncertainty"), atol=1e-5)
    assert {name: found[name] for name in expected} == expected
    assert found["sentence"] == str(answer.guarantee)
    return True


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_vector_gets_the_set_that_the_retriever_gives(vectors, place, serving, options):
    query = drawn(1, 5)[0][0]
    with serving(place) as client:
        found = client.post("/retrieve", json={"vector": query.tolist(), **options})
    assert same(found.json(), vectors.retrieve(query, **options))


def test_a_picture_gets_the_set_that_the_retriever_gives(retriever, folder, splits, serving):
    picture = png(splits.test.images[0])
    with serving(folder) as client:
        for options in ({"alpha": 0.6}, {"alpha": "0.7", "delta": "0.2", "group": "True"}):
            found = client.post("/retrieve", data=options, files={"picture": picture})
            numbers = {"alpha": 0.6, "delta": 0.1} if len(options) == 1 else {"alpha": 0.7}
            asked = {"delta": 0.2, "group": "True"} | numbers if len(options) > 1 else numbers
            assert same(found.json(), retriever.retrieve(picture, **asked))


def test_large_pictures_are_answered_as_small_ones(retriever, folder, splits, serving):
    large = png(np.kron(splits.test.images[0], np.ones((40, 40), np.uint8)))
    with serving(folder) as client:
        found = client.post("/retrieve", data={"alpha": 0.6}, files={"picture": large})
    assert same(found.json(), retriever.retrieve(large, 0.6, 0.1))


def test_a_batch_gets_an_answer_for_each(retriever, folder, splits, serving):
    pictures = [png(picture) for picture in splits.test.images[:5]]
    with serving(folder) as client:
        files = [("pictures", picture) for picture in pictures]
        found = client.post("/retrieve/batch", data={"alpha": 0.6}, files=files).json()["answers"]
    answers = retriever.retrieve(pictures, 0.6, 0.1)
    assert all(same(*pair) for pair in zip(found, answers, strict=True))
    assert len({one["answer"] for one in found}) == 5


def test_a_batch_of_vectors_gets_an_answer_for_each(vectors, place, serving):
    queries = drawn(5, 6)[0]
    with serving(place) as client:
        found = client.post("/retrieve/batch", json={"vectors": queries.tolist(), "alpha": 0.2})
    answers = vectors.retrieve(queries, 0.2, 0.1)
    assert all(same(*pair) for pair in zip(found.json()["answers"], answers, strict=True))


def test_many_at_once_get_their_own_answers(vectors, place, serving):
    queries = drawn(60, 7)[0]
    options = [OPTIONS[row % 3] for row in range(60)]
    with serving(place) as client, ThreadPoolExecutor(16) as pool:

        def ask(row):
            body = {"vector": queries[row].tolist(), **options[row]}
            return client.post("/retrieve", json=body).json()

        found = list(pool.map(ask, range(60)))
        text = client.get("/metrics").text
    for row in range(60):
        assert same(found[row], vectors.retrieve(queries[row], **options[row]))
    assert "rcir_batch_queries_sum 60.0" in text


def test_what_cannot_be_certified_is_refused_with_what_could_be(vectors, place, serving):
    query = drawn(1, 5)[0][0]
    with pytest.raises(RiskUnattainable) as refused:
        vectors.retrieve(query, 1e-5, 0.1)
    with serving(place) as client:
        found = client.post("/retrieve", json={"vector": query.tolist(), "alpha": 1e-5})
    assert found.status_code == 409
    body = found.json()
    assert body["error"] == "risk-unattainable"
    assert body["minimum_alpha"] == refused.value.minimum_alpha
    assert body["message"] == str(refused.value)


def test_all_alphas_at_once_are_those_that_are_asked_one_by_one(vectors, place, serving):
    query = drawn(1, 5)[0][0]
    with serving(place) as client:
        found = client.post("/explore", json={"vector": query.tolist()}).json()
    for alpha, size in list(zip(found["alphas"], found["sizes"], strict=True))[::10]:
        answer = vectors.retrieve(query, alpha, 0.1, simultaneous=True)
        assert answer.size == size
        assert list(answer.ids) == found["largest"]["ids"][:size]


def test_guarantees_are_those_of_the_calibration(vectors, place, serving):
    with serving(place) as client:
        found = client.get("/guarantees").json()
    rows = {row["alpha"]: row for row in found["levels"]["item"]}
    results = vectors.search_labelled(vectors.calibration_queries)
    answers = vectors.retrieve(results.known("queries"), 0.2, 0.1)
    assert rows[0.2]["mean_size"] == pytest.approx(np.mean([one.size for one in answers]))
    assert sum(found["histogram"]["counts"]) == found["n_calibration"] == 630
    assert rows[0.01]["certified"] is (rows[0.01]["mean_size"] is not None)


def test_the_rank_of_an_uncertainty_is_its_share_of_the_calibration_queries(
    vectors, place, serving
):
    query = drawn(1, 5)[0][0]
    with serving(place) as client:
        found = client.post("/retrieve", json={"vector": query.tolist(), "alpha": 0.2}).json()
    known = vectors.controller.calibration.uncertainty
    share = np.mean(known < vectors.retrieve(query, 0.2, 0.1).uncertainty)
    assert found["uncertainty_rank"] == pytest.approx(share)
