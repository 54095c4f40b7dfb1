"""N-digit MNIST: numbers of N handwritten digits side by side (Oh et al., ICLR 2019).

An image is N MNIST digits in a row, its label the number they show, leading zeros kept. Images of
the evaluation are made of MNIST's test digits only, and no black squares hide parts of the digits
unless asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rcir.data.augmentation import occlude
from rcir.data.division import Source
from rcir.data.records import ImageSet
from rcir.errors import InvalidConfig

CLASS_LIST_SEED = 714
LEAST_PER_CLASS = 100
Gap = Literal["number", "instance"]


def released_classes(digits: int) -> list[int]:
    """The numbers that training shows, 70% of all, in the order of the released lists.

    Example:
        >>> len(released_classes(2)), len(released_classes(3))
        (70, 700)
    """
    n = 10**digits
    chosen = np.random.RandomState(CLASS_LIST_SEED).choice(n, 7 * n // 10, replace=False)
    classes: list[int] = chosen.tolist()
    return classes


def read(
    root: Path,
    *,
    digits: int = 2,
    gap: Gap = "number",
    unseen: bool = True,
    corrupt: float = 0.0,
    train_corrupt: float = 0.2,
    total_train: int = 100_000,
    total_test: int = 10_000,
    draw: int = 0,
    download: bool = False,
) -> Source:
    """N-digit MNIST, drawn by the rules of the released sets.

    Args:
        root: folder that holds MNIST, see `rcir.data.datasets.mnist.read_mnist`.
        digits: of a number; 1 to 4.
        gap: "number": the evaluation shows numbers that training did not; "instance": both show
            all numbers, of other handwritten digits.
        unseen: "number" only; False evaluates on the numbers of training.
        corrupt: probability in [0, 1] of a digit of the evaluation to be hit by a black square.
        train_corrupt: the same, of training images as they are stored.
        total_train, total_test: number of images, shared evenly by the classes (rounded down). With
            gap "number" a class has at least 100 images: there are fewer classes then.
        draw: decides which handwritten digits and squares are drawn.
        download: see `read_mnist`.

    Raises:
        InvalidConfig: an option is out of its range.
        DataUnavailable, InvalidData: of MNIST.

    Example:
        >>> source = read(Path("data"), digits=3)  # doctest: +SKIP
        >>> len(source.train), source.train.images.shape  # doctest: +SKIP
        (99400, (99400, 28, 84))
    """
    if not 1 <= digits <= 4 or gap not in ("number", "instance"):
        raise InvalidConfig(
            f"data.options: digits {digits}, gap {gap!r}; 1 to 4 digits, gap 'number' or 'instance'"
        )
    least = LEAST_PER_CLASS if gap == "number" else 1
    if min(total_train, total_test) < least or draw < 0:
        raise InvalidConfig(
            f"data.options: total_train {total_train}, total_test {total_test}, draw {draw}; at "
            f"least {least} images each, and draw at least 0"
        )
    for name, p in (("corrupt", corrupt), ("train_corrupt", train_corrupt)):
        if not 0 <= p <= 1:
            raise InvalidConfig(f"data.options.{name} is {p}; it must be in [0, 1]")
    every = np.arange(10**digits)
    train_classes = every if gap == "instance" else np.array(released_classes(digits))
    test_classes = train_classes
    if gap == "number" and unseen:
        test_classes = np.setdiff1d(every, train_classes)
    rng = np.random.default_rng(draw)
    from rcir.data.datasets.mnist import (
        read_mnist,  # slow to import; the lists of classes need none
    )

    mnist = read_mnist(root, download)

    def compose(
        name: str, pool: ImageSet, classes: NDArray[np.int64], total: int, p: float
    ) -> ImageSet:
        each = total // len(classes)
        if gap == "number" and each < LEAST_PER_CLASS:
            each = LEAST_PER_CLASS
            classes = np.sort(rng.choice(classes, total // each, replace=False))
        return _compose(name, pool, classes, each, digits, p, rng)

    train = compose("train", mnist.train, np.sort(train_classes), total_train, train_corrupt)
    test = compose("test", mnist.queries, np.sort(test_classes), total_test, corrupt)
    return Source(train, test, gallery="queries" if unseen and gap == "number" else "train")


def _compose(
    name: str,
    pool: ImageSet,
    classes: NDArray[np.int64],
    each: int,
    digits: int,
    corrupt: float,
    rng: np.random.Generator,
) -> ImageSet:
    """`each` images of every class; within a class and position no digit image comes twice."""
    images, labels = np.asarray(pool.images), pool.relevance.labels  # type: ignore[attr-defined]
    rows_of = [np.flatnonzero(labels == digit) for digit in range(10)]
    if each < 1 or each > min(map(len, rows_of)):
        raise InvalidConfig(
            f"{each} images of each of {len(classes)} numbers: from 1 to "
            f"{min(map(len, rows_of))} can be drawn"
        )
    shown_digits = classes[:, None] // 10 ** np.arange(digits)[::-1] % 10
    rows = np.array(
        [
            [rng.choice(rows_of[digit], each, replace=False) for digit in number]
            for number in shown_digits
        ]
    )
    rows = rows.transpose(0, 2, 1).reshape(-1, digits)
    side = images.shape[1]
    composed = images[rows].transpose(0, 2, 1, 3).reshape(len(rows), side, digits * side)
    composed, occluded = occlude(composed, corrupt, rng)
    numbers = np.repeat(classes, each)
    ids = [f"{name}-{i:06d}-{number:0{digits}d}" for i, number in enumerate(numbers)]
    return ImageSet(composed, numbers.astype(np.int64), ids, {"occluded": occluded})
