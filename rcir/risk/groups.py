"""Certification for the groups of queries that a request covers: all, one, or a mix of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, as_option
from rcir.risk.bounds import Bound, Certificate
from rcir.risk.exact import order_statistic
from rcir.risk.means import mean_loss
from rcir.risk.refusals import certify_together, refused
from rcir.risk.request import Group, Mix, Request
from rcir.risk.results import ScoredResults
from rcir.risk.testing import learn_then_test, require_tuning, selective


def certify_groups(
    request: Request, calibration: ScoredResults, tuning: ScoredResults | None, bound: Bound
) -> Certificate:
    """Certify a request for groups of the labels that calibrated, see `rcir.risk.certify`."""
    if request.groups == "any mix":
        return _any_mix(request, calibration, tuning, bound)
    if request.group is not None:
        with refused(f"group {request.group!r}"):
            queries = calibration.of_group(request.group)
            return certify_groups(replace(request, groups="all"), queries, tuning, bound)
    risk, delta = request.risk, request.delta
    if risk is None or not risk.monotone:
        assert delta is not None  # a request without delta has one monotone risk
        splits = calibration, require_tuning(tuning)
        if request.abstain:
            (alpha,) = request.levels.values()
            return selective(alpha, delta, *splits)
        return learn_then_test(request.levels, delta, *splits, bound_of_means(bound, calibration))
    (alpha,) = request.levels.values()
    independent = calibration.population.clusters is None
    mix = request.groups if isinstance(request.groups, Mix) else None
    if risk.exact and independent and mix is None:
        risk.check_losses(calibration)
        return order_statistic(alpha, delta, calibration, bound, holds=request.holds)
    if not (risk.binary and independent and mix is None):
        bound = bound_of_means(bound, calibration)
    weights = None if mix is None else group_weights(calibration, mix.shares)
    return mean_loss(risk, alpha, delta, calibration, bound, weights=weights)


def bound_of_means(bound: Bound, calibration: ScoredResults) -> Bound:
    """Return the bound of losses anywhere in [0, 1]."""
    if bound != "binomial":
        return bound
    return "hoeffding-bentkus" if calibration.population.clusters is None else "betting"


def _any_mix(
    request: Request, calibration: ScoredResults, tuning: ScoredResults | None, bound: Bound
) -> Certificate:
    """Certify a request for every mix of the groups.

    Each group is certified at its share of delta, and the largest threshold serves all. A cluster
    must hold queries of one group: a mean over clusters does not bound the risk of a group whose
    share in a cluster depends on how hard the cluster is. The groups must be fixed before
    the queries are drawn; "at every moment", before the first one is.
    """
    population = calibration.population
    groups = population.group_names
    if not groups:
        raise InvalidConfig(
            f"{as_option('mix', 'any')} needs groups: none of the calibration queries has a group"
        )
    if mixed := population.n_mixed_clusters:
        remedy = "request every group alone (group)"
        if population.cluster_word != population.label_word:
            remedy = f"calibrate with such clusters, like the encounters at one site, or {remedy}"
        raise InvalidConfig(
            f"{mixed} of {population.n_units} {population.unit_word} "
            f"({population.cluster_word}) hold queries of several groups, and "
            f"{as_option('mix', 'any')} needs one group for each: {remedy}"
        )
    assert request.delta is not None  # a mix needs one
    share = request.delta / len(groups)
    requests = [replace(request, groups=Group(name), delta=share) for name in groups]
    joint, _ = certify_together(
        f"any mix of {len(groups)} groups, each at delta / {len(groups)}",
        (partial(certify_groups, each, calibration, tuning, bound) for each in requests),
    )
    return replace(joint, n_groups=len(groups))


def group_weights(calibration: ScoredResults, mix: Mapping[str, float]) -> NDArray[np.float64]:
    """(n,) weights with mean 1 that give the groups of the calibration queries other shares."""
    for group in mix:
        calibration.population.in_group(group)  # raises with the groups that there are
    groups = np.asarray(calibration.population.groups)
    names, number, counts = np.unique(groups, return_inverse=True, return_counts=True)
    shares = np.array([mix.get(group, 0.0) for group in names.tolist()])
    weights: NDArray[np.float64] = (shares / counts)[number] * len(number)
    return weights
