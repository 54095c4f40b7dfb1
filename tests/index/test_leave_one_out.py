import numpy as np
import pytest
import torch

from rcir.errors import InvalidData
from rcir.index import leave_one_out, nearest_others


def vectors(n, dim=7, seed=0):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


def brute_force(points):
    """Distances in double precision, each vector's own infinite."""
    points = points.double().numpy()
    distances = np.sqrt(((points[:, None] - points[None]) ** 2).sum(2))
    np.fill_diagonal(distances, np.inf)
    return distances


@pytest.mark.parametrize(("n", "k", "dim"), [(2, 1, 3), (20, 19, 1), (60, 5, 7), (300, 25, 64)])
def test_distances_and_order_are_those_of_brute_force(n, k, dim):
    expected = brute_force(vectors(n, dim))
    distances, positions = nearest_others(vectors(n, dim), k)
    assert distances.shape == positions.shape == (n, k)
    assert (distances.dtype, positions.dtype) == (np.float32, np.int64)
    ordered = np.sort(expected, axis=1)[:, :k]
    np.testing.assert_allclose(distances, ordered, atol=1e-4)
    # Where float32 cannot tell two distances apart the order may differ.
    np.testing.assert_allclose(np.take_along_axis(expected, positions, 1), ordered, atol=1e-4)
    assert all(len(set(row)) == k for row in positions.tolist())
    assert (positions != np.arange(n)[:, None]).all()


@pytest.mark.parametrize("elements", [1, 150, 60 * 60])
def test_the_size_of_a_block_changes_nothing(monkeypatch, elements):
    ordered = np.sort(brute_force(vectors(60)), axis=1)[:, :5]
    monkeypatch.setattr(leave_one_out, "DISTANCES_AT_ONCE", elements)
    distances, positions = nearest_others(vectors(60), 5)
    np.testing.assert_allclose(distances, ordered, atol=1e-4)
    assert (positions != np.arange(60)[:, None]).all()


def test_twins_find_each_other():
    points = vectors(200, 16)
    points[150] = points[3]
    distances, positions = nearest_others(points, 2)
    assert (positions[3, 0], positions[150, 0]) == (150, 3)
    assert max(distances[3, 0], distances[150, 0]) < 5e-3 < distances[:, 1].min()
    assert 3 not in positions[3]


def test_all_vectors_alike_find_any_others():
    distances, positions = nearest_others(torch.ones(6, 2), 5)
    assert (distances == 0).all()
    assert [sorted(row) for row in positions.tolist()] == [
        sorted({*range(6)} - {own}) for own in range(6)
    ]


def test_far_from_the_origin_no_digits_are_lost():
    points = vectors(200, 16) + 1000
    points[150] = points[3]
    distances, positions = nearest_others(points, 3)
    ordered = np.sort(brute_force(points), axis=1)[:, :3]
    np.testing.assert_allclose(distances, ordered, atol=5e-3)
    assert (positions[3, 0], positions[150, 0]) == (150, 3)


def test_the_vectors_are_left_as_they_were():
    points = vectors(30)
    nearest_others(points, 3)
    assert torch.equal(points, vectors(30))


@pytest.mark.parametrize("k", [-1, 0, 5, 9])
def test_more_neighbours_than_there_are_are_refused(k):
    with pytest.raises(InvalidData, match=f"{k} other vectors of 5: from 1 to 4"):
        nearest_others(vectors(5), k)
