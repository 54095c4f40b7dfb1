"""How good an encoder is on the validation images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from rcir.data import ImageSet, Preprocessing
from rcir.encoders import Encoder
from rcir.errors import InvalidData, TrainingDiverged
from rcir.retriever import embed

BLOCK = 1024


@dataclass(frozen=True)
class Validation:
    """The nearest other image of every validation image.

    Attributes:
        correct: (n,) whether it has the same label.
        uncertainty: (n,) of the images, as a retriever would state it.
    """

    correct: NDArray[np.bool_]
    uncertainty: NDArray[np.float64]

    def metrics(self) -> dict[str, float]:
        """Recall at 1, and how well the uncertainty predicts a wrong nearest image (AUROC)."""
        found = {"validation/recall_at_1": float(self.correct.mean())}
        if 0 < self.correct.sum() < len(self.correct):
            found["validation/auroc_miss"] = float(roc_auc_score(~self.correct, self.uncertainty))
        return found


def validate(encoder: Encoder, preprocessing: Preprocessing, images: ImageSet) -> Validation:
    """Search the validation images among themselves, each left out of its own search.

    Raises:
        InvalidData: there are no two images to search among.
        TrainingDiverged: an embedding or uncertainty is NaN or infinite.
    """
    if len(images) < 2:
        raise InvalidData(f"{len(images)} validation images: at least 2 search each other")
    embedding = embed(encoder, preprocessing, images.images)
    vectors = embedding.mean
    distances, positions = [], []
    for start in range(0, len(vectors), BLOCK):
        block = torch.cdist(vectors[start : start + BLOCK], vectors)
        rows = torch.arange(len(block), device=block.device)
        block[rows, start + rows] = torch.inf
        nearest = block.min(dim=1)
        distances.append(nearest.values)
        positions.append(nearest.indices)
    correct = images.labels[torch.cat(positions).cpu().numpy()] == images.labels
    heuristic = torch.cat(distances) ** 2 / 2
    uncertainty = heuristic if embedding.uncertainty is None else embedding.uncertainty
    if not (vectors.isfinite().all() and uncertainty.isfinite().all()):
        raise TrainingDiverged(
            "embeddings of the validation images are NaN or infinite: train anew, under another "
            "name, with a lower optimizer.lr; checkpoints of earlier epochs are kept"
        )
    return Validation(correct, uncertainty.cpu().numpy().astype(np.float64))
