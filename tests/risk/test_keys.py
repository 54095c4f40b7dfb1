"""Which candidate is the first of its key, and how many vote for it, against plain loops."""

import numpy as np
import pytest

from rcir.risk.keys import VOTERS, count_votes, first_of_each_key

SPANS = [(0, 3), (0, 40), (-1, 30), (-1, 10**6), (-1, 0), (5, 6), (-(2**40), 2**40)]


@pytest.mark.parametrize(("low", "high"), SPANS)
@pytest.mark.parametrize(("n", "depth"), [(30, 60), (1, 200), (5, 1)])
@pytest.mark.parametrize("layout", ["C", "F"])
def test_keys_are_found_and_counted_as_by_loops(low, high, n, depth, layout):
    rng = np.random.default_rng(n)
    keys = np.asarray(rng.integers(low, high, (n, depth)), order=layout)
    first = first_of_each_key(keys)
    votes, few = count_votes(keys), count_votes(keys, columns=3)
    for row, theirs in enumerate(keys.tolist()):
        expected = [theirs.index(key) for key in dict.fromkeys(theirs) if key >= 0]
        assert first[row].tolist() == expected + [-1] * (depth - len(expected))
        assert votes[row].tolist() == [theirs[:VOTERS].count(key) for key in theirs]
        assert few[row].tolist() == votes[row, :3].tolist()
