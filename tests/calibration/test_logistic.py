"""The baseline of a logistic regression, computed again with scikit-learn and SciPy."""

import numpy as np
import pytest
from scipy.stats import binom
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

import rcir
from calibration import logistic, measure, splits
from tests.vectors import draw_vectors

ALPHAS, DELTA = (0.001, 0.05, 0.1, 0.2), 0.1
GALLERY, LABELS = draw_vectors(300, 1, noise=1.0)
QUERIES, QUERY_LABELS = draw_vectors(900, 2, noise=1.0)


def build(vectors=GALLERY, labels=LABELS, **options):
    return rcir.Retriever.from_embeddings(vectors, labels=labels, metric="euclidean", **options)


def evaluate(retriever, vectors, labels, *parts):
    """Calibrate on the first part of queries, measure on the second one."""
    queries = retriever.labelled(vectors, labels)
    tuning, calibration, test = (retriever.search_labelled(queries[part]) for part in parts)
    retriever.calibrate_splits(tuning, calibration, "constant")
    searched = splits.SearchedSplits(retriever, "toy", None, calibration, test, [], None)
    scored = logistic.score_by_logistic(searched)
    rows, _, curve = measure.measure_guarantees(searched, ALPHAS, DELTA, scored)
    assert [row for row in curve if row.alpha in ALPHAS] == [row for row in rows if row.certified]
    return scored, [row.logistic_size for row in rows]


def evaluate_outside(retriever, vectors=QUERIES, labels=QUERY_LABELS):
    return evaluate(retriever, vectors, labels, np.s_[:100], np.s_[100:500], np.s_[500:])


def expected_scores(items, labels, vectors):
    """-log p of each label, 0 for the likeliest, in double precision."""
    scaler = StandardScaler().fit(items.astype(np.float64))
    model = LogisticRegression().fit(scaler.transform(items.astype(np.float64)), labels)
    p = model.predict_proba(scaler.transform(vectors.astype(np.float64)))
    return np.where(p == p.max(axis=1, keepdims=True), 0, -np.log(p))


def expected_sizes(scores, labels, test_scores):
    """Mean sizes at each level, with the exact binomial bound, by trying all thresholds."""
    own = scores[np.arange(len(labels)), labels]
    sizes = []
    for alpha in ALPHAS:
        certified = [t for t in own if binom.cdf(np.sum(own > t), len(own), alpha) <= DELTA]
        within = test_scores <= min(certified, default=np.nan) * (1 + 1e-3)
        sizes.append(within.sum(axis=1).mean() if certified else None)
    return sizes


def test_sizes_are_those_of_scikit_learn_with_the_exact_bound():
    scored, sizes = evaluate_outside(build())
    scores = expected_scores(GALLERY, LABELS, QUERIES)
    expected = expected_sizes(scores[100:500], QUERY_LABELS[100:500], scores[500:])
    assert sizes[0] is expected[0] is None
    assert sizes[1:] == pytest.approx(expected[1:], rel=0.01)  # fitted in single precision
    assert sizes[1] > sizes[2] > sizes[3] > 1
    assert scored.test.match_score.max() > 2, "some queries are hard"


@pytest.fixture
def clusters():
    """Clusters of three items, of different labels: nothing but the cluster tells the label."""
    rng = np.random.default_rng(3)
    labels = rng.integers(4, size=100).repeat(3)
    vectors = rng.standard_normal((100, 80)).repeat(3, axis=0)
    vectors += 0.01 * rng.standard_normal(vectors.shape)
    return vectors.astype(np.float32), labels, np.arange(100).repeat(3).astype(str)


def test_no_model_saw_the_cluster_of_its_query(clusters, monkeypatch):
    vectors, labels, names = clusters
    first, calls, fit = np.arange(0, 300, 3), [], logistic._fit
    monkeypatch.setattr(logistic, "_fit", lambda *args: calls.append(args) or fit(*args))
    retriever = build(vectors, labels, leave_one_out=True, clusters=names)
    _, sizes = evaluate(retriever, vectors, labels, first[:20], first[20:60], first[60:])
    # 40 queries certify alpha = 0.2 only; a model that saw them would need one label.
    assert sizes[:2] == [None, None]
    assert sizes[3] > 2.5
    number = {vector.tobytes(): row // 3 for row, vector in enumerate(vectors)}
    scores = np.full((300, 4), np.nan)
    for items, item_labels, queries in calls:
        fitted = {number[vector.tobytes()] for vector in items}
        asked = [number[vector.tobytes()] for vector in queries]
        assert fitted.isdisjoint(asked)
        assert len(fitted) == 80
        assert set(item_labels) == {0, 1, 2, 3}
        scores[3 * np.array(asked)] = expected_scores(items, item_labels, queries)
    expected = expected_sizes(scores[first[20:60]], labels[first[20:60]], scores[first[60:]])
    assert sizes[3] == pytest.approx(expected[3], rel=0.01)


def test_queries_beside_a_gallery_that_leaves_items_out_get_a_model_of_all_items():
    _, sizes = evaluate_outside(build(leave_one_out=True))
    assert sizes == evaluate_outside(build())[1]


def test_large_galleries_are_thinned_by_label_and_then_refused(monkeypatch):
    whole = evaluate_outside(build())[1]
    monkeypatch.setattr(logistic, "MAX_WORK", 20 * 10 * 10 * logistic.MIN_DIMENSIONS)
    scored, sizes = evaluate_outside(build())
    assert "at most 20 items of each label" in scored.sentence
    assert sizes[1:] == pytest.approx(whole[1:], rel=0.3)
    assert sizes != whole
    monkeypatch.setattr(logistic, "MIN_ITEMS", 21)
    scored, sizes = evaluate_outside(build())
    assert "10 labels would take too long" in scored.sentence
    assert (scored.calibration, sizes) == (None, [None] * 4)


@pytest.mark.parametrize(
    ("labels", "query_labels", "reason"),
    [
        ([["any", str(n)] for n in LABELS], [[str(n)] for n in QUERY_LABELS], "no single"),
        (np.zeros(300, int), np.zeros(900, int), "two labels"),
    ],
    ids=["several", "one"],
)
def test_a_sentence_says_why_there_is_none(labels, query_labels, reason):
    scored, sizes = evaluate_outside(build(labels=labels), labels=query_labels)
    assert reason in scored.sentence
    assert sizes == [None] * 4


def test_queries_of_a_label_that_the_gallery_lacks_are_missed():
    kept = LABELS > 0
    scored, _ = evaluate_outside(build(GALLERY[kept], LABELS[kept]))
    missing = QUERY_LABELS[500:] == 0
    assert np.array_equal(np.isinf(scored.test.match_score), missing)
