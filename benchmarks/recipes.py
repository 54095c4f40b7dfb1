"""Nine recipes for sets of labels that scikit-learn makes in an afternoon, which sizes.py measures.

{multinomial logistic regression, discriminant analysis with a shrunk covariance, weighted vote} x
{1 - p, cumulative mass, log ratio}, fitted on a gallery. A set holds the labels whose score is at
most a threshold, always with the likeliest; the scores of the right labels of labelled queries
certify the threshold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax
from sklearn.covariance import ledoit_wolf_shrinkage
from sklearn.linear_model import LogisticRegression

from rcir.risk import allowed_misses

VOTERS, TEMPERATURE, SMOOTHING = 20, 0.07, 0.01  # of the weighted vote
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Part:
    """Vectors (n, d) of length 1 with their labels (n,)."""

    vectors: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Any) -> Part:
        return Part(self.vectors[rows], self.labels[rows])


def logistic(items: Floats, number: NDArray[np.int64], queries: Floats) -> Floats:
    """Return (n, l) utilities of labels by logistic regression."""
    model = LogisticRegression(C=1, tol=1e-3).fit(items, number)
    utilities = model.decision_function(queries)
    return utilities if utilities.ndim > 1 else np.column_stack([-utilities, utilities])


def discriminant(items: Floats, number: NDArray[np.int64], queries: Floats, dim: int) -> Floats:
    """Return (n, l) utilities of labels by linear discriminant analysis.

    The covariance within labels is shrunk after Ledoit and Wolf, in a space of `dim` dimensions of
    which the others are 0; with one item per label, it is that of all items.
    """
    counts = np.bincount(number)
    means = np.add.reduceat(items, np.cumsum(counts) - counts) / counts[:, None]
    free = len(items) - len(counts)
    residuals = items - means[number] if free else items
    padded = np.pad(residuals, ((0, 0), (0, dim - items.shape[1])))
    shrinkage = ledoit_wolf_shrinkage(padded, assume_centered=True)
    scatter = residuals.T @ residuals / (free or len(items))
    sphere = np.trace(scatter) / dim
    shrunk = (1 - shrinkage) * scatter + shrinkage * sphere * np.eye(len(scatter))
    values, turn = np.linalg.eigh(shrunk)
    whiten = turn / np.sqrt(np.maximum(values, 1e-12))
    centres = means @ whiten
    return (queries @ whiten) @ centres.T - np.square(centres).sum(axis=1) / 2


def vote(cosines: Floats, starts: NDArray[np.int64]) -> Floats:
    """Return (n, l) logarithms of the shares of labels in the vote of the nearest 20 items.

    Items with cosines (n, N) are in the order of labels, each of which starts at a column. Labels
    without a vote are ordered by their nearest item.
    """
    weights = cosines / TEMPERATURE
    place = max(weights.shape[1] - VOTERS, 0)
    last = np.partition(weights, place, axis=1)[:, [place]]
    votes = np.exp(weights - weights.max(axis=1, keepdims=True)) * (weights >= last)
    shares = np.add.reduceat(votes, starts, axis=1) / votes.sum(axis=1, keepdims=True)
    nearest = np.exp(log_softmax(np.maximum.reduceat(weights, starts, axis=1), axis=1))
    return np.log((1 - SMOOTHING) * shares + SMOOTHING * nearest + 1e-300)


def log_probabilities(gallery: Part, queries: NDArray[np.float32]) -> Iterator[tuple[str, Floats]]:
    """Yield names and (n, l) logarithms of probabilities of labels by three models.

    The gallery is in the order of its labels.
    """
    dim = gallery.vectors.shape[1]
    _, starts, number = np.unique(gallery.labels, return_index=True, return_inverse=True)
    mean = gallery.vectors.mean(axis=0, dtype=np.float64)
    items, others = gallery.vectors - mean, queries - mean
    if len(items) < dim:  # the first two models are the same in the space that the items span
        axes = np.linalg.svd(items, full_matrices=False)[2].T
        items, others = items @ axes, others @ axes
    scale = np.sqrt(np.square(items).sum() / len(items) / dim)
    yield "logistic", log_softmax(logistic(items / scale, number, others / scale), axis=1)
    yield "discriminant", log_softmax(discriminant(items, number, others, dim), axis=1)
    yield "vote", vote((queries @ gallery.vectors.T).astype(np.float64), starts)


def recipes(gallery: Part, queries: NDArray[np.float32]) -> dict[str, Floats]:
    """Return (n, l) scores of labels by the nine recipes; the likeliest label is always in."""
    scores = {}
    for name, logs in log_probabilities(gallery, queries):
        order = np.argsort(-logs, axis=1)
        ordered = np.take_along_axis(logs, order, axis=1)
        rest = np.empty_like(logs)  # the mass that begins with a label, from the least likely on
        tail = np.logaddexp.accumulate(ordered[:, ::-1], axis=1)[:, ::-1]
        np.put_along_axis(rest, order, tail, axis=1)
        rules = {"1 - p": -logs, "mass": -rest, "ratio": ordered[:, :1] - logs}
        for rule, values in rules.items():
            np.put_along_axis(values, order[:, :1], -np.inf, axis=1)
            scores[f"{name} {rule}"] = values
    return scores


def certified(match: Floats, scores: Floats, alpha: float, delta: float) -> float:
    """Return the mean size of sets whose threshold the scores of right answers certify."""
    allowed = allowed_misses(len(match), alpha, delta)
    threshold = np.sort(match)[len(match) - 1 - allowed] if allowed >= 0 else np.inf
    return float((scores <= threshold).sum(axis=1).mean()) if threshold < np.inf else np.nan


def bet(
    match: Floats, labels: NDArray[np.int64], alpha: float, delta: float, stake: float
) -> float:
    """Return the smallest threshold at which a bet on the means of labels wins 1 / delta.

    At a threshold, the capital is the product over labels of 1 + lambda (alpha - X), X the share of
    the label's queries that are missed, and falls with X: the smallest such threshold is valid.
    """
    order = np.argsort(match, kind="stable")
    members = labels[order, None] == np.unique(labels)
    missed = 1 - np.cumsum(members, axis=0) / members.sum(axis=0)
    factors = 1 + stake / (1 - alpha) * (alpha - missed)
    won = np.log(np.maximum(factors, 1e-300)).sum(axis=1) >= np.log(1 / delta)
    return float(match[order][np.argmax(won)]) if won.any() else np.inf
