"""Street views with positions: Pittsburgh, and Mapillary Street-Level Sequences."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rcir.data.division import Source
from rcir.data.listing import read_mat, require_images
from rcir.data.records import ImageSet
from rcir.data.relevance import WithinRadius
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData

Version = Literal["30k", "250k"]
QUERIES = "queries_real"
PITTSBURGH_NEAR = 10.0  # metres: potential positives of NetVLAD's training
# Of NumPy's files; those of MATLAB are read by `read_mat`.
DAMAGED = (OSError, ValueError, TypeError, KeyError, EOFError, zlib.error, BadZipFile)


@dataclass(frozen=True)
class PublishedSplit:
    """One published split: its images and where they were taken.

    Attributes:
        gallery, queries: image files of the database and the queries, relative to the image folder.
        gallery_places, query_places: (n, 2) UTM easting and northing of each, in metres.
        radius: distance up to which images match, in metres.
    """

    gallery: list[str]
    gallery_places: NDArray[np.float64]
    queries: list[str]
    query_places: NDArray[np.float64]
    radius: float


def read_pittsburgh(
    root: Path,
    version: Version = "30k",
    split: Literal["test", "val"] = "test",
    radius: float | None = None,
) -> Source:
    """Pittsburgh 30k or 250k (Torii et al., CVPR 2013): train on one split, evaluate on another.

    The splits are those of Arandjelovic et al. (NetVLAD, CVPR 2016). Images match if they were
    taken within 25 m of each other. All 24 views of a panorama are images of their own.

    Training and validation keep database and queries apart, as the authors do: anchors are
    queries, their positives database images within 10 m, their negatives those beyond 25 m.

    Args:
        root: folder that holds `pittsburgh`: in it `datasets/pitts30k_train.mat` and its siblings,
            database images as `000/000829_pitch1_yaw1.jpg`, queries below `queries_real`.
        version: "30k" or "250k".
        split: that evaluates; "test" or "val".
        radius: distance in metres up to which images of this split match; None for the 25 m that
            are published with it. The code of Cai et al. (AAAI 2025) takes 10.

    Returns:
        Images as paths; places in metres; the attribute "panorama", which is their cluster.

    Raises:
        InvalidConfig: no such version or split, or a radius of 0 or less.
        DataUnavailable: an index or an image is not there.
        InvalidData: an index is damaged.
    """
    if version not in ("30k", "250k") or split not in ("test", "val"):
        raise InvalidConfig(
            f"data.options: version {version!r}, split {split!r}; version is '30k' or '250k', "
            "split 'test' or 'val'"
        )
    if radius is not None and not 0 < radius < np.inf:
        raise InvalidConfig(f"data.options: radius {radius}; it must be above 0, in metres")
    folder = root / "pittsburgh"
    train, validation = (
        read_pittsburgh_index(folder / "datasets" / f"pitts{version}_{part}.mat")
        for part in ("train", split)
    )
    require_images(
        folder,
        [*train.gallery, *train.queries, *validation.gallery, *validation.queries],
        "the index files",
        f"unpack the database there and the queries into {folder / QUERIES}",
    )
    places = np.concatenate([train.gallery_places, train.query_places])
    training = _images(folder, train.gallery + train.queries, places, train.radius)
    searched = np.arange(len(training)) < len(train.gallery)
    near = min(PITTSBURGH_NEAR, train.radius)
    radius = validation.radius if radius is None else radius
    return Source(
        replace(training, relevance=WithinRadius(places, train.radius, near, searched)),
        _images(folder, validation.queries, validation.query_places, radius),
        _images(folder, validation.gallery, validation.gallery_places, radius),
    )


def read_pittsburgh_index(path: Path) -> PublishedSplit:
    """The index of one split.

    Args:
        path: the official `pitts30k_test.mat`; or `pitts30k_test.npz` with the same positions, file
            names beside it in `pitts30k_imageNames_index.txt` and `pitts30k_imageNames_query.txt`.

    Raises:
        DataUnavailable: a file is not there.
        InvalidData: a file is damaged, or names and positions are not one each.
    """
    stem = path.stem.rpartition("_")[0]
    names = [path.parent / f"{stem}_imageNames_{part}.txt" for part in ("index", "query")]
    if path.suffix == ".mat":
        names = []
    for file in (path, *names):
        if not file.is_file():
            raise DataUnavailable(
                f"{file} is not there: the index files come with NetVLAD's data set "
                "specifications, netvlad_v100_datasets.tar.gz"
            )
    fields = _npz(path, *names) if names else read_mat(path, _mat)
    gallery, gallery_places, queries, query_places, radius = fields
    queries = [name if name.startswith(QUERIES + "/") else f"{QUERIES}/{name}" for name in queries]
    if len({*gallery, *queries}) < len(gallery) + len(queries):
        raise InvalidData(f"{path} names an image twice: fetch it again")
    return PublishedSplit(
        gallery,
        _places(path, "utmDb", gallery_places, len(gallery)),
        queries,
        _places(path, "utmQ", query_places, len(queries)),
        radius,
    )


Fields = tuple[list[str], NDArray[Any], list[str], NDArray[Any], float]


def _mat(content: Mapping[str, Any]) -> Fields:
    struct = content["dbStruct"][0, 0]
    known = struct.dtype.names or ()
    names = [
        [str(cell.item()).strip() for cell in struct[field].reshape(-1)]
        for field in (
            "dbImageFns" if "dbImageFns" in known else "dbImage",
            "qImageFns" if "qImageFns" in known else "qImage",
        )
    ]
    return names[0], struct["utmDb"], names[1], struct["utmQ"], float(struct["posDistThr"].item())


def _npz(path: Path, gallery: Path, queries: Path) -> Fields:
    try:
        names = [
            [
                name.removeprefix("./").removeprefix("Pittsburgh250k/")
                for name in part.read_text().split()
            ]
            for part in (gallery, queries)
        ]
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            radius = float(arrays["posDistThr"].item())
            return names[0], arrays["utmDb"], names[1], arrays["utmQ"], radius
    except DAMAGED as error:
        raise InvalidData(f"{path} cannot be read ({error!r}): fetch it again") from error


def _places(path: Path, name: str, values: NDArray[Any], n: int) -> NDArray[np.float64]:
    """(n, 2), of either orientation; of two images, the official one, 2 x n."""
    if values.shape == (2, n):
        values = values.T
    if n == 0 or values.shape != (n, 2) or not np.isfinite(values).all():
        raise InvalidData(
            f"{path}: {name} has shape {values.shape} for {n} images; needed are two finite "
            "coordinates of each: fetch it again"
        )
    return np.ascontiguousarray(values, np.float64)


def _images(
    folder: Path, names: Sequence[str], places: NDArray[np.float64], radius: float
) -> ImageSet:
    paths = [folder / name for name in names]
    panoramas = np.array([name.rpartition("_pitch")[0] or name for name in names])
    relevance = WithinRadius(places, radius)
    return ImageSet(paths, None, names, {"panorama": panoramas}, relevance, "panorama")


HELD_OUT = ("cph", "sf")
SIDES = ("database", "query")
MSLS_RADIUS, MSLS_NEAR = 25.0, 10.0  # metres: of matches, and of positives in training
TEXT = {"key": str, "sequence_key": str}  # which may look like numbers
APART = 1e6  # metres; cities lie in different UTM zones, where equal coordinates are other places


def read_msls(root: Path, cities: str | Sequence[str] | None = None) -> Source:
    """Mapillary Street-Level Sequences (Warburg et al., CVPR 2020): street views of 30 cities.

    Copenhagen (cph) and San Francisco (sf), the official validation cities, evaluate here: their
    queries ask, their database images are searched. All other cities of `train_val` train. The
    positions of the six official test cities are withheld by the publishers, who score uploaded
    results: nothing can be calibrated or measured there.

    Images match if they were taken within 25 m of each other, in the same city. Panoramas are left
    out, as in the official evaluation. Training and validation keep the two sides apart: anchors
    are queries, their positives database images within 10 m, their negatives those beyond 25 m.

    Args:
        root: folder that holds `msls/train_val/<city>/{database,query}`, each with
            `postprocessed.csv`, `raw.csv`, `seq_info.csv` and the folder `images`.
        cities: names of those that train; all that are there, unless given.

    Returns:
        Images as paths; places in metres: easting, northing, and the city's number times 1,000 km;
        the attributes "city" and "sequence", a drive or walk, which is their cluster.

    Raises:
        InvalidConfig: a city does not exist or is one of cph and sf.
        DataUnavailable: a city, a table or an image is not there.
        InvalidData: a table is damaged, or has no positions.
    """
    folder = root / "msls" / "train_val"
    there = sorted(path.name for path in folder.glob("*/") if not path.name.startswith("."))
    if absent := [city for city in HELD_OUT if city not in there]:
        raise DataUnavailable(
            f"{', '.join(absent)} not in {folder}: unpack the archives of MSLS there; cph and sf "
            "are what is evaluated on"
        )
    trainable = [city for city in there if city not in HELD_OUT]
    chosen = trainable if cities is None else [cities] if isinstance(cities, str) else [*cities]
    if not chosen or set(chosen) - set(trainable) or len(set(chosen)) < len(chosen):
        raise InvalidConfig(
            f"data.options.cities is {chosen}; cities that can train, once each: "
            f"{', '.join(trainable) or 'none is there'}"
        )
    number = {city: n for n, city in enumerate(there)}
    tables = {
        (city, side): _city_table(folder, city, side)
        for city in (*chosen, *HELD_OUT)
        for side in SIDES
    }
    panoramas = sum(int(table.pano.sum()) for table in tables.values())

    def images(*parts: tuple[str, str]) -> ImageSet:
        frames = [tables[part][~tables[part].pano].assign(city=part[0]) for part in parts]
        table = pd.concat(frames, ignore_index=True)
        places = np.column_stack(
            [table.easting, table.northing, APART * table.city.map(number).astype(float)]
        )
        paths = [
            place / file
            for (city, side), frame in zip(parts, frames, strict=True)
            for place in [folder / city / side / "images"]
            for file in frame.file.tolist()
        ]
        return ImageSet(
            paths,
            None,
            (table.place + table.file).tolist(),
            {"city": table.city.to_numpy(str), "sequence": table.sequence_key.to_numpy(str)},
            WithinRadius(places, MSLS_RADIUS),
            "sequence",
        )

    parts = [(city, side) for city in chosen for side in SIDES]
    training = images(*parts)
    searched = np.concatenate(
        [np.full((~tables[part].pano).sum(), part[1] == SIDES[0]) for part in parts]
    )
    places = training.relevance.arrays()["places"]
    return Source(
        replace(training, relevance=WithinRadius(places, MSLS_RADIUS, MSLS_NEAR, searched)),
        images(*((city, "query") for city in HELD_OUT)),
        images(*((city, "database") for city in HELD_OUT)),
        (f"{panoramas} panoramas were left out",) if panoramas else (),
    )


def _city_table(folder: Path, city: str, side: str) -> pd.DataFrame:
    """One row per image: key, easting, northing, pano, sequence_key, place in `folder`, file."""
    place = folder / city / side
    positions = _csv(place / "postprocessed.csv", ["key", "easting", "northing"])
    raw = _csv(place / "raw.csv", ["key", "pano"])
    truth = {"true": True, "false": False, "1": True, "0": False}
    raw["pano"] = raw.pano.astype(str).str.lower().map(truth)
    sequences = _csv(place / "seq_info.csv", ["key", "sequence_key"])
    table = positions.merge(raw, on="key", how="left").merge(sequences, on="key", how="left")
    for name in ("easting", "northing"):
        table[name] = pd.to_numeric(table[name], errors="coerce")
    numbers = table[["easting", "northing"]].to_numpy(float)
    wrong = ~np.isfinite(numbers).all(1) | table[["pano", "sequence_key"]].isna().any(axis=1)
    if wrong.any():
        raise InvalidData(
            f"{place}: {wrong.sum()} images, the first is {table.key[wrong.argmax()]}, have no "
            "position in postprocessed.csv or no sequence in seq_info.csv, or raw.csv does not say "
            "whether they are panoramas: unpack the archives again"
        )
    table["pano"] = table.pano.astype(bool)
    table["place"], table["file"] = f"{city}/{side}/images/", table.key + ".jpg"
    files = table.file[~table.pano].tolist()
    require_images(place / "images", files, "postprocessed.csv", "unpack all archives of MSLS")
    return table


def _csv(path: Path, columns: list[str]) -> pd.DataFrame:
    try:
        table = pd.read_csv(path, usecols=columns, dtype=TEXT, keep_default_na=False)
    except FileNotFoundError as error:
        raise DataUnavailable(f"{path} is not there: unpack the metadata of MSLS") from error
    except ValueError as error:  # also of a parser, and of bytes that are no text
        raise InvalidData(f"{path} cannot be read ({error}): unpack it again") from error
    twice = table.key.duplicated()
    if twice.any():
        raise InvalidData(f"{path} has the key {table.key[twice.argmax()]} twice: unpack it again")
    return table
