"""Two-digit numbers made of scikit-learn's handwritten digits.

The construction of N-digit MNIST (Oh et al., "Modeling uncertainty with hedged instance
embedding", ICLR 2019, appendix A; class list of its released code) with the 1,797 real 8x8 digits
that scikit-learn carries: an image is two digits side by side, its label the number they show, and
a black square of random size hides part of some digits, so that some images are truly ambiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rcir.data.augmentation import occlude
from rcir.data.datasets.n_digit_mnist import released_classes
from rcir.data.division import QueryDivision, draw_by_cluster
from rcir.data.records import ImageSet, Splits
from rcir.errors import InvalidConfig

CLASSES = 100
SIDE = 8
ROUNDS = 10  # of drawing anew what came twice


def class_lists(open_set: bool) -> tuple[list[int], list[int], list[int]]:
    """Classes of training, validation and evaluation.

    Open set: the released 70 training classes (the last 10 of them for validation), and the 30
    others for evaluation. Otherwise all 100 everywhere.
    """
    if not open_set:
        every = list(range(CLASSES))
        return every, every, every
    chosen = released_classes(digits=2)
    unseen = sorted(set(range(CLASSES)) - set(chosen))
    return sorted(chosen[:60]), sorted(chosen[60:]), unseen


def _compose(
    digits: NDArray[np.uint8],
    targets: NDArray[np.int64],
    pool: NDArray[np.int64],
    labels: NDArray[np.int64],
    occlusion: float,
    rng: np.random.Generator,
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """A number for each label, each digit drawn from `pool`; and which of them are hit."""
    halves = np.empty((len(labels), 2), np.int64)
    for position, wanted in enumerate((labels // 10, labels % 10)):
        for digit in range(10):
            rows = np.flatnonzero(wanted == digit)
            halves[rows, position] = rng.choice(pool[targets[pool] == digit], len(rows))
    clean = digits[halves].transpose(0, 2, 1, 3).reshape(len(labels), SIDE, 2 * SIDE)
    return occlude(clean, occlusion, rng)


def _redraw_repeats(
    queries: Sequence[ImageSet],
    others: Sequence[ImageSet],
    draw: Callable[[NDArray[np.int64]], tuple[NDArray[np.uint8], NDArray[np.bool_]]],
    rng: np.random.Generator,
) -> list[ImageSet]:
    """The queries, with pictures that come twice drawn anew, as far as there are enough.

    Which of several is kept is decided at random, so that no part of the queries is favoured.
    """
    images = np.concatenate([part.images for part in queries])
    labels = np.concatenate([np.asarray(part.labels) for part in queries])
    occluded = np.concatenate([part.attributes["occluded"] for part in queries])
    other_pixels = _pixels(np.concatenate([part.images for part in others]))
    for _ in range(ROUNDS):
        order = rng.permutation(len(images))
        pixels = _pixels(images)[order]
        again = np.isin(pixels, other_pixels)
        again[np.delete(np.arange(len(order)), np.unique(pixels, return_index=True)[1])] = True
        rows = order[again]
        if not len(rows):
            break
        images[rows], occluded[rows] = draw(labels[rows])
    edges = np.cumsum([len(part) for part in queries])[:-1]
    return [
        ImageSet(pictures, part.labels, part.ids, {"occluded": hit})
        for part, pictures, hit in zip(
            queries, np.split(images, edges), np.split(occluded, edges), strict=True
        )
    ]


def _pixels(images: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    """(n,) the pixels of each image; all are as long, so that zeros at the end do not matter."""
    return np.ascontiguousarray(images).reshape(len(images), -1).view(f"S{images[0].size}")[:, 0]


def load(
    root: object = None,
    *,
    seed: int = 0,
    open_set: bool = True,
    occlusion: float = 0.5,
    train_occlusion: float = 0.3,
    train: int = 10000,
    validation: int = 1000,
    gallery: int = 1500,
    tuning: int = 3000,
    calibration: int = 3000,
    test: int = 3000,
    queries: QueryDivision = "shared-labels",
) -> Splits:
    """The splits of two-digit numbers.

    Digit instances are divided four ways before anything is composed (half for training, a tenth
    for validation, 15% for the gallery, a quarter for queries), so that no handwritten digit is
    shared. Score function, calibration and test queries are drawn from one population, the numbers
    that the query instances can form; a picture that is drawn twice, or is one of another part, is
    drawn anew (unless far more are asked for than there are). The gallery is clean. Training images
    are part noisy already as they are stored: mining must be able to see, and avoid, a noisy
        positive,
    or the variance learns the wrong thing.

    Args:
        root: unused; the digits come with scikit-learn.
        seed: decides instances, compositions and occlusions.
        open_set: evaluation on classes that training never saw.
        occlusion: probability in [0, 1] of a digit to be hit, in queries and validation images.
        train_occlusion: the same, in training images.
        train, validation, gallery, tuning, calibration, test: numbers of images, at least 1.
        queries: "new-labels": score function, calibration and test queries show different numbers;
            each part shows a share of the numbers that is its share of the queries, rounded up.

    Raises:
        InvalidConfig: a number is out of its range.
        InvalidData: no numbers would remain for the test queries.
    """
    for name, p in (("occlusion", occlusion), ("train_occlusion", train_occlusion)):
        if not 0 <= p <= 1:
            raise InvalidConfig(f"data.options.{name} is {p}; it must be in [0, 1]")
    if min(train, validation, gallery, tuning, calibration, test) < 1:
        raise InvalidConfig(
            f"data.options: train {train}, validation {validation}, gallery {gallery}, tuning "
            f"{tuning}, calibration {calibration}, test {test}; each must be at least 1"
        )
    from sklearn.datasets import load_digits  # slow to import; other sets need none

    bunch = load_digits()
    digits = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    targets = bunch.target.astype(np.int64)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(digits))
    pools = np.split(order, np.round(np.array([0.5, 0.6, 0.75]) * len(order)).astype(int))
    train_classes, validation_classes, evaluation_classes = class_lists(open_set)

    def compose(
        name: str, pool: NDArray[np.int64], classes: list[int], n: int, p: float
    ) -> ImageSet:
        labels = rng.permutation(np.resize(np.asarray(classes, np.int64), n))  # as even as can be
        images, occluded = _compose(digits, targets, pool, labels, p, rng)
        ids = [f"{name}-{i:05d}-{label:02d}" for i, label in enumerate(labels)]
        return ImageSet(images, labels, ids, {"occluded": occluded})

    others = [
        compose("train", pools[0], train_classes, train, train_occlusion),
        compose("validation", pools[1], validation_classes, validation, occlusion),
        compose("gallery", pools[2], evaluation_classes, gallery, 0.0),
    ]
    sizes = {"tuning": tuning, "calibration": calibration, "test": test}
    classes_of = dict.fromkeys(sizes, evaluation_classes)
    if queries == "new-labels":
        labels = np.resize(evaluation_classes, sum(sizes.values()))
        parts = {"tuning": tuning, "calibration": calibration}
        rows = draw_by_cluster(rng, labels, parts, "labels")
        classes_of = {
            name: np.unique(labels[part]).tolist() for name, part in zip(sizes, rows, strict=True)
        }
    query_sets = [
        compose(name, pools[3], classes_of[name], n, occlusion) for name, n in sizes.items()
    ]
    query_sets = _redraw_repeats(
        query_sets,
        others,
        lambda labels: _compose(digits, targets, pools[3], labels, occlusion, rng),
        rng,
    )
    return Splits(*others, *query_sets)
