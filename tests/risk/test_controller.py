import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import beta, binom

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel, RcirError, RiskUnattainable
from rcir.risk import (
    AbstentionController,
    Boosted,
    Constant,
    JointController,
    LabelledResults,
    Learned,
    MatchProbability,
    MonotoneController,
    Quantile,
    Request,
    RiskController,
    anytime_allowed_misses,
)

SEVERAL = {"miss": 0.3, "false-discovery": 0.7}
SCORE_FUNCTION = Quantile(np.linspace(0, 1, 37))


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
def control(tuning, calibration, groups):
    return RiskController(SCORE_FUNCTION, tuning, replace(calibration, groups=groups))


def smallest(labelled, allowed):
    """The smallest threshold at which at most that many sets hold no true match."""
    for threshold in np.unique(labelled.candidate_scores):
        missed = sum(
            not row[candidate_scores <= threshold].any()
            for row, candidate_scores in zip(
                labelled.relevant, labelled.candidate_scores, strict=True
            )
        )
        if missed <= allowed:
            return float(threshold)
    raise AssertionError("no threshold is enough")


def most(n, alpha, delta):
    return max(m for m in range(-1, n) if binom.cdf(m, n, alpha) <= delta)


@pytest.mark.parametrize(("alpha", "delta"), [(0.2, 0.1), (0.35, 0.01)])
def test_the_miss_risk_is_decided_by_the_exact_bound(alpha, delta, control, calibration):
    decision = control.decide(Request(alpha, delta))
    allowed = most(500, alpha, delta)
    assert decision.threshold == smallest(calibration, allowed)
    assert decision.risk_bound == pytest.approx(beta.isf(delta, allowed + 1, 500 - allowed))
    assert (decision.selection_threshold, decision.bound, decision.n_calibration) == (
        None,
        "binomial",
        500,
    )


@pytest.mark.parametrize("group", ["a", "b", "c"])
def test_a_group_is_decided_by_its_own_queries(group, control, calibration, groups):
    rows = np.array([name == group for name in groups])
    n = int(rows.sum())
    decision = control.decide(Request(0.3, 0.1, group=group))
    assert decision.threshold == smallest(calibration[rows], most(n, 0.3, 0.1))
    assert decision.n_calibration == n
    assert control.miss(group).n_calibration == n


def test_every_other_statement_can_be_had_of_a_group(tuning, control, calibration, groups):
    own = calibration[groups == "b"]
    alone = RiskController(SCORE_FUNCTION, tuning, own)
    for options in ({"risk": "recall"}, {"risk": "false-discovery"}, {"abstain": True}):
        asked, expected = Request(0.6, 0.1, group="b", **options), Request(0.6, 0.1, **options)
        assert control.decide(asked) == replace(alone.decide(expected), group="b")
        assert control.decide(asked).n_calibration == 250


def test_levels_that_hold_at_once_pay_the_band(control, calibration, naive_local_level):
    decision = control.decide(Request(0.3, 0.1, simultaneous=True))
    level = naive_local_level(500, 0.1)
    allowed = max(m for m in range(500) if binom.cdf(m, 500, 0.3) <= level)
    assert decision.threshold == smallest(calibration, allowed)
    assert decision.bound == "band"
    expected = beta.isf(level, allowed + 1, 500 - allowed)
    assert decision.risk_bound == pytest.approx(expected, rel=1e-6)


def test_without_delta_the_guarantee_is_marginal(control, calibration, tuning):
    decision = control.decide(Request(0.2, None))
    assert decision.threshold == smallest(calibration, math.floor(0.2 * 501) - 1)
    assert decision.bound == "conformal"
    assert decision.risk_bound == pytest.approx(100 / 501)
    recall = control.decide(Request(0.5, None, risk="recall"))
    assert recall.threshold == MonotoneController(calibration, tuning, "recall").threshold(
        0.5, None
    )
    assert recall.bound == "conformal"


@pytest.mark.parametrize(
    ("bound", "means"),
    [("binomial", "hoeffding-bentkus"), ("hoeffding", "hoeffding"), ("betting", "betting")],
)
def test_decisions_are_those_of_the_controllers_beneath(bound, means, tuning, calibration):
    control = RiskController(SCORE_FUNCTION, tuning, calibration, bound)
    recall = control.decide(Request(0.6, 0.1, risk="recall"))
    assert recall.threshold == MonotoneController(calibration, tuning, "recall", means).threshold(
        0.6, 0.1
    )
    assert (recall.bound, recall.risk_bound) == (means, 0.6)
    joint = JointController(calibration, tuning, means)
    discovery = control.decide(Request(0.6, 0.1, risk="false-discovery"))
    assert discovery.threshold == joint.threshold({"false-discovery": 0.6}, 0.1)
    assert (discovery.bound, discovery.risk_bound) == (means, 0.6)
    several = control.decide(Request(SEVERAL, 0.1))
    assert several.threshold == joint.threshold(SEVERAL, 0.1)
    assert several.risk_bound is None
    assert control.decide(Request(0.3, 0.1)).bound == bound


