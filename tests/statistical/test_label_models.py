"""Sets by a model of the gallery's labels keep the promise: nothing saw the calibration queries."""

import warnings
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

import rcir
from rcir.errors import RiskUnattainable
from rcir.label_model import Items, LabelModel
from rcir.retrieval.label_ranking import (
    fit_label_model,
    order_labels,
    rank_labels,
)
from rcir.risk import LabelScore, certify, make_request, score
from rcir.risk.results import widen

pytestmark = pytest.mark.statistical

POPULATION, LABELS, DIM, DELTA = 4_000, 40, 16, 0.1
DRAWS, BROKEN_DRAWS = 150, 40  # of calibrations that fit a model each
RANKED = 60  # of galleries whose items are ranked among new queries


@pytest.fixture(scope="module")
def scored():
    """`scored(depth)`: a population, by lists of labels from a gallery of five items of each."""
    rng = np.random.default_rng(0)
    label = np.append(np.repeat(np.arange(LABELS), 5), rng.integers(LABELS, size=POPULATION))
    vectors = 0.65 * rng.standard_normal((LABELS, DIM))[label]
    vectors += rng.standard_normal(vectors.shape)
    items, queries = np.s_[: 5 * LABELS], np.s_[5 * LABELS :]

    def scored(depth):
        retriever = rcir.Retriever.from_embeddings(
            vectors[items], labels=label[items], metric="euclidean", depth=depth
        )
        labelled = retriever.search_labelled(retriever.labelled(vectors[queries], label[queries]))
        model = fit_label_model(retriever.searcher, None)
        return score(LabelScore(), rank_labels(retriever.searcher, model, labelled))

    return scored


@pytest.mark.parametrize(("n", "alpha"), [(22, 0.4), (60, 0.35), (600, 0.3)])
def test_the_risk_holds_with_labels_beyond_the_depth(
    scored, draws, thresholds_of, true_risk, excess, n, alpha
):
    """Broken: lists of labels that are cut to three after they were calibrated."""
    request, population, cut = make_request(alpha, DELTA), scored(8), scored(3)
    assert np.isinf(population.match_rank).mean() > 0.02

    def thresholds(population):
        samples = (population[rows] for rows in draws(n, size=POPULATION))
        return thresholds_of(lambda sample: certify(request, sample).threshold, samples)

    def violated(thresholds, answered):
        return true_risk(answered, "miss")(thresholds) > alpha

    assert excess(violated(thresholds(population), population), DELTA) <= 3
    assert excess(violated(thresholds(scored(LABELS)), cut), DELTA) > 3


def violations(draws, seed, broken=False):
    """(draws,) True where 22 queries calibrate sets that miss too often.

    Broken: the model has the calibration queries among its items.
    """
    rng, n, alpha, dim = np.random.default_rng(seed), 22, 0.35, 48
    violated = np.zeros(draws, bool)
    for draw in range(draws):
        label = np.append(np.arange(100) % 10, rng.integers(10, size=n + POPULATION))
        vectors = 0.3 * rng.standard_normal((10, dim))[label]
        vectors = (vectors + rng.standard_normal(vectors.shape)).astype(np.float32)
        gallery, calibrates = np.arange(100), np.arange(100, 100 + n)
        retriever = rcir.Retriever.from_embeddings(
            vectors[gallery], labels=label[gallery], metric="euclidean", depth=6
        )
        if broken:
            gallery = np.append(gallery, calibrates)
        searcher = retriever.searcher
        items = Items(label[gallery], np.arange(len(gallery)), vectors[gallery].__getitem__)
        nearest = searcher.nearest(vectors[:100], left_out=searcher.gallery.units)[1]
        fitted = LabelModel.fit(items, np.arange(100), nearest)
        if not broken:
            weights = fit_label_model(searcher, None).fusion.weights
            assert fitted.fusion.weights == pytest.approx(weights, rel=1e-3, abs=1e-4)
        queries = retriever.labelled(vectors[100:], label[100:])
        labelled = retriever.search_labelled(queries)
        log_p = fitted.log_probabilities(items, vectors[100:], labelled.results.positions)
        ordered = order_labels(labelled.results, fitted.labels, log_p)
        relevant = ordered.labels == label[100:, None]
        scored = score(LabelScore(), replace(labelled, results=ordered, relevant=relevant))
        with suppress(RiskUnattainable):
            threshold = certify(make_request(alpha, DELTA), scored[:n]).threshold
            violated[draw] = np.mean(scored.match_score[n:] > widen(threshold)) > alpha
    return violated


