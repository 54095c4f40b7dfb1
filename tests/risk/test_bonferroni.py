"""Certificates of a retriever that was chosen among several."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import InvalidConfig, InvalidRiskLevel, RiskUnattainable
from rcir.risk import (
    Certified,
    Constant,
    Request,
    RiskController,
    corrected,
    decide_chosen,
    smallest_certified,
)


@pytest.fixture(scope="module")
def controller(labelled):
    groups = np.repeat(["a", "b"], 300)
    tuning, calibration = labelled(200, 1, matches=0.5), labelled(600, 0, matches=0.5)
    return RiskController(Constant(), tuning, replace(calibration, groups=groups))


@pytest.mark.parametrize("among", [1, 2, 12])
def test_misses_are_those_that_the_binomial_distribution_allows_at_delta_over_k(controller, among):
    allowed = np.count_nonzero(binom.cdf(np.arange(600), 600, 0.3) <= 0.1 / among) - 1
    falling = np.sort(controller.calibration.scores)[::-1]
    found = decide_chosen(controller, Request(0.3, 0.1), among)
    assert found.threshold == falling[allowed]
    assert found.n_calibration == 600


@pytest.mark.parametrize(
    "options",
    [
        {"risk": "recall"},
        {"risk": "false-discovery"},
        {"abstain": True},
        {"group": "a"},
        {"simultaneous": True},
    ],
    ids=str,
)
def test_whatever_is_asked_is_decided_as_at_delta_over_k(controller, options):
    alpha = 0.8 if "risk" in options else 0.45
    found = decide_chosen(controller, Request(alpha, 0.1, **options), 4)
    assert (found.delta, found.chosen_among) == (0.1, 4)
    alone = controller.decide(Request(alpha, 0.025, **options))
    assert replace(found, delta=0.025, chosen_among=1) == alone


def test_several_risks_are_decided_as_at_delta_over_k(controller):
    alpha = {"miss": 0.4, "false-discovery": 0.9}
    found = decide_chosen(controller, Request(alpha, 0.1), 4)
    assert (found.delta, found.chosen_among) == (0.1, 4)
    assert replace(found, delta=0.025, chosen_among=1) == controller.decide(Request(alpha, 0.025))


def test_an_average_does_not_survive_a_choice(controller):
    request = Request(0.3, None)
    assert decide_chosen(controller, request, 1) == controller.decide(request)
    with pytest.raises(InvalidConfig, match=r"chosen among 2: an average .* does not survive"):
        decide_chosen(controller, request, 2)


def test_what_cannot_be_certified_any_more_says_why_and_what_could_be(controller):
    served = next(a for a in np.linspace(0.01, 0.9, 90) if _is_met(controller, a))
    with pytest.raises(RiskUnattainable, match=r"among 12 retrievers, each .* delta / 12: ") as no:
        decide_chosen(controller, Request(served, 0.1), 12)
    assert "ask for alpha >=" in str(no.value)
    assert decide_chosen(controller, Request(no.value.minimum_alpha, 0.1), 12).threshold >= 0


def _is_met(controller, alpha):
    try:
        controller.decide(Request(float(alpha), 0.1))
    except RiskUnattainable:
        return False
    return True


def certified(rank, lost=0):
    """Of 100 queries all need this rank, but for some that no set serves."""
    scores = np.full(100, rank - 1, np.float32)
    scores[:lost] = np.inf
    return [Certified(scores, np.tile(np.arange(20, dtype=np.float32), (7, 1)))]


def test_the_smallest_that_is_certified_is_chosen_and_the_first_of_equals():
    runs = [certified(5), certified(3), certified(9), certified(3)]
    assert smallest_certified(runs, 0.1, 0.1, 4) == 1
    assert smallest_certified(runs[2:], 0.1, 0.1, 4) == 1


def test_one_that_is_certified_at_delta_but_not_at_delta_over_k_is_not_chosen():
    """Of 100 queries, 5 misses are allowed at 0.1 and 3 at 0.1 / 5."""
    assert [binom.cdf(m, 100, 0.1) <= 0.1 for m in (5, 6)] == [True, False]
    assert [binom.cdf(m, 100, 0.1) <= 0.02 for m in (3, 4)] == [True, False]
    runs = [certified(2, lost=4), certified(8)]
    assert smallest_certified(runs, 0.1, 0.1, 1) == 0
    assert smallest_certified(runs, 0.1, 0.1, 5) == 1
    assert smallest_certified(runs[:1], 0.1, 0.1, 5) is None
    assert smallest_certified([], 0.1, 0.1, 5) is None


@pytest.mark.parametrize("among", [0, -1, 1.5, True, None, "2"])
def test_a_number_of_retrievers_is_a_whole_number(controller, among):
    with pytest.raises(InvalidConfig, match="at least 1"):
        corrected(0.1, among)
    with pytest.raises(InvalidConfig, match="at least 1"):
        decide_chosen(controller, Request(0.3, 0.1), among)


@pytest.mark.parametrize("delta", [0, 1, 2, None])
def test_a_delta_out_of_range_is_refused_although_its_share_is_in_it(delta):
    with pytest.raises(InvalidRiskLevel, match="delta is"):
        corrected(delta, 4)
