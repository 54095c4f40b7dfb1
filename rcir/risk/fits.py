"""Score functions fitted on one tuning split, each once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rcir.risk.labelled import LabelledResults
from rcir.risk.score_functions import ScoreFunction

FOLDS = 5


@dataclass(frozen=True)
class Fits:
    """Fits of score functions, kept for whoever asks for the same again.

    Attributes:
        split: the tuning split.
    """

    split: LabelledResults
    _fitted: dict[tuple[str, int | None], ScoreFunction] = field(default_factory=dict)
    _crossed: dict[str, LabelledResults] = field(default_factory=dict)

    def fitted(self, kind: type[ScoreFunction], held_out: int | None = None) -> ScoreFunction:
        """A score function fitted on all queries, or on those outside of a fold."""
        key = (kind.name, held_out)
        if key not in self._fitted:
            split = self.split
            if held_out is not None:
                split = split[np.arange(len(split)) % FOLDS != held_out]
            self._fitted[key] = kind.fit(split, split.relevant)
        return self._fitted[key]

    def crossed(self, kind: type[ScoreFunction]) -> LabelledResults:
        """The queries, every fifth one scored by a score function fitted on the others."""
        if kind.name not in self._crossed:
            parts = [self._scored(kind, fold) for fold in range(FOLDS)]
            self._crossed[kind.name] = parts[0].joined(*parts[1:])
        return self._crossed[kind.name]

    def _scored(self, kind: type[ScoreFunction], fold: int) -> LabelledResults:
        held = self.split[fold::FOLDS]
        labelled = LabelledResults.of(held, held.relevant, held.totals)  # of no clusters
        return labelled.scored(self.fitted(kind, fold))

    def distinct(self) -> Fits:
        """Fits on the same split of keys; what looks at keys alone is as it was fitted here."""
        alike = {key: fitted for key, fitted in self._fitted.items() if fitted.of_keys}
        return Fits(self.split.distinct(), alike)
