"""The protocol of an index, checks of vectors, their lengths, distances and neighbours."""

from __future__ import annotations

from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.embedding import as_vectors
from rcir.errors import InvalidConfig, InvalidData, as_option
from rcir.stored_vectors import batches

if TYPE_CHECKING:
    from torch import Tensor

DEPTH = 200  # candidates per query, by default
MAX_LENGTH = 2.0**62  # float32 can hold squared distances between such vectors
SAFE_LENGTHS = (1e-15, 1e15)  # float32 can hold their squares without losing digits
UNIT = 1e-5  # the rounding error of a length of 1
MAX_BATCH_DISTANCES = 1 << 24  # distances held at a time: 64 MiB of float32
Neighbours: TypeAlias = tuple[NDArray[np.float32], NDArray[np.int64]]


@runtime_checkable
class Index(Protocol):
    """Vectors (n, d) that can be searched for the nearest ones by L2 distance.

    An `rcir.index.IndexConfig` names the class, by a name in `rcir.index.INDEXES` or by its import
    path "package.module:Class"; retrievers are built, calibrated, stored and loaded with it.
    `rcir.index.flat` is an example.

    A retriever adds to a copy of an index in memory, and removes from a copy: `copy.deepcopy` must
    return one that neither of these changes through the other. An index that cannot be copied by
    default, for instance because it has a lock, implements `__deepcopy__`, or `__getstate__` and
    `__setstate__`. A `__deepcopy__` that shares what is never written to saves time and memory.

    Attributes:
        Options: a frozen dataclass of its options, which checks their values; all have defaults,
            and JSON can hold them.
        options: those that it was built with.
    """

    Options: ClassVar[type]
    options: Any

    @classmethod
    def build(cls, vectors: NDArray[np.float32], options: Any) -> Self:
        """Build an index of vectors (n, d), n >= 0; the i-th has position i.

        Raises:
            InvalidData: see `check_vectors`.
        """
        ...

    def __len__(self) -> int:
        """Number of vectors."""
        ...

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Append vectors (m, d), at the next positions.

        Raises:
            InvalidData: see `check_vectors`; nothing was added.
        """
        ...

    def remove(self, positions: NDArray[np.int64]) -> None:
        """Remove the vectors at positions (m,), all different; the others get positions 0 to
        n - m - 1, in the same order.
        """
        ...

    def search(self, vectors: NDArray[np.float32], k: int) -> Neighbours:
        """Return L2 distances and positions, each (n, k), of the k nearest vectors of each query.

        The nearest come first. If fewer than k are found, the rest has distance infinity and
        position -1.

        A query must have the same results alone and in a batch, up to rounding far below
        `rcir.risk.results.TOLERANCE`, because guarantees are calibrated with a batch. So compute
        distances from differences of vectors, not as |x|^2 + |y|^2 - 2xy in float32.

        Raises:
            InvalidData: see `check_vectors`.
        """
        ...

    def vectors_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors (m, d) at positions (m,), which may repeat."""
        ...

    @property
    def version(self) -> str:
        """A token that changes with everything that may change an answer, and is the same after
        `save` and `load`. Every query reads it: cache it.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write everything except the options into an empty folder."""
        ...

    @classmethod
    def load(cls, folder: Path, options: Any) -> Self:
        """Read the index that was saved to a folder; any exception refuses the folder.

        A retriever's checksums detect damage before this is called, but do not protect against
        made-up files, which may end the process: load only folders of people you trust.
        """
        ...


@runtime_checkable
class KeepsDigests(Protocol):
    """An index whose `version` is computed from digests, which a retriever stores to save time."""

    def digests(self) -> list[str]:
        """Return digests of the contents."""
        ...

    def restore_digests(self, digests: list[str]) -> None:
        """Restore the digests that this index had when it was saved."""
        ...


def no_neighbours(n: int, k: int) -> Neighbours:
    """Return infinite distances and positions -1, each (n, k)."""
    return np.full((n, k), np.inf, np.float32), np.full((n, k), -1, np.int64)


def check_depth(depth: int) -> int:
    """Return a number of candidates, or raise `InvalidConfig` unless it is whole and at least 1."""
    number: Any = depth
    if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
        raise InvalidConfig(f"depth is {depth!r}; it must be a whole number, at least 1")
    return int(number)  # FAISS accepts no integers of NumPy


