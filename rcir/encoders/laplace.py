"""A Gaussian posterior of the last linear layer: the curvature of a contrastive loss (Laplace)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor
from torch.nn import functional as F

from rcir.losses import HessianGeometry, pair_hessian_diagonal

Variant = Literal["full", "fixed", "positive"]


@dataclass
class PairCurvature:
    """Sums of Hessian diagonals over pairs: of those that match, and of others in the margin.

    Attributes:
        geometry: see `rcir.losses.pair_hessian_blocks`.
        variant: "full", all pairs with all their terms; "fixed", without what both of a pair have
            to do with each other; "positive", pairs that match alone.
        margin: of the loss; pairs that do not match and are farther apart have no curvature.
        sums: (2, d, f + 1) float64, of pairs that match and of others; () before the first pair.
        counts: (2,) float64, number of pairs that match, of others in the margin.
        unmined: (2,) float64, number of pairs that were not chosen by their distance, of those of
            them in the margin; these say how much pairs that do not match weigh.
    """

    geometry: HessianGeometry
    variant: Variant
    margin: float
    sums: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    counts: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    unmined: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def add(self, features: Tensor, outputs: Tensor, pairs: Tensor, match: Tensor) -> None:
        """Add pairs of images.

        Args:
            features: (n, f), what the layer is given.
            outputs: (n, d), what it gives.
            pairs: (p, 2) int64, rows of both.
            match: (p,) bool.
        """
        features, outputs = features.double(), outputs.double()
        inside = ~match & self._inside(outputs, pairs)
        taken = (match, torch.zeros_like(inside) if self.variant == "positive" else inside)
        sums = torch.stack(
            [
                pair_hessian_diagonal(
                    *(features, outputs, pairs[some], outputs.new_ones(int(some.sum()))),
                    self.geometry,
                    cross=self.variant != "fixed",
                )
                for some in taken
            ]
        )
        counts = torch.stack([match.sum(), inside.sum()]).double()
        self.sums, self.counts = self.sums + sums, self.counts + counts

    def add_unmined(self, outputs: Tensor, pairs: Tensor) -> None:
        """Add pairs (p, 2) of images that were not chosen by their distance, and do not match.

        Where it is not known which match, all of them: the few that do hardly tell.
        """
        inside = self._inside(outputs, pairs)
        counts = torch.stack([inside.new_tensor(len(inside), dtype=torch.int64), inside.sum()])
        self.unmined = self.unmined + counts.double()

    def _inside(self, outputs: Tensor, pairs: Tensor) -> Tensor:
        """Whether pairs are closer than the margin."""
        units = F.normalize(outputs)
        distances: Tensor = (units[pairs[:, 0]] - units[pairs[:, 1]]).norm(dim=1)
        return distances < self.margin

    def all_reduce(self) -> None:
        """Add up the sums of all workers that train together, each of which has added pairs."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for own in (self.sums, self.counts, self.unmined):
                torch.distributed.all_reduce(own)

    def mean(self, negatives_weight: float | None) -> Tensor:
        """The Hessian diagonal of the mean loss, (d, f + 1); entries can be negative.

        That of pairs that match has weight 1, and is lessened by that of others.

        Args:
            negatives_weight: of the mean over other pairs in the margin. None is the share of
                unmined pairs that lie there, which gives the Hessian of the mean over all pairs
                that do not match: the others have none.
        """
        matching, inside = self.counts.clamp(min=1)
        weight: Tensor | float | None = negatives_weight
        if weight is None:
            weight = self.unmined[1] / self.unmined[0].clamp(min=1)
        mean: Tensor = self.sums[0] / matching - weight * self.sums[1] / inside
        return mean


def marginal_prior_precision(hessian: Tensor, squared_norm: float) -> float:
    """The precision of a Gaussian prior around 0 that makes the data most likely (MacKay, 1992).

    The maximum over delta of ``-sum log(h + delta) / 2 + P log(delta) / 2 - delta |theta|^2 / 2``:
    the fixed point ``delta |theta|^2 = sum h / (h + delta)``, of which there is one.

    Args:
        hessian: diagonal, at least 0, of all P weights; not all 0.
        squared_norm: ``|theta|^2`` of the weights, above 0.

    Example:
        >>> import torch
        >>> round(marginal_prior_precision(torch.tensor([2.0]), 0.5), 6)  # delta / 2 = 2 / (2 + d)
        1.236068
    """
    values = hessian.double().flatten().cpu().numpy()

    def excess(log_precision: float) -> float:
        precision = np.exp(log_precision)
        return float(precision * squared_norm - (values / (values + precision)).sum())

    # At the largest, every weight is determined by the data; the smallest is of one that hardly is.
    largest = np.log(len(values) / squared_norm)
    least = largest
    while excess(least) > 0:
        least -= 10
    return float(np.exp(brentq(excess, least, largest + 1)))


def inverse_concentration(samples: Tensor) -> Tensor:
    """One over the concentration of a von Mises-Fisher distribution that is fitted to unit vectors.

    ``kappa = R (d - R^2) / (1 - R^2)`` with R the length of their mean (Banerjee et al., JMLR 2005,
    eq. 4.4). ``1 - R^2`` is computed as their mean squared distance from it, so that no digits are
    lost where all are nearly the same.

    Args:
        samples: (t, n, d), t unit vectors of each of n images.

    Returns:
        (n,), larger for samples that are spread out.

    Example:
        >>> import torch
        >>> apart = torch.tensor([[[.6, .8]], [[.6, -.8]]])  # R = .6
        >>> inverse_concentration(apart)
        tensor([0.6504])
    """
    mean = samples.mean(0)
    spread = (samples - mean).square().sum(-1).mean(0)
    squared = mean.square().sum(-1).clamp(min=torch.finfo(mean.dtype).tiny)
    return spread / (squared.sqrt() * (samples.shape[-1] - squared))
