"""The table of data sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from rcir.data.division import PARTS, QueryDivision, Source, divide
from rcir.data.records import Splits
from rcir.errors import InvalidConfig
from rcir.options import require_options

# Options of `divide`, and their kinds.
DIVISION: dict[str, Any] = {
    **dict.fromkeys(PARTS, float),
    "cluster": str | None,
    "queries": QueryDivision,
}


@dataclass(frozen=True)
class DataSet:
    """A data set that can be named.

    Attributes:
        title: what it is.
        get: how to get it.
        places: where it may be, below the folder of all data sets; none if it needs no files.
        images: the published number of images, of training and evaluation; None if there is none.
        reader: module and function below `rcir.data` that read it; imported when it is used.
        parts: sizes of its splits that differ from the defaults of `divide`.
        options: of the reader.
        downloads: whether the reader can fetch it.
        composed: whether the reader draws the splits itself.
        whole: module and function that read a composed set without drawing; empty if there is none.
        counts: options, and the published number of images with them; where it is given, other
            options have no such number.
    """

    title: str
    get: str
    places: tuple[str, ...]
    images: int | None
    reader: str
    parts: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    downloads: bool = False
    composed: bool = False
    whole: str = ""
    counts: tuple[tuple[Mapping[str, Any], int], ...] = ()

    def is_on_disk(self, root: Path) -> bool:
        """Return whether its files, or some of them, are in the folder of all data sets."""
        return not self.places or any((root / place).exists() for place in self.places)

    def read(self, root: Path, **options: Any) -> Source:
        """The set as published; `root` is the folder of all data sets."""
        source: Source = self.function()(root, **{**self.options, **options})
        return source

    def published(self, options: Mapping[str, Any]) -> int | None:
        """The published number of images with options of the reader; None if there is none."""
        if not self.counts:
            return self.images
        parameters = signature(self.function()).parameters
        defaults = {name: found.default for name, found in parameters.items()}
        defaults |= {**self.options, **options}
        fitting = [n for those, n in self.counts if those.items() <= defaults.items()]
        return fitting[0] if fitting else None

    def load(
        self, root: Path, seed: int, tell: Callable[[str], object] | None = None, **options: Any
    ) -> Splits:
        """Its splits, of sizes and options of the reader; `tell` gets one line on what is left out.

        The seed decides what a reader draws too, such as the classes of a folder that train.
        """
        if self.composed:
            splits: Splits = _function(self.reader)(root, seed=seed, **options)
            return splits
        how = {name: options.pop(name) for name in DIVISION if name in options}
        if "seed" in self.options_of_reader():
            options["seed"] = seed
        source = self.read(root, **options)
        if source.notes and tell is not None:
            tell(f"note: {'; '.join(source.notes)}")
        return divide(source, seed=seed, **{**self.parts, **how})

    def function(self) -> Callable[..., Any]:
        """The function that reads the set as published."""
        return _function(self.whole if self.composed else self.reader)

    def options_of_reader(self) -> set[str]:
        """The names of the arguments of the reader."""
        return set(signature(_function(self.reader)).parameters)

    def require(self, where: str, options: Mapping[str, Any]) -> None:
        """Raise `InvalidConfig` unless `load` takes the options."""
        if self.composed:
            require_options(where, _function(self.reader), options)
        else:
            require_options(where, self.function(), options, DIVISION)


def _function(name: str) -> Callable[..., Any]:
    module, function = name.split(":")
    reader: Callable[..., Any] = getattr(import_module(f"rcir.data.datasets.{module}"), function)
    return reader


_CLOSED = {"validation": 3000, "gallery": 12000, "tuning": 3000, "calibration": 3000}
_FETCHED = "fetched with data.download=true"
_MNIST = ("mnist", "MNIST/raw")  # the latter is torchvision's
# Of training, database and queries together, then database and queries of what evaluates.
_PITTSBURGH = (
    ({"version": "30k", "split": "test"}, 10_000 + 7_416 + 10_000 + 6_816),
    ({"version": "30k", "split": "val"}, 10_000 + 7_416 + 10_000 + 7_608),
    ({"version": "250k", "split": "test"}, 91_464 + 7_824 + 83_952 + 8_280),
    ({"version": "250k", "split": "val"}, 91_464 + 7_824 + 78_648 + 7_608),
)

DATASETS: dict[str, DataSet] = {
    "digits": DataSet(
        "two-digit numbers of scikit-learn's handwritten digits",
        "comes with scikit-learn",
        (),
        None,
        "handwriting:load_two_digits",
        composed=True,
    ),
    "mnist": DataSet(
        "MNIST, handwritten digits",
        _FETCHED,
        _MNIST,
        70_000,
        "small_images:read_mnist",
        _CLOSED,
        downloads=True,
    ),
    "fashion-mnist": DataSet(
        "Fashion-MNIST, clothes",
        _FETCHED,
        ("fashion-mnist", "FashionMNIST/raw"),
        70_000,
        "small_images:read_fashion_mnist",
        _CLOSED,
        downloads=True,
    ),
    "cifar10": DataSet(
        "CIFAR-10, colour pictures of ten kinds of things",
        _FETCHED,
        ("cifar-10-batches-bin",),
        60_000,
        "small_images:read_cifar10",
        downloads=True,
    ),
    "svhn": DataSet(
        "SVHN, cropped digits of house numbers",
        _FETCHED,
        ("svhn",),
        99_289,
        "small_images:read_svhn",
        downloads=True,
    ),
    "n-digit-mnist": DataSet(
        "numbers of N MNIST digits, zero-shot",
        "made of MNIST",
        _MNIST,
        None,
        "handwriting:read_n_digit_mnist",
        downloads=True,
    ),
    "omniglot": DataSet(
        "Omniglot's background set, handwritten characters",
        "images_background.zip of github.com/brendenlake/omniglot",
        ("omniglot/images_background.zip",),
        19_280,
        "handwriting:load_omniglot",
        composed=True,
        whole="handwriting:read_omniglot",
    ),
    "cub200": DataSet(
        "CUB-200-2011, birds, zero-shot",
        "CUB_200_2011.tgz of its authors at Caltech",
        ("CUB_200_2011",),
        11_788,
        "objects:read_cub",
    ),
    "cars196": DataSet(
        "Stanford Cars (CAR-196), car models, zero-shot",
        "pictures and devkit of its authors; test labels in cars_test_annos_withlabels.mat",
        ("stanford_cars",),
        16_185,
        "objects:read_cars",
    ),
    "sop": DataSet(
        "Stanford Online Products, zero-shot",
        "Stanford_Online_Products.zip of its authors",
        ("Stanford_Online_Products",),
        120_053,
        "objects:read_products",
    ),
    "chestx-det": DataSet(
        "ChestX-Det, chest X-rays with one or more of 13 findings",
        "Deepwise AILab's ChestX-Det release",
        ("ChestX-Det",),
        3_578,
        "people:read_chestx",
    ),
    "lfw": DataSet(
        "Labeled Faces in the Wild, the official development halves",
        "pictures, peopleDevTrain.txt and peopleDevTest.txt of its authors",
        ("lfw", "lfw-py"),
        13_233,
        "people:read_lfw",
    ),
    "market1501": DataSet(
        "Market-1501, people seen by six cameras",
        "Market-1501-v15.09.15.zip of its authors",
        ("Market-1501-v15.09.15",),
        12_936 + 3_368 + 15_913,  # without 3,819 junk boxes, which are left out
        "people:read_market",
    ),
    "duke": DataSet(
        "DukeMTMC-reID, people seen by eight cameras; withdrawn by its authors",
        "none: its authors have withdrawn it; do not use it for new work",
        ("DukeMTMC-reID",),
        36_411,
        "people:read_duke",
    ),
    "clothing1m": DataSet(
        "Clothing1M, clothes with clean and with noisy labels",
        "from its authors, on request",
        ("Clothing1M",),
        None,
        "objects:read_clothes",
        # How many of the noisy images are in a clean list too, and left out, is not published.
        counts=(({"noisy": False}, 47_570 + 14_313 + 10_526),),
    ),
    "pitts30k": DataSet(
        "Pittsburgh 30k, street views with positions",
        "pictures of Pittsburgh 250k on request, pitts30k_*.mat of NetVLAD",
        ("pittsburgh/datasets/pitts30k_train.mat",),
        34_232,
        "places:read_pittsburgh",
        counts=_PITTSBURGH,
    ),
    "pitts250k": DataSet(
        "Pittsburgh 250k, street views with positions",
        "pictures on request, pitts250k_*.mat of NetVLAD",
        ("pittsburgh/datasets/pitts250k_train.mat",),
        191_520,
        "places:read_pittsburgh",
        options={"version": "250k"},
        counts=_PITTSBURGH,
    ),
    "msls": DataSet(
        "Mapillary Street-Level Sequences, street views with positions",
        "from mapillary.com/dataset/places, after registration",
        ("msls/train_val",),
        None,
        "places:read_msls",
    ),
    "folder": DataSet(
        "pictures of your own in class folders",
        "name it with the option path",
        (),
        None,
        "own:read_folder",
    ),
    "table": DataSet(
        "pictures of your own, listed in a CSV or Parquet table",
        "name it with the option path",
        (),
        None,
        "own:read_table",
    ),
}


def find_dataset(name: str) -> DataSet:
    """The data set of a name, or `InvalidConfig`."""
    if name not in DATASETS:
        raise InvalidConfig(f"data.name {name!r} is unknown; choose one of {', '.join(DATASETS)}")
    return DATASETS[name]
