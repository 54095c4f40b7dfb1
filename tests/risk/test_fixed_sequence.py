"""Learn Then Test: several risks at once, false discoveries, and abstention."""

import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import InvalidData, RiskUnattainable
from rcir.risk import Quantile, ScoredResults, fixed_sequence, learn_then_test, selective
from tests.risk.conftest import naive_loss
from tests.statistical.populations import answered

REQUESTS = [
    ({"miss": 0.3}, 0.1),
    ({"recall": 0.5}, 0.05),
    ({"false-discovery": 0.6}, 0.1),
    ({"miss": 0.3, "recall": 0.6}, 0.1),
    ({"miss": 0.35, "false-discovery": 0.65}, 0.1),
    ({"miss": 0.4, "recall": 0.7, "false-discovery": 0.75}, 0.02),
]


def naive_fixed_sequence(values, delta):
    rejected = []
    for value in values:
        if value > delta:
            break
        rejected.append(True)
    return rejected + [False] * (len(values) - len(rejected))


@pytest.mark.parametrize("delta", [0.01, 0.1, 0.6])
def test_rejections_are_those_of_a_loop(delta):
    for seed in range(100):
        rng = np.random.default_rng(seed)
        values = rng.uniform(size=rng.integers(1, 12)) ** rng.integers(1, 8)
        values = np.round(values, 3) if seed % 2 else values  # with ties
        rejected = fixed_sequence(values, delta).tolist()
        assert rejected == naive_fixed_sequence(values.tolist(), delta)


def test_a_p_value_equal_to_its_level_is_rejected():
    assert fixed_sequence([0.375, 0.376, 0.1], 0.375).tolist() == [True, False, False]


@pytest.fixture(scope="module")
def pair(labelled):
    """Calibration and tuning queries."""
    score_function = Quantile(np.linspace(0, 1, 37))
    return tuple(
        labelled(n, seed, matches=0.5, score_function=score_function)
        for n, seed in ((400, 3), (150, 4))
    )


def worst_p_values(labelled, thresholds, alphas, naive_p_value):
    """The largest p-value at each threshold; sets include scores up to a thousandth above it."""
    values = []
    for threshold in thresholds.tolist():
        each = []
        for risk, alpha in alphas.items():
            included = labelled.scores <= threshold * (1 + 1e-3)
            rows = zip(included, labelled.relevant, labelled.n_relevant, strict=True)
            total = sum(naive_loss(risk, *row) for row in rows)
            bound = "binomial" if risk == "miss" else "hoeffding-bentkus"
            each.append(naive_p_value(total, len(labelled), alpha, bound))
        values.append(max(each))
    return values


@pytest.mark.parametrize(("alphas", "delta"), REQUESTS)
def test_threshold_is_the_best_of_those_that_are_certified(alphas, delta, pair, naive_p_value):
    calibration, tuning = pair
    thresholds = tuning.size_thresholds(256)
    values = worst_p_values(calibration, thresholds, alphas, naive_p_value)
    tuning_values = worst_p_values(tuning, thresholds, alphas, naive_p_value)
    order = sorted(range(len(values)), key=lambda i: tuning_values[i])
    rejected = naive_fixed_sequence([values[i] for i in order], delta)
    certified = [float(thresholds[i]) for i, each in zip(order, rejected, strict=True) if each]
    assert len(certified) > 1
    best = max if alphas.keys() == {"false-discovery"} else min
    assert learn_then_test(alphas, delta, *pair).threshold == best(certified)


def test_thresholds_span_all_sets_of_the_tuning_queries(pair, labelled):
    _, tuning = pair
    thresholds = tuning.size_thresholds(256)
    finite = tuning.scores[np.isfinite(tuning.scores)]
    assert set(thresholds.tolist()) <= set(finite.tolist())
    assert (thresholds[0], thresholds[-1]) == (0, finite.max())
    assert (np.diff(thresholds) > 0).all()
    assert labelled(100, 5).size_thresholds(256).tolist() == list(range(12))


def test_the_smallest_attainable_alpha_is_reported_to_four_decimals(pair):
    for risk in ("miss", "recall", "false-discovery"):
        with pytest.raises(RiskUnattainable, match=risk) as caught:
            learn_then_test({risk: 0.001}, 0.1, *pair)
        minimum = caught.value.minimum_alpha
        assert f"{minimum:.4f}" in str(caught.value)
        assert minimum == round(minimum, 4)
        assert learn_then_test({risk: minimum}, 0.1, *pair).threshold >= 0
        with pytest.raises(RiskUnattainable):
            learn_then_test({risk: minimum - 1e-4}, 0.1, *pair)
    with pytest.raises(RiskUnattainable) as caught:
        learn_then_test({"miss": 0.01, "false-discovery": 0.01}, 0.1, *pair)
    assert caught.value.minimum_alpha is None


