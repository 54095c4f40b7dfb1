"""Probabilities of labels by a model of the user's own certify and size sets."""

import json

import numpy as np
import pandas
import pyarrow
import pytest
from scipy.stats import binom
from sklearn.linear_model import LogisticRegression

import rcir
from rcir.cli import main
from rcir.errors import InvalidConfig, InvalidData, StaleCalibration
from rcir.serving.sources import ready_to_serve, source_of
from tests.vectors import draw_vectors

NAMES = np.array([f"kind {number}" for number in range(10)])
GALLERY, LABELS = draw_vectors(300, 1, noise=1.0)
QUERIES, QUERY_LABELS = draw_vectors(900, 2, noise=1.0)
CLASSIFIER = LogisticRegression().fit(GALLERY, LABELS)
P = CLASSIFIER.predict_proba(QUERIES)


@pytest.fixture
def retriever():
    return rcir.Retriever.from_embeddings(GALLERY, labels=LABELS, metric="euclidean", depth=100)


@pytest.fixture
def calibrated(retriever):
    retriever.calibrate(QUERIES[:300], QUERY_LABELS[:300], probabilities=P[:300])
    return retriever


def scores_of(p):
    """-log p + log(largest p) / 4, and 0 for the likeliest label."""
    scores = -np.log(p) + 0.25 * np.log(p.max(axis=1, keepdims=True))
    return np.where(p == p.max(axis=1, keepdims=True), 0, scores)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2])
def test_threshold_and_sets_are_those_of_the_probabilities(calibrated, alpha):
    """All labelled queries calibrate; sets hold the nearest item of each label."""
    own = scores_of(P[:300])[np.arange(300), QUERY_LABELS[:300]]
    expected = min(t for t in own if binom.cdf(np.sum(own > t), 300, alpha) <= 0.1)
    guarantee = calibrated.guarantee(alpha, 0.1)
    assert guarantee.threshold == pytest.approx(expected, rel=1e-4)
    assert guarantee.n_calibration == 300
    assert guarantee.by_own_model
    assert "has seen no calibration query" in str(guarantee)
    answers = calibrated.retrieve(QUERIES[300:], alpha, 0.1, probabilities=P[300:])
    within = scores_of(P[300:]) <= expected * (1 + 1e-3)
    found = np.zeros_like(within)
    for row, answer in enumerate(answers):
        found[row, list(answer.labels)] = True
    assert (found == within).all(axis=1).mean() > 0.99  # rounding
    answer, distances = answers[0], np.linalg.norm(GALLERY - QUERIES[300], axis=1)
    for item, label, distance in zip(answer.ids, answer.labels, answer.distances, strict=True):
        of_label = np.where(label == LABELS, distances, np.inf)
        assert int(item) == of_label.argmin()
        assert distance == pytest.approx(of_label.min(), rel=1e-5)
    alone = calibrated.retrieve(QUERIES[300], alpha, 0.1, probabilities=P[300])
    assert alone.ids == answer.ids
    (levels,) = calibrated.at_levels(QUERIES[300:301], [0.2], 0.1, probabilities=P[300:301])
    one = calibrated.retrieve(QUERIES[300], 0.2, 0.1, probabilities=P[300], simultaneous=True)
    assert levels.largest.ids == one.ids


def test_columns_are_in_the_order_of_the_classes_also_for_names(calibrated):
    assert calibrated.classes == tuple(range(10)) == tuple(CLASSIFIER.classes_)
    named = rcir.Retriever.from_embeddings(
        GALLERY, labels=NAMES[LABELS], metric="euclidean", depth=100
    )
    named.calibrate(QUERIES[:300], NAMES[QUERY_LABELS[:300]], probabilities=P[:300])
    assert named.classes == tuple(sorted(NAMES))
    expected = calibrated.retrieve(QUERIES[300:], 0.1, 0.1, probabilities=P[300:])
    answers = named.retrieve(QUERIES[300:], 0.1, 0.1, probabilities=P[300:])
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
    assert rcir.Retriever.from_embeddings(GALLERY).classes is None


@pytest.mark.parametrize("read", [pandas.DataFrame, pyarrow.table])
def test_columns_of_tables_are_matched_by_name(calibrated, read):
    order = np.random.default_rng(0).permutation(10)
    table = read({str(column): P[300:, column] for column in order})
    answers = calibrated.retrieve(QUERIES[300:], 0.1, 0.1, probabilities=table)
    expected = calibrated.retrieve(QUERIES[300:], 0.1, 0.1, probabilities=P[300:])
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
    one = calibrated.retrieve(QUERIES[300], 0.1, 0.1, probabilities=pandas.DataFrame(P[300:301]))
    assert one.ids == expected[0].ids
    row = pandas.DataFrame(P[300:, order], columns=order.astype(str)).iloc[0]
    assert calibrated.retrieve(QUERIES[300], 0.1, 0.1, probabilities=row).ids == expected[0].ids
    twice = ["0", *map(str, range(10))]
    for wrong, names in ((P[300:], NAMES), (P[300:, [0, *range(10)]], twice)):
        other = pandas.DataFrame(wrong, columns=names)
        with pytest.raises(InvalidData, match="do not name"):
            calibrated.retrieve(QUERIES[300:], 0.1, 0.1, probabilities=other)


