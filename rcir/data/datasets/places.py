"""Street views with positions: Pittsburgh, and Mapillary Street-Level Sequences.

Training and validation keep database and queries apart, as the authors do: anchors are queries,
their positives database images within 10 m, their negatives those beyond 25 m. All readers raise
`DataUnavailable` if index files or images are missing, and `InvalidData` if an index is damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rcir.data.listing import LEFT_OUT, Row, read_mat, require_files, source_of
from rcir.data.records import Source
from rcir.data.relevance import WithinRadius
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData

Version = Literal["30k", "250k"]
QUERY_FOLDER = "queries_real"
NEAR_METRES = 10.0  # metres: of positives in training
PLACE_SPLITS = ("train", "query", "gallery")
HELD_OUT = ("cph", "sf")
SPLIT_OF_SIDE = {"database": "gallery", "query": "query"}
MSLS_RADIUS = 25.0  # metres
TEXT_COLUMNS = {"key": str, "sequence_key": str, "pano": str}  # which may look like numbers
# In metres. Cities are in different UTM zones, where equal coordinates are other places.
CITY_DISTANCE = 1e6


def _by_place(training: float, evaluation: float) -> Callable[..., WithinRadius]:
    """Return what makes the relevance of labels, which are a side and coordinates, by radii."""

    def relevance(split: str, labels: Sequence[tuple[Any, ...]]) -> WithinRadius:
        places = np.array([place for _, *place in labels], np.float64)
        if split != "train":
            return WithinRadius(places, evaluation)
        is_searched = np.array([side == "database" for side, *_ in labels])
        return WithinRadius(places, training, min(NEAR_METRES, training), is_searched)

    return relevance


def read_pittsburgh(
    root: Path,
    version: Version = "30k",
    split: Literal["test", "val"] = "test",
    radius: float | None = None,
) -> Source:
    """Pittsburgh 30k or 250k (Torii et al., CVPR 2013): train on one split, evaluate on another.

    The splits are those of Arandjelovic et al. (NetVLAD, CVPR 2016). Images match if they were
    taken within 25 m of each other. All 24 views of a panorama are images of their own.

    Args:
        root: folder that holds `pittsburgh`: in it `datasets/pitts30k_train.mat` and its siblings,
            database images as `000/000829_pitch1_yaw1.jpg`, queries below `queries_real`.
        version: "30k" or "250k".
        split: that evaluates; "test" or "val".
        radius: distance in metres up to which images of this split match; None for the 25 m that
            are published with it. The code of Cai et al. (AAAI 2025) takes 10.

    Returns:
        Images as paths; places in metres; the attribute "panorama", which is their cluster.
    """
    if version not in ("30k", "250k") or split not in ("test", "val"):
        raise InvalidConfig(
            f"data.options: version {version!r}, split {split!r}; version must be "
            "'30k' or '250k', split 'test' or 'val'"
        )
    if radius is not None and not 0 < radius < np.inf:
        raise InvalidConfig(f"data.options: radius {radius}; it must be above 0, in metres")
    folder = root / "pittsburgh"
    (train, training), (evaluation, published) = (
        read_pittsburgh_index(folder / "datasets" / f"pitts{version}_{part}.mat")
        for part in ("train", split)
    )
    return source_of(
        folder,
        [row._replace(split="train") for row in train] + evaluation,
        PLACE_SPLITS,
        attributes=["panorama"],
        cluster="panorama",
        relevance=_by_place(training, published if radius is None else radius),
    )


def read_pittsburgh_index(path: Path) -> tuple[list[Row], float]:
    """Return the database images and queries of a split, and its radius in metres."""
    require_files(path.parent, [path.name])
    rows: list[Row] = []
    sides, radius = read_mat(path, _pittsburgh_sides)
    for side, names, places in sides:
        if places.shape == (2, len(names)):  # of two images, the official orientation
            places = places.T
        if not names or places.shape != (len(names), 2) or not np.isfinite(places).all():
            raise InvalidData(
                f"{path} has positions of shape {places.shape} for {len(names)} images; it must "
                "have two finite coordinates of each: fetch it again"
            )
        for name, place in zip(names, places.tolist(), strict=True):
            panorama = name.rpartition("_pitch")[0] or name
            rows.append(Row(name, SPLIT_OF_SIDE[side], (side, *place), (panorama,)))
    return rows, radius


def _pittsburgh_sides(
    content: Mapping[str, Any],
) -> tuple[list[tuple[str, list[str], NDArray[Any]]], float]:
    """Return names and positions of database and queries, and the radius."""
    struct = content["dbStruct"][0, 0]
    sides = []
    for side, letter in (("database", "db"), ("query", "q")):
        newer = f"{letter}ImageFns"
        files = struct[newer if newer in struct.dtype.names else f"{letter}Image"]
        names = [str(cell.item()).strip() for cell in files.reshape(-1)]
        if side == "query":
            names = [f"{QUERY_FOLDER}/{name.removeprefix(f'{QUERY_FOLDER}/')}" for name in names]
        sides.append((side, names, struct[f"utm{letter.capitalize()}"].astype(np.float64)))
    return sides, float(struct["posDistThr"].item())


def read_msls(root: Path, cities: str | Sequence[str] | None = None) -> Source:
    """Mapillary Street-Level Sequences (Warburg et al., CVPR 2020): street views of 30 cities.

    Copenhagen (cph) and San Francisco (sf), the official validation cities, evaluate here; all
    other cities of `train_val` train. The publishers keep the positions of the six official test
    cities, which therefore cannot be used. Images match within 25 m in the same city. Panoramas are
    left out, as in the official evaluation.

    Args:
        root: folder that holds `msls/train_val/<city>/{database,query}`, each with
            `postprocessed.csv`, `raw.csv`, `seq_info.csv` and the folder `images`.
        cities: names of those that train; all that are there, unless given.

    Returns:
        Images as paths; places in metres: easting, northing, and the city's number times 1,000 km;
        the attributes "city" and "sequence", a drive or walk, which is their cluster.
    """
    folder = root / "msls" / "train_val"
    there = sorted(path.name for path in folder.glob("*/") if not path.name.startswith("."))
    if absent := [city for city in HELD_OUT if city not in there]:
        raise DataUnavailable(f"{', '.join(absent)} not in {folder}: cph and sf evaluate")
    trainable = [city for city in there if city not in HELD_OUT]
    chosen = trainable if cities is None else [cities] if isinstance(cities, str) else [*cities]
    if not chosen or set(chosen) - set(trainable) or len(set(chosen)) < len(chosen):
        raise InvalidConfig(
            f"data.options.cities is {chosen}; cities that can train, once each: "
            f"{', '.join(trainable) or 'none is there'}"
        )

    def rows() -> Iterator[Row]:
        for city in (*chosen, *HELD_OUT):
            for side, split in SPLIT_OF_SIDE.items():
                table = _city_table(folder / city / side)
                for key, *place, pano, sequence in table.itertuples(index=False):
                    label = (side, *place, CITY_DISTANCE * there.index(city))
                    yield Row(
                        f"{city}/{side}/images/{key}.jpg",
                        LEFT_OUT if pano else split if city in HELD_OUT else "train",
                        "panoramas" if pano else label,
                        (city, sequence),
                    )

    return source_of(
        folder,
        rows(),
        PLACE_SPLITS,
        attributes=["city", "sequence"],
        cluster="sequence",
        relevance=_by_place(MSLS_RADIUS, MSLS_RADIUS),
    )


def _city_table(folder: Path) -> pd.DataFrame:
    """Return one row per image: key, easting, northing, pano, sequence_key."""
    positions = _csv(folder / "postprocessed.csv", ["key", "easting", "northing"])
    raw = _csv(folder / "raw.csv", ["key", "pano"])
    raw["pano"] = raw.pano.str.lower().map({"true": True, "false": False, "1": True, "0": False})
    sequences = _csv(folder / "seq_info.csv", ["key", "sequence_key"])
    table = positions.merge(raw, on="key", how="left").merge(sequences, on="key", how="left")
    places = table[["easting", "northing"]].apply(pd.to_numeric, errors="coerce")
    wrong = ~np.isfinite(places.to_numpy(float)).all(1)
    wrong |= table[["pano", "sequence_key"]].isna().any(axis=1)
    if wrong.any():
        raise InvalidData(
            f"{folder}: {wrong.sum()} images, first {table.key[wrong.argmax()]}, lack a position "
            "in postprocessed.csv, a sequence in seq_info.csv, or pano in raw.csv: unpack the "
            "archives again"
        )
    table[["easting", "northing"]] = places
    return table


def _csv(path: Path, columns: list[str]) -> pd.DataFrame:
    """Return columns of a table, with a row for each key."""
    try:
        table = pd.read_csv(path, usecols=columns, dtype=TEXT_COLUMNS, keep_default_na=False)
    except FileNotFoundError as error:
        raise DataUnavailable(f"{path} is not there") from error
    except ValueError as error:  # also of a parser, and of bytes that are not text
        raise InvalidData(f"{path} cannot be read ({error}): unpack it again") from error
    twice = table.key.duplicated()
    if twice.any():
        raise InvalidData(f"{path} has the key {table.key[twice.argmax()]} twice: unpack it again")
    return table[columns]
