"""Recall, false discovery, and several risks at once."""

from typing import get_args

import numpy as np
import pytest

from rcir.risk import (
    SCORE_FUNCTIONS,
    Bound,
    bounds,
    find_risk,
    fixed_sequence,
    learn_then_test,
    mean_loss,
    p_value,
)
from rcir.risk.results import widen
from tests.statistical.populations import first_matches_only, scored_queries

pytestmark = pytest.mark.statistical

MEANS = [bound for bound in get_args(Bound) if bound != "binomial"]
DELTA, RECALL = 0.1, find_risk("recall")


@pytest.fixture(scope="module")
def violated(draws, thresholds_of, true_risk):
    """For each draw of calibration queries, True if any of the risks is above its alpha."""

    def violated(population, certify, alphas, n=200):
        thresholds = thresholds_of(certify, (population[row] for row in draws(n)))
        risks = [true_risk(population, risk)(thresholds) > alpha for risk, alpha in alphas.items()]
        return np.any(risks, axis=0)

    return violated


@pytest.mark.parametrize(
    ("name", "bound"),
    [(name, "hoeffding-bentkus") for name in SCORE_FUNCTIONS]
    + [("learned", bound) for bound in MEANS if bound != "hoeffding-bentkus"],
)
def test_the_recall_risk_exceeds_alpha_in_at_most_delta_of_the_calibrations(
    worlds, violated, excess, name, bound
):
    population = worlds[name].population
    failed = violated(
        population,
        lambda calibration: mean_loss(RECALL, 0.5, DELTA, calibration, bound).threshold,
        {"recall": 0.5},
    )
    assert excess(failed, DELTA) <= 3


@pytest.mark.parametrize("bound", MEANS)
@pytest.mark.parametrize("name", ["minmax", pytest.param("learned", marks=pytest.mark.slow)])
def test_recall_holds_where_each_query_has_one_match(worlds, violated, excess, name, bound):
    population = first_matches_only(worlds[name].population)

    def failed(delta, alpha=0.15):
        return violated(
            population,
            lambda queries: mean_loss(RECALL, alpha, delta, queries, bound).threshold,
            {"recall": alpha},
        )

    assert excess(failed(DELTA), DELTA) <= 3
    assert excess(failed(1 - DELTA), DELTA) > 3  # a bound that does not hold


@pytest.mark.parametrize(("matches", "n", "alpha"), [("all", 50, 0.5), ("one", 20, 0.1)])
@pytest.mark.parametrize("name", ["minmax", "learned"])
def test_without_delta_the_recall_risk_is_at_most_alpha_on_average(
    worlds, draws, thresholds_of, true_risk, excess, name, matches, n, alpha
):
    queries = worlds[name].population
    population = queries if matches == "all" else first_matches_only(queries)
    thresholds = thresholds_of(
        lambda row: mean_loss(RECALL, alpha, None, population[row]).threshold, draws(n)
    )
    assert excess(np.nan_to_num(true_risk(population, "recall")(thresholds)), alpha) <= 3


def test_a_mean_loss_over_n_instead_of_n_plus_one_would_be_noticed(
    worlds, draws, true_risk, excess
):
    population = first_matches_only(worlds["minmax"].population)
    scores = np.sort(population.match_score[draws(20)], axis=1)
    thresholds = scores[:, 20 - 1 - 2]  # 2 / 20 <= 0.1 are missed
    assert excess(true_risk(population, "recall")(thresholds), 0.1) > 3


@pytest.mark.parametrize("bound", get_args(Bound))
def test_false_discoveries_exceed_alpha_in_at_most_delta_of_the_calibrations(
    worlds, violated, excess, bound
):
    tuning, alphas = worlds["constant"].tuning, {"false-discovery": 0.38}
    failed = violated(
        worlds["constant"].population,
        lambda queries: learn_then_test(alphas, DELTA, queries, tuning, bound).threshold,
        alphas,
    )
    assert excess(failed, DELTA) <= 3


