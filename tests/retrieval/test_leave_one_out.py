"""Queries that are gallery items: each is left out of its own search."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist

import rcir
from rcir.errors import InvalidData

CENTRES = np.random.default_rng(0).standard_normal((8, 5))


def drawn(n, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(8, size=n)
    return (CENTRES[labels] + 0.9 * rng.standard_normal((n, 5))).astype(np.float32), labels


def built(vectors, labels, **options):
    return rcir.Retriever.from_embeddings(
        vectors, labels=labels, metric="euclidean", leave_one_out=True, **options
    )


def test_an_item_never_finds_itself():
    vectors, labels = drawn(150, 1)
    own = built(vectors, labels, depth=20)
    found = own.search(vectors)
    apart = cdist(vectors, vectors)
    np.fill_diagonal(apart, np.inf)
    np.testing.assert_array_equal(found.positions, np.argsort(apart, axis=1)[:, :20])
    np.testing.assert_allclose(found.distances, np.sort(apart, axis=1)[:, :20], atol=1e-4)


def test_clusters_of_items_which_find_each_other_are_refused():
    vectors, labels = drawn(150, 1)
    own = built(vectors, labels)
    with pytest.raises(InvalidData, match="keep one of each burst in the gallery"):
        own.calibrate(vectors, labels, clusters=np.arange(150) // 3, cluster="burst")


def test_an_item_is_no_true_match_of_itself():
    vectors, labels = drawn(150, 1)
    own = built(vectors, labels)
    labelled = own.search_labelled(own.labelled(vectors, labels))
    expected = (labels[:, None] == labels).sum(1) - 1
    np.testing.assert_array_equal(labelled.totals, expected)
    assert own.depth == 149
    np.testing.assert_array_equal(labelled.relevant.sum(1), expected)  # all were searched


def test_copies_of_an_item_do_not_find_each_other():
    vectors, labels = drawn(150, 1)
    doubled = np.concatenate([vectors, vectors[:30], vectors[:10]])
    known = np.concatenate([labels, labels[:30], labels[:10]])
    own = built(doubled, known, depth=20)
    labelled = own.search_labelled(own.labelled(vectors, labels))
    apart = cdist(vectors, doubled)
    itself = apart < 1e-9
    assert itself.sum(1).tolist() == [3] * 10 + [2] * 20 + [1] * 120
    apart[itself] = np.inf
    nearest = np.argsort(apart, axis=1, kind="stable")[:, :20]
    np.testing.assert_allclose(
        labelled.distances, np.take_along_axis(apart, nearest, axis=1), atol=1e-3
    )
    assert not np.take_along_axis(itself, labelled.positions, axis=1).any()
    matches = (labels[:, None] == known) & ~itself
    np.testing.assert_array_equal(labelled.totals, matches.sum(1))


def test_a_new_query_is_searched_as_always():
    vectors, labels = drawn(150, 1)
    new, _ = drawn(40, 2)
    own, plain = built(vectors, labels, depth=20), None
    plain = rcir.Retriever.from_embeddings(vectors, labels=labels, metric="euclidean", depth=20)
    np.testing.assert_array_equal(own.search(new).positions, plain.search(new).positions)


def test_without_it_gallery_items_are_refused():
    vectors, labels = drawn(300, 1)
    own = rcir.Retriever.from_embeddings(vectors, labels=labels)
    with pytest.raises(InvalidData, match="are pictures of the gallery"):
        own.calibrate(vectors, labels)


def test_items_are_asked_by_their_vectors_and_survive_saving(tmp_path):
    vectors, labels = drawn(600, 1)
    own = built(vectors, labels)
    own.calibrate(vectors, labels)
    loaded = rcir.load(own.save(tmp_path / "own"))
    for one in (own, loaded):
        answers = one.retrieve(vectors[:50], 0.3, 0.1)
        assert all(str(row) not in answer.ids for row, answer in enumerate(answers))
    assert loaded.recalibrate() == own.recalibrate()


@pytest.mark.statistical
def test_the_risk_of_gallery_items_is_controlled_and_would_not_be_with_themselves(request):
    """Over which items calibrate; the others, each asked about all but itself, are the test."""
    alpha, delta, divisions = 0.2, 0.1, 200 if request.config.getoption("full") else 50
    vectors, labels = drawn(700, 5)
    own = built(vectors, labels)
    with_itself = rcir.Retriever.from_embeddings(vectors, labels=labels, metric="euclidean")
    whole = own.search_labelled(own.labelled(vectors, labels))
    cheating = with_itself.search_labelled(with_itself.labelled(vectors, labels))
    assert (cheating.ranks == 1).all()
    violated = {"left out": 0, "itself": 0}
    rng = np.random.default_rng(0)
    for _ in range(divisions):
        rows = rng.permutation(700)
        for name, seen in (("left out", whole), ("itself", cheating)):
            controller = rcir.risk.RiskController(
                rcir.risk.Constant(), seen[rows[:100]], seen[rows[100:400]]
            )
            guarantee = controller.decide(rcir.risk.Request(alpha, delta))
            _, sizes = controller.sets(whole[rows[400:]], guarantee)
            violated[name] += (whole.ranks[rows[400:]] > sizes).mean() > alpha
    # The test items number 300: their own noise comes to that of the calibration.
    assert violated["left out"] <= 0.25 * divisions
    assert violated["itself"] == divisions
