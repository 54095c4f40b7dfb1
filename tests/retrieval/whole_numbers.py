"""A gallery and queries whose coordinates and uncertainties are whole numbers.

All squared distances are integers below 2**24 and differ within a query, so that every machine
finds the same distances, ranks and set sizes, and plain NumPy can predict them.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rcir import Retriever

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
    def totals(self):
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


def build(labels=GALLERY.labels, **options):
    """A retriever of the gallery that is not calibrated."""
    options = {"depth": DEPTH, "uncertainty": GALLERY.uncertainty} | options
    return Retriever.from_embeddings(GALLERY.vectors, labels=labels, metric="euclidean", **options)


def search(retriever, part, groups=True, **options):
    """Search queries with their labels and uncertainties."""
    if groups:
        options["groups"] = part.groups
    queries = retriever.labelled(part.vectors, part.labels, part.uncertainty, **options)
    return retriever.search_labelled(queries)


def calibrate(retriever, score_function="quantile", groups=True, **options):
    """Tune and calibrate on the two splits; returns the retriever."""
    tuning, calibration = (search(retriever, part, groups) for part in (TUNING, CALIBRATION))
    retriever.calibrate(tuning, calibration, score_function, **options)
    return retriever


def retrieve(retriever, alpha, delta=DELTA, part=TEST, **options):
    """The answers to the queries of a part."""
    return retriever.retrieve(part.vectors, alpha, delta, uncertainty=part.uncertainty, **options)


def guarantee(retriever, alpha, delta=DELTA, **options):
    """The guarantee of a request."""
    return retriever.guarantee(alpha, delta, **options)


def missed(answers, part):
    """(n,) whether each answer lacks the label of its query."""
    return np.array(
        [label not in answer.labels for answer, label in zip(answers, part.labels, strict=True)]
    )


def plain(answers):
    """Everything that answers say, to be compared."""
    return [answer.to_dict() for answer in answers]
