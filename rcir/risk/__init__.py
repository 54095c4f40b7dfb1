"""Risk control on its own. Needs NumPy and SciPy only, and scikit-learn to fit `Learned`."""

from rcir.risk.anytime import (
    anytime_allowed_misses,
    anytime_miss_rate_bound,
    anytime_required_calibration,
)
from rcir.risk.band import band_required_calibration, local_level
from rcir.risk.bonferroni import corrected, decide_chosen, smallest_certified
from rcir.risk.boosted import Boosted
from rcir.risk.bounds import (
    Bound,
    allowed_misses,
    check_level,
    miss_rate_bound,
    p_value,
    required_calibration,
    risk_interval,
)
from rcir.risk.certified import Certified, is_certified, mean_size
from rcir.risk.choice import (
    SCORE_FUNCTIONS,
    fit_score_function,
    score_function_class,
    smallest_uncertainty,
)
from rcir.risk.controller import RiskController, constant_baseline
from rcir.risk.exchangeability import Exchangeability, check_exchangeability
from rcir.risk.guarantee import Guarantee
from rcir.risk.joint import JointController
from rcir.risk.labelled import LabelledResults
from rcir.risk.learned import Learned
from rcir.risk.matching import MatchProbability
from rcir.risk.miss_controller import MissController
from rcir.risk.monitor import ChangeDetector, RiskMonitor
from rcir.risk.monotone import MonotoneController
from rcir.risk.request import GuaranteeRequest, Request, request_options
from rcir.risk.reranked import Reranked
from rcir.risk.risks import RISKS, Risk
from rcir.risk.risks.abstention import AbstentionController
from rcir.risk.score_functions import Constant, MinMax, Quantile, ScoreFunction
from rcir.risk.search_results import SearchResults
from rcir.risk.testing import bonferroni_holm, fixed_sequence

__all__ = [
    "RISKS",
    "SCORE_FUNCTIONS",
    "AbstentionController",
    "Boosted",
    "Bound",
    "Certified",
    "ChangeDetector",
    "Constant",
    "Exchangeability",
    "Guarantee",
    "GuaranteeRequest",
    "JointController",
    "LabelledResults",
    "Learned",
    "MatchProbability",
    "MinMax",
    "MissController",
    "MonotoneController",
    "Quantile",
    "Request",
    "Reranked",
    "Risk",
    "RiskController",
    "RiskMonitor",
    "ScoreFunction",
    "SearchResults",
    "allowed_misses",
    "anytime_allowed_misses",
    "anytime_miss_rate_bound",
    "anytime_required_calibration",
    "band_required_calibration",
    "bonferroni_holm",
    "check_exchangeability",
    "check_level",
    "constant_baseline",
    "corrected",
    "decide_chosen",
    "fit_score_function",
    "fixed_sequence",
    "is_certified",
    "local_level",
    "mean_size",
    "miss_rate_bound",
    "p_value",
    "request_options",
    "required_calibration",
    "risk_interval",
    "score_function_class",
    "smallest_certified",
    "smallest_uncertainty",
]
