import re

import numpy as np
import pytest
from scipy.stats import beta

from rcir.errors import RiskUnattainable
from rcir.risk import Constant, MissController, SearchResults


def controller(served, unmatched=0, bound="binomial"):
    ranks = np.repeat([1.0, np.inf], [served, unmatched])
    return MissController.calibrate(
        Constant(), SearchResults(np.zeros(len(ranks)), 50), ranks, bound
    )


def refusal(calibrated, alpha, delta):
    with pytest.raises(RiskUnattainable) as caught:
        calibrated.threshold(alpha, delta)
    with pytest.raises(RiskUnattainable):
        calibrated.risk_bound(alpha, delta)
    return caught.value


@pytest.mark.parametrize(
    "bound", ["binomial", "hoeffding", "bentkus", "hoeffding-bentkus", "betting"]
)
@pytest.mark.parametrize(("served", "unmatched"), [(20, 0), (400, 3), (900, 100), (2, 98)])
@pytest.mark.parametrize("delta", [1e-12, 0.05, 0.3, None])
def test_the_minimum_alpha_is_attainable_and_slightly_less_is_not(served, unmatched, delta, bound):
    calibrated = controller(served, unmatched, bound)
    error = refusal(calibrated, 0.002, delta)
    minimum = error.minimum_alpha
    if minimum is None:
        refusal(calibrated, 1 - 1e-9, delta)
        return
    assert minimum == calibrated.minimum_alpha(delta)
    assert np.isfinite(calibrated.threshold(minimum, delta))
    gap = max(1e-7 * min(minimum, 1 - minimum), 2**-52)
    refusal(calibrated, minimum - gap, delta)


@pytest.mark.parametrize(("served", "unmatched"), [(20, 0), (196, 4), (96, 4)])
def test_the_required_number_of_queries_with_the_same_share_unmatched_is_enough(served, unmatched):
    alpha, delta = 0.05, 0.01
    required = refusal(controller(served, unmatched), alpha, delta).required_calibration
    lost = int(np.ceil(required * unmatched / (served + unmatched)))
    assert controller(required - lost, lost).threshold(alpha, delta) == 0.0


def test_the_marginal_guarantee_needs_one_query_over_alpha_and_says_so():
    error = refusal(controller(8), 0.1, None)
    assert error.required_calibration == 9  # (0 + 1) / (9 + 1)
    assert error.minimum_alpha == pytest.approx(1 / 9)
    assert "alpha = 0.1 on average" in str(error)
    assert controller(9).threshold(0.1, None) == 0.0
    assert refusal(controller(90, 10), 0.1, None).required_calibration is None


def test_the_number_required_for_the_marginal_guarantee_is_enough():
    for one_in in range(2, 60):
        required = controller(1).required_calibration(1 / one_in, None)
        assert controller(required).minimum_alpha(None) <= 1 / one_in
        assert controller(required).threshold(1 / one_in, None) == 0.0


@pytest.mark.parametrize(("served", "unmatched"), [(20, 0), (500, 10)])
def test_simultaneous_levels_have_a_minimum_alpha_too(served, unmatched, naive_local_level):
    calibrated = controller(served, unmatched)
    n = served + unmatched
    minimum = calibrated.minimum_alpha(0.1, simultaneous=True)
    level = naive_local_level(n, 0.1)
    assert minimum == pytest.approx(beta.isf(level, unmatched + 1, n - unmatched), rel=1e-6)
    assert calibrated.threshold(minimum, 0.1, simultaneous=True) == 0.0
    with pytest.raises(RiskUnattainable):
        calibrated.threshold(minimum - 1e-9, 0.1, simultaneous=True)


@pytest.mark.parametrize("option", ["simultaneous", "anytime"])
@pytest.mark.parametrize(("served", "unmatched"), [(20, 0), (196, 4), (96, 4)])
def test_the_required_number_and_the_minimum_alpha_of_every_statement_suffice(
    served, unmatched, option
):
    alpha, delta, chosen = 0.05, 0.01, {option: True}
    with pytest.raises(RiskUnattainable) as caught:
        controller(served, unmatched).threshold(alpha, delta, **chosen)
    needed = caught.value.required_calibration
    lost = int(np.ceil(needed * unmatched / (served + unmatched)))
    assert controller(needed - lost, lost).threshold(alpha, delta, **chosen) == 0.0
    assert (
        controller(served, unmatched).threshold(caught.value.minimum_alpha, delta, **chosen) == 0.0
    )
    with pytest.raises(RiskUnattainable):
        controller(served, unmatched).threshold(caught.value.minimum_alpha - 1e-7, delta, **chosen)


def test_no_number_of_queries_is_named_where_none_would_do():
    error = refusal(controller(80, 20), 0.1, 0.1)
    assert error.required_calibration is None
    assert "calibrate on" not in str(error)
    assert "search deeper than 50 candidates (20 of 100 " in str(error)


def test_too_few_queries_are_told_how_many_and_which_alpha():
    error = refusal(controller(20), 0.05, 0.1)
    # 0.95**45 <= 0.1 < 0.95**44, and 1 - 0.1**(1/20) = 0.10875
    assert error.required_calibration == 45
    assert error.minimum_alpha == pytest.approx(1 - 0.1 ** (1 / 20), rel=1e-12)
    assert "alpha = 0.05 at delta = 0.1" in str(error)
    assert "calibrate on about 45 new queries" in str(error)
    assert "search deeper" not in str(error)


@pytest.mark.parametrize(("served", "unmatched"), [(20, 0), (390, 10), (50, 50), (5, 295)])
@pytest.mark.parametrize("delta", [0.01, 0.1])
def test_the_alpha_that_the_message_names_works(served, unmatched, delta):
    calibrated = controller(served, unmatched)
    message = str(refusal(calibrated, 0.001, delta))
    named = float(re.search(r"ask for alpha >= (\d\.\d+)", message)[1])
    assert np.isfinite(calibrated.threshold(named, delta))


def test_an_alpha_that_rounds_to_one_is_not_advised():
    message = str(refusal(controller(1), 0.5, 1e-6))
    assert "ask for alpha" not in message
    assert "calibrate on about 20 new queries" in message  # 2**-20 <= 1e-6 < 2**-19


def test_queries_that_all_lack_a_match_certify_nothing():
    error = refusal(controller(0, 100), 0.99, 0.5)
    assert error.minimum_alpha is None
    assert error.required_calibration is None


def test_the_message_says_what_to_do_even_where_no_number_can_be_given():
    error = refusal(controller(1, 0, "hoeffding"), 1e-5, 0.1)
    assert (error.minimum_alpha, error.required_calibration) == (None, None)
    assert "ask for a larger alpha and calibrate on more queries" in str(error)
