"""A method of somebody's own, in one file: a von Mises-Fisher distribution for each image.

`tests/test_own_method.py` trains, sweeps, calibrates, stores and loads it by its import path alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders import Encoder, EncoderConfig
from rcir.encoders.base import EmbeddedTuples, TrainingImages
from rcir.losses import mean_of_valid


@dataclass(frozen=True)
class ToyOptions:
    """Options of the encoder."""

    width: int = 16


@dataclass(frozen=True)
class ToyLoss:
    """Options of its loss."""

    temperature: float = 0.1


class Toy(Encoder):
    """Directions with a concentration, and draws; trained by a contrastive loss of its own."""

    Options = ToyOptions
    LossOptions = ToyLoss
    mining = ("random", "hardest")
    steps: Tensor
    calibrated: Tensor

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        hidden = nn.Linear(channels * size[0] * size[1], self.options.width)
        self.body = nn.Sequential(nn.Flatten(), hidden, nn.ReLU())
        self.direction = nn.Linear(self.options.width, config.dim)
        self.log_concentration = nn.Linear(self.options.width, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("calibrated", torch.ones(()))

    def forward(self, images: Tensor) -> Embedding:
        features = self.body(images)
        vectors = F.normalize(self.direction(features))
        concentration = self.log_concentration(features).exp() * self.calibrated
        draws = vectors[:, None] + torch.linspace(-0.1, 0.1, 3, device=vectors.device)[:, None]
        return Embedding(
            vectors,
            uncertainty=1 / concentration.squeeze(1),
            extra={"concentration": concentration, "draws": draws},
        )

    def loss(self, tuples: EmbeddedTuples, options: Any) -> Tensor:
        embedding = tuples.images
        mean = embedding.vectors * embedding.extra["concentration"].sqrt()
        anchor, positive, negative = tuples.by_role(mean)
        gaps = ((anchor * negative).sum(2) - (anchor * positive).sum(2)) / options.temperature
        return mean_of_valid(F.softplus(gaps), tuples.valid)

    def after_step(self) -> None:
        self.steps += 1

    def fit_posthoc(self, training: TrainingImages) -> None:
        self.calibrated.fill_(1 / training.embed(self).extra["concentration"].mean().item())

    @property
    def reranks(self) -> bool:
        return True

    def rerank(self, queries: Embedding, candidates: Embedding) -> Tensor:
        near = candidates.extra["draws"].view(
            len(queries), -1, *candidates.extra["draws"].shape[1:]
        )
        return (queries.vectors[:, None, None] - near).norm(dim=3).mean(2)
