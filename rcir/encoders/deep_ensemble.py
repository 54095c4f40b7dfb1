"""Deep ensemble: several deterministic encoders from different seeds.

Independently trained metric embeddings agree only up to a rotation, so the published mean and
variance of raw member vectors mostly measure misalignment. The default here ranks by the mean
squared distance over members, which no rotation changes, and takes the variance after the members
are rotated onto the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.base import Encoder, EncoderConfig, TrainingImages
from rcir.encoders.deterministic import Deterministic
from rcir.encoders.features import frozen_backbone
from rcir.options import require_at_least

Combination = Literal["distance", "aligned", "reference"]
ALIGNMENT_SAMPLE = 20_000  # images, many times what a rotation needs


@dataclass(frozen=True)
class DeepEnsembleOptions:
    """Options of a deep ensemble.

    Args:
        members: number of networks; at least 2.
        combination: "distance", "aligned" or "reference", see `DeepEnsemble`.
    """

    members: int = 5
    combination: Combination = "distance"

    def __post_init__(self) -> None:
        require_at_least(self, "encoder.options.", members=2)


class DeepEnsemble(Encoder):
    """Members trained apart, one embedding.

    With ``z_k`` the unit vector of member k and ``Q_k`` the rotation of `align`:

    - "distance": `vectors` is all ``z_k / sqrt(members)`` side by side, (n, members * dim), whose
      squared L2 distance is the mean of the members' squared distances; `variance` (n, 1) and
      `uncertainty` are the mean over dimensions of the variance over members of ``z_k Q_k``.
    - "aligned": `vectors` is the unit mean of ``z_k Q_k``, `variance` (n, dim).
    - "reference": mean (not re-normalised) and variance of the raw ``z_k``, the published read-out,
      to reproduce published numbers.
    """

    Options = DeepEnsembleOptions
    draws = True
    rotations: Tensor

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        self.members = nn.ModuleList(
            Deterministic(member, channels, size) for member in self.member_configs(config)
        )
        self.combination = self.options.combination
        self.register_buffer("rotations", torch.eye(config.dim).repeat(len(self.members), 1, 1))

    @classmethod
    def member_configs(cls, config: EncoderConfig) -> list[EncoderConfig]:
        options = config.method_options()
        return [replace(config, method="deterministic", options={})] * options.members

    def take_members(self, members: Sequence[Encoder]) -> None:
        for slot, member in zip(self.members, members, strict=True):
            slot.load_state_dict(member.state_dict())

    def fit_posthoc(self, training: TrainingImages) -> None:
        """Rotate the members onto the first, by a sample of training images."""
        sample = training.sample(ALIGNMENT_SAMPLE)
        vectors = [sample.embed(cast(Encoder, member)).vectors for member in self.members]
        self.align(torch.stack(vectors))

    def align(self, vectors: Tensor) -> None:
        """Rotate `member_vectors` of training images onto the first (orthogonal Procrustes)."""
        products = vectors.double().transpose(1, 2) @ vectors[0].double()
        left, _, right = torch.linalg.svd(products)
        self.rotations.copy_((left @ right).to(self.rotations))

    def member_vectors(self, images: Tensor) -> Tensor:
        """Return the members' unit vectors of a batch, (members, n, dim)."""
        if (frozen := frozen_backbone(self)) is not None:
            images = frozen(images)  # the same for all members
        return torch.stack([member(images).vectors for member in self.members])

    def draw_distances(self, queries: Embedding, candidates: Tensor) -> Tensor:
        """Return distances (members, n, k) by each member, or of Gaussian draws."""
        if self.combination != "distance":
            return super().draw_distances(queries, candidates)
        size = (len(self.members), -1)
        apart = queries.vectors.unflatten(1, size)[:, None] - candidates.unflatten(2, size)
        distances: Tensor = apart.norm(dim=3)
        return distances.permute(2, 0, 1)

    def forward(self, images: Tensor) -> Embedding:
        vectors = self.member_vectors(images)
        if self.combination == "reference":
            variance = vectors.var(dim=0, correction=0)
            return Embedding(vectors.mean(dim=0), variance, variance.mean(dim=1))
        aligned = vectors @ self.rotations
        variance = aligned.var(dim=0)
        spread = variance.mean(dim=1)
        if self.combination == "aligned":
            return Embedding(F.normalize(aligned.mean(dim=0)), variance, spread)
        joint = vectors.transpose(0, 1).flatten(1) / len(self.members) ** 0.5
        return Embedding(joint, spread[:, None], spread)
