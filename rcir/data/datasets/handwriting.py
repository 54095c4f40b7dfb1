"""Handwriting: two-digit numbers of scikit-learn's digits, and Omniglot."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rcir.data.augmentation import occlude
from rcir.data.division import QueryDivision, draw_by_cluster, draw_by_label, get_clusters
from rcir.data.listing import require_files
from rcir.data.records import ImageSet, Source, Splits
from rcir.errors import InvalidConfig, InvalidData

CLASS_LIST_SEED = 714
Composed: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.bool_]]  # images, and which are occluded
MAX_REDRAWS = 10  # of pictures that come twice
OMNIGLOT_ARCHIVE = Path("omniglot") / "images_background.zip"
ALPHABETS, DRAWINGS, DRAWING_SIDE = 30, 20, 105
READ_ERRORS = (zipfile.BadZipFile, zlib.error, OSError, ValueError, RuntimeError)


def list_released_classes(digits: int) -> list[int]:
    """Return the numbers that N-digit MNIST trains on, 70% of all, in the released order."""
    n = 10**digits
    chosen = np.random.RandomState(CLASS_LIST_SEED).choice(n, 7 * n // 10, replace=False)
    classes: list[int] = chosen.tolist()
    return classes


def join_tiles(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Put digits side by side: (n, digits, s, s) becomes (n, s, digits * s)."""
    n, digits, side, _ = images.shape
    return images.transpose(0, 2, 1, 3).reshape(n, side, digits * side)


