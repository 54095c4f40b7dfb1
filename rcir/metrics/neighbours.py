"""Classification by the nearest neighbours."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.metrics.checks import Integers, check_k


def knn_correct(neighbour_labels: Integers, labels: Integers, k: int = 5) -> NDArray[np.bool_]:
    """Whether the k nearest neighbours of each item vote for its class.

    The most frequent class wins; of several, that of the nearest neighbour among them (Oh et al.,
    ICLR 2019, with k = 5). The mean is the accuracy.

    Args:
        neighbour_labels: (n, at least k) of each item's neighbours, nearest first, the item itself
            left out.
        labels: (n,) of the items.
        k: number of neighbours that vote, at least 1.

    Returns:
        (n,) bool.

    Raises:
        InvalidData: shapes do not fit, or there are fewer than k neighbours.

    Example:
        >>> neighbours = np.array([[3, 8, 8, 3, 1], [2, 2, 5, 5, 5]])
        >>> knn_correct(neighbours, np.array([3, 2])).tolist()
        [True, False]
    """
    if neighbour_labels.ndim != 2 or labels.shape != neighbour_labels.shape[:1]:
        raise InvalidData(
            f"neighbour_labels have shape {neighbour_labels.shape}, labels {labels.shape}; needed "
            "are (n, at least k) and (n,)"
        )
    check_k(k, neighbour_labels.shape[1])
    voters = neighbour_labels[:, :k]
    votes = (voters[:, :, None] == voters[:, None, :]).sum(axis=2)
    winner = np.take_along_axis(voters, votes.argmax(axis=1)[:, None], axis=1)
    return np.asarray(winner[:, 0] == labels, np.bool_)
