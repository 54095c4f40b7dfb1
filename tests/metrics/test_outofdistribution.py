"""Areas against known values and against counting pairs."""

import numpy as np
import pytest

from rcir.errors import InvalidData
from rcir.metrics import OutOfDistribution


def test_known_areas():
    inside, outside = np.array([0.1, 0.2, 0.35, 0.8]), np.array([0.3, 0.7, 0.9])
    found = OutOfDistribution.of(inside, outside)
    assert found.auroc == pytest.approx(0.75)
    assert found.auprc == pytest.approx(0.7555556, abs=1e-7)
    assert found.auprc_trapezoid == pytest.approx(0.7111111, abs=1e-7)


def test_auroc_counts_pairs_and_like_values_half():
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(0, 9, 120), rng.integers(3, 12, 80)
    above = outside[:, None] > inside
    same = outside[:, None] == inside
    found = OutOfDistribution.of(inside, outside)
    assert found.auroc == pytest.approx((above + same / 2).mean())
    steps, recalled = 0.0, 0.0
    for level in sorted(set(outside.tolist()), reverse=True):
        hits = (outside >= level).sum()
        recall = hits / len(outside)
        steps += (recall - recalled) * hits / (hits + (inside >= level).sum())
        recalled = recall
    assert found.auprc == pytest.approx(steps)


@pytest.mark.parametrize(
    ("inside", "outside", "message"),
    [([], [1.0], r"inside \(0,\)"), ([1.0], [], r"outside \(0,\)"), ([1.0], [np.nan], "NaN")],
)
def test_what_has_no_area_is_refused(inside, outside, message):
    with pytest.raises(InvalidData, match=message):
        OutOfDistribution.of(np.array(inside), np.array(outside))