def test_nothing_is_attainable_without_a_match():
    scores = np.tile(np.arange(3, dtype=np.float32), (40, 1))
    lost = ScoredResults.from_scores(scores, np.zeros((40, 3), bool))
    with pytest.raises(RiskUnattainable) as caught:
        learn_then_test({"miss": 0.9}, 0.1, lost, lost)
    assert caught.value.minimum_alpha is None


def draw_answers(n, seed, ties=False):
    rng = np.random.default_rng(seed)
    selection_score = rng.uniform(size=n)
    missed = rng.uniform(size=n) < selection_score
    return answered(np.round(selection_score, 2) if ties else selection_score, missed)


def naive_selection_threshold(calibration, tuning, alpha, delta):
    """From the safest of 200 thresholds upwards as long as each is certified; None if none is.

    A threshold is a thousandth above the selection score of a tuning query.
    """

    def p_value(queries, threshold):
        misses = [
            bool(missed)
            for score, missed in zip(queries.selection_score, ~queries.relevant[:, 0], strict=True)
            if score <= threshold
        ]
        return binom.cdf(sum(misses), len(misses), alpha) if misses else 1.0

    n = len(tuning.selection_score)
    ordered = [score + 1e-3 * abs(score) for score in sorted(tuning.selection_score)]
    thresholds = sorted({ordered[int(i * (n - 1) / 199)] for i in range(200)})
    values = [p_value(tuning, threshold) for threshold in thresholds]
    certified = None
    for threshold in thresholds[values.index(min(values)) :]:
        if p_value(calibration, threshold) > delta:
            break
        certified = threshold
    return certified


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("alpha", "delta"), [(0.1, 0.1), (0.2, 0.01), (0.3, 0.5), (0.49, 0.1)])
def test_selection_threshold_is_that_of_a_loop_over_all_thresholds(seed, ties, alpha, delta):
    calibration, tuning = draw_answers(500, seed, ties), draw_answers(300, seed + 100, ties)
    expected = naive_selection_threshold(calibration, tuning, alpha, delta)
    if expected is None:
        with pytest.raises(RiskUnattainable):
            selective(alpha, delta, calibration, tuning)
    else:
        certificate = selective(alpha, delta, calibration, tuning)
        assert certificate.selection_threshold == expected


def test_all_or_nothing_is_answered_if_misses_do_not_depend_on_the_selection_score():
    queries = answered(np.linspace(0, 1, 1000), np.arange(1000) % 10 == 5)
    # A thousandth above the largest score.
    assert selective(0.15, 0.1, queries, queries).selection_threshold == 1.001
    with pytest.raises(RiskUnattainable):
        selective(0.09, 1e-6, queries, queries)


def test_the_first_threshold_that_fails_ends_the_search():
    # No query is missed below 0.5, all are from there to 0.6, and none of 9,000 more.
    parts = ((0, 0.5, 500), (0.51, 0.6, 500), (0.61, 1, 9000))
    scores = np.concatenate([np.linspace(*part) for part in parts])
    missed = (scores > 0.505) & (scores < 0.605)
    tuning = answered(scores[scores < 0.605], missed[scores < 0.605])
    certificate = selective(0.1, 0.05, answered(scores, missed), tuning)
    assert 0.45 < certificate.selection_threshold <= 0.53


def test_too_few_answers_are_told_how_many_and_which_alpha():
    queries = answered(np.linspace(0, 1, 20), np.zeros(20, bool))
    with pytest.raises(RiskUnattainable, match="22") as caught:
        selective(0.1, 0.1, queries, queries)  # 0.9**22 <= 0.1 < 0.9**21
    # 1 - 0.1 ** (1 / 20) = 0.10875, rounded up to 4 decimals
    assert caught.value.minimum_alpha == 0.1088
    assert "0.1088" in str(caught.value)
    assert selective(0.1088, 0.1, queries, queries).selection_threshold == 1.001


@pytest.mark.parametrize("sign", [1, -1])
def test_selection_scores_may_differ_by_a_thousandth_also_below_zero(sign):
    scores = sign * np.linspace(0.2, 0.9, 22)
    queries = answered(scores, np.zeros(22, bool))
    expected = scores.max() + 1e-3 * abs(scores.max())
    certificate = selective(0.1, 0.1, queries, queries)
    assert certificate.selection_threshold == pytest.approx(expected)


@pytest.mark.parametrize(("scores", "missed"), [((3,), (2,)), ((0,), (0,)), ((2, 1), (2, 1))])
def test_arrays_that_do_not_fit_together_are_refused(scores, missed):
    with pytest.raises(InvalidData, match=r"shape|no queries"):
        answered(np.zeros(scores), np.zeros(missed, bool))
