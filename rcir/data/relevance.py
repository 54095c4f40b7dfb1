"""Relevance by labels: the same one, or one in common, stored sparse; any kind from arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from rcir.data.overlap import count_overlaps, products
from rcir.data.relevance_protocol import Pairs, Relevance, Rows, require_kind, row_pointers
from rcir.data.within_radius import WithinRadius
from rcir.errors import InvalidData


@dataclass(frozen=True)
class SameLabel:
    """Images match if their labels are equal.

    Args:
        labels: (n,) int64.

    Example:
        >>> queries, gallery = SameLabel(np.array([3, 5])), SameLabel(np.array([5, 5, 3]))
        >>> queries.of(gallery, np.array([[0, 2], [0, 1]])).tolist(), queries.totals(gallery)
        ([[False, True], [True, True]], array([1, 2]))
    """

    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, rows: Rows) -> SameLabel:
        return SameLabel(self.labels[rows])

    def of(self, gallery: SameLabel, positions: Rows) -> NDArray[np.bool_]:
        if not len(gallery):
            return np.zeros(positions.shape, np.bool_)
        matches: NDArray[np.bool_] = (gallery.labels[positions] == self.labels[:, None]) & (
            positions >= 0
        )
        return matches

    def totals(self, gallery: SameLabel) -> NDArray[np.int64]:
        ordered = np.sort(gallery.labels)
        first = np.searchsorted(ordered, self.labels)
        return np.asarray(np.searchsorted(ordered, self.labels, "right") - first, np.int64)

    def pairs(self, rows: Rows) -> Pairs:
        order, ordered = self._ordered
        first = np.searchsorted(ordered, self.labels[rows])
        indptr = row_pointers(np.searchsorted(ordered, self.labels[rows], "right") - first)
        steps = np.repeat(first - indptr[:-1], np.diff(indptr))
        return indptr, order[steps + np.arange(indptr[-1])]

    @cached_property
    def _ordered(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The images by label, then row; and their labels."""
        order = np.argsort(self.labels, kind="stable")
        return order, self.labels[order]

    def joined(self, others: SameLabel) -> SameLabel:
        require_kind(SameLabel, others)
        return SameLabel(_read_only(np.concatenate([self.labels, others.labels])))

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"labels": self.labels}


@dataclass(frozen=True)
class SharedLabel:
    """Images match if they have a label in common, such as one of several findings of an X-ray.

    Args:
        labels: (n, number of labels) bool, sparse.

    Example:
        >>> queries = SharedLabel.of_lists([[0, 2], []], 3)
        >>> gallery = SharedLabel.of_lists([[2], [1], [0, 1]], 3)
        >>> queries.of(gallery, np.array([[0, 1], [0, 1]])).tolist(), queries.totals(gallery)
        ([[True, False], [False, False]], array([2, 0]))
    """

    labels: csr_array

    @classmethod
    def of_lists(cls, lists: Sequence[Sequence[int]], n_labels: int) -> SharedLabel:
        """Of the numbers of the labels of each image, from 0 to `n_labels` - 1."""
        rows = np.repeat(np.arange(len(lists)), [len(numbers) for numbers in lists])
        columns = np.array([number for numbers in lists for number in numbers], np.int64)
        entries = np.ones(len(rows), np.bool_)
        return cls(csr_array((entries, (rows, columns)), shape=(len(lists), n_labels)))

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def subset(self, rows: Rows) -> SharedLabel:
        return SharedLabel(self.labels[rows])

    def of(self, gallery: SharedLabel, positions: Rows) -> NDArray[np.bool_]:
        if not len(gallery):
            return np.zeros(positions.shape, np.bool_)
        theirs = gallery.labels[positions.reshape(-1)]
        own = self.labels[np.repeat(np.arange(len(self)), positions.shape[1])]
        shared = np.diff(theirs.multiply(own).tocsr().indptr) > 0
        matches: NDArray[np.bool_] = shared.reshape(positions.shape) & (positions >= 0)
        return matches

    def totals(self, gallery: SharedLabel) -> NDArray[np.int64]:
        return count_overlaps(self.labels, gallery.labels)

    def pairs(self, rows: Rows) -> Pairs:
        found = [product.sorted_indices() for _, product in products(self.labels[rows], self._by)]
        counts = [np.diff(product.indptr) for product in found]
        columns = [product.indices for product in found]
        none = np.empty(0, np.int64)
        return row_pointers(np.concatenate([*counts, none])), np.concatenate([*columns, none])

    @cached_property
    def _by(self) -> csr_array:
        """(number of labels, n): which images have each label."""
        return self.labels.T.tocsr()

    def joined(self, others: SharedLabel) -> SharedLabel:
        require_kind(SharedLabel, others)
        if others.labels.shape[1] != self.labels.shape[1]:
            raise InvalidData(
                f"images of {self.labels.shape[1]} labels cannot be joined with images of "
                f"{others.labels.shape[1]}: give the same labels"
            )
        return SharedLabel(vstack([self.labels, others.labels], format="csr"))

    def arrays(self) -> dict[str, NDArray[Any]]:
        shape = np.array(self.labels.shape, np.int64)
        return {"shape": shape, "indptr": self.labels.indptr, "indices": self.labels.indices}


def relevance_of(arrays: Mapping[str, NDArray[Any]]) -> Relevance:
    """The relevance that was given as `Relevance.arrays`; raises KeyError for other arrays."""
    if "labels" in arrays:
        return SameLabel(_read_only(arrays["labels"]))
    if "places" in arrays:
        return WithinRadius(arrays["places"], float(arrays["radius"][0]))
    if "table.shape" in arrays:
        from rcir.data.match_table import MatchTable  # which is a kind of `SharedLabel`

        return MatchTable(_labels({name[6:]: values for name, values in arrays.items()}))
    return SharedLabel(_labels(arrays))


def _labels(arrays: Mapping[str, NDArray[Any]]) -> csr_array:
    entries = np.ones(len(arrays["indices"]), np.bool_)
    shape = tuple(arrays["shape"].tolist())
    return csr_array((entries, arrays["indices"], arrays["indptr"]), shape=shape)


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    """A gallery's calibration depends on it."""
    values.setflags(write=False)
    return values
