"""What a retriever finds for the queries of its data set, and for images of another one."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

from calibration.progress import embedding
from calibration.risk_results import SearchedSplits
from rcir.data import DataConfig, ImageSet, Splits, data_root, load_splits
from rcir.data.registry import find_dataset
from rcir.encoders.embedder import Embedder
from rcir.errors import InvalidConfig, InvalidData
from rcir.retrieval.retriever import Retriever


def check_group(splits: Splits, group: str | None) -> None:
    """Raise `InvalidData` unless the queries of all three splits have that attribute."""
    for name in ("tuning", "calibration", "test") if group is not None else ():
        attributes = getattr(splits, name).attributes
        if group not in attributes:
            raise InvalidData(
                f"the {name} queries have no attribute {group!r}; they have "
                f"{', '.join(attributes) or 'none'}"
            )


def search_splits(retriever: Retriever, splits: Splits, embedder: Embedder) -> SearchedSplits:
    """The queries of the three splits, searched; the origin names their groups and clusters."""
    group, cluster = (retriever.origin.get(name) for name in ("group", "cluster"))
    found = []
    for name in ("tuning", "calibration", "test"):
        images = getattr(splits, name)
        with embedding(f"{name} queries", images, embedder) as shown, warnings.catch_warnings():
            # Said before, of all splits at once.
            warnings.filterwarnings("ignore", "the queries come in clusters", UserWarning)
            found.append(retriever.search_labelled(images, group, shown, cluster))
    return SearchedSplits(*found)


def images_outside(data: DataConfig, name: str | None) -> ImageSet | None:
    """The images of the evaluation half of another data set.

    Raises:
        InvalidConfig: it is the set that the retriever searches.
    """
    if name is None:
        return None
    if name == data.name:
        raise InvalidConfig(f"ood is {name}, the set that the retriever searches: name another")
    found = find_dataset(name)
    other = DataConfig(name, data.root, data.download)
    if found.composed:
        return load_splits(other).test
    options = {"download": True} if data.download and found.downloads else {}
    return found.read(data_root(other), **options).queries


def uncertainty_outside(
    retriever: Retriever, images: ImageSet | None, embedder: Embedder
) -> NDArray[np.float64] | None:
    """(n,) of images of another data set, as queries; None without any."""
    if images is None:
        return None
    with embedding("out-of-distribution queries", images, embedder) as shown:
        return retriever.search(images.images, shown).uncertainty
