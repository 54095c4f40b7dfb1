"""Retrievers that several files share; tests must not change them."""

import pytest

from rcir.data import ImageSet, Preprocessing
from rcir.retrieval.retriever import Retriever
from tests.retrieval import whole_numbers


@pytest.fixture(scope="session")
def certified():
    """Calibrated on whole numbers with quantile sizes and two groups."""
    return whole_numbers.calibrate(whole_numbers.build())


@pytest.fixture(scope="session")
def learned():
    """Calibrated on whole numbers with learned sizes."""
    return whole_numbers.calibrate(whole_numbers.build(depth=40), "learned", groups=False)


@pytest.fixture
def loaded(folder):
    """A copy of the calibrated retriever of images, which the test may change."""
    return Retriever.load(folder)


@pytest.fixture(scope="session")
def joined():
    """A function that appends one set of images to another."""
    import numpy as np

    def join(first, second):
        shared = first.attributes.keys() & second.attributes.keys()
        return ImageSet(
            np.concatenate([first.images, second.images]),
            np.concatenate([first.labels, second.labels]),
            [*first.ids, *(f"again-{name}" for name in second.ids)],
            {
                name: np.concatenate([first.attributes[name], second.attributes[name]])
                for name in shared
            },
        )

    return join


@pytest.fixture
def matching_by(retriever, splits):
    """A function that builds a retriever whose images match by something other than a label."""

    def build(relevance, depth=50):
        gallery = splits.gallery
        images = ImageSet(gallery.images, None, gallery.ids, {}, relevance)
        return Retriever.build(retriever.encoder, Preprocessing(), images, depth=depth)

    return build
