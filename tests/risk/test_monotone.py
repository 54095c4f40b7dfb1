import math
from fractions import Fraction

import numpy as np
import pytest

from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.risk import Constant, LabelledResults, MonotoneController, Quantile, SearchResults

BOUNDS = ("hoeffding", "bentkus", "hoeffding-bentkus", "betting")
LEVELS = [(0.35, 0.1), (0.5, 0.01), (0.6, 0.5), (0.8, 0.1)]


@pytest.fixture(scope="module")
def pair(labelled):
    """Calibration queries and tuning queries, scored by a quantile score function."""
    score_function = Quantile(np.linspace(0, 1, 37))
    return labelled(250, 0, matches=0.4, score_function=score_function), labelled(
        90, 1, score_function=score_function
    )


@pytest.fixture(scope="module")
def tables(pair):
    """Of both: every threshold at which some set grows, and the losses there."""
    return [[(threshold, losses_at(each, threshold)) for threshold in scan(each)] for each in pair]


def losses_at(labelled, threshold):
    """1 - recall of every query's set, one by one."""
    losses = []
    for candidate_scores, relevant, total in zip(
        labelled.candidate_scores, labelled.relevant, labelled.totals, strict=True
    ):
        hits = sum(
            1
            for score, match in zip(candidate_scores, relevant, strict=True)
            if match * (score <= threshold)
        )
        losses.append(1 - hits / total if total else 1.0)
    return np.array(losses)


def scan(labelled):
    """Every threshold at which some set grows."""
    return np.unique(labelled.candidate_scores[np.isfinite(labelled.candidate_scores)])


def stake(table, alpha, delta, n):
    """The bet for the variance of the smallest sets whose mean loss is at most alpha."""
    each = [losses for _, losses in table]
    chosen = next((losses for losses in each if losses.mean() <= alpha), each[-1])
    spread = sum((loss - chosen.mean()) ** 2 for loss in chosen) + 0.25
    return min(1.0, math.sqrt(2 * math.log(1 / delta) * (len(chosen) + 1) / (n * spread)))


def certified(losses, alpha, delta, bound, bet, naive_p_value):
    if bound == "betting":
        return math.prod(1 + bet * (alpha - loss) for loss in losses) >= 1 / delta
    return naive_p_value(math.fsum(losses), len(losses), alpha, bound) <= delta


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("alpha", "delta"), LEVELS)
def test_threshold_is_the_smallest_from_which_all_are_certified(
    bound, alpha, delta, pair, tables, naive_p_value
):
    bet = stake(tables[1], alpha, delta, 250)
    passed = [certified(losses, alpha, delta, bound, bet, naive_p_value) for _, losses in tables[0]]
    first = len(passed) - passed[::-1].index(False) if False in passed else 0
    controller = MonotoneController(*pair, "recall", bound)
    if first == len(passed):
        with pytest.raises(RiskUnattainable):
            controller.threshold(alpha, delta)
    else:
        assert controller.threshold(alpha, delta) == tables[0][first][0]


@pytest.mark.parametrize("alpha", [0.3, 0.45, 0.7, 0.95])
def test_the_marginal_threshold_is_that_of_conformal_risk_control(alpha, pair, tables):
    passed = [(losses.sum() + 1) / 251 <= alpha for _, losses in tables[0]]
    threshold = MonotoneController(*pair, "recall").threshold(alpha, None)
    assert threshold == tables[0][passed.index(True)][0]


def counted(hits, bound="hoeffding-bentkus", depth=4):
    """Queries with `depth` true matches each, of which the first `hits` places hold some."""
    relevant = np.arange(depth) < np.array(hits)[:, None]
    labelled = LabelledResults.of(
        SearchResults(np.zeros(len(hits)), depth), relevant, np.full(len(hits), depth)
    ).scored(Constant())
    return MonotoneController(labelled, labelled, "recall", bound)


def refusal(controller, alpha, delta):
    with pytest.raises(RiskUnattainable) as caught:
        controller.threshold(alpha, delta)
    return caught.value


@pytest.mark.parametrize("bound", BOUNDS)
def test_the_minimum_alpha_is_attainable_and_slightly_less_is_not(bound):
    for n in range(20, 200, 9):
        controller = counted([4] * (n - 2) + [3, 1], bound)
        for delta in (0.01, 0.05, 0.1, 0.3):
            minimum = refusal(controller, 1e-4, delta).minimum_alpha
            assert minimum == controller.minimum_alpha(delta)
            assert controller.threshold(minimum, delta) == 3.0
            assert refusal(controller, minimum * (1 - 1e-7), delta).minimum_alpha == minimum


def test_the_marginal_minimum_alpha_counts_one_more_loss():
    controller = counted([4] * 18 + [3])
    error = refusal(controller, 0.05, None)
    assert error.minimum_alpha == pytest.approx((0.25 + 1) / 20)
    assert controller.threshold(error.minimum_alpha, None) == 3.0
    needed = (1 - Fraction(1, 20)) / (Fraction(1, 20) - Fraction(1, 76))  # mean loss 1 / 76
    assert error.required_calibration == math.ceil(needed)


def test_what_no_set_can_hold_is_named_with_the_way_out():
    error = refusal(counted([2] * 50), 0.4, 0.1)
    assert error.required_calibration is None
    assert "search deeper than 4 candidates (a share 0.5000 of the true matches" in str(error)
    assert "alpha = 0.4 at delta = 0.1" in str(error)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("delta", [0.1, None])
def test_queries_without_any_true_match_certify_nothing(bound, delta):
    controller = counted([0] * 30, bound)
    assert controller.minimum_alpha(delta) is None
    assert refusal(controller, 0.99, delta).minimum_alpha is None


def test_tuning_queries_matter_to_the_betting_bound_alone(pair):
    calibration, tuning = pair
    for bound in BOUNDS[:3]:
        thresholds = {
            MonotoneController(calibration, t, "recall", bound).threshold(0.5, 0.1)
            for t in (tuning, pair[0])
        }
        assert len(thresholds) == 1


def test_a_bound_for_losses_of_zero_or_one_and_an_unknown_one_are_refused(pair):
    with pytest.raises(InvalidData, match="choose hoeffding-bentkus"):
        MonotoneController(*pair, "recall", "binomial")
    with pytest.raises(InvalidConfig, match="choose one of"):
        MonotoneController(*pair, "recall", "wsr")


def test_a_risk_that_need_not_fall_as_sets_grow_is_refused(pair):
    with pytest.raises(InvalidData, match="false-discovery risk need not fall"):
        MonotoneController(*pair, "false-discovery")


def test_the_minimum_alpha_of_another_mix_is_attainable_and_slightly_less_is_not():
    relevant = np.arange(4) < np.repeat([4, 3, 1], [70, 20, 10])[:, None]
    asked = LabelledResults.of(SearchResults(np.zeros(100), 4), relevant, np.full(100, 4)).scored(
        Constant()
    )
    for weights in (
        np.repeat([0.5, 2.0, 2.5], [70, 20, 10]),
        np.repeat([1.3, 0.45, 0], [70, 20, 10]),
    ):
        controller = MonotoneController(asked, asked, "recall", weights=weights)
        least = float(np.mean(weights * np.repeat([0, 0.25, 0.75], [70, 20, 10])))
        error = refusal(controller, 0.01, 0.1)
        assert least < error.minimum_alpha < least + 0.25
        assert controller.threshold(error.minimum_alpha, 0.1) == 3.0
        assert refusal(controller, error.minimum_alpha - 1e-6, 0.1)
