"""Whether a vector belongs to one of the labels of a gallery at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from rcir.label_model.experts import BLOCK_VALUES, Discriminants, Floats, Integers
from rcir.store.codec import Array

MAX_DIRECTIONS = 256  # in which the means of labels differ most


@dataclass(frozen=True, eq=False)
class KnownLabels:
    """Likelihood ratios of the labels of a gallery over a new label (two-covariance model).

    Labels have normal means, and the vectors of a label are normal around its mean; the
    covariance of the latter is that of the discriminant with the largest shrinkage. In the
    directions that whiten it, with the means' variances p on the axes, a vector z of a label whose
    n items have the mean m is normal with mean n p / (n p + 1) m and variance
    1 + p / (n p + 1), and one of a new label with mean 0 and variance 1 + p (Ioffe, "Probabilistic
    Linear Discriminant Analysis", ECCV 2006). Directions without variance of means tell nothing.

    Attributes:
        centre: (d,) mean of the gallery.
        directions: (d, r) whitened.
        spread: (r,) variances p of the means.
        counts: (L,) numbers of items.
        means: (L, r) of labels, whitened.
    """

    centre: Annotated[Floats, Array(1)]
    directions: Annotated[Floats, Array(2)]
    spread: Annotated[Floats, Array(1)]
    counts: Annotated[Integers, Array(1)]
    means: Annotated[Floats, Array(2)]

    @classmethod
    def fit(cls, model: Discriminants) -> Self:
        """Fit to the means of a gallery's labels."""
        whitening = 1 / np.sqrt(model.variances[-1])
        means = model.means * whitening
        between = (means.T * model.counts) @ means - len(means) * np.eye(len(whitening))
        spread, axes = np.linalg.eigh(between / model.counts.sum())
        kept = np.flatnonzero(spread > 0)[-MAX_DIRECTIONS:]
        axes = axes[:, kept]
        return cls(
            centre=model.centre,
            directions=model.basis @ (whitening[:, None] * axes),
            spread=spread[kept],
            counts=model.counts,
            means=means @ axes,
        )

    def log_odds(
        self,
        vectors: NDArray[np.floating[Any]],
        own: Integers | None = None,
        leave_out: Literal["label", "item"] = "label",
    ) -> Floats:
        """(n,) log of the mean likelihood ratio of all labels.

        Args:
            vectors: (n, d) of queries.
            own: (n,) places of their labels, each of which is left out for its query.
            leave_out: "item" if the queries are items that leave their labels as the only ones.
        """
        result, step = np.empty(len(vectors)), max(1, BLOCK_VALUES // len(self.counts))
        scales, centres = self._new_queries(self.counts[:, None], self.means)
        constant = (np.log(scales) + centres**2 / scales).sum(axis=1)
        for start in range(0, len(vectors), step):
            z = (vectors[start : start + step] - self.centre) @ self.directions
            new = (np.log1p(self.spread) + z**2 / (1 + self.spread)).sum(axis=1)
            ratios = new[:, None] - z**2 @ (1 / scales).T + 2 * z @ (centres / scales).T - constant
            if own is not None:
                label = own[start : start + step]
                ratios[np.arange(len(z)), label] = -np.inf
                if leave_out == "item":
                    ratios[np.arange(len(z)), label] = new - self._distances(z, label)
            result[start : start + step] = logsumexp(ratios / 2, axis=1) - np.log(len(self.counts))
        return result

    def _new_queries(self, counts: Integers, means: Floats) -> tuple[Floats, Floats]:
        """Return variances and means (m, r) of new queries of labels with items of such means."""
        shares = counts * self.spread
        return 1 + self.spread / (shares + 1), shares / (shares + 1) * means

    def _distances(self, z: Floats, own: Integers) -> Floats:
        """(n,) minus twice the log densities, up to a constant, of items in their own labels."""
        left = self.counts[own, None] - 1
        means = (self.counts[own, None] * self.means[own] - z) / np.maximum(left, 1)
        scales, centres = self._new_queries(left, means)
        distances = (np.log(scales) + (z - centres) ** 2 / scales).sum(axis=1)
        return np.where(left[:, 0] > 0, distances, np.inf)
