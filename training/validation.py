"""How good an encoder is on the validation images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rcir.data import ImageSet, Preprocessing
from rcir.embedding import Embedding
from rcir.encoders import Encoder
from rcir.encoders.batches import embed
from rcir.errors import InvalidData, RiskUnattainable, TrainingDiverged
from rcir.index import nearest_others
from rcir.metrics import first_match_ranks, recall_at_k
from rcir.risk import MinMax, MissController, Rankings

DEPTH = 200


@dataclass(frozen=True)
class Validation:
    """Every validation image searched among the others.

    Attributes:
        ranks: (n,) rank of the first other image that matches, infinite beyond `depth`.
        uncertainty: (n,) of the images, as a retriever would state it.
        matched: (n,) whether another image matches at all.
        depth: number of candidates that were searched.
    """

    ranks: NDArray[np.float64]
    uncertainty: NDArray[np.float64]
    matched: NDArray[np.bool_]
    depth: int

    @property
    def correct(self) -> NDArray[np.bool_]:
        """(n,) whether the nearest other image matches."""
        return self.ranks == 1

    def certified_size(self, alpha: float, delta: float) -> float:
        """The mean set size that a calibration on these images would certify.

        Half of the images fit the size adapter ("minmax"), the others calibrate. What cannot be
        certified counts as the whole search depth.
        """
        first, second = (Rankings(self.uncertainty[start::2], self.depth) for start in (0, 1))
        adapter = MinMax.fit(first, self.ranks[::2])
        controller = MissController.calibrate(adapter, second, self.ranks[1::2])
        try:
            return float(controller.size(second, alpha, delta).mean())
        except RiskUnattainable:
            return float(self.depth)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What it takes to make it again, by name."""
        return vars(self) | {"depth": np.array([self.depth])}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """What was given as `arrays`."""
        return cls(**dict(arrays) | {"depth": int(arrays["depth"][0])})  # type: ignore[arg-type]

    def metrics(self) -> dict[str, float]:
        """Recall at 1, the certified size at alpha = delta = 0.1, and the AUROC of misses.

        Recall is of the images that another one matches.
        """
        found = {
            "validation/recall_at_1": recall_at_k(self.ranks[self.matched], 1),
            "validation/certified_size": self.certified_size(0.1, 0.1),
        }
        if 0 < self.correct.sum() < len(self.correct):
            from sklearn.metrics import roc_auc_score  # slow to import; not every worker needs it

            found["validation/auroc_miss"] = float(roc_auc_score(~self.correct, self.uncertainty))
        return found


def validate(encoder: Encoder, preprocessing: Preprocessing, images: ImageSet) -> Validation:
    """Embed the validation images, and search them among themselves; see `judge`."""
    return judge(embed(encoder, preprocessing, images.images), images)


def judge(embedding: Embedding, images: ImageSet) -> Validation:
    """Search the validation images among themselves, each left out of its own search.

    Raises:
        InvalidData: there are fewer than 3 images, or none matches another.
        TrainingDiverged: an embedding or uncertainty is NaN or infinite.
    """
    if len(images) < 3:
        raise InvalidData(f"{len(images)} validation images: at least 3 must search each other")
    vectors = embedding.mean
    stated = vectors if embedding.uncertainty is None else embedding.uncertainty
    if not (vectors.isfinite().all() and stated.isfinite().all()):
        raise TrainingDiverged(
            "embeddings of the validation images are NaN or infinite: train anew, under another "
            "name, with a lower optimizer.lr; checkpoints of earlier epochs are kept"
        )
    distances, positions = nearest_others(vectors, min(DEPTH, len(images) - 1))
    ranks = first_match_ranks(images.relevance.of(images.relevance, positions))
    if embedding.uncertainty is None:
        uncertainty = distances[:, 0].astype(np.float64) ** 2 / 2
    else:
        uncertainty = embedding.uncertainty.cpu().numpy().astype(np.float64)
    matched = images.relevance.totals(images.relevance) > 1  # each image counts itself
    if not matched.any():
        raise InvalidData("no validation image matches another one: choose others")
    return Validation(ranks, uncertainty, matched, positions.shape[1])