@pytest.mark.parametrize("bound", MEANS)
def test_false_discoveries_hold_where_candidates_are_all_right_or_all_wrong(
    worlds, draws, thresholds_of, true_risk, excess, bound
):
    def alike(queries):  # the hardest case for a mean
        relevant = np.repeat(queries.relevant[:, :1], queries.relevant.shape[1], axis=1)
        return scored_queries(queries.scores, relevant, None, queries.uncertainty)

    world = worlds["constant"]
    tuning, population = alike(world.tuning), alike(world.population)
    alpha = 0.23  # slightly below the risk of the largest sets
    risk = true_risk(population, "false-discovery")

    def failed(delta):
        def certify(row):
            levels = {"false-discovery": alpha}
            return learn_then_test(levels, delta, population[row], tuning, bound).threshold

        return risk(thresholds_of(certify, draws(200), met=0)) > alpha

    assert excess(failed(DELTA), DELTA) <= 3
    assert excess(failed(1 - DELTA), DELTA) > 3


TWO = {"miss": 0.2, "false-discovery": 0.45}
THREE = {"miss": 0.2, "recall": 0.85, "false-discovery": 0.45}
LOOSER = {"miss": 0.2, "false-discovery": 0.5}  # its first candidates miss fewer queries


@pytest.mark.parametrize(
    ("name", "alphas"),
    [
        ("minmax", TWO),
        ("quantile", THREE),
        pytest.param("constant", THREE, marks=pytest.mark.slow),
        *(
            pytest.param(name, LOOSER if name == "learned" else TWO, marks=pytest.mark.slow)
            for name in SCORE_FUNCTIONS
            if name != "minmax"
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} risks",
)
def test_one_of_several_risks_exceeds_its_alpha_in_at_most_delta_of_the_calibrations(
    worlds, violated, excess, name, alphas
):
    tuning = worlds[name].tuning[:25]  # few queries, hence few thresholds to test

    def certify(calibration):
        return learn_then_test(alphas, DELTA, calibration, tuning).threshold

    failed = violated(worlds[name].population, certify, alphas, n=300)
    assert excess(failed, DELTA) <= 3


def test_the_smallest_p_value_of_several_risks_would_be_noticed(worlds, violated, excess):
    tuning = worlds["constant"].tuning[:25]
    candidates = tuning.size_thresholds(256)

    def smallest(scored):
        sums = [find_risk(risk).losses(scored, widen(candidates)).sum(axis=0) for risk in TWO]
        return np.minimum(
            bounds.p_values(sums[0], len(scored), TWO["miss"], "binomial"),
            bounds.p_values(sums[1], len(scored), TWO["false-discovery"], "hoeffding-bentkus"),
        )

    order = np.argsort(smallest(tuning), kind="stable")

    def certify(queries):
        certified = order[fixed_sequence(smallest(queries)[order], DELTA)]
        return min(candidates[certified], default=np.nan)

    failed = violated(worlds["constant"].population, certify, TWO, n=300)
    assert excess(failed, DELTA) > 3


@pytest.fixture(scope="module")
def p_values():
    """(4,000, 20) p-values of separate hypotheses, and (20,) True for the true hypotheses."""
    rates = np.where(np.arange(20) % 2, 0.2, 0.02)
    misses = np.random.default_rng(0).binomial(200, rates, (4_000, 20))
    values = np.array([p_value(count, 200, 0.2) for count in range(201)])
    return values[misses], rates == 0.2


def test_a_true_hypothesis_is_rejected_with_probability_delta_at_most(p_values, excess):
    values, true = p_values
    rejected = np.array([fixed_sequence(row, DELTA) for row in values])
    assert excess(rejected[:, true].any(axis=1), DELTA) <= 3
    assert rejected[:, 0].mean() > 0.99  # the first hypothesis is false


def test_a_sequence_ordered_by_the_p_values_themselves_would_be_noticed(p_values, excess):
    values, true = p_values
    orders = np.argsort(values, axis=1)
    rejected = np.array(
        [
            true[order[fixed_sequence(row[order], DELTA)]].any()
            for row, order in zip(values, orders, strict=True)
        ]
    )
    assert excess(rejected, DELTA) > 3
