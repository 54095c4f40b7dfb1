import numpy as np
import pytest

from rcir.errors import InvalidData
from rcir.risk import SearchResults
from rcir.risk.keys import count_votes, earlier_of_same_key, first_of_each_key

SHAPES = [(1, 1), (7, 1), (20, 12), (9, 70)]


def draw(shape, labels=5, seed=0, stretch=1_000_003):
    """Keys, some rows of which end early."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, labels, shape) * stretch
    ends = rng.integers(1, shape[1] + 1, shape[0])
    keys[np.arange(shape[1]) >= ends[:, None]] = -1
    return keys


def everything(n=20, depth=40, seed=0):
    rng = np.random.default_rng(seed)
    keys = draw((n, depth), seed=seed)
    distances = np.where(keys < 0, np.inf, np.sort(rng.uniform(size=(n, depth)), axis=1))
    candidates = rng.uniform(size=(n, depth))
    return SearchResults(rng.uniform(size=n), depth, distances, keys, candidates)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("labels", [1, 5, 1000])
@pytest.mark.parametrize("stretch", [1, 2**13, 2**16])
def test_earlier_candidates_of_the_same_key_are_counted_one_by_one(shape, labels, stretch):
    keys = draw(shape, labels, stretch=stretch)
    expected = [[row[:k].count(row[k]) for k in range(len(row))] for row in keys.tolist()]
    assert earlier_of_same_key(keys).tolist() == expected


@pytest.mark.parametrize("power", [8, 15, 16, 17, 31, 32, 62])
def test_keys_that_share_their_last_digits_are_different_keys(power):
    keys = np.array([[0, 2**power, -1, 2**power - 1, 0, 2**power, -1, 2**power - 1]])
    assert earlier_of_same_key(keys).tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]
    assert first_of_each_key(keys).tolist() == [[0, 1, 3, -1, -1, -1, -1, -1]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("labels", [1, 5, 1000])
def test_the_first_of_each_key_are_the_columns_of_keys_not_seen_before(shape, labels):
    keys = draw(shape, labels)
    expected = []
    for row in keys.tolist():
        columns = [k for k, key in enumerate(row) if key >= 0 and key not in row[:k]]
        expected.append(columns + [-1] * (len(row) - len(columns)))
    assert first_of_each_key(keys).tolist() == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("labels", [1, 5, 1000])
def test_votes_are_those_of_the_first_thirty(shape, labels):
    keys = draw(shape, labels)
    expected = [[row[:30].count(key) for key in row] for row in keys.tolist()]
    assert count_votes(keys).tolist() == expected
    assert count_votes(keys, columns=3).tolist() == [row[:3] for row in expected]


def test_distinct_rankings_keep_the_nearest_candidate_of_each_key():
    results = everything()
    distinct, columns = results.distinct(), results.key_columns
    assert (len(distinct), distinct.depth) == (20, 40)
    assert distinct.uncertainty.tolist() == results.uncertainty.tolist()
    for i, row in enumerate(results.keys.tolist()):
        firsts = [k for k, key in enumerate(row) if key >= 0 and key not in row[:k]]
        missing = 40 - len(firsts)
        kept = {
            "distances": [*(results.distances[i, k] for k in firsts), *[np.inf] * missing],
            "keys": [*(row[k] for k in firsts), *[-1] * missing],
            "candidate_uncertainty": [
                *(results.candidate_uncertainty[i, k] for k in firsts),
                *[0.0] * missing,
            ],
            "votes": [*(row[:30].count(row[k]) for k in firsts), *[0] * missing],
        }
        assert columns[i].tolist() == firsts + [-1] * missing
        for name, expected in kept.items():
            assert getattr(distinct, name)[i].tolist() == expected, name


def test_distinct_rankings_without_distances_still_end_where_keys_do():
    keys = np.array([[3, 3, 8, 3], [1, 2, 3, 4]])
    distinct = SearchResults(np.zeros(2), 4, keys=keys).distinct()
    assert distinct.distances.tolist() == [[0, 0, np.inf, np.inf], [0, 0, 0, 0]]
    assert distinct.candidate_uncertainty is None


def test_distinct_rankings_of_distinct_rankings_are_the_same():
    once = everything().distinct()
    twice = once.distinct()
    assert twice.key_columns.tolist() == first_of_each_key(once.keys).tolist()
    for name in ("distances", "keys", "candidate_uncertainty", "votes"):
        np.testing.assert_array_equal(getattr(twice, name), getattr(once, name))


def test_distinct_rankings_do_not_change_those_they_come_from():
    results = everything()
    keys, distances = results.keys.copy(), results.distances.copy()
    results.distinct()
    np.testing.assert_array_equal(results.keys, keys)
    np.testing.assert_array_equal(results.distances, distances)


def test_rankings_without_keys_have_no_distinct_ones():
    with pytest.raises(InvalidData, match="no keys"):
        SearchResults(np.zeros(2), 4).distinct()


@pytest.mark.parametrize(
    "rows", [slice(2, 9, 3), np.array([5, 0, 5]), np.arange(20) % 3 == 1], ids=str
)
def test_some_queries_keep_all_that_is_known_of_them(rows):
    results = everything()
    some = results[rows]
    for name in ("uncertainty", "distances", "keys", "candidate_uncertainty"):
        np.testing.assert_array_equal(getattr(some, name), getattr(results, name)[rows])
    assert (some.depth, some.votes) == (40, None)
    assert len(some) == len(np.arange(20)[rows])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_uncertainty_that_is_no_number_is_refused(bad):
    with pytest.raises(InvalidData, match="1 of 3 uncertainties are NaN or infinite"):
        SearchResults(np.array([0.1, bad, 0.3]), 5)


@pytest.mark.parametrize(("uncertainty", "depth"), [(np.zeros((3, 1)), 5), (np.zeros(3), 0)])
def test_uncertainties_of_another_shape_and_no_depth_are_refused(uncertainty, depth):
    with pytest.raises(InvalidData, match="needed are"):
        SearchResults(uncertainty, depth)


@pytest.mark.parametrize("name", ["distances", "keys", "candidate_uncertainty", "votes"])
@pytest.mark.parametrize("shape", [(3,), (3, 4), (2, 5), (5, 3)])
def test_arrays_of_another_shape_are_refused_by_name(name, shape):
    with pytest.raises(InvalidData, match=f"{name} has shape"):
        SearchResults(np.zeros(3), 5, **{name: np.zeros(shape, int)})


def test_queries_without_any_candidate_are_refused():
    distances = np.array([[0.1, 0.2], [np.inf, np.inf]])
    with pytest.raises(InvalidData, match="some queries have no candidate"):
        SearchResults(np.zeros(2), 2, distances)
