"""The protocol of an index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.embedding import as_vectors
from rcir.errors import InvalidConfig, InvalidData, as_option
from rcir.stored_vectors import batches

DEPTH = 200  # candidates that are searched for each query, unless another number is asked for
MAX_LENGTH = 2.0**62  # squares of distances between such vectors are numbers of float32
# Vectors of these lengths have squares that float32 holds without losing digits.
SAFE_LENGTHS = (1e-15, 1e15)
UNIT = 1e-5  # of a length: what rounding leaves of a vector that was divided by its own


@runtime_checkable
class Index(Protocol):
    """Vectors (n, d) that can be searched for the nearest ones by L2 distance.

    An index is one class in one file: with its options, its files and its version. It is named in
    `rcir.index.INDEXES`, or by its import path "package.module:Class", wherever an
    `rcir.index.IndexConfig` is taken; retrievers are built, calibrated, stored and loaded with it.
    `rcir.index.flat` is an example.

    Attributes:
        Options: a frozen dataclass of its options, which checks their values itself; options have
            defaults, and plain values that JSON can hold.
        options: those that it was built with.
    """

    Options: ClassVar[type]
    options: Any

    @classmethod
    def build(cls, vectors: NDArray[np.float32], options: Any) -> Self:
        """Build an index of vectors (n, d), n >= 0; the i-th has position i.

        Raises:
            InvalidData: these are not such vectors, see `check_vectors`.
        """
        ...

    def __len__(self) -> int:
        """Number of vectors."""
        ...

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Append vectors (m, d); their positions follow those already there.

        Raises:
            InvalidData: these are not such vectors; nothing was added.
        """
        ...

    def remove(self, positions: NDArray[np.int64]) -> None:
        """Remove the vectors at positions (m,), all different; those behind them move up, so that
        positions are 0 to n - m - 1, in the same order.
        """
        ...

    def search(
        self, vectors: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """L2 distances and positions, each (n, k), of the k nearest of each query, nearest first.

        Where the index holds or finds fewer than k, the rest has distance infinity, position -1.

        A query must have the same results alone and in a batch, up to rounding far below
        `rcir.risk.results.TOLERANCE`, because guarantees are calibrated with a batch. So compute
        distances from differences of vectors, not as |x|^2 + |y|^2 - 2xy in float32.

        Raises:
            InvalidData: the queries are not such vectors.
        """
        ...

    @property
    def version(self) -> str:
        """A token that is another one after anything that may change an answer, and the same for
        the index that `load` makes of what `save` wrote. It is asked for at every query: keep it.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write files into an empty folder: all but the options."""
        ...

    @classmethod
    def load(cls, folder: Path, options: Any) -> Self:
        """Read the index that was saved to a folder; any exception refuses the folder.

        A retriever's checksums detect damage before this is called. They are no protection against
        files that somebody made up, which may end the process: load only folders of people you
        trust.
        """
        ...


@runtime_checkable
class IsRemote(Protocol):
    """An index on a server: its changes last, whether it is saved or not."""

    server: ClassVar[str]

    def drop(self) -> None:
        """Delete from the server all that belongs to the index, which is of no use any more.

        Raises:
            DataUnavailable: the server cannot be reached, or it is not there any more.
            StaleCalibration: it was changed by someone else, whose work is left alone.
        """
        ...


@runtime_checkable
class KeepsDigests(Protocol):
    """An index whose `version` follows from digests that a retriever keeps beside its files, so
    that nothing has to be digested after loading.
    """

    def digests(self) -> list[str]:
        """Return digests of the contents, which are computed where they are not known."""
        ...

    def restore_digests(self, digests: list[str]) -> None:
        """Take the digests that this index had when it was saved."""
        ...


@contextmanager
def dropped_on_error(index: Index) -> Iterator[None]:
    """Leave nothing of a new index on its server if what is done with it fails."""
    try:
        yield
    except BaseException as error:
        if isinstance(index, IsRemote):
            try:
                index.drop()
            except Exception as failed:
                error.add_note(f"what was built for it is left on the server: {failed}")
        raise


@runtime_checkable
class HoldsVectors(Protocol):
    """An index that also gives back its vectors: what several draws find nearest needs them."""

    def vectors_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """(m, d) vectors at positions (m,)."""
        ...


class UnbuiltIndex:
    """A placeholder for an index of n vectors of d numbers while all else is checked,
    or changed: what it is given is checked, and forgotten.

    Example:
        >>> index = UnbuiltIndex(10, 3)
        >>> index.add(np.eye(3))
        >>> len(index)
        13
    """

    def __init__(self, n: int, dim: int) -> None:
        self._n, self._dim = n, dim

    def __len__(self) -> int:
        return self._n

    def add(self, vectors: NDArray[np.float32]) -> None:
        """See `Index.add`."""
        self._n += len(check_vectors(vectors, self._dim))

    def remove(self, positions: NDArray[np.int64]) -> None:
        """See `Index.remove`."""
        self._n -= len(positions)

    @property
    def version(self) -> str:
        """See `Index.version`."""
        return f"unbuilt {self._n}"


def check_depth(depth: int) -> None:
    """Raise `InvalidConfig` unless it is a number of candidates to search, at least 1."""
    number: Any = depth
    if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
        raise InvalidConfig(f"depth is {depth!r}; at least 1 candidate must be searched")


def check_vectors(
    vectors: ArrayLike, dim: int | None = None, first: int = 0
) -> NDArray[np.float32]:
    """Vectors (n, d) as contiguous float32.

    Args:
        vectors: real numbers of any type and library, see `rcir.embedding.as_vectors`.
        dim: what d must be; anything from 1 unless given.
        first: the number of the first row, for messages.

    Raises:
        InvalidData: they have another shape or are not real numbers; or some are NaN, infinite, or
            so long or so short that their squared distances are no numbers of float32.

    Example:
        >>> check_vectors([[1, 2], [3, 4]], dim=3)
        Traceback (most recent call last):
        rcir.errors.InvalidData: vectors have shape (2, 2); needed is (n, 3)
    """
    array = as_vectors(vectors)
    check_shape(array, dim)
    with np.errstate(over="ignore", under="ignore"):  # judged below
        checked = np.ascontiguousarray(array, np.float32)
    limit = MAX_LENGTH / np.sqrt(checked.shape[1])
    for rows in batches(*checked.shape):
        smallest, largest = checked[rows].min(), checked[rows].max()  # NaN if one number is
        if not (smallest >= -limit and largest <= limit):
            _require_lengths(array[rows], first + rows.start)
        elif array.dtype.itemsize > checked.dtype.itemsize:
            _require_nonzero(array[rows], checked[rows], first + rows.start)
    return checked


def check_shape(vectors: NDArray[Any], dim: int | None = None) -> None:
    """Raise `InvalidData` unless an array has shape (n, dim), by default any (n, d), d >= 1."""
    shape = vectors.shape
    if len(shape) != 2 or shape[1] != (max(shape[1], 1) if dim is None else dim):
        needed = "(n, d), d >= 1" if dim is None else f"(n, {dim})"
        raise InvalidData(f"vectors have shape {shape}; needed is {needed}")


def require_finite(vectors: NDArray[Any], rows: NDArray[np.int64] | range) -> None:
    """Raise `InvalidData` if some vectors are NaN or infinite.

    Args:
        vectors: (n, d) floats.
        rows: their numbers, for the message.
    """
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
            "float32 cannot hold their squared distances; check the type that they were read as, "
            "divide gallery and queries by the same number, or pass "
            f"{as_option('metric', 'cosine')}"
        )


