"""Risk control on its own. Needs NumPy and SciPy only, and scikit-learn to fit learned scores."""

from rcir.risk.bootstrap import Certified, is_certified, mean_size, smallest_certified
from rcir.risk.bounds import (
    Bound,
    Certificate,
    allowed_misses,
    check_level,
    corrected,
    miss_rate_bound,
    p_value,
    required_calibration,
    risk_interval,
)
from rcir.risk.certification import certify
from rcir.risk.drift import DriftMonitor
from rcir.risk.exact import minimum_alpha, order_statistic
from rcir.risk.guarantee import Guarantee
from rcir.risk.learned import Learned
from rcir.risk.losses import RISKS, Risk, find_risk, register_risk
from rcir.risk.means import mean_loss
from rcir.risk.monitor import Exchangeability, RiskMonitor, check_exchangeability
from rcir.risk.options import RequestOptions, request_options
from rcir.risk.own import OwnRanking
from rcir.risk.planning import Plan, plan_calibration
from rcir.risk.population import Population
from rcir.risk.reordering import LabelListScore, LabelScore, MatchProbability
from rcir.risk.request import Request, make_request
from rcir.risk.results import LabelledResults, ScoredResults, SearchResults
from rcir.risk.rule import SetRule
from rcir.risk.score_functions import (
    Constant,
    MinMax,
    Quantile,
    Ranking,
    ScoreFunction,
    score,
    score_ranks,
)
from rcir.risk.selection import (
    SCORE_FUNCTIONS,
    fit_score_function,
    score_function_class,
    smallest_uncertainty,
)
from rcir.risk.sequential import (
    anytime_allowed_misses,
    anytime_miss_rate_bound,
    anytime_required_calibration,
    band_required_calibration,
    local_level,
)
from rcir.risk.testing import fixed_sequence, learn_then_test, selective

__all__ = [
    "RISKS",
    "SCORE_FUNCTIONS",
    "Bound",
    "Certificate",
    "Certified",
    "Constant",
    "DriftMonitor",
    "Exchangeability",
    "Guarantee",
    "LabelListScore",
    "LabelScore",
    "LabelledResults",
    "Learned",
    "MatchProbability",
    "MinMax",
    "OwnRanking",
    "Plan",
    "Population",
    "Quantile",
    "Ranking",
    "Request",
    "RequestOptions",
    "Risk",
    "RiskMonitor",
    "ScoreFunction",
    "ScoredResults",
    "SearchResults",
    "SetRule",
    "allowed_misses",
    "anytime_allowed_misses",
    "anytime_miss_rate_bound",
    "anytime_required_calibration",
    "band_required_calibration",
    "certify",
    "check_exchangeability",
    "check_level",
    "corrected",
    "find_risk",
    "fit_score_function",
    "fixed_sequence",
    "is_certified",
    "learn_then_test",
    "local_level",
    "make_request",
    "mean_loss",
    "mean_size",
    "minimum_alpha",
    "miss_rate_bound",
    "order_statistic",
    "p_value",
    "plan_calibration",
    "register_risk",
    "request_options",
    "required_calibration",
    "risk_interval",
    "score",
    "score_function_class",
    "score_ranks",
    "selective",
    "smallest_certified",
    "smallest_uncertainty",
]
