"""Relevance of images: by the same label, a shared label, a place nearby, or a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from numbers import Real
from typing import Annotated, Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import block_diag, csr_array, eye_array, vstack
from scipy.spatial import KDTree

from rcir.embedding import as_vectors
from rcir.errors import InvalidData
from rcir.store.codec import NOT_STORED, Array, convert, encode, register

Rows = NDArray[np.integer[Any]]
Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]
CELL = 10.0  # side of the cells that stand for labels of places, of the radius
CELL_FACTOR = np.int64(6364136223846793005)  # odd and large: numbers of near cells differ
PAIRS_TOGETHER = 2**16  # of candidates that are looked at together, to bound the memory
BLOCK_ENTRIES = 2**22  # entries, or bytes, that are in memory at a time, about
WORD_BITS = 64


@runtime_checkable
class Relevance(Protocol):
    """Relevance of n images: which of them, and of others, match which.

    Matches follow from the labels or places of the images and are never stored, so that memory
    grows with the number of images, not of pairs.
    """

    @property
    def kind(self) -> str:
        """The property by which images match, for messages."""
        ...

    @property
    def single(self) -> NDArray[np.int64] | None:
        """(n,) the label of each image, where they match by one label each; else None."""
        ...

    def __len__(self) -> int:
        """Number of images."""
        ...

    def subset(self, rows: Rows) -> Self:
        """Return the relevance of some images, in that order."""
        ...

    def matches(self, gallery: Self, positions: Rows) -> NDArray[np.bool_]:
        """Return whether candidates, (n, k) positions in the gallery, match; -1 matches nothing."""
        ...

    def totals(self, gallery: Self) -> NDArray[np.int64]:
        """Count the true matches of each image in a gallery, (n,)."""
        ...

    def pairs(self, rows: Rows) -> Pairs:
        """Return the matches of some rows (m,) among the images of this set.

        Returns:
            indptr (m + 1,) and columns (total,): `columns[indptr[i] : indptr[i + 1]]` are the
            images that match `rows[i]`, ascending; itself is one of them, unless it has no label.
        """
        ...

    def joined(self, others: Any) -> Self:
        """Return the relevance of these images, then others; `InvalidData` for other kinds."""
        ...


def require_kind(relevance: Relevance, others: Relevance) -> None:
    """Raise `InvalidData` unless others match in the same way."""
    if relevance.kind != others.kind:
        raise InvalidData(
            f"images that match by {relevance.kind} cannot be joined with images that match by "
            f"{others.kind}"
        )


@register
@dataclass(frozen=True)
class WithinRadius:
    """Images match if they were taken within a distance of each other.

    Args:
        places: (n, d) coordinates, d = 2 for easting and northing in metres; an array, a list, a
            tensor or a frame.
        radius: distance up to which images match, in the same unit; above 0.
        near: distance up to which images are positives of each other in training, at most and by
            default the radius. Other matches are not negatives either.
        database: (n,) bool, of images that train or validate: whether each is searched or a query.
            The anchors of tuples are then queries, their positives and negatives are searched, and
            validation searches likewise (Arandjelovic et al., CVPR 2016). None: all are both.

    Example:
        >>> queries = WithinRadius(np.array([[0.0, 0.0]]), 25.0)
        >>> gallery = WithinRadius(np.array([[0.0, 25.0], [20.0, 20.0]]), 25.0)
        >>> queries.matches(gallery, np.array([[0, 1]])).tolist(), queries.totals(gallery)
        ([[True, False]], array([1]))
    """

    places: Annotated[NDArray[np.float64], Array(2)]
    radius: float
    near: float | None = field(default=None, metadata=NOT_STORED)
    database: NDArray[np.bool_] | None = field(default=None, metadata=NOT_STORED)

    kind: ClassVar[str] = "places"
    single: ClassVar[None] = None

    def __post_init__(self) -> None:
        try:
            places = np.asarray(as_vectors(self.places), np.float64)
        except InvalidData:
            places = np.empty(0)
        radius: Any = self.radius
        is_number = isinstance(radius, Real) and not isinstance(radius, bool)
        radius = float(radius) if is_number else np.nan
        if places.ndim != 2 or not np.isfinite(places).all() or not 0 < radius < np.inf:
            shape = getattr(self.places, "shape", None)
            kind = type(self.places).__name__ if shape is None else f"shape {tuple(shape)}"
            raise InvalidData(
                f"places are of {kind} and radius is {self.radius!r}; give (n, d) finite "
                "coordinates and a radius that is a finite number above 0"
            )
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "radius", radius)
        if self.near is not None and not 0 < self.near <= self.radius:
            raise InvalidData(
                f"near is {self.near}; it must be above 0 and at most the radius, {self.radius}"
            )
        if self.database is not None and self.database.shape != (len(self.places),):
            raise InvalidData(
                f"database has shape {self.database.shape}; it must be ({len(self.places)},)"
            )

    def __len__(self) -> int:
        return len(self.places)

    def subset(self, rows: Rows) -> WithinRadius:
        database = None if self.database is None else self.database[rows]
        return WithinRadius(self.places[rows], self.radius, self.near, database)

    @property
    def cells(self) -> NDArray[np.int64]:
        """(n,) number of each place's cell, of 10 times the radius: the unit of new places."""
        steps = np.floor(self.places / (CELL * self.radius)).astype(np.int64)
        return steps @ CELL_FACTOR ** np.arange(steps.shape[1], dtype=np.int64)  # modulo 2^64

    def positives(self, anchors: Rows, others: Rows) -> NDArray[np.bool_]:
        """Return whether others are positives of anchors in training, pair by pair, (m,)."""
        steps = self.places[others] - self.places[anchors]
        near = self.radius if self.near is None else self.near
        positive: NDArray[np.bool_] = np.square(steps).sum(-1) <= near**2
        if self.database is not None:
            positive &= self.database[others] & ~self.database[anchors]
        return positive

    def matches(self, gallery: WithinRadius, positions: Rows) -> NDArray[np.bool_]:
        if not len(gallery):
            return np.zeros(positions.shape, np.bool_)
        steps = gallery.places[positions] - self.places[:, None]
        is_near: NDArray[np.bool_] = np.square(steps).sum(-1) <= self.radius**2
        return is_near & (positions >= 0)

    def totals(self, gallery: WithinRadius) -> NDArray[np.int64]:
        counts = gallery._tree.query_ball_point(self.places, self.radius, return_length=True)
        return np.asarray(counts, np.int64)

    def pairs(self, rows: Rows) -> Pairs:
        if not len(rows):
            return np.zeros(1, np.int64), np.empty(0, np.int64)
        tree = KDTree(self.places[rows])
        near = tree.sparse_distance_matrix(self._tree, self.radius, output_type="ndarray")
        order = np.lexsort((near["j"], near["i"]))
        counts = np.bincount(near["i"], minlength=len(rows))
        return row_pointers(counts), near["j"][order].astype(np.int64)

    @cached_property
    def _tree(self) -> KDTree:
        return KDTree(self.places)

    def joined(self, others: WithinRadius) -> WithinRadius:
        require_kind(self, others)
        if others.radius != self.radius or others.places.shape[1] != self.places.shape[1]:
            raise InvalidData(
                f"{self.places.shape[1]} coordinates and radius {self.radius} cannot be joined "
                f"with {others.places.shape[1]} and {others.radius}"
            )
        return WithinRadius(np.concatenate([self.places, others.places]), self.radius)


