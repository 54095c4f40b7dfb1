"""Principal components of pixels: what retrieval needs no training for, to compare with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rcir.data import ImageSet, Splits
from rcir.index import build_index

SIDE = 32  # pixels that pictures are brought to, in height and width
COMPONENTS = 64
FITTED, ASKED, SEARCHED = 5000, 1000, 20_000  # pictures at most


def pixel_recall(splits: Splits, seed: int = 0) -> float | None:
    """Recall at 1 of test queries by principal components of their pixels.

    The components are those of training pictures of 32 x 32 pixels in RGB; pictures are compared by
    cosine, each minus the mean.

    Args:
        splits: pictures that train, are searched and test.
        seed: decides which are taken where there are many.

    Returns:
        The share of queries that have a match in the gallery whose nearest picture is one; None
        where none has, where the gallery holds more than 20,000, or fewer than two train.
    """
    rng = np.random.default_rng(seed)
    train = _some(rng, splits.train, FITTED)
    test = _some(rng, splits.test, ASKED)
    matched = np.flatnonzero(test.relevance.totals(splits.gallery.relevance) > 0)
    if len(train) < 2 or not len(matched) or len(splits.gallery) > SEARCHED:
        return None
    from sklearn.decomposition import PCA

    pixels = _pixels(train)
    components = min(COMPONENTS, *pixels.shape)
    fitted = PCA(components, svd_solver="randomized", random_state=seed).fit(pixels)
    gallery, queries = (_unit(fitted.transform(_pixels(part))) for part in (splits.gallery, test))
    _, nearest = build_index(gallery).search(queries[matched], 1)
    right = test.relevance.subset(matched).of(splits.gallery.relevance, nearest)
    return float(right.mean())


def _some(rng: np.random.Generator, images: ImageSet, most: int) -> ImageSet:
    if len(images) <= most:
        return images
    return images.subset(np.sort(rng.permutation(len(images))[:most]))


def _pixels(images: ImageSet) -> NDArray[np.float32]:
    from rcir.data import Preprocessing

    resized = Preprocessing(size=(SIDE, SIDE), channels=3).resized(images.images)
    found: NDArray[np.float32] = resized.reshape(len(images), -1).numpy().astype(np.float32)
    return found


def _unit(vectors: NDArray[np.floating]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    found: NDArray[np.float32] = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return found
