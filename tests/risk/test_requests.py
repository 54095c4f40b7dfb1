"""Requests: what is refused, what is certified, and the sets that follow from it."""

import math
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel, RcirError, RiskUnattainable
from rcir.metrics.labels import UNMATCHED
from rcir.risk import (
    Constant,
    LabelledResults,
    Learned,
    MatchProbability,
    Quantile,
    Request,
    RiskMonitor,
    ScoredResults,
    SetRule,
    allowed_misses,
    anytime_allowed_misses,
    anytime_miss_rate_bound,
    anytime_required_calibration,
    band_required_calibration,
    certify,
    check_exchangeability,
    check_level,
    corrected,
    find_risk,
    fit_score_function,
    fixed_sequence,
    learn_then_test,
    local_level,
    make_request,
    mean_loss,
    minimum_alpha,
    miss_rate_bound,
    order_statistic,
    p_value,
    required_calibration,
    score,
    selective,
)
from rcir.risk.request import Mix
from tests.populations import in_population
from tests.risk.band import naive_local_level
from tests.risk.conftest import naive_allowed_misses

SEVERAL = {"miss": 0.3, "false-discovery": 0.7}
SHARES = {"a": 0.1, "b": 0.6, "c": 0.3}
SCORE_FUNCTION = Quantile(np.linspace(0, 1, 37))
BOUNDS = ("binomial", "hoeffding", "bentkus", "hoeffding-bentkus", "betting")
NOT_LEVELS = st.one_of(
    st.sampled_from([0, 1, -1, 2, math.nan, math.inf, True, False, "0.1", None, 1j, [0.1]]),
    st.floats(min_value=1),
    st.floats(max_value=0),
)


@pytest.fixture(scope="module")
def tuning(labelled):
    return labelled(200, 1, matches=0.5, score_function=SCORE_FUNCTION)


@pytest.fixture(scope="module")
def calibration(labelled):
    return labelled(500, 0, matches=0.5, score_function=SCORE_FUNCTION)


@pytest.fixture(scope="module")
def groups():
    return np.array(["a", "b", "b", "c"])[np.arange(500) % 4]


@pytest.fixture(scope="module")
def rule(tuning, calibration, groups):
    return SetRule(SCORE_FUNCTION, tuning, in_population(calibration, groups=groups))


def smallest(labelled, allowed):
    """The smallest threshold at which at most that many sets hold no match."""
    for threshold in np.unique(labelled.scores):
        rows = zip(labelled.relevant, labelled.scores, strict=True)
        if sum(not row[scores <= threshold].any() for row, scores in rows) <= allowed:
            return float(threshold)
    raise AssertionError("no threshold suffices")


@pytest.mark.parametrize(("alpha", "delta"), [(0.2, 0.1), (0.35, 0.01)])
def test_miss_risk_is_certified_by_the_exact_bound(alpha, delta, rule, calibration):
    guarantee = rule.guarantee(make_request(alpha, delta))
    allowed = naive_allowed_misses(500, alpha, delta)
    assert guarantee.threshold == smallest(calibration, allowed)
    assert guarantee.risk_bound == pytest.approx(beta.isf(delta, allowed + 1, 500 - allowed))
    assert (guarantee.selection_threshold, guarantee.bound) == (None, "binomial")
    assert guarantee.n_calibration == 500


@pytest.mark.parametrize("group", ["a", "b", "c"])
def test_a_group_is_certified_by_its_own_queries(group, rule, calibration, groups):
    rows = groups == group
    n = int(rows.sum())
    guarantee = rule.guarantee(make_request(0.3, 0.1, group=group))
    assert guarantee.threshold == smallest(calibration[rows], naive_allowed_misses(n, 0.3, 0.1))
    assert guarantee.n_calibration == n