def find_database(relevance: Relevance) -> NDArray[np.bool_] | None:
    """Return whether each image (n,) is searched, not a query; None if all images are both."""
    return relevance.database if isinstance(relevance, WithinRadius) else None


def find_query_rows(relevance: Relevance) -> NDArray[np.int64]:
    """Return the rows of the queries: the anchors of tuples, and the queries of a validation."""
    database = find_database(relevance)
    return np.arange(len(relevance)) if database is None else np.flatnonzero(~database)


@register
@dataclass(frozen=True)
class SameLabel:
    """Images match if their labels are equal.

    Args:
        labels: (n,) int64.

    Example:
        >>> queries, gallery = SameLabel(np.array([3, 5])), SameLabel(np.array([5, 5, 3]))
        >>> queries.matches(gallery, np.array([[0, 2], [0, 1]])).tolist(), queries.totals(gallery)
        ([[False, True], [True, True]], array([1, 2]))
    """

    labels: Annotated[NDArray[np.int64], Array(1)]

    kind: ClassVar[str] = "one label each"

    @property
    def single(self) -> NDArray[np.int64]:
        return self.labels

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, rows: Rows) -> SameLabel:
        return SameLabel(self.labels[rows])

    def matches(self, gallery: SameLabel, positions: Rows) -> NDArray[np.bool_]:
        if not len(gallery):
            return np.zeros(positions.shape, np.bool_)
        is_same: NDArray[np.bool_] = gallery.labels[positions] == self.labels[:, None]
        return is_same & (positions >= 0)

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
        """Return the images by label, then row; and their labels."""
        order = np.argsort(self.labels, kind="stable")
        return order, self.labels[order]

    def joined(self, others: SameLabel) -> SameLabel:
        require_kind(self, others)
        labels = np.concatenate([self.labels, others.labels])
        labels.setflags(write=False)  # the calibration of a gallery depends on them
        return SameLabel(labels)