def _require_nonzero(vectors: NDArray[Any], rounded: NDArray[np.float32], first: int) -> None:
    """Raise `InvalidData` if rounding to float32 made zero vectors of others."""
    zeros = np.flatnonzero(~rounded.any(axis=1))
    wrong = zeros[vectors[zeros].any(axis=1)]
    if len(wrong):
        raise InvalidData(
            f"{len(wrong)} vectors are smaller than any number of float32, first in row "
            f"{first + wrong[0]}: multiply all vectors, of gallery and queries, by the same "
            "number, or leave these out"
        )


def require_range(options: Any, **ranges: tuple[float, float]) -> None:
    """Raise `InvalidConfig` unless options are in their ranges, ends included.

    Example:
        >>> from types import SimpleNamespace
        >>> require_range(SimpleNamespace(nprobe=0), nprobe=(1, 100))
        Traceback (most recent call last):
        rcir.errors.InvalidConfig: nprobe is 0; from 1 to 100
    """
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        if not least <= value <= most:
            raise InvalidConfig(f"{name} is {value!r}; from {least} to {most}")


def lengths(vectors: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """(n,) L2 norms of vectors (n, d); exactly 1 of those that are of unit length up to rounding.

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
    least, most = SAFE_LENGTHS
    return norms, np.flatnonzero(~((norms > least) & (norms < most)))


def one_minus_cosine(
    distances: NDArray[np.floating[Any]], first: ArrayLike, second: ArrayLike
) -> NDArray[np.float64]:
    """One minus the cosine of the angle between vectors x and y, from 0 to 2.

    From |x - y|^2 = (|x| - |y|)^2 + 2 |x| |y| (1 - cos); of unit vectors it is |x - y|^2 / 2. Where
    one of them is zero there is no angle, and it is 1.

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
