"""The pictures and classes that a run was trained on: they cannot certify it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rcir.data.digests import digests
from rcir.data.records import ImageSet, Splits
from rcir.errors import InvalidData
from rcir.files import write_json

TRAINED_ON_FILE = "trained_on.json"
QUERIES = ("tuning", "calibration", "test")
NAMED = 5
REMEDY = (
    "train again on the data set as it is now, or restore its files as they were. (The classes "
    "that train stay the same while a folder grows if data.options.train names them, and while a "
    "table grows if it has a column split.)"
)


@dataclass(frozen=True)
class TrainedOn:
    """Training and validation images of a run, as they were when it was trained.

    Attributes:
        images: (n,) their digests, sorted, each once, see `rcir.data.digests`.
        classes: their classes, sorted: the attribute "class" where the data set has it, else the
            labels; none where images have not one label each.
        zero_shot: whether no query was of these classes.
    """

    images: NDArray[np.bytes_]
    classes: list[str]
    zero_shot: bool

    @classmethod
    def of(cls, splits: Splits) -> Self:
        """The record of a training on these splits."""
        parts = (splits.train, splits.validation)
        found = np.concatenate([digests(part.images) for part in parts])
        classes = np.unique(np.concatenate([classes_of(part) for part in parts]))
        asked = np.concatenate([classes_of(getattr(splits, name)) for name in QUERIES])
        zero_shot = len(classes) > 0 and not np.isin(asked, classes).any()
        return cls(np.unique(found), classes.tolist(), bool(zero_shot))

    def joined(self, later: Self) -> Self:
        """The union with the record of a later training; zero-shot if one of the two was."""
        return type(self)(
            np.union1d(self.images, later.images),
            sorted({*self.classes, *later.classes}),
            self.zero_shot or later.zero_shot,
        )

    def write(self, folder: Path) -> None:
        """Write `trained_on.json` into the folder of a run, all of it or nothing."""
        plain = {"zero_shot": self.zero_shot, "classes": self.classes}
        write_json(folder / TRAINED_ON_FILE, plain | {"images": self.images.astype(str).tolist()})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read what `write` wrote.

        Raises:
            InvalidData: it is not there, as in a run of an earlier version, or damaged.
        """
        path = folder / TRAINED_ON_FILE
        try:
            found = json.loads(path.read_text())
            return cls(
                np.array([str(each) for each in found["images"]], np.bytes_),
                [str(name) for name in found["classes"]],
                bool(found["zero_shot"]),
            )
        except FileNotFoundError as error:
            raise InvalidData(
                f"there is no {path}, which says what the run was trained on: it is of an earlier "
                "version of rcir; train again, under another name"
            ) from error
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidData(f"{path} is damaged ({error!r}): train again") from error

    def require_unseen(self, splits: Splits) -> None:
        """Raise `InvalidData` if queries are among what was trained on.

        A query is if it is a picture that trained or validated; or, of a run that was zero-shot
        when it was trained, if its class is one that did. Either is so after the data set has
        changed, for instance where a folder grew and its classes are halved otherwise.
        """
        names: list[str] = []
        classes: set[str] = set()
        for part in QUERIES:
            queries: ImageSet = getattr(splits, part)
            seen = np.isin(digests(queries.images), self.images)
            names += [queries.ids[row] for row in np.flatnonzero(seen).tolist()]
            if self.zero_shot:
                classes.update(np.intersect1d(classes_of(queries), self.classes).tolist())
        if classes:
            raise InvalidData(
                f"the run was trained to be asked about classes that it never saw, and "
                f"{len(classes)} classes of the queries trained it ({_some(sorted(classes))}): "
                f"{REMEDY}"
            )
        if names:
            raise InvalidData(
                f"the run was trained on {len(names)} of the queries ({_some(names)}): {REMEDY}"
            )


def classes_of(images: ImageSet) -> NDArray[np.str_]:
    """(n,) names; none where images have not one label each."""
    if "class" in images.attributes:
        return images.attributes["class"].astype(str)
    return np.array([] if images.labels is None else images.labels, str)


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + ", ..." * (len(names) > NAMED)
