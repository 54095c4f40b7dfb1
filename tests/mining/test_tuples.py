import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from rcir.data.relevance import SameLabel
from rcir.errors import InvalidConfig
from rcir.mining import MiningConfig, mine

POSITIVES = ("nearest", "random", "farthest")
NEGATIVES = ("hardest", "margin-violating", "semi-hard", "top-random")
# Four classes of several images and two images that are alone in their class.
LABELS = np.array([0, 1, 2, 3] * 12 + [4, 5])
ANY = MiningConfig("nearest", "hardest", num_negatives=2)
CACHE = np.random.default_rng(0).standard_normal((len(LABELS), 4))
CACHE /= np.linalg.norm(CACHE, axis=1, keepdims=True)


def run(config, anchors=None, seed=0, labels=LABELS):
    rows = torch.arange(len(labels)) if anchors is None else torch.tensor(anchors, dtype=torch.long)
    return mine(
        torch.tensor(CACHE[: len(labels)], dtype=torch.float32),
        SameLabel(labels),
        rows,
        config,
        torch.Generator().manual_seed(seed),
    )


def distances(anchor):
    return np.array([np.sqrt(((CACHE[anchor] - other) ** 2).sum()) for other in CACHE])


def positives(anchor):
    return [row for row, label in enumerate(LABELS) if label == LABELS[anchor] and row != anchor]


def admissible(anchor, positive, config):
    """Negatives that may be taken, nearest first."""
    d = distances(anchor)
    rows = [row for row, label in enumerate(LABELS) if label != LABELS[anchor]]
    if config.negatives in ("margin-violating", "semi-hard"):
        rows = [row for row in rows if d[row] < d[positive] + config.margin]
    if config.negatives == "semi-hard":
        rows = [row for row in rows if d[row] > d[positive]]
    return sorted(rows, key=lambda row: d[row])


@pytest.mark.parametrize(("positive", "negatives"), list(itertools.product(POSITIVES, NEGATIVES)))
@pytest.mark.parametrize("margin", [0.0, 0.1])
def test_every_tuple_is_what_a_loop_over_the_anchors_finds(positive, negatives, margin):
    config = MiningConfig(positive, negatives, num_negatives=5, pool=9, margin=margin)
    tuples = run(config)
    seen = set(tuples.anchor.tolist())
    for anchor, chosen, found, valid in zip(
        *(getattr(tuples, name).tolist() for name in ("anchor", "positive", "negatives", "valid")),
        strict=True,
    ):
        d = distances(anchor)
        own = sorted(positives(anchor), key=lambda row: d[row])
        expected = {"nearest": own[:1], "farthest": own[-1:], "random": own}[positive]
        assert chosen in expected
        allowed = admissible(anchor, chosen, config)
        kept = [row for row, is_valid in zip(found, valid, strict=True) if is_valid]
        if negatives == "top-random":
            assert len(set(kept)) == 5
            assert set(kept) <= set(allowed[:9])
        else:
            assert kept == allowed[:5]
    if positive != "random":
        complete = {
            anchor
            for anchor in range(len(LABELS))
            if (own := sorted(positives(anchor), key=lambda row: distances(anchor)[row]))
            and admissible(anchor, own[0 if positive == "nearest" else -1], config)
        }
        assert seen == complete


def test_images_alone_in_their_class_are_no_anchors():
    assert run(ANY).anchor.tolist() == list(range(48))


def test_anchors_keep_the_order_asked_for():
    assert run(ANY, anchors=[7, 49, 3, 20]).anchor.tolist() == [7, 3, 20]


@pytest.mark.parametrize("negatives", ["hardest", "top-random"])
def test_too_few_negatives_leave_the_rest_invalid(negatives):
    labels = np.array([0] * 10 + [1, 2])
    tuples = run(MiningConfig("nearest", negatives, num_negatives=5), labels=labels)
    assert tuples.anchor.tolist() == list(range(10))
    assert tuples.valid.sum(1).tolist() == [2] * 10
    for found, valid in zip(tuples.negatives, tuples.valid, strict=True):
        assert sorted(found[valid].tolist()) == [10, 11]


def test_one_class_alone_gives_no_tuples():
    assert len(run(ANY, labels=np.zeros(20, np.int64))) == 0


def test_no_anchors_give_no_tuples():
    assert len(run(ANY, anchors=[])) == 0


@pytest.mark.parametrize("negatives", ["hardest", "top-random"])
def test_random_choices_are_decided_by_the_generator(negatives):
    config = MiningConfig("random", negatives, num_negatives=3, pool=10)
    first, again, other = run(config, seed=1), run(config, seed=1), run(config, seed=2)
    assert torch.equal(first.positive, again.positive)
    assert torch.equal(first.negatives, again.negatives)
    assert not torch.equal(first.positive, other.positive)
    assert torch.equal(first.negatives, other.negatives) == (negatives == "hardest")


def test_random_choices_take_everyone_about_equally_often():
    config = MiningConfig("random", "top-random", num_negatives=5, pool=10)
    drawn = [run(config, anchors=[0], seed=seed) for seed in range(400)]
    negatives = np.bincount(torch.cat([t.negatives[0] for t in drawn]), minlength=50)
    pool = admissible(0, positives(0)[0], config)[:10]
    # Each is drawn half of the time: 200 of 400, standard deviation 10.
    assert np.abs(negatives[pool] - 200).max() < 45
    chosen = np.bincount(torch.cat([t.positive for t in drawn]), minlength=50)
    assert np.abs(chosen[positives(0)] - 400 / 11).max() < 5 * np.sqrt(400 / 11)


@pytest.mark.parametrize("open_part", [{"positive": None}, {"negatives": None}])
def test_what_is_left_open_cannot_be_mined(open_part):
    with pytest.raises(InvalidConfig, match="must both be chosen"):
        run(replace(ANY, **open_part))
