"""The protocol of relevance: which images are true matches of which."""

from __future__ import annotations

from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData

Rows = NDArray[np.integer[Any]]
Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]


@runtime_checkable
class Relevance(Protocol):
    """Relevance of n images: which of them, and of others, match which.

    A gallery's matches are never stored: they follow from what is known of each image, so that
    memory grows with the number of images, not of pairs.
    """

    def __len__(self) -> int:
        """Number of images."""
        ...

    def subset(self, rows: Rows) -> Self:
        """The same of some images, in that order."""
        ...

    def of(self, gallery: Self, positions: Rows) -> NDArray[np.bool_]:
        """Whether candidates match.

        Args:
            gallery: of the images that were searched.
            positions: (n, k) positions in the gallery; -1 for none, which matches nothing.

        Returns:
            (n, k).
        """
        ...

    def totals(self, gallery: Self) -> NDArray[np.int64]:
        """(n,) number of true matches of each image in a gallery."""
        ...

    def pairs(self, rows: Rows) -> Pairs:
        """True matches of some images among the images of this set.

        Args:
            rows: (m,) of this set, in any order.

        Returns:
            indptr (m + 1,) and columns (total,): `columns[indptr[i] : indptr[i + 1]]` are the
            images that match `rows[i]`, ascending; itself is one of them, unless it has no label.
            Memory grows with their number: ask for as many rows as that allows.
        """
        ...

    def joined(self, others: Any) -> Self:
        """Of these images, then others; `InvalidData` unless they are of the same kind."""
        ...

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Its state as arrays, by name; `relevance_of` makes it again."""
        ...


def row_pointers(counts: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Where what belongs to each row starts, and where the last ends."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def require_kind(kind: type, others: object) -> None:
    """Raise `InvalidData` unless others match as this kind does."""
    if not isinstance(others, kind):
        raise InvalidData(
            f"images that match as {kind.__name__} cannot be joined with images that match as "
            f"{type(others).__name__}: give the same kind"
        )
