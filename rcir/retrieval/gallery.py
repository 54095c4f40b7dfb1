"""The items of a gallery."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from rcir.data.labelling import (
    added_relevance,
    query_relevance,
    reported_relevance,
    require_same_kind,
)
from rcir.data.names import require_utf8
from rcir.data.relevance import Relevance, SharedLabel
from rcir.embedding import Embedding, as_numpy
from rcir.errors import InvalidData
from rcir.store.codec import Array, decode, encode

DTYPES: Mapping[str, Any] = {
    "ids": object,
    "norms": np.float32,
    "uncertainty": np.float64,
    "digests": bytes,
    "clusters": str,
    "keys": str,
}


@dataclass(frozen=True, eq=False)
class Gallery:
    """n gallery items in the order of the index, as read-only copies.

    Attributes:
        ids: (n,) names, strings.
        norms: (n,) float32, lengths of the vectors.
        relevance: which queries match the items; None if unknown.
        uncertainty: (n,) uncertainties from the encoder or passed with the vectors; or None.
        digests: digests of the images or vectors, see `rcir.data.repeats`, (n,), or for templates
            (n, m), see `template_digests`; or None.
        items: embeddings, for an encoder that re-ranks with them; or None.
        clusters: (n,) strings, the cluster of each item, such as the moment in which photographs
            were taken; or None if the items are independent.
        keys: (n,) strings, the part of each item, such as a site or a tenant: a query is searched
            in the part that it names; or None if each query is searched in all items.

    Raises:
        InvalidData: lengths differ, or norms or uncertainties are not finite numbers.
    """

    ids: Annotated[NDArray[np.object_], Array(1)]
    norms: Annotated[NDArray[np.float32], Array(1)]
    relevance: Relevance | None = None
    uncertainty: Annotated[NDArray[np.float64], Array(1)] | None = None
    digests: NDArray[np.bytes_] | None = None
    items: Embedding | None = None
    clusters: Annotated[NDArray[np.str_], Array(1)] | None = None
    keys: Annotated[NDArray[np.str_], Array(1)] | None = None

    def __post_init__(self) -> None:
        for name, dtype in DTYPES.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _read_only(np.array(getattr(self, name), dtype)))
        if self.relevance is not None:
            object.__setattr__(self, "relevance", _read_only_copy(self.relevance))
        n = len(self.norms)
        for field in fields(self):
            values = getattr(self, field.name)
            if values is not None and len(values) != n:
                names = {"relevance": "labels", "uncertainty": "uncertainties"}
                name = names.get(field.name, field.name)
                raise InvalidData(f"{len(values)} {name} for {n} vectors: pass one per vector")
        for name in ("norms", "uncertainty"):
            values = getattr(self, name)
            if values is not None and (values.ndim != 1 or not np.isfinite(values).all()):
                raise InvalidData(
                    f"{name} of the gallery has shape {values.shape}; expected one number for each "
                    "item, not NaN or infinite"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles of read-only arrays can be written to: what was digested stays behind.
        return Gallery, tuple(getattr(self, field.name) for field in fields(self))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """The labels (n,) of the items; None unless items match by having the same label."""
        return None if self.relevance is None else self.relevance.single

    def relevance_for(self, queries: Relevance | None) -> Relevance:
        """Return the relevance of the items; `InvalidData` if the queries have another kind."""
        relevance = self._known_relevance()
        require_same_kind(queries, relevance)
        return relevance

    def query_relevance(
        self, labels: object, names: Mapping[int, str]
    ) -> tuple[Relevance, dict[int, str]]:
        """Return the relevance of queries and all label names, see `rcir.data.labelling`."""
        return query_relevance(labels, self._known_relevance(), names)

    def reported_relevance(
        self, labels: Sequence[Any], names: Mapping[int, str]
    ) -> tuple[Relevance, dict[int, str]]:
        """Return what `query_relevance` does, with None as the label of an unmatched query."""
        return reported_relevance(labels, self._known_relevance(), names)

    def _known_relevance(self) -> Relevance:
        if self.relevance is None:
            raise InvalidData(
                "the gallery has no labels, so true matches are unknown: build it with labels"
            )
        return self.relevance

    @cached_property
    def by_digest(self) -> tuple[NDArray[np.bytes_], NDArray[np.int64]]:
        """The digests in ascending order, and the position of each; `InvalidData` without any."""
        if self.digests is None:
            raise InvalidData("the gallery has no digests of its items: pass `digests`")
        order = np.argsort(self.digests, kind="stable")
        return self.digests[order], order

    @cached_property
    def units(self) -> NDArray[np.int64]:
        """(n,) the unit of each item: items with one digest or of one cluster share their unit.

        An item is left out of a search together with its unit. Templates are units of their own.
        """
        n = len(self)
        if self.digests is None or self.digests.ndim > 1:
            return np.arange(n)
        units: NDArray[np.int64] = np.unique(self.digests, return_inverse=True)[1]
        if self.clusters is not None:
            cluster = np.unique(self.clusters, return_inverse=True)[1]
            size = max(units.max(), cluster.max()) + 1
            links = coo_array((np.ones(n, bool), (units, size + cluster)), shape=(2 * size,) * 2)
            units = connected_components(links, directed=False)[1][units].astype(np.int64)
        return units

    @cached_property
    def largest_unit(self) -> int:
        """The largest number of items that share a unit, at least 1."""
        return int(np.unique(self.units, return_counts=True)[1].max(initial=1))

    @cached_property
    def _by_unit(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The units in ascending order, and the position of each item in that order."""
        order = np.argsort(self.units, kind="stable")
        return self.units[order], order

    @cached_property
    def by_label(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The labels in ascending order, and the position of each item in that order.

        Items of one label are in the order of their keys.
        """
        assert self.labels is not None
        order = np.lexsort((self._numbered_keys[1], self.labels))
        return self.labels[order], order

    @cached_property
    def classes(self) -> NDArray[np.int64]:
        """The different labels (L,), ascending."""
        return np.unique(self.by_label[0])

    @cached_property
    def _numbered_keys(self) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
        """The different keys, ascending, and the number (n,) of that of each item."""
        keys = np.zeros(len(self), "U1") if self.keys is None else self.keys
        names, numbers = np.unique(keys, return_inverse=True)
        return names, numbers.astype(np.int64)

    @property
    def parts(self) -> list[str]:
        """The different keys of the items, ascending; empty without keys."""
        return [] if self.keys is None else self._numbered_keys[0].tolist()

    def part(self, key: str) -> NDArray[np.int64]:
        """Return the positions (m,) of the items with a key, ascending."""
        return np.flatnonzero(self.keys == key)

    @cached_property
    def kinds(self) -> NDArray[np.int64]:
        """(n,) numbers, equal for items that have the same label and the same key."""
        return self._kinds(self.labels, self._numbered_keys[1])

    def _kinds(self, labels: Any, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        codes = np.searchsorted(self.classes, labels)
        return np.asarray(codes * len(self._numbered_keys[0]) + keys, np.int64)

    def of_labels(
        self, labels: NDArray[np.int64], keys: NDArray[np.str_] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first place in `by_label` of the items with labels (n, m), and their number.

        `keys` (n,) restrict the items of each row to one part.
        """
        ascending = self.by_label[0]
        if keys is not None:
            numbers = np.searchsorted(self._numbered_keys[0], keys)
            ascending, labels = self._ascending_kinds, self._kinds(labels, numbers[:, None])
        first = np.searchsorted(ascending, labels)
        return first, np.searchsorted(ascending, labels, "right") - first

    @cached_property
    def _ascending_kinds(self) -> NDArray[np.int64]:
        return self.kinds[self.by_label[1]]

    def has_label(
        self, keys: NDArray[np.str_], left_out: NDArray[np.int64] | None
    ) -> NDArray[np.bool_]:
        """(n, L) True where the part with a key (n,) has an item of a label, in ascending order.

        `left_out` are units (n,) whose items do not count, -1 for none.
        """
        labels: Any = self.labels
        codes = np.searchsorted(self.classes, labels)
        counts = np.empty((len(keys), len(self.classes)), np.int32)
        for key in np.unique(keys):
            counts[keys == key] = np.bincount(codes[self.part(key)], minlength=len(self.classes))
        if left_out is not None:
            items = self.members(left_out)
            assert self.keys is not None
            row, column = np.nonzero((items >= 0) & (self.keys[items] == keys[:, None]))
            np.subtract.at(counts, (row, codes[items[row, column]]), 1)
        return counts > 0

    def members(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions (n, `largest_unit`) of the items of units (n,), then -1."""
        ascending, order = self._by_unit
        first = np.searchsorted(ascending, units, "left")
        count = np.searchsorted(ascending, units, "right") - first
        steps = np.arange(self.largest_unit)
        rows = np.minimum(first[:, None] + steps, len(ascending) - 1)
        return np.where(steps < count[:, None], order[rows], -1)

    def units_of(
        self, digests: NDArray[np.bytes_], clusters: NDArray[np.str_] | None = None
    ) -> NDArray[np.int64]:
        """Return the unit (n,) of queries, -1 for those that belong to none.

        Args:
            digests: (n,) of the queries; a query that is an item has the item's unit.
            clusters: (n,) of the queries; a query that is not an item gets the unit of its cluster.
        """
        units = np.full(len(digests), -1)
        if clusters is not None and self.clusters is not None:
            names, first = np.unique(self.clusters, return_index=True)
            rows = np.minimum(np.searchsorted(names, clusters), len(names) - 1)
            units = np.where(names[rows] == clusters, self.units[first[rows]], units)
        rows = self.rows_of(digests)
        return np.where(rows >= 0, self.units[rows], units)

    def rows_of(self, digests: NDArray[np.bytes_]) -> NDArray[np.int64]:
        """Return the position (n,) of an item with each digest (n,), -1 if there is none."""
        ascending, order = self.by_digest
        rows = np.minimum(np.searchsorted(ascending, digests), len(ascending) - 1)
        return np.where(ascending[rows] == digests, order[rows], -1)

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 digest of everything in the gallery that an answer may depend on."""
        sha256 = hashlib.sha256(json.dumps(self.ids.tolist()).encode())
        plain, arrays = encode(self.relevance, Relevance | None)
        sha256.update(json.dumps(plain).encode())
        if self.uncertainty is not None:
            arrays = arrays | {"uncertainty": self.uncertainty}
        if self.items is not None:
            arrays = arrays | self.items.arrays()
        if (self.norms != 1).any():
            arrays = arrays | {"norms": self.norms}
        if self.clusters is not None:
            arrays = arrays | {"units": self.units}  # cluster names do not affect answers
        if self.keys is not None:
            sha256.update(json.dumps(self.keys.tolist()).encode())
        for name, values in arrays.items():
            sha256.update(name.encode() + values.tobytes())
        return sha256.hexdigest()

    def restore_fingerprint(self, digest: str) -> None:
        """Take the fingerprint that this gallery had when it was stored."""
        self.__dict__["fingerprint"] = digest  # where `cached_property` keeps it

    def joined(self, others: Gallery) -> Gallery:
        """Return these items, then others; attributes that only the others have are dropped."""
        if self.uncertainty is not None and others.uncertainty is None:
            raise InvalidData("the gallery has uncertainties: pass those of the new images")

        def both(name: str) -> Any:
            values, further = getattr(self, name), getattr(others, name)
            return None if values is None else np.concatenate([values, further])

        return Gallery(
            ids=both("ids"),
            norms=both("norms"),
            relevance=None if self.relevance is None else self.relevance.joined(others.relevance),
            uncertainty=both("uncertainty"),
            digests=None if self.digests is None else _joined(self.digests, others.digests),
            items=None
            if self.items is None or others.items is None
            else Embedding.concatenate([self.items, others.items]),
            clusters=both("clusters"),
            keys=both("keys"),
        )

    def subset(self, rows: NDArray[np.int64]) -> Gallery:
        """Return the items of some rows, in that order."""
        selected: dict[str, Any] = {}
        for field in fields(self):
            values = getattr(self, field.name)
            if values is not None:
                of_relevance = field.name == "relevance"
                selected[field.name] = values.subset(rows) if of_relevance else values[rows]
        return Gallery(**selected)

    def positions(self, ids: object) -> NDArray[np.int64]:
        """Return the positions (m,) of items by their ids, ascending, each once."""
        try:
            names = set(_as_list(ids))
        except TypeError:
            raise InvalidData(f"ids is {ids!r}: pass a list of strings") from None
        if absent := sorted(map(repr, names.difference(self.ids.tolist()))):
            raise InvalidData(f"{len(absent)} ids are not in the gallery: {_abbreviated(absent)}")
        return np.flatnonzero([name in names for name in self.ids.tolist()])

    def new_relevance(
        self,
        labels: object,
        ids: NDArray[np.object_],
        names: Mapping[int, str],
        numbered: bool = False,
    ) -> tuple[Relevance | None, Mapping[int, str]]:
        """Return the relevance of images to add, and the names of all labels.

        The arguments are those of `rcir.data.labelling.added_relevance`.
        """
        if labels is None and isinstance(self.relevance, SharedLabel) and self.relevance.of_items:
            first = self.relevance.labels.shape[1]
            return SharedLabel.items(len(ids)), {**names, **dict(enumerate(ids.tolist(), first))}
        if self.relevance is None or labels is None:
            if self.relevance is labels:
                return None, names
            kind = "none" if self.relevance is None else f"some ({self.relevance.kind})"
            raise InvalidData(f"pass labels if and only if the gallery has labels; it has {kind}")
        return added_relevance(labels, len(ids), self.relevance, names, numbered)


def check_ids(ids: object, images: int, present: Collection[str] = ()) -> NDArray[np.object_]:
    """Return ids (images,) of new items as an array, or raise `InvalidData` if they are not as many
    different UTF-8 strings as `images`, none of which is `present` in the gallery.
    """
    names = _as_list(ids)
    if len(names) != images:
        raise InvalidData(f"got {len(names)} ids for {images} images: pass one id per image")
    if others := [name for name in names if not isinstance(name, str)]:
        kind = type(others[0]).__name__
        raise InvalidData(f"{len(others)} ids are not strings, such as {others[0]!r} ({kind})")
    require_utf8(names, "ids", "pass names without lone surrogates")
    shared = set(names).intersection(present)
    if duplicates := [name for name in names if name in shared]:
        raise InvalidData(
            f"{len(duplicates)} of {len(names)} ids are already in the gallery "
            f"({_abbreviated(duplicates)}): `remove` these first, or choose other ids"
        )
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise InvalidData(f"ids occur more than once: {_abbreviated(repeated)}")
    return np.array([str(name) for name in names], object)  # not `np.str_`


def _read_only_copy(relevance: Relevance) -> Relevance:
    """Return a copy whose arrays cannot be written to."""
    plain, arrays = encode(relevance, Relevance)
    copies = {name: _read_only(values.copy()) for name, values in arrays.items()}
    copy: Relevance = decode(Relevance, plain, copies)  # type: ignore[type-abstract]
    if isinstance(copy, SharedLabel):  # its sparse matrix has further arrays
        for values in (copy.labels.data, copy.labels.indices, copy.labels.indptr):
            _read_only(values)
    return copy


def _joined(digests: NDArray[np.bytes_], further: NDArray[np.bytes_] | None) -> NDArray[np.bytes_]:
    """Return the digests of items, then those of others; either may be templates, (n, m)."""
    assert further is not None
    parts = [each.reshape(len(each), -1) for each in (digests, further)]
    joined = np.zeros((len(digests) + len(further), max(each.shape[1] for each in parts)), "S32")
    joined[: len(digests), : parts[0].shape[1]] = parts[0]
    joined[len(digests) :, : parts[1].shape[1]] = parts[1]
    return joined[:, 0] if digests.ndim == further.ndim == 1 else joined


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    """Make an array read-only, because calibration depends on it, and return it."""
    values.setflags(write=False)
    return values


def _as_list(ids: object) -> list[Any]:
    ids = as_numpy(ids)
    if isinstance(ids, str) or not isinstance(ids, Sequence | np.ndarray):
        raise InvalidData(f"ids is of type {type(ids).__name__}: pass a list of strings")
    return list(ids)


def _abbreviated(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)
