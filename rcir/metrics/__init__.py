"""Metrics: pure functions of arrays."""

from rcir.metrics.ranking import (
    RankingScores,
    average_precision_at_k,
    first_match_ranks,
    score_rankings,
)
from rcir.metrics.uncertainty import (
    Reliability,
    Sparsification,
    confidence,
    reliability,
    sparsification,
)

__all__ = [
    "RankingScores",
    "Reliability",
    "Sparsification",
    "average_precision_at_k",
    "confidence",
    "first_match_ranks",
    "reliability",
    "score_rankings",
    "sparsification",
]