def test_labels_of_a_group_are_counted_if_all_queries_have_one(rule, groups):
    labels = np.arange(500) % 8
    for known, n_labels in ((labels, 2), (np.where(groups == "b", UNMATCHED, labels), None)):
        labelled = replace(rule, evidence=in_population(rule.evidence, labels=known))
        assert labelled.guarantee(make_request(0.3, 0.1, group="a")).n_labels == n_labels


def test_every_risk_can_be_certified_for_a_group(tuning, rule, calibration, groups):
    alone = SetRule(SCORE_FUNCTION, tuning, calibration[groups == "b"])
    for options in ({"risk": "recall"}, {"risk": "false-discovery"}, {"abstain": True}):
        guarantee = rule.guarantee(make_request(0.6, 0.1, group="b", **options))
        expected = alone.guarantee(make_request(0.6, 0.1, **options))
        assert guarantee == replace(expected, request=guarantee.request)
        assert guarantee.n_calibration == 250


def test_simultaneous_levels_use_the_band(rule, calibration):
    guarantee = rule.guarantee(make_request(0.3, 0.1, simultaneous=True))
    level = naive_local_level(500, 0.1)
    allowed = naive_allowed_misses(500, 0.3, level)
    assert guarantee.threshold == smallest(calibration, allowed)
    assert guarantee.bound == "band"
    expected = beta.isf(level, allowed + 1, 500 - allowed)
    assert guarantee.risk_bound == pytest.approx(expected, rel=1e-6)


def test_without_delta_the_guarantee_is_marginal(rule, calibration, tuning):
    guarantee = rule.guarantee(make_request(0.2, None))
    assert guarantee.threshold == smallest(calibration, math.floor(0.2 * 501) - 1)
    assert (guarantee.bound, guarantee.risk_bound) == ("conformal", pytest.approx(100 / 501))
    recall = rule.guarantee(make_request(0.5, None, risk="recall"))
    assert recall.certificate == mean_loss(find_risk("recall"), 0.5, None, calibration)
    assert recall.bound == "conformal"


@pytest.mark.parametrize(
    ("bound", "means"), [("binomial", "hoeffding-bentkus"), ("betting", "betting")]
)
def test_the_bound_of_a_rule_is_used_for_every_risk(bound, means, tuning, calibration):
    splits = (calibration, tuning)
    for request, expected in (
        (
            make_request(0.6, 0.1, risk="recall"),
            mean_loss(find_risk("recall"), 0.6, 0.1, calibration, means),
        ),
        (
            make_request(0.6, 0.1, risk="false-discovery"),
            learn_then_test({"false-discovery": 0.6}, 0.1, *splits, means),
        ),
    ):
        certificate = certify(request, *splits, bound)
        assert certificate == expected
        assert (certificate.bound, certificate.risk_bound) == (means, 0.6)
    several = certify(make_request(SEVERAL, 0.1), *splits, bound)
    assert several == learn_then_test(SEVERAL, 0.1, *splits, means)
    assert several.risk_bound is None
    assert certify(make_request(0.3, 0.1), *splits, bound).bound == bound


def test_abstention_answers_with_one_candidate_or_none(rule, tuning, calibration, queries):
    guarantee = rule.guarantee(make_request(0.25, 0.1, abstain=True))
    limit = selective(0.25, 0.1, calibration, tuning).selection_threshold
    assert guarantee.selection_threshold == limit
    assert (guarantee.threshold, guarantee.risk_bound) == (0.0, 0.25)
    results = queries(300, 9)[0]
    sizes = rule.sets(results, guarantee)[1]
    assert sizes.tolist() == [int(u <= limit) for u in results.uncertainty]
    assert set(sizes.tolist()) == {0, 1}


