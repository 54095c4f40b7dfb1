import numpy as np
import pytest

from rcir.errors import InvalidConfig, RiskUnattainable
from rcir.risk import (
    Constant,
    JointController,
    LabelledResults,
    Quantile,
    SearchResults,
    bonferroni_holm,
    fixed_sequence,
)

ASKED = [
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


def naive_bonferroni_holm(values, delta):
    left, rejected = list(range(len(values))), [False] * len(values)
    while left:
        smallest = min(left, key=lambda i: values[i])
        if values[smallest] > delta / len(left):
            break
        rejected[smallest] = True
        left.remove(smallest)
    return rejected


NAIVE = {
    fixed_sequence: naive_fixed_sequence,
    bonferroni_holm: naive_bonferroni_holm,
}


@pytest.mark.parametrize("test", NAIVE)
@pytest.mark.parametrize("delta", [0.01, 0.1, 0.6])
def test_rejections_are_those_of_a_loop(test, delta):
    for seed in range(100):
        rng = np.random.default_rng(seed)
        values = rng.uniform(size=rng.integers(1, 12)) ** rng.integers(1, 8)
        values = np.round(values, 3) if seed % 2 else values  # with ties
        assert test(values, delta).tolist() == NAIVE[test](values.tolist(), delta)


def test_holm_s_thresholds_are_met_with_equality():
    assert bonferroni_holm([0.25, 0.125, 0.5], 0.375).tolist() == [False, True, False]
    assert bonferroni_holm([0.1875, 0.125, 0.375], 0.375).tolist() == [True, True, True]
    assert fixed_sequence([0.375, 0.376, 0.1], 0.375).tolist() == [True, False, False]


@pytest.fixture(scope="module")
def pair(labelled):
    score_function = Quantile(np.linspace(0, 1, 37))
    draws = [
        labelled(n, s, matches=0.5, score_function=score_function) for n, s in ((400, 3), (150, 4))
    ]
    return tuple(draws)


def loss(risk, held, relevant, total):
    hits = int(relevant[held].sum())
    if risk == "miss":
        return float(hits == 0)
    if risk == "recall":
        return 1 - hits / total if total else 1.0
    return 1 - hits / int(held.sum())


def worst_p_values(labelled, thresholds, alphas, naive_p_value):
    """Of the sets of each threshold, whose ranks may score a thousandth more than it."""
    values = []
    for threshold in thresholds.tolist():
        each = []
        for risk, alpha in alphas.items():
            held = labelled.candidate_scores <= threshold * (1 + 1e-3)
            rows = zip(held, labelled.relevant, labelled.totals, strict=True)
            total = sum(loss(risk, *row) for row in rows)
            bound = "binomial" if risk == "miss" else "hoeffding-bentkus"
            each.append(naive_p_value(total, len(labelled), alpha, bound))
        values.append(max(each))
    return values


@pytest.mark.parametrize(("alphas", "delta"), ASKED)
@pytest.mark.parametrize("procedure", ["fixed-sequence", "bonferroni-holm"])
def test_threshold_is_the_best_of_those_that_the_tests_certify(
    alphas, delta, procedure, pair, naive_p_value
):
    calibration, tuning = pair
    controller = JointController(calibration, tuning, procedure=procedure)
    values = worst_p_values(calibration, controller.thresholds, alphas, naive_p_value)
    if procedure == "fixed-sequence":
        promise = worst_p_values(tuning, controller.thresholds, alphas, naive_p_value)
        order = sorted(range(len(values)), key=lambda i: promise[i])
        rejected = naive_fixed_sequence([values[i] for i in order], delta)
        certified = [
            controller.thresholds[i] for i, good in zip(order, rejected, strict=True) if good
        ]
    else:
        rejected = naive_bonferroni_holm(values, delta)
        certified = [
            threshold
            for threshold, good in zip(controller.thresholds, rejected, strict=True)
            if good
        ]
    if not certified:
        with pytest.raises(RiskUnattainable):
            controller.threshold(alphas, delta)
    elif alphas.keys() == {"false-discovery"}:
        assert controller.threshold(alphas, delta) == max(certified)
    else:
        assert controller.threshold(alphas, delta) == min(certified)


@pytest.mark.parametrize(("late", "expected"), [(134, 0.0), (135, 1.0)])
def test_misses_are_bounded_exactly(late, expected):
    # P(Binomial(3000, 0.05) <= 134) <= 0.1 < P(Binomial(3000, 0.05) <= 135)
    relevant = np.repeat([[True, False], [False, True]], [3000 - late, late], axis=0)
    queries = SearchResults(np.zeros(3000), 2)
    asked = LabelledResults.of(queries, relevant, np.ones(3000, int)).scored(Constant())
    assert JointController(asked, asked).threshold({"miss": 0.05}, 0.1) == expected


def test_some_of_the_asked_levels_are_certified_and_some_are_not(pair):
    attained = 0
    for alphas, delta in ASKED:
        try:
            JointController(*pair).threshold(alphas, delta)
        except RiskUnattainable:
            continue
        attained += 1
    assert attained >= 4


def test_the_thresholds_come_from_the_tuning_queries_and_span_all_their_sets(pair):
    calibration, tuning = pair
    thresholds = JointController(calibration, tuning).thresholds
    np.testing.assert_array_equal(thresholds, JointController(tuning, tuning).thresholds)
    finite = tuning.candidate_scores[np.isfinite(tuning.candidate_scores)]
    assert set(thresholds.tolist()) <= set(finite.tolist())
    assert (thresholds[0], thresholds[-1]) == (0, finite.max())
    assert len(thresholds) <= 256
    assert (np.diff(thresholds) > 0).all()


def test_with_few_scores_every_one_is_a_threshold(labelled):
    asked = labelled(100, 5)
    assert JointController(asked, asked).thresholds.tolist() == list(range(12))


def test_the_smallest_attainable_alpha_is_told_to_four_decimals(pair):
    controller = JointController(*pair)
    for risk in ("miss", "recall", "false-discovery"):
        with pytest.raises(RiskUnattainable, match=f"{risk} 0.001 at delta = 0.1") as caught:
            controller.threshold({risk: 0.001}, 0.1)
        minimum = caught.value.minimum_alpha
        assert f"{minimum:.4f}" in str(caught.value)
        assert minimum == round(minimum, 4)
        assert controller.threshold({risk: minimum}, 0.1) >= 0
        with pytest.raises(RiskUnattainable):
            controller.threshold({risk: minimum - 1e-4}, 0.1)


def test_risks_that_cannot_hold_together_are_told_what_each_alone_could_have(pair):
    with pytest.raises(RiskUnattainable, match="each alone: miss 0") as caught:
        JointController(*pair).threshold({"miss": 0.01, "false-discovery": 0.01}, 0.1)
    assert caught.value.minimum_alpha is None


def test_nothing_is_attainable_without_a_true_match():
    none = np.zeros((40, 3), bool)
    lost = LabelledResults.of(SearchResults(np.zeros(40), 3), none, np.zeros(40, int)).scored(
        Constant()
    )
    assert JointController(lost, lost).minimum_alpha("miss", 0.1) is None


def test_no_risk_and_an_unknown_risk_are_refused(pair):
    with pytest.raises(InvalidConfig, match="no risk"):
        JointController(*pair).threshold({}, 0.1)
    with pytest.raises(InvalidConfig, match="choose one of miss, recall, false-discovery"):
        JointController(*pair).threshold({"precision": 0.1}, 0.1)
