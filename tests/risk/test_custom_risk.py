"""A custom risk: one class and one line of the table, and everything else follows."""

import numpy as np
import pytest

from rcir.errors import InvalidConfig, RiskUnattainable
from rcir.risk import (
    RISKS,
    Constant,
    LabelledResults,
    Request,
    Risk,
    RiskController,
    SearchResults,
    fit_score_function,
)

DEPTH, POPULATION, N, DRAWS, DELTA = 8, 5000, 150, 2000, 0.1


class FewerThanTwo(Risk):
    """1 if the set holds fewer than two matches, else 0."""

    name = "fewer-than-two"
    clause = "fewer than two true {matches} are in at most {alpha} of the {sets}"
    binary = True

    def losses(self, results, thresholds):
        return (results.held(thresholds, results.relevant) < 2).astype(float)


class OneIsEnough(FewerThanTwo):
    """The same, but broken: one match is enough."""

    def losses(self, results, thresholds):
        return (results.held(thresholds, results.relevant) < 1).astype(float)


@pytest.fixture
def register(monkeypatch):
    """A function that adds a risk to the table; `FewerThanTwo` is added already."""

    def register(risk):
        monkeypatch.setitem(RISKS, risk.name, risk)

    register(FewerThanTwo())
    return register


def draw(n, seed):
    """Queries whose candidates match with probability 0.7, independently."""
    relevant = np.random.default_rng(seed).uniform(size=(n, DEPTH)) < 0.7
    return LabelledResults.of(SearchResults(np.zeros(n), DEPTH), relevant, relevant.sum(axis=1))


@pytest.fixture
def calibration(register):
    return draw(400, 0)


@pytest.fixture
def controller(calibration):
    return RiskController(Constant(), draw(100, 1), calibration)


@pytest.mark.parametrize(("alpha", "most"), [(0.1, 31), (0.3, 107)])
def test_it_is_certified_at_the_smallest_size_with_few_enough_losses(
    alpha, most, controller, calibration
):
    # P(Binomial(400, alpha) <= most) <= 0.1
    hits = np.cumsum(calibration.relevant, axis=1)
    guarantee = controller.decide(Request(alpha, DELTA, "fewer-than-two"))
    size = next(k for k in range(1, DEPTH + 1) if (hits[:, k - 1] < 2).sum() <= most)
    assert controller.sets(draw(3, 2), guarantee)[1].tolist() == [size] * 3
    assert guarantee.bound == "binomial"
    assert "fewer than two true matches" in str(guarantee)
    assert controller.decide(Request(alpha, DELTA)).threshold < guarantee.threshold


def test_it_can_be_combined_with_other_risks_and_averages(controller):
    several = {"fewer-than-two": 0.3, "false-discovery": 0.5}
    both = controller.decide(Request(several, DELTA))
    assert both.threshold >= controller.decide(Request(0.3, DELTA, "fewer-than-two")).threshold
    assert both.risk == "fewer-than-two, false-discovery"
    assert "fewer than two" in str(both)
    assert controller.decide(Request(0.3, None, "fewer-than-two")).bound == "conformal"
    for options in ({"simultaneous": True}, {"abstain": True}):
        with pytest.raises(InvalidConfig):
            Request(0.3, DELTA, "fewer-than-two", **options)
    with pytest.raises(RiskUnattainable):
        controller.decide(Request(0.001, DELTA, "fewer-than-two"))


def test_its_score_function_can_be_chosen_automatically(register):
    split = draw(400, 3)
    chosen, compared = fit_score_function("auto", split, split.relevant, risk="fewer-than-two")
    assert chosen.name in compared
    assert set(compared["constant"]) <= {0.1, 0.2, 0.3, 0.5}


def test_a_calibrated_retriever_answers_requests_for_it(register, retriever, splits):
    calibration = retriever.controllers[None].calibration
    answer = retriever.retrieve(splits.test.images[0], 0.9, DELTA, risk="fewer-than-two")
    assert answer.to_dict()["guarantee"]["risk"] == "fewer-than-two"
    included = calibration.candidate_scores <= answer.guarantee.threshold
    assert np.mean((calibration.relevant & included).sum(axis=1) < 2) <= 0.9


@pytest.mark.statistical
@pytest.mark.parametrize(("kind", "holds"), [(FewerThanTwo, True), (OneIsEnough, False)])
def test_its_risk_exceeds_alpha_in_at_most_delta_of_the_calibrations(register, kind, holds):
    """The simulation fails with the broken loss."""
    register(kind())
    population, alpha, rng = draw(POPULATION, 4).scored(Constant()), 0.2, np.random.default_rng(5)
    tuning = draw(100, 6)
    hits, failures = np.cumsum(population.relevant, axis=1), []
    for _ in range(DRAWS):
        calibration = population[rng.integers(POPULATION, size=N)]
        controller = RiskController(Constant(), tuning, calibration)
        try:
            threshold = controller.decide(Request(alpha, DELTA, "fewer-than-two")).threshold
        except RiskUnattainable:
            failures.append(False)
            continue
        failures.append(np.mean(hits[:, int(threshold)] < 2) > alpha)
    excess = (np.mean(failures) - DELTA) / np.sqrt(DELTA * (1 - DELTA) / DRAWS)
    assert (excess <= 3) == holds
