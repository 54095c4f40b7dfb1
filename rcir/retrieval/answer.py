"""Answers: the set that a query gets, with its guarantee."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.printable import printable
from rcir.risk import Guarantee


@dataclass(frozen=True, eq=False, slots=True)
class Retrieval:
    """The answer to one query: gallery items, the likeliest first, as many as the guarantee needs.

    Attributes:
        ids: names of the items.
        distances: (size,) L2 distances in embedding space; ascending, unless the sizes rank
            candidates anew ("reranked", "match-probability").
        uncertainty: of the query; larger is less certain; comparable within one retriever only.
        guarantee: what is guaranteed of this set.
        labels: labels of the items, if the gallery has labels: names where its data set names them,
            else numbers.
    """

    ids: tuple[str, ...]
    distances: NDArray[np.float32]
    uncertainty: float
    guarantee: Guarantee
    labels: tuple[int, ...] | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        others = (len(self.distances), len(self.ids if self.labels is None else self.labels))
        if others != (len(self.ids),) * 2:
            raise ValueError(f"{len(self.ids)} ids, but distances and labels number {others}")

    @property
    def size(self) -> int:
        """Number of items."""
        return len(self.ids)

    @property
    def abstained(self) -> bool:
        """Whether no answer was given, for want of certainty."""
        return self.size == 0

    def __str__(self) -> str:
        if self.abstained:
            head = f"no answer: too uncertain, uncertainty {self.uncertainty:.4g}"
            return f"{head}\n{self.guarantee}"
        head = f"{self.size} image{'s' * (self.size > 1)}, uncertainty {self.uncertainty:.4g}"
        names = ["id", *map(printable, self.ids)]
        labels = self.labels or ()
        if any(isinstance(label, str) for label in labels):  # numbers would tell a reader nothing
            width = max(map(len, names))
            columns = zip(names, ("label", *map(printable, labels)), strict=True)
            names = [f"{name:{width}}  {label}" for name, label in columns]
        rows = (
            f"{rank:4d}  {distance:8.4f}  {name}"
            for rank, (name, distance) in enumerate(zip(names[1:], self.distances, strict=True), 1)
        )
        return "\n".join([head, f"rank  distance  {names[0]}", *rows, str(self.guarantee)])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return self.own_values() | {"guarantee": self.guarantee.to_dict()}

    def own_values(self) -> dict[str, Any]:
        """Plain values of this answer alone: its guarantee is that of others, too."""
        return {
            "ids": list(self.ids),
            "labels": None if self.labels is None else list(self.labels),
            "distances": [round(float(distance), 6) for distance in self.distances],
            "size": self.size,
            "abstained": self.abstained,
            "uncertainty": self.uncertainty,
        }


@dataclass(frozen=True, eq=False)
class AtLevels:
    """The sets of one query at several alphas: each holds those of all larger alphas.

    Attributes:
        alphas: the levels that are certified, ascending.
        sizes: (m,) of the set at each; it holds so many of the first items of `largest`.
        largest: the answer at the smallest alpha.
        guarantees: what is guaranteed of the set at each alpha.
    """

    alphas: tuple[float, ...]
    sizes: NDArray[np.int64]
    largest: Retrieval
    guarantees: tuple[Guarantee, ...]
