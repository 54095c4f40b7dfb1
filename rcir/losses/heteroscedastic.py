"""Heteroscedastic triplet loss: a soft triplet loss that every image may discount, at a price.

Taha, Chen, Misu, Shrivastava and Davis, "Unsupervised data uncertainty learning in visual retrieval
systems", 2019, arXiv 1902.02586. Their regulariser, lambda times the squared norm of the weights,
is the weight decay of the optimizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from rcir.losses.tuples import TupleRows, mean_of_valid, triplet_loss

BOUND = 10.0  # of a log variance, either way


@dataclass(frozen=True)
class HeteroscedasticOptions:
    """The options of the heteroscedastic triplet loss: none, as it is soft and has no margin."""


def bounded_log_variance(values: Tensor) -> Tensor:
    """Any numbers as log variances between -10 and 10, about unchanged near 0.

    The loss of an easy triplet falls without end as its variances go to 0. An arc tangent bounds
    them: beyond a clamp, and soon in a hyperbolic tangent, values have no gradient in float32, and
    would never come back.

    Example:
        >>> import torch
        >>> bounded_log_variance(torch.tensor([-1e9, 0.1, 1e9]))
        tensor([-10.0000,   0.1000,  10.0000])
    """
    slope = math.pi / 2 / BOUND
    return (values * slope).atan() / slope


def heteroscedastic_triplet_loss(
    vectors: tuple[Tensor, Tensor, Tensor], log_variances: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """``1/2 sum_x exp(-s_x) L + 1/2 sum_x s_x`` of each triplet, x its anchor, positive, negative.

    L is the soft triplet loss ``log(1 + exp(|a-p| - |a-n|))``. The sum is least where the variance
    ``exp(s)`` of an image is its expected L; at ``s = 0`` it is 3/2 L. (The printed eq. 12 has the
    inverse of the variance in the logarithm, by which the sum has no least value.)

    Args:
        vectors: of anchor, positive, negative; (..., d), broadcast against each other.
        log_variances: likewise (..., 1).

    Returns:
        (...) losses, of either sign.

    Example:
        >>> import torch
        >>> vectors, s = torch.tensor([[0., 0.], [3., 4.], [0., 5.]]), torch.zeros(3, 1)
        >>> heteroscedastic_triplet_loss(tuple(vectors), tuple(s))  # 3/2 log 2
        tensor(1.0397)
    """
    soft = triplet_loss(*vectors, form="soft")
    a, p, n = (each.squeeze(-1) for each in log_variances)
    return ((-a).exp() + (-p).exp() + (-n).exp()) * soft / 2 + (a + p + n) / 2


def heteroscedastic_tuple_loss(vectors: TupleRows, variance: TupleRows, valid: Tensor) -> Tensor:
    """The loss of each tuple, (b,): the mean over its triplets.

    So each negative answers for its own triplet; in the k-tuples of Taha et al. one loss is shared
    by all images of a tuple. With one negative they are the same.

    Args:
        vectors: of the tuples.
        variance: of the tuples, (..., 1), above 0.
        valid: (b, j) bool; negatives that count. Each anchor has at least one.
    """
    log_variances = TupleRows(*(each.log() for each in variance))
    losses = heteroscedastic_triplet_loss(vectors, log_variances)
    return mean_of_valid(losses, valid)
