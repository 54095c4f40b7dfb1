"""The quality of rankings and uncertainties on test queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from calibration.splits import SearchedSplits
from rcir.metrics import (
    Reliability,
    Sparsification,
    confidence,
    reliability,
    score_rankings,
    sparsification,
)
from rcir.metrics.uncertainty import auroc
from rcir.retrieval.query_uncertainty import available_uncertainties, with_uncertainty
from rcir.risk import Guarantee
from rcir.risk.probability import cells_of, sizes_of
from rcir.risk.score_functions import Ranking

KS = (1, 5, 10)
PROBABILITY_BINS = 15  # equally filled


@dataclass(frozen=True)
class Quality:
    """Metrics of the papers, on the test queries that have a match in the gallery.

    Attributes:
        numbers: by name, in the order of the report; what does not apply is left out.
        unmatched: number of test queries without a match in the gallery: they are left out.
        reliability: recall at 1 against confidence.
        sparsification: of recall at 1, the most uncertain queries left out first.
        probabilities: see `assess_probabilities`; none if nothing is certified.
    """

    numbers: dict[str, float]
    unmatched: int
    reliability: Reliability
    sparsification: Sparsification
    probabilities: Mapping[str, Reliability] = field(default_factory=dict)

    def with_probabilities(self, diagrams: Mapping[str, Reliability]) -> Quality:
        """Return the metrics with the calibration errors of probabilities."""
        errors = {f"ece_{name}": diagram.error for name, diagram in diagrams.items()}
        return replace(self, numbers=self.numbers | errors, probabilities=diagrams)


def assess_probabilities(splits: SearchedSplits, guarantee: Guarantee) -> dict[str, Reliability]:
    """Measure the probabilities of a match of each "item" and "set" of the test queries."""
    queries, calibration = splits.scored_test, splits.retriever.require_calibration()
    scores, selection_score = queries.require("scores"), queries.require("selection_score")
    ranking = Ranking(scores, selection_score, acceptance=queries.acceptance)
    sizes = sizes_of(ranking, guarantee)
    items, sets = calibration.match_probabilities(guarantee).of_sets(ranking, sizes, guarantee)
    outcomes = {
        "item": (items, queries.require("relevant")[cells_of(sizes)]),
        "set": (sets, queries.require("match_rank") <= sizes),
    }
    return {
        name: reliability(probabilities, matches, PROBABILITY_BINS, equal_mass=True)
        for name, (probabilities, matches) in outcomes.items()
    }


def assess(splits: SearchedSplits) -> Quality:
    """Measure rankings and uncertainties of the test queries.

    The range of uncertainties is that of the tuning split.
    """
    retriever, test, images = splits.retriever, splits.test, splits.images
    searcher = retriever.searcher
    rule = retriever.require_calibration().miss_rule
    tuning = (rule.tuned or rule.evidence).require("uncertainty")
    low, high = float(tuning.min()), float(tuning.max())
    scores = score_rankings(test.relevant, test.n_relevant, [k for k in KS if k <= retriever.depth])
    matched = np.flatnonzero(test.n_relevant > 0)
    every_uncertainty = test.results.uncertainty
    uncertainty, is_right = every_uncertainty[matched], scores.hits[matched, 0]
    pair = uncertainty
    if searcher.gallery.uncertainty is not None:
        first = test.results.require("positions")[matched, 0]
        pair = uncertainty + searcher.gallery.uncertainty[first]
    sparse = sparsification(pair, is_right)
    diagram = reliability(confidence(uncertainty, low, high), is_right)
    numbers = {f"recall_at_{k}": value for k, value in scores.recall.items()}
    numbers |= {f"map_at_{k}": value for k, value in scores.mean_average_precision.items()}
    if scores.map_at_r is not None:
        numbers["map_at_r"] = scores.map_at_r
    numbers |= {"ece": diagram.error, "auroc_miss": auroc(~is_right, uncertainty)}
    if (odds := splits.scored_test.acceptance) is not None:
        numbers["auroc_unmatched"] = auroc(test.n_relevant == 0, -odds)
    for kind in available_uncertainties(searcher):
        values = with_uncertainty(searcher, test, kind).results.uncertainty[matched]
        numbers[f"auroc_miss_{kind}"] = auroc(~is_right, values)
    numbers |= {
        "ausc": sparse.ausc,
        "ausc_oracle": sparse.oracle,
        "ausc_random": sparse.random,
        "outside_range": float(np.mean((uncertainty < low) | (uncertainty > high))),
    }
    occluded = images.attributes.get("occluded")
    if occluded is not None:
        numbers["auroc_occlusion"] = auroc(occluded.astype(bool), every_uncertainty)
    numbers = {name: value for name, value in numbers.items() if np.isfinite(value)}
    return Quality(numbers, scores.unmatched, diagram, sparse)
