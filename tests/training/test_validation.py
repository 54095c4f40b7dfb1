"""Validation against brute force."""

import hashlib
import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save
from scipy.stats import binom
from sklearn.metrics import roc_auc_score

from rcir.data import ImageSet, Preprocessing
from rcir.embedding import Embedding
from rcir.encoders import EncoderConfig
from rcir.encoders.base import Encoder
from rcir.encoders.batches import embed
from rcir.errors import InvalidData, TrainingDiverged
from training.certification import certify_folds
from training.validation import Validation, validate


class Pixels(Encoder):
    """An encoder whose embedding is the picture itself."""

    def __init__(self, spread=None):
        super().__init__(EncoderConfig())
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.spread = spread

    def forward(self, images):
        mean = images.flatten(1) + self.anchor
        uncertainty = None if self.spread is None else self.spread * mean.sum(1)
        return Embedding(mean, None, uncertainty)


def validated(encoder, preprocessing, images):
    """What the validation images show of an encoder, as training asks."""
    return validate(embed(encoder, preprocessing, images.images), images)


def draw(n, copies):
    """n random pictures of three labels, the first `copies` of them the same picture."""
    rng = np.random.default_rng(3)
    pixels = rng.integers(0, 256, (n, 2, 3), dtype=np.uint8)
    pixels[:copies] = pixels[0]
    return ImageSet(pixels, rng.integers(0, 3, n), [str(i) for i in range(n)])


def others(images):
    """For each image, the distances to all others and their labels, nearest first."""
    vectors = images.images.reshape(len(images), -1) / 255
    for i, vector in enumerate(vectors):
        rest = np.delete(np.arange(len(vectors)), i)
        distances = np.sqrt(((vectors[rest] - vector) ** 2).sum(1))
        order = np.argsort(distances, kind="stable")
        yield distances[order], images.labels[rest][order]


@pytest.mark.parametrize("n", [40, 1100])
def test_ranks_are_those_of_a_search_among_all_others(n):
    images = draw(n, copies=0)
    found = validated(Pixels(), Preprocessing((2, 3)), images)
    expected = [
        np.flatnonzero(labels == label)[0] + 1
        for (_, labels), label in zip(others(images), images.labels, strict=True)
    ]
    np.testing.assert_array_equal(found.ranks, expected)
    assert found.metrics()["validation/recall_at_1"] == np.mean(np.array(expected) == 1)


def test_an_image_is_left_out_of_its_own_search_even_among_its_copies():
    """Copies of one picture: whoever drops the nearest drops a copy."""
    pixels = np.zeros((6, 2, 3), np.uint8)
    pixels[3:] = np.arange(3, dtype=np.uint8)[:, None, None] * 50 + 100
    apart = ImageSet(pixels, np.array([0, 1, 2, 3, 4, 4]), list("abcdef"))
    assert validated(Pixels(), Preprocessing((2, 3)), apart).ranks[:3].tolist() == [np.inf] * 3
    twins = ImageSet(pixels, np.array([0, 0, 0, 3, 4, 5]), list("abcdef"))
    found = validated(Pixels(), Preprocessing((2, 3)), twins)
    np.testing.assert_array_equal(found.ranks, [1, 1, 1, *[np.inf] * 3])


def test_recall_is_of_the_images_that_another_one_matches():
    pixels = np.zeros((6, 2, 3), np.uint8)
    pixels[3:] = np.arange(3, dtype=np.uint8)[:, None, None] * 50 + 100
    twins = ImageSet(pixels, np.array([0, 0, 0, 3, 4, 5]), list("abcdef"))
    found = validated(Pixels(), Preprocessing((2, 3)), twins)
    assert found.metrics()["validation/recall_at_1"] == 1
    assert found.matched.tolist() == [True] * 3 + [False] * 3
    alone = ImageSet(pixels, np.arange(6), list("abcdef"))
    with pytest.raises(InvalidData, match="no validation image matches another one"):
        validated(Pixels(), Preprocessing((2, 3)), alone)


def test_without_an_own_uncertainty_the_angle_to_the_nearest_other_stands_in():
    images = draw(40, copies=3)
    found = validated(Pixels(), Preprocessing((2, 3)), images)
    vectors = images.images.reshape(40, -1) / 255
    apart = np.linalg.norm(vectors[:, None] - vectors, axis=2) + np.diag(np.full(40, np.inf))
    nearest = vectors[apart.argmin(1)]
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(nearest, axis=1)
    expected = 1 - (vectors * nearest).sum(1) / lengths
    np.testing.assert_allclose(found.uncertainty, expected, atol=1e-5)


