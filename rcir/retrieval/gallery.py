"""The gallery: ids, labels and further facts of the images whose vectors the index holds."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rcir.data.records import ImageSet
from rcir.data.relevance import SameLabel, SharedLabel, relevance_of
from rcir.data.relevance_protocol import Relevance
from rcir.embedding import Embedding
from rcir.encoders.batches import to_arrays
from rcir.errors import InvalidData


@dataclass(frozen=True, eq=False)
class Gallery:
    """n images, in the order of the index; copies that nobody can write to.

    Attributes:
        ids: (n,) names, texts.
        norms: (n,) float32, lengths of their vectors.
        relevance: which queries match them; None if that is not known.
        uncertainty: (n,) of an encoder that states it; or None.
        digests: (n,) see `rcir.data.digests`; or None.
        items: embeddings, for an encoder that re-ranks by them; or None.

    Raises:
        InvalidData: they are not as many of each, or not numbers.
    """

    ids: NDArray[np.object_]
    norms: NDArray[np.float32]
    relevance: Relevance | None = None
    uncertainty: NDArray[np.float64] | None = None
    digests: NDArray[np.bytes_] | None = None
    items: Embedding | None = None

    def __post_init__(self) -> None:
        for name, kind in (
            *(("ids", object), ("norms", np.float32)),
            *(("uncertainty", np.float64), ("digests", np.bytes_)),
        ):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _read_only(np.array(getattr(self, name), kind)))
        if self.relevance is not None:
            object.__setattr__(self, "relevance", _own(self.relevance))
        lengths = {
            field.name: len(getattr(self, field.name))
            for field in fields(self)
            if getattr(self, field.name) is not None
        }
        if set(lengths.values()) != {len(self.ids)}:
            raise InvalidData(
                f"{len(self.ids)} gallery images: "
                + ", ".join(f"{count} {name}" for name, count in lengths.items())
                + "; give one each"
            )
        for name in ("norms", "uncertainty"):
            values = getattr(self, name)
            if values is not None and (values.ndim != 1 or not np.isfinite(values).all()):
                raise InvalidData(f"{name} of the gallery images: some are NaN or infinite")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """(n,) if images match by having the same."""
        return self.relevance.labels if isinstance(self.relevance, SameLabel) else None

    def relevance_for(self, queries: ImageSet) -> Relevance:
        """The relevance, which is of the kind of the queries'.

        Raises:
            InvalidData: it is not, or not known.
        """
        if self.relevance is None:
            raise InvalidData("the gallery has no labels: what is a true match cannot be told")
        if type(queries.relevance) is not type(self.relevance):
            raise InvalidData(
                f"the gallery's images match as {type(self.relevance).__name__}, the queries as "
                f"{type(queries.relevance).__name__}: both must know the same of their images"
            )
        return self.relevance

    def digest(self) -> str:
        """Of all that an answer may depend on."""
        found = hashlib.sha256(json.dumps(self.ids.tolist()).encode())
        facts = {} if self.relevance is None else self.relevance.arrays()
        if self.uncertainty is not None:
            facts = facts | {"uncertainty": self.uncertainty}
        if self.items is not None:
            facts = facts | to_arrays(self.items)
        if (self.norms != 1).any():
            facts = facts | {"norms": self.norms}
        for name, values in facts.items():
            found.update(name.encode() + values.tobytes())
        return found.hexdigest()

    def joined(self, others: Gallery) -> Gallery:
        """These images, then others of which as much is known; what more is known is left out."""
        if self.uncertainty is not None and others.uncertainty is None:
            raise InvalidData("the gallery has uncertainties: give those of the images to add")

        def both(name: str) -> Any:
            values, further = getattr(self, name), getattr(others, name)
            return None if values is None else np.concatenate([values, further])

        return Gallery(
            *(both("ids"), both("norms")),
            None if self.relevance is None else self.relevance.joined(others.relevance),
            *(both("uncertainty"), both("digests")),
            None
            if self.items is None or others.items is None
            else Embedding.concatenate([self.items, others.items]),
        )

    def subset(self, rows: NDArray[np.int64]) -> Gallery:
        """Some of the images, in that order."""

        def some(values: Any) -> Any:
            return None if values is None else values[rows]

        return replace(
            self,
            ids=some(self.ids),
            norms=some(self.norms),
            relevance=None if self.relevance is None else self.relevance.subset(rows),
            uncertainty=some(self.uncertainty),
            digests=some(self.digests),
            items=None if self.items is None else self.items[torch.from_numpy(rows)],
        )

    def new_ids(self, given: object, images: int) -> NDArray[np.object_]:
        """Ids of images to add.

        Raises:
            InvalidData: they are not as many texts as there are images, all different from each
                other and from those known.
        """
        ids = _listed(given)
        if len(ids) != images:
            raise InvalidData(f"{images} images, {len(ids)} ids: give one id per image")
        if wrong := [name for name in ids if not isinstance(name, str)]:
            raise InvalidData(
                f"{len(wrong)} ids are no texts ({wrong[0]!r} is a {type(wrong[0]).__name__}): "
                "give each image a text"
            )
        there = set(self.ids.tolist())
        if taken := [name for name in ids if name in there]:
            raise InvalidData(
                f"{len(taken)} of {len(ids)} ids are those of gallery images already "
                f"({_some(taken)}): `remove` these first, or give other ids"
            )
        if repeated := [name for name, times in Counter(ids).items() if times > 1]:
            raise InvalidData(f"ids stand more than once ({_some(repeated)}): give different ones")
        return np.array(ids, object)

    def positions(self, given: object) -> NDArray[np.int64]:
        """Positions (m,) of images by their ids, ascending, each once.

        Raises:
            InvalidData: some are none's.
        """
        asked = set(_listed(given))
        if absent := sorted(map(repr, asked.difference(self.ids.tolist()))):
            raise InvalidData(f"{len(absent)} ids are of no gallery image: {_some(absent)}")
        return np.flatnonzero([name in asked for name in self.ids.tolist()])

    def new_relevance(self, labels: object, images: int) -> Relevance | None:
        """The relevance of images to add.

        Args:
            labels: whole numbers if the gallery has labels, or a `Relevance` of its kind.
            images: how many there are.

        Raises:
            InvalidData: the gallery knows of no labels and some are given, or the other way round;
                or they are of another number, type or kind.
        """
        if self.relevance is None or labels is None:
            if self.relevance is labels:
                return None
            known = "none" if self.relevance is None else f"them ({type(self.relevance).__name__})"
            raise InvalidData(f"give labels if and only if the gallery has labels: it has {known}")
        if isinstance(self.relevance, SameLabel) and not isinstance(labels, Relevance):
            labels = SameLabel(_whole(labels))
        if not isinstance(labels, Relevance):
            raise InvalidData(
                f"labels is a {type(labels).__name__}; the gallery's images match as "
                f"{type(self.relevance).__name__}: give that of the images to add "
                "(rcir.data.relevance, rcir.data.within_radius)"
            )
        if len(labels) != images:
            raise InvalidData(f"{images} images, {len(labels)} labels: give one each")
        whole: Relevance = self.relevance
        whole.joined(labels)  # raises where they are of another kind
        return labels


def _own(relevance: Relevance) -> Relevance:
    """A copy that nobody else can write to."""
    own = relevance_of(
        {name: _read_only(values.copy()) for name, values in relevance.arrays().items()}
    )
    if isinstance(own, SharedLabel):  # its matrix has arrays of its own
        for values in (own.labels.data, own.labels.indices, own.labels.indptr):
            _read_only(values)
    return own


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    """Calibration depends on it."""
    values.setflags(write=False)
    return values


def _listed(ids: object) -> list[Any]:
    if isinstance(ids, str) or not isinstance(ids, Sequence | np.ndarray):
        raise InvalidData(f"ids is a {type(ids).__name__}: give a list of texts")
    return list(ids)


def _whole(labels: object) -> NDArray[np.int64]:
    """Labels (n,) as whole numbers."""
    try:
        values = np.asarray(labels)
    except ValueError:  # lists of different lengths
        values = np.empty((0, 0))
    if values.shape == (0,):
        return np.empty(0, np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iu" or int(values.max()) >= 2**63:
        raise InvalidData(
            f"labels are {str(labels)[:40]}, of type {values.dtype}; the gallery's are whole "
            "numbers: give a list of one per image"
        )
    return values.astype(np.int64)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)
