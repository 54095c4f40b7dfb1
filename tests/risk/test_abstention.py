import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import InvalidData, RiskUnattainable
from rcir.risk import AbstentionController, LabelledResults


def answered(selection_score, missed):
    """Queries that are missed or not, were they answered with their first candidate."""
    return LabelledResults(
        selection_score,
        1,
        relevant=~missed[:, None],
        totals=(~missed).astype(int),
        selection_score=selection_score,
    )


def draw(n, seed, ties=False):
    rng = np.random.default_rng(seed)
    selection_score = rng.uniform(size=n)
    missed = rng.uniform(size=n) < selection_score
    return answered(np.round(selection_score, 2) if ties else selection_score, missed)


def certainty(queries, threshold, alpha):
    """The p-value of "more than alpha of the queries answered are missed"."""
    answered = [
        bool(m)
        for d, m in zip(queries.selection_score, ~queries.relevant[:, 0], strict=True)
        if d <= threshold
    ]
    return binom.cdf(sum(answered), len(answered), alpha) if answered else 1.0


def naive(calibration, tuning, alpha, delta):
    """From the safest of 200 thresholds upwards as long as each is certified; None if none is.

    A threshold is a thousandth above the selection score of a query, which may be seen again.
    """
    n = len(tuning.selection_score)
    ordered = [
        selection_score + 1e-3 * abs(selection_score)
        for selection_score in sorted(tuning.selection_score)
    ]
    thresholds = sorted({ordered[int(i * (n - 1) / 199)] for i in range(200)})
    promise = [certainty(tuning, threshold, alpha) for threshold in thresholds]
    found = None
    for threshold in thresholds[promise.index(min(promise)) :]:
        if certainty(calibration, threshold, alpha) > delta:
            break
        found = threshold
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("alpha", "delta"), [(0.1, 0.1), (0.2, 0.01), (0.3, 0.5), (0.49, 0.1)])
def test_the_threshold_is_that_of_a_loop_over_all_thresholds(seed, ties, alpha, delta):
    calibration, tuning = draw(500, seed, ties), draw(300, seed + 100, ties)
    expected = naive(calibration, tuning, alpha, delta)
    controller = AbstentionController(calibration, tuning)
    if expected is None:
        with pytest.raises(RiskUnattainable):
            controller.threshold(alpha, delta)
    else:
        assert controller.threshold(alpha, delta) == expected


def test_where_a_tenth_is_missed_at_every_selection_score_all_or_nothing_is_answered():
    selection_score = np.linspace(0, 1, 1000)
    queries = answered(selection_score, np.arange(1000) % 10 == 5)
    controller = AbstentionController(queries, queries)
    assert controller.threshold(0.15, 0.1) == 1.001  # the largest selection score, and a thousandth
    with pytest.raises(RiskUnattainable):
        controller.threshold(0.09, 1e-6)


def test_the_first_threshold_that_fails_ends_the_search():
    # Below 0.5 none is missed, from there to 0.6 all, then 9,000 more none.
    selection_score = np.concatenate([np.linspace(0, 0.5, 500), np.linspace(0.51, 0.6, 500)])
    selection_score = np.concatenate([selection_score, np.linspace(0.61, 1, 9000)])
    missed = (selection_score > 0.505) & (selection_score < 0.605)
    tuning = answered(selection_score[selection_score < 0.605], missed[selection_score < 0.605])
    controller = AbstentionController(answered(selection_score, missed), tuning)
    assert 0.45 < controller.threshold(0.1, 0.05) <= 0.53


def test_too_few_calibration_queries_are_told_how_many_must_be_answered():
    none = answered(np.linspace(0, 1, 20), np.zeros(20, bool))
    with pytest.raises(RiskUnattainable, match="at least 22 must be answered") as caught:
        AbstentionController(none, none).threshold(0.1, 0.1)  # 0.9**22 <= 0.1 < 0.9**21
    assert "alpha = 0.1 at delta = 0.1" in str(caught.value)
    # 1 - 0.1 ** (1 / 20) = 0.10875, rounded up to 4 decimals
    assert caught.value.minimum_alpha == 0.1088
    assert AbstentionController(none, none).threshold(0.1088, 0.1) == 1.001


def test_certainly_right_answers_are_all_given():
    queries = answered(np.linspace(0, 1, 22), np.zeros(22, bool))
    assert AbstentionController(queries, queries).threshold(0.1, 0.1) == 1.001


def test_a_query_whose_selection_score_differs_in_its_last_digits_is_answered_alike():
    for selection_scores in (np.linspace(0.2, 0.9, 22), -np.linspace(0.2, 0.9, 22)):
        queries = answered(selection_scores, np.zeros(22, bool))
        threshold = AbstentionController(queries, queries).threshold(0.1, 0.1)
        assert threshold == pytest.approx(
            selection_scores.max() + 1e-3 * abs(selection_scores.max())
        )


@pytest.mark.parametrize(
    ("selection_score", "missed"),
    [
        (np.zeros(3), np.zeros(2, bool)),
        (np.zeros(0), np.zeros(0, bool)),
        (np.zeros((2, 1)), np.zeros((2, 1), bool)),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(selection_score, missed):
    with pytest.raises(InvalidData, match=r"n >= 1|needed are \(n,\)"):
        answered(selection_score, missed)
