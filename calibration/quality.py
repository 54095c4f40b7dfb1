"""The quality of rankings and uncertainties on test queries, beside what pixels alone achieve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from rcir.autologging import without_autologging
from rcir.data import ImageSet, Splits
from rcir.index import build_index, nearest_others
from rcir.metrics import (
    Cleaning,
    OutOfDistribution,
    Reliability,
    Sparsification,
    average_precision,
    clean_gallery,
    confidence,
    kendall_of_pairs,
    kendall_over_bins,
    knn_correct,
    macro_mean,
    pearson,
    pearson_over_percentiles,
    reliability,
    reliability_btl_percentile,
    reliability_btl_width,
    reliability_lam,
    reliability_rcir,
    sample_pairs,
    score_rankings,
    sparsification,
    verification_ap,
)
from rcir.metrics.uncertainty import PERCENTILES, equal_count_bins
from rcir.retrieval.retriever import Retriever
from rcir.risk import LabelledResults

SIDE = 32  # pixels that pictures are brought to, in height and width
COMPONENTS = 64
FITTED, ASKED, SEARCHED = 5000, 1000, 20_000  # pictures at most


@without_autologging()
def pixel_recall(splits: Splits) -> float | None:
    """Recall at 1 of test queries by principal components of their pixels.

    The components are those of training pictures of 32 x 32 pixels in RGB; pictures are compared by
    cosine, each minus the mean.

    Args:
        splits: pictures that train, are searched and test.

    Returns:
        The share of queries that have a match in the gallery whose nearest picture is one; None
        where none has, where the gallery holds more than 20,000, or fewer than two train.
    """
    rng = np.random.default_rng(0)
    train = _sample(rng, splits.train, FITTED)
    test = _sample(rng, splits.test, ASKED)
    matched = np.flatnonzero(test.relevance.totals(splits.gallery.relevance) > 0)
    if len(train) < 2 or not len(matched) or len(splits.gallery) > SEARCHED:
        return None
    from sklearn.decomposition import PCA

    pixels = _pixels(train)
    components = min(COMPONENTS, *pixels.shape)
    fitted = PCA(components, svd_solver="randomized", random_state=0).fit(pixels)
    gallery, queries = (_unit(fitted.transform(_pixels(part))) for part in (splits.gallery, test))
    _, nearest = build_index(gallery).search(queries[matched], 1)
    right = test.relevance.subset(matched).of(splits.gallery.relevance, nearest)
    return float(right.mean())


def _sample(rng: np.random.Generator, images: ImageSet, most: int) -> ImageSet:
    if len(images) <= most:
        return images
    return images.subset(np.sort(rng.permutation(len(images))[:most]))


def _pixels(images: ImageSet) -> NDArray[np.float32]:
    from rcir.data import Preprocessing

    resized = Preprocessing(size=(SIDE, SIDE), channels=3).resized(images.images)
    vectors: NDArray[np.float32] = resized.reshape(len(images), -1).numpy().astype(np.float32)
    return vectors


def _unit(vectors: NDArray[np.floating]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: NDArray[np.float32] = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return unit


KS = (1, 5, 10)
NEIGHBOURS = 5
PAIRS = 10_000
BINS = 20  # of Kendall's correlations
FULL_QUERIES, FULL_GALLERY = 1000, 20_000  # of whole rankings of the gallery
DRAWN = 1000  # queries whose embeddings are drawn several times


@dataclass(frozen=True)
class Quality:
    """Metrics of the papers, on the test queries that have a match in the gallery.

    Attributes:
        numbers: by name, in the order of the report; what does not apply is left out.
        unmatched: number of test queries without a match in the gallery: they are left out.
        whole: number of queries whose ranking of the whole gallery was measured; 0 where the
            gallery is too large for it, and what takes whole rankings is left out.
        reliability: recall at 1 against confidence.
        curves: calibration curves by name.
        sparsification: of recall at 1, the most uncertain queries left out first.
        cleaning: mAP of the gallery without its most uncertain items; None for an encoder that
            states no uncertainty of items, and for large galleries.
        outside: uncertainties of out-of-distribution queries, if there are any.
    """

    numbers: dict[str, float]
    unmatched: int
    whole: int
    reliability: Reliability
    curves: dict[str, Reliability]
    sparsification: Sparsification
    cleaning: Cleaning | None
    outside: NDArray[np.float64] | None


def assess(
    retriever: Retriever,
    test: LabelledResults,
    images: ImageSet,
    outside: NDArray[np.float64] | None = None,
) -> Quality:
    """Measure rankings and uncertainties of test queries.

    Args:
        retriever: that searched them; its tuning split gives the range of uncertainties.
        test: what was found, and what of it is true.
        images: the test queries.
        outside: (m,) uncertainties of out-of-distribution queries.
    """
    rng = np.random.default_rng(0)
    tuning = retriever.require_calibration().main.tuning.require("uncertainty")
    low, high = float(tuning.min()), float(tuning.max())
    scores = score_rankings(test.relevant, test.n_relevant, [k for k in KS if k <= retriever.depth])
    matched = np.flatnonzero(test.n_relevant > 0)
    uncertainty, hit = test.results.uncertainty[matched], scores.hits[matched]
    precision = scores.average_precisions[matched]
    pair, of_items = uncertainty, retriever.searcher.item_uncertainty
    if of_items is not None:
        pair = uncertainty + of_items[test.results.require("positions")[matched, 0]]
    sparse = sparsification(pair, hit[:, 0])
    numbers = {f"recall_at_{k}": value for k, value in scores.recall.items()}
    numbers |= {f"map_at_{k}": value for k, value in scores.mean_average_precision.items()}
    if scores.map_at_r is not None:
        numbers["map_at_r"] = scores.map_at_r
    curves = {}  # the expected calibration errors of the papers differ in bins and confidences
    for column, k in enumerate(scores.ks):
        of_k = precision[:, column]
        curves[f"btl_width_at_{k}"] = reliability_btl_width(uncertainty, of_k, low, high)
        if len(uncertainty) >= 10:
            curves[f"btl_percentile_at_{k}"] = reliability_btl_percentile(uncertainty, of_k)
        curves[f"rcir_at_{k}"] = reliability_rcir(uncertainty, hit[:, column], low, high)
    numbers |= {f"ece_{name}": curve.error for name, curve in curves.items()}
    numbers |= {
        "auroc_miss": _auroc(~hit[:, 0], uncertainty),
        **{
            f"auroc_miss_{kind}": _auroc(
                ~hit[:, 0], retriever.searcher.judged(test, kind).results.uncertainty[matched]
            )
            for kind in retriever.searcher.uncertainties
        },
        "ausc": sparse.ausc,
        "ausc_oracle": sparse.oracle,
        "ausc_random": sparse.random,
        "ausc_query_only": sparsification(uncertainty, hit[:, 0]).ausc,
        "outside_range": float(np.mean((uncertainty < low) | (uncertainty > high))),
    }
    occluded = images.attributes.get("occluded")
    if occluded is not None:
        numbers["auroc_occlusion"] = _auroc(occluded.astype(bool), test.results.uncertainty)
    single = images.relevance.single
    if single is not None and retriever.labels is not None:
        numbers |= _of_labels(retriever, test, matched, single, rng)
        numbers |= _of_draws(retriever, images.subset(np.arange(min(len(images), DRAWN))))
    cleaning, whole = None, 0
    if len(retriever.index) <= FULL_GALLERY:
        rows = matched[:FULL_QUERIES]
        of_whole, cleaning = _whole_rankings(retriever, test, images, rows, rng)
        numbers |= of_whole
        whole = len(rows)
    if outside is not None:
        detection = OutOfDistribution.of(test.results.uncertainty, outside)
        numbers |= {
            "ood_auroc": detection.auroc,
            "ood_auprc": detection.auprc,
            "ood_auprc_trapezoid": detection.auprc_trapezoid,
        }
    diagram = reliability(confidence(uncertainty, low, high), hit[:, 0])
    numbers = {name: value for name, value in numbers.items() if np.isfinite(value)}
    return Quality(numbers, scores.unmatched, whole, diagram, curves, sparse, cleaning, outside)


def _of_labels(
    retriever: Retriever,
    test: LabelledResults,
    matched: NDArray[np.int64],
    labels: NDArray[np.int64],
    rng: np.random.Generator,
) -> dict[str, float]:
    """Metrics of one label per image: votes of neighbours, and telling pairs of queries apart."""
    numbers = {}
    uncertainty = test.results.uncertainty
    if retriever.labels is not None and retriever.depth >= NEIGHBOURS:
        candidate_labels = retriever.labels[test.results.require("positions")[matched]]
        right = knn_correct(candidate_labels, labels[matched], NEIGHBOURS)
        numbers["knn_accuracy_gallery"] = float(right.mean())
    if len(labels) > max(NEIGHBOURS, BINS):
        others = nearest_others(test.results.require("vectors"), NEIGHBOURS)[1]
        right = knn_correct(labels[others], labels, NEIGHBOURS)
        numbers["knn_accuracy"] = float(right.mean())
        numbers["kendall_knn"] = kendall_over_bins(uncertainty, right, BINS)
    _, counts = np.unique(labels, return_counts=True)
    if len(counts) > 1 and counts.max() > 1:
        left, other = sample_pairs(labels, PAIRS, rng).T
        match = labels[left] == labels[other]
        vectors = test.results.require("vectors")
        score = -np.linalg.norm(vectors[left] - vectors[other], axis=1)
        numbers["verification_ap"] = verification_ap(score, match)
        pair = (uncertainty[left] + uncertainty[other]) / 2
        # Few items may make few pairs, and these too few levels of uncertainty.
        if np.bincount(equal_count_bins(pair, BINS)[match], minlength=BINS).all():
            numbers["kendall_verification"] = kendall_of_pairs(pair, score, match, BINS)
    return numbers


def _of_draws(retriever: Retriever, images: ImageSet) -> dict[str, float]:
    """The calibration error of votes: how sure draws of the encoder are of the nearest label."""
    if retriever.encoder is None or retriever.preprocessing is None:
        return {}
    from rcir.encoders.batches import draw_samples

    samples = draw_samples(retriever.encoder, retriever.preprocessing, images.images)
    if samples is None or len(images) < 2:
        return {}
    labels = np.asarray(images.labels)
    votes = np.stack([labels[nearest_others(one.cpu().numpy(), 1)[1][:, 0]] for one in samples])
    return {"ece_lam_at_1": reliability_lam(votes, labels).error}


def _whole_rankings(
    retriever: Retriever,
    test: LabelledResults,
    images: ImageSet,
    rows: NDArray[np.int64],
    rng: np.random.Generator,
) -> tuple[dict[str, float], Cleaning | None]:
    """Mean average precision over the whole gallery, and of the gallery cleaned; nothing of an
    index that does not find all of it.
    """
    assert retriever.relevance is not None
    _, positions, _ = retriever.searcher.nearest(
        test.results.require("vectors")[rows], len(retriever.index)
    )
    if positions.min(initial=0) < 0:
        return {}, None
    relevance = images.relevance.subset(rows)
    relevant = relevance.of(retriever.relevance, positions)
    precision = average_precision(relevant, test.n_relevant[rows])
    numbers = {"map": float(precision.mean())}
    uncertainty = test.results.uncertainty[rows]
    if len(rows) >= 2:
        numbers["pearson_average_precision"] = pearson(uncertainty, precision)
    if len(rows) >= PERCENTILES:
        numbers["pearson_percentiles"] = pearson_over_percentiles(uncertainty, precision)
    if relevance.single is not None:
        numbers["map_macro"] = macro_mean(precision, relevance.single)
    if retriever.searcher.item_uncertainty is None:
        return numbers, None
    cleaning = clean_gallery(positions, relevant, retriever.searcher.item_uncertainty, rng)
    fifth = int(np.argmin(np.abs(cleaning.fractions - 0.2)))
    numbers["map_cleaned_20"] = float(cleaning.cleaned[fifth])
    numbers["map_cleaned_20_random"] = float(cleaning.random[fifth].mean())
    numbers["unmatched_cleaned_20"] = float(cleaning.unmatched[fifth])
    return numbers, cleaning


@without_autologging()
def _auroc(positive: NDArray[np.bool_], score: NDArray[np.float64]) -> float:
    if not 0 < positive.sum() < len(positive):
        return float("nan")
    return float(roc_auc_score(positive, score))
