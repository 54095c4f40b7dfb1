"""The loss of mined tuples: which loss, and how its parts add up."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rcir.embedding import Embedding
from rcir.errors import InvalidConfig
from rcir.losses.bayesian_triplet import kl_to_prior, triplet_nll
from rcir.losses.triplet import TripletForm, triplet_loss


@dataclass(frozen=True)
class LossConfig:
    """The triplet loss of point embeddings, or the Bayesian one of Gaussian embeddings.

    Args:
        margin: at least 0. Triplet loss: in units of the form's distance, 0.1 unless given.
            Bayesian triplet loss: in units of squared distance, 0 unless given, as Cai et al.
            (AAAI 2025) train it.
        form: of the triplet loss, "squared", "unsquared" or "soft".
        kl_scale: weight of the KL divergence from the prior in the Bayesian triplet loss.
    """

    margin: float | None = None
    form: TripletForm = "squared"
    kl_scale: float = 1e-6

    def __post_init__(self) -> None:
        for name, value in (("margin", self.margin), ("kl_scale", self.kl_scale)):
            if value is not None and value < 0:
                raise InvalidConfig(f"loss.{name} is {value}; it must not be negative")


def tuple_losses(embedding: Embedding, valid: Tensor, config: LossConfig) -> Tensor:
    """The loss of each tuple: the mean over its triplets, plus its share of the KL divergences.

    Args:
        embedding: of b anchors, then their b positives, then their b * j negatives, anchor by
            anchor; with a variance it is trained by the Bayesian triplet loss, else by the triplet
            loss.
        valid: (b, j) bool; negatives that count. Each anchor has at least one.
        config: margins and weights.

    Returns:
        (b,) losses.
    """
    b, j = valid.shape
    weight = valid / valid.sum(1, keepdim=True)
    mean = _split(embedding.mean, b, j)
    if embedding.variance is None:
        margin = 0.1 if config.margin is None else config.margin
        return (triplet_loss(*mean, margin, config.form) * weight).sum(1)
    variance = _split(embedding.variance, b, j)
    nll = triplet_nll(mean, variance, config.margin or 0.0)
    anchor, positive, negative = (kl_to_prior(m, v) for m, v in zip(mean, variance, strict=True))
    divergence = (anchor + positive).squeeze(1) + (negative * weight).sum(1)
    return (nll * weight).sum(1) + config.kl_scale * divergence


def _split(rows: Tensor, b: int, j: int) -> tuple[Tensor, Tensor, Tensor]:
    """Anchors and positives (b, 1, d), negatives (b, j, d)."""
    anchor, positive, negative = rows.split([b, b, b * j])
    return anchor[:, None], positive[:, None], negative.view(b, j, -1)