@dataclass(frozen=True)
class StoredLabels:
    """A sparse table of labels as it is stored: all of its entries are True."""

    shape: tuple[int, int]
    indptr: Annotated[NDArray[np.integer[Any]], Array(1)]
    indices: Annotated[NDArray[np.integer[Any]], Array(1)]

    @classmethod
    def from_table(cls, labels: csr_array) -> StoredLabels:
        """Return what is stored of a table."""
        n, n_labels = labels.shape
        return cls((int(n), int(n_labels)), labels.indptr, labels.indices)

    def table(self) -> csr_array:
        """Return the table, or raise `InvalidData` if there can be none."""
        entries = np.ones(len(self.indices), np.bool_)
        try:
            table = csr_array((entries, self.indices, self.indptr), shape=self.shape)
            table.check_format(full_check=True)
        except (ValueError, TypeError) as error:
            raise InvalidData(f"the table of labels is invalid: {error}") from error
        return table


convert(csr_array, StoredLabels, StoredLabels.from_table, StoredLabels.table)


@register
@dataclass(frozen=True)
class SharedLabel:
    """Images match if they have a label in common, such as one of several findings of an X-ray.

    A table of true matches is of this kind too: each gallery item has a label of its own, and
    queries have those of the items that they match.

    Args:
        labels: (n, number of labels) bool, sparse.
        of_items: True if the labels are the items of a gallery.

    Example:
        >>> queries = SharedLabel.from_lists([[0, 2], []], 3)
        >>> gallery = SharedLabel.from_lists([[2], [1], [0, 1]], 3)
        >>> queries.matches(gallery, np.array([[0, 1], [0, 1]])).tolist(), queries.totals(gallery)
        ([[True, False], [False, False]], array([2, 0]))
    """

    labels: csr_array
    of_items: bool = False

    single: ClassVar[None] = None

    @classmethod
    def from_lists(
        cls, lists: Sequence[Sequence[int]], n_labels: int, of_items: bool = False
    ) -> SharedLabel:
        """Make one from the numbers of the labels of each image, from 0 to `n_labels` - 1."""
        rows = np.repeat(np.arange(len(lists)), [len(numbers) for numbers in lists])
        columns = np.array([number for numbers in lists for number in numbers], np.int64)
        entries = np.ones(len(rows), np.bool_)
        return cls(csr_array((entries, (rows, columns)), shape=(len(lists), n_labels)), of_items)

    @classmethod
    def items(cls, n: int) -> SharedLabel:
        """Return the relevance of n gallery items in a table of true matches."""
        return cls(csr_array(eye_array(n, dtype=np.bool_, format="csr")), of_items=True)

    @property
    def kind(self) -> str:
        return "a table of matches" if self.of_items else "shared labels"

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def subset(self, rows: Rows) -> SharedLabel:
        return SharedLabel(self.labels[rows], self.of_items)

    def matches(self, gallery: SharedLabel, positions: Rows) -> NDArray[np.bool_]:
        if not len(gallery):
            return np.zeros(positions.shape, np.bool_)
        queries = self.labels[np.repeat(np.arange(len(self)), positions.shape[1])]
        shared = gallery.labels[positions.reshape(-1)].multiply(queries).tocsr()
        shares: NDArray[np.bool_] = (np.diff(shared.indptr) > 0).reshape(positions.shape)
        return shares & (positions >= 0)

    def totals(self, gallery: SharedLabel) -> NDArray[np.int64]:
        """Count the matches of each image (n,); `InvalidData` if a table lacks gallery items."""
        more = gallery.labels.shape[1] - self.labels.shape[1]
        if self.of_items and more:
            raise InvalidData(
                f"{more} gallery items were added after the table of true matches was made, which "
                "does not say which queries match them: calibrate with newly labelled queries"
            )
        return count_overlaps(self.labels, gallery.labels)

    def pairs(self, rows: Rows) -> Pairs:
        shared = [
            product.sorted_indices() for product in products(self.labels[rows], self._rows_by_label)
        ]
        counts = [np.diff(product.indptr) for product in shared]
        columns = [product.indices for product in shared]
        none = np.empty(0, np.int64)
        return row_pointers(np.concatenate([*counts, none])), np.concatenate([*columns, none])

    @cached_property
    def _rows_by_label(self) -> csr_array:
        """(number of labels, n): which images have each label."""
        return self.labels.T.tocsr()

    def joined(self, others: SharedLabel) -> SharedLabel:
        """Join two sets; items of a gallery in a table of matches keep labels of their own."""
        require_kind(self, others)
        if self.of_items:
            labels = csr_array(block_diag([self.labels, others.labels], format="csr"))
            return SharedLabel(labels, of_items=True)
        if others.labels.shape[1] != self.labels.shape[1]:
            raise InvalidData(
                f"images of {self.labels.shape[1]} labels cannot be joined with images of "
                f"{others.labels.shape[1]}"
            )
        return SharedLabel(vstack([self.labels, others.labels], format="csr"))


