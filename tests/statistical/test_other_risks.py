"""Recall, false discovery, and several risks at once: the same statement for other losses."""

from typing import get_args

import numpy as np
import pytest

from rcir.risk import (
    ADAPTERS,
    Bound,
    Constant,
    JointController,
    Outcomes,
    Rankings,
    RecallController,
)

pytestmark = pytest.mark.statistical

MEANS = [bound for bound in get_args(Bound) if bound != "binomial"]
PROCEDURES = ["fixed-sequence", "bonferroni-holm"]
DELTA = 0.1
# One of two wants larger sets, the other smaller ones.
SEVERAL = {"recall": 0.7, "false-discovery": 0.42}


@pytest.fixture(scope="module")
def violated(draws, answers, true_risk):
    """Whether any of several risks is above its alpha, for each draw of n calibration queries."""

    def violated(world, n, alphas, control, met=0.5):
        chosen = (control(world.population.subset(row)) for row in draws(n, size=len(world.population)))
        kappas = answers(lambda controller: ask(controller, alphas), chosen, met)
        risks = [true_risk(world.population, risk)(kappas) > alphas[risk] for risk in alphas]
        return np.any(risks, axis=0)

    def ask(controller, alphas):
        if isinstance(controller, RecallController):
            return controller.kappa(alphas["recall"], DELTA)
        return controller.kappa(alphas, DELTA)

    return violated


@pytest.mark.parametrize("name", ["constant", "learned"])
@pytest.mark.parametrize("bound", MEANS)
def test_the_share_of_matches_lacking_exceeds_alpha_in_at_most_delta(
    worlds, violated, excess, name, bound
):
    tuning = worlds[name].tuning.subset(slice(0, 100))
    assert excess(
        violated(worlds[name], 200, {"recall": 0.5}, lambda c: RecallController(c, tuning, bound)),
        DELTA,
    ) <= 3
