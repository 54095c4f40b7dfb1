"""The miss risk: the whole population's exceeds alpha in at most delta of the calibrations."""

from typing import get_args

import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import RiskUnattainable
from rcir.risk import (
    SCORE_FUNCTIONS,
    Bound,
    LabelledResults,
    Learned,
    MinMax,
    MissController,
    fit_score_function,
)
from rcir.risk.keys import take_columns

pytestmark = pytest.mark.statistical

N, ALPHA, DELTA = 300, 0.125, 0.1  # two candidates for everybody would miss 12.7 %


def calibrated(world, rows, bound="binomial"):
    """A controller for each draw of calibration queries."""
    depth = world.population.candidate_scores.shape[1]
    scores = np.sort(world.population.scores[rows], axis=1)
    return [MissController(world.score_function, row, depth, bound) for row in scores]


@pytest.fixture(scope="module")
def failures(worlds, draws, answers, true_risk):
    """Return for each draw of n calibration queries whether the true risk is above a level."""

    def failures(name, n, ask, level, bound="binomial"):
        thresholds = answers(ask, calibrated(worlds[name], draws(n), bound))
        return true_risk(worlds[name].population, "miss")(thresholds) > level

    return failures


def at(alpha, delta=DELTA):
    return lambda controller: controller.threshold(alpha, delta)


def exactly_allowed(n, alpha, delta=DELTA):
    """The most misses that so few of n show with probability delta if the risk is alpha."""
    return int(np.count_nonzero(binom.cdf(np.arange(n), n, alpha) <= delta)) - 1


@pytest.mark.parametrize("risk", ["miss", "recall", "false-discovery"])
@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_the_exact_risk_is_what_sets_of_the_whole_population_show(
    worlds, everybody, true_risk, name, risk
):
    world = worlds[name]
    all_scores = world.population.candidate_scores[np.isfinite(world.population.candidate_scores)]
    thresholds = np.quantile(all_scores, [0, 0.2, 0.5, 0.9], method="lower")
    for threshold, exact in zip(
        thresholds, true_risk(world.population, risk)(thresholds), strict=True
    ):
        sizes = world.score_function.sizes(everybody.results, threshold)
        _, columns = world.score_function.ordered(everybody.results)
        relevant = everybody.relevant
        relevant = relevant if columns is None else take_columns(relevant, columns, False)
        held = relevant & (np.arange(relevant.shape[1]) < sizes[:, None])
        hits = held.sum(axis=1)
        share = {"recall": hits / np.maximum(everybody.totals, 1), "false-discovery": hits / sizes}
        assert exact == pytest.approx(1 - share.get(risk, hits > 0).mean(), abs=1e-8)


@pytest.mark.parametrize("bound", get_args(Bound))
@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_the_miss_rate_exceeds_alpha_in_at_most_delta_of_the_calibrations(
    failures, excess, name, bound
):
    assert excess(failures(name, N, at(ALPHA), ALPHA, bound), DELTA) <= 3


@pytest.mark.parametrize(("n", "alpha"), [(40, 0.2), (300, 0.15), (1_000, 0.1)])
@pytest.mark.parametrize("name", ["minmax", "learned"])  # continuous scores
def test_the_exact_bound_fails_as_often_as_whole_numbers_of_misses_allow(
    failures, excess, name, n, alpha
):
    failed = failures(name, n, at(alpha), alpha)
    assert excess(failed, DELTA) <= 3
    expected = float(binom.cdf(exactly_allowed(n, alpha), n, alpha))
    assert 0.05 < expected <= DELTA
    assert abs(excess(failed, expected)) <= 3


@pytest.mark.parametrize("n", [40, 300])
@pytest.mark.parametrize("name", ["minmax", "learned"])
def test_the_certified_risk_below_alpha_holds_and_is_not_too_large(
    worlds, draws, failures, excess, name, n
):
    certified = calibrated(worlds[name], draws(n))[0].risk_bound(0.21, DELTA)
    assert certified < 0.21 - 1e-3
    assert abs(excess(failures(name, n, at(0.21), certified), DELTA)) <= 3