def test_abstention_uses_the_selection_score_of_a_learned_score_function(queries):
    split, tuned, calibrated = (queries(600, seed) for seed in range(3))
    score_function = Learned.fit(split[0], split[1])
    splits = (score(score_function, LabelledResults(*each)) for each in (tuned, calibrated))
    rule = SetRule(score_function, *splits)
    guarantee = rule.guarantee(make_request(0.25, 0.1, abstain=True))
    selection_score = 1 - score_function.hazard(calibrated[0])[:, 0]
    answered = rule.sets(calibrated[0], guarantee)[1] == 1
    assert answered.tolist() == (selection_score <= guarantee.selection_threshold).tolist()
    missed = int((~calibrated[1][answered, 0]).sum())
    assert binom.cdf(missed, int(answered.sum()), 0.25) <= 0.1


def test_sets_hold_the_candidates_within_the_threshold(rule, queries):
    results, guarantee = queries(50, 9)[0], rule.guarantee(make_request(0.2, 0.1))
    scores = SCORE_FUNCTION.rank(results).scores
    expected = (scores <= guarantee.threshold * (1 + 1e-3)).sum(axis=1)
    assert rule.sets(results, guarantee)[1].tolist() == expected.tolist()
    with pytest.raises(InvalidData, match="depth"):
        rule.sets(queries(50, 9, depth=5)[0], guarantee)


@pytest.mark.parametrize(
    ("alpha", "delta", "options"),
    [
        (SEVERAL, 0.1, {"risk": "recall"}),
        (SEVERAL, 0.1, {"abstain": True}),
        (SEVERAL, 0.1, {"simultaneous": True}),
        (SEVERAL, None, {}),
        ({}, 0.1, {}),
        ({"precision": 0.1}, 0.1, {}),
        (0.1, 0.1, {"abstain": True, "risk": "recall"}),
        (0.1, 0.1, {"abstain": True, "simultaneous": True}),
        (0.1, 0.1, {"simultaneous": True, "risk": "recall"}),
        (0.1, 0.1, {"anytime": True, "risk": "false-discovery"}),
        (0.1, 0.1, {"anytime": True, "simultaneous": True}),
        (0.1, None, {"risk": "false-discovery"}),
        (0.1, None, {"abstain": True}),
        (0.1, None, {"anytime": True}),
        *((0.1, 0.1, {"risk": risk}) for risk in ("precision", "", 3, None, ["miss"])),
        *((0.1, 0.1, {"max_size": size}) for size in (0, -1, 1.5, True, "3")),
        *((0.1, 0.1, {name: 1}) for name in ("abstain", "simultaneous", "anytime", "group")),
        *((0.3, 0.1, {"mix": SHARES, name: True}) for name in ("simultaneous", "anytime")),
        *(
            (alpha, delta, {"mix": mix, **options})
            for mix in ("any", SHARES)
            for alpha, delta, options in (
                (0.3, 0.1, {"group": "a"}),
                (0.3, 0.1, {"abstain": True}),
                (0.3, 0.1, {"risk": "false-discovery"}),
                ({"miss": 0.1, "recall": 0.5}, 0.1, {}),
                (0.3, None, {}),
            )
        ),
        *(
            (0.3, 0.1, {"mix": mix})
            for mix in (
                {},
                {"a": 0.5},
                {"a": 1.5, "b": -0.5},
                {"a": math.nan, "b": 1.0},
                {"a": "all"},
                {1: 1.0},
                "every",
                0.5,
            )
        ),
    ],
    ids=str,
)
def test_requests_that_nothing_supports_are_refused(alpha, delta, options, rule):
    with pytest.raises(InvalidConfig):
        rule.guarantee(make_request(alpha, delta, **options))


def test_supported_mixes_are_accepted():
    assert make_request(0.3, 0.1, mix=SHARES).groups == Mix(SHARES)
    assert make_request(0.3, 0.1, risk="recall", mix={"a": 1, "b": 0}).group is None
    assert make_request(0.3, 0.1, mix="any", simultaneous=True).holds == "for all alphas"
    assert make_request({"recall": 0.3}, 0.1, mix="any").risk is find_risk("recall")


