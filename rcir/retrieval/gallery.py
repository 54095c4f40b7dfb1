"""The gallery: ids, relevance and digests of the items whose vectors are in the index."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.labelling import added_relevance, query_relevance, require_same_kind
from rcir.data.match_table import MatchTable
from rcir.data.records import ImageSet
from rcir.data.relevance import SameLabel, SharedLabel, relevance_of
from rcir.data.relevance_protocol import Relevance
from rcir.embedding import Embedding
from rcir.errors import InvalidData
from rcir.inputs import as_numpy

MISSING = ("", "None", "nan", "<NA>", "NaT")  # values of an attribute that name no template


@dataclass(frozen=True, eq=False)
class Gallery:
    """n images, in the order of the index; copies that nobody can write to.

    Attributes:
        ids: (n,) names, texts.
        norms: (n,) float32, lengths of their vectors.
        relevance: which queries match them; None if that is not known.
        uncertainty: (n,) of an encoder that states it; or None.
        digests: (n,) see `rcir.data.digests`; of templates (n, m), see
            `template_digests`; or None.
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

    def relevance_for(self, queries: Relevance | None) -> Relevance:
        """The relevance, which is of the kind of the queries'.

        Raises:
            InvalidData: it is not, or not known.
        """
        if self.relevance is None:
            raise InvalidData("the gallery has no labels: what is a true match cannot be told")
        require_same_kind(queries, self.relevance)
        return self.relevance

    def query_relevance(
        self, labels: object, names: dict[int, str]
    ) -> tuple[Relevance, dict[int, str]]:
        """The relevance of queries, and the names of all labels, see `rcir.data.labelling`."""
        if self.relevance is None:
            raise InvalidData("the gallery has no labels: what is a true match cannot be told")
        return query_relevance(labels, self.relevance, names)

    @cached_property
    def by_digest(self) -> tuple[NDArray[np.bytes_], NDArray[np.int64]]:
        """The digests, ascending, and the position of each."""
        if self.digests is None:
            raise InvalidData("the digests of the gallery images are not known")
        order = np.argsort(self.digests, kind="stable")
        return self.digests[order], order

    @cached_property
    def copies(self) -> int:
        """How many images the one with most copies stands for, itself among them."""
        return int(np.unique(self.by_digest[0], return_counts=True)[1].max(initial=1))

    def digest(self) -> str:
        """Of all that an answer may depend on."""
        found = hashlib.sha256(json.dumps(self.ids.tolist()).encode())
        facts = {} if self.relevance is None else self.relevance.arrays()
        if self.uncertainty is not None:
            facts = facts | {"uncertainty": self.uncertainty}
        if self.items is not None:
            facts = facts | self.items.arrays()
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
            both("uncertainty"),
            None if self.digests is None else _digests(self.digests, others.digests),
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
            items=some(self.items),
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

    def new_relevance(
        self,
        labels: object,
        ids: NDArray[np.object_],
        names: dict[int, str],
        numbered: bool = False,
    ) -> tuple[Relevance | None, dict[int, str]]:
        """The relevance of images to add, and the names of all labels.

        Args:
            labels: of the kind that the gallery's are, see `rcir.data.labelling`; or a `Relevance`.
            ids: of the images to add.
            names: of the gallery's labels.
            numbered: see `rcir.data.labelling.added_relevance`.

        Raises:
            InvalidData: the gallery knows of no labels and some are given, or the other way round;
                or they are of another number, type or kind.
        """
        if isinstance(self.relevance, MatchTable) and labels is None:
            first = self.relevance.labels.shape[1]
            return MatchTable.items(len(ids)), names | dict(enumerate(ids.tolist(), first))
        if self.relevance is None or labels is None:
            if self.relevance is labels:
                return None, names
            known = "none" if self.relevance is None else f"them ({type(self.relevance).__name__})"
            raise InvalidData(f"give labels if and only if the gallery has labels: it has {known}")
        return added_relevance(labels, len(ids), self.relevance, names, numbered)


def _own(relevance: Relevance) -> Relevance:
    """A copy that nobody else can write to."""
    own = relevance_of(
        {name: _read_only(values.copy()) for name, values in relevance.arrays().items()}
    )
    if isinstance(own, SharedLabel):  # its matrix has arrays of its own
        for values in (own.labels.data, own.labels.indices, own.labels.indptr):
            _read_only(values)
    return own


