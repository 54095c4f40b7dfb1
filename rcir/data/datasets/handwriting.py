"""Handwriting: two-digit numbers of scikit-learn's digits, N-digit MNIST, and Omniglot."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rcir.data.augmentation import occlude
from rcir.data.division import QueryDivision, Source, clusters_of, draw_by_cluster, draw_by_label
from rcir.data.records import ImageSet, Splits
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData

CLASS_LIST_SEED = 714
LEAST_PER_CLASS = 100
Gap = Literal["number", "instance"]
CLASSES = 100  # of two-digit numbers
ROUNDS = 10  # of drawing anew what came twice
ARCHIVE = Path("omniglot") / "images_background.zip"
ALPHABETS, DRAWINGS, DRAWING_SIDE = 30, 20, 105
DAMAGED = (zipfile.BadZipFile, zlib.error, OSError, ValueError, NotImplementedError, RuntimeError)


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


def read_n_digit_mnist(
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
    """N-digit MNIST (Oh et al., ICLR 2019), drawn by the rules of the released sets.

    An image is N MNIST digits in a row, its label the number they show, leading zeros kept. Images
    of the evaluation are made of MNIST's test digits only, and no black squares hide parts of the
    digits unless asked for.

    Args:
        root: folder that holds MNIST, see `rcir.data.datasets.small_images.read_mnist`.
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
        >>> source = read_n_digit_mnist(Path("data"), digits=3)  # doctest: +SKIP
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
    _require_probabilities(corrupt=corrupt, train_corrupt=train_corrupt)
    every = np.arange(10**digits)
    train_classes = every if gap == "instance" else np.array(released_classes(digits))
    test_classes = train_classes
    if gap == "number" and unseen:
        test_classes = np.setdiff1d(every, train_classes)
    rng = np.random.default_rng(draw)
    from rcir.data.datasets.small_images import read_mnist  # slow to import; other sets need none

    mnist = read_mnist(root, download)

    def compose(
        name: str, pool: ImageSet, classes: NDArray[np.int64], total: int, p: float
    ) -> ImageSet:
        each = total // len(classes)
        if gap == "number" and each < LEAST_PER_CLASS:
            each = LEAST_PER_CLASS
            classes = np.sort(rng.choice(classes, total // each, replace=False))
        return _compose_n_digits(name, pool, classes, each, digits, p, rng)

    train = compose("train", mnist.train, np.sort(train_classes), total_train, train_corrupt)
    test = compose("test", mnist.queries, np.sort(test_classes), total_test, corrupt)
    return Source(train, test, gallery="queries" if unseen and gap == "number" else "train")


def _require_probabilities(**options: float) -> None:
    for name, p in options.items():
        if not 0 <= p <= 1:
            raise InvalidConfig(f"data.options.{name} is {p}; it must be in [0, 1]")


def _compose_n_digits(
    name: str,
    pool: ImageSet,
    classes: NDArray[np.int64],
    each: int,
    digits: int,
    corrupt: float,
    rng: np.random.Generator,
) -> ImageSet:
    """`each` images of every class; within a class and position no digit image comes twice."""
    images, labels = np.asarray(pool.images), np.asarray(pool.labels)
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
    composed, occluded = occlude(_side_by_side(images[rows]), corrupt, rng)
    numbers = np.repeat(classes, each)
    ids = [f"{name}-{i:06d}-{number:0{digits}d}" for i, number in enumerate(numbers)]
    return ImageSet(composed, numbers.astype(np.int64), ids, {"occluded": occluded})


def _side_by_side(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(n, digits, s, s) as (n, s, digits * s)."""
    n, digits, side, _ = images.shape
    return images.transpose(0, 2, 1, 3).reshape(n, side, digits * side)


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
    return occlude(_side_by_side(digits[halves]), occlusion, rng)


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


def load_two_digits(
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
    """The splits of two-digit numbers, made of the 1,797 real 8x8 digits that scikit-learn carries.

    The construction of N-digit MNIST (Oh et al., "Modeling uncertainty with hedged instance
    embedding", ICLR 2019, appendix A; class list of its released code): an image is two digits side
    by side, its label the number they show, and a black square of random size hides part of some
    digits, so that some images are truly ambiguous.

    Digit instances are divided four ways before anything is composed (half for training, a tenth
    for validation, 15% for the gallery, a quarter for queries), so that no handwritten digit is
    shared. Score function, calibration and test queries are drawn from one population, the numbers
    that the query instances can form; a picture that is drawn twice, or is one of another part, is
    drawn anew (unless far more are asked for than there are). The gallery is clean. Training images
    are part noisy already as they are stored: mining must be able to see, and avoid, a noisy
    positive, or the variance learns the wrong thing.

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
    _require_probabilities(occlusion=occlusion, train_occlusion=train_occlusion)
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


def read_omniglot(root: Path) -> Source:
    """Read all drawings: the first half of the alphabets by name trains, the others evaluate.

    Published is one set, without halves; `load_omniglot` draws alphabets instead.

    Args:
        root: folder that holds `omniglot/images_background.zip`.
    """
    every = _read_archive(root / ARCHIVE)
    trains = _alphabets(every) < ALPHABETS // 2
    return Source.of_halves(every, trains)


def load_omniglot(
    root: Path,
    *,
    seed: int = 0,
    train: int = 12,
    validation: int = 3,
    gallery: int = 4,
    tuning: int = 2500,
    calibration: int = 2500,
    cluster: str | None = None,
    queries: QueryDivision = "shared-labels",
) -> Splits:
    """The splits of Omniglot: every alphabet is in training, in validation or in evaluation.

    The background set (Lake, Salakhutdinov and Tenenbaum, "Human-level concept learning through
    probabilistic program induction", Science 2015) has 964 characters of 30 alphabets, 20 drawings
    of each. The same 20 people drew all characters of an alphabet, and a file's name ends in the
    drawer's number, `0001_05.png`.

    Of each character of the other alphabets, `gallery` drawings are searched and the rest are
    queries, drawn apart at random into tuning, calibration and, all that remain, test.

    Args:
        root: folder that holds `omniglot/images_background.zip`.
        seed: decides which alphabet and which drawing is where.
        train, validation: numbers of alphabets; the rest of the 30 are for evaluation.
        gallery: drawings per character.
        tuning, calibration: numbers of queries.
        cluster: "drawer" or "alphabet": tuning, calibration and test queries are then of different
            ones, as many as hold these numbers on average, rounded up. With "drawer", all drawings
            of `gallery` drawers of each alphabet are searched. Training and validation images are
            the same as without.
        queries: "new-labels": tuning, calibration and test queries are of different characters, as
            many as hold these numbers on average, rounded up. It cannot be combined with `cluster`.

    Returns:
        The attributes "alphabet" and "drawer", as in "Greek/05", which is their cluster.

    Raises:
        DataUnavailable: the archive is not there.
        InvalidData: it is not the background set, or a part asks for more than there is.
        InvalidConfig: there is no such attribute, or `queries` and `cluster` are combined.
    """
    if min(train, validation) < 1 or train + validation >= ALPHABETS:
        raise InvalidData(
            f"train {train} + validation {validation} alphabets: each must be at least 1, and some "
            f"of {ALPHABETS} must remain for evaluation"
        )
    every = _read_archive(root / ARCHIVE)
    alphabets = _alphabets(every)
    rng = np.random.default_rng(seed)
    groups = np.split(rng.permutation(ALPHABETS), [train, train + validation])
    rows = [np.flatnonzero(np.isin(alphabets, group)) for group in groups]
    evaluation = rows[2].reshape(-1, DRAWINGS)  # the archive is sorted: a row per character
    shuffled = rng.permuted(evaluation, axis=1)
    if cluster == "drawer":
        order = rng.permuted(np.tile(np.arange(DRAWINGS), (ALPHABETS, 1)), axis=1)
        shuffled = np.take_along_axis(evaluation, order[alphabets[evaluation[:, 0]]], axis=1)
    pool = rng.permutation(shuffled[:, gallery:].reshape(-1))
    if min(gallery, tuning, calibration) < 1 or tuning + calibration >= len(pool):
        raise InvalidData(
            f"gallery {gallery}, tuning {tuning}, calibration {calibration}: each must be at "
            f"least 1, and some of the {len(pool)} queries must remain to test on"
        )
    sizes = {"tuning": tuning, "calibration": calibration}
    if queries == "new-labels":
        parts = [pool[part] for part in draw_by_label(rng, every.subset(pool), sizes, cluster)]
    elif cluster is not None:
        pool_clusters = clusters_of(every, cluster)[pool]
        parts = [pool[part] for part in draw_by_cluster(rng, pool_clusters, sizes)]
    else:
        parts = np.split(pool, [tuning, tuning + calibration])
    first, second, third = parts
    return Splits(
        train=every.subset(rows[0]),
        validation=every.subset(rows[1]),
        gallery=every.subset(shuffled[:, :gallery].reshape(-1)),
        tuning=every.subset(first),
        calibration=every.subset(second),
        test=every.subset(third),
    )


def _alphabets(images: ImageSet) -> NDArray[np.int64]:
    """Numbers of the alphabets, in the order of their names."""
    return np.unique(images.attributes["alphabet"], return_inverse=True)[1].astype(np.int64)


def _read_archive(archive: Path) -> ImageSet:
    """Return images (n, 105, 105), strokes white; sorted by alphabet, character and drawer."""
    if not archive.is_file():
        raise DataUnavailable(f"{archive} is not there")
    try:
        with zipfile.ZipFile(archive) as opened:
            paths = sorted(
                path
                for path in map(PurePosixPath, opened.namelist())
                if path.suffix == ".png" and len(path.parts) >= 3
            )
            drawings = [_decode(opened.read(str(path))) for path in paths]
    except DAMAGED as error:
        raise InvalidData(f"{archive} is damaged ({error}): fetch it again") from error
    characters, labels = np.unique([str(path.parent) for path in paths], return_inverse=True)
    kinds, alphabets = np.unique([path.parts[-3] for path in paths], return_inverse=True)
    shapes, shape = {drawing.shape for drawing in drawings}, (DRAWING_SIDE, DRAWING_SIDE)
    if len(kinds) != ALPHABETS or (np.bincount(labels) != DRAWINGS).any() or shapes != {shape}:
        raise InvalidData(
            f"{archive} holds {len(paths)} drawings of {len(characters)} characters in "
            f"{len(kinds)} alphabets, of sizes {sorted(shapes)}; Omniglot's background set has "
            f"{DRAWINGS} of each character in {ALPHABETS} alphabets, of size {shape}"
        )
    drawers = np.array([path.stem.rpartition("_")[2] for path in paths])
    if (drawers.reshape(-1, DRAWINGS) != drawers[:DRAWINGS]).any():
        raise InvalidData(
            f"{archive} does not name the drawings of each character by the same {DRAWINGS} "
            f"drawers, {drawers[0]} to {drawers[DRAWINGS - 1]}: fetch it again"
        )
    ids = ["/".join(path.parts[-3:]) for path in paths]
    named = np.char.add(np.char.add(kinds[alphabets], "/"), drawers)
    attributes = {"alphabet": kinds[alphabets], "drawer": named}
    return ImageSet(np.stack(drawings), labels.astype(np.int64), ids, attributes, cluster="drawer")


def _decode(content: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
        return 255 - np.asarray(image.convert("L"))