def test_abstention_watches_the_first_candidate_and_answers_with_one_or_none(
    control, tuning, calibration, queries
):
    decision = control.decide(Request(0.25, 0.1, abstain=True))
    assert decision.selection_threshold == AbstentionController(calibration, tuning).threshold(
        0.25, 0.1
    )
    assert (decision.threshold, decision.risk_bound) == (0.0, 0.25)
    asked = queries(300, 9)[0]
    sizes = control.sets(asked, decision)[1]
    assert sizes.tolist() == [int(u <= decision.selection_threshold) for u in asked.uncertainty]
    assert set(sizes.tolist()) == {0, 1}


def test_abstention_goes_by_the_selection_score_of_a_learned_score_function(queries):
    split, tuned, asked = (queries(600, seed) for seed in range(3))
    ranks = [row.index(True) + 1.0 if True in row else np.inf for row in split[1].tolist()]
    score_function = Learned.fit(split[0], np.array(ranks))
    control = RiskController(
        score_function,
        LabelledResults.of(*tuned).scored(score_function),
        LabelledResults.of(*asked).scored(score_function),
    )
    decision = control.decide(Request(0.25, 0.1, abstain=True))
    selection_score = 1 - score_function.hazard(asked[0])[:, 0]
    answered = control.sets(asked[0], decision)[1] == 1
    assert answered.tolist() == (selection_score <= decision.selection_threshold).tolist()
    missed = int((~asked[1][answered, 0]).sum())
    assert binom.cdf(missed, int(answered.sum()), 0.25) <= 0.1


def test_sizes_are_the_ranks_that_threshold_pays_for(control, queries):
    asked, decision = queries(50, 9)[0], control.decide(Request(0.2, 0.1))
    expected = (SCORE_FUNCTION.candidate_scores(asked) <= decision.threshold * (1 + 1e-3)).sum(
        axis=1
    )
    assert control.sets(asked, decision)[1].tolist() == expected.tolist()
    assert control.depth == 12


@pytest.mark.parametrize(
    ("alpha", "delta", "options"),
    [
        (SEVERAL, 0.1, {"risk": "recall"}),
        (SEVERAL, 0.1, {"risk": "false-discovery"}),
        (SEVERAL, 0.1, {"abstain": True}),
        (SEVERAL, 0.1, {"simultaneous": True}),
        (SEVERAL, None, {}),
        (0.1, 0.1, {"abstain": True, "risk": "recall"}),
        (0.1, 0.1, {"abstain": True, "risk": "false-discovery"}),
        (0.1, 0.1, {"abstain": True, "simultaneous": True}),
        (0.1, 0.1, {"simultaneous": True, "risk": "recall"}),
        (0.1, 0.1, {"simultaneous": True, "risk": "false-discovery"}),
        (0.1, None, {"risk": "false-discovery"}),
        (0.1, None, {"abstain": True}),
        (0.1, None, {"anytime": True}),
        (0.1, 0.1, {"anytime": True, "simultaneous": True}),
        (0.1, 0.1, {"anytime": True, "risk": "recall"}),
        (0.1, 0.1, {"risk": "precision"}),
    ],
)
def test_statements_that_nothing_supports_are_refused_when_asked(alpha, delta, options):
    with pytest.raises(InvalidConfig):
        Request(alpha, delta, **options)


def test_no_risk_an_unknown_risk_and_no_delta_for_all_alpha_are_refused(control):
    for alphas in ({}, {"precision": 0.1}):
        with pytest.raises(InvalidConfig):
            control.decide(Request(alphas, 0.1))
    with pytest.raises(InvalidRiskLevel, match="need a delta"):
        control.decide(Request(0.1, None, simultaneous=True))


def test_an_unknown_group_is_refused_with_those_there_are(control, tuning, calibration):
    with pytest.raises(InvalidConfig, match=r"group 'd' has no .*; there are 'a', 'b', 'c'"):
        control.decide(Request(0.3, 0.1, group="d"))
    with pytest.raises(InvalidConfig, match="none have a group"):
        RiskController(SCORE_FUNCTION, tuning, calibration).decide(Request(0.3, 0.1, group="a"))