def test_an_unknown_group_is_refused_with_those_that_exist(rule, tuning, calibration):
    with pytest.raises(InvalidConfig, match="'a', 'b', 'c'"):
        rule.guarantee(make_request(0.3, 0.1, group="d"))
    with pytest.raises(InvalidConfig, match="none"):
        certify(make_request(0.3, 0.1, group="a"), calibration, tuning)


@pytest.mark.parametrize("alpha", [1e-4, {"miss": 1e-4, "recall": 1e-4}])
@pytest.mark.parametrize("risk", ["miss", "recall", "false-discovery"])
def test_an_unattainable_request_is_never_answered(alpha, risk, rule):
    risk = "miss" if isinstance(alpha, dict) else risk
    with pytest.raises(RiskUnattainable):
        rule.guarantee(make_request(alpha, 0.1, risk=risk))
    with pytest.raises(RiskUnattainable, match="group 'a'"):
        rule.guarantee(make_request(alpha, 0.1, risk=risk, group="a"))


def test_parts_that_do_not_fit_together_are_refused(tuning, calibration, labelled):
    shallow = labelled(20, 0, depth=5)
    for call in (
        lambda: SetRule(Constant(), shallow, calibration),
        lambda: certify(make_request(0.3, 0.1), calibration, shallow),
    ):
        with pytest.raises(InvalidData, match="depth"):
            call()
    with pytest.raises(InvalidData, match="groups"):
        in_population(calibration, groups=np.array(["a"] * 499))
    with pytest.raises(InvalidConfig, match="bound"):
        SetRule(SCORE_FUNCTION, tuning, calibration, bound="normal")
    with pytest.raises(InvalidConfig, match="tuning split"):
        certify(make_request(SEVERAL, 0.1), calibration)
    with pytest.raises(InvalidConfig, match="no risk"):
        learn_then_test({}, 0.1, calibration, tuning)


def test_anytime_requests_use_the_test_supermartingale(rule, calibration):
    guarantee = rule.guarantee(make_request(0.3, 0.1, anytime=True))
    assert (guarantee.bound, guarantee.risk_bound) == ("anytime", 0.3)
    assert guarantee.threshold == smallest(calibration, anytime_allowed_misses(500, 0.3, 0.1))


@pytest.mark.parametrize(
    "attribute",
    [
        {"holds": "simultaneous"},
        {"groups": "any"},
        {"labels": "all"},
        {"distinct": "item"},
        {"max_size": 1.5},
        {"levels": {}},
        {"levels": {"miss": 0.1, "recall": 0.2}, "abstain": True},
    ],
)
def test_attributes_that_a_request_cannot_have_are_refused(attribute):
    with pytest.raises(InvalidConfig, match=next(iter(attribute))):
        Request(**({"levels": {"miss": 0.1}, "delta": 0.1} | attribute))


def test_a_threshold_cannot_hold_otherwise(calibration):
    with pytest.raises(InvalidConfig, match="at every moment"):
        order_statistic(0.1, 0.1, calibration, holds="anytime")


def test_requests_with_the_same_options_are_equal_and_have_one_hash():
    levels, shares = {"miss": 0.1, "recall": 0.3}, {"a": 0.2, "b": 0.8}
    for one, other in (
        (make_request(levels, 0.1), make_request(dict(reversed(levels.items())), 0.1)),
        (make_request(0.1, 0.1, mix=shares), make_request(0.1, 0.1, mix=dict(shares))),
    ):
        assert one == other
        assert hash(one) == hash(other)
    request = make_request(levels, 0.1)
    levels["miss"] = 0.9
    assert request.alpha["miss"] == 0.1


def test_a_fitted_score_function_cannot_be_changed(queries):
    split = queries(300, 0)
    for kind, name in ((Quantile, "sample"), (Learned, "weights"), (MatchProbability, "weights")):
        score_function = kind.fit(*split[:2])
        with pytest.raises(ValueError, match="read-only"):
            getattr(score_function, name)[0] = 0
        with pytest.raises(FrozenInstanceError):
            setattr(score_function, name, None)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(value=NOT_LEVELS)