def _redraw_repeats(
    images: NDArray[np.uint8],
    occluded: NDArray[np.bool_],
    labels: NDArray[np.int64],
    others: NDArray[np.uint8],
    draw: Callable[[NDArray[np.int64]], Composed],
    rng: np.random.Generator,
) -> None:
    """Draw pictures again that come twice or are among others, if there are enough different ones.

    Which of several stays is decided at random, so that no split of the queries is favoured.
    """
    other_pixels = _pixels(others)
    for _ in range(MAX_REDRAWS):
        order = rng.permutation(len(images))
        pixels = _pixels(images)[order]
        is_new = np.zeros(len(order), bool)
        is_new[np.unique(pixels, return_index=True)[1]] = True
        rows = order[~is_new | np.isin(pixels, other_pixels)]
        if not len(rows):
            break
        images[rows], occluded[rows] = draw(labels[rows])


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
    """The splits of two-digit numbers, made of the 1,797 real 8x8 digits of scikit-learn.

    The construction of N-digit MNIST (Oh et al., "Modeling uncertainty with hedged instance
    embedding", ICLR 2019, appendix A; class list of its released code): an image is two digits side
    by side, its label the number they show, and a black square of random size hides part of some
    digits, so that some images are truly ambiguous.

    Digit instances are divided first (half for training, a tenth for validation, 15% for the
    gallery, a quarter for queries), so that no two of these share a handwritten digit. All query
    splits are drawn from one population, the numbers that the query instances can form; a picture
    that is drawn twice, or is in another part, is drawn again (unless far more are requested than
    exist). The gallery is clean. Some training images are noisy as they are stored: mining must be
    able to see, and avoid, a noisy positive, or the variance learns the wrong thing.

    Args:
        root: unused; the digits come with scikit-learn.
        seed: decides instances, compositions and occlusions.
        open_set: evaluation on classes that training never saw.
        occlusion: probability in [0, 1] that a digit of queries and validation images is hit.
        train_occlusion: the same, in training images.
        train, validation, gallery, tuning, calibration, test: numbers of images, at least 1.
        queries: "new-labels": tuning, calibration and test queries show different numbers; each
            split shows a share of the numbers that is its share of the queries, rounded up.
    """
    for name, p in {"occlusion": occlusion, "train_occlusion": train_occlusion}.items():
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
    train_classes = validation_classes = evaluation_classes = np.arange(100)
    if open_set:  # the last 10 of the 70 released training classes validate
        released = np.array(list_released_classes(digits=2))
        train_classes, validation_classes = np.sort(released[:60]), np.sort(released[60:])
        evaluation_classes = np.setdiff1d(evaluation_classes, released)

    def draw(labels: NDArray[np.int64], pool: NDArray[np.int64], p: float) -> Composed:
        """Compose a number for each label, of random digits from the pool."""
        rows = np.empty((len(labels), 2), np.int64)
        for position, shown in enumerate((labels // 10, labels % 10)):
            for digit in range(10):
                where = np.flatnonzero(shown == digit)
                rows[where, position] = rng.choice(pool[targets[pool] == digit], len(where))
        return occlude(join_tiles(digits[rows]), p, rng)

    def compose(
        pool: NDArray[np.int64], classes: NDArray[np.int64], n: int, p: float
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.bool_]]:
        labels = rng.permutation(np.resize(classes, n))  # as even as can be
        return labels, *draw(labels, pool, p)

    def image_set(
        name: str,
        labels: NDArray[np.int64],
        images: NDArray[np.uint8],
        occluded: NDArray[np.bool_],
    ) -> ImageSet:
        ids = [f"{name}-{i:05d}-{label:02d}" for i, label in enumerate(labels)]
        return ImageSet(images, labels, ids, {"occluded": occluded})

    others = [
        image_set("train", *compose(pools[0], train_classes, train, train_occlusion)),
        image_set("validation", *compose(pools[1], validation_classes, validation, occlusion)),
        image_set("gallery", *compose(pools[2], evaluation_classes, gallery, 0.0)),
    ]
    sizes = {"tuning": tuning, "calibration": calibration, "test": test}
    classes_of = dict.fromkeys(sizes, evaluation_classes)
    if queries == "new-labels":
        labels = np.resize(evaluation_classes, sum(sizes.values()))
        parts = {"tuning": tuning, "calibration": calibration}
        rows = draw_by_cluster(rng, labels, parts, "labels")
        classes_of = {name: np.unique(labels[part]) for name, part in zip(sizes, rows, strict=True)}
    drawn = [compose(pools[3], classes_of[name], n, occlusion) for name, n in sizes.items()]
    labels, images, occluded = map(np.concatenate, zip(*drawn, strict=True))
    other_images = np.concatenate([part.images for part in others])
    redraw = partial(draw, pool=pools[3], p=occlusion)
    _redraw_repeats(images, occluded, labels, other_images, redraw, rng)
    edges = np.cumsum([tuning, calibration])
    columns = (np.split(values, edges) for values in (labels, images, occluded))
    query_sets = [image_set(name, *part) for name, *part in zip(sizes, *columns, strict=True)]
    return Splits(*others, *query_sets)


def read_omniglot(root: Path) -> Source:
    """Read all drawings: the first half of the alphabets by name trains, the others evaluate.

    The publication does not divide them; `load_omniglot` draws alphabets instead.
    """
    drawings = _read_archive(root / OMNIGLOT_ARCHIVE)
    return Source.from_halves(drawings, _alphabets(drawings) < ALPHABETS // 2)


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

    Args:
        root: folder that holds `omniglot/images_background.zip`.
        seed: decides which alphabet and which drawing is where.
        train, validation: numbers of alphabets; the rest of the 30 are for evaluation.
        gallery: drawings of each character of the evaluation that are searched.
        tuning, calibration: numbers of queries, of the other drawings; all that remain are test
            queries.
        cluster: "drawer" or "alphabet": tuning, calibration and test queries are then of different
            ones, as many as hold these numbers on average, rounded up. With "drawer", all drawings
            of `gallery` drawers of each alphabet are searched. Training and validation images are
            the same as without.
        queries: "new-labels": tuning, calibration and test queries are of different characters, as
            many as hold these numbers on average, rounded up. It cannot be combined with `cluster`.

    Returns:
        The attributes "alphabet" and "drawer", as in "Greek/05", which is their cluster.
    """
    if min(train, validation) < 1 or train + validation >= ALPHABETS:
        raise InvalidData(
            f"train {train} + validation {validation} alphabets: each must be at least 1, and some "
            f"of {ALPHABETS} must remain for evaluation"
        )
    drawings = _read_archive(root / OMNIGLOT_ARCHIVE)
    alphabets = _alphabets(drawings)
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
        parts = [pool[part] for part in draw_by_label(rng, drawings.subset(pool), sizes, cluster)]
    elif cluster is not None:
        pool_clusters = get_clusters(drawings, cluster)[pool]
        parts = [pool[part] for part in draw_by_cluster(rng, pool_clusters, sizes)]
    else:
        parts = np.split(pool, [tuning, tuning + calibration])
    query_sets = [drawings.subset(part) for part in parts]
    return Splits(
        drawings.subset(rows[0]),
        drawings.subset(rows[1]),
        drawings.subset(shuffled[:, :gallery].reshape(-1)),
        *query_sets,
    )


def _alphabets(images: ImageSet) -> NDArray[np.int64]:
    """Return the number of each image's alphabet, in the order of their names."""
    return np.unique(images.attributes["alphabet"], return_inverse=True)[1].astype(np.int64)


def _read_archive(archive: Path) -> ImageSet:
    """Return images (n, 105, 105), strokes white; sorted by alphabet, character and drawer."""
    require_files(archive.parent, [archive.name])
    try:
        with zipfile.ZipFile(archive) as opened:
            paths = sorted(
                path
                for path in map(PurePosixPath, opened.namelist())
                if path.suffix == ".png" and len(path.parts) >= 3
            )
            drawings = [_decode(opened.read(str(path))) for path in paths]
    except READ_ERRORS as error:
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
    drawer_names = np.char.add(np.char.add(kinds[alphabets], "/"), drawers)
    attributes = {"alphabet": kinds[alphabets], "drawer": drawer_names}
    return ImageSet(np.stack(drawings), labels.astype(np.int64), ids, attributes, cluster="drawer")


def _decode(content: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
        return 255 - np.asarray(image.convert("L"))
