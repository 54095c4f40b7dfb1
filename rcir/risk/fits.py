"""Score functions fitted on one tuning split, each once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rcir.risk.labelled import LabelledResults
from rcir.risk.score_functions import ScoreFunction
from rcir.risk.search_results import SearchResults

FOLDS = 5


@dataclass(frozen=True)
class Fits:
    """Fits of score functions, kept for whoever asks for the same again.

    Attributes:
        results: the tuning split.
        relevant: (n, depth) whether each candidate is a true match.
        totals: (n,) numbers of true matches in the gallery.
    """

    results: SearchResults
    relevant: NDArray[np.bool_]
    totals: NDArray[np.int64]
    _fitted: dict[str, ScoreFunction] = field(default_factory=dict)
    _crossed: dict[str, LabelledResults] = field(default_factory=dict)

    def fitted(self, kind: type[ScoreFunction]) -> ScoreFunction:
        """A score function fitted on all queries."""
        if kind.name not in self._fitted:
            self._fitted[kind.name] = kind.fit(self.results, self.relevant)
        return self._fitted[kind.name]

    def crossed(self, kind: type[ScoreFunction]) -> LabelledResults:
        """The queries, every fifth one scored by a score function fitted on the others."""
        if kind.name not in self._crossed:
            fold = np.arange(len(self.results)) % FOLDS
            parts = [self._held_out(kind, fold == held) for held in range(FOLDS)]
            self._crossed[kind.name] = parts[0].joined(*parts[1:])
        return self._crossed[kind.name]

    def _held_out(self, kind: type[ScoreFunction], held: NDArray[np.bool_]) -> LabelledResults:
        fitted = kind.fit(self.results[~held], self.relevant[~held])
        labelled = LabelledResults.of(self.results[held], self.relevant[held], self.totals[held])
        return labelled.scored(fitted)