def test_probabilities_are_stored_extended_and_used_again(calibrated, tmp_path):
    loaded = rcir.load(calibrated.save(tmp_path / "stored"))
    assert json.dumps(loaded.guarantee(0.1, 0.1).to_dict()) == json.dumps(
        calibrated.guarantee(0.1, 0.1).to_dict()
    )
    loaded.add(QUERIES[800:], [f"new {n}" for n in range(100)], QUERY_LABELS[800:])
    with pytest.raises(StaleCalibration):
        loaded.retrieve(QUERIES[300], 0.1, 0.1, probabilities=P[300])
    loaded.recalibrate()
    before = calibrated.guarantee(0.1, 0.1).threshold
    assert loaded.guarantee(0.1, 0.1).threshold == before  # of the same probabilities
    rest = np.s_[300:500]
    loaded.extend_calibration(QUERIES[rest], QUERY_LABELS[rest], probabilities=P[rest])
    assert loaded.guarantee(0.1, 0.1, anytime=True).n_calibration == 500
    loaded.remove([str(row) for row in np.flatnonzero(LABELS == 4)])
    loaded.remove([f"new {row}" for row in np.flatnonzero(QUERY_LABELS[800:] == 4)])
    with pytest.raises(InvalidData, match="labels are not those"):
        loaded.recalibrate()


def test_labelled_queries_tune_other_risks_and_sets_of_labels(retriever):
    retriever.calibrate(QUERIES[:600], QUERY_LABELS[:600], tuning="queries", probabilities=P[:600])
    assert retriever.guarantee(0.1, 0.1).n_calibration == 420
    assert retriever.guarantee(0.9, 0.1, risk="recall").score_function == "own-probability"
    assert retriever.guarantee(0.1, 0.1, distinct="label").by_own_model


def test_probabilities_come_with_all_queries_or_with_none(calibrated, tmp_path, capsys):
    with pytest.raises(InvalidData, match="calibrated with label probabilities"):
        calibrated.retrieve(QUERIES[300], 0.1, 0.1)
    with pytest.raises(InvalidData, match="calibrated with label probabilities"):
        calibrated.extend_calibration(QUERIES[300:400], QUERY_LABELS[300:400])
    folder = calibrated.save(tmp_path / "stored")
    with pytest.raises(InvalidConfig, match="HTTP"):
        ready_to_serve(source_of(folder))
    np.savez(tmp_path / "queries.npz", vector=QUERIES[:1])
    with pytest.raises(SystemExit):
        main(["retrieve", str(tmp_path / "queries.npz"), "--retriever", str(folder)])
    assert "query it in Python with them" in capsys.readouterr().err
    other = rcir.Retriever.from_embeddings(GALLERY, labels=LABELS, metric="euclidean")
    other.calibrate(QUERIES[:300], QUERY_LABELS[:300])
    with pytest.raises(InvalidData, match="calibrated without label probabilities"):
        other.retrieve(QUERIES[300], 0.1, 0.1, probabilities=P[300])
    assert not other.guarantee(0.1, 0.1).by_own_model


def changed(row, value):
    p = P[:300].copy()
    p[row, 0] = value
    return p


@pytest.mark.parametrize(
    ("probabilities", "words"),
    [
        (P[:300, :9], r"\(300, 9\); expected \(300, 10\)"),
        (P[:299], r"\(299, 10\); expected"),
        (P[:300].T, "expected"),
        (changed(7, np.nan), "1 of 300 .* row 7"),
        (changed(7, -0.1), "row 7"),
        (changed(7, np.inf), "row 7"),
        (P[:300] * 1.01, "300 of 300 .* sum to 1"),
        (np.log(P[:300]), "negative"),
        (P[:300].astype(str)[:, :1] + "x", "not numbers"),
    ],
)
def test_other_numbers_are_refused(retriever, probabilities, words):
    with pytest.raises(InvalidData, match=words):
        retriever.calibrate(QUERIES[:300], QUERY_LABELS[:300], probabilities=probabilities)


def test_galleries_that_cannot_use_them_are_refused(retriever):
    items = rcir.Retriever.from_embeddings(GALLERY, labels=LABELS, leave_one_out=True)
    places = rcir.Retriever.from_embeddings(GALLERY, labels=[[str(n)] for n in LABELS])
    for one, labels in ((items, QUERY_LABELS), (places, [[str(n)] for n in QUERY_LABELS])):
        with pytest.raises(InvalidConfig, match="probabilities"):
            one.calibrate(QUERIES, labels, probabilities=P)
    with pytest.raises(InvalidConfig, match="leave out score_function"):
        retriever.calibrate(QUERIES, QUERY_LABELS, "learned", probabilities=P)


def test_labels_of_probability_zero_come_last():
    """A model that is certain of a wrong label is missed until all labels are in the set."""
    certain = np.eye(10)[np.where(np.arange(900) % 4 == 0, 0, QUERY_LABELS)]
    one = rcir.Retriever.from_embeddings(GALLERY, labels=LABELS, metric="euclidean")
    one.calibrate(QUERIES[:500], QUERY_LABELS[:500], probabilities=certain[:500])
    answers = one.retrieve(QUERIES[500:], 0.3, 0.1, probabilities=certain[500:])
    assert {answer.size for answer in answers} == {1}
    answers = one.retrieve(QUERIES[500:], 0.1, 0.1, probabilities=certain[500:])
    assert {answer.size for answer in answers} == {10}
