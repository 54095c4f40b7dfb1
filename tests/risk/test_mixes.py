"""Losses of clusters of queries, and of other mixes of groups than the calibration queries'."""

import math
from dataclasses import replace

import numpy as np
import pytest

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel, RiskUnattainable
from rcir.risk import (
    Constant,
    LabelledResults,
    MonotoneController,
    Quantile,
    Request,
    RiskController,
    SearchResults,
)

SCORE_FUNCTION = Quantile(np.linspace(0, 1, 37))
SHARES = {"a": 0.1, "b": 0.6, "c": 0.3}


@pytest.fixture(scope="module")
def calibration(labelled):
    return labelled(240, 0, matches=0.5, score_function=SCORE_FUNCTION)


@pytest.fixture(scope="module")
def tuning(labelled):
    return labelled(90, 1, matches=0.5, score_function=SCORE_FUNCTION)


@pytest.fixture(scope="module")
def clustered(calibration, tuning):
    """The same, in 80 clusters of one to some and 30 of three."""
    which = np.random.default_rng(2).integers(80, size=240)
    which[:80] = np.arange(80)
    return (
        replace(calibration, clusters=which, cluster="video"),
        replace(tuning, clusters=np.arange(90) // 3, cluster="video"),
    )


@pytest.fixture(scope="module")
def groups():
    return np.array(["a", "b", "b", "c"])[np.arange(240) % 4]


def loss(risk, held, relevant, total):
    hits = int(relevant[held].sum())
    if risk == "miss":
        return float(hits == 0)
    return 1 - hits / total if total else 1.0


def table(labelled, risk):
    """Of every score: it, and the mean loss of every cluster, or of every query."""
    all_scores = np.unique(labelled.candidate_scores[np.isfinite(labelled.candidate_scores)])
    names = range(len(labelled)) if labelled.clusters is None else labelled.clusters.tolist()
    members = {name: [i for i, other in enumerate(names) if other == name] for name in set(names)}
    found = []
    for threshold in all_scores:
        rows = zip(
            labelled.candidate_scores <= threshold, labelled.relevant, labelled.totals, strict=True
        )
        each = [loss(risk, *row) for row in rows]
        found.append(
            (
                float(threshold),
                np.array([np.mean([each[i] for i in of]) for of in members.values()]),
            )
        )
    return found


@pytest.fixture(scope="module")
def tables(calibration, tuning, clustered):
    """Of calibration and tuning queries, by what is independent and by risk."""
    pairs = {"queries": (calibration, tuning), "clusters": clustered}
    return {
        (name, risk): [table(each, risk) for each in pair]
        for name, pair in pairs.items()
        for risk in ("miss", "recall")
    }


def stake(tuned, alpha, delta, weights):
    """The bet for the losses of the tuning queries, scaled by the weights."""
    each = [losses for _, losses in tuned]
    chosen = next((losses for losses in each if losses.mean() <= alpha), each[-1])
    spread = (sum((x - chosen.mean()) ** 2 for x in chosen) + 0.25) / (len(chosen) + 1)
    spread *= sum(w * w for w in weights) / len(weights)
    best = math.sqrt(2 * math.log(1 / delta) / (len(weights) * spread))
    return min(best, 1 / max(1.0, *weights))


def smallest(table, certified):
    """The smallest threshold from which on all are certified; None if the largest is not."""
    passed = [certified(losses) for _, losses in table]
    if not passed[-1]:
        return None
    first = len(passed) - passed[::-1].index(False) if False in passed else 0
    return table[first][0]


def assert_threshold(expected, ask):
    if expected is None:
        with pytest.raises(RiskUnattainable):
            ask()
    else:
        assert ask() == expected


@pytest.mark.parametrize("risk", ["miss", "recall"])
@pytest.mark.parametrize(("alpha", "delta"), [(0.05, 0.01), (0.2, 0.1), (0.5, 0.01)])
@pytest.mark.parametrize("bound", ["hoeffding", "hoeffding-bentkus", "betting", "conformal"])
def test_of_clusters_the_smallest_threshold_is_that_of_their_mean_losses(
    risk, alpha, delta, bound, clustered, tables, naive_p_value
):
    calibrated, tuned = tables["clusters", risk]
    bet = stake(tuned, alpha, delta, np.ones(80))

    def certified(losses):
        if bound == "conformal":
            return (losses.sum() + 1) / 81 <= alpha
        if bound == "betting":
            return math.prod(1 + bet * (alpha - x) for x in losses) >= 1 / delta
        return naive_p_value(math.fsum(losses), 80, alpha, bound) <= delta

    kind = "betting" if bound == "conformal" else bound
    controller = MonotoneController(*clustered, risk, kind)
    asked = None if bound == "conformal" else delta
    assert_threshold(smallest(calibrated, certified), lambda: controller.threshold(alpha, asked))


@pytest.mark.parametrize("risk", ["miss", "recall"])
@pytest.mark.parametrize(("alpha", "delta"), [(0.05, 0.01), (0.25, 0.1), (0.5, 0.01)])
def test_of_a_mix_the_smallest_threshold_is_that_of_a_bet_on_weighted_losses(
    risk, alpha, delta, calibration, tuning, groups, tables
):
    calibrated, tuned = tables["queries", risk]
    counts = {name: groups.tolist().count(name) for name in SHARES}
    weights = [SHARES[name] / counts[name] * 240 for name in groups.tolist()]
    assert sum(weights) == pytest.approx(240)
    bet = stake(tuned, alpha, delta, weights)

    def certified(losses):
        terms = zip(weights, losses, strict=True)
        return math.prod(1 + bet * (alpha - w * x) for w, x in terms) >= 1 / delta

    expected = smallest(calibrated, certified)
    control = RiskController(SCORE_FUNCTION, tuning, replace(calibration, groups=groups))
    request = Request(alpha, delta, risk=risk, mix=SHARES)
    assert_threshold(expected, lambda: control.decide(request).threshold)
    if expected is not None:
        decision = control.decide(request)
        assert (decision.bound, decision.risk_bound) == ("betting", alpha)
        assert (decision.n_calibration, decision.n_groups) == (240, None)


def test_a_bet_by_hand():
    """Two losses of 1 in the rare group, none in the other, of which three quarters will come."""
    relevant = np.array([[True]] * 8 + [[False]] * 2)
    labelled = LabelledResults.of(
        SearchResults(np.zeros(10), 1), relevant, np.ones(10, int)
    ).scored(Constant())
    weights = np.repeat([0.5, 3.0], [8, 2])  # 8 * 0.5 + 2 * 3 = 10
    controller = MonotoneController(labelled, labelled, "miss", weights=weights)
    # A share 0.2 of misses is all that tuning shows: variance (10 * 0.16 + 0.25) / 11, times the
    # mean square 2 of the weights; the bet of the largest weight is at most a third of the wealth.
    best = math.sqrt(2 * math.log(2) / (10 * 2 * (1.6 + 0.25) / 11))
    assert best > 1 / 3
    wealth = (1 + 0.9 / 3) ** 8 * (1 + (0.9 - 3) / 3) ** 2
    assert wealth < 2
    with pytest.raises(RiskUnattainable):
        controller.threshold(0.9, 0.5)
    rare = MonotoneController(labelled, labelled, "miss", weights=np.repeat([1.25, 0.0], [8, 2]))
    assert rare.bound == "betting"
    # nothing of what is lost counts: (1 + 0.8 * 0.15)^10 = 3.1
    assert rare.threshold(0.15, 0.5) == 0.0
    with pytest.raises(InvalidRiskLevel, match="another mix of units needs a delta"):
        rare.threshold(0.15, None)


@pytest.mark.parametrize("risk", ["miss", "recall"])
def test_any_mix_has_the_sets_of_the_group_that_needs_the_largest(
    risk, calibration, tuning, groups
):
    control = RiskController(SCORE_FUNCTION, tuning, replace(calibration, groups=groups))
    decision = control.decide(Request(0.5, 0.12, risk=risk, mix="any"))
    each = {
        name: RiskController(SCORE_FUNCTION, tuning, calibration[groups == name]).decide(
            Request(0.5, 0.04, risk=risk)
        )
        for name in "abc"
    }
    assert decision.threshold == max(of.threshold for of in each.values())
    assert decision.risk_bound == max(of.risk_bound for of in each.values())
    assert (decision.n_calibration, decision.n_groups, decision.n_clusters) == (240, 3, None)


def test_any_mix_names_the_group_that_cannot_be_certified(calibration, tuning, groups):
    names = np.where(np.arange(240) < 9, "few", groups)
    control = RiskController(SCORE_FUNCTION, tuning, replace(calibration, groups=names))
    with pytest.raises(RiskUnattainable, match=r"each of 4 groups .*: group 'few'") as caught:
        control.decide(Request(0.3, 0.1, mix="any"))
    assert caught.value.required_calibration is not None
    with pytest.raises(InvalidConfig, match="none have a group"):
        RiskController(SCORE_FUNCTION, tuning, calibration).decide(Request(0.3, 0.1, mix="any"))


@pytest.mark.parametrize("option", ["simultaneous", "anytime"])
def test_any_mix_goes_with_other_statements(option, calibration, tuning, groups):
    control = RiskController(SCORE_FUNCTION, tuning, replace(calibration, groups=groups))
    decision = control.decide(Request(0.5, 0.12, mix="any", **{option: True}))
    thresholds = [control.miss(name).threshold(0.5, 0.04, **{option: True}) for name in "abc"]
    assert decision.threshold == max(thresholds)


def test_a_mix_of_one_group_is_that_group_and_unknown_groups_are_refused(
    calibration, tuning, groups
):
    control = RiskController(SCORE_FUNCTION, tuning, replace(calibration, groups=groups))
    with pytest.raises(InvalidConfig, match="group 'd' has no calibration queries"):
        control.decide(Request(0.5, 0.1, mix={"a": 0.5, "d": 0.5}))
    # With weights of 4 the bet is at most a quarter: what is certified is certified of the group.
    of_mix = control.decide(Request(0.5, 0.1, mix={"a": 1.0}))
    assert of_mix.threshold >= control.decide(Request(0.5, 0.1, group="a")).threshold


def test_clusters_are_decided_by_their_mean_losses(clustered, groups):
    calibration, tuning = clustered
    control = RiskController(SCORE_FUNCTION, tuning, replace(calibration, groups=groups))
    for risk in ("miss", "recall"):
        decision = control.decide(Request(0.4, 0.1, risk=risk))
        expected = MonotoneController(calibration, tuning, risk, "betting")
        assert decision.threshold == expected.threshold(0.4, 0.1)
        assert (decision.bound, decision.n_clusters) == ("betting", 80)
        assert decision.n_calibration == 240
    own = calibration[groups == "b"]
    decision = control.decide(Request(0.4, 0.1, group="b"))
    assert decision.threshold == MonotoneController(own, tuning, "miss", "betting").threshold(
        0.4, 0.1
    )
    assert decision.n_clusters == len(set(own.clusters.tolist()))
    whatever = control.decide(Request(0.6, 0.3, mix="any"))
    each = [control.decide(Request(0.6, 0.1, group=name)) for name in "abc"]
    assert whatever.threshold == max(of.threshold for of in each)
    assert whatever.n_clusters == len(set(calibration.clusters.tolist()))  # shared by the groups
    assert control.decide(Request(0.4, None)).bound == "conformal"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"simultaneous": True}, "neither simultaneous nor anytime"),
        ({"anytime": True}, "neither simultaneous nor anytime"),
        ({"abstain": True}, "needs independent queries"),
        ({"mix": SHARES}, "mix can be 'any' only"),
    ],
)
def test_clusters_refuse_what_needs_independent_queries_in_words(options, words, clustered, groups):
    calibration, tuning = clustered
    control = RiskController(SCORE_FUNCTION, tuning, replace(calibration, groups=groups))
    with pytest.raises(InvalidConfig, match=rf"come in clusters \(video\): .*{words}"):
        control.decide(Request(0.3, 0.1, **options))


def test_too_few_clusters_are_counted_in_the_refusal(clustered):
    calibration, tuning = clustered
    control = RiskController(SCORE_FUNCTION, tuning, calibration)
    with pytest.raises(RiskUnattainable, match="with 80 clusters of calibration queries") as error:
        control.decide(Request(0.01, 0.1))
    smallest = error.value.minimum_alpha
    assert control.decide(Request(smallest, 0.1)).threshold >= 0
    with pytest.raises(RiskUnattainable):
        control.decide(Request(smallest * (1 - 1e-6), 0.1))


def test_clusters_need_a_name_and_a_name_needs_clusters(clustered, calibration, tuning):
    for labelled, cluster in ((clustered[0], None), (calibration, "video")):
        with pytest.raises(InvalidData, match="give clusters and what they are"):
            replace(labelled, cluster=cluster)
