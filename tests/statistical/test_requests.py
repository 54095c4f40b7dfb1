"""Levels chosen after looking, the guarantee on average, and the guarantee of each group."""

from dataclasses import replace

import numpy as np
import pytest

from rcir.risk import SCORE_FUNCTIONS, MissController, Request, RiskController

pytestmark = pytest.mark.statistical

N, DELTA = 300, 0.1
ALPHAS = np.linspace(0.1, 0.24, 29)  # from among which one is chosen after looking


@pytest.fixture(scope="module")
def controllers(worlds, draws):
    """A controller of the miss risk for each draw of n calibration queries."""

    def controllers(name, n=N):
        world = worlds[name]
        scores = np.sort(world.population.scores[draws(n)], axis=1)
        depth = world.population.candidate_scores.shape[1]
        return [MissController(world.score_function, row, depth) for row in scores]

    return controllers


@pytest.fixture(scope="module")
def violated_anywhere(worlds, controllers, answers, true_risk):
    """Return for each draw of calibration queries whether the risk is above alpha at any alpha."""

    def violated_anywhere(name, simultaneous):
        risk = true_risk(worlds[name].population, "miss")
        drawn = controllers(name)
        anywhere = np.zeros(len(drawn), bool)
        for alpha in ALPHAS:
            thresholds = answers(
                lambda controller, alpha=alpha: controller.threshold(alpha, DELTA, simultaneous),
                drawn,
                met=0,
            )
            anywhere |= risk(thresholds) > alpha
        return anywhere

    return violated_anywhere


@pytest.mark.slow  # each refusal says how many queries would do
@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_the_risk_exceeds_whatever_alpha_is_chosen_after_looking_with_probability_delta_at_most(
    violated_anywhere, excess, name
):
    assert excess(violated_anywhere(name, simultaneous=True), DELTA) <= 3


def test_choosing_alpha_after_looking_without_saying_so_would_be_noticed(violated_anywhere, excess):
    assert excess(violated_anywhere("learned", simultaneous=False), DELTA) > 3


@pytest.mark.parametrize(("n", "alpha"), [(30, 0.15), (300, 0.1)])
@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_without_delta_the_risk_is_at_most_alpha_on_average(
    worlds, controllers, answers, true_risk, excess, name, n, alpha
):
    thresholds = answers(lambda controller: controller.threshold(alpha, None), controllers(name, n))
    risks = true_risk(worlds[name].population, "miss")(thresholds)
    assert excess(np.nan_to_num(risks), alpha) <= 3


@pytest.mark.parametrize("name", ["minmax", "learned"])  # continuous scores
def test_without_delta_the_average_risk_is_what_theory_says(
    worlds, controllers, answers, true_risk, excess, name
):
    thresholds = answers(lambda controller: controller.threshold(0.2, None), controllers(name))
    risks = true_risk(worlds[name].population, "miss")(thresholds)
    assert abs(excess(risks, 60 / 301)) <= 3  # 59 misses of 300 are allowed: 60 / 301 <= 0.2


def test_a_mean_over_n_instead_of_n_plus_one_would_be_noticed(
    worlds, controllers, true_risk, excess
):
    drawn = controllers("minmax", n=20)
    thresholds = [controller.scores[20 - 1 - 2] for controller in drawn]  # 2 / 20 <= 0.1 are missed
    assert excess(true_risk(worlds["minmax"].population, "miss")(thresholds), 0.1) > 3


@pytest.fixture(scope="module")
def night(everybody):
    """The group of each query of the population; those of the night are the harder ones."""
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
def test_each_group_s_own_risk_exceeds_alpha_in_at_most_delta_of_the_calibrations(
    worlds, draws, answers, true_risk, excess, night, name, risk, alpha
):
    world = worlds[name]
    tuning = world.tuning[:50]

    def thresholds(group):
        controls = (
            RiskController(
                world.score_function, tuning, replace(world.population[row], groups=night[row])
            )
            for row in draws(N)
        )
        request = Request(alpha, DELTA, risk, group=group)
        return answers(lambda control: control.decide(request).threshold, controls)

    dark = world.population[night == "night"]
    risks = true_risk(dark, risk)
    assert excess(risks(thresholds("night")) > alpha, DELTA) <= 3
    if risk == "miss":  # the whole's certificate says nothing of the night
        assert excess(risks(thresholds(None)) > alpha, DELTA) > 3


def test_answers_to_a_group_miss_more_than_alpha_in_at_most_delta_of_the_calibrations(
    worlds, draws, answers, excess, night
):
    world, alpha = worlds["learned"], 0.25
    dark = world.population[night == "night"]
    order = np.argsort(dark.selection_score)

    def failed(group):
        controls = (
            RiskController(
                world.score_function,
                world.tuning,
                replace(world.population[row], groups=night[row]),
            )
            for row in draws(N)
        )
        request = Request(alpha, DELTA, group=group, abstain=True)
        thresholds = answers(lambda control: control.decide(request).selection_threshold, controls)
        counts = np.searchsorted(dark.selection_score[order], thresholds, side="right")
        missed = np.cumsum(~dark.relevant[order, 0])[counts - 1] / counts
        return (missed > alpha) & ~np.isnan(thresholds)

    assert excess(failed("night"), DELTA) <= 3
    assert excess(failed(None), DELTA) > 3  # the whole's certificate says nothing of the night
