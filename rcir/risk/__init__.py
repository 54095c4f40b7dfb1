"""Risk control on its own: bounds, size adapters, the controller. Needs NumPy and SciPy only."""

from rcir.risk.adapters import ADAPTERS, Constant, MinMax, Quantile, SizeAdapter, adapter_class
from rcir.risk.bounds import (
    Bound,
    allowed_misses,
    check_level,
    miss_rate_bound,
    required_calibration,
)
from rcir.risk.controller import RiskController

__all__ = [
    "ADAPTERS",
    "Bound",
    "Constant",
    "MinMax",
    "Quantile",
    "RiskController",
    "SizeAdapter",
    "adapter_class",
    "allowed_misses",
    "check_level",
    "miss_rate_bound",
    "required_calibration",
]
