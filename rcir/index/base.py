"""What a retriever asks of an index."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray


class Index(Protocol):
    """Vectors that can be searched for the nearest ones by L2 distance."""

    def __len__(self) -> int:
        """Number of vectors."""
        ...

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Append vectors (n, d); their positions follow those already there."""
        ...

    def search(
        self, vectors: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """L2 distances and positions, each (n, k), of the k nearest of each query, nearest first.

        Where the index holds or finds fewer than k, the rest has distance infinity, position -1.
        """
        ...

    def fingerprint(self) -> str:
        """A digest that changes with anything that may change an answer."""
        ...

    def save(self, path: Path) -> None:
        """Write the index to a file."""
        ...

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read an index from a file."""
        ...
