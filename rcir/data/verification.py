"""Verify that a copy of a data set is what was published: counts, pictures, labels, checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rcir.data.division import Source
from rcir.data.images import faults
from rcir.data.records import ImageSet
from rcir.data.registry import find_dataset
from rcir.errors import InvalidConfig
from rcir.options import require_options


@dataclass(frozen=True)
class Findings:
    """Contents of a copy of a data set.

    Attributes:
        parts: number of images of the training half, the queries and, if published, the gallery.
        published: number of images that there should be with the options; None if there is no such
            number: what is missing then shows only where an index lists it.
        unreadable: of each picture that cannot be decoded, what is wrong with it.
        alone: number of classes of the evaluation half with one image only: nothing can match it.
        notes: what the reader left out, and why.
    """

    parts: Mapping[str, int]
    published: int | None
    unreadable: tuple[str, ...]
    alone: int
    notes: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """True if every picture can be read, and none is missing if their number is known."""
        whole = self.published is None or sum(self.parts.values()) == self.published
        return whole and not self.unreadable


def verify(
    name: str,
    root: Path,
    options: Mapping[str, Any],
    progress: Callable[[Iterator[str | None], int], Iterator[str | None]] | None = None,
) -> Findings:
    """Read a data set and decode every picture of it. Readers check published checksums.

    Args:
        name: of the data set.
        root: folder of all data sets.
        options: of the set's reader.
        progress: wraps the iterator over all pictures, of which the number is given, to show it.

    Raises:
        InvalidConfig: no such data set, or no such option.
        DataUnavailable, InvalidData: of the set's reader.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for place in ("apple/1.png", "apple/2.png", "pear/1.png"):
        ...         (Path(folder) / place).parent.mkdir(exist_ok=True)
        ...         Image.new("L", (8, 8)).save(Path(folder) / place)
        ...     found = verify("folder", Path(folder), {"path": "."})
        >>> found.parts, found.unreadable, found.published
        ({'train': 2, 'queries': 1}, (), None)
    """
    dataset = find_dataset(name)
    if dataset.composed and not dataset.whole:
        raise InvalidConfig(f"{name} {dataset.get}: it needs no check")
    require_options(f"options of {name}", dataset.function(), options)
    source = dataset.read(root, **options)
    parts = _parts(source)
    pictures = [
        image
        for images in parts.values()
        if not isinstance(images.images, np.ndarray)
        for image in images.images
    ]
    found_faults = faults(pictures)
    watched = found_faults if progress is None else progress(found_faults, len(pictures))
    unreadable = tuple(fault for fault in watched if fault is not None)
    return Findings(
        {part: len(images) for part, images in parts.items()},
        dataset.published(options),
        unreadable,
        _alone(source),
        source.notes,
    )


def _parts(source: Source) -> dict[str, ImageSet]:
    parts = {"train": source.train, "queries": source.queries}
    return parts | ({"gallery": source.gallery} if isinstance(source.gallery, ImageSet) else {})


def _alone(source: Source) -> int:
    labels = source.queries.relevance.single
    if source.gallery != "queries" or labels is None:
        return 0
    return int(np.sum(np.unique(labels, return_counts=True)[1] == 1))
