"""Bayesian Triplet Loss encoder on the sphere: a von Mises-Fisher distribution per image.

Warburg et al., ICCV 2021, supplement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.base import EmbeddedTuples, Encoder, EncoderConfig
from rcir.encoders.btl import Distance
from rcir.encoders.features import MeanHead, VarianceHead, build_features
from rcir.errors import InvalidConfig
from rcir.losses import (
    VonMisesFisherOptions,
    bessel_ratio,
    vmf_expected_squared_distance,
    vmf_tuple_loss,
)
from rcir.options import require_at_least, require_choices

MAX_CONCENTRATION = 1e10  # float64 cannot distinguish draws of larger ones from their mean
INITIAL_LENGTH = 0.9  # mean resultant length of every image before training


@dataclass(frozen=True)
class VonMisesFisherEncoderOptions:
    """Options of the von Mises-Fisher encoder.

    Args:
        concentration_hidden: width of the concentration head's hidden layer; at least 1.
        distance: "mean" ranks by the distance of mean directions; "expected" re-ranks the
            candidates by the root of the expected squared distance, which moves uncertain gallery
            images towards the middle.
        passes: number of draws of `samples`; at least 2.
    """

    concentration_hidden: int = 128
    distance: Distance = "mean"
    passes: int = 20

    def __post_init__(self) -> None:
        require_at_least(self, concentration_hidden=1, passes=2)
        require_choices(self, "distance")


class VonMisesFisher(Encoder):
    """A shared backbone with heads for the mean direction and the concentration.

    `Embedding.vectors` are the mean directions, of unit length. ``extra["concentration"]`` (n, 1)
    is kappa, at most 1e8, `uncertainty` (n,) its inverse, which the head predicts.
    """

    Options = VonMisesFisherEncoderOptions
    LossOptions = VonMisesFisherOptions
    revision = 1  # bounds of its variances
    mining = ("random", "semi-hard")
    draws = True

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        self.backbone, shape, pool = build_features(self.config, channels, size)
        self.mean_head = MeanHead(pool, shape, config.dim)
        # Banerjee et al. (JMLR 2005, eq. 4.4): the concentration of a mean resultant length.
        initial = INITIAL_LENGTH * (config.dim - INITIAL_LENGTH**2) / (1 - INITIAL_LENGTH**2)
        hidden = self.options.concentration_hidden
        self.dispersion_head = VarianceHead(pool, shape, hidden, 1 / initial)

    def forward(self, images: Tensor) -> Embedding:
        feature_map = self.backbone(images).float()
        with torch.autocast(images.device.type, enabled=False):
            mean = F.normalize(self.mean_head(feature_map))
            dispersion = self.dispersion_head(feature_map)
        extra = {"concentration": 1 / dispersion}
        return Embedding(mean, uncertainty=dispersion.squeeze(1), extra=extra)

    def loss(self, tuples: EmbeddedTuples, options: Any) -> Tensor:
        concentration = tuples.by_role(_concentration(tuples.images))
        return vmf_tuple_loss(tuples.vectors, concentration, tuples.valid, options)

    def draw_distances(self, queries: Embedding, candidates: Tensor) -> Tensor:
        """Return distances of draws from Gaussians with the means and variances of the vMFs."""
        dim = queries.vectors.shape[1]
        length = bessel_ratio(_concentration(queries), dim).to(queries.vectors)
        variance = (1 - length.square()).clamp(min=0) / dim
        return super().draw_distances(Embedding(length * queries.vectors, variance), candidates)

    @property
    def reranks(self) -> bool:
        """True if candidates are ranked by expected distances."""
        return bool(self.options.distance == "expected")

    def rerank(self, queries: Embedding, candidates: Embedding) -> Tensor:
        """Return roots (n, k) of the expected squared distances of n queries to k candidates."""
        n, dim = queries.vectors.shape
        return vmf_expected_squared_distance(
            queries.vectors[:, None],
            _concentration(queries)[:, None],
            candidates.vectors.view(n, -1, dim),
            _concentration(candidates).view(n, -1, 1),
        ).sqrt()

    def _samples(self, images: Tensor, generator: torch.Generator) -> Tensor:
        embedding: Embedding = self(images)
        return draw_von_mises_fisher(
            embedding.vectors, _concentration(embedding), self.options.passes, generator
        )


def _concentration(embedding: Embedding) -> Tensor:
    if "concentration" not in embedding.extra:
        raise InvalidConfig('vMF encoders need embeddings with extra["concentration"]')
    return embedding.extra["concentration"]


def draw_von_mises_fisher(
    mean: Tensor, concentration: Tensor, draws: int, generator: torch.Generator
) -> Tensor:
    """Draw points (draws, n, d) of the unit sphere independently.

    Wood, "Simulation of the von Mises Fisher distribution", Communications in Statistics:
    Simulation and Computation 23 (1), 1994.

    Args:
        mean: (n, d) of unit length, d at least 2.
        concentration: (n, 1), above 0.
        draws: number of points for each mean.
        generator: on the CPU, where all is computed.

    Example:
        >>> mean = torch.eye(3)[:1]
        >>> points = draw_von_mises_fisher(mean, torch.tensor([[1e6]]), 2, torch.Generator())
        >>> (points @ mean.T).flatten()
        tensor([1.0000, 1.0000])
    """
    direction, kappa = mean.detach().cpu().double(), concentration.detach().cpu().double()
    kappa = kappa.squeeze(1).clamp(max=MAX_CONCENTRATION).expand(draws, -1)
    cosine = _cosines(kappa, mean.shape[1], generator)[..., None]
    shape = (draws, *direction.shape)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    across = noise - (noise * direction).sum(-1, keepdim=True) * direction
    sine = (1 - cosine.square()).clamp(min=0).sqrt()
    return (cosine * direction + sine * F.normalize(across, dim=-1)).to(mean)


def _cosines(kappa: Tensor, dim: int, generator: torch.Generator) -> Tensor:
    """Draw cosines to the means, for concentrations of any shape."""
    free = dim - 1
    b = free / (2 * kappa + (4 * kappa.square() + free**2).sqrt())
    x = (1 - b) / (1 + b)
    c = kappa * x + free * (1 - x.square()).log()
    cosines = torch.empty_like(kappa)
    waiting = torch.ones_like(kappa, dtype=torch.bool)
    while waiting.any():
        bw, xw, cw, kw = (values[waiting] for values in (b, x, c, kappa))
        # Beta(free / 2, free / 2), which torch cannot draw by a generator: a sphere's coordinate.
        n, kind = len(bw), torch.float64
        noise = torch.randn(n, dim, generator=generator, dtype=kind, device="cpu")
        beta = (1 + F.normalize(noise)[:, 0]) / 2
        proposed = (1 - (1 + bw) * beta) / (1 - (1 - bw) * beta)
        uniform = torch.rand(n, generator=generator, dtype=kind, device="cpu")
        surplus = kw * proposed + free * (1 - xw * proposed).log() - cw
        accepted = surplus >= uniform.log()
        places = waiting.nonzero()[accepted].unbind(1)
        cosines[places] = proposed[accepted]
        waiting[places] = False
    return cosines
