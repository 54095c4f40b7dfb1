"""Pictures of gallery items, as thumbnails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import DataUnavailable, InvalidConfig, RcirError
from rcir.retrieval.retriever import Retriever

if TYPE_CHECKING:
    from rcir.data.images import ImageLike
    from rcir.data.records import Splits

THUMBNAIL_SIDE = 160  # pixels, of the longer side at most
KEPT = 2000  # thumbnails in memory


class ItemPictures:
    """Thumbnails of the items of a retriever, and pictures to ask it about.

    Args:
        retriever: whose items.
        folder: with a picture of each, under its id; or None, for those of its data set.
    """

    def __init__(self, retriever: Retriever, folder: Path | None) -> None:
        self._retriever, self._folder = retriever, folder
        self._lock = threading.Lock()
        self._splits: Splits | RcirError | None = None
        self._positions: dict[str, int] = {}
        self.thumbnail: Callable[[str], bytes] = lru_cache(KEPT)(self._thumbnail)

    def _thumbnail(self, item: str) -> bytes:
        """A picture of an item, as PNG.

        Raises:
            DataUnavailable: there is none.
            InvalidImage: it cannot be read.
        """
        return png(self._picture(item), THUMBNAIL_SIDE)

    def query(self, rng: np.random.Generator) -> tuple[bytes, str | None]:
        """One of the test pictures of the data set, as PNG, and its label where labels tell.

        Raises:
            DataUnavailable: there are none.
        """
        test = self._of_data_set().test
        row = int(rng.integers(len(test)))
        label: Any = None
        if test.labels is not None:
            number = int(test.labels[row])
            label = self._retriever.label_names.get(number, str(number))
        return png(test.images[row]), label

    def _picture(self, item: str) -> ImageLike:
        if self._folder is not None:
            path = (self._folder / item).resolve()
            if not path.is_relative_to(self._folder.resolve()) or not path.is_file():
                raise DataUnavailable(f"there is no picture {item} in the folder of pictures")
            return path
        gallery = self._of_data_set().gallery
        position = self._positions.get(item)
        if position is None:
            raise DataUnavailable(f"the data set has no picture of {item}")
        return gallery.images[position]

    def _of_data_set(self) -> Splits:
        with self._lock:
            if self._splits is None:
                try:
                    self._splits = self._read()
                except (RcirError, OSError, ImportError) as error:
                    self._splits = DataUnavailable(f"there are no pictures of the items ({error})")
            if isinstance(self._splits, RcirError):
                raise self._splits
            return self._splits

    def _read(self) -> Splits:
        data = self._retriever.origin.get("data")
        if data is None:
            raise InvalidConfig("the retriever names no data set: give a folder with --pictures")
        from rcir.data import DataConfig, load_splits

        splits = load_splits(DataConfig(**data), lambda _: None)
        self._positions = {name: place for place, name in enumerate(splits.gallery.ids)}
        return splits


def png(picture: ImageLike, side: int | None = None) -> bytes:
    """A picture as a PNG file, its longer side at most that long."""
    from PIL import Image

    from rcir.data.images import read_image

    pixels: NDArray[np.uint8] = read_image(picture, 3)
    image, file = Image.fromarray(pixels), BytesIO()
    if side is not None:
        image.thumbnail((side, side))
    image.save(file, "PNG")
    return file.getvalue()
