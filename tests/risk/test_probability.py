"""Probabilities of items and sets: calibrated on held-out queries, never 0 or 1."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression

from rcir.risk import Population, ScoredResults, SetRule, make_request
from rcir.risk.probability import FallingProbability, MatchProbabilities, cells_of
from rcir.risk.score_functions import Constant, Ranking


def calibration_error(probability, hits, bins=15):
    order = np.argsort(probability, kind="stable")
    parts = np.array_split(order, bins)
    return sum(abs((probability[part] - hits[part]).sum()) for part in parts) / len(order)


def draw(seed, n, labels=6, sharpness=2.0, repeats=False):
    """Queries whose true label has known probabilities, and scores that are too confident.

    With `repeats`, every candidate has a further one of the same label behind all others.
    """
    rng = np.random.default_rng(seed)
    logits = -np.sort(-2 * rng.standard_normal((n, labels)), axis=1)
    known, confident = (
        np.exp(factor * logits) / np.exp(factor * logits).sum(axis=1, keepdims=True)
        for factor in (1.0, sharpness)
    )
    truth = (rng.uniform(size=(n, 1)) > np.cumsum(known, axis=1)[:, :-1]).sum(axis=1)
    relevant = truth[:, None] == np.arange(labels)
    scores = (1 / confident).astype(np.float32)
    scores[:, 0] = 0
    if repeats:
        relevant, known = np.tile(relevant, 2), np.tile(known, 2)
        scores = np.hstack([scores, scores + scores[:, -1:] + 1])
    queries = ScoredResults.from_scores(
        scores, relevant, n_relevant=relevant.sum(axis=1), selection_score=1 - confident[:, 0]
    )
    return queries, known, confident


def answers(calibration, tuning, test, **request):
    """Return probabilities of items and sets of test queries, and which are true matches."""
    rule = SetRule(Constant(), tuning, calibration)
    request = make_request(**({"alpha": 0.2, "delta": 0.1} | request))
    guarantee = rule.guarantee(request)
    ranking = Ranking(test.scores, test.selection_score)
    sizes = test.sizes(guarantee.threshold)
    items, sets = rule.match_probabilities(guarantee).of_sets(ranking, sizes, guarantee)
    row, rank = cells_of(sizes)
    return items, test.relevant[row, rank], sets, test.match_rank <= sizes


@pytest.mark.parametrize("repeats", [False, True])
def test_probabilities_are_calibrated_where_those_of_the_scores_are_not(repeats):
    calibration, tuning, test = (draw(seed, 4000, repeats=repeats)[0] for seed in range(3))
    items, matches, sets, hits = answers(calibration, tuning, test)
    assert calibration_error(items, matches) < 0.02
    assert calibration_error(sets, hits) < 0.02
    row, rank = cells_of(np.ones(len(test), np.int64))
    raw = 1 - test.selection_score[row]
    assert calibration_error(raw, test.relevant[row, rank]) > 0.05


def test_items_that_look_like_the_first_do_not_lend_their_probability_to_those_in_sets():
    def late(seed, n=3000):
        """The second candidate matches in .3 of the queries; eight late ones where the first does.

        The first matches in .9 of the others and in half of those.
        """
        rng = np.random.default_rng(seed)
        second = rng.uniform(size=n) < 0.3
        first = rng.uniform(size=n) < np.where(second, 0.5, 0.9)
        relevant = np.column_stack([first, second, np.tile(first[:, None], 8)])
        scores = np.tile(np.float32([0, 1] + 8 * [5]), (n, 1))
        scores[:, 1:] += rng.uniform(0, 0.1, (n, 9)).cumsum(axis=1).astype(np.float32)
        return ScoredResults.from_scores(
            scores,
            relevant,
            n_relevant=relevant.sum(axis=1) + 1,  # one is no candidate
            selection_score=np.full(n, 0.2),
        )

    items, matches, _, hits = answers(late(0), late(1), late(2), alpha=0.1)
    second = items < 0.6  # the first has .15 + .63
    assert len(hits) < len(items) == len(hits) + second.sum()
    assert matches[second].mean() == pytest.approx(0.3, abs=0.03)
    assert items[second].mean() == pytest.approx(0.3, abs=0.05)


def test_probabilities_are_near_those_that_drew_the_matches():
    calibration, test = draw(0, 20000)[0], draw(1, 500)
    queries, known, _ = test
    fitted = MatchProbabilities.fit(calibration)
    sizes = np.full(len(queries), 2)
    row, rank = cells_of(sizes)
    matches, sums = fitted.of_items(Ranking(queries.scores, queries.selection_score), sizes)
    # The score of a candidate does not determine its probability, which depends on the others too.
    assert np.abs(matches - known[row, rank]).mean() < 0.05
    np.testing.assert_allclose(sums, matches.reshape(-1, 2).sum(axis=1))  # one true match each


def test_sets_of_one_size_are_calibrated_by_the_uncertainty_alone():
    def same_size(queries):
        return queries.of_constant_size

    splits = [same_size(draw(seed, 10000)[0]) for seed in range(3)]
    items, matches, sets, hits = answers(*splits)
    assert calibration_error(items, matches) < 0.02
    assert calibration_error(sets, hits) < 0.02
    assert np.ptp(sets) > 0.1  # although all sets are of the same size


def test_the_levels_are_those_of_scikit_learn_with_a_miss_before_and_a_hit_after_all():
    rng = np.random.default_rng(0)
    scores = rng.integers(30, size=400).astype(float)  # ties
    hits, weights = rng.uniform(size=400) > scores / 30, rng.uniform(0.1, 1, 400)
    fitted = FallingProbability.fit(scores, hits, weights)
    other = IsotonicRegression(increasing=False).fit(
        [-1, *scores, 30], [0, *hits, 1], [1, *weights, 1]
    )
    levels = other.predict(np.arange(30.0))
    for level in np.unique(levels):
        inside = np.flatnonzero(levels == level)
        between = fitted(np.linspace(inside[0], inside[-1], 101))
        assert between.min() - 1e-9 <= level <= between.max() + 1e-9
    np.testing.assert_allclose(fitted.probabilities, np.unique(levels)[::-1])
    assert (np.diff(fitted(np.linspace(-5, 40, 1000))) <= 0).all()


@pytest.mark.parametrize("hit", [True, False])
def test_few_queries_do_not_make_a_probability_0_or_1(hit):
    scores = np.arange(22.0)
    fitted = FallingProbability.fit(scores, np.full(22, hit), np.ones(22))
    expected = 23 / 24 if hit else 1 / 24
    np.testing.assert_allclose(fitted(np.array([-9.0, 3.5, 99.0])), expected)
    assert FallingProbability.fit(scores[:0], scores[:0] > 0, scores[:0])(scores)[0] == 0.5


def test_a_cluster_counts_once_however_many_queries_it_has():
    queries = draw(0, 60)[0]
    rows = np.repeat(np.arange(60), np.arange(60) % 7 + 1)
    clustered = queries[rows]
    clustered = ScoredResults.from_scores(
        clustered.scores,
        clustered.relevant,
        selection_score=clustered.selection_score,
        population=Population(len(rows), clusters=rows, cluster_word="video"),
    )
    once, several, wrong = map(MatchProbabilities.fit, (queries, clustered, queries[rows]))
    at = np.linspace(0, 1, 50)
    np.testing.assert_allclose(once.first(at), several.first(at))
    np.testing.assert_allclose(once.others(8 * at + 1), several.others(8 * at + 1))
    assert np.abs(once.first(at) - wrong.first(at)).max() > 0.01


def test_the_tuning_split_counts_as_fifty_queries():
    def outcome(n, hit, of_each=1):
        relevant = np.full((n, 1), hit)
        clusters = np.arange(n) // of_each
        return ScoredResults.from_scores(
            np.zeros((n, 1), np.float32),
            relevant,
            selection_score=np.zeros(n),
            population=Population(n, clusters=clusters, cluster_word="video"),
        )

    def first(calibration, tuning):
        return MatchProbabilities.fit(calibration, tuning).first(np.zeros(1))[0]

    assert first(outcome(100, False), outcome(5000, True)) == pytest.approx(51 / 152)
    assert first(outcome(100, False), outcome(7, True)) == pytest.approx(8 / 109)
    assert first(outcome(100, False), outcome(28, True, 4)) == pytest.approx(8 / 109)


def test_new_labels_count_each_label_once_and_a_group_counts_alone():
    relevant = np.array([[True]] * 30 + [[False]] * 10)
    population = Population(
        40, labels=np.repeat([0, 1], [30, 10]), groups=np.repeat(["a", "b"], [30, 10])
    )
    queries = ScoredResults.from_scores(
        np.zeros((40, 1), np.float32), relevant, selection_score=np.zeros(40), population=population
    )
    rule = SetRule(Constant(), queries[:1], queries)  # of the tuning split, one true match

    certified = rule.guarantee(make_request(0.9, 0.1))

    def first(**request):
        guarantee = replace(certified, request=make_request(0.9, 0.1, **request))
        probabilities = rule.match_probabilities(guarantee)
        return probabilities.first(np.zeros(1))[0]

    assert first() == pytest.approx(32 / 43)
    assert first(query_labels="new") == pytest.approx(3 / 5)
    assert first(group="b") == pytest.approx(2 / 13)


def test_a_query_without_an_answer_does_not_count_for_sets():
    splits = [draw(seed, 20000)[0] for seed in range(3)]
    rule = SetRule(Constant(), *splits[:2])
    request = make_request(0.1, 0.1, abstain=True)
    guarantee = rule.guarantee(request)
    test = splits[2]
    answered = test.selection_score <= guarantee.selection_threshold
    assert 0.05 < answered.mean() < 0.9
    ranking = Ranking(test.scores, test.selection_score)
    sizes = answered.astype(np.int64)
    items, sets = rule.match_probabilities(guarantee).of_sets(ranking, sizes, guarantee)
    assert calibration_error(sets[answered], test.relevant[answered, 0]) < 0.02
    np.testing.assert_allclose(items, sets[answered], atol=0.03)