def test_every_function_refuses_an_invalid_level(value):
    scores, recall = np.tile(np.arange(5, dtype=np.float32), (100, 1)), find_risk("recall")
    scored = ScoredResults.from_scores(
        scores,
        np.ones((100, 5), bool),
        n_relevant=np.full(100, 5),
        uncertainty=np.zeros(100),
        selection_score=np.zeros(100),
    )
    of_both = [
        lambda alpha, delta: learn_then_test({"miss": alpha}, delta, scored, scored),
        lambda alpha, delta: selective(alpha, delta, scored, scored),
        lambda alpha, delta: anytime_allowed_misses(100, alpha, delta),
        anytime_required_calibration,
        band_required_calibration,
        RiskMonitor,
    ]
    for bound in BOUNDS:
        of_both += [
            lambda alpha, delta, bound=bound: allowed_misses(100, alpha, delta, bound),
            lambda alpha, delta, bound=bound: required_calibration(alpha, delta, bound),
        ]
    calls = [partial(call, *each) for call in of_both for each in ((value, 0.1), (0.1, value))]
    calls += [lambda bound=bound: miss_rate_bound(1, 100, value, bound) for bound in BOUNDS]
    calls += [
        lambda: order_statistic(value, 0.1, scored),
        lambda: mean_loss(recall, value, 0.1, scored),
        lambda: make_request(value, 0.1),
        lambda: make_request(value, 0.1, abstain=True),
        lambda: p_value(1, 100, value),
        lambda: fixed_sequence([0.1], value),
        lambda: corrected(value, 4),
        lambda: local_level(100, value),
        lambda: anytime_miss_rate_bound(1, 100, value),
        lambda: order_statistic(0.1, value, scored, holds="for all alphas"),
        lambda: order_statistic(0.1, value, scored, holds="at every moment"),
        lambda: check_exchangeability(scored, scored).contradicted(value),
    ]
    if value is not None:  # the marginal guarantee
        calls += [
            lambda: order_statistic(0.1, value, scored),
            lambda: minimum_alpha(value, scored),
            lambda: mean_loss(recall, 0.1, value, scored),
            lambda: make_request(0.1, value),
        ]
    for call in calls:
        with pytest.raises(InvalidRiskLevel):
            call()


def test_the_error_of_a_level_is_a_value_error_that_names_the_level():
    assert issubclass(InvalidRiskLevel, ValueError)
    assert issubclass(InvalidRiskLevel, RcirError)
    with pytest.raises(InvalidRiskLevel, match="delta"):
        allowed_misses(10, 0.1, 1)


@pytest.mark.parametrize("value", [5e-324, 0.1, math.nextafter(1, 0)])
def test_every_probability_inside_the_open_interval_is_a_level(value):
    assert check_level("alpha", value) == value


@pytest.mark.parametrize("kind", [np.float64, np.float32, Fraction])
@pytest.mark.parametrize("bound", BOUNDS)
def test_levels_of_other_number_types_count_as_their_value(kind, bound):
    quarter = kind(0.25)
    assert type(check_level("alpha", quarter)) is float
    assert allowed_misses(100, quarter, quarter, bound) == allowed_misses(100, 0.25, 0.25, bound)
    assert miss_rate_bound(3, 100, quarter, bound) == miss_rate_bound(3, 100, 0.25, bound)


def test_an_unknown_risk_is_refused_everywhere_with_the_choices(calibration, tuning, queries):
    results, relevant, _ = queries(60, 0)
    for call in (
        lambda: make_request(0.1, 0.1, risk="precision"),
        lambda: fit_score_function("auto", results, relevant, risk="precision"),
        lambda: find_risk("misses"),
        lambda: learn_then_test({"precision": 0.1}, 0.1, calibration, tuning),
    ):
        with pytest.raises(InvalidConfig, match="false-discovery"):
            call()