def check_vectors(
    vectors: ArrayLike, dim: int | None = None, first: int = 0
) -> NDArray[np.float32]:
    """Return vectors (n, d) as contiguous float32.

    Args:
        vectors: real numbers of any type and library, see `rcir.embedding.as_vectors`.
        dim: the required d; None for any from 1.
        first: the number of the first row, for messages.

    Raises:
        InvalidData: they have another shape or are not real numbers; or some are NaN, infinite, or
            so long or so short that float32 cannot hold their squared distances.

    Example:
        >>> check_vectors([[1, 2], [3, 4]], dim=3)
        Traceback (most recent call last):
        rcir.errors.InvalidData: vectors have shape (2, 2); expected (n, 3)
    """
    array = as_vectors(vectors)
    check_shape(array, dim)
    with np.errstate(over="ignore", under="ignore"):  # checked below
        rounded = np.ascontiguousarray(array, np.float32)
    limit = MAX_LENGTH / np.sqrt(rounded.shape[1])
    for rows in batches(*rounded.shape):
        smallest, largest = rounded[rows].min(), rounded[rows].max()  # NaN if a number is NaN
        if not (smallest >= -limit and largest <= limit):
            _require_lengths(array[rows], first + rows.start)
        elif array.dtype.itemsize > rounded.dtype.itemsize:
            _require_nonzero(array[rows], rounded[rows], first + rows.start)
    return rounded


def check_shape(vectors: NDArray[Any], dim: int | None = None) -> None:
    """Raise `InvalidData` unless an array has shape (n, dim), by default any (n, d), d >= 1."""
    shape = vectors.shape
    if len(shape) != 2 or shape[1] != (max(shape[1], 1) if dim is None else dim):
        expected = "(n, d), d >= 1" if dim is None else f"(n, {dim})"
        raise InvalidData(f"vectors have shape {shape}; expected {expected}")


def require_finite(vectors: NDArray[Any], rows: NDArray[np.int64] | range) -> None:
    """Raise `InvalidData` if some vectors (n, d) are NaN or infinite; `rows` numbers them."""
    wrong = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(wrong):
        raise InvalidData(
            f"{len(wrong)} vectors are NaN or infinite, first in row {rows[wrong[0]]}: leave them "
            "out, or embed them again; an encoder that diverged in training returns such vectors"
        )


def _require_lengths(vectors: NDArray[Any], first: int) -> None:
    """Raise `InvalidData` if some vectors are not finite, or are longer than `MAX_LENGTH`."""
    exact = vectors.astype(np.result_type(vectors, np.float64))
    require_finite(exact, range(first, first + len(exact)))
    with np.errstate(over="ignore"):
        norms = np.linalg.norm(exact, axis=1)
    wrong = np.flatnonzero(norms > MAX_LENGTH)
    if len(wrong):
        raise InvalidData(
            f"{len(wrong)} vectors are longer than {MAX_LENGTH:.2g}, first in row "
            f"{first + wrong[0]}, whose largest number is {np.abs(exact[wrong[0]]).max():.3g}: "
            "float32 cannot hold their squared distances. Check their type, divide gallery and "
            f"queries by the same number, or pass {as_option('metric', 'cosine')}"
        )


def _require_nonzero(vectors: NDArray[Any], rounded: NDArray[np.float32], first: int) -> None:
    """Raise `InvalidData` if vectors were rounded to zero vectors."""
    zeros = np.flatnonzero(~rounded.any(axis=1))
    wrong = zeros[vectors[zeros].any(axis=1)]
    if len(wrong):
        raise InvalidData(
            f"{len(wrong)} vectors are too small for float32, first in row {first + wrong[0]}: "
            "multiply gallery and queries by the same number, or leave these out"
        )


def require_range(options: Any, **ranges: tuple[float, float]) -> None:
    """Raise `InvalidConfig` unless options are in their closed ranges."""
    for name, (lowest, highest) in ranges.items():
        value = getattr(options, name)
        if not lowest <= value <= highest:
            raise InvalidConfig(f"{name} is {value!r}; it must be from {lowest} to {highest}")


