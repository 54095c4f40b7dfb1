"""Recall, false discovery, and several risks at once: the same statement for other losses."""

from typing import get_args

import numpy as np
import pytest

from rcir.risk import (
    SCORE_FUNCTIONS,
    Bound,
    JointController,
    MonotoneController,
    bonferroni_holm,
    fixed_sequence,
    p_value,
)
from tests.statistical.populations import first_matches_only, labelled

pytestmark = pytest.mark.statistical

MEANS = [bound for bound in get_args(Bound) if bound != "binomial"]
PROCEDURES = ["fixed-sequence", "bonferroni-holm"]
DELTA = 0.1


@pytest.fixture(scope="module")
def violated(draws, answers, true_risk):
    """Return for each draw of calibration queries whether any of the risks is above its alpha."""

    def violated(population, control, ask, alphas, n=200):
        thresholds = answers(ask, (control(population[row]) for row in draws(n)))
        risks = [true_risk(population, risk)(thresholds) > alpha for risk, alpha in alphas.items()]
        return np.any(risks, axis=0)

    return violated


@pytest.mark.parametrize(
    ("name", "bound"),
    [(name, "hoeffding-bentkus") for name in SCORE_FUNCTIONS]
    + [("learned", bound) for bound in MEANS if bound != "hoeffding-bentkus"],
)
def test_the_share_of_matches_that_sets_lack_exceeds_alpha_in_at_most_delta_of_the_calibrations(
    worlds, violated, excess, name, bound
):
    tuning, population = worlds[name].tuning[:50], worlds[name].population
    failed = violated(
        population,
        lambda calibration: MonotoneController(calibration, tuning, "recall", bound),
        lambda controller: controller.threshold(0.5, DELTA),
        {"recall": 0.5},
    )
    assert excess(failed, DELTA) <= 3


@pytest.mark.parametrize("bound", MEANS)
@pytest.mark.parametrize("name", ["minmax", "learned"])
def test_recall_holds_where_each_query_has_one_match(worlds, violated, excess, name, bound):
    tuning = first_matches_only(worlds[name].tuning[:50])
    population = first_matches_only(worlds[name].population)

    def failed(delta, alpha=0.15):
        return violated(
            population,
            lambda calibration: MonotoneController(calibration, tuning, "recall", bound),
            lambda controller: controller.threshold(alpha, delta),
            {"recall": alpha},
        )

    assert excess(failed(DELTA), DELTA) <= 3
    assert excess(failed(1 - DELTA), DELTA) > 3  # a bound that is none is noticed


@pytest.mark.parametrize(("matches", "n", "alpha"), [("all", 50, 0.5), ("one", 20, 0.1)])
@pytest.mark.parametrize("name", ["minmax", "learned"])
def test_without_delta_the_lacking_share_of_matches_is_at_most_alpha_on_average(
    worlds, draws, answers, true_risk, excess, name, matches, n, alpha
):
    tuning, population = worlds[name].tuning, worlds[name].population
    if matches == "one":
        tuning, population = first_matches_only(tuning), first_matches_only(population)
    controllers = [MonotoneController(population[row], tuning, "recall") for row in draws(n)]
    risk = true_risk(population, "recall")
    thresholds = answers(lambda controller: controller.threshold(alpha, None), controllers)
    assert excess(np.nan_to_num(risk(thresholds)), alpha) <= 3


def test_a_mean_lacking_share_over_n_instead_of_n_plus_one_would_be_noticed(
    worlds, draws, true_risk, excess
):
    population = first_matches_only(worlds["minmax"].population)
    scores = np.sort(population.scores[draws(20)], axis=1)
    thresholds = scores[:, 20 - 1 - 2]  # 2 / 20 <= 0.1 are missed
    assert excess(true_risk(population, "recall")(thresholds), 0.1) > 3