@pytest.mark.parametrize(
    "options", [{}, {"risk": "recall"}, {"abstain": True}, {"simultaneous": True}]
)
@pytest.mark.parametrize("alpha", [0, 1, math.nan, "x", None, True])
def test_an_alpha_that_is_no_level_is_refused(alpha, options, control):
    with pytest.raises(InvalidRiskLevel, match="alpha is"):
        control.decide(Request(alpha, 0.1, **options))


@pytest.mark.parametrize("alpha", ["x", None])
def test_a_false_discovery_alpha_that_is_no_number_is_refused_on_purpose(alpha, control):
    try:
        control.decide(Request(alpha, 0.1, risk="false-discovery"))
    except RcirError:
        return
    raise AssertionError("it was taken")


@pytest.mark.parametrize("alpha", [1e-4, {"miss": 1e-4, "recall": 1e-4}])
@pytest.mark.parametrize("risk", ["miss", "recall", "false-discovery"])
def test_what_cannot_be_certified_is_never_answered(alpha, risk, control):
    risk = "miss" if isinstance(alpha, dict) else risk
    with pytest.raises(RiskUnattainable):
        control.decide(Request(alpha, 0.1, risk=risk))


def test_parts_that_do_not_fit_together_are_refused(tuning, calibration, labelled):
    with pytest.raises(InvalidData, match="other depths"):
        RiskController(Constant(), labelled(20, 0, depth=5), calibration)
    with pytest.raises(InvalidData, match="500 queries, groups"):
        RiskController(SCORE_FUNCTION, tuning, replace(calibration, groups=np.array(["a"] * 499)))
    with pytest.raises(InvalidConfig, match="choose one of"):
        RiskController(SCORE_FUNCTION, tuning, calibration, bound="normal")


def test_a_copy_between_processes_answers_alike(control):
    request = Request(0.1, 0.1)
    expected = control.decide(request)
    assert pickle.loads(pickle.dumps(control)).decide(request) == expected


def test_calibrations_that_grow_hold_at_every_moment(control, tuning, calibration):
    decision = control.decide(Request(0.3, 0.1, anytime=True))
    assert (decision.bound, decision.risk_bound) == ("anytime", 0.3)
    assert decision.threshold == smallest(calibration, anytime_allowed_misses(500, 0.3, 0.1))
    growing = RiskController(SCORE_FUNCTION, tuning, calibration, growing=True)
    assert growing.decide(Request(0.3, 0.1, anytime=True)) == decision
    for options in ({}, {"risk": "recall"}, {"abstain": True}, {"simultaneous": True}):
        with pytest.raises(InvalidConfig, match=r"added one by one, .*: ask with anytime=True"):
            growing.decide(Request(0.3, 0.1, **options))


def test_a_risk_with_an_score_function_of_its_own_is_decided_by_it_alone(
    tuning, calibration, labelled
):
    constant = RiskController(
        Constant(), *(labelled(n, s, matches=0.5) for n, s in ((200, 1), (500, 0)))
    )
    control = RiskController(SCORE_FUNCTION, tuning, calibration, own={"recall": constant})
    recall = Request(0.6, 0.1, risk="recall")
    assert control.for_risk(recall) is constant
    assert control.for_risk(Request({"recall": 0.6}, 0.1)) is constant
    assert constant.decide(recall).threshold % 1 == 0  # which counts ranks
    assert control.decide(recall).threshold % 1 != 0
    for request in (
        Request(0.6, 0.1),
        Request(0.6, 0.1, abstain=True),
        Request(0.6, 0.1, risk="false-discovery"),
        Request({"recall": 0.6, "miss": 0.3}, 0.1),
    ):
        assert control.for_risk(request) is control


def test_an_score_function_whose_numbers_were_changed_is_noticed(queries):
    split, tuned, asked = (queries(300, seed) for seed in range(3))
    for kind, name in ((Learned, "weights"), (Boosted, "trees"), (MatchProbability, "weights")):
        score_function = kind.fit(*split[:2])
        control = RiskController(
            score_function,
            LabelledResults.of(*tuned).scored(score_function),
            LabelledResults.of(*asked).scored(score_function),
        )
        assert control.intact
        values = getattr(score_function, name)
        values = values if name == "weights" else values["threshold"][0]
        kept = float(values[0])
        values[0] += 1e-9
        assert not control.intact
        values[0] = kept
        assert control.intact
    score_function.constant += 1
    assert not control.intact
