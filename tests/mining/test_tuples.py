"""Mined tuples, against a loop over the anchors on integer grids, where distances are exact."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from rcir.data.relevance import SameLabel, SharedLabel, WithinRadius, find_query_rows
from rcir.errors import InvalidConfig, InvalidData
from rcir.mining import MiningConfig, mine

POSITIVES = ("nearest", "random", "farthest")
NEGATIVES = ("hardest", "margin-violating", "semi-hard", "top-random")
RULES = list(itertools.product(POSITIVES, NEGATIVES))
# A coarse grid has many equal distances; large sets are searched by groups of columns first.
GRIDS = {"large, fine": (1650, 40), "large, coarse": (1650, 6), "small, coarse": (150, 5)}
KINDS = ("same label", "shared label", "radius", "few negatives", "separate database")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def problem(grid, kind):
    """Vectors, their relevance, and as (n, n) tables: matches, positives, and what is searched."""
    n, steps = GRIDS[grid]
    rng = np.random.default_rng(3)
    cache = rng.integers(0, steps, (n, 3)).astype(np.float32)
    places = rng.uniform(0, 100, (n, 2))
    apart = np.hypot(*(places[:, None] - places[None]).transpose(2, 0, 1))
    searched = np.ones(n, bool)
    if kind == "same label":
        labels = np.array([*rng.integers(0, 6, n - 2), 6, 7])
        relevance, matches = SameLabel(labels), labels[:, None] == labels
    elif kind == "few negatives":
        labels = np.arange(n) // (n - 3)
        relevance, matches = SameLabel(labels), labels[:, None] == labels
    elif kind == "shared label":
        table = rng.random((n, 9)) < rng.choice([0, 0.1, 0.3], n)[:, None]
        relevance = SharedLabel.from_lists([np.flatnonzero(row).tolist() for row in table], 9)
        matches = table.astype(int) @ table.T > 0
    elif kind == "radius":
        relevance, matches = WithinRadius(places, 25.0), apart <= 25
    else:
        searched = rng.random(n) < 0.6
        relevance = WithinRadius(places, 25.0, 10.0, searched)
        return cache, relevance, apart <= 25, (apart <= 10) & searched, searched
    return cache, relevance, matches, matches, searched


def check(tuples, anchors, config, cache, matches, positives, searched):
    """Compare the tuples with what a loop over the anchors finds."""
    rows = dict(zip(tuples.anchor.tolist(), range(len(tuples)), strict=True))
    assert list(rows) == [row for row in anchors.tolist() if row in rows]
    for anchor in anchors.tolist():
        d = np.sqrt(((cache.astype(float) - cache[anchor]) ** 2).sum(1))
        good = np.flatnonzero(positives[anchor] & (np.arange(len(cache)) != anchor))
        best = np.argmax if config.positive == "farthest" else np.argmin
        if not len(good) or (not searched.all() and searched[anchor]):
            assert anchor not in rows
            continue
        row = rows.get(anchor)
        if row is None and config.positive == "random":
            continue  # a positive that leaves no negative may have been drawn
        positive = good[best(d[good])] if row is None else int(tuples.positive[row])
        assert positive in good
        assert config.positive == "random" or positive == good[best(d[good])]
        allowed = ~matches[anchor] & searched
        if config.negatives in ("margin-violating", "semi-hard"):
            allowed &= d < d[positive] + config.margin
        if config.negatives == "semi-hard":
            allowed &= d > d[positive]
        allowed = np.flatnonzero(allowed)
        allowed = allowed[np.argsort(d[allowed], kind="stable")].tolist()
        if row is None:
            assert not allowed
            continue
        valid = tuples.valid[row]
        chosen = tuples.negatives[row][valid].tolist()
        assert (tuples.negatives[row][~valid] == anchor).all()
        if config.negatives == "top-random":
            assert len(set(chosen)) == len(chosen) == min(config.num_negatives, len(allowed)) > 0
            assert set(chosen) <= set(allowed[: config.pool])
        else:
            assert chosen == allowed[: config.num_negatives]
            assert chosen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", GRIDS)
def test_tuples_agree_with_a_loop_over_the_anchors(grid, kind):
    cache, relevance, *tables = problem(grid, kind)
    anchors = np.random.default_rng(0).permutation(len(cache))[:20]
    anchors = np.unique([*anchors, len(cache) - 1, 0])[::-1].copy()
    found = 0
    for positive, negatives in RULES:
        config = MiningConfig(positive, negatives, num_negatives=4, pool=7, margin=1.0)
        tuples = mine(
            torch.from_numpy(cache), relevance, torch.from_numpy(anchors), config, generator()
        )
        check(tuples, anchors, config, cache, *tables)
        found += len(tuples)
    assert found > 20


def test_the_tuples_of_parts_are_those_of_the_whole():
    config = MiningConfig("random", "top-random", num_negatives=3, pool=8)
    cache, anchors = torch.from_numpy(CACHE), torch.arange(50)
    whole, *parts = (
        mine(cache, SameLabel(LABELS), anchors, config, generator(), part)
        for part in (slice(None), slice(0, 7), slice(7, 50), slice(50, 60))
    )
    for name in ("anchor", "positive", "negatives", "valid"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(joined, getattr(whole, name))


def test_tuples_do_not_depend_on_the_default_device():
    cache = torch.randn(60, 4, generator=generator())
    for positive, negatives in RULES:
        config = MiningConfig(positive, negatives, num_negatives=4, pool=7, margin=1.0)
        arguments = cache, SameLabel(np.arange(60) % 6), torch.arange(60), config
        expected = mine(*arguments, generator())
        with torch.device("meta"):
            tuples = mine(*arguments, generator())
        assert torch.equal(tuples.negatives, expected.negatives)
        assert torch.equal(tuples.positive, expected.positive)


@pytest.mark.parametrize("positive", ["farthest", "random"])
def test_tuples_of_very_many_anchors_agree_with_a_loop_over_some_of_them(positive):
    rng = np.random.default_rng(0)
    cache, n = rng.integers(0, 99, (3000, 2)).astype(np.float32), 3000
    labels = rng.integers(0, 450, n)
    config = MiningConfig(positive, "top-random", num_negatives=3, pool=5)
    tuples = mine(torch.from_numpy(cache), SameLabel(labels), torch.arange(n), config, generator())
    part = slice(-60, None)
    anchors = tuples.anchor[part].numpy()
    matches = labels[:, None] == labels
    check(tuples[part], anchors, config, cache, matches, matches, np.ones(n, bool))
    if positive == "random":
        places = []
        for anchor, match in zip(tuples.anchor.tolist(), tuples.positive.tolist(), strict=True):
            others = np.flatnonzero(labels == labels[anchor])
            others = others[others != anchor].tolist()
            places.append((others.index(match) + 0.5) / len(others))
        for half in np.array_split(places, 2):  # uniform, so that the error of a mean is 0.007
            assert np.mean(half) == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize(("spread", "dim"), [(1e-5, 4), (1e-3, 128)])
def test_nearly_identical_images_are_ranked_correctly(spread, dim):
    """Their squared distances are below the rounding of a product of the vectors, or near it."""
    rng = np.random.default_rng(0)
    cache = (1 + spread * rng.standard_normal((3000, dim))).astype(np.float32)
    labels = rng.integers(0, 600, 3000)
    config = MiningConfig("nearest", "hardest", num_negatives=3)
    tuples = mine(torch.from_numpy(cache), SameLabel(labels), torch.arange(40), config, generator())
    for row, anchor in enumerate(tuples.anchor.tolist()):
        d = np.sqrt(((cache.astype(float) - cache[anchor]) ** 2).sum(1))
        same = labels == labels[anchor]
        np.testing.assert_allclose(d[tuples.positive[row]], np.sort(d[same])[1], rtol=1e-5)
        np.testing.assert_allclose(d[tuples.negatives[row]], np.sort(d[~same])[:3], rtol=1e-5)


def test_an_encoder_that_gives_one_vector_for_all_images():
    cache, labels = torch.ones(2000, 4), SameLabel(np.arange(2000) % 10)
    hardest = MiningConfig("farthest", "hardest", num_negatives=3)
    tuples = mine(cache, labels, torch.arange(20), hardest, generator())
    assert tuples.positive.tolist() == [10 + row if row < 10 else row - 10 for row in range(20)]
    assert tuples.negatives[:3].tolist() == [[1, 2, 3], [0, 2, 3], [0, 1, 3]]
    semi_hard = MiningConfig("farthest", "semi-hard", num_negatives=3)
    assert len(mine(cache, labels, torch.arange(20), semi_hard, generator())) == 0


@pytest.mark.parametrize("positive", POSITIVES)
@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_sets_smaller_than_the_number_of_negatives(n, positive):
    labels = SameLabel(np.array([0, 0, 1, 1, 1])[:n])
    config = MiningConfig(positive, "hardest", num_negatives=9)
    tuples = mine(torch.rand(n, 2), labels, torch.arange(n), config, generator())
    assert len(tuples) == (5 if n == 5 else 0)
    assert tuples.valid.sum(1).tolist() == [3, 3, 2, 2, 2][: len(tuples)]
    assert tuples.negatives.shape == (len(tuples), 9)


def test_nan_embeddings_give_no_tuples():
    cache = torch.full((30, 4), torch.nan)
    for positive, negatives in RULES:
        config = MiningConfig(positive, negatives)
        labels = SameLabel(np.arange(30) % 3)
        assert len(mine(cache, labels, torch.arange(30), config, generator())) == 0


# Four classes of several images and two images that are alone in their class.
LABELS = np.array([0, 1, 2, 3] * 12 + [4, 5])
CACHE = np.random.default_rng(0).permutation(50 * 50)[:50].astype(np.float32)[:, None]


def tuples_of(config, anchors, seed=0):
    return mine(
        torch.from_numpy(CACHE), SameLabel(LABELS), torch.tensor(anchors), config, generator(seed)
    )


def test_no_anchors_and_a_single_class_give_no_tuples():
    config = MiningConfig("nearest", "hardest")
    assert tuples_of(config, [7, 49, 3, 20]).anchor.tolist() == [7, 3, 20]  # 49 matches nothing
    assert len(tuples_of(config, np.empty(0, np.int64))) == 0
    labels = SameLabel(np.zeros(20, np.int64))
    assert len(mine(torch.rand(20, 4), labels, torch.arange(20), config, generator())) == 0


@pytest.mark.parametrize("negatives", ["hardest", "top-random"])
def test_random_choices_are_decided_by_the_generator(negatives):
    config = MiningConfig("random", negatives, num_negatives=3, pool=10)
    first, again, other = (tuples_of(config, range(50), seed) for seed in (1, 1, 2))
    assert torch.equal(first.positive, again.positive)
    assert torch.equal(first.negatives, again.negatives)
    assert not torch.equal(first.positive, other.positive)
    assert torch.equal(first.negatives, other.negatives) == (negatives == "hardest")


def test_random_choices_are_uniform():
    config = MiningConfig("random", "top-random", num_negatives=5, pool=10)
    tuples = tuples_of(config, [0] * 400)
    # Each of the ten nearest is drawn half of the time: 200 of 400, standard deviation 10.
    others = np.flatnonzero(LABELS != 0)
    pool = others[np.argsort(np.abs(CACHE[others, 0] - CACHE[0, 0]))[:10]]
    negatives = np.bincount(tuples.negatives.flatten(), minlength=50)
    assert np.abs(negatives[pool] - 200).max() < 45
    positives = np.bincount(tuples.positive, minlength=50)[4:48:4]
    assert np.abs(positives - 400 / 11).max() < 5 * np.sqrt(400 / 11)
    assert positives.sum() == 400


@pytest.mark.parametrize("choice", ["positive", "negatives"])
def test_a_choice_that_is_left_open_cannot_be_mined(choice):
    with pytest.raises(InvalidConfig, match="both"):
        tuples_of(replace(MiningConfig("nearest", "hardest"), **{choice: None}), [0])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_negatives": 0}, "num_negatives"),
        ({"num_negatives": 11, "pool": 10}, "pool"),
        ({"margin": -0.1}, "margin"),
        ({"margin": float("nan")}, "margin"),
        ({"positive": "easiest"}, "farthest"),
        ({"negatives": "hard"}, "semi-hard"),
        ({"cache": "some"}, "sampled"),
        ({"scope": "step"}, "epoch"),
        ({"sample": 1}, "sample"),
        ({"refresh": 0}, "refresh"),
        ({"cache": "sampled", "scope": "batch"}, "cache"),
        ({"samples_per_class": 1, "scope": "batch"}, "samples_per_class"),
        ({"samples_per_class": 4}, "scope"),
    ],
    ids=str,
)
def test_invalid_configurations_are_refused(options, word):
    with pytest.raises(InvalidConfig, match=word):
        MiningConfig(**options)


def test_a_subset_of_places_keeps_radii_and_roles():
    rng = np.random.default_rng(5)
    places, database = rng.uniform(0, 90, (160, 2)), rng.random(160) < 0.6
    rows = np.array([5, 3, 90, 2])
    part = WithinRadius(places, 25.0, 10.0, database).subset(rows)
    assert (part.near, part.radius) == (10.0, 25.0)
    assert part.database.tolist() == database[rows].tolist()
    assert find_query_rows(part).tolist() == np.flatnonzero(~database[rows]).tolist()
    for near in (0.0, -1.0, 25.1, float("nan")):
        with pytest.raises(InvalidData, match="near"):
            WithinRadius(places, 25.0, near, database)
    with pytest.raises(InvalidData, match="database"):
        WithinRadius(places, 25.0, None, database[:-1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_a_cuda_device_finds_what_the_cpu_finds(kind):
    cache, relevance, *_ = problem("large, coarse", kind)
    anchors = torch.arange(99)
    for positive, negatives in RULES:
        config = MiningConfig(positive, negatives, num_negatives=4, pool=7, margin=1.0)
        cpu, cuda = (
            mine(torch.from_numpy(cache).to(device), relevance, anchors, config, generator())
            for device in ("cpu", "cuda")
        )
        for name in ("anchor", "positive", "negatives", "valid"):
            assert torch.equal(getattr(cpu, name), getattr(cuda, name).cpu())
