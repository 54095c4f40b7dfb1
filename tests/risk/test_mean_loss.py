"""Certificates of mean losses: recall, clusters of queries and other mixes of groups."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel, RiskUnattainable
from rcir.risk import (
    Constant,
    LabelledResults,
    Quantile,
    SearchResults,
    SetRule,
    certify,
    find_risk,
    make_request,
    mean_loss,
    score,
)
from tests.populations import in_population
from tests.risk.conftest import naive_loss

BOUNDS = ("hoeffding", "bentkus", "hoeffding-bentkus", "betting")
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
    """The same queries in 80 clusters of different sizes, and in 30 of three."""
    clusters = np.random.default_rng(2).integers(80, size=240)
    clusters[:80] = np.arange(80)
    return (
        in_population(calibration, clusters=clusters, cluster_word="video"),
        in_population(tuning, clusters=np.arange(90) // 3, cluster_word="video"),
    )


@pytest.fixture(scope="module")
def groups():
    return np.array(["a", "b", "b", "c"])[np.arange(240) % 4]


@pytest.fixture(scope="module")
def grouped(calibration, tuning, groups):
    return SetRule(SCORE_FUNCTION, tuning, in_population(calibration, groups=groups))


def loss_table(labelled, risk):
    """Every score with the mean losses of clusters at that threshold, and those of queries."""
    clusters = labelled.population.clusters
    names = range(len(labelled)) if clusters is None else clusters.tolist()
    members = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    table = []
    for threshold in np.unique(labelled.scores[np.isfinite(labelled.scores)]):
        included = labelled.scores <= threshold
        rows = zip(included, labelled.relevant, labelled.n_relevant, strict=True)
        each = [naive_loss(risk, *row) for row in rows]
        means = [np.mean([each[i] for i in rows]) for rows in members.values()]
        table.append((float(threshold), np.array(means), np.array(each)))
    return table


@pytest.fixture(scope="module")
def tables(calibration, clustered):
    """Loss tables of the calibration queries, by independent unit and risk."""
    return {
        (name, risk): loss_table(queries, risk)
        for name, queries in {"queries": calibration, "clusters": clustered[0]}.items()
        for risk in ("miss", "recall")
    }


def reaches(alpha, delta, means, singles=None, sizes=None, weights=None):
    """Return True if a wealth of 1 becomes 1 / delta, by bets on one unit after the other.

    With weights, one stake serves all units.
    """
    n, wealth = len(means), 1.0
    weights = [1.0] * n if weights is None else weights
    one_stake = set(weights) != {1.0}
    largest, square = max(1.0, *weights), sum(w * w for w in weights) / n
    sizes = [1] * n if sizes is None else sizes
    limit = 1 / (largest - alpha)
    for i in range(n):
        if not one_stake or i == 0:
            remaining, target = n - i, 1 / delta / max(wealth, 1e-29)
            spread = (1 + sum(1 / size for size in sizes[:i])) / (1 + i)
            variance = alpha * (1 - alpha) * square * (0.25 + 0.75 * spread)
            needed = (target ** (1 / remaining) - 1) / alpha
            bold = needed >= 0.7 * limit
            best = math.sqrt(2 * math.log(target) / remaining / variance)
            stake = limit if bold else min(limit, max(best, needed))
        loss = singles[i] if bold and singles is not None else means[i]
        wealth *= max(0.0, 1 + stake * (alpha - weights[i] * loss))
        if not one_stake and wealth >= (1 - 1e-8) / delta:
            return True
    return wealth >= (1 - 1e-8) / delta


def in_order(population, means, queries):
    """Return the losses of the units, of one query of each, and the sizes, in the order of bets."""
    order, rows = population.shuffled_units(), population.one_of_each_unit()
    return means[order], queries[rows][order], population.unit_sizes[order]


def assert_smallest(table, certified, call):
    """The call returns the smallest threshold from which on all are certified, or refuses."""
    passed = [certified(*losses) for _, *losses in table]
    if not passed[-1]:
        with pytest.raises(RiskUnattainable):
            call()
    else:
        first = len(passed) - passed[::-1].index(False) if False in passed else 0
        assert call() == table[first][0]


@pytest.mark.parametrize(
    ("unit", "risk"), [("queries", "recall"), ("clusters", "miss"), ("clusters", "recall")]
)
@pytest.mark.parametrize(("alpha", "delta"), [(0.05, 0.01), (0.25, 0.1), (0.5, 0.01), (0.6, 0.5)])
@pytest.mark.parametrize("bound", [*BOUNDS, None])
def test_threshold_is_the_smallest_from_which_all_are_certified(
    unit, risk, alpha, delta, bound, calibration, clustered, tables, naive_p_value
):
    queries, table = clustered[0] if unit == "clusters" else calibration, tables[unit, risk]
    n = len(table[0][1])
    assert n == (80 if unit == "clusters" else 240)

    def certified(losses, each):
        if bound is None:  # conformal risk control
            return (losses.sum() + 1) / (n + 1) <= alpha
        if bound == "betting":
            return reaches(alpha, delta, *in_order(queries.population, losses, each))
        return naive_p_value(math.fsum(losses), n, alpha, bound) <= delta

    assert_smallest(
        table,
        certified,
        lambda: (
            mean_loss(
                find_risk(risk),
                alpha,
                delta if bound else None,
                queries,
                bound or "hoeffding-bentkus",
            ).threshold
        ),
    )


def with_hits(hits, depth=4):
    """Queries with `depth` matches each, of which the first `hits` candidates are some."""
    relevant = np.arange(depth) < np.array(hits)[:, None]
    results = SearchResults(np.zeros(len(hits)), depth)
    return score(Constant(), LabelledResults(results, relevant, np.full(len(hits), depth)))


def recall(alpha, delta, queries, bound="hoeffding-bentkus", weights=None):
    """The threshold of the recall risk."""
    return mean_loss(find_risk("recall"), alpha, delta, queries, bound, weights=weights).threshold


def refusal(*arguments, certified=recall):
    with pytest.raises(RiskUnattainable) as caught:
        certified(*arguments)
    return caught.value


@pytest.mark.parametrize("bound", BOUNDS)
def test_minimum_alpha_is_attainable_and_slightly_less_is_not(bound):
    for n in range(20, 200, 27):
        queries = with_hits([4] * (n - 2) + [3, 1])
        for delta in (0.01, 0.05, 0.1, 0.3):
            minimum = refusal(1e-4, delta, queries, bound).minimum_alpha
            assert recall(minimum, delta, queries, bound) == 3.0
            little = 1e-4 if bound == "betting" else minimum * 1e-7
            less = refusal(minimum - little, delta, queries, bound)
            assert less.minimum_alpha == minimum


def test_marginal_minimum_alpha_counts_one_more_loss():
    queries = with_hits([4] * 18 + [3])
    error = refusal(0.05, None, queries)
    assert error.minimum_alpha == pytest.approx((0.25 + 1) / 20)
    assert recall(error.minimum_alpha, None, queries) == 3.0
    needed = (1 - Fraction(1, 20)) / (Fraction(1, 20) - Fraction(1, 76))  # mean loss 1 / 76
    assert error.required_calibration == math.ceil(needed)


def test_matches_beyond_the_search_depth_are_reported_with_their_share():
    error = refusal(0.4, 0.1, with_hits([2] * 50))
    assert error.required_calibration is None
    assert "search deeper" in str(error)
    assert "0.5000" in str(error)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("delta", [0.1, None])
def test_queries_without_a_match_certify_nothing(bound, delta):
    assert refusal(0.99, delta, with_hits([0] * 30), bound).minimum_alpha is None


def test_bounds_and_risks_that_do_not_fit_are_refused(calibration):
    for error, word, risk, bound in (
        (InvalidData, "hoeffding-bentkus", "recall", "binomial"),
        (InvalidConfig, "choose", "recall", "wsr"),
        (InvalidData, "fall", "false-discovery", "betting"),
    ):
        with pytest.raises(error, match=word):
            mean_loss(find_risk(risk), 0.1, 0.1, calibration, bound)


@pytest.mark.parametrize("risk", ["miss", "recall"])
@pytest.mark.parametrize(("alpha", "delta"), [(0.05, 0.01), (0.25, 0.1), (0.5, 0.01)])
def test_threshold_of_a_mix_is_that_of_a_bet_on_weighted_losses(
    risk, alpha, delta, grouped, groups, tables
):
    table, population = tables["queries", risk], grouped.evidence.population
    counts = {name: groups.tolist().count(name) for name in SHARES}
    weights = [SHARES[name] / counts[name] * 240 for name in groups.tolist()]
    assert sum(weights) == pytest.approx(240)
    order = population.shuffled_units()

    def certified(losses, _):
        each = np.array(weights)[order].tolist()
        return reaches(alpha, delta, losses[order], weights=each)

    request = make_request(alpha, delta, risk=risk, mix=SHARES)
    assert_smallest(table, certified, lambda: grouped.guarantee(request).threshold)
    if certified(*table[-1][1:]):
        guarantee = grouped.guarantee(request)
        assert (guarantee.bound, guarantee.risk_bound) == ("betting", alpha)
        assert (guarantee.n_calibration, guarantee.n_groups) == (240, None)


def test_a_bet_calculated_by_hand():
    """Two losses of 1 in a rare group that makes up three quarters of the new mix."""
    relevant = np.array([[True]] * 8 + [[False]] * 2)
    results = SearchResults(np.zeros(10), 1)
    queries = score(Constant(), LabelledResults(results, relevant, np.ones(10, int)))

    def missed(alpha, delta, weights):
        certificate = mean_loss(find_risk("miss"), alpha, delta, queries, weights=weights)
        assert certificate.bound == "betting"
        return certificate.threshold

    weights = np.repeat([0.5, 3.0], [8, 2])  # 8 * 0.5 + 2 * 3 = 10
    # The variance is 0.9 * 0.1, times the mean square 2 of the weights; the largest weight limits
    # the stake to 1 / (3 - 0.9).
    best, limit = math.sqrt(2 * math.log(2) / (10 * 0.09 * 2)), 1 / 2.1
    assert best > limit
    assert (1 + 0.4 * limit) ** 8 * (1 - 2.1 * limit) ** 2 < 2
    refusal(0.9, 0.5, weights, certified=missed)
    # A largest loss of 1.5 leaves some of the wealth: (1 + 0.9 best) ** 8 (1 - 0.6 best) ** 2
    weights = np.repeat([0.875, 1.5], [8, 2])
    best = math.sqrt(2 * math.log(2) / (10 * 0.09 * float(np.mean(weights**2))))
    assert (1 + 0.9 * best) ** 8 * (1 - 0.6 * best) ** 2 > 2
    assert missed(0.9, 0.5, weights) == 0.0
    rare = np.repeat([1.25, 0.0], [8, 2])
    # No lost query counts: at the largest stake, the wealth is (1 + 0.15 / 1.1)^10 = 3.6
    assert missed(0.15, 0.5, rare) == 0.0
    with pytest.raises(InvalidRiskLevel, match="delta"):
        missed(0.15, None, rare)


def test_minimum_alpha_of_another_mix_is_attainable_and_slightly_less_is_not():
    queries = with_hits(np.repeat([4, 3, 1], [70, 20, 10]))
    for values in ([0.5, 2.0, 2.5], [1.3, 0.45, 0]):
        weights = np.repeat(values, [70, 20, 10])
        least = float(np.mean(weights * np.repeat([0, 0.25, 0.75], [70, 20, 10])))
        arguments = (0.1, queries, "betting", weights)
        minimum = refusal(0.01, *arguments).minimum_alpha
        assert least < minimum < least + 0.25
        assert recall(minimum, *arguments) == 3.0
        refusal(minimum - 1e-4, *arguments)


@pytest.mark.parametrize(
    "options", [{"risk": "recall"}, {}, {"simultaneous": True}, {"anytime": True}], ids=str
)
def test_any_mix_takes_the_largest_threshold_of_the_groups_at_a_third_of_delta(
    options, grouped, calibration, tuning, groups
):
    guarantee = grouped.guarantee(make_request(0.5, 0.12, mix="any", **options))
    each = [
        certify(make_request(0.5, 0.04, **options), calibration[groups == name], tuning)
        for name in "abc"
    ]
    assert guarantee.threshold == max(of.threshold for of in each)
    assert guarantee.risk_bound == max(of.risk_bound for of in each)
    assert (guarantee.n_calibration, guarantee.n_groups, guarantee.n_clusters) == (240, 3, None)


def test_any_mix_names_the_group_that_cannot_be_certified(calibration, tuning, groups):
    names = np.where(np.arange(240) < 9, "few", groups)
    request = make_request(0.3, 0.1, mix="any")
    with pytest.raises(RiskUnattainable, match="'few'") as caught:
        certify(request, in_population(calibration, groups=names), tuning)
    assert caught.value.required_calibration is not None
    certify(
        replace(request, levels={"miss": caught.value.minimum_alpha}),
        in_population(calibration, groups=names),
    )
    with pytest.raises(InvalidConfig, match="group"):
        certify(request, calibration, tuning)


def test_a_mix_of_one_group_needs_at_least_the_sets_of_that_group(grouped):
    # With weights of 4 the bet is at most a quarter: what is certified is certified of the group.
    mixed = grouped.guarantee(make_request(0.5, 0.1, mix={"a": 1.0}))
    assert mixed.threshold >= grouped.guarantee(make_request(0.5, 0.1, group="a")).threshold
    with pytest.raises(InvalidConfig, match="'d'"):
        grouped.guarantee(make_request(0.5, 0.1, mix={"a": 0.5, "d": 0.5}))


def test_clusters_are_certified_by_betting_on_their_mean_losses(clustered, groups):
    calibration, tuning = clustered
    rule = SetRule(SCORE_FUNCTION, tuning, in_population(calibration, groups=groups))
    for options in ({"risk": "miss"}, {"risk": "recall"}, {"group": "b"}):
        queries = calibration[groups == "b"] if "group" in options else calibration
        guarantee = rule.guarantee(make_request(0.4, 0.1, **options))
        risk = find_risk(options.get("risk", "miss"))
        expected = mean_loss(risk, 0.4, 0.1, queries, "betting")
        assert guarantee.certificate == expected
        assert guarantee.n_clusters == len(set(queries.population.clusters.tolist()))
        assert guarantee.n_calibration == len(queries)
    assert rule.guarantee(make_request(0.4, None)).bound == "conformal"


@pytest.mark.parametrize(("risk", "alpha"), [("miss", 0.3), ("recall", 0.4)])
def test_any_mix_certifies_the_clusters_of_each_group_at_a_third_of_delta(risk, alpha, clustered):
    calibration, tuning = clustered
    grouped = in_population(
        calibration, groups=np.array(list("abc"))[calibration.population.clusters % 3]
    )
    request = make_request(alpha, 0.3, risk=risk, mix="any")
    each = [
        mean_loss(find_risk(risk), alpha, 0.1, grouped.of_group(name), "betting").threshold
        for name in "abc"
    ]
    guarantee = SetRule(SCORE_FUNCTION, tuning, grouped).guarantee(request)
    assert guarantee.threshold == max(each) > min(each)
    assert (guarantee.bound, guarantee.n_groups, guarantee.n_clusters) == ("betting", 3, 80)
    with pytest.raises(RiskUnattainable, match="group 'a'") as refused:
        certify(replace(request, levels={risk: 0.05}), grouped, tuning)
    certify(replace(request, levels={risk: refused.value.minimum_alpha}), grouped, tuning)


def test_any_mix_needs_one_group_for_each_cluster_or_label(clustered, groups):
    calibration, tuning = clustered
    one = np.array(list("abc"))[calibration.population.clusters % 3]
    one[0] = "b"  # the other queries of cluster 0 are of group a
    request = make_request(0.6, 0.3, mix="any")
    for names, clusters in ((groups, 60), (one, 1)):
        with pytest.raises(InvalidConfig, match=rf"{clusters} of 80 clusters \(video\)"):
            certify(request, in_population(calibration, groups=names), tuning)
    labels = in_population(
        calibration,
        groups=groups,
        labels=calibration.population.clusters,
        clusters=None,
        cluster_word=None,
    )
    for query_labels in ("new", "any"):
        with pytest.raises(InvalidConfig, match="60 of 80 labels"):
            certify(replace(request, labels=query_labels), labels)


@pytest.mark.parametrize(
    "options", [{"simultaneous": True}, {"anytime": True}, {"abstain": True}, {"mix": SHARES}]
)
def test_clusters_refuse_what_needs_independent_queries(options, clustered, groups):
    calibration, tuning = clustered
    with pytest.raises(InvalidConfig, match="clusters"):
        certify(
            make_request(0.3, 0.1, **options), in_population(calibration, groups=groups), tuning
        )


def test_too_few_clusters_are_counted_in_the_refusal(clustered):
    with pytest.raises(RiskUnattainable, match="80 clusters") as error:
        certify(make_request(0.01, 0.1), *clustered)
    minimum = error.value.minimum_alpha
    assert certify(make_request(minimum, 0.1), *clustered).threshold >= 0
    with pytest.raises(RiskUnattainable):
        certify(make_request(minimum - 1e-4, 0.1), *clustered)
