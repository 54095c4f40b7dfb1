"""Retrievers that several files share; tests must not change them."""

import pytest

from rcir.retrieval.retriever import Retriever
from rcir.store.folder import checksums, write_manifest
from tests.retrieval.retrievers import build, calibrate


@pytest.fixture(scope="session")
def certified():
    """Calibrated on whole numbers with quantile sizes and two groups."""
    return calibrate(build())


@pytest.fixture(scope="session")
def learned():
    """Calibrated on whole numbers with learned sizes."""
    return calibrate(build(depth=40), "learned", groups=False)


@pytest.fixture
def loaded(folder):
    """A copy of the calibrated retriever of images, which the test may change."""
    return Retriever.load(folder)


@pytest.fixture(scope="session")
def sign():
    """A function that writes the checksums of a folder's files as they are into its manifest."""

    def sign(folder):
        write_manifest(folder, checksums(folder))

    return sign
