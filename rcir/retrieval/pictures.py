"""Pictures of the items of a retriever, and pictures to query it with."""

from __future__ import annotations

import json
import os
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rcir.data.listing import require_images
from rcir.errors import DataUnavailable, InvalidConfig, RcirError

if TYPE_CHECKING:  # retrievers of vectors need neither Pillow nor torch
    from rcir.data.images import ImageLike
    from rcir.data.records import Splits

PICTURES = "pictures"  # key of `Retriever.origin`
THUMBNAIL_SIDE = 480  # pixels of the longer side
EXACT_SIDE = 64  # up to which a thumbnail is PNG, with the very pixels; others are JPEG
SMALL_SIDE = 144  # of those inside an answer's HTML
MAX_THUMBNAILS = 1000  # in memory


class ItemPictures:
    """Thumbnails of the items of a retriever, and pictures to query it with.

    `folder` has a picture of each item, named by its id; by default that in `Retriever.origin`, or
    else the images of its data set. `expected` is False if there are none.
    """

    def __init__(self, origin: Mapping[str, Any], folder: Path | None = None) -> None:
        pictures = folder or origin.get(PICTURES)
        self._origin, self._folder = origin, Path(pictures) if pictures else None
        self.expected = Path(pictures).is_dir() if pictures else bool(origin.get("data"))
        self._lock = threading.Lock()
        self._splits: Splits | RcirError | None = None
        self._positions: dict[str, int] = {}
        self.thumbnail = lru_cache(MAX_THUMBNAILS)(self._thumbnail)

    def _thumbnail(self, item: str) -> tuple[bytes, str]:
        """Return the thumbnail of an item, and its media type."""
        return encode(self.picture(item), THUMBNAIL_SIDE)

    def query(self, rng: np.random.Generator) -> tuple[bytes, str | None]:
        """Return the file of a random test picture of the data set, and its label or None."""
        test = self.data_set().test
        row = int(rng.integers(len(test)))
        label: Any = None
        if test.labels is not None:
            number = int(test.labels[row])
            label = test.label_names.get(number, str(number))
        image = test.images[row]
        if isinstance(image, str | os.PathLike):
            return Path(image).read_bytes(), label
        return encode(image)[0], label

    def picture(self, item: str) -> ImageLike:
        """Return the picture of an item, or raise `DataUnavailable`."""
        if self._folder is not None:
            try:
                path = self._folder / item
                if not path.is_file():  # the name on disk may have another Unicode form
                    (path,) = require_images(self._folder, [item], "the retriever", "add them")
                path = path.resolve()
                inside = path.is_relative_to(self._folder.resolve()) and path.is_file()
            except (OSError, ValueError, RuntimeError, DataUnavailable):
                inside = False  # NUL, a name too long, a loop of links
            if not inside:
                raise DataUnavailable(f"there is no picture {item} in the folder of pictures")
            return path
        gallery = self.data_set().gallery
        if item not in self._positions:
            raise DataUnavailable(f"the data set has no picture of {item}")
        return gallery.images[self._positions[item]]

    def data_set(self) -> Splits:
        """Return the data set, which is read once; if that failed, raise why."""
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
        origin = self._origin
        if origin.get("data") is None:
            raise InvalidConfig("the retriever names no data set: name a folder with --pictures")
        from rcir.config import from_plain
        from rcir.data import DataConfig, load_splits

        config = replace(from_plain(DataConfig, origin["data"]), download=False)
        splits = load_splits(config, rejects=origin.get("rejects", ()))
        self._positions = {name: place for place, name in enumerate(splits.gallery.ids)}
        return splits


def thumbnails(origin: Mapping[str, Any], ids: Sequence[str]) -> Iterator[str | None]:
    """Yield small pictures of items as data URIs; None for those without a readable picture."""
    pictures = _pictures_of(json.dumps(dict(origin), default=str))
    for item in ids:
        try:
            small, media_type = encode(pictures.picture(item), SMALL_SIDE)
            yield f"data:{media_type};base64,{b64encode(small).decode()}"
        except (RcirError, OSError, ImportError):
            yield None


@lru_cache(4)
def _pictures_of(origin: str) -> ItemPictures:
    return ItemPictures(json.loads(origin))


def encode(picture: ImageLike, side: int | None = None) -> tuple[bytes, str]:
    """Return a picture, or its thumbnail of a longer side, as a file, and the media type."""
    from PIL import Image

    from rcir.data.images import read_image

    image, file = Image.fromarray(read_image(picture, 3)), BytesIO()
    if side is None or max(image.size) <= EXACT_SIDE:
        image.save(file, "PNG")
        return file.getvalue(), "image/png"
    image.thumbnail((side, side))
    image.save(file, "JPEG")
    return file.getvalue(), "image/jpeg"
