"""Data sets by name: the table, the splits of a configured set, and whether a copy is complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from rcir.data.division import DRAWN_PARTS, QueryDivision, divide
from rcir.data.records import ImageSet, Source, Splits, list_shortages
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, RcirError, printable
from rcir.options import require_at_least, require_options
from rcir.terminal import working

SELECTING = {"version", "split"}  # options of readers that decide which images are read
# Options of `divide`, and their kinds.
DIVISION_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(DRAWN_PARTS, float),
    "cluster": str | None,
    "queries": QueryDivision,
}
_CLOSED = {"validation": 3000, "gallery": 12000, "tuning": 3000, "calibration": 3000}
_FETCHED = "data.download=true fetches it"
_MNIST = ("mnist", "MNIST/raw")  # the second is torchvision's


@dataclass(frozen=True)
class DataSet:
    """A data set that has a name. Readers are "module:function" below `rcir.data.datasets`."""

    title: str
    get: str  # how to get it
    reader: str  # of the set as published; empty if it only exists as splits
    places: tuple[str, ...] = ()  # below the folder of all data sets; none if it needs no files
    images: int | None = None  # their published number, of training and evaluation
    parts: Mapping[str, float] = field(default_factory=dict)  # sizes other than those of `divide`
    options: Mapping[str, Any] = field(default_factory=dict)  # of the reader
    splitter: str = ""  # reader of its splits; empty if `divide` draws them

    def is_on_disk(self, root: Path) -> bool:
        """Return whether its files, or some of them, are in the folder of all data sets."""
        return not self.places or any((root / place).exists() for place in self.places)

    def function(self) -> Callable[..., Any]:
        """Return the function that reads the set as published."""
        return _function(self.reader)

    def options_of_reader(self) -> set[str]:
        """Return the names of the arguments of the function that reads the splits or the set."""
        return set(signature(_function(self.splitter or self.reader)).parameters)

    def require(self, where: str, options: Mapping[str, Any]) -> None:
        """Raise `InvalidConfig` unless `load` takes the options."""
        if self.splitter:
            require_options(where, _function(self.splitter), options)
        else:
            require_options(where, self.function(), options, DIVISION_OPTIONS)

    def read(self, root: Path, **options: Any) -> Source:
        """Read the set as published; `root` is the folder of all data sets."""
        source: Source = self._call(self.function(), root, {**self.options, **options})
        return source

    def _call(self, reader: Callable[..., Any], root: Path, options: Mapping[str, Any]) -> Any:
        """Call a reader; the error of missing files says how to get them, and where to put them."""
        try:
            return reader(root, **options)
        except DataUnavailable as error:
            if not self.places:
                raise
            raise DataUnavailable(
                f"{error}: get it ({self.get}), put it into {root / self.places[0]}, and name the "
                "folder above it with data.root or the environment variable RCIR_DATA"
            ) from error

    def load(
        self, root: Path, seed: int, tell: Callable[[str], object] | None = None, **options: Any
    ) -> Splits:
        """Read or draw the splits, with options of `divide` and of the reader.

        `tell` is called with one line if anything is left out.
        """
        if self.splitter:
            splits: Splits = self._call(_function(self.splitter), root, {"seed": seed, **options})
            return splits
        sizes = {name: options.pop(name) for name in DIVISION_OPTIONS if name in options}
        if "seed" in self.options_of_reader():
            options["seed"] = seed
        source = self.read(root, **options)
        if source.notes and tell is not None:
            tell(f"note: {printable('; '.join(source.notes))}")
        if source.validation is not None and "validation" in sizes:
            raise InvalidConfig(
                f"data.options.validation is {sizes['validation']}, but the data set has a split "
                "for validation: leave the option out, or remove the split"
            )
        return divide(source, seed=seed, **{**self.parts, **sizes})


def _function(name: str) -> Callable[..., Any]:
    module, function = name.split(":")
    reader: Callable[..., Any] = getattr(import_module(f"rcir.data.datasets.{module}"), function)
    return reader


DATASETS: dict[str, DataSet] = {
    "digits": DataSet(
        "two-digit numbers of scikit-learn's handwritten digits",
        "comes with scikit-learn",
        "",
        splitter="handwriting:load_two_digits",
    ),
    "mnist": DataSet(
        "MNIST, handwritten digits",
        _FETCHED,
        "small_images:read_mnist",
        _MNIST,
        70_000,
        parts=_CLOSED,
    ),
    "fashion-mnist": DataSet(
        "Fashion-MNIST, clothes",
        _FETCHED,
        "small_images:read_fashion_mnist",
        ("fashion-mnist", "FashionMNIST/raw"),
        70_000,
        parts=_CLOSED,
    ),
    "omniglot": DataSet(
        "Omniglot's background set, handwritten characters",
        "images_background.zip of github.com/brendenlake/omniglot",
        "handwriting:read_omniglot",
        ("omniglot/images_background.zip",),
        19_280,
        splitter="handwriting:load_omniglot",
    ),
    "cub200": DataSet(
        "CUB-200-2011, birds, zero-shot",
        "CUB_200_2011.tgz of its authors at Caltech",
        "objects:read_cub",
        ("CUB_200_2011",),
        11_788,
    ),
    "cars196": DataSet(
        "Stanford Cars (CAR-196), car models, zero-shot",
        "pictures and devkit of its authors; test labels in cars_test_annos_withlabels.mat",
        "objects:read_cars",
        ("stanford_cars",),
        16_185,
    ),
    "sop": DataSet(
        "Stanford Online Products, zero-shot",
        "Stanford_Online_Products.zip of its authors",
        "objects:read_products",
        ("Stanford_Online_Products",),
        120_053,
    ),
    "chestx-det": DataSet(
        "ChestX-Det, chest X-rays with one or more of 13 findings",
        "Deepwise AILab's ChestX-Det release",
        "people:read_chestx",
        ("ChestX-Det",),
        3_578,
    ),
    "market1501": DataSet(
        "Market-1501, people seen by six cameras",
        "Market-1501-v15.09.15.zip of its authors",
        "people:read_market",
        ("Market-1501-v15.09.15",),
        12_936 + 3_368 + 15_913,  # without 3,819 junk boxes, which are left out
    ),
    "pitts30k": DataSet(
        "Pittsburgh 30k, street views with positions",
        "pictures of Pittsburgh 250k on request, pitts30k_*.mat of NetVLAD",
        "places:read_pittsburgh",
        ("pittsburgh/datasets/pitts30k_train.mat",),
        34_232,
    ),
    "pitts250k": DataSet(
        "Pittsburgh 250k, street views with positions",
        "pictures on request, pitts250k_*.mat of NetVLAD",
        "places:read_pittsburgh",
        ("pittsburgh/datasets/pitts250k_train.mat",),
        191_520,
        options={"version": "250k"},
    ),
    "msls": DataSet(
        "Mapillary Street-Level Sequences, street views with positions",
        "from mapillary.com/dataset/places, after registration",
        "places:read_msls",
        ("msls/train_val",),
    ),
    "folder": DataSet(
        "pictures of your own in class folders",
        "name it with the option path",
        "user_images:read_folder",
    ),
    "table": DataSet(
        "pictures of your own, listed in a CSV or Parquet table",
        "name it with the option path",
        "user_images:read_table",
    ),
    "sequences": DataSet(
        "sequences of features of your own, such as those of video frames",
        "name it with the option path",
        "user_images:read_sequences",
    ),
}


def find_dataset(name: str) -> DataSet:
    """Return the data set of a name; raise `InvalidConfig` if there is none."""
    if name not in DATASETS:
        raise InvalidConfig(f"data.name {name!r} is unknown; choose one of {', '.join(DATASETS)}")
    return DATASETS[name]


@dataclass(frozen=True)
class DataConfig:
    """A data set, and how it is split.

    Args:
        name: of the data set; `rcir data list` shows all.
        root: folder of the data sets' files; the environment variable RCIR_DATA unless given.
        download: fetch what is not there, if that is possible.
        seed: at least 0; decides who is in which split, and which classes of a folder or table
            train.
        options: of `rcir.data.division.divide` (sizes of the splits, `cluster` and `queries`), and
            of the set's reader.
    """

    name: str = "digits"
    root: str | None = None
    download: bool = False
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_at_least(self, "data.", seed=0)


def with_cluster(config: DataConfig, cluster: str | None) -> DataConfig:
    """Return the same data set with its queries divided by clusters; unchanged if that is None.

    Training and validation images stay the same: an encoder trained without can be calibrated.
    """
    if cluster is None:
        return config
    return replace(config, options={**config.options, "cluster": cluster})


def data_root(config: DataConfig) -> Path:
    """Return the absolute folder of the data sets: of the config, else RCIR_DATA, else `data`."""
    return Path(config.root or os.environ.get("RCIR_DATA") or "data").absolute()


def load_splits(
    config: DataConfig,
    tell: Callable[[str], object] | None = None,
    rejects: Collection[str] = (),
) -> Splits:
    """Load the splits of a data set.

    Args:
        config: the data set, and how it is split.
        tell: called with one line if files, or images of an index, are left out.
        rejects: ids of unreadable images; they are divided like the others, then left out.

    Raises:
        InvalidConfig: no such data set, or no such option.
        DataUnavailable, InvalidData: see the set's own reader.

    Example:
        >>> splits = load_splits(DataConfig("digits", options={"test": 500}))
        >>> len(splits.gallery), len(splits.test), splits.test.images.shape
        (1500, 500, (500, 8, 16))
    """
    dataset, root = find_dataset(config.name), data_root(config)
    dataset.require(f"data.options of {config.name}", config.options)
    options = dict(config.options)
    if config.download and "download" in dataset.options_of_reader():
        options["download"] = True
    try:
        splits = dataset.load(root, config.seed, tell, **options)
    except InvalidData as error:
        if hint := _hint(config):
            raise InvalidData(f"{error}; {hint}") from error
        raise
    return splits.without(rejects) if rejects else splits


def require_enough(config: DataConfig, splits: Splits) -> None:
    """Raise `InvalidData`, with what would help, if a split is too small."""
    if lacking := list_shortages(splits):
        hint = _hint(config) or "have more images of each class, and more classes"
        n_queries = len(splits.tuning) + len(splits.calibration) + len(splits.test)
        raise InvalidData(
            f"{config.name} has too few images ({len(splits.train)} train, "
            f"{len(splits.validation)} validation, {len(splits.gallery)} gallery, {n_queries} "
            f"queries): {'; '.join(lacking)}: {hint}"
        )


def _hint(config: DataConfig) -> str:
    """Return the advice to train on and query all classes, or "" if that does not help."""
    dataset, options = find_dataset(config.name), config.options | {"open_set": False}
    is_option = {"open_set", "path"} <= dataset.options_of_reader()
    if not is_option or options == config.options or "train" in config.options:
        return ""
    try:
        splits = dataset.load(data_root(config), config.seed, None, **options)
    except RcirError:
        return ""
    if list_shortages(splits):
        return ""
    return "with open_set false in data.options, every class trains and is queried: that is enough"


@dataclass(frozen=True)
class Findings:
    """Contents of a copy of a data set."""

    parts: Mapping[str, int]  # number of images of each part
    published: int | None  # number of images of the set with the options, if known
    unreadable: tuple[str, ...]  # errors of pictures that cannot be decoded
    alone: int  # classes of the evaluation half with one image, which nothing matches
    notes: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """True if every picture can be read, and none is missing if their number is known."""
        whole = self.published is None or sum(self.parts.values()) == self.published
        return whole and not self.unreadable


def verify(
    name: str,
    root: Path,
    options: Mapping[str, Any],
    max_pixels: int | None = None,
) -> Findings:
    """Read a data set with options of its reader, and decode every picture of it.

    Pictures of more than `max_pixels` (`rcir.data.images.MAX_PIXELS`) count as unreadable.
    """
    # This imports torch, which listing the sets does not need.
    from rcir.data.images import MAX_PIXELS, find_faults

    dataset = find_dataset(name)
    if not dataset.reader:
        raise InvalidConfig(f"{name} {dataset.get}: it needs no check")
    require_options(f"options of {name}", dataset.function(), options)
    source = dataset.read(root, **options)
    parts = {name: part for name, part in vars(source).items() if isinstance(part, ImageSet)}
    files = [part.images for part in parts.values() if not isinstance(part.images, np.ndarray)]
    pictures = [*chain.from_iterable(files)]
    errors = []
    with working("checking pictures", len(pictures), logged=True) as work:
        for error in find_faults(pictures, MAX_PIXELS if max_pixels is None else max_pixels):
            errors.append(error)
            work.advance()
    labels, alone = source.queries.relevance.single, 0
    if source.gallery == "queries" and labels is not None:
        alone = int(np.sum(np.unique(labels, return_counts=True)[1] == 1))
    return Findings(
        {part: len(images) for part, images in parts.items()},
        dataset.images if not (options.keys() & SELECTING) else None,
        tuple(error for error in errors if error is not None),
        alone,
        source.notes,
    )
