"""Curvature of the contrastive loss by the weights of the last layer.

Warburg, Miani, Brack and Hauberg, "Bayesian metric learning for uncertainty quantification in image
retrieval", 2023, arXiv 2302.01332, appendix. The second derivatives are those of ``|u_i - u_j|^2 /
2`` with unit vectors ``u = z / |z|`` of ``z = W x + b``. The contrastive loss of form "squared-gap"
is plus or minus this function, wherever it has a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

HessianGeometry = Literal["euclidean", "arccos"]
Variant = Literal["full", "fixed", "positive"]
BLOCK_NUMBERS = 1 << 24  # numbers in the products of features of a block of pairs


def pair_hessian_blocks(
    first: Tensor, second: Tensor, geometry: HessianGeometry
) -> tuple[Tensor, Tensor, Tensor]:
    """Return diagonals (p, d) of the blocks (i, i), (j, j) and (i, j) of the Hessian of each pair.

    `first` and `second` (p, d) are not yet scaled to unit length. With the "euclidean" geometry,
    the scaling is a layer of the network, which is linearised (generalised Gauss-Newton); with
    "arccos", it is part of the loss, and the Hessian is exact.
    """
    n1, n2 = first.norm(dim=1, keepdim=True), second.norm(dim=1, keepdim=True)
    u1, u2 = first / n1, second / n2
    product = u1 * u2
    cosine = product.sum(1, keepdim=True)
    cross = (u1.square() + u2.square() - cosine * product - 1) / (n1 * n2)
    if geometry == "euclidean":
        return (1 - u1.square()) / n1.square(), (1 - u2.square()) / n2.square(), cross
    shared = cosine + 2 * product
    return (
        (shared - 3 * cosine * u1.square()) / n1.square(),
        (shared - 3 * cosine * u2.square()) / n2.square(),
        cross,
    )


def pair_hessian_diagonal(
    features: Tensor,
    outputs: Tensor,
    pairs: Tensor,
    weights: Tensor,
    *,
    geometry: HessianGeometry = "euclidean",
    cross: bool = True,
) -> Tensor:
    """Return the diagonal (d, f + 1) of the Hessian of a weighted sum over pairs, by W and b.

    Pairs (p, 2) are rows of inputs x (n, f) of the layer and of outputs z = W x + b (n, d), which
    are not yet scaled to unit length; their weights (p,) are below 0 if they are pushed apart.
    Without `cross`, the mixed derivatives, each image of a pair is constant for the other, which
    does not change loss and gradient ("fix" in the paper).
    """
    left, right = pairs.T
    lefts, rights, crossed = (
        block * weights[:, None]
        for block in pair_hessian_blocks(outputs[left], outputs[right], geometry)
    )
    extended = F.pad(features, (0, 1), value=1.0)  # the bias is the weight of a constant feature
    by_image = outputs.new_zeros(outputs.shape)
    by_image.index_add_(0, left, lefts).index_add_(0, right, rights)
    total = by_image.T @ extended.square()
    if cross:
        block = max(1, BLOCK_NUMBERS // extended.shape[1])  # no tensor (p, d, f) is made
        for i, j, mixed in zip(*(x.split(block) for x in (left, right, crossed)), strict=True):
            total += 2 * mixed.T @ (extended[i] * extended[j])
    return total


def _zero() -> Tensor:
    """Return zero on the CPU, which can be added to tensors of any device."""
    return torch.zeros((), dtype=torch.float64, device="cpu")


@dataclass
class PairCurvature:
    """Sums of Hessian diagonals over pairs that match, and over others within the margin.

    Variants are "full", all pairs and terms; "fixed", without mixed derivatives; "positive", only
    pairs that match. Pairs that do not match and are farther apart than the margin of the loss have
    no curvature.
    """

    geometry: HessianGeometry  # see `pair_hessian_blocks`
    variant: Variant
    margin: float
    # Float64: (2, d, f + 1) of pairs that match and of others, and (2,) their numbers.
    sums: Tensor = field(default_factory=_zero)
    counts: Tensor = field(default_factory=_zero)
    # (2,) float64: pairs that were not chosen by their distance, and those within the margin.
    unmined: Tensor = field(default_factory=_zero)

    def add(
        self,
        features: Tensor,
        outputs: Tensor,
        pairs: Tensor,
        match: Tensor,
        counted: Tensor | None = None,
    ) -> None:
        """Add pairs (p, 2) of rows, of which those match where `match`, (p,), is True.

        Where `counted`, (p,), is False, pairs that do not match have weight 0, so that the CPU does
        not wait for a GPU. By default, only those with a curvature are computed.
        """
        features, outputs = features.double(), outputs.double()
        inside = ~match & self._inside(outputs, pairs)
        if counted is not None:
            inside &= counted
        sums = []
        for mask in (match, torch.zeros_like(inside) if self.variant == "positive" else inside):
            chosen, weights = pairs, mask.double()
            if counted is None:
                chosen, weights = pairs[mask], weights[mask]
            diagonal = pair_hessian_diagonal(
                features,
                outputs,
                chosen,
                weights,
                geometry=self.geometry,
                cross=self.variant != "fixed",
            )
            sums.append(diagonal)
        counts = torch.stack([match.sum(), inside.sum()]).double()
        self.sums, self.counts = self.sums + torch.stack(sums), self.counts + counts

    def add_unmined(self, outputs: Tensor, pairs: Tensor) -> None:
        """Add pairs (p, 2) that were not chosen by their distance, with few matches or none."""
        inside = self._inside(outputs, pairs)
        counts = torch.stack([inside.new_full((), len(inside), dtype=torch.int64), inside.sum()])
        self.unmined = self.unmined + counts.double()

    def _inside(self, outputs: Tensor, pairs: Tensor) -> Tensor:
        """Return which pairs are closer than the margin."""
        units = F.normalize(outputs)
        distances: Tensor = (units[pairs[:, 0]] - units[pairs[:, 1]]).norm(dim=1)
        return distances < self.margin

    def all_reduce(self) -> None:
        """Add up the sums of all workers of a training, each of which has added pairs."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for values in (self.sums, self.counts, self.unmined):
                torch.distributed.all_reduce(values)

    def mean(self, negatives_weight: float | None) -> Tensor:
        """Return the Hessian diagonal of the mean loss, (d, f + 1); entries can be negative.

        The weight is that of pairs within the margin that do not match. None is the share of
        unmined pairs there, which gives the Hessian of the mean over all that do not match.
        """
        matching, inside = self.counts.clamp(min=1)
        weight: Tensor | float | None = negatives_weight
        if weight is None:
            weight = self.unmined[1] / self.unmined[0].clamp(min=1)
        mean: Tensor = self.sums[0] / matching - weight * self.sums[1] / inside
        return mean
