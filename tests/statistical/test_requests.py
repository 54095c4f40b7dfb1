"""Levels chosen after looking, guarantees on average, and guarantees of each group."""

import numpy as np
import pytest

from rcir.risk import SCORE_FUNCTIONS, ScoredResults, certify, make_request, order_statistic
from tests.populations import in_population

pytestmark = pytest.mark.statistical

N, DELTA = 300, 0.1
ALPHAS = np.linspace(0.1, 0.24, 29)  # one of them is chosen after looking


@pytest.fixture(scope="module")
def calibrations(worlds, draws):
    """The calibration queries of each draw."""

    def calibrations(name, n=N):
        population = worlds[name].population
        return [ScoredResults(row, population.depth) for row in population.match_score[draws(n)]]

    return calibrations


@pytest.fixture(scope="module")
def violated_anywhere(worlds, calibrations, thresholds_of, true_risk):
    """For each draw of calibration queries, True if the risk is above alpha at any alpha."""

    def violated_anywhere(name, holds):
        risk = true_risk(worlds[name].population, "miss")
        samples = calibrations(name)
        anywhere = np.zeros(len(samples), bool)
        for alpha in ALPHAS:
            certify = at(alpha, holds=holds)
            anywhere |= risk(thresholds_of(certify, samples, met=0)) > alpha
        return anywhere

    return violated_anywhere


def at(alpha, delta=DELTA, holds="once"):
    """Return a function that certifies the miss risk at this level."""
    return lambda calibration: order_statistic(alpha, delta, calibration, holds=holds).threshold


@pytest.mark.slow  # each unattainable request computes the required number of queries
@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_the_risk_exceeds_an_alpha_chosen_after_looking_with_probability_at_most_delta(
    violated_anywhere, excess, name
):
    assert excess(violated_anywhere(name, holds="for all alphas"), DELTA) <= 3


def test_an_alpha_chosen_after_looking_without_correction_would_be_noticed(
    violated_anywhere, excess
):
    assert excess(violated_anywhere("minmax", holds="once"), DELTA) > 3


@pytest.mark.parametrize(("n", "alpha"), [(30, 0.15), (300, 0.1)])
@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_without_delta_the_risk_is_at_most_alpha_on_average(
    worlds, calibrations, thresholds_of, true_risk, excess, name, n, alpha
):
    thresholds = thresholds_of(at(alpha, None), calibrations(name, n))
    risks = true_risk(worlds[name].population, "miss")(thresholds)
    assert excess(np.nan_to_num(risks), alpha) <= 3


@pytest.mark.parametrize(  # of 300, 59 and 35 misses are allowed
    ("name", "alpha", "average"), [("minmax", 0.2, 60 / 301), ("learned", 0.12, 36 / 301)]
)
def test_without_delta_the_average_risk_is_exact(
    worlds, calibrations, thresholds_of, true_risk, excess, name, alpha, average
):
    thresholds = thresholds_of(at(alpha, None), calibrations(name))
    risks = true_risk(worlds[name].population, "miss")(thresholds)
    assert abs(excess(risks, average)) <= 3


def test_a_mean_over_n_instead_of_n_plus_one_would_be_noticed(
    worlds, calibrations, true_risk, excess
):
    samples = calibrations("minmax", n=20)
    # 2 / 20 <= 0.1 are missed
    thresholds = [sample.ascending_match_scores[20 - 1 - 2] for sample in samples]
    assert excess(true_risk(worlds["minmax"].population, "miss")(thresholds), 0.1) > 3


@pytest.fixture(scope="module")
def night(everybody):
    """The group of each query of the population; night queries are harder."""
    dark = everybody.results.uncertainty > np.quantile(everybody.results.uncertainty, 0.6)
    return np.where(dark, "night", "day")


@pytest.mark.parametrize(
    ("name", "risk", "alpha"),
    [
        ("minmax", "miss", 0.25),
        ("learned", "miss", 0.25),
        ("learned", "recall", 0.6),
        ("learned", "false-discovery", 0.65),
    ],
)
def test_the_risk_of_a_group_exceeds_alpha_in_at_most_delta_of_the_calibrations(
    worlds, draws, thresholds_of, true_risk, excess, night, name, risk, alpha
):
    tuning, population = worlds[name].tuning[:50], worlds[name].population

    def thresholds(group):
        request = make_request(alpha, DELTA, risk=risk, group=group)
        samples = (in_population(population[row], groups=night[row]) for row in draws(N))
        return thresholds_of(lambda each: certify(request, each, tuning).threshold, samples)

    dark = population[night == "night"]
    risks = true_risk(dark, risk)
    assert excess(risks(thresholds("night")) > alpha, DELTA) <= 3
    if risk == "miss":  # the certificate of all queries does not hold for the night
        assert excess(risks(thresholds(None)) > alpha, DELTA) > 3


def test_misses_among_answers_to_a_group_exceed_alpha_in_at_most_delta_of_the_calibrations(
    worlds, draws, thresholds_of, excess, night
):
    world, alpha = worlds["learned"], 0.25
    dark = world.population[night == "night"]
    order = np.argsort(dark.selection_score)

    def failed(group):
        request = make_request(alpha, DELTA, group=group, abstain=True)
        thresholds = thresholds_of(
            lambda each: certify(request, each, world.tuning).selection_threshold,
            (in_population(world.population[row], groups=night[row]) for row in draws(N)),
        )
        counts = np.searchsorted(dark.selection_score[order], thresholds, side="right")
        missed = np.cumsum(~dark.relevant[order, 0])[counts - 1] / counts
        return (missed > alpha) & ~np.isnan(thresholds)

    assert excess(failed("night"), DELTA) <= 3
    assert excess(failed(None), DELTA) > 3
