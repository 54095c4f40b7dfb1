"""Rankings of a user's own, in a module that can be imported."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from rcir.risk import Ranking
from rcir.store.codec import Array


@dataclass(frozen=True)
class Gap:
    """Candidates nearest first, by how much farther than the first one they are."""

    power: float = 1.0
    scale: float = 1.0

    def fit(self, results, truth):
        gaps = np.where(results.is_candidate, results.distances - results.distances[:, :1], 0)
        return Gap(self.power, float(np.median(gaps.max(axis=1)[truth.any(axis=1)])))

    def rank(self, results):
        gaps = results.distances - results.distances[:, :1]
        return Ranking((gaps / self.scale) ** self.power, results.distances[:, 0])


@dataclass(frozen=True, eq=False)
class ByFrequency:
    """First candidates of labels that were frequent matches first, with a class method `fit`."""

    name = "frequent"
    counts: Annotated[NDArray[np.int64], Array(1)]

    @classmethod
    def fit(cls, results, truth):
        return cls(np.bincount(results.labels[truth], minlength=10))

    def rank(self, results):
        counts = self.counts[np.maximum(results.labels, 0)]
        columns = np.argsort(-np.where(results.is_candidate, counts, -1), axis=1, kind="stable")
        scores = np.broadcast_to(np.arange(results.depth, dtype=np.float32), columns.shape)
        return Ranking(scores, np.zeros(len(results)), columns)
