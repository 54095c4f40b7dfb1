"""Metrics: pure functions of arrays."""

from rcir.metrics.ranking import (
    RankingScores,
    average_precision,
    average_precision_at_k,
    first_match_ranks,
    macro_mean,
    recall_at_k,
    score_rankings,
)
from rcir.metrics.uncertainty import (
    OutOfDistribution,
    Reliability,
    Sparsification,
    confidence,
    pearson,
    reliability,
    sparsification,
)

__all__ = [
    "OutOfDistribution",
    "RankingScores",
    "Reliability",
    "Sparsification",
    "average_precision",
    "average_precision_at_k",
    "confidence",
    "first_match_ranks",
    "macro_mean",
    "pearson",
    "recall_at_k",
    "reliability",
    "score_rankings",
    "sparsification",
]
