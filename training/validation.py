"""Validation of an epoch on images, and warnings of trainings that go wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rcir.data import ImageSet
from rcir.data.relevance import count_matches, find_database, find_query_rows
from rcir.embedding import Embedding
from rcir.encoders.base import Encoder
from rcir.encoders.features import ScalarHead
from rcir.errors import InvalidData, TrainingDiverged
from rcir.index import DEPTH, build_index, lengths, nearest_others, one_minus_cosine
from rcir.metrics import (
    Reliability,
    average_precision_at_k,
    confidence,
    first_match_ranks,
    reliability,
)
from rcir.metrics.labels import VOTERS
from rcir.metrics.uncertainty import auroc
from rcir.options import ALPHA, ALPHAS, DELTA
from rcir.risk import Certified, SearchResults, fit_score_function, is_certified, mean_size
from rcir.runs.results import RunResults, digest_names
from rcir.store.codec import Array
from rcir.terminal import console
from training.workers import ALONE, Workers

N_FOLDS = 4
QUERY_BATCH_SIZE = 256  # in a search of the validation images
MEAN_AVERAGE_PRECISION = "validation/mean_average_precision"
RECALL = "validation/recall_at_1"
CERTIFIED_SIZE = f"validation/certified_size_{ALPHA:g}"  # decides which epoch is kept
CONSTANT_UNITS = "validation/constant_units"  # share of hidden units of the head
QUANTILES = (0.05, 0.5, 0.95)  # of the uncertainty
QUANTILE_NAME = "validation/uncertainty_"  # and the share; logged by epoch alone
COLLAPSED_TOLERANCE = 0.01  # relative difference to the loss of a collapsed encoder
MIN_COUNT = 20  # of hits and of misses, for a statement about the AUROC
NORMAL_QUANTILE = 1.645  # at 95%


@dataclass(frozen=True)
class FoldRoles:
    """Rows of the validation images by role; queries have a match in the gallery."""

    searched: NDArray[np.int64]  # the gallery
    tuning: NDArray[np.int64]
    calibration: NDArray[np.int64]
    measured: NDArray[np.int64]


def assign_fold_roles(images: ImageSet) -> list[FoldRoles]:
    """Divide the validation images into gallery, tuning, calibration and test by cross-validation.

    The images are divided into four random folds, equal for every encoder and balanced by label,
    and roles rotate, so that each image is measured at most once, by a calibration without it. An
    image is not a query of a gallery that has no match for it. Where the relevance says which
    images are searched (`WithinRadius.database`), these are, and the others are divided into three
    folds. There are no roles if there are too few images.
    """
    database = find_database(images.relevance)
    if database is None:
        folds = _folds(images)
    else:
        queries = np.random.default_rng(0).permutation(np.flatnonzero(~database))
        folds = np.array_split(queries, N_FOLDS - 1)
    roles = []
    for turn in range(len(folds)):
        searched, *others = folds[turn:] + folds[:turn]
        if database is not None:
            searched, others = np.flatnonzero(database), [searched, *others]
        if not len(searched):
            return []
        gallery = images.relevance.subset(searched)
        rows = [row[images.relevance.subset(row).totals(gallery) > 0] for row in others if len(row)]
        # A score function needs two queries.
        if len(rows) < N_FOLDS - 1 or min(map(len, rows)) < 2:
            return []
        roles.append(FoldRoles(searched, *rows))
    return roles


def _folds(images: ImageSet) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    order = rng.permutation(len(images))
    if (label_of := images.relevance.single) is None:
        return np.array_split(order, N_FOLDS)
    # The images of a label, in random order, are dealt to the folds in a random order.
    order = order[np.argsort(label_of[order], kind="stable")]
    _, first, label = np.unique(label_of[order], return_index=True, return_inverse=True)
    dealt = rng.permuted(np.tile(np.arange(N_FOLDS), (len(first), 1)), axis=1)
    fold = dealt[label, (np.arange(len(order)) - first[label]) % N_FOLDS]
    return [order[fold == number] for number in range(N_FOLDS)]


def certify_folds(
    vectors: NDArray[np.float32],
    uncertainty: NDArray[np.float64] | None,
    images: ImageSet,
    workers: Workers = ALONE,
) -> list[Certified]:
    """Calibrate with the folds of `assign_fold_roles`, which the workers divide among them.

    `vectors` are (n, d) embeddings, `uncertainty` is the (n,) uncertainty of the encoder or None.
    """
    folds, norms = assign_fold_roles(images), lengths(vectors)

    def certify(number: int) -> Certified:
        roles = folds[number]
        index = build_index(vectors[roles.searched])
        gallery = images.relevance.subset(roles.searched)

        def search(rows: NDArray[np.int64]) -> tuple[SearchResults, NDArray[np.float64]]:
            """Return the search results of some queries, and the ranks of their first matches."""
            distances, positions = index.search(vectors[rows], min(DEPTH, len(index)))
            labels = gallery.single
            nearest = norms[roles.searched][positions[:, 0]]
            results = SearchResults(
                one_minus_cosine(distances[:, 0], norms[rows], nearest)
                if uncertainty is None
                else uncertainty[rows],
                positions.shape[1],
                distances,
                labels=None if labels is None else labels[positions],
                candidate_uncertainty=None
                if uncertainty is None
                else uncertainty[roles.searched][positions],
                votes=count_matches(gallery, positions, VOTERS) if labels is None else None,
            )
            relevant = images.relevance.subset(rows).matches(gallery, positions)
            return results, first_match_ranks(relevant)

        score_function, _ = fit_score_function("auto", *search(roles.tuning))
        return Certified(
            score_function.match_scores(*search(roles.calibration)),
            score_function.rank(search(roles.measured)[0]).scores,
        )

    return workers.share(len(folds), certify)


@dataclass(frozen=True)
class Validation:
    """The validation images, each searched among the others.

    Attributes:
        ranks: (n,) rank of the first other image that matches, infinite beyond `depth`.
        uncertainty: (n,) of the images, as a retriever would state it.
        matched: (n,) whether another image matches at all.
        precision: (n,) average precision of the candidates; 0 where no other image matches.
        depth: number of candidates that were searched.
        certified: what calibrations on these images would certify, see `assign_fold_roles`.
    """

    ranks: Annotated[NDArray[np.float64], Array(1, infinite=True)]
    uncertainty: Annotated[NDArray[np.float64], Array(1)]
    matched: Annotated[NDArray[np.bool_], Array(1)]
    precision: Annotated[NDArray[np.float64], Array(1)]
    depth: int
    certified: list[Certified] = field(default_factory=list)

    @property
    def correct(self) -> NDArray[np.bool_]:
        """(n,) whether the nearest other image matches."""
        correct: NDArray[np.bool_] = self.ranks == 1
        return correct

    def to_results(self, images: ImageSet) -> RunResults:
        """Return the results that other runs are compared with."""
        metrics = {name.removeprefix("validation/"): v for name, v in self.metrics().items()}
        return RunResults("validation", digest_names(images.ids), self.certified, metrics, "auto")

    def reliability(self) -> Reliability:
        """Return the reliability of one half of the images, scaled by the range of the other."""
        half = self.uncertainty[::2]
        scaled = confidence(self.uncertainty[1::2], half.min(), half.max())
        return reliability(scaled, self.correct[1::2])

    def metrics(self) -> dict[str, float]:
        """Return recall, mean average precision, sizes, and measures of the uncertainty.

        These are recall at 1, certified sizes, calibration error, AUROC of misses, and quantiles
        of the uncertainty. Recall and precision are means over images with a match, sizes hold at
        delta = 0.1. Numbers that cannot be computed are missing.
        """
        numbers = {RECALL: float(self.correct[self.matched].mean())}
        numbers[MEAN_AVERAGE_PRECISION] = float(self.precision.sum() / self.matched.sum())
        numbers["validation/ece"] = self.reliability().error
        for share, value in zip(QUANTILES, np.quantile(self.uncertainty, QUANTILES), strict=True):
            numbers[f"{QUANTILE_NAME}{share:g}"] = float(value)
        for alpha in ALPHAS:
            if self.certified and is_certified(self.certified, alpha, DELTA):
                size = mean_size(self.certified, alpha, DELTA)
                numbers[f"validation/certified_size_{alpha:g}"] = size
        if not np.isnan(area := auroc(~self.correct, self.uncertainty)):
            numbers["validation/auroc_miss"] = area
        return numbers


def validate(embedding: Embedding, images: ImageSet, workers: Workers = ALONE) -> Validation:
    """Search the validation images among themselves, each left out of its own search.

    Where their relevance says which of them are searched (`WithinRadius.database`), the others are
    the queries. Workers share searches and calibrations of the same embedding.
    """
    if len(images) < 3:
        raise InvalidData(f"{len(images)} validation images: at least 3 must search each other")
    vectors = embedding.vectors
    stated = vectors if embedding.uncertainty is None else embedding.uncertainty
    if not (vectors.isfinite().all() and stated.isfinite().all()):
        raise TrainingDiverged(
            "embeddings of the validation images are NaN or infinite: train anew, under another "
            "name, with a lower optimizer.lr; checkpoints of earlier epochs are kept"
        )
    relevance, rows = images.relevance, vectors.cpu().numpy()
    queries, database = find_query_rows(relevance), find_database(relevance)
    searched = np.arange(len(images)) if database is None else np.flatnonzero(database)
    if not len(queries) or not len(searched):
        raise InvalidData(
            f"{len(searched)} validation images are in the database and {len(queries)} are queries:"
            " both are needed; increase data.options.validation"
        )
    gallery = relevance.subset(searched)
    # A searched image matches itself.
    n_matches = relevance.subset(queries).totals(gallery) - (database is None)
    matched = n_matches > 0
    if not matched.any():
        raise InvalidData("no validation image matches another one: choose others")
    depth = min(DEPTH, len(searched) - (database is None))
    index = None if database is None else build_index(rows[searched])
    norms = lengths(rows)

    def search(number: int) -> tuple[NDArray[np.float64], ...]:
        """Return ranks, uncertainties by distance and average precision of a block of queries."""
        block = slice(number * QUERY_BATCH_SIZE, (number + 1) * QUERY_BATCH_SIZE)
        if index is None:
            distances, positions = nearest_others(vectors, depth, block)
        else:
            distances, positions = index.search(rows[queries[block]], depth)
        relevant = relevance.subset(queries[block]).matches(gallery, positions)
        nearest = norms[searched[positions[:, 0]]]
        return (
            first_match_ranks(relevant),
            one_minus_cosine(distances[:, 0], norms[queries[block]], nearest),
            np.nan_to_num(average_precision_at_k(relevant, n_matches[block], depth)),
        )

    # Blocks of one size, so that every worker rounds distances in the same way.
    parts = workers.share(-(-len(queries) // QUERY_BATCH_SIZE), search)
    ranks, uncertainty, precision = map(np.concatenate, zip(*parts, strict=True))
    encoder_uncertainty = None
    if embedding.uncertainty is not None:
        encoder_uncertainty = embedding.uncertainty.cpu().numpy().astype(np.float64)
        uncertainty = encoder_uncertainty[queries]
    certified = certify_folds(rows, encoder_uncertainty, images, workers)
    return Validation(ranks, uncertainty, matched, precision, depth, certified)


@contextmanager
def hidden_ranges(encoder: Encoder) -> Iterator[list[Tensor]]:
    """Record what the encoder's head does inside the block, in the list that is yielded.

    For each batch that is embedded: the smallest and the largest value of each hidden unit,
    (2, hidden). The list stays empty if there is no `ScalarHead`.
    """
    ranges: list[Tensor] = []
    heads = [part for part in encoder.modules() if isinstance(part, ScalarHead)]
    hooks = [
        head.hidden_units.register_forward_hook(
            lambda layer, inputs, values: ranges.append(torch.stack(values.aminmax(dim=0)))
        )
        for head in heads[:1]
    ]
    try:
        yield ranges
    finally:
        for hook in hooks:
            hook.remove()


def constant_share(ranges: list[Tensor], workers: Workers = ALONE) -> dict[str, float]:
    """Return the share of units with one value in all `hidden_ranges` of all workers, as metric."""
    if not ranges:
        return {}
    smallest, largest = workers.all_gather(torch.stack(ranges)).unbind(dim=1)
    constant = smallest.amin(dim=0) == largest.amax(dim=0)
    return {CONSTANT_UNITS: float(constant.double().mean())}


@dataclass
class TrainingWatch:
    """Warns, once each, of a mean average precision of 1 and of a collapsed encoder.

    A collapsed encoder embeds all images alike: the triplet loss then stays at its margin, the soft
    one and the Bayesian one at log 2.
    """

    saturated: bool = False
    collapsed: int = 0  # epochs in a row

    def after(self, epoch: int, metrics: Mapping[str, float], collapsed_loss: float) -> None:
        """Check an epoch; `collapsed_loss` is that of tuples whose images are embedded alike."""
        if metrics[MEAN_AVERAGE_PRECISION] >= 1 and not self.saturated:
            self.saturated = True
            warn(
                f"from epoch {epoch} on, every validation image has all of its matches first: "
                "the last epoch is kept; use validation images of at least three classes"
            )
        near = abs(metrics["loss"] - collapsed_loss) <= COLLAPSED_TOLERANCE * collapsed_loss
        self.collapsed = self.collapsed + 1 if near and metrics["tuples"] else 0
        if self.collapsed == 2:
            warn(
                f"the loss stays at {collapsed_loss:.4g}: the encoder has collapsed and embeds all "
                "images alike; use easier negatives (mining.negatives semi-hard, or top-random "
                "with a larger mining.pool) or a lower optimizer.lr"
            )


def warn_of_chance(validation: Validation) -> None:
    """Warn if uncertainties distinguish misses from hits no better than chance, or not at all."""
    if np.ptp(validation.uncertainty) == 0:
        warn(
            "the uncertainty is the same for all validation images: it will not make sets smaller, "
            "and training longer cannot change that; start again with another seed or learning "
            "rate, or with encoder.options.activation=leaky-relu if it is relu"
        )
        return
    misses, hits = int((~validation.correct).sum()), int(validation.correct.sum())
    area = validation.metrics().get("validation/auroc_miss")
    if area is None or min(misses, hits) < MIN_COUNT:
        return
    # The standard error of the area under a random curve (Mann and Whitney, 1947).
    error = np.sqrt((misses + hits + 1) / (12 * misses * hits))
    if area < 0.5 + NORMAL_QUANTILE * error:
        warn(
            "the uncertainty of the validation images ranks misses no better than chance "
            f"(AUROC {area:.3f}, {misses} misses): it will not make sets smaller; train longer, "
            "with other mining, or with another encoder"
        )


def warn(text: str) -> None:
    """Print a warning."""
    console.print(f"warning: {text}", soft_wrap=True)
