"""What an answer is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Guarantee:
    """The statement that holds for a retrieved set; `str` gives it in one sentence.

    Attributes:
        alpha: share of queries, at most, whose set holds no true match.
        delta: probability, at most, that the calibration queries misled.
        kappa: the calibrated parameter of the size adapter.
        bound: the confidence bound, "binomial" or "hoeffding".
        adapter: the size adapter, "constant", "minmax" or "quantile".
        n_calibration: number of calibration queries.
        risk_bound: the share that is certified in fact, at most alpha (misses are whole numbers).
    """

    alpha: float
    delta: float
    kappa: float
    bound: str
    adapter: str
    n_calibration: int
    risk_bound: float

    def __str__(self) -> str:
        return (
            f"With probability at least {1 - self.delta:.4g}, a true match is missing from at most "
            f"{self.alpha:.4g} of the sets returned to queries like the {self.n_calibration} "
            f"calibration queries ({self.adapter} sizes, {self.bound} bound, "
            f"kappa = {self.kappa:.4g})."
        )


@dataclass(frozen=True, eq=False, slots=True)
class Retrieval:
    """The answer to one query: gallery items, nearest first, as many as the guarantee needs.

    Attributes:
        ids: names of the items.
        distances: (size,) L2 distances in embedding space, ascending.
        uncertainty: of the query; larger is less certain; comparable within one retriever only.
        guarantee: what is guaranteed of this set.
        labels: labels of the items, if the gallery has labels.
    """

    ids: tuple[str, ...]
    distances: NDArray[np.float32]
    uncertainty: float
    guarantee: Guarantee
    labels: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        others = (len(self.distances), len(self.ids if self.labels is None else self.labels))
        if others != (len(self.ids),) * 2:
            raise ValueError(f"{len(self.ids)} ids, but distances and labels number {others}")

    @property
    def size(self) -> int:
        """Number of items."""
        return len(self.ids)

    def __str__(self) -> str:
        rows = (
            f"{rank:4d}  {distance:8.4f}  {name}"
            for rank, (name, distance) in enumerate(zip(self.ids, self.distances, strict=True), 1)
        )
        head = f"{self.size} image{'s' * (self.size > 1)}, uncertainty {self.uncertainty:.4g}"
        return "\n".join([head, "rank  distance  id", *rows, str(self.guarantee)])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "ids": list(self.ids),
            "labels": None if self.labels is None else list(self.labels),
            "distances": [round(float(distance), 6) for distance in self.distances],
            "size": self.size,
            "uncertainty": self.uncertainty,
            "guarantee": asdict(self.guarantee),
        }
