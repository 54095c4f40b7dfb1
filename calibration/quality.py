"""The quality of rankings and uncertainties on test queries, beside what pixels alone achieve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from calibration.splits import SearchedSplits
from rcir.autologging import without_autologging
from rcir.data import ImageSet, Splits
from rcir.index import build_index
from rcir.metrics import (
    Reliability,
    Sparsification,
    average_precision_at_k,
    confidence,
    macro_mean,
    out_of_distribution,
    pearson,
    reliability,
    score_rankings,
    sparsification,
)
from rcir.retrieval.query_uncertainty import available_uncertainties, with_uncertainty
from rcir.retrieval.retriever import Retriever
from rcir.risk import Guarantee, LabelledResults
from rcir.risk.probability import cells_of, sizes_of
from rcir.risk.score_functions import Ranking

SIDE = 32  # height and width of pictures whose pixels are compared
COMPONENTS = 64
MAX_FITTED, MAX_QUERIES, MAX_SEARCHED = 5000, 1000, 20_000  # pictures
KS = (1, 5, 10)
PROBABILITY_BINS = 15  # equally filled
FULL_QUERIES, FULL_GALLERY = 1000, 20_000  # of whole rankings of the gallery


@dataclass(frozen=True)
class Quality:
    """Metrics of the papers, on the test queries that have a match in the gallery.

    Attributes:
        numbers: by name, in the order of the report; what does not apply is left out.
        unmatched: number of test queries without a match in the gallery: they are left out.
        whole: number of queries whose ranking of the whole gallery was measured; 0 if the gallery
            is too large for it, and what needs whole rankings is left out.
        reliability: recall at 1 against confidence.
        sparsification: of recall at 1, the most uncertain queries left out first.
        probabilities: see `assess_probabilities`; none if nothing is certified.
    """

    numbers: dict[str, float]
    unmatched: int
    whole: int
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
    numbers |= {"ece": diagram.error, "auroc_miss": _auroc(~is_right, uncertainty)}
    if (odds := splits.scored_test.acceptance) is not None:
        numbers["auroc_unmatched"] = _auroc(test.n_relevant == 0, -odds)
    for kind in available_uncertainties(searcher):
        values = with_uncertainty(searcher, test, kind).results.uncertainty[matched]
        numbers[f"auroc_miss_{kind}"] = _auroc(~is_right, values)
    numbers |= {
        "ausc": sparse.ausc,
        "ausc_oracle": sparse.oracle,
        "ausc_random": sparse.random,
        "outside_range": float(np.mean((uncertainty < low) | (uncertainty > high))),
    }
    occluded = images.attributes.get("occluded")
    if occluded is not None:
        numbers["auroc_occlusion"] = _auroc(occluded.astype(bool), every_uncertainty)
    whole = 0
    if len(retriever.index) <= FULL_GALLERY:
        rows = matched[:FULL_QUERIES]
        numbers |= _whole_rankings(retriever, test, images, rows)
        whole = len(rows)
    if splits.outside is not None:
        detection = out_of_distribution(every_uncertainty, splits.outside.uncertainty)
        numbers |= {"ood_auroc": detection.auroc, "ood_auprc": detection.auprc}
    if splits.data is not None and (baseline := measure_pixel_recall(splits.data)) is not None:
        numbers["recall_at_1_pixels"] = baseline
    numbers = {name: value for name, value in numbers.items() if np.isfinite(value)}
    return Quality(numbers, scores.unmatched, whole, diagram, sparse)


def _whole_rankings(
    retriever: Retriever, test: LabelledResults, images: ImageSet, rows: NDArray[np.int64]
) -> dict[str, float]:
    """Return measures of rankings of the gallery; none if the index does not find all of it."""
    assert retriever.relevance is not None
    vectors = test.results.require("vectors")[rows]
    keys = test.results.require("queries")[rows].keys
    _, positions, _ = retriever.searcher.nearest(vectors, len(retriever.index), keys=keys)
    if positions.min(initial=0) < 0:
        return {}
    relevance = images.relevance.subset(rows)
    precision = average_precision_at_k(
        relevance.matches(retriever.relevance, positions),
        test.n_relevant[rows],
        positions.shape[1],
    )
    numbers = {"map": float(precision.mean())}
    if len(rows) >= 2:
        uncertainty = test.results.uncertainty[rows]
        numbers["pearson_average_precision"] = pearson(uncertainty, precision)
    if relevance.single is not None:
        numbers["map_macro"] = macro_mean(precision, relevance.single)
    return numbers


@without_autologging()
def _auroc(positive: NDArray[np.bool_], score: NDArray[np.float64]) -> float:
    if not 0 < positive.sum() < len(positive):
        return float("nan")
    return float(roc_auc_score(positive, score))


@without_autologging()
def measure_pixel_recall(splits: Splits) -> float | None:
    """Return the recall at 1 of test queries by principal components of their pixels.

    Pictures of 32 x 32 pixels in RGB, minus the mean, are compared by cosine. None if no query has
    a match, if the gallery holds more than 20,000, or if fewer than two pictures train.
    """
    rng = np.random.default_rng(0)
    train = _sample(rng, splits.train, MAX_FITTED)
    test = _sample(rng, splits.test, MAX_QUERIES)
    matched = np.flatnonzero(test.relevance.totals(splits.gallery.relevance) > 0)
    is_large = len(splits.gallery) > MAX_SEARCHED
    if len(train) < 2 or not len(matched) or is_large or not train.pictures:
        return None
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import normalize

    pixels = _pixels(train)
    components = min(COMPONENTS, *pixels.shape)
    fitted = PCA(components, svd_solver="randomized", random_state=0).fit(pixels)
    gallery, queries = (
        normalize(fitted.transform(_pixels(part))).astype(np.float32)
        for part in (splits.gallery, test)
    )
    _, nearest = build_index(gallery).search(queries[matched], 1)
    is_right = test.relevance.subset(matched).matches(splits.gallery.relevance, nearest)
    return float(is_right.mean())


def _sample(rng: np.random.Generator, images: ImageSet, most: int) -> ImageSet:
    if len(images) <= most:
        return images
    return images.subset(np.sort(rng.permutation(len(images))[:most]))


def _pixels(images: ImageSet) -> NDArray[np.float32]:
    from rcir.data import Preprocessing

    resized = Preprocessing(size=(SIDE, SIDE), channels=3).resized(images.images)
    vectors: NDArray[np.float32] = resized.reshape(len(images), -1).numpy().astype(np.float32)
    return vectors