@pytest.mark.parametrize("kind", ["constant", "learned"])
def test_sets_of_distinct_keys_hold_what_is_promised(
    split, everybody, draws, answers, true_risk, excess, kind
):
    tuned, columns = (part.results.key_columns for part in (split, everybody))
    tuning, results = split.results.distinct(tuned), everybody.results.distinct(columns)
    ranks = split.relevant, everybody.relevant
    matches = [
        take_columns(relevant, taken, False)
        for relevant, taken in zip(ranks, (tuned, columns), strict=True)
    ]
    first = np.where(matches[0].any(1), matches[0].argmax(1) + 1.0, np.inf)
    score_function, _ = fit_score_function(kind, tuning, first)
    population = LabelledResults.of(results, matches[1], matches[1].sum(axis=1)).scored(
        score_function
    )
    controllers = [
        MissController(score_function, np.sort(population.scores[row]), results.depth)
        for row in draws(N)
    ]
    thresholds = answers(at(0.1), controllers)
    assert excess(true_risk(population, "miss")(thresholds) > 0.1, DELTA) <= 3
    sizes = score_function.sizes(results, np.nanmedian(thresholds))
    held = (np.arange(results.depth) < sizes[:, None]) & (results.keys >= 0)
    assert (held.sum(axis=1) == sizes).all()  # no set holds a key that is not there


def test_one_miss_too_many_would_be_noticed(failures, excess):
    # P(Binomial(40, .2) <= 4) = .076 and P(Binomial(40, .2) <= 5) = .161
    allowed = exactly_allowed(40, 0.2)

    def generous(controller):
        return controller.scores[40 - 1 - (allowed + 1)]

    assert excess(failures("minmax", 40, generous, 0.2), DELTA) > 3


@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_a_probability_that_one_minus_delta_is_mistaken_for_would_be_noticed(
    failures, excess, name
):
    assert excess(failures(name, N, at(0.1, 1 - DELTA), 0.1), DELTA) > 3


def test_scaling_by_each_batch_s_own_range_of_uncertainty_would_be_noticed(
    everybody, draws, answers, true_risk, excess
):
    def own_range(row):
        batch = everybody[row]
        own = MinMax.fit(batch.results, batch.ranks)  # of the calibration queries, not of others
        return MissController.calibrate(own, batch.results, batch.ranks).threshold(ALPHA, DELTA)

    thresholds = answers(own_range, draws(N))
    of_the_test_batch = MinMax.fit(everybody.results, everybody.ranks)
    served = LabelledResults.of(everybody.results, everybody.relevant, everybody.totals).scored(
        of_the_test_batch
    )
    assert excess(true_risk(served, "miss")(thresholds) > ALPHA, DELTA) > 3


@pytest.fixture(scope="module")
def few(queries):
    """A population so small that each draw can score all of it by a score function of its own."""
    return queries(1_000, seed=3)


def exceeds(batch, few, score_function, alpha=0.15):
    """Return whether the true risk of the calibrated sets is above alpha; False if unattainable."""
    controller = MissController.calibrate(score_function, batch.results, batch.ranks)
    try:
        sizes = controller.size(few.results, alpha, DELTA)
    except RiskUnattainable:
        return False
    _, columns = score_function.ordered(few.results)
    matches = few.relevant if columns is None else take_columns(few.relevant, columns, False)
    held = matches & (np.arange(matches.shape[1]) < sizes[:, None])
    return bool(1 - held.any(axis=1).mean() > alpha)


def test_whatever_is_chosen_on_the_tuning_split_keeps_the_promise(queries, few, draws, excess):
    splits = [queries(60, seed) for seed in range(100, 140)]  # so few that the choice varies
    chosen = [fit_score_function("auto", split.results, split.ranks)[0] for split in splits]
    assert len({score_function.name for score_function in chosen}) >= 3
    rows = enumerate(draws(60, size=1_000))
    failed = [exceeds(few[row], few, chosen[draw % len(chosen)]) for draw, row in rows]
    assert excess(failed, DELTA) <= 3


def test_a_model_fitted_on_the_calibration_queries_would_be_noticed(queries, few, draws, excess):
    split = queries(60, seed=4)
    honest = Learned.fit(split.results, split.ranks)
    batches = [few[row] for row in draws(60, size=1_000)]
    assert excess([exceeds(batch, few, honest) for batch in batches], DELTA) <= 3
    own = [exceeds(batch, few, Learned.fit(batch.results, batch.ranks)) for batch in batches]
    assert excess(own, DELTA) > 3
