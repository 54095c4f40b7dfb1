"""Embedded queries, with what is known of them: to be searched, and kept to be searched again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.digests import digests
from rcir.data.relevance_protocol import Relevance
from rcir.errors import InvalidData

if TYPE_CHECKING:
    from rcir.embedding import Embedding


@dataclass(frozen=True, eq=False)
class Queries:
    """n queries; what is not known is None.

    Attributes:
        vectors: (n, d) what is searched.
        uncertainty: (n,) of their own, larger is less certain; without, one minus the cosine to the
            nearest gallery item is taken.
        images: pictures, where these were asked.
        digests: (n,) by which the same query is known again, see `identified`.
        embedding: all that the encoder says of them, if it re-ranks or several draws of it count.
        relevance: which gallery items they match.
        groups, clusters: (n,) strings: the group of each, and the cluster it came in.
        cluster: what the clusters are, such as "video".

    Raises:
        InvalidData: they are not as many of each, or an uncertainty is NaN or infinite.
    """

    vectors: NDArray[np.float32]
    uncertainty: NDArray[np.float64] | None = None
    images: Any = None
    digests: NDArray[np.bytes_] | None = None
    embedding: Embedding | None = None
    relevance: Relevance | None = None
    groups: NDArray[np.str_] | None = None
    clusters: NDArray[np.str_] | None = None
    cluster: str | None = None

    def __post_init__(self) -> None:
        for name, values in self._parts().items():
            if len(values) != len(self.vectors):
                raise InvalidData(
                    f"{len(self.vectors)} queries, {name} of {len(values)}: give each one"
                )
        if self.uncertainty is not None and not np.isfinite(self.uncertainty).all():
            bad = int(np.count_nonzero(~np.isfinite(self.uncertainty)))
            raise InvalidData(f"{bad} of {len(self)} uncertainties are NaN or infinite")

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, rows: slice | NDArray[Any]) -> Queries:
        """Some of the queries."""
        taken = np.arange(len(self))[rows]
        some: dict[str, Any] = {}
        for name, values in self._parts().items():
            if name == "relevance":
                some[name] = values.subset(taken)
            elif name == "images" and not isinstance(values, np.ndarray):
                some[name] = [values[row] for row in taken]
            else:
                some[name] = values[rows]
        return replace(self, **some)

    def identified(self) -> Queries:
        """The same, known by digests in place of pictures, see `rcir.data.digests`."""
        if self.digests is not None:
            return self
        known_by = digests(self.vectors if self.images is None else self.images)
        return replace(self, images=None, digests=known_by)

    @property
    def identities(self) -> NDArray[np.bytes_]:
        """(n,) digests by which the same query is known again."""
        found = self.identified().digests
        assert found is not None
        return found

    @staticmethod
    def joined(parts: Sequence[Queries]) -> Queries:
        """The queries of several parts of which the same is known, one after the other."""
        from rcir.embedding import Embedding

        first, *others = parts
        known: dict[str, Any] = {}
        for name, values in first._parts().items():
            all_of = [values, *(getattr(other, name) for other in others)]
            if any(each is None for each in all_of):
                raise InvalidData(f"{name} is known of some queries only: give it for all, or none")
            if name == "relevance":
                for other in all_of[1:]:
                    values = values.joined(other)
                known[name] = values
            elif name == "embedding":
                known[name] = Embedding.concatenate(all_of)
            else:
                known[name] = np.concatenate(all_of)
        return replace(first, **known)

    def _parts(self) -> dict[str, Any]:
        """What is known of each query, by name."""
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name != "cluster" and getattr(self, each.name) is not None
        }


def require_alike(queries: Queries, others: Queries | None) -> None:
    """Raise `InvalidData` unless queries have uncertainties of their own if and only if others do.

    Args:
        queries: that ask, or calibrate.
        others: those that were tuned or calibrated with; None where there are none to compare.
    """
    if others is not None and (others.uncertainty is None) != (queries.uncertainty is None):
        known = "without" if others.uncertainty is None else "with"
        raise InvalidData(
            f"the retriever was calibrated {known} uncertainties of the queries' own: ask {known} "
            "them, for they decide set sizes"
        )