def _digests(digests: NDArray[np.bytes_], further: NDArray[np.bytes_] | None) -> NDArray[np.bytes_]:
    """Of images, then of others, any of which may be templates of several pictures."""
    assert further is not None
    parts = [each.reshape(len(each), -1) for each in (digests, further)]
    found = np.zeros((len(digests) + len(further), max(each.shape[1] for each in parts)), "S32")
    found[: len(digests), : parts[0].shape[1]] = parts[0]
    found[len(digests) :, : parts[1].shape[1]] = parts[1]
    return found[:, 0] if digests.ndim == further.ndim == 1 else found


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    """Calibration depends on it."""
    values.setflags(write=False)
    return values


def _listed(ids: object) -> list[Any]:
    ids = as_numpy(ids)
    if isinstance(ids, str) or not isinstance(ids, Sequence | np.ndarray):
        raise InvalidData(f"ids is a {type(ids).__name__}: give a list of texts")
    return list(ids)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def templates_of(images: ImageSet, attribute: str) -> tuple[ImageSet, NDArray[np.int64]]:
    """Return the templates of an image set, and the template of each image.

    A template is a gallery item that stands for several images of one thing.

    Args:
        images: n of them.
        attribute: the attribute that names the template of each image.

    Returns:
        The first image of each template, in the order of the images, under the template's name and
        with its relevance; and (n,) the number of each image's template.

    Raises:
        InvalidData: there is no such attribute, an image has none, or images of one template match
            different queries.

    Example:
        >>> images = ImageSet(
        ...     np.zeros((3, 8, 8), np.uint8), np.array([4, 2, 4]), ["a", "b", "c"],
        ...     {"person": np.array(["Ann", "Bo", "Ann"])},
        ... )
        >>> templates, number = templates_of(images, "person")
        >>> templates.ids, templates.labels.tolist(), number.tolist()
        (['Ann', 'Bo'], [4, 2], [0, 1, 0])
    """
    if not isinstance(attribute, str) or attribute not in images.attributes:
        names = ", ".join(images.attributes) or "none"
        raise InvalidData(f"the gallery has no attribute {attribute!r}; it has {names}")
    values = images.attributes[attribute].astype(str)
    if nameless := int(np.isin(values, MISSING).sum()):
        raise InvalidData(
            f"{nameless} images of the gallery have no {attribute}: name the template of each; an "
            "image that stands alone can have its own id"
        )
    templates, first, number = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    first, number = first[order], np.argsort(order)[number]
    _check_templates(images, attribute, first[number])
    return replace(images.subset(first), ids=templates[order].tolist()), number


def template_digests(
    digests: NDArray[np.bytes_], template: NDArray[np.int64]
) -> NDArray[np.bytes_]:
    """Return the digests of the images of each template.

    Args:
        digests: (n,) of the images, see `rcir.data.digests`.
        template: (n,) the template of each, numbered from 0 on.

    Returns:
        (number of templates, m), empty where a template has fewer than m images.

    Example:
        >>> template_digests(np.array([b"a", b"b", b"c"]), np.array([0, 1, 0])).tolist()
        [[b'a', b'c'], [b'b', b'']]
    """
    counts = np.bincount(template)
    order = np.argsort(template, kind="stable")
    place = np.arange(len(template)) - np.repeat(np.cumsum(counts) - counts, counts)
    by_template = np.zeros((len(counts), counts.max()), digests.dtype)
    by_template[template[order], place] = digests[order]
    return by_template


def _check_templates(images: ImageSet, attribute: str, first: NDArray[np.int64]) -> None:
    """Raise `InvalidData` unless each image matches what the first of its template matches."""
    if _same_relevance(images, images.subset(first)):
        return
    for row, of_template in enumerate(first.tolist()):
        image, other = images.subset(np.array([row])), images.subset(np.array([of_template]))
        if _same_relevance(image, other):
            continue
        raise InvalidData(
            f"{image.ids[0]} and {other.ids[0]} are images of one template "
            f"({attribute} {image.attributes[attribute][0]}), and match different queries: give "
            "images of a template the same label, or name templates by another attribute"
        )


def _same_relevance(images: ImageSet, others: ImageSet) -> bool:
    arrays = others.relevance.arrays()
    return all(
        np.array_equal(values, arrays[name]) for name, values in images.relevance.arrays().items()
    )