def of_items(draws, seed, clusters):
    """(draws,) True where items of a gallery calibrate sets that miss too often.

    They come in clusters of three, that are alike, and queries in others of the same labels.
    `clusters` says whether the retriever knows of them.
    """
    rng, alpha, size = np.random.default_rng(seed), 0.3, 3
    violated = np.zeros(draws, bool)
    for draw in range(draws):
        label = rng.integers(10, size=240 + POPULATION)
        centres = 0.5 * rng.standard_normal((10, DIM))[label]
        centres += np.sqrt(0.7) * rng.standard_normal(centres.shape)
        gallery, later = np.s_[: 240 * size], np.s_[240 * size :: size]
        vectors = np.repeat(centres, size, axis=0)
        vectors += np.sqrt(0.3) * rng.standard_normal(vectors.shape)
        label = np.repeat(label, size)
        names = np.repeat(np.arange(240), size).astype(str)
        retriever = rcir.Retriever.from_embeddings(
            vectors[gallery],
            labels=label[gallery],
            metric="euclidean",
            leave_one_out=True,
            clusters=names if clusters else None,
            depth=6,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of queries that are alike
            retriever.calibrate(vectors[gallery], label[gallery])
        calibration, rule = retriever.calibration, retriever.calibration.miss_rule
        assert calibration.label_model.discriminants is not None
        labelled = retriever.search_labelled(retriever.labelled(vectors[later], label[later]))
        arranged = calibration.arrange(retriever.searcher, labelled, rule)
        scored = score(rule.score_function, arranged)
        with suppress(RiskUnattainable):
            threshold = calibration.guarantee(make_request(alpha, DELTA)).threshold
            violated[draw] = np.mean(scored.match_score > widen(threshold)) > alpha
    return violated


def ranks_of_items(draws, seed, saw=()):
    """(draws,) mean rank, in [0, 1], of the scores of left-out items among those of new queries.

    Broken: the experts `saw` have the item whose label they rank.
    """
    right, rng, ranks = LabelModel._experts, np.random.default_rng(seed), np.zeros(draws)

    def experts(model, items, vectors, candidates, left_out=None):
        parts = right(model, items, vectors, candidates, left_out)
        seen = right(model, items, vectors, candidates)
        for (rows, numbers), (_, wrong) in zip(parts, seen, strict=True):
            numbers[list(saw)] = wrong[list(saw)]
            yield rows, numbers

    for draw in range(draws):
        label = rng.integers(12, size=240 + POPULATION)
        vectors = 0.35 * rng.standard_normal((12, 60))[label]
        vectors += rng.standard_normal(vectors.shape)
        gallery, later = np.s_[:240], np.s_[240:]
        retriever = rcir.Retriever.from_embeddings(
            vectors[gallery], labels=label[gallery], leave_one_out=True, depth=8
        )
        with pytest.MonkeyPatch.context() as patch:
            if saw:
                patch.setattr(LabelModel, "_experts", experts)
            retriever.calibrate(vectors[gallery], label[gallery])
            rule = retriever.calibration.miss_rule
        labelled = retriever.search_labelled(retriever.labelled(vectors[later], label[later]))
        arranged = retriever.calibration.arrange(retriever.searcher, labelled, rule)
        new = np.sort(score(rule.score_function, arranged).match_score)
        scores = rule.evidence.match_score
        ranks[draw] = np.mean([np.searchsorted(new, scores, side) for side in ("left", "right")])
    return ranks / POPULATION


def above(violated):
    """Return the standard errors by which a rate is above delta."""
    return (violated.mean() - DELTA) / np.sqrt(DELTA * (1 - DELTA) / len(violated))


@pytest.mark.slow
def test_few_queries_keep_the_promise_unless_the_model_saw_them():
    assert above(violations(DRAWS, 1)) <= 3
    assert above(violations(BROKEN_DRAWS, 2, broken=True)) > 3


@pytest.mark.slow
def test_items_in_clusters_keep_the_promise_unless_clusters_are_ignored():
    assert above(of_items(DRAWS, 3, clusters=True)) <= 3
    assert above(of_items(BROKEN_DRAWS, 4, clusters=False)) > 3


@pytest.mark.slow
def test_items_rank_as_new_queries_do_unless_one_expert_saw_them():
    """The second discriminant alone is enough to notice."""
    right, broken = ranks_of_items(RANKED, 6), ranks_of_items(RANKED, 7, saw=(1,))
    errors = [(each.mean() - 0.5) / each.std() * len(each) ** 0.5 for each in (right, broken)]
    assert abs(errors[0]) <= 3
    assert errors[1] < -3


def test_calibration_queries_change_nothing_of_the_model():
    rng = np.random.default_rng(5)
    label = np.arange(300) % 20
    vectors = rng.standard_normal((20, DIM))[label] + rng.standard_normal((300, DIM))
    retriever = rcir.Retriever.from_embeddings(vectors[:100], labels=label[:100])
    queries = retriever.labelled(vectors[:100] + 0.3, label[:100]).vectors
    positions = retriever.search(queries).positions
    logs = []
    for part in (np.s_[100:200], np.s_[200:300]):
        retriever.calibrate(vectors[part], label[part])
        searcher, model = retriever.searcher, retriever.calibration.label_model
        items = Items(searcher.labels, searcher.gallery.units, retriever.index.vectors_at)
        logs.append(model.log_probabilities(items, queries, positions))
    np.testing.assert_array_equal(*logs)
