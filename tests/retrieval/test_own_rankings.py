"""Score functions of a user's own certify, answer, are stored and refitted like ours."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import binom

import rcir
from calibration import recalibration
from rcir import trust
from rcir.errors import InvalidConfig, InvalidData, MissingClass, UntrustedFolder
from rcir.risk import OwnRanking, Ranking, SearchResults
from rcir.risk.own import OwnScore
from tests.own_rankings import ByFrequency, Gap
from tests.vectors import draw_vectors

PATH = "tests.own_rankings:ByFrequency"
GALLERY, LABELS = draw_vectors(300, 1, noise=1.0)
QUERIES, QUERY_LABELS = draw_vectors(900, 2, noise=1.0)


@pytest.fixture
def retriever():
    return rcir.Retriever.from_embeddings(GALLERY, labels=LABELS, metric="euclidean", depth=100)


def calibrated(retriever, score_function, **options):
    retriever.calibrate(QUERIES[:600], QUERY_LABELS[:600], score_function, **options)
    return retriever.calibration


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_the_threshold_and_the_sets_are_those_of_the_scores(retriever, power):
    calibration = calibrated(retriever, Gap(power), tuning="queries")
    queries = calibration.calibration_queries.vectors
    scale = calibration.miss_rule.score_function.own.scale

    def scores_of(vectors):
        distances = np.linalg.norm(vectors[:, None] - GALLERY, axis=2)
        order = np.argsort(distances, axis=1)[:, :100]
        ordered = np.take_along_axis(distances, order, axis=1)
        return order, ((ordered - ordered[:, :1]) / scale) ** power

    order, scores = scores_of(queries)
    true = calibration.calibration_queries.population.labels
    matches = LABELS[order] == true[:, None]
    own = np.where(matches.any(axis=1), scores[np.arange(len(scores)), matches.argmax(1)], np.inf)
    n = len(own)
    expected = min(t for t in own if binom.cdf(np.sum(own > t), n, 0.1) <= 0.1)
    guarantee = retriever.guarantee(0.1, 0.1)
    assert guarantee.threshold == pytest.approx(expected, rel=1e-4)
    assert "Gap sizes" in str(guarantee)
    answers = retriever.retrieve(QUERIES[600:], 0.1, 0.1)
    _, scores = scores_of(QUERIES[600:])
    sizes = (scores <= expected * (1 + 1e-3)).sum(axis=1)
    assert np.mean([answer.size for answer in answers] == sizes) > 0.99  # rounding


def test_an_own_ranking_orders_candidates_and_certifies_other_risks(retriever):
    report = retriever.calibrate(QUERIES[:600], QUERY_LABELS[:600], ByFrequency, tuning="queries")
    assert report.score_function == "frequent"
    assert "frequent sizes" in str(report)
    calibration = retriever.calibration
    tuned = calibration.tuning_queries
    assert len(tuned) == 180
    counts = calibration.miss_rule.score_function.own.counts
    distances = np.linalg.norm(QUERIES[600:, None] - GALLERY, axis=2)
    for answer, row in zip(retriever.retrieve(QUERIES[600:], 0.3, 0.1), distances, strict=True):
        found = LABELS[np.argsort(row)[:100]]
        assert (
            answer.labels == tuple(found[np.argsort(-counts[found], kind="stable")])[: answer.size]
        )
    guarantee = retriever.guarantee(0.9, 0.1, risk="recall")
    assert guarantee.score_function == "frequent"
    assert retriever.guarantee(0.4, 0.1, distinct="label").score_function == "frequent"


def test_it_is_stored_by_import_path_and_loaded_with_permission(retriever, tmp_path, monkeypatch):
    calibrated(retriever, PATH)
    answers = retriever.retrieve(QUERIES[600:], 0.3, 0.1)
    folder = retriever.save(tmp_path / "stored")
    monkeypatch.setattr(trust, "named_classes", set())
    with pytest.raises(UntrustedFolder, match="own_rankings"):
        rcir.load(folder)
    loaded = rcir.load(folder, trust_code=True)
    assert loaded.calibration.options.score_function == PATH
    again = loaded.retrieve(QUERIES[600:], 0.3, 0.1)
    assert [answer.ids for answer in again] == [answer.ids for answer in answers]


@pytest.mark.parametrize("score_function", [Gap(2.0), ByFrequency])
def test_recalibration_fits_it_again(retriever, tmp_path, score_function):
    before = calibrated(retriever, score_function, tuning="queries")
    loaded = rcir.load(retriever.save(tmp_path / "stored"), trust_code=True)
    for one in (retriever, loaded):
        one.add(QUERIES[800:], [f"new {n}" for n in range(100)], QUERY_LABELS[800:])
        one.recalibrate()
        own = one.calibration.miss_rule.score_function.own
        tuned = one.search_labelled(before.tuning_queries)
        expected = score_function.fit(tuned.results, tuned.relevant)
        for name in expected.__dataclass_fields__:
            assert np.array_equal(getattr(own, name), getattr(expected, name))
    assert json.dumps(loaded.guarantee(0.2, 0.1).to_dict()) == json.dumps(
        retriever.guarantee(0.2, 0.1).to_dict()
    )


def test_other_queries_calibrate_with_the_fitted_object(retriever, tmp_path):
    calibrated(retriever, Gap(2.0))
    loaded = rcir.load(retriever.save(tmp_path / "stored"), trust_code=True)
    queries = loaded.labelled(QUERIES[600:], QUERY_LABELS[600:])
    recalibration._calibrate_on(loaded, queries, QUERY_LABELS[600:].tolist())
    assert loaded.guarantee(0.2, 0.1).n_calibration == 300
    assert loaded.calibration.miss_rule.score_function.own.power == 2


@dataclass(frozen=True)
class Bad:
    """A ranking that is changed at will."""

    change: object = None

    def fit(self, results, truth):
        return self

    def rank(self, results):
        scores = np.tile(np.arange(results.depth, dtype=np.float32), (len(results), 1))
        columns = np.tile(np.arange(results.depth), (len(results), 1))
        return self.change(scores, np.zeros(len(results)), columns)


def with_nan(scores, selection, columns):
    scores[0, 3] = np.nan
    return Ranking(scores, selection, columns)


def of_the_batch(scores, selection, columns):
    return Ranking(scores * len(scores), selection, columns)


def turned_in_a_batch(scores, selection, columns):
    shift = int(len(scores) > 1)
    return Ranking(scores, selection, np.roll(columns, shift, axis=1))


def surer_in_a_batch(scores, selection, columns):
    return Ranking(scores, selection - len(scores), columns)


def repeated(scores, selection, columns):
    columns[-1, 4] = 3
    return Ranking(scores, selection, columns)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s, u, c: Ranking(-s, u, c), "below the one before"),
        (lambda s, u, c: Ranking(s + 1, u, c), "score 0 first"),
        (lambda s, u, c: Ranking(s[:, :5], u, c), "they must be numbers"),
        (lambda s, u, c: Ranking(s.astype(str), u, c), "they must be numbers"),
        (lambda s, u, c: Ranking(s, u[:, None], c), "selection scores"),
        (lambda s, u, c: Ranking(s, u + np.nan, c), "NaN"),
        (lambda s, u, c: Ranking(s, u, c - 1), "each column"),
        (lambda s, u, c: Ranking(s, u, c[:, :7]), "each column"),
        (lambda s, u, c: s, "is a ndarray"),
        (with_nan, "NaN"),
        (repeated, "each column"),
        (of_the_batch, "differently alone"),
        (turned_in_a_batch, "differently alone"),
        (surer_in_a_batch, "differently alone"),
    ],
)
def test_unsuitable_rankings_are_refused_at_calibration(retriever, change, words):
    with pytest.raises(InvalidData, match=words):
        calibrated(retriever, Bad(change))
    assert retriever.calibration is None


def test_objects_without_the_two_methods_are_refused(retriever, tmp_path):
    for score_function in (3, {"fit": 1}, object, "tests.own_rankings:np"):
        with pytest.raises((InvalidConfig, MissingClass)):
            calibrated(retriever, score_function)
    with pytest.raises(InvalidConfig, match="own with fit and rank"):
        calibrated(retriever, "gap")

    class Nothing(Gap):
        def fit(self, results, truth):
            return None

    with pytest.raises(InvalidData, match="fit returned a NoneType"):
        calibrated(retriever, Nothing())
    assert isinstance(Gap(), OwnRanking)


def test_missing_candidates_get_infinite_scores():
    results = SearchResults(np.zeros(2), 3, np.array([[1.0, 2.0, np.inf], [1.0, 2.0, 3.0]]))
    scores, columns = np.tile(np.arange(3.0), (2, 1)), np.array([[1, 0, 2], [2, 1, 0]])
    own = Bad(lambda *_: Ranking(scores, np.zeros(2), columns))
    assert OwnScore(own, "own").rank(results).scores.tolist() == [[0, 1, np.inf], [0, 1, 2]]