def test_the_encoders_own_uncertainty_is_judged_by_how_it_ranks_misses():
    images = draw(60, copies=0)
    found = validated(Pixels(spread=2.0), Preprocessing((2, 3)), images)
    own = images.images.reshape(60, -1).sum(1) / 255 * 2
    np.testing.assert_allclose(found.uncertainty, own, rtol=1e-5)
    missed = [
        labels[0] != label for (_, labels), label in zip(others(images), images.labels, strict=True)
    ]
    expected = roc_auc_score(missed, found.uncertainty)
    assert found.metrics()["validation/auroc_miss"] == pytest.approx(expected)


def test_an_encoder_that_diverged_is_no_result():
    encoder = Pixels()
    encoder.anchor.data.fill_(torch.nan)
    with pytest.raises(TrainingDiverged, match=r"optimizer\.lr"):
        validated(encoder, Preprocessing((2, 3)), draw(5, copies=0))


def test_two_images_are_too_few():
    with pytest.raises(InvalidData, match="2 validation images"):
        validated(Pixels(), Preprocessing((2, 3)), draw(2, copies=0))


def counted(parts, alpha):
    """Mean set size at delta = 0.1, each threshold tried and each rank counted; depth if none
    will.
    """
    sizes = []
    for part in parts:
        paying = [np.isfinite(row).sum() for row in part.candidate_scores]
        for threshold in np.sort(part.scores[np.isfinite(part.scores)]):
            if binom.cdf(sum(part.scores > threshold), len(part.scores), alpha) <= 0.1:
                paying = [sum(price <= threshold for price in row) for row in part.candidate_scores]
                break
        sizes += paying
    return np.mean(sizes)


def test_sizes_are_those_that_the_images_certify():
    found = validated(Pixels(spread=1.0), Preprocessing((2, 3)), draw(240, copies=60))
    assert sum(len(part.candidate_scores) for part in found.certified) == 240
    metrics = found.metrics()
    sizes = [metrics[f"validation/certified_size_{alpha}"] for alpha in ("0.05", "0.1", "0.2")]
    assert sizes == pytest.approx([counted(found.certified, a) for a in (0.05, 0.1, 0.2)])
    assert 60 >= sizes[0] > sizes[1] > sizes[2] >= 1


@pytest.mark.parametrize("spread", [None, 1.0])
def test_the_stated_uncertainty_is_what_sizes_depend_on(spread):
    """Of an encoder with none, it is the distance to the nearest image of the fold searched."""
    images = draw(240, copies=0)
    found = validated(Pixels(spread), Preprocessing((2, 3)), images)
    vectors = torch.from_numpy(images.images.reshape(240, -1)) / 255
    stated = None if spread is None else vectors.sum(1).double().numpy()
    expected = certify_folds(vectors.numpy(), stated, images)
    for ours, theirs in zip(found.certified, expected, strict=True):
        np.testing.assert_allclose(ours.scores, theirs.scores, rtol=1e-4)
        np.testing.assert_allclose(ours.candidate_scores, theirs.candidate_scores, rtol=1e-4)


@pytest.mark.parametrize(("n", "copies"), [(7, 3), (8, 3), (100, 50), (240, 60)])
def test_a_size_that_cannot_be_certified_is_left_out(n, copies):
    found = validated(Pixels(), Preprocessing((2, 3)), draw(n, copies))
    expected = {
        f"validation/certified_size_{alpha}"
        for alpha in ("0.05", "0.1", "0.2")
        if found.certified
        and all(
            binom.cdf(np.isinf(part.scores).sum(), len(part.scores), float(alpha)) <= 0.1
            for part in found.certified
        )
    }
    assert len(expected) == {7: 0, 8: 0, 100: 2, 240: 3}[n]
    assert {name for name in found.metrics() if "certified" in name} == expected


@pytest.mark.parametrize("n", [7, 60])
def test_it_can_be_stored(n):
    found = validated(Pixels(spread=2.0), Preprocessing((2, 3)), draw(n, copies=3))
    again = Validation.from_arrays(load(save(found.arrays())))
    for name in ("ranks", "uncertainty", "matched"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))
    assert again.depth == found.depth == n - 1
    assert len(again.certified) == len(found.certified) == (4 if n == 60 else 0)
    for ours, theirs in zip(again.certified, found.certified, strict=True):
        np.testing.assert_array_equal(ours.scores, theirs.scores)
        np.testing.assert_array_equal(ours.candidate_scores, theirs.candidate_scores)
    assert again.metrics() == found.metrics()


def test_what_is_compared_names_its_queries():
    images = draw(60, copies=0)
    found = validated(Pixels(), Preprocessing((2, 3)), images)
    measured = found.measured(images)
    names = json.dumps([str(number) for number in range(60)]).encode()
    assert measured.queries == hashlib.sha256(names).hexdigest()
    assert (measured.on, measured.parts) == ("validation", found.certified)
    assert {f"validation/{name}" for name in measured.metrics} == found.metrics().keys()
    assert measured.metrics["recall_at_1"] == np.mean(found.ranks[found.matched] == 1)
