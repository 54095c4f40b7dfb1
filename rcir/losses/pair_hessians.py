"""Second derivatives of the squared distance of a pair, by the last linear layer of the network.

Warburg, Miani, Brack and Hauberg, "Bayesian metric learning for uncertainty quantification in image
retrieval", 2023, arXiv 2302.01332, appendix. The function is ``|u_i - u_j|^2 / 2`` of the unit
vectors ``u = z / |z|`` of ``z = W x + b``; the contrastive loss of form "squared-gap" is plus or
minus it, wherever it has a gradient.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor
from torch.nn import functional as F

from rcir.errors import InvalidConfig

HessianGeometry = Literal["euclidean", "arccos"]
VALUES = 1 << 24  # of a temporary tensor of pairs: their products of features are made in blocks


def pair_hessian_blocks(
    first: Tensor, second: Tensor, geometry: HessianGeometry
) -> tuple[Tensor, Tensor, Tensor]:
    """Diagonals of the blocks of the Hessian by (z_i, z_j), of each pair.

    Args:
        first, second: (p, d), z_i and z_j before they are scaled to unit length; none is 0.
        geometry: "euclidean", the scaling is a layer of the network, which is linearised
            (generalised Gauss-Newton); "arccos", it is part of the loss, and the Hessian is exact.

    Returns:
        Diagonals of the blocks (i, i), (j, j) and (i, j), each (p, d).

    Raises:
        InvalidConfig: there is no such geometry.
    """
    if geometry not in get_args(HessianGeometry):
        raise InvalidConfig(
            f"Hessian {geometry!r} is unknown; choose one of {', '.join(get_args(HessianGeometry))}"
        )
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
    geometry: HessianGeometry = "euclidean",
    cross: bool = True,
) -> Tensor:
    """Diagonal of the Hessian of a weighted sum over pairs, by the weights of the last layer.

    Args:
        features: (n, f), x, what the layer is given.
        outputs: (n, d), z = W x + b, before they are scaled to unit length.
        pairs: (p, 2) int64, rows of both.
        weights: (p,) of the pairs; below 0 for pairs that are pushed apart.
        geometry: see `pair_hessian_blocks`.
        cross: also what both of a pair have to do with each other; without, each takes the other
            for constant, which leaves loss and gradient as they are ("fix" in the paper).

    Returns:
        (d, f + 1), of W, and in the last column of b. No tensor (p, d, f) is made.

    Example:
        >>> import torch
        >>> layer = torch.tensor([[1., .5, .1], [0., 2., -.2]])  # W, and b
        >>> x = torch.tensor([[1., 2.], [2., 1.]])
        >>> z = x @ layer[:, :2].T + layer[:, 2]
        >>> pair_hessian_diagonal(x, z, torch.tensor([[0, 1]]), torch.ones(1))
        tensor([[0.0402, 0.0649, 0.0080],
                [0.1790, 0.0134, 0.0281]])
    """
    left, right = pairs.T
    own, others, crossed = (
        block * weights[:, None]
        for block in pair_hessian_blocks(outputs[left], outputs[right], geometry)
    )
    extended = F.pad(features, (0, 1), value=1.0)  # the bias is the weight of a constant feature
    of_images = outputs.new_zeros(outputs.shape)
    of_images.index_add_(0, left, own).index_add_(0, right, others)
    total = of_images.T @ extended.square()
    if cross:
        block = max(1, VALUES // extended.shape[1])
        for i, j, each in zip(
            left.split(block), right.split(block), crossed.split(block), strict=True
        ):
            total += 2 * each.T @ (extended[i] * extended[j])
    return total
