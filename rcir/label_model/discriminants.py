"""Linear discriminants with shrunk covariances, and what they are without some of the items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray

from rcir.label_model.items import Floats, Integers, Items, Moments
from rcir.store.codec import Array

FACTORS = np.array([0.25, 1.0, 4.0])  # of the Ledoit-Wolf shrinkage
MIN_SHRINKAGE = 1e-4  # keeps the covariance invertible


@dataclass(frozen=True, eq=False)
class Discriminants:
    """Distances of queries to the means of labels, in the metrics of shrunk covariances.

    With the pooled covariance S within labels, Sigma = (1 - r) S + r tr(S)/d I for each shrinkage
    r. All vectors are given in the eigenvectors of S, in which every Sigma is diagonal.

    Attributes:
        centre: (d,) mean of the gallery.
        basis: (d, k) eigenvectors of S.
        variances: (m, k) of each Sigma.
        shrinkages: (m,) r of each.
        freedom: the number of items less that of labels.
        counts: (L,) number of items of each label.
        means: (L, k) of labels, centred, in the basis.
        norms: (m, L) of the means, squared, in each metric.
    """

    centre: Annotated[Floats, Array(1)]
    basis: Annotated[Floats, Array(2)]
    variances: Annotated[Floats, Array(2)]
    shrinkages: Annotated[Floats, Array(1)]
    freedom: int
    counts: Annotated[Integers, Array(1)]
    means: Annotated[Floats, Array(2)]
    norms: Annotated[Floats, Array(2)]

    @classmethod
    def fit(cls, items: Items, moments: Moments) -> Self | None:
        """Fit on all items; None if no two of a label differ."""
        freedom = len(items) - len(moments.labels)
        spread = float(np.trace(moments.within))
        if not (freedom > 0 and spread > 0):
            return None
        eigenvalues, vectors = np.linalg.eigh(moments.within / freedom)
        rho = moments.within_shrinkage(items)
        shrinkages = np.clip(FACTORS * rho, MIN_SHRINKAGE, 1)
        target = spread / freedom / len(eigenvalues)
        r = shrinkages[:, None]
        variances = (1 - r) * np.maximum(eigenvalues, 0) + r * target
        means = moments.means @ vectors
        return cls(
            centre=moments.centre,
            basis=moments.expand(vectors),
            variances=variances,
            shrinkages=shrinkages,
            freedom=freedom,
            counts=moments.counts,
            means=means,
            norms=(1 / variances) @ (means**2).T,
        )

    def project(self, vectors: Floats) -> Floats:
        """Return vectors (..., d), centred, in the basis."""
        return (vectors - self.centre) @ self.basis

    def scores(
        self, vectors: Floats, removal: Removal | None = None, out: Floats | None = None
    ) -> Floats:
        """(m, n, L) log densities of labels, without a constant of each query.

        Minus half the squared distance to the mean of a label with n items, over 1 + 1 / n, since
        the mean is an estimate, too.

        Args:
            vectors: (n, k) in the basis.
            removal: the items that are left out for each query; a label all of whose items are left
                out gets -inf.
            out: where to write them.
        """
        shape = len(self.variances), len(vectors), len(self.means)
        distances = np.empty(shape) if out is None else out
        factors = 1 + 1 / self.counts
        scaled = vectors / self.variances[:, None, :]
        np.matmul(
            -2 * scaled.reshape(-1, vectors.shape[1]),
            self.means.T,
            out=distances.reshape(-1, shape[2]),
        )
        for number, block in enumerate(distances):
            block += self.norms[number]
            block += np.einsum("nk,nk->n", scaled[number], vectors)[:, None]
            if removal is not None:
                removal.correct(self, number, vectors, block)
            block /= -2 * factors
            if removal is not None:
                removal.replace_own(self, number, vectors, block)
        return distances


@dataclass(frozen=True, eq=False)
class Removal:
    """The items that are left out for each of n queries, at most q.

    Leaving out items i of labels l changes the sum of squares within labels by -U U', where
    U holds the residuals r_i and s_l / sqrt(n_l - m_l) for each label that keeps items: n_l is the
    number of items of a label, m_l that of those left out and s_l the sum of their residuals. The
    q columns r_i + s_l (sqrt(n_l / (n_l - m_l)) - 1) / m_l have the same product. Then
    Sigma' = Sigma - (1 - r) / nu U U', and its inverse follows from the Woodbury identity.

    Attributes:
        codes: (n, q) places of the labels of these items, -1 where there are fewer.
        columns: (n, q, k) U', 0 where there are fewer.
        remaining: (n, q) items that the label of each item keeps.
        means: (n, q, k) of these items.
    """

    codes: Integers
    columns: Floats
    remaining: Integers
    means: Floats

    @classmethod
    def of(cls, model: Discriminants, codes: Integers, vectors: Floats) -> Self:
        """Leave out items (n, q) of labels `codes`, -1 for none, with vectors in the basis."""
        inside = codes >= 0
        means = model.means[codes]
        residuals = np.where(inside[:, :, None], vectors - means, 0.0)
        same = (codes[:, :, None] == codes[:, None, :]) & inside[:, None, :] & inside[:, :, None]
        sums, removed = same @ residuals, same.sum(axis=2)
        remaining = model.counts[codes] - removed
        kept = np.maximum(remaining, 1)
        factor = (np.sqrt((kept + removed) / kept) - 1) / np.maximum(removed, 1)
        factor[remaining == 0] = 0
        columns = residuals + factor[:, :, None] * sums
        return cls(codes, columns, remaining, means - sums / kept[:, :, None])

    def __getitem__(self, rows: Integers | slice) -> Removal:
        return Removal(self.codes[rows], self.columns[rows], self.remaining[rows], self.means[rows])

    def weights(self, model: Discriminants, number: int) -> tuple[Floats, Floats]:
        """Return U' Sigma^-1 (n, q, k), and (nu / (1 - r) I - U' Sigma^-1 U)^-1 (n, q, q)."""
        scaled = self.columns / model.variances[number]
        share = (1 - model.shrinkages[number]) / model.freedom
        inner = np.eye(scaled.shape[1]) - share * scaled @ self.columns.transpose(0, 2, 1)
        return scaled, share * np.linalg.inv(inner)

    def correct(
        self, model: Discriminants, number: int, vectors: Floats, distances: Floats
    ) -> None:
        """Add to squared distances (n, L) to the means of all labels what the removal changes."""
        scaled, inverse = self.weights(model, number)
        products = (scaled @ vectors[:, :, None]) - scaled @ model.means.T
        distances += added(products, inverse)

    def replace_own(
        self, model: Discriminants, number: int, vectors: Floats, scores: Floats
    ) -> None:
        """Replace the scores (n, L) of the labels that lose items."""
        scaled, inverse = self.weights(model, number)
        gaps = vectors[:, None, :] - self.means
        distances = np.einsum("nqk,nqk->nq", gaps / model.variances[number], gaps)
        distances += added(scaled @ gaps.transpose(0, 2, 1), inverse)
        kept = np.maximum(self.remaining, 1)
        own = np.where(self.remaining > 0, -0.5 * distances / (1 + 1 / kept), -np.inf)
        rows, columns = np.nonzero(self.codes >= 0)
        scores[rows, self.codes[rows, columns]] = own[rows, columns]


def added(products: Floats, inverse: Floats) -> NDArray[np.float64]:
    """(n, m) p' A p for each column p of products (n, q, m) and inverse A (n, q, q)."""
    if products.shape[1] == 1:
        result: NDArray[np.float64] = inverse[:, 0] * products[:, 0] ** 2
        return result
    return np.asarray(np.einsum("nqm,nqm->nm", products, inverse @ products))
