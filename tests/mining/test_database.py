"""Places of which some are searched and others ask, against a loop over them."""

import itertools

import numpy as np
import pytest
import torch

from rcir.data.within_radius import WithinRadius, asking
from rcir.errors import InvalidData
from rcir.mining import MiningConfig, mine, sample_images, search

N = 160
RNG = np.random.default_rng(5)
VECTORS = RNG.normal(size=(N, 3)).astype(np.float32)
PLACES = RNG.uniform(0, 90, (N, 2))
DATABASE = RNG.random(N) < 0.6
APART = np.hypot(*(PLACES[:, None] - PLACES[None]).transpose(2, 0, 1))
BETWEEN = np.sqrt(((VECTORS[:, None].astype(float) - VECTORS[None]) ** 2).sum(-1))


def relevance(near=10.0):
    return WithinRadius(PLACES, 25.0, near, DATABASE)


def mined(positive, negatives):
    config = MiningConfig(positive, negatives, num_negatives=4, pool=7, margin=0.5)
    generator = torch.Generator().manual_seed(0)
    return mine(torch.from_numpy(VECTORS), relevance(), torch.arange(N), config, generator)


@pytest.mark.parametrize(("group", "extra"), [(64, 16), (2, 0)])
@pytest.mark.parametrize(
    ("positive", "negatives"),
    list(
        itertools.product(
            ("nearest", "random", "farthest"),
            ("hardest", "margin-violating", "semi-hard", "top-random"),
        )
    ),
)
def test_anchors_ask_and_all_others_are_searched(positive, negatives, group, extra, monkeypatch):
    monkeypatch.setattr(search, "GROUP", group)
    monkeypatch.setattr(search, "EXTRA", extra)
    tuples = mined(positive, negatives)
    found = dict(zip(tuples.anchor.tolist(), range(len(tuples)), strict=True))
    assert len(found) > 20
    for anchor in range(N):
        good = np.flatnonzero(DATABASE & (APART[anchor] <= 10))
        far = np.flatnonzero(DATABASE & (APART[anchor] > 25))
        far = far[np.argsort(BETWEEN[anchor, far], kind="stable")]
        if DATABASE[anchor] or not len(good):
            assert anchor not in found
            continue
        if anchor not in found:
            assert negatives in ("margin-violating", "semi-hard")
            continue
        row = found[anchor]
        taken = int(tuples.positive[row])
        assert taken in good
        if positive != "random":
            best = np.argmin if positive == "nearest" else np.argmax
            assert taken == good[best(BETWEEN[anchor, good])]
        reach = BETWEEN[anchor, taken]
        if negatives in ("margin-violating", "semi-hard"):
            far = far[BETWEEN[anchor, far] < reach + 0.5]
        if negatives == "semi-hard":
            far = far[BETWEEN[anchor, far] > reach]
        chosen = tuples.negatives[row][tuples.valid[row]].tolist()
        if negatives == "top-random":
            assert set(chosen) <= set(far[:7].tolist())
            assert len(chosen) == min(4, len(far))
        else:
            assert chosen == far[:4].tolist()


def test_without_a_smaller_radius_all_matches_are_positives():
    plain = WithinRadius(PLACES, 25.0, None, DATABASE)
    expected = DATABASE[None] & ~DATABASE[:, None] & (APART <= 25)
    rows, columns = np.indices((N, N))
    np.testing.assert_array_equal(
        plain.positives(rows.ravel(), columns.ravel()).reshape(N, N), expected
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_has_those_that_ask_with_positives_among_those_that_are_searched(seed):
    rows = sample_images(relevance(), 60, np.random.default_rng(seed))
    assert len(rows) == len(set(rows)) == 60
    anchors, held = rows[~DATABASE[rows]], rows[DATABASE[rows]]
    served = [(APART[anchor, held] <= 10).any() for anchor in anchors]
    assert len(anchors) >= 15
    assert np.sum(np.logical_not(served)) <= 1


def test_roles_follow_the_images():
    some = np.array([5, 3, 90, 2])
    part = relevance().subset(some)
    assert (part.near, part.radius) == (10.0, 25.0)
    assert part.database.tolist() == DATABASE[some].tolist()
    assert asking(part).tolist() == np.flatnonzero(~DATABASE[some]).tolist()
    assert asking(WithinRadius(PLACES, 25.0)).tolist() == list(range(N))


@pytest.mark.parametrize("near", [0.0, -1.0, 25.1, float("nan")])
def test_a_radius_of_positives_out_of_range_is_refused(near):
    with pytest.raises(InvalidData, match="near is"):
        relevance(near)


def test_roles_of_another_number_of_images_are_refused():
    with pytest.raises(InvalidData, match="say of each whether it is searched"):
        WithinRadius(PLACES, 25.0, None, DATABASE[:-1])
