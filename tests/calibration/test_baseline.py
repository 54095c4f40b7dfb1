"""Recall of principal components of pixels, against scikit-learn step by step."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_distances

from calibration.baseline import pixel_recall


def pixels(images):
    """32 x 32 in RGB, by Pillow."""
    small = [Image.fromarray(each).convert("RGB").resize((32, 32), 2) for each in images]
    return np.stack([np.asarray(one, float).transpose(2, 0, 1).reshape(-1) for one in small])


def test_recall_is_that_of_the_nearest_by_cosine(splits):
    fitted = PCA(64, svd_solver="full").fit(pixels(splits.train.images))
    gallery, queries = (
        fitted.transform(pixels(part.images)) for part in (splits.gallery, splits.test)
    )
    nearest = cosine_distances(queries, gallery).argmin(1)
    has = np.isin(splits.test.labels, splits.gallery.labels)
    expected = (splits.gallery.labels[nearest] == splits.test.labels)[has].mean()
    # Pillow resizes otherwise by a little, and the randomized components are nearly those.
    assert pixel_recall(splits) == pytest.approx(expected, abs=0.03)
    assert expected > 0.1


def test_pictures_that_are_their_own_copies_are_all_found(splits):
    assert pixel_recall(replace(splits, gallery=splits.test)) == 1


def test_without_matches_there_is_no_recall(splits):
    others = splits.gallery.subset(np.flatnonzero(splits.gallery.labels > 10**6))
    assert pixel_recall(replace(splits, gallery=others)) is None
    assert pixel_recall(replace(splits, train=splits.train.subset(np.array([0])))) is None
