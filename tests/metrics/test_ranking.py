"""Rankings against loops."""

import numpy as np
import pytest

from rcir.metrics import first_match_ranks, recall_at_k


def looped_ranks(relevant):
    ranks = []
    for row in relevant:
        rank = np.inf
        for position, match in enumerate(row, 1):
            if match:
                rank = position
                break
        ranks.append(rank)
    return np.array(ranks)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
def test_first_match_ranks(share):
    relevant = np.random.default_rng(0).random((200, 17)) < share
    np.testing.assert_array_equal(first_match_ranks(relevant), looped_ranks(relevant))


def test_recall_counts_ranks_up_to_k():
    ranks = np.array([1, 2, 2, 3, 5, np.inf, np.inf, 1])
    assert [recall_at_k(ranks, k) for k in (1, 2, 3, 4, 5, 100)] == [
        2 / 8,
        4 / 8,
        5 / 8,
        5 / 8,
        6 / 8,
        6 / 8,
    ]
