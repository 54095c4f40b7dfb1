"""Relevance by a table of true matches, where nothing else tells what matches what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import block_diag, csr_array, eye_array

from rcir.data.relevance import SharedLabel
from rcir.data.relevance_protocol import require_kind
from rcir.errors import InvalidData


@dataclass(frozen=True)
class MatchTable(SharedLabel):
    """Images match if a table says so: each gallery item is a label, which it alone has, and
    queries have those of the items that they match.

    Example:
        >>> gallery = MatchTable.items(3)
        >>> queries = MatchTable.of_lists([[0, 2], []], 3)
        >>> queries.of(gallery, np.array([[0, 1], [0, 1]])).tolist(), queries.totals(gallery)
        ([[True, False], [False, False]], array([2, 0]))
    """

    @classmethod
    def items(cls, n: int) -> MatchTable:
        """Of n gallery items."""
        return cls(csr_array(eye_array(n, dtype=np.bool_, format="csr")))

    @classmethod
    def of_lists(cls, lists: Sequence[Sequence[int]], n_labels: int) -> MatchTable:
        return cls(SharedLabel.of_lists(lists, n_labels).labels)

    def subset(self, rows: NDArray[np.integer[Any]]) -> MatchTable:
        return MatchTable(self.labels[rows])

    def totals(self, gallery: SharedLabel) -> NDArray[np.int64]:
        """(n,) numbers of true matches.

        Raises:
            InvalidData: the gallery has items that the table does not know.
        """
        if gallery.labels.shape[1] != self.labels.shape[1]:
            more = gallery.labels.shape[1] - self.labels.shape[1]
            raise InvalidData(
                f"{more} items came into the gallery after the table of true matches was made: "
                "which queries they match is not known; give labelled queries anew"
            )
        return super().totals(gallery)

    def joined(self, others: SharedLabel) -> MatchTable:
        """These gallery items, then others, each a label of its own."""
        require_kind(MatchTable, others)
        return MatchTable(csr_array(block_diag([self.labels, others.labels], format="csr")))

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {f"table.{name}": values for name, values in super().arrays().items()}
