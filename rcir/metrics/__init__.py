"""Metrics: pure functions of arrays."""

from rcir.metrics.calibration import (
    Reliability,
    confidence,
    reliability,
    reliability_btl_percentile,
    reliability_btl_width,
    reliability_lam,
    reliability_rcir,
)
from rcir.metrics.cleaning import Cleaning, clean_gallery
from rcir.metrics.correlation import (
    kendall_of_pairs,
    kendall_over_bins,
    pearson,
    pearson_over_percentiles,
)
from rcir.metrics.neighbours import knn_correct
from rcir.metrics.outofdistribution import OutOfDistribution
from rcir.metrics.ranking import (
    average_precision,
    average_precision_at_k,
    average_precision_at_r,
    first_match_ranks,
    macro_mean,
    recall_at_k,
)
from rcir.metrics.scores import RankingScores, score_rankings
from rcir.metrics.sparsification import Sparsification, sparsification
from rcir.metrics.verification import sample_pairs, verification_ap

__all__ = [
    "Cleaning",
    "OutOfDistribution",
    "RankingScores",
    "Reliability",
    "Sparsification",
    "average_precision",
    "average_precision_at_k",
    "average_precision_at_r",
    "clean_gallery",
    "confidence",
    "first_match_ranks",
    "kendall_of_pairs",
    "kendall_over_bins",
    "knn_correct",
    "macro_mean",
    "pearson",
    "pearson_over_percentiles",
    "recall_at_k",
    "reliability",
    "reliability_btl_percentile",
    "reliability_btl_width",
    "reliability_lam",
    "reliability_rcir",
    "sample_pairs",
    "score_rankings",
    "sparsification",
    "verification_ap",
]