def same_relevance(relevance: Relevance, other: Relevance) -> bool:
    """Return True if two sets of images match by the same kind of thing, and by equal values."""
    if relevance.kind != other.kind or len(relevance) != len(other):
        return False
    if isinstance(relevance, WithinRadius) and relevance.radius != getattr(other, "radius", None):
        return False
    arrays, others = encode(relevance)[1], encode(other)[1]
    return arrays.keys() == others.keys() and all(
        np.array_equal(values, others[name]) for name, values in arrays.items()
    )


def count_matches(gallery: Relevance, positions: Rows, among: int) -> NDArray[np.int64]:
    """Count the first `among` candidates of a query that match each of its candidates, (n, k).

    A candidate counts itself if it is among the first. Positions (n, k) of -1 stand for none.
    """
    count: Callable[..., NDArray[np.int64]] = (
        _count_shared if isinstance(gallery, SharedLabel) else _count_pair_by_pair
    )
    counts = np.zeros(positions.shape, np.int64)
    step = max(1, PAIRS_TOGETHER // max(1, positions.shape[1] * min(among, positions.shape[1])))
    for start in range(0, len(positions), step):
        rows = slice(start, start + step)
        counts[rows] = count(gallery, positions[rows], among)
    return counts


def _count_pair_by_pair(gallery: Relevance, positions: Rows, among: int) -> NDArray[np.int64]:
    voters = np.repeat(positions[:, :among], positions.shape[1], axis=0)
    votes = gallery.subset(positions.reshape(-1)).matches(gallery, voters).sum(axis=1)
    return np.where(positions >= 0, votes.reshape(positions.shape), 0)


def _count_shared(gallery: SharedLabel, positions: Rows, among: int) -> NDArray[np.int64]:
    """Count by one sparse product, thirty times as fast as pair by pair."""
    labels, voters = (_labels_by_query(gallery, x) for x in (positions, positions[:, :among]))
    counts: NDArray[np.int64] = np.diff((labels @ voters.T).tocsr().indptr)
    return counts.reshape(positions.shape)


def _labels_by_query(gallery: SharedLabel, positions: Rows) -> csr_array:
    """Return the labels of each candidate, in columns of its query only; none for position -1."""
    n, k = positions.shape
    labels = gallery.labels[positions.reshape(-1)]
    owners = np.repeat(np.arange(n * k), np.diff(labels.indptr))
    is_candidate = positions.reshape(-1)[owners] >= 0
    owners = owners[is_candidate]
    columns = labels.indices[is_candidate] + owners // k * labels.shape[1]
    entries = np.ones(len(owners), np.int32)
    return csr_array((entries, (owners, columns)), shape=(n * k, n * labels.shape[1]))


def row_pointers(counts: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the start of each row's entries, and the end of the last."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def count_overlaps(labels: csr_array, others: csr_array) -> NDArray[np.int64]:
    """Count the rows of `others` (m, labels) that share a label with each row of `labels`, (n,)."""
    first, which = combinations(labels)  # rows of the same labels have the same count
    labels = labels[first]
    words = labels.nnz * (others.shape[0] // WORD_BITS)  # each takes about as long as a pair
    n_pairs = _count_steps(labels, np.bincount(others.indices, minlength=others.shape[1])).sum()
    if n_pairs > words:
        return _count_bits(labels, others)[which]
    counts = [np.diff(product.indptr) for product in products(labels, others.T.tocsr())]
    return np.concatenate([*counts, np.empty(0, np.int64)])[which]


def products(labels: csr_array, by_label: csr_array) -> Iterator[csr_array]:
    """Yield the product with the transposed labels of other rows, some rows at a time."""
    block = np.cumsum(_count_steps(labels, np.diff(by_label.indptr))) // BLOCK_ENTRIES
    edges = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), labels.shape[0]]
    for start, stop in pairwise(edges):
        yield labels[start:stop] @ by_label


def _count_steps(labels: csr_array, frequency: NDArray[np.integer]) -> NDArray[np.int64]:
    """Count the steps that a sparse product takes for each row, (n,), by the labels' frequency."""
    total = row_pointers(frequency[labels.indices])
    steps: NDArray[np.int64] = np.diff(total[labels.indptr])
    return steps


def _count_bits(labels: csr_array, others: csr_array) -> NDArray[np.int64]:
    """Return what `count_overlaps` does: the union of the rows that have each label, as bits."""
    counts, n_labels = np.zeros(labels.shape[0], np.int64), np.diff(labels.indptr)
    # Rows of many labels first: rows that have another label are then at the start of a block.
    rows = np.argsort(-n_labels, kind="stable")[: np.count_nonzero(n_labels)]
    width = max(WORD_BITS, BLOCK_ENTRIES // labels.shape[1] // WORD_BITS * WORD_BITS)
    width = min(width, -(-others.shape[0] // WORD_BITS) * WORD_BITS)
    step = max(1, BLOCK_ENTRIES // (width // 8))
    for start in range(0, others.shape[0], width):
        other_rows, other_labels = others[start : start + width].nonzero()
        is_labelled = np.zeros((others.shape[1], width), np.bool_)
        is_labelled[other_labels, other_rows] = True
        bits = np.packbits(is_labelled, axis=1).view(np.uint64)  # (number of labels, width / 64)
        for first in range(0, len(rows), step):
            block = rows[first : first + step]
            starts = labels.indptr[block]
            union = bits[labels.indices[starts]]
            for number in range(1, n_labels[block[0]]):
                n = np.count_nonzero(n_labels[block] > number)
                union[:n] |= bits[labels.indices[starts[:n] + number]]
            counts[block] += np.bitwise_count(union).sum(1, dtype=np.int64)
    return counts


def combinations(labels: csr_array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first row of each combination of labels, and the combination of each row."""
    ordered = labels.sorted_indices()
    counts = np.diff(ordered.indptr).astype(np.int64)
    which = np.zeros(len(counts), np.int64)
    # Label by label: rows that agreed so far and have the same next label still agree.
    for number in range(counts.max(initial=0)):
        rows = np.flatnonzero(counts > number)
        following = ordered.indices[ordered.indptr[rows] + number]
        which[rows] = np.unique(which[rows] * labels.shape[1] + following, return_inverse=True)[1]
    _, first, which = np.unique(
        which * (counts.max(initial=0) + 1) + counts, return_index=True, return_inverse=True
    )
    return first, which
