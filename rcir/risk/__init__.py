"""Risk control on its own. Needs NumPy and SciPy only, and scikit-learn to fit `Learned`."""

from rcir.risk.abstention import AbstentionController, Answered
from rcir.risk.adapters import Constant, MinMax, Quantile, SizeAdapter
from rcir.risk.bounds import (
    Bound,
    allowed_misses,
    check_level,
    miss_rate_bound,
    p_value,
    required_calibration,
)
from rcir.risk.certified import Certified, is_certified, mean_size
from rcir.risk.choice import ADAPTERS, adapter_class, fit_adapter
from rcir.risk.controller import Decision, Request, RiskController
from rcir.risk.exchangeability import Exchangeability, check_exchangeability
from rcir.risk.joint import JointController
from rcir.risk.learned import Learned
from rcir.risk.means import upper_confidence_bound
from rcir.risk.miss import MissController
from rcir.risk.monitor import ChangeDetector, RiskMonitor
from rcir.risk.outcomes import Outcomes, Risk
from rcir.risk.rankings import Rankings
from rcir.risk.recall import RecallController
from rcir.risk.testing import bonferroni_holm, fixed_sequence

__all__ = [
    "ADAPTERS",
    "AbstentionController",
    "Answered",
    "Bound",
    "Certified",
    "ChangeDetector",
    "Constant",
    "Decision",
    "Exchangeability",
    "JointController",
    "Learned",
    "MinMax",
    "MissController",
    "Outcomes",
    "Quantile",
    "Rankings",
    "RecallController",
    "Request",
    "Risk",
    "RiskController",
    "RiskMonitor",
    "SizeAdapter",
    "adapter_class",
    "allowed_misses",
    "bonferroni_holm",
    "check_exchangeability",
    "check_level",
    "fit_adapter",
    "fixed_sequence",
    "is_certified",
    "mean_size",
    "miss_rate_bound",
    "p_value",
    "required_calibration",
    "upper_confidence_bound",
]
