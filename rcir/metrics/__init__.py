"""Metrics: pure functions of arrays."""

from rcir.metrics.ranking import (
    RankingScores,
    average_precision_at_k,
    first_match_ranks,
    macro_mean,
    score_rankings,
)
from rcir.metrics.uncertainty import (
    OutOfDistribution,
    Reliability,
    Sparsification,
    confidence,
    out_of_distribution,
    pearson,
    reliability,
    sparsification,
)

__all__ = [
    "OutOfDistribution",
    "RankingScores",
    "Reliability",
    "Sparsification",
    "average_precision_at_k",
    "confidence",
    "first_match_ranks",
    "macro_mean",
    "out_of_distribution",
    "pearson",
    "reliability",
    "score_rankings",
    "sparsification",
]
