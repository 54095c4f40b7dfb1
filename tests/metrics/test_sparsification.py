"""Sparsification curves against a loop and against what must hold."""

from itertools import pairwise

import numpy as np
import pytest

from rcir.errors import InvalidData
from rcir.metrics import sparsification


def looped(uncertainty, performance):
    """The curve and its area, one percent at a time."""
    order = sorted(range(len(uncertainty)), key=lambda i: (-uncertainty[i], i))
    curve = [
        sum(rest := [performance[i] for i in order[len(order) * r // 100 :]]) / len(rest)
        for r in range(99)
    ]
    return curve, sum((a + b) / 2 for a, b in pairwise(curve)) / 98


@pytest.mark.parametrize("n", [1, 7, 100, 733])
def test_curve_and_areas_are_those_of_a_loop(n):
    rng = np.random.default_rng(n)
    uncertainty, performance = rng.integers(0, 40, n) / 8, rng.random(n)
    found = sparsification(uncertainty, performance)
    curve, area = looped(uncertainty, performance)
    np.testing.assert_allclose(found.curve, curve)
    assert found.ausc == pytest.approx(area)
    best, most = looped(-performance, performance)
    np.testing.assert_allclose(found.oracle_curve, best)
    assert found.oracle == pytest.approx(most)
    assert found.random == pytest.approx(performance.mean())
    np.testing.assert_allclose(found.fractions, np.arange(99) / 100)


def test_a_model_that_is_always_right_has_area_1():
    found = sparsification(np.random.default_rng(0).random(150), np.ones(150, bool))
    assert found.ausc == pytest.approx(1, abs=1e-12)
    assert found.oracle == pytest.approx(1, abs=1e-12)


def test_a_better_order_has_more_area():
    rng = np.random.default_rng(1)
    chance = rng.random(5000)
    right = rng.random(5000) < chance
    good, none = sparsification(1 - chance, right), sparsification(rng.random(5000), right)
    assert good.oracle > good.ausc > none.ausc + 0.1
    assert none.ausc == pytest.approx(none.random, abs=0.03)
    assert sparsification(chance, right).ausc < none.ausc - 0.1


def test_what_has_no_curve_is_refused():
    with pytest.raises(InvalidData, match=r"uncertainty \(3,\), performance \(2,\)"):
        sparsification(np.zeros(3), np.zeros(2))
    with pytest.raises(InvalidData, match="1 of 2 values of performance are NaN"):
        sparsification(np.zeros(2), np.array([1, np.nan]))
    with pytest.raises(InvalidData, match="n >= 1"):
        sparsification(np.zeros(0), np.zeros(0))
