"""How good an encoder is on the validation images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rcir.data import ImageSet
from rcir.data.relevance_protocol import Relevance
from rcir.data.within_radius import asking, database_of
from rcir.embedding import Embedding
from rcir.errors import InvalidData, TrainingDiverged
from rcir.index import DEPTH, build_index, lengths, nearest_others, one_minus_cosine
from rcir.levels import ALPHA, ALPHAS, DELTA
from rcir.metrics import (
    average_precision_at_k,
    confidence,
    first_match_ranks,
    recall_at_k,
    reliability,
)
from rcir.risk import Certified, is_certified, mean_size
from rcir.runs.results import RunResults, names_digest
from training.certification import certify_folds

PER_IMAGE = ("ranks", "uncertainty", "matched", "precision")
MEAN_AVERAGE_PRECISION = "validation/mean_average_precision"
CERTIFIED_SIZE = f"validation/certified_size_{ALPHA:g}"  # the epoch with the smallest is kept


@dataclass(frozen=True)
class Validation:
    """Every validation image searched among the others.

    Attributes:
        ranks: (n,) rank of the first other image that matches, infinite beyond `depth`.
        uncertainty: (n,) of the images, as a retriever would state it.
        matched: (n,) whether another image matches at all.
        precision: (n,) average precision of the candidates; NaN where no other image matches.
        depth: number of candidates that were searched.
        certified: what calibrations on these images would certify, see `fold_roles`.
    """

    ranks: NDArray[np.float64]
    uncertainty: NDArray[np.float64]
    matched: NDArray[np.bool_]
    precision: NDArray[np.float64]
    depth: int
    certified: list[Certified] = field(default_factory=list)

    @property
    def correct(self) -> NDArray[np.bool_]:
        """(n,) whether the nearest other image matches."""
        correct: NDArray[np.bool_] = self.ranks == 1
        return correct

    def measured(self, images: ImageSet) -> RunResults:
        """The results that other runs are compared with."""
        metrics = {name.removeprefix("validation/"): v for name, v in self.metrics().items()}
        return RunResults("validation", names_digest(images.ids), self.certified, metrics, "auto")

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Its state as arrays, by name; `from_arrays` makes it again."""
        own = {name: getattr(self, name) for name in PER_IMAGE}
        for number, part in enumerate(self.certified):
            own |= {
                f"scores.{number}": part.scores,
                f"candidate_scores.{number}": part.candidate_scores,
            }
        return own | {"depth": np.array([self.depth])}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Make it again from its `arrays`."""
        numbers = range(sum(name.startswith("scores.") for name in arrays))
        return cls(
            **{name: arrays[name] for name in PER_IMAGE},
            depth=int(arrays["depth"][0]),
            certified=[
                Certified(arrays[f"scores.{n}"], arrays[f"candidate_scores.{n}"]) for n in numbers
            ],
        )

    def metrics(self) -> dict[str, float]:
        """Recall at 1, mean average precision, certified sizes, calibration error, AUROC of misses.

        Recall and precision are of the images that another one matches, sizes at delta = 0.1.
        What cannot be told is left out: a size that cannot be certified, the AUROC where all are
        right or all wrong.
        """
        found = {"validation/recall_at_1": recall_at_k(self.ranks[self.matched], 1)}
        found[MEAN_AVERAGE_PRECISION] = float(np.nanmean(self.precision))
        # The range of one half scales the other.
        half = self.uncertainty[::2]
        scaled = confidence(self.uncertainty[1::2], half.min(), half.max())
        found["validation/ece"] = reliability(scaled, self.correct[1::2]).error
        for alpha in ALPHAS:
            if self.certified and is_certified(self.certified, alpha, DELTA):
                size = mean_size(self.certified, alpha, DELTA)
                found[f"validation/certified_size_{alpha:g}"] = size
        if 0 < self.correct.sum() < len(self.correct):
            from sklearn.metrics import roc_auc_score  # slow to import; not every worker needs it

            found["validation/auroc_miss"] = float(roc_auc_score(~self.correct, self.uncertainty))
        return found


def validate(embedding: Embedding, images: ImageSet) -> Validation:
    """Search the validation images among themselves, each left out of its own search.

    Where their relevance says which of them are searched (`WithinRadius.database`), the others are
    the queries, and searched for among these.

    Raises:
        InvalidData: there are fewer than 3 images, or none matches another.
        TrainingDiverged: an embedding or uncertainty is NaN or infinite.
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
    distances, positions, relevant, others = _searched(vectors, images.relevance)
    ranks = first_match_ranks(relevant)
    own = None
    if embedding.uncertainty is not None:
        own = embedding.uncertainty.cpu().numpy().astype(np.float64)
    matched = others > 0
    if not matched.any():
        raise InvalidData("no validation image matches another one: choose others")
    asked, database = asking(images.relevance), database_of(images.relevance)
    held = np.arange(len(images)) if database is None else np.flatnonzero(database)
    norms = lengths(vectors.cpu().numpy())
    nearest = one_minus_cosine(distances[:, 0], norms[asked], norms[held][positions[:, 0]])
    uncertainty = nearest if own is None else own[asked]
    certified = certify_folds(vectors.cpu().numpy(), own, images)
    depth = positions.shape[1]
    precision = average_precision_at_k(relevant, others, depth)
    return Validation(ranks, uncertainty, matched, precision, depth, certified)


def _searched(
    vectors: Tensor, relevance: Relevance
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Of each image that asks: distances and positions, which match, and how many would."""
    database = database_of(relevance)
    if database is None:
        distances, positions = nearest_others(vectors, min(DEPTH, len(relevance) - 1))
        others = relevance.totals(relevance) - 1  # each image counts itself
        return distances, positions, relevance.of(relevance, positions), others
    asked, held = np.flatnonzero(~database), np.flatnonzero(database)
    if not len(asked) or not len(held):
        raise InvalidData(
            f"of {len(database)} validation images {len(held)} are of the database and "
            f"{len(asked)} are queries: some of both are needed; ask for more with "
            "data.options.validation"
        )
    rows = vectors.cpu().numpy()
    distances, positions = build_index(rows[held]).search(rows[asked], min(DEPTH, len(held)))
    queries, gallery = relevance.subset(asked), relevance.subset(held)
    return distances, positions, queries.of(gallery, positions), queries.totals(gallery)