def lengths(vectors: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Return the L2 norms (n,) of vectors (n, d), exactly 1 for those within rounding of 1.

    Example:
        >>> lengths(np.array([[3.0, 4.0], [0.6, 0.8]])).tolist()
        [5.0, 1.0]
    """
    norms = np.empty(len(vectors), np.float32)
    for rows in batches(*vectors.shape):
        norms[rows], unsafe = norms_of(vectors[rows])
        if len(unsafe):
            exact = vectors[rows][unsafe].astype(np.float64)
            norms[rows.start + unsafe] = np.linalg.norm(exact, axis=1)
    norms[np.abs(norms - 1) <= UNIT] = 1
    return norms


def norms_of(
    vectors: NDArray[np.floating[Any]],
) -> tuple[NDArray[np.floating[Any]], NDArray[np.int64]]:
    """Return the L2 norms (n,) of vectors (n, d), and the rows that need more than float32.

    In these rows squares are infinite or lose digits, or a number is not finite.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        norms = np.linalg.norm(vectors, axis=1)
    shortest, longest = SAFE_LENGTHS
    return norms, np.flatnonzero(~((norms > shortest) & (norms < longest)))


def unit_vectors(vectors: NDArray[Any], first: int = 0) -> NDArray[np.float32]:
    """Return vectors (n, d) over their lengths; `first` is the row of the first, for messages.

    Vectors whose squares leave the range of float32 are first divided by their largest number.
    """
    unit = np.empty(vectors.shape, np.float32)
    zero: list[int] = []
    for rows in batches(*vectors.shape):
        with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
            batch = np.ascontiguousarray(vectors[rows], np.float32)
            norms, unsafe = norms_of(batch)
            np.divide(batch, norms[:, None], out=unit[rows])
        if not len(unsafe):
            continue
        exact = vectors[rows][unsafe]
        exact = exact.astype(np.result_type(exact, np.float64))
        unsafe += rows.start
        require_finite(exact, first + unsafe)
        largest = np.abs(exact).max(axis=1, keepdims=True)
        zero += unsafe[largest[:, 0] == 0].tolist()
        exact /= np.where(largest > 0, largest, 1)
        norms = np.linalg.norm(exact, axis=1, keepdims=True)
        unit[unsafe] = exact / np.where(norms > 0, norms, 1)
    if zero:
        raise InvalidData(
            f"{len(zero)} of {len(vectors)} vectors are zero, first in row {first + zero[0]}, and "
            f"have no angle to others: leave them out, or pass {as_option('metric', 'euclidean')}"
        )
    return unit


def one_minus_cosine(
    distances: NDArray[np.floating[Any]], first: ArrayLike, second: ArrayLike
) -> NDArray[np.float64]:
    """Return one minus the cosine of the angle between vectors x and y, from 0 to 2.

    It follows from |x - y|^2 = (|x| - |y|)^2 + 2 |x| |y| (1 - cos), and is 1 if x or y is zero.

    Args:
        distances: |x - y|, of any shape.
        first, second: |x| and |y|, which broadcast to that shape.

    Example:
        >>> one_minus_cosine(np.array([np.sqrt(10), 1.0]), first=[1.0, 0.0], second=[3.0, 1.0])
        array([1., 1.])
    """
    squared = np.asarray(distances, np.float64) ** 2
    x, y = np.asarray(first, np.float64), np.asarray(second, np.float64)
    product = 2 * x * y
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine_distances = (squared - (x - y) ** 2) / product
    return np.clip(np.where(product > 0, cosine_distances, 1.0), 0.0, 2.0)


def nearest_others(vectors: Tensor, k: int, queries: slice = slice(None)) -> Neighbours:
    """Find the nearest other vectors of each vector, including its duplicates.

    Args:
        vectors: (n, d), on any device.
        k: number of neighbours, 1 to n - 1.
        queries: the q vectors whose neighbours are searched; all n by default.

    Returns:
        L2 distances and positions, each (q, k), nearest first.

    Example:
        >>> import torch
        >>> distances, positions = nearest_others(torch.tensor([[0.0], [1.0], [1.0]]), 1)
        >>> distances.tolist(), positions.tolist()
        ([[1.0], [0.0], [0.0]], [[1], [2], [1]])
    """
    import torch  # indexes are built and searched without it

    from rcir.torch_settings import full_precision

    n = len(vectors)
    if not 1 <= k < n:
        raise InvalidData(f"k is {k}; it must be from 1 to {n - 1}, for {n} vectors")
    vectors = vectors - vectors.mean(0)  # the matrix product of `cdist` loses digits elsewhere
    distances, positions = [], []
    places = torch.arange(n, device=vectors.device)[queries]
    for rows in places.split(max(1, MAX_BATCH_DISTANCES // n)):
        with full_precision():
            block = torch.cdist(vectors[rows], vectors)
        block[torch.arange(len(rows), device=vectors.device), rows] = torch.inf
        nearest = block.topk(k, largest=False)
        distances.append(nearest.values.cpu())
        positions.append(nearest.indices.cpu())
    return torch.cat(distances).numpy(), torch.cat(positions).numpy()


def recall_of(positions: NDArray[np.int64], exact: NDArray[np.int64]) -> float:
    """Return the share of the exact candidates found at any rank, averaged over queries.

    Args:
        positions, exact: (q, k) positions, each once in a row; -1 where there is none.

    Example:
        >>> recall_of(np.array([[3, 1], [2, -1]]), np.array([[1, 3], [2, 0]]))
        0.75
    """
    is_candidate = exact >= 0
    step = int(max(positions.max(initial=0), exact.max(initial=0))) + 1
    rows = step * np.arange(len(exact))[:, None]
    shared = np.isin(exact + rows, (positions + rows)[positions >= 0]) & is_candidate
    return float((shared.sum(axis=1) / np.maximum(is_candidate.sum(axis=1), 1)).mean())