@pytest.mark.parametrize("procedure", PROCEDURES)
@pytest.mark.parametrize("bound", get_args(Bound))
def test_false_discoveries_exceed_alpha_in_at_most_delta_of_the_calibrations(
    worlds, violated, excess, bound, procedure
):
    tuning, population = worlds["constant"].tuning, worlds["constant"].population
    failed = violated(
        population,
        lambda calibration: JointController(calibration, tuning, bound, procedure),
        lambda controller: controller.threshold({"false-discovery": 0.38}, DELTA),
        {"false-discovery": 0.38},
    )
    assert excess(failed, DELTA) <= 3


@pytest.mark.parametrize("bound", MEANS)
def test_false_discoveries_hold_where_candidates_are_all_right_or_all_wrong(
    worlds, draws, answers, true_risk, excess, bound
):
    def alike(queries):  # the hardest case for a mean
        relevant = np.repeat(queries.relevant[:, :1], queries.relevant.shape[1], axis=1)
        return labelled(queries.candidate_scores, relevant, None, queries.uncertainty)

    tuning, population = (
        alike(part) for part in (worlds["constant"].tuning, worlds["constant"].population)
    )
    alpha = 0.23  # of all sets it is a little more
    controllers = [JointController(population[row], tuning, bound) for row in draws(200)]
    risk = true_risk(population, "false-discovery")

    def failed(delta):
        ask = {"false-discovery": alpha}
        return risk(answers(lambda each: each.threshold(ask, delta), controllers, met=0)) > alpha

    assert excess(failed(DELTA), DELTA) <= 3
    assert excess(failed(1 - DELTA), DELTA) > 3


TWO = {"miss": 0.2, "false-discovery": 0.45}
THREE = {"miss": 0.2, "recall": 0.85, "false-discovery": 0.45}


@pytest.mark.parametrize("procedure", PROCEDURES)
@pytest.mark.parametrize(
    ("name", "alphas"),
    [(name, TWO) for name in SCORE_FUNCTIONS] + [(name, THREE) for name in ("constant", "learned")],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} risks",
)
def test_one_of_several_risks_exceeds_its_alpha_in_at_most_delta_of_the_calibrations(
    worlds, violated, excess, name, alphas, procedure
):
    tuning = worlds[name].tuning[:25]  # few queries, hence few thresholds to test
    failed = violated(
        worlds[name].population,
        lambda calibration: JointController(calibration, tuning, procedure=procedure),
        lambda controller: controller.threshold(alphas, DELTA),
        alphas,
        n=300,
    )
    assert excess(failed, DELTA) <= 3


class AnyRisk(JointController):
    """Broken: certifies a threshold if the bound of one of the risks does."""

    def _p_values(self, labelled, alphas):
        each = [JointController._p_values(self, labelled, {risk: alphas[risk]}) for risk in alphas]
        return np.min(each, axis=0)


def test_the_smallest_p_value_of_several_risks_would_be_noticed(worlds, violated, excess):
    failed = violated(
        worlds["constant"].population,
        lambda calibration: AnyRisk(calibration, worlds["constant"].tuning[:25]),
        lambda controller: controller.threshold(TWO, DELTA),
        TWO,
        n=300,
    )
    assert excess(failed, DELTA) > 3


@pytest.fixture(scope="module")
def p_values():
    """(4,000, 20) of hypotheses on separate losses, every second one true, and which these are."""
    rates = np.where(np.arange(20) % 2, 0.2, 0.02)
    misses = np.random.default_rng(0).binomial(200, rates, (4_000, 20))
    values = np.array([p_value(count, 200, 0.2) for count in range(201)])
    return values[misses], rates == 0.2


def test_a_true_hypothesis_is_rejected_with_probability_delta_at_most(p_values, excess):
    values, true = p_values
    for procedure in (fixed_sequence, bonferroni_holm):
        rejected = np.array([procedure(row, DELTA) for row in values])
        assert excess(rejected[:, true].any(axis=1), DELTA) <= 3
        assert rejected[:, 0].mean() > 0.99  # the first is false, and no procedure misses that


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
