"""Labels in the order of their probability: which items stand for them, and what sets hold."""

import numpy as np
import pytest

import rcir
from rcir.errors import InvalidConfig
from rcir.retrieval.label_ranking import order_labels
from rcir.risk import LabelScore, SearchResults, losses
from rcir.risk.losses import Risk

LABELS, DIM = 40, 8


def draw(n, seed, spread=0.25):
    """n unit vectors around the means of 40 labels, and their labels."""
    rng = np.random.default_rng(seed)
    means = np.random.default_rng(7).standard_normal((LABELS, DIM))
    labels = rng.permutation(np.arange(n) % LABELS)
    vectors = means[labels] + spread * np.abs(means).mean() * 3 * rng.standard_normal((n, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), labels


@pytest.fixture(scope="module")
def retriever():
    """Four items per label; only 8 candidates are searched."""
    vectors, labels = draw(160, 0)
    retriever = rcir.Retriever.from_embeddings(vectors, labels=labels, depth=8)
    retriever.calibrate(*draw(600, 1))
    return retriever


def test_order_labels_puts_the_likeliest_label_first_with_its_nearest_candidate():
    results = SearchResults(
        np.zeros(1),
        3,
        distances=np.array([[0.1, 0.2, 0.3]], np.float32),
        labels=np.array([[5, 9, 5]]),
        positions=np.array([[40, 41, 42]]),
    )
    log_p = np.log([[0.2, 0.5, 0.3]])  # of labels 5, 7, 9
    ordered = order_labels(results, np.array([5, 7, 9]), log_p)
    assert ordered.labels.tolist() == [[7, 9, 5]]
    assert ordered.positions.tolist() == [[-1, 41, 40]]  # no candidate has label 7
    assert ordered.distances == pytest.approx(np.array([[0.3, 0.2, 0.1]]))
    assert np.exp(ordered.log_probabilities) == pytest.approx(np.array([[0.5, 0.3, 0.2]]))


@pytest.mark.parametrize("up_to", [0.0, 0.7, 2.0])
def test_labels_that_no_threshold_reaches_may_be_left_out(up_to):
    rng = np.random.default_rng(0)
    n, depth = 50, 12
    distances = np.sort(rng.uniform(size=(n, depth)), axis=1).astype(np.float32)
    labels, positions = rng.integers(5, 20, (n, depth)), rng.integers(99, size=(n, depth))
    results = SearchResults(np.zeros(n), depth, distances, labels, positions=positions)
    log_p = np.log(rng.dirichlet(np.full(15, 0.1), n) + 1e-9)
    whole, short = (order_labels(results, np.arange(5, 20), log_p, x) for x in (np.inf, up_to))
    assert whole.depth == depth > short.depth
    sizes = LabelScore().sizes(whole, up_to)
    assert sizes.tolist() == LabelScore().sizes(short, up_to).tolist()
    for row, size in enumerate(sizes):
        for name in ("labels", "positions", "distances", "log_probabilities"):
            values, kept = (getattr(each, name)[row, :size] for each in (whole, short))
            assert values.tolist() == kept.tolist()


def test_labels_without_an_item_that_is_left_in_are_no_candidates():
    results = SearchResults(
        np.zeros(1),
        2,
        distances=np.array([[0.1, 0.2]], np.float32),
        labels=np.array([[5, 5]]),
        positions=np.array([[1, 2]]),
    )
    ordered = order_labels(results, np.array([5, 7]), np.array([[0.0, -np.inf]]))
    assert ordered.is_candidate.tolist() == [[True, False]]
    assert LabelScore().rank(ordered).scores.tolist() == [[0.0, np.inf]]


def test_sets_hold_the_nearest_item_of_each_label_beyond_the_candidates(retriever):
    queries, _ = draw(300, 2)
    answers = retriever.retrieve(queries, 0.02, 0.1)
    found = retriever.search(queries)
    beyond = 0
    for query, answer, candidates in zip(queries, answers, found.labels, strict=True):
        far = np.linalg.norm(retriever.index.vectors_at(np.arange(160)) - query, axis=1)
        nearest = [
            np.where(retriever.labels == int(y), far, np.inf).argmin() for y in answer.labels
        ]
        assert retriever.ids[nearest].tolist() == list(answer.ids)
        assert answer.distances == pytest.approx(far[nearest], abs=1e-5)
        beyond += len(set(map(int, answer.labels)) - set(candidates.tolist()))
    assert beyond > 0


def test_answers_do_not_depend_on_the_batch(retriever):
    queries, _ = draw(50, 4)
    together = retriever.retrieve(queries, 0.1, 0.1)
    for query, answer in zip(queries, together, strict=True):
        alone = retriever.retrieve(query, 0.1, 0.1)
        assert alone.ids == answer.ids
        assert alone.distances == pytest.approx(answer.distances, abs=1e-6)


def test_a_loaded_retriever_answers_alike(retriever, tmp_path):
    queries, _ = draw(50, 5)
    retriever.save(tmp_path / "retriever")
    loaded = rcir.load(tmp_path / "retriever")
    for request in ({}, {"distinct": "label"}):
        assert [answer.ids for answer in loaded.retrieve(queries, 0.1, 0.1, **request)] == [
            answer.ids for answer in retriever.retrieve(queries, 0.1, 0.1, **request)
        ]


def test_recalibrating_fits_the_model_of_the_new_gallery(retriever):
    vectors, labels = draw(80, 6)
    changed = rcir.Retriever(retriever.searcher, retriever.calibration)
    changed.add(vectors, [f"new {n}" for n in range(80)], labels)
    changed.recalibrate()
    fresh = rcir.Retriever(changed.searcher)
    fresh.calibrate(*draw(600, 1))
    queries, _ = draw(50, 5)
    assert [answer.ids for answer in changed.retrieve(queries, 0.1, 0.1)] == [
        answer.ids for answer in fresh.retrieve(queries, 0.1, 0.1)
    ]


def test_galleries_with_one_item_per_label_are_calibrated_on_all_queries():
    vectors, _ = draw(LABELS, 8, spread=0.0)
    rng = np.random.default_rng(9)
    labels = rng.integers(LABELS, size=100)
    queries = vectors[labels] + 0.3 * rng.standard_normal((100, DIM))
    retriever = rcir.Retriever.from_embeddings(vectors, labels=np.arange(LABELS))
    report = retriever.calibrate(queries, labels)
    assert report.n_calibration == 100
    assert np.mean([answer.size for answer in retriever.retrieve(queries, 0.2, 0.1)]) < 5


def test_recall_lists_all_items_of_the_likeliest_labels(retriever):
    """Nearest first within each label, although only 8 candidates were searched."""
    queries, labels = draw(300, 2)
    answers = retriever.retrieve(queries, 0.4, 0.1, risk="recall")
    likeliest = retriever.retrieve(queries, 0.02, 0.1)
    vectors = retriever.index.vectors_at(np.arange(160))
    recall = []
    for query, label, answer, first in zip(queries, labels, answers, likeliest, strict=True):
        far = np.linalg.norm(vectors - query, axis=1)
        expected = [
            item
            for name in first.labels
            for item in sorted(np.flatnonzero(retriever.labels == int(name)), key=far.__getitem__)
        ]
        assert retriever.ids[expected[: answer.size]].tolist() == list(answer.ids)
        assert answer.distances == pytest.approx(far[expected[: answer.size]], abs=1e-5)
        by_label = dict(zip(answer.labels, answer.probabilities, strict=True))
        assert [by_label[label] for label in answer.labels] == list(answer.probabilities)
        recall.append(
            np.mean(np.isin(np.flatnonzero(retriever.labels == label), expected[: answer.size]))
        )
    assert answers[0].guarantee.score_function == "label-lists"
    assert np.mean(recall) > 0.6 - 3 * np.std(recall) / np.sqrt(300)


def test_items_that_are_left_out_are_not_listed():
    vectors, labels = draw(400, 11)
    retriever = rcir.Retriever.from_embeddings(vectors, labels=labels, leave_one_out=True, depth=30)
    retriever.calibrate(vectors, labels)
    answers = retriever.retrieve(vectors, 0.5, 0.1, risk="recall")
    for name, answer in zip(retriever.ids, answers, strict=True):
        assert name not in answer.ids
        assert len(set(answer.ids)) == answer.size


def test_recall_of_labels_with_two_items_gets_both():
    """An item that tunes has one match, itself aside; a query of its label has two."""
    vectors, labels = draw(80, 10)
    retriever = rcir.Retriever.from_embeddings(vectors, labels=labels, depth=30)
    retriever.calibrate(*draw(600, 11))
    answers = retriever.retrieve(draw(100, 12)[0], 0.3, 0.1, risk="recall")
    assert np.mean([len(answer.labels) > len(set(answer.labels)) for answer in answers]) > 0.5
    assert {answer.guarantee.score_function for answer in answers} == {"label-lists"}


def test_recall_is_sized_anew_once_labels_have_several_items():
    vectors, labels = draw(LABELS, 13)
    retriever = rcir.Retriever.from_embeddings(vectors, labels=labels, depth=30)
    retriever.calibrate(*draw(600, 14))
    assert retriever.retrieve(vectors, 0.6, 0.1, risk="recall")
    vectors, labels = draw(80, 15)
    retriever.add(vectors, [f"new {n}" for n in range(80)], labels)
    retriever.recalibrate()
    (answer,) = retriever.retrieve(vectors[:1], 0.5, 0.1, risk="recall")
    assert answer.guarantee.score_function == "label-lists"


def test_labels_left_out_as_a_whole_are_no_candidates_without_discriminants():
    """Of 40 labels, 20 have one item: it is a query without a match."""
    labels = np.append(np.repeat(np.arange(20), 2), np.arange(20, 40))
    means = np.random.default_rng(7).standard_normal((LABELS, DIM))
    vectors = means[labels] + 0.2 * np.random.default_rng(16).standard_normal((60, DIM))
    for depth in (8, 50):
        retriever = rcir.Retriever.from_embeddings(
            vectors, labels=labels, leave_one_out=True, depth=depth
        )
        retriever.calibrate(vectors, labels)
        assert retriever.calibration.label_model.discriminants is None  # too few items tune
        answers = retriever.retrieve(vectors, 0.8, 0.1)
        assert all(np.isfinite(answer.distances).all() for answer in answers)
        for label, answer in zip(labels[40:], answers[40:], strict=True):
            assert label not in answer.labels


def test_risks_registered_later_count_all_items_of_a_label(retriever, monkeypatch):
    def lacks_two(scored, thresholds):
        return (scored.n_within(thresholds, scored.relevant) < 2).astype(float)

    calibrated = rcir.Retriever(retriever.searcher)
    calibrated.calibrate(*draw(600, 1))
    two = Risk(name="two", losses=lacks_two, clause="{alpha} {sets}", binary=True)
    monkeypatch.setitem(losses._table, two.key, two)
    queries, labels = draw(1000, 19)
    answers = calibrated.retrieve(queries, 0.5, 0.1, risk="two")
    found = [answer.labels.count(label) for answer, label in zip(answers, labels, strict=True)]
    assert 0.4 < np.mean(np.array(found) < 2) < 0.55


def test_requests_that_need_a_tuning_split_are_refused_without_one():
    vectors, labels = draw(LABELS, 17)
    retriever = rcir.Retriever.from_embeddings(vectors, labels=labels)
    assert retriever.calibrate(*draw(300, 18)).n_tuning == 0
    with pytest.raises(InvalidConfig, match='tuning="queries"'):
        retriever.retrieve(vectors, 0.9, 0.1, risk="false-discovery")
    retriever.calibrate(*draw(300, 20), tuning="queries")
    assert retriever.retrieve(vectors, 0.9, 0.1, risk="false-discovery")
