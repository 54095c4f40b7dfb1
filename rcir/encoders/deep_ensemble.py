"""Deep ensemble: several deterministic encoders from different seeds.

Independently trained metric embeddings agree only up to a rotation, so the published read-out, the
mean and variance of raw member vectors, mostly measures misalignment. The default here ranks by
the mean squared distance over members, which no rotation changes, and takes the variance after the
members are rotated onto the first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.base import Encoder, EncoderConfig
from rcir.encoders.deterministic import Deterministic


class DeepEnsemble(Encoder):
    """Members trained apart, one embedding.

    With ``z_k`` the unit vector of member k and ``Q_k`` the rotation of `align`:

    - "distance": `mean` is all ``z_k / sqrt(members)`` side by side, (n, members * dim), whose
      squared L2 distance is the mean of the members' squared distances; `variance` (n, 1) and
      `uncertainty` are the mean over dimensions of the variance over members of ``z_k Q_k``.
    - "aligned": `mean` is the unit mean of ``z_k Q_k``, `variance` (n, dim).
    - "reference": `mean` and `variance` of the raw ``z_k`` (mean not re-normalised), the published
      read-out, to reproduce published numbers.
    """

    rotations: Tensor

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        self.members = nn.ModuleList(
            Deterministic(config, channels, size) for _ in range(config.members)
        )
        self.mode = config.ensemble
        self.register_buffer("rotations", torch.eye(config.dim).repeat(config.members, 1, 1))

    def align(self, vectors: Tensor) -> None:
        """Fit the rotations of the members onto the first (orthogonal Procrustes).

        Args:
            vectors: (members, n, dim), of n training images; see `member_vectors`.
        """
        products = vectors.double().transpose(1, 2) @ vectors[0].double()
        left, _, right = torch.linalg.svd(products)
        self.rotations.copy_((left @ right).to(self.rotations))

    def _samples(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return self.member_vectors(images)

    def member_vectors(self, images: Tensor) -> Tensor:
        """The members' unit vectors of a batch, (members, n, dim)."""
        return torch.stack([member(images).mean for member in self.members])

    def forward(self, images: Tensor) -> Embedding:
        vectors = self.member_vectors(images)
        if self.mode == "reference":
            variance = vectors.var(dim=0, correction=0)
            return Embedding(vectors.mean(dim=0), variance, variance.mean(dim=1))
        aligned = vectors @ self.rotations
        variance = aligned.var(dim=0)
        spread = variance.mean(dim=1)
        if self.mode == "aligned":
            return Embedding(F.normalize(aligned.mean(dim=0)), variance, spread)
        joint = vectors.transpose(0, 1).flatten(1) / len(self.members) ** 0.5
        return Embedding(joint, spread[:, None], spread)
