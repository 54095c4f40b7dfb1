"""A gallery and queries whose coordinates and uncertainties are whole numbers.

All squared distances are integers below 2**24 and differ within a query, so that every machine
finds the same distances, ranks and set sizes, and plain NumPy can predict them.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.stats import binom

ITEMS, CLASSES, DEPTH = 300, 20, 150
STEP = 4  # between neighbouring gallery items
DELTA = 0.1


@dataclass(frozen=True)
class Part:
    """Queries with what is known of them; indexing gives some of them."""

    vectors: np.ndarray
    labels: np.ndarray
    uncertainty: np.ndarray

    @property
    def groups(self):
        """Queries of large uncertainty are "hard", the others "easy"."""
        return np.where(self.uncertainty > 50, "hard", "easy")

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, rows):
        return Part(self.vectors[rows], self.labels[rows], self.uncertainty[rows])

    def __add__(self, other):
        names = ("vectors", "labels", "uncertainty")
        return Part(*(np.concatenate([getattr(self, n), getattr(other, n)]) for n in names))

    @cached_property
    def order(self):
        """(n, DEPTH) gallery positions, nearest first, by brute force."""
        squared = ((self.vectors[:, None, 0] - GALLERY.vectors[None, :, 0]) ** 2).astype(int)
        return np.argsort(squared, axis=1)[:, :DEPTH]

    @cached_property
    def relevant(self):
        """(n, DEPTH) whether each candidate has the label of its query."""
        return GALLERY.labels[self.order] == self.labels[:, None]

    @cached_property
    def n_relevant(self):
        """(n,) number of gallery items with the label of the query."""
        return (self.labels[:, None] == GALLERY.labels).sum(axis=1)

    @cached_property
    def ranks(self):
        """(n,) rank of the first true match, infinite where there is none."""
        return np.where(self.relevant.any(1), self.relevant.argmax(1) + 1.0, np.inf)

    @cached_property
    def scale(self):
        """(n,) share of the tuning split that is at most as uncertain: the quantile scale."""
        return (TUNING.uncertainty <= self.uncertainty[:, None]).mean(axis=1)

    @cached_property
    def scores(self):
        """(n,) the smallest threshold whose set holds a true match, by the quantile scale."""
        return (self.ranks - 1) / self.scale


def _gallery():
    """Items on a line; most have the label of their stretch, some that of another one."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), ITEMS // CLASSES)
    moved = rng.random(ITEMS) < 0.15
    labels[moved] = rng.permutation(labels[moved])
    vectors = np.zeros((ITEMS, 4), np.float32)
    vectors[:, 0] = STEP * np.arange(1, ITEMS + 1)
    return Part(vectors, labels, rng.integers(1, 100, ITEMS))


def _queries(n):
    """Queries near an item of their label: the further from it, the larger their uncertainty."""
    rng = np.random.default_rng(1)
    uncertainty = rng.integers(1, 91, 2 * n)
    items = rng.integers(ITEMS, size=2 * n)
    offset = np.rint(rng.standard_normal(2 * n) * uncertainty / 6)
    vectors = rng.integers(-2, 3, (2 * n, 4)) * STEP
    vectors[:, 0] = STEP * np.clip(items + offset, 0, ITEMS) + 1  # nowhere midway between items
    _, rows = np.unique(vectors, axis=0, return_index=True)
    rows = rng.permutation(rows)[:n]
    return Part(vectors[rows].astype(np.float32), GALLERY.labels[items[rows]], uncertainty[rows])


GALLERY = _gallery()
_ALL = _queries(1200)
TUNING, CALIBRATION, TEST, FURTHER = _ALL[:200], _ALL[200:600], _ALL[600:700], _ALL[700:1200]


def hoeffding_bentkus(losses, alpha):
    """The p-value of "the mean loss is above alpha" by the Hoeffding-Bentkus bound."""
    n, mean = len(losses), np.mean(losses)
    if mean >= alpha:
        return 1.0
    kl = (mean * math.log(mean / alpha) if mean else 0) + (1 - mean) * math.log(
        (1 - mean) / (1 - alpha)
    )
    tail = binom.cdf(math.ceil(round(float(np.sum(losses)), 9)), n, alpha)
    return min(math.exp(-n * kl), math.e * tail)
