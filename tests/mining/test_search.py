import itertools

import numpy as np
import pytest
import torch

from rcir.data.relevance import SameLabel, SharedLabel
from rcir.data.within_radius import WithinRadius
from rcir.mining import MiningConfig, mine, search

POSITIVES = ("nearest", "random", "farthest")
NEGATIVES = ("hardest", "margin-violating", "semi-hard", "top-random")
N = 150
RNG = np.random.default_rng(3)
# Whole numbers: many distances are equal, and all are exact.
GRID = RNG.integers(0, 5, (N, 3)).astype(np.float32)
LABELS = np.array([*RNG.integers(0, 6, N - 2), 6, 7])
LISTS = [RNG.choice(9, RNG.integers(0, 4), replace=False).tolist() for _ in range(N)]
PLACES = RNG.uniform(0, 100, (N, 2))
ANCHORS = np.append(RNG.permutation(N), 5)
KINDS = {
    "same label": (SameLabel(LABELS), lambda a, b: LABELS[a] == LABELS[b]),
    "shared label": (
        SharedLabel.of_lists(LISTS, 9),
        lambda a, b: not set(LISTS[a]).isdisjoint(LISTS[b]),
    ),
    "radius": (
        WithinRadius(PLACES, 25.0),
        lambda a, b: np.hypot(*(PLACES[a] - PLACES[b])) <= 25,
    ),
    # Nearly all match, so that there are few negatives.
    "few negatives": (SameLabel(np.arange(N) // (N - 3)), lambda a, b: (a < N - 3) == (b < N - 3)),
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def distances(cache, anchor):
    return np.sqrt(((cache.astype(np.float64) - cache[anchor]) ** 2).sum(1))


def naive(cache, matches, anchor, config, positive=None):
    """The positive, unless given, and the negatives that may be taken, by distance, then row."""
    d = distances(cache, anchor)
    rows = sorted(range(len(cache)), key=lambda row: (d[row], row))
    own = [row for row in rows if row != anchor and matches(anchor, row)]
    if not own:
        return None, []
    if config.positive == "farthest":
        own = sorted(own, key=lambda row: (-d[row], row))
    positive = own[0] if positive is None else positive
    others = [row for row in rows if not matches(anchor, row)]
    if config.negatives in ("margin-violating", "semi-hard"):
        others = [row for row in others if d[row] < d[positive] + config.margin]
    if config.negatives == "semi-hard":
        others = [row for row in others if d[row] > d[positive]]
    return positive, others


@pytest.mark.parametrize(("group", "extra"), [(64, 16), (2, 1), (7, 0)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("positive", "negatives"), list(itertools.product(POSITIVES, NEGATIVES)))
def test_a_loop_over_the_anchors_finds_the_same(
    positive, negatives, kind, group, extra, monkeypatch
):
    monkeypatch.setattr(search, "GROUP", group)
    monkeypatch.setattr(search, "EXTRA", extra)
    relevance, matches = KINDS[kind]
    config = MiningConfig(positive, negatives, num_negatives=4, pool=7, margin=1.0)
    tuples = mine(torch.from_numpy(GRID), relevance, torch.from_numpy(ANCHORS), config, generator())
    assert tuples.negatives.shape == tuples.valid.shape == (len(tuples), 4)
    assert 0 < len(tuples) <= len(ANCHORS)
    found = dict(zip(tuples.anchor.tolist(), range(len(tuples)), strict=False))
    order = [row for row in ANCHORS.tolist() if row in found]
    assert tuples.anchor.tolist() == order
    for anchor in ANCHORS.tolist():
        first, others = naive(GRID, matches, anchor, config)
        if anchor not in found:
            # A random positive may be one that leaves no negative.
            assert first is None or not others or positive == "random"
            continue
        chosen = int(tuples.positive[found[anchor]])
        if positive == "random":
            assert matches(anchor, chosen)
            assert chosen != anchor
            others = naive(GRID, matches, anchor, config, chosen)[1]
        else:
            assert chosen == first
        assert others
        valid = tuples.valid[found[anchor]]
        kept = tuples.negatives[found[anchor]][valid].tolist()
        assert (tuples.negatives[found[anchor]][~valid] == anchor).all()
        if negatives == "top-random":
            assert len(set(kept)) == len(kept) == min(4, len(others))
            assert set(kept) <= set(others[:7])
        else:
            assert kept == others[:4]


def clusters(n, dim, each=5, noise=1.0, seed=0):
    """Unit vectors around the centres of their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(n) // each
    centres = rng.standard_normal((n // each + 1, dim))
    cache = centres[labels] + noise * rng.standard_normal((n, dim))
    return (cache / np.linalg.norm(cache, axis=1, keepdims=True)).astype(np.float32), labels


@pytest.mark.parametrize("negatives", NEGATIVES[:3])
def test_many_images_are_searched_by_the_product_alone(negatives, monkeypatch):
    """Nearly no anchor of ordinary embeddings needs the slow search of all images."""
    slow, slowly = [], search.Search._slowly

    def counted(self, rows, reach, config):
        slow.append(len(rows))
        return slowly(self, rows, reach, config)

    monkeypatch.setattr(search.Search, "_slowly", counted)
    cache, labels = clusters(6000, 32)
    config = MiningConfig("farthest", negatives, num_negatives=5)
    anchors = np.random.default_rng(1).choice(6000, 100, replace=False)
    tuples = mine(
        torch.from_numpy(cache), SameLabel(labels), torch.from_numpy(anchors), config, generator()
    )
    assert sum(slow) <= 1
    assert len(tuples) > 25
    for anchor, positive, found, valid in zip(
        *(getattr(tuples, name).tolist() for name in ("anchor", "positive", "negatives", "valid")),
        strict=True,
    ):
        first, others = naive(cache, lambda a, b: labels[a] == labels[b], anchor, config)
        d = distances(cache, anchor)
        np.testing.assert_allclose(d[positive], d[first], rtol=1e-6)
        kept = [row for row, is_valid in zip(found, valid, strict=True) if is_valid]
        np.testing.assert_allclose(d[kept], d[others[:5]], rtol=1e-6)


@pytest.mark.parametrize("positive", POSITIVES)
@pytest.mark.parametrize("negatives", NEGATIVES)
def test_blocks_decide_nothing(positive, negatives, monkeypatch):
    cache, labels = clusters(250, 8)
    config = MiningConfig(positive, negatives, num_negatives=3)

    def mined():
        arguments = torch.from_numpy(cache), SameLabel(labels), torch.arange(250)
        return mine(*arguments, config, generator())

    whole = mined()
    for elements, pairs in ((250 * 250, 1), (250 * 33, 250 * 5), (1, 1 << 20)):
        monkeypatch.setattr(search, "BLOCK_ELEMENTS", elements)
        monkeypatch.setattr(search, "PAIR_ELEMENTS", pairs)
        blocks = mined()
        for name in ("anchor", "positive", "negatives", "valid"):
            assert torch.equal(getattr(whole, name), getattr(blocks, name))


def test_images_nearly_the_same_are_told_apart():
    """Their squared distances are below the rounding of a product of the vectors."""
    rng = np.random.default_rng(0)
    cache = (1 + 1e-5 * rng.standard_normal((3000, 4))).astype(np.float32)
    labels = rng.integers(0, 600, 3000)
    config = MiningConfig("nearest", "hardest", num_negatives=3)
    tuples = mine(torch.from_numpy(cache), SameLabel(labels), torch.arange(40), config, generator())
    for row, anchor in enumerate(tuples.anchor.tolist()):
        d = distances(cache, anchor)
        first, others = naive(cache, lambda a, b: labels[a] == labels[b], anchor, config)
        np.testing.assert_allclose(d[tuples.positive[row]], d[first], rtol=1e-5)
        np.testing.assert_allclose(d[tuples.negatives[row]], d[others[:3]], rtol=1e-5)


def test_an_encoder_that_gives_one_vector_for_all_images():
    cache, labels = torch.ones(2000, 4), SameLabel(np.arange(2000) % 10)
    hardest = MiningConfig("farthest", "hardest", num_negatives=3)
    tuples = mine(cache, labels, torch.arange(20), hardest, generator())
    assert tuples.positive.tolist() == [10 + row if row < 10 else row - 10 for row in range(20)]
    assert tuples.negatives[:3].tolist() == [[1, 2, 3], [0, 2, 3], [0, 1, 3]]
    semi_hard = MiningConfig("farthest", "semi-hard", num_negatives=3)
    assert len(mine(cache, labels, torch.arange(20), semi_hard, generator())) == 0


@pytest.mark.parametrize("positive", POSITIVES)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_sets_smaller_than_the_number_of_negatives(n, positive):
    labels = SameLabel(np.array([0, 0, 1, 1, 1])[:n])
    config = MiningConfig(positive, "hardest", num_negatives=9)
    tuples = mine(torch.rand(n, 2), labels, torch.arange(n), config, generator())
    assert len(tuples) == (5 if n == 5 else 0)
    assert tuples.valid.sum(1).tolist() == [3, 3, 2, 2, 2][: len(tuples)]
    assert tuples.negatives.shape == (len(tuples), 9)


def test_vectors_that_are_no_numbers_give_no_tuples():
    cache = torch.full((30, 4), torch.nan)
    for positive, negatives in itertools.product(POSITIVES, NEGATIVES):
        config = MiningConfig(positive, negatives)
        labels = SameLabel(np.arange(30) % 3)
        assert len(mine(cache, labels, torch.arange(30), config, generator())) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("positive", "negatives"), list(itertools.product(POSITIVES, NEGATIVES)))
def test_a_cuda_device_finds_what_the_cpu_finds(positive, negatives):
    config = MiningConfig(positive, negatives, num_negatives=4, pool=7, margin=1.0)
    for relevance, _ in KINDS.values():
        here, there = (
            mine(
                torch.from_numpy(GRID).to(device),
                relevance,
                torch.from_numpy(ANCHORS),
                config,
                generator(),
            )
            for device in ("cpu", "cuda")
        )
        for name in ("anchor", "positive", "negatives", "valid"):
            assert torch.equal(getattr(here, name), getattr(there, name).cpu())
