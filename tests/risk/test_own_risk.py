"""A risk of one's own: one class and one line of the table, and everything else follows."""

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
from rcir.risk.score_functions import TOLERANCE

DEPTH, POPULATION, N, DRAWS, DELTA = 8, 5000, 150, 2000, 0.1


class FewerThanTwo(Risk):
    """1 if the set holds fewer than two true matches, else 0."""

    name = "fewer-than-two"
    clause = "fewer than two true {matches} are in at most {alpha} of the {sets}"
    binary = True

    def losses(self, results, thresholds):
        return (results.held(thresholds, results.relevant) < 2).astype(float)


class OneIsEnough(FewerThanTwo):
    """The same, but broken: one true match is enough."""

    def losses(self, results, thresholds):
        return (results.held(thresholds, results.relevant) < 1).astype(float)


@pytest.fixture
def own(monkeypatch):
    """`own(risk)` puts a risk into the table."""

    def own(risk):
        monkeypatch.setitem(RISKS, risk.name, risk)
        return risk

    own(FewerThanTwo())
    return own


def draw(n, seed):
    """Queries whose candidates match with probability 0.7, independently."""
    relevant = np.random.default_rng(seed).uniform(size=(n, DEPTH)) < 0.7
    return LabelledResults.of(SearchResults(np.zeros(n), DEPTH), relevant, relevant.sum(axis=1))


def test_it_is_certified_as_its_losses_say(own):
    """Against counting: the smallest size of which few enough queries have fewer than two."""
    calibration = draw(400, 0)
    controller = RiskController(Constant(), draw(100, 1), calibration)
    hits = np.cumsum(calibration.relevant, axis=1)
    for alpha, most in ((0.1, 31), (0.3, 107)):  # P(Binomial(400, alpha) <= most) <= 0.1
        guarantee = controller.decide(Request(alpha, DELTA, "fewer-than-two"))
        sizes = [k for k in range(1, DEPTH + 1) if (hits[:, k - 1] < 2).sum() <= most]
        found = controller.sets(draw(3, 2), guarantee)[1]
        assert found.tolist() == [sizes[0]] * 3
        assert guarantee.bound == "binomial"
        assert f"fewer than two true matches are in at most {alpha} of the sets" in str(guarantee)
    assert controller.decide(Request(0.3, DELTA)).threshold < guarantee.threshold


def test_it_goes_with_other_risks_groups_and_averages(own):
    calibration = draw(400, 0)
    controller = RiskController(Constant(), draw(100, 1), calibration)
    several = {"fewer-than-two": 0.3, "false-discovery": 0.5}
    both = controller.decide(Request(several, DELTA))
    assert both.threshold >= controller.decide(Request(0.3, DELTA, "fewer-than-two")).threshold
    assert "fewer than two" in str(both)
    assert both.risk == "fewer-than-two, false-discovery"
    assert controller.decide(Request(0.3, None, "fewer-than-two")).bound == "conformal"
    for options in ({"simultaneous": True}, {"abstain": True}):
        with pytest.raises(InvalidConfig):
            Request(0.3, DELTA, "fewer-than-two", **options)
    with pytest.raises(RiskUnattainable):
        controller.decide(Request(0.001, DELTA, "fewer-than-two"))


def test_its_score_function_is_chosen_like_that_of_others(own):
    split = draw(400, 3)
    chosen, compared = fit_score_function("auto", split, split.relevant, risk="fewer-than-two")
    assert chosen.name in compared
    assert set(compared["constant"]) <= {0.1, 0.2, 0.3, 0.5}


def test_a_retriever_answers_with_it(own, retriever, splits):
    """Of a calibrated retriever, and of what its calibration queries say."""
    calibration = retriever.controllers[None].calibration
    answer = retriever.retrieve(splits.test.images[0], 0.9, DELTA, risk="fewer-than-two")
    assert answer.to_dict()["guarantee"]["risk"] == "fewer-than-two"
    limit = answer.guarantee.threshold
    held = (calibration.relevant & (calibration.candidate_scores <= limit)).sum(axis=1)
    assert np.mean(held < 2) <= 0.9
    assert "fewer than two true matches" in str(answer)


@pytest.mark.statistical
@pytest.mark.parametrize(("kind", "holds"), [(FewerThanTwo, True), (OneIsEnough, False)])
def test_too_few_matches_come_in_at_most_delta_of_the_calibrations(own, kind, holds):
    """The same simulation that a broken loss fails."""
    own(kind())
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
        size = int(threshold * (1 + TOLERANCE)) + 1
        failures.append(np.mean(hits[:, size - 1] < 2) > alpha)
    excess = (np.mean(failures) - DELTA) / np.sqrt(DELTA * (1 - DELTA) / DRAWS)
    assert (excess <= 3) == holds
