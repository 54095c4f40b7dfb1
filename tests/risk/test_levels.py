import math
from fractions import Fraction

import numpy as np
import pytest

from rcir.errors import InvalidRiskLevel, RcirError, RiskUnattainable
from rcir.risk import (
    AbstentionController,
    Constant,
    JointController,
    MissController,
    MonotoneController,
    RiskMonitor,
    SearchResults,
    allowed_misses,
    anytime_allowed_misses,
    anytime_miss_rate_bound,
    anytime_required_calibration,
    band_required_calibration,
    bonferroni_holm,
    check_exchangeability,
    check_level,
    fixed_sequence,
    local_level,
    miss_rate_bound,
    p_value,
    required_calibration,
)

BOUNDS = ("binomial", "hoeffding", "bentkus", "hoeffding-bentkus", "betting")
INVALID = [0, 1, 0.0, 1.0, -1, 2, math.nan, math.inf, -math.inf, True, False, "x", "0.1", None]


@pytest.fixture(scope="module")
def controller():
    return MissController.calibrate(Constant(), SearchResults(np.zeros(100), 5), np.ones(100))


@pytest.mark.parametrize("value", INVALID)
@pytest.mark.parametrize("bound", BOUNDS)
def test_every_function_refuses_an_invalid_level(value, bound, controller):
    for call, name in (
        (lambda: allowed_misses(100, value, 0.1, bound), "alpha"),
        (lambda: allowed_misses(100, 0.1, value, bound), "delta"),
        (lambda: miss_rate_bound(1, 100, value, bound), "delta"),
        (lambda: required_calibration(value, 0.1, bound), "alpha"),
        (lambda: required_calibration(0.1, value, bound), "delta"),
        (lambda: controller.threshold(value, 0.1), "alpha"),
        (lambda: controller.risk_bound(value, 0.1), "alpha"),
    ):
        with pytest.raises(InvalidRiskLevel, match=f"{name} is .* strictly between 0 and 1"):
            call()


@pytest.mark.parametrize("value", [value for value in INVALID if value is not None])
def test_the_controller_refuses_an_invalid_delta_but_none_is_the_marginal_guarantee(
    value, controller
):
    for call in (
        lambda: controller.threshold(0.1, value),
        lambda: controller.risk_bound(0.1, value),
        lambda: controller.minimum_alpha(value),
        lambda: controller.threshold(0.1, value, simultaneous=True),
        lambda: controller.threshold(0.1, value, anytime=True),
        lambda: local_level(100, value),
        lambda: band_required_calibration(0.1, value),
        lambda: anytime_allowed_misses(100, 0.1, value),
        lambda: anytime_miss_rate_bound(1, 100, value),
        lambda: anytime_required_calibration(0.1, value),
        lambda: controller.required_calibration(0.1, value),
    ):
        with pytest.raises(InvalidRiskLevel, match=r"delta is .* strictly between 0 and 1"):
            call()
    assert controller.threshold(0.1, None) == 0.0


@pytest.mark.parametrize("value", INVALID)
def test_every_other_controller_refuses_an_invalid_level(value, labelled):
    asked = labelled(100, seed=0)
    recall, joint = MonotoneController(asked, asked, "recall"), JointController(asked, asked)
    abstention = AbstentionController(asked, asked)
    calls = [
        (lambda: p_value(1, 100, value), "alpha"),
        (lambda: recall.threshold(value, 0.1), "alpha"),
        (lambda: joint.threshold({"miss": value}, 0.1), "alpha of miss"),
        (lambda: joint.threshold({"miss": 0.1}, value), "delta"),
        (lambda: abstention.threshold(value, 0.1), "alpha"),
        (lambda: abstention.threshold(0.1, value), "delta"),
        (lambda: fixed_sequence([0.1], value), "delta"),
        (lambda: bonferroni_holm([0.1], value), "delta"),
        (lambda: RiskMonitor(value), "alpha"),
        (lambda: RiskMonitor(0.1, value), "level"),
        (lambda: band_required_calibration(value, 0.1), "alpha"),
        (lambda: anytime_allowed_misses(100, value, 0.1), "alpha"),
        (lambda: anytime_required_calibration(value, 0.1), "alpha"),
        (lambda: check_exchangeability(asked, asked).contradicted(value), "level"),
    ]
    if value is not None:  # the marginal guarantee
        calls.append((lambda: recall.threshold(0.1, value), "delta"))
    for call, name in calls:
        with pytest.raises(InvalidRiskLevel, match=f"{name} is .* strictly between 0 and 1"):
            call()


def test_the_error_is_a_value_error_and_an_rcir_error():
    assert issubclass(InvalidRiskLevel, ValueError)
    assert issubclass(InvalidRiskLevel, RcirError)


@pytest.mark.parametrize("value", [5e-324, 0.1, math.nextafter(1, 0)])
def test_a_probability_inside_the_open_interval_is_a_level(value):
    assert check_level("alpha", value) == value


@pytest.mark.parametrize("kind", [np.float64, np.float32, Fraction])
@pytest.mark.parametrize("bound", BOUNDS)
def test_numbers_of_other_types_count_as_their_value(kind, bound, controller):
    quarter = kind(0.25)
    assert type(check_level("alpha", quarter)) is float
    assert allowed_misses(100, quarter, quarter, bound) == allowed_misses(100, 0.25, 0.25, bound)
    assert miss_rate_bound(3, 100, quarter, bound) == miss_rate_bound(3, 100, 0.25, bound)
    with pytest.raises(RiskUnattainable, match=r"alpha = 0\.0078125 at delta = 0\.25"):
        controller.threshold(kind(2**-7), quarter)  # needs 177 queries
