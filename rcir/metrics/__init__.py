"""Metrics: pure functions of arrays."""

from rcir.metrics.ranking import first_match_ranks, recall_at_k
from rcir.metrics.uncertainty import Reliability, confidence, reliability

__all__ = ["Reliability", "confidence", "first_match_ranks", "recall_at_k", "reliability"]
