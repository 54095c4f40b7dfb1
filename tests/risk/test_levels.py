import math
from fractions import Fraction

import numpy as np
import pytest

from rcir.errors import InvalidRiskLevel, RcirError, RiskUnattainable
from rcir.risk import (
    Constant,
    RiskController,
    allowed_misses,
    check_level,
    miss_rate_bound,
    required_calibration,
)

INVALID = [0, 1, 0.0, 1.0, -1, 2, math.nan, math.inf, -math.inf, True, False, "x", "0.1", None]


@pytest.fixture(scope="module")
def controller():
    return RiskController.calibrate(Constant(), np.zeros(100), np.ones(100), depth=5)


@pytest.mark.parametrize("value", INVALID)
@pytest.mark.parametrize("bound", ["binomial", "hoeffding"])
def test_every_function_refuses_an_invalid_level(value, bound, controller):
    for call, name in (
        (lambda: allowed_misses(100, value, 0.1, bound), "alpha"),
        (lambda: allowed_misses(100, 0.1, value, bound), "delta"),
        (lambda: miss_rate_bound(1, 100, value, bound), "delta"),
        (lambda: required_calibration(value, 0.1, bound), "alpha"),
        (lambda: required_calibration(0.1, value, bound), "delta"),
        (lambda: controller.kappa(value, 0.1), "alpha"),
        (lambda: controller.kappa(0.1, value), "delta"),
        (lambda: controller.risk_bound(value, 0.1), "alpha"),
        (lambda: controller.risk_bound(0.1, value), "delta"),
        (lambda: controller.minimum_alpha(value), "delta"),
    ):
        with pytest.raises(InvalidRiskLevel, match=f"{name} is .* strictly between 0 and 1"):
            call()


def test_the_error_is_a_value_error_and_an_rcir_error():
    assert issubclass(InvalidRiskLevel, ValueError)
    assert issubclass(InvalidRiskLevel, RcirError)


@pytest.mark.parametrize("value", [5e-324, 0.1, math.nextafter(1, 0)])
def test_a_probability_inside_the_open_interval_is_a_level(value):
    assert check_level("alpha", value) == value


@pytest.mark.parametrize("kind", [np.float64, np.float32, Fraction])
@pytest.mark.parametrize("bound", ["binomial", "hoeffding"])
def test_numbers_of_other_types_count_as_their_value(kind, bound, controller):
    quarter = kind(0.25)
    assert type(check_level("alpha", quarter)) is float
    assert allowed_misses(100, quarter, quarter, bound) == allowed_misses(100, 0.25, 0.25, bound)
    assert miss_rate_bound(3, 100, quarter, bound) == miss_rate_bound(3, 100, 0.25, bound)
    with pytest.raises(RiskUnattainable, match=r"alpha = 0\.0078125 at delta = 0\.25"):
        controller.kappa(kind(2**-7), quarter)  # needs 177 queries
