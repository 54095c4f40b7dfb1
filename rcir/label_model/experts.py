"""What the experts of a label model compute: discriminants of labels, and distances to items.

`Items` is what they see of a gallery, and `Moments` are its means and covariances. `Discriminants`
compares a query with the means of labels, `Removal` without some items; `Neighbours` with items;
`KnownLabels` weighs these labels against a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from rcir.store.codec import Array

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

BLOCK_VALUES = 1 << 21  # numbers of vectors that are held at a time: 16 MiB
MAX_DIMENSIONS = 2048  # of covariances
MAX_RESIDUALS = 20_000  # from which the shrinkage of a covariance is estimated
FACTORS = np.array([0.25, 1.0, 4.0])  # of the Ledoit-Wolf shrinkage
MIN_SHRINKAGE = 1e-4  # keeps the covariance invertible
POWER, POWER_ALONE = 0.25, 0.125  # of variances; the latter where there is no other expert
MIN_DISTANCE = 1e-6  # smaller distances are rounding errors, and those of copies
MAX_DIRECTIONS = 256  # in which the means of labels differ most
MIN_LENGTH = 1e-30  # in place of 0, by which nothing can be divided


@dataclass(frozen=True, eq=False)
class Items:
    """Labelled items of a gallery.

    Attributes:
        labels: (N,) of items.
        units: (N,) items of one unit, such as copies or a cluster, are held out together.
        vectors_at: returns the vectors (n, d) at positions (n,).
    """

    labels: Integers
    units: Integers
    vectors_at: Callable[[Integers], NDArray[np.float32]]

    def __len__(self) -> int:
        return len(self.labels)

    def vectors(self, positions: Integers) -> NDArray[np.float32]:
        """Return vectors (..., d) at positions of any shape; those of the first item at -1."""
        vectors = np.asarray(self.vectors_at(np.maximum(positions.ravel(), 0)), np.float32)
        return vectors.reshape(*positions.shape, vectors.shape[-1])

    def blocks(self, positions: Integers | None = None) -> Iterator[tuple[Integers, Floats]]:
        """Yield positions and vectors of all items, or of those at positions, in blocks."""
        positions = np.arange(len(self)) if positions is None else positions
        step = max(1, BLOCK_VALUES // self.vectors(positions[:1]).shape[1])
        for start in range(0, len(positions), step):
            rows = positions[start : start + step]
            yield rows, self.vectors(rows).astype(np.float64)

    def draw(self, positions: Integers, n: int) -> Integers:
        """Return at most n of the positions, ascending; the same ones every time."""
        if len(positions) <= n:
            return positions
        return np.sort(np.random.default_rng(0).choice(positions, n, replace=False))

    def members(self, units: Integers) -> Integers:
        """(n, q) positions of the items of each unit, then -1; q is the largest number."""
        positions = np.flatnonzero(np.isin(self.units, units))
        positions = positions[np.argsort(self.units[positions], kind="stable")]
        ordered = self.units[positions]
        first, last = (np.searchsorted(ordered, units, side=side) for side in ("left", "right"))
        columns = first[:, None] + np.arange(max(1, (last - first).max(initial=0)))
        inside = columns < last[:, None]
        return np.where(inside, np.append(positions, -1)[np.where(inside, columns, -1)], -1)


@dataclass(frozen=True, eq=False)
class Moments:
    """First and second moments of labelled vectors.

    Attributes:
        labels, counts: (L,) of labels, ascending.
        centre: (d,) mean of all vectors.
        basis: (d, k) orthonormal; it spans 2,048 items drawn at random, and what lies outside of
            it is neglected. None up to 2,048 dimensions, where k = d.
        means: (L, k) of labels, in the basis, of centred vectors.
        within: (k, k) sum of squares and products around the means of labels.
        total: (k, k) around the mean of all.
    """

    labels: Integers
    counts: Integers
    centre: Floats
    basis: Floats | None
    means: Floats
    within: Floats
    total: Floats

    @classmethod
    def of(cls, items: Items) -> Moments:
        """Compute the moments block by block."""
        labels, codes, counts = np.unique(items.labels, return_inverse=True, return_counts=True)
        sums = np.zeros((len(labels), items.vectors(np.zeros(1, np.int64)).shape[1]))
        for rows, vectors in items.blocks():
            order = np.argsort(codes[rows], kind="stable")
            present, starts = np.unique(codes[rows][order], return_index=True)
            sums[present] += np.add.reduceat(vectors[order], starts, axis=0)
        centre = sums.sum(axis=0) / len(items)
        basis = None
        if len(centre) > MAX_DIMENSIONS:
            drawn = items.draw(np.arange(len(items)), MAX_DIMENSIONS)
            basis = np.linalg.qr((items.vectors(drawn) - centre).T)[0]
        means = _project(sums / counts[:, None], centre, basis)
        within = np.zeros((means.shape[1],) * 2)
        for rows, vectors in items.blocks():
            residuals = _project(vectors, centre, basis) - means[codes[rows]]
            within += residuals.T @ residuals
        weighted = means * np.sqrt(counts)[:, None]
        total = within + weighted.T @ weighted
        return cls(labels, counts, centre, basis, means, within, total)

    def project(self, vectors: Floats) -> Floats:
        """Return vectors (n, d), centred, in the basis."""
        return _project(vectors, self.centre, self.basis)

    def expand(self, directions: Floats) -> Floats:
        """Return directions (k, m) of the basis as such of vectors (d, m)."""
        return directions if self.basis is None else self.basis @ directions

    def within_shrinkage(self, items: Items) -> float:
        """Return the Ledoit-Wolf shrinkage of the covariance within labels."""
        codes = codes_of(self.labels, items.labels)
        several = np.flatnonzero(self.counts[codes] > 1)
        factor = np.sqrt(self.counts / np.maximum(self.counts - 1, 1))[:, None]
        return shrinkage(
            (self.project(vectors) - self.means[codes[rows]]) * factor[codes[rows]]
            for rows, vectors in items.blocks(items.draw(several, MAX_RESIDUALS))
        )

    def total_shrinkage(self, items: Items) -> float:
        """Return the Ledoit-Wolf shrinkage of the covariance of all vectors."""
        drawn = items.draw(np.arange(len(items)), MAX_RESIDUALS)
        return shrinkage(self.project(vectors) for _, vectors in items.blocks(drawn))


def codes_of(ascending: Integers, labels: Integers) -> Integers:
    """Return the places of labels among different, ascending ones that hold them all."""
    if int(ascending[-1]) - int(ascending[0]) == len(ascending) - 1:
        return np.asarray(labels - ascending[0])
    return np.searchsorted(ascending, labels)


def _project(vectors: Floats, centre: Floats, basis: Floats | None) -> Floats:
    return vectors - centre if basis is None else (vectors - centre) @ basis


def shrinkage(blocks: Iterator[Floats]) -> float:
    """Return the r in [0, 1] for which (1 - r) S + r tr(S) / d I estimates the covariance best.

    S is that of centred vectors (n, d), in blocks of rows; the mean squared error is the least
    (Ledoit and Wolf, Journal of Multivariate Analysis 2004, Lemma 3.4).
    """
    n, fourth, products = 0, 0.0, np.zeros((1, 1))
    for block in blocks:
        n += len(block)
        fourth += float((np.einsum("nd,nd->n", block, block) ** 2).sum())
        products = products + block.T @ block
    covariance = products / max(n, 1)
    squares = float((covariance**2).sum())
    distance = squares - float(np.trace(covariance)) ** 2 / len(covariance)
    if not distance > 0:
        return 1.0
    return min(max((fourth / n - squares) / n / distance, 0.0), 1.0)


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

    def project(self, vectors: NDArray[np.floating[Any]]) -> Floats:
        """Return vectors (..., d), centred, in the basis."""
        return (vectors - self.centre) @ self.basis

    def quick_scores(self, vectors: Floats, out: NDArray[np.float32]) -> None:
        """Write `scores` by one product in single precision."""
        scaled = vectors / self.variances[:, None]
        squares = np.einsum("mnk,nk->mn", scaled, vectors)[:, :, None]
        which = np.repeat(np.eye(len(scaled))[:, None], len(vectors), axis=1)
        factors = np.concatenate([scaled, which, squares], axis=2).astype(np.float32)
        np.matmul(factors, self._quick_factors, out=out)

    @cached_property
    def _quick_factors(self) -> NDArray[np.float32]:
        """(k + m + 1, L) what `quick_scores` multiplies with: of means, norms and one."""
        shares = 1 / (1 + 1 / self.counts)
        rows = np.concatenate([self.means.T, -0.5 * self.norms])
        return np.append(rows * shares, [(1 - shares) / 2], axis=0).astype(np.float32)

    def scores(self, vectors: Floats, removal: Removal | None = None) -> Floats:
        """(m, n, L) log densities of labels, without a constant of each query.

        Minus half the squared distance to the mean of a label with n items, over 1 + 1 / n, since
        the mean is an estimate, too.

        Args:
            vectors: (n, k) in the basis.
            removal: the items that are left out for each query; a label all of whose items are left
                out gets -inf.
        """
        factors = 1 + 1 / self.counts
        scaled = vectors / self.variances[:, None, :]
        distances: Floats = -2 * scaled @ self.means.T
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


@dataclass(frozen=True, eq=False)
class HalfWhitening:
    """A metric that reduces the differences of variance between directions, without labels.

    Centred vectors are divided by a power of their (shrunk) variance in each direction, 1/4,
    or 1/8 if there is no other expert, and scaled to unit length. Whitening takes the power 1/2.

    Attributes:
        centre: (d,) mean of the gallery.
        transform: (d, k) the directions, each divided by this power of its variance.
    """

    centre: Annotated[Floats, Array(1)]
    transform: Annotated[Floats, Array(2)]

    @classmethod
    def fit(cls, items: Items, moments: Moments, power: float = POWER) -> Self:
        """Fit on all items."""
        eigenvalues, vectors = np.linalg.eigh(moments.total / len(items))
        rho = max(moments.total_shrinkage(items), MIN_DISTANCE)
        variances = (1 - rho) * np.maximum(eigenvalues, 0) + rho * eigenvalues.mean()
        if not eigenvalues.mean() > 0:
            variances = np.ones(len(eigenvalues))
        return cls(moments.centre, moments.expand(vectors * variances**-power))

    def project(self, vectors: Floats) -> Floats:
        """Return transformed vectors (..., k), not of unit length yet."""
        return (vectors - self.centre) @ self.transform


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Distances of queries to gallery items.

    Attributes:
        half: the half-whitened metric.
        norms: (3, N) of items: length, length after half whitening, squared length in the metric of
            the first discriminant, 0 without one.
    """

    half: HalfWhitening
    norms: Annotated[Floats, Array(2)]

    @classmethod
    def fit(cls, items: Items, moments: Moments, model: Discriminants | None) -> Self:
        """Fit on all items."""
        half = HalfWhitening.fit(items, moments, POWER_ALONE if model is None else POWER)
        norms = np.zeros((3, len(items)))
        for rows, vectors in items.blocks():
            norms[0, rows] = np.linalg.norm(vectors, axis=1)
            norms[1, rows] = np.linalg.norm(half.project(vectors), axis=1)
            if model is not None:
                norms[2, rows] = (model.project(vectors) ** 2) @ (1 / model.variances[0])
        return cls(half, norms)

    def distances(
        self,
        vectors: Floats,
        candidates: Integers,
        gathered: NDArray[np.float32],
        model: Discriminants | None = None,
        removal: Removal | None = None,
    ) -> Floats:
        """(2 or 3, n, c) distances of queries (n, d) to candidates (n, c) with vectors (n, c, d).

        The cosine distance, that after half whitening, and, with a discriminant, the squared
        distance in its metric. All that it takes is products with the vectors of candidates less
        that of the query, which are small where distances are: single precision will do.
        """
        lengths = np.maximum(np.linalg.norm(vectors, axis=1), MIN_LENGTH)
        projected = self.half.project(vectors)
        half_lengths = np.maximum(np.linalg.norm(projected, axis=1), MIN_LENGTH)
        rows = [
            vectors / lengths[:, None],
            (projected / half_lengths[:, None]) @ self.half.transform.T,
        ]
        if model is not None:
            in_basis = model.project(vectors)
            scaled = in_basis / model.variances[0]
            rows.append(scaled @ model.basis.T)
        dtype: type[np.floating[Any]] = np.float32 if removal is None else np.float64
        directions = np.stack(rows, axis=1).astype(dtype)
        apart = gathered - vectors.astype(dtype)[:, None]
        products = (apart @ directions.transpose(0, 2, 1)).transpose(2, 0, 1)
        norms = np.maximum(self.norms[: len(rows)].take(candidates, axis=1), MIN_LENGTH)
        distances = np.empty(norms.shape)
        for number, own in enumerate([lengths, half_lengths]):
            distances[number] = 1 - (products[number] + own[:, None]) / norms[number]
        if model is not None:
            squares = np.einsum("nk,nk->n", scaled, in_basis)
            distances[2] = norms[2] - squares[:, None] - 2.0 * products[2]
            if removal is not None:
                weights, inverse = removal.weights(model, 0)
                distances[2] += added(weights @ model.basis.T @ apart.transpose(0, 2, 1), inverse)
            distances[2] /= len(model.variances[0])
        return np.maximum(distances, MIN_DISTANCE)


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
        precisions, products, constant = self._factors
        for start in range(0, len(vectors), step):
            z = (vectors[start : start + step] - self.centre) @ self.directions
            new = (np.log1p(self.spread) + z**2 / (1 + self.spread)).sum(axis=1)
            ratios = new[:, None] - z**2 @ precisions + 2 * z @ products - constant
            if own is not None:
                label = own[start : start + step]
                ratios[np.arange(len(z)), label] = -np.inf
                if leave_out == "item":
                    ratios[np.arange(len(z)), label] = new - self._distances(z, label)
            result[start : start + step] = logsumexp(ratios / 2, axis=1) - np.log(len(self.counts))
        return result

    @cached_property
    def _factors(self) -> tuple[Floats, Floats, Floats]:
        """(r, L), (r, L) and (L,) what squares and vectors are multiplied with, and constants."""
        scales, centres = self._new_queries(self.counts[:, None], self.means)
        constant = (np.log(scales) + centres**2 / scales).sum(axis=1)
        return 1 / scales.T, (centres / scales).T, constant

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
