"""Labelled queries in three splits, searched: what every command calibrates or measures with."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property

from rcir.data import ImageSet, Splits
from rcir.retrieval.retriever import Retriever
from rcir.risk import LabelledResults, ScoredResults, score
from rcir.risk.population import LABEL
from rcir.tracking import TrackedRun


@dataclass(frozen=True)
class SearchedSplits:
    """A retriever, and the queries that tune, calibrate and test it.

    Attributes:
        retriever: that searched the queries.
        dataset: name of the data, for the report.
        tuning, calibration, test: the splits; without tuning queries the gallery's items tune.
        calibration_ids: names of the calibration queries.
        images: the test queries.
        data: the data set that the queries come from; None for files of vectors.
        training: the run in MLflow that trained the encoder, if there is one.
    """

    retriever: Retriever
    dataset: str
    tuning: LabelledResults | None
    calibration: LabelledResults
    test: LabelledResults
    calibration_ids: list[str]
    images: ImageSet
    data: Splits | None = None
    training: TrackedRun | None = None

    @cached_property
    def arranged_test(self) -> LabelledResults:
        """The test queries with the candidates that the main rule of the calibration scores."""
        calibration = self.retriever.require_calibration()
        return calibration.arrange(self.retriever.searcher, self.test, calibration.miss_rule)

    @cached_property
    def scored_test(self) -> ScoredResults:
        """The test queries, scored by the main rule of the calibration."""
        rule = self.retriever.require_calibration().miss_rule
        return score(rule.score_function, self.arranged_test)


def warn_of_other_labels(label: str = LABEL) -> None:
    """Warn that no test query has the label of a calibration query."""
    print(
        f"warning: no test query has the {label} of a calibration query; guarantees for the "
        f"{label}s of the calibration queries are measured on queries of other {label}s",
        file=sys.stderr,
    )
