"""Whether the queries of a retriever still resemble its calibration queries, without labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData
from rcir.retrieval.answer import Retrieval, State, search_batches
from rcir.risk import DriftMonitor


class QueryMonitor:
    """A `DriftMonitor` of queries by what their answers carry: uncertainty and nearness.

    The averages of both features' wealths test whether new queries and calibration queries are
    exchangeable. It sees no labels: an alarm means that queries have changed, not that the risk
    has. Make it with `Retriever.query_monitor`.

    Args:
        state: a search with a valid calibration.
        level: probability of a false alarm over the whole stream.

    Raises:
        StaleCalibration: there is no calibration, or it is stale.
        InvalidConfig: the calibration queries are not exchangeable with new queries, because they
            come in clusters, are gallery items, or were drawn for a target population.
    """

    def __init__(self, state: State, level: float) -> None:
        self._calibration = calibration = state.valid_calibration()
        word = calibration.miss_rule.evidence.population.cluster_word
        if word is not None:
            raise InvalidConfig(
                f"the calibration queries come in clusters ({word}), and it is not known which new "
                "queries share one: pass one query of each to `rcir.risk.DriftMonitor`"
            )
        if calibration.left_out is not None or state.searcher.options.leave_one_out:
            raise InvalidConfig(
                "the calibration queries are gallery items, each searched in a gallery without it. "
                "New queries are searched in all of it, which alone may raise an alarm: calibrate "
                "on queries that are not items"
            )
        if calibration.shift is not None:
            raise InvalidConfig(
                "the calibration queries were drawn by an estimated ratio of densities, whose "
                "error alone may raise an alarm: compare queries with the target queries by "
                "`rcir.risk.DriftMonitor`"
            )
        searcher, queries = state.searcher, calibration.calibration_queries
        features = []
        for rows in search_batches(*queries.vectors.shape):
            found = searcher.candidates(queries[rows])
            found = calibration.describe(searcher, found, calibration.uncertainty)
            features.append(np.column_stack([found.uncertainty, found.require("nearness")]))
        self.monitor = DriftMonitor(_rounded(np.concatenate(features)), level)

    def update(self, answers: Sequence[Retrieval]) -> bool:
        """Add the answers to further queries, in order of arrival, and return True on an alarm.

        Pass the answers to all queries, or to queries that were chosen without looking at them,
        each query once. Answers whose sets depend on another uncertainty than
        `Calibration.uncertainty` are left out, such as those for new labels.
        """
        if not all(isinstance(answer, Retrieval) for answer in answers):
            raise InvalidData("pass a list of answers of the retriever (`Retriever.retrieve`)")
        rule_for, uncertainty = self._calibration.rule_for, self._calibration.uncertainty
        rows = [
            (answer.uncertainty, answer.nearness)
            for answer in answers
            if rule_for(answer.guarantee.request).uncertainty == uncertainty
        ]
        return self.monitor.update(_rounded(np.reshape(rows, (-1, 2))))


def _rounded(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round so that equal queries tie, whatever they were searched with."""
    return features.astype(np.float32).astype(np.float64)
