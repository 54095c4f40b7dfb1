"""Mapillary Street-Level Sequences (Warburg et al., CVPR 2020): street views of 30 cities.

The cities Copenhagen (cph) and San Francisco (sf), the official validation cities, evaluate here;
all other cities of `train_val` train. The positions of the six official test cities are withheld by
the publishers, who score uploaded results: nothing can be calibrated or measured there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from rcir.data.division import Source
from rcir.data.listing import require_images
from rcir.data.records import ImageSet
from rcir.data.relevance import WithinRadius
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData

HELD_OUT = ("cph", "sf")
SIDES = ("database", "query")
RADIUS, NEAR = 25.0, 10.0  # metres: of matches, and of positives in training
TEXT = {"key": str, "sequence_key": str}  # which may look like numbers
APART = 1e6  # metres; cities lie in different UTM zones, where equal coordinates are other places


def read(root: Path, cities: str | Sequence[str] | None = None) -> Source:
    """Train on the training cities; ask the queries of cph and sf, search their database images.

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
        (city, side): _table(folder, city, side) for city in (*chosen, *HELD_OUT) for side in SIDES
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
            WithinRadius(places, RADIUS),
            "sequence",
        )

    parts = [(city, side) for city in chosen for side in SIDES]
    training = images(*parts)
    searched = np.concatenate(
        [np.full((~tables[part].pano).sum(), part[1] == SIDES[0]) for part in parts]
    )
    places = training.relevance.arrays()["places"]
    return Source(
        replace(training, relevance=WithinRadius(places, RADIUS, NEAR, searched)),
        images(*((city, "query") for city in HELD_OUT)),
        images(*((city, "database") for city in HELD_OUT)),
        (f"{panoramas} panoramas were left out",) if panoramas else (),
    )


def _table(folder: Path, city: str, side: str) -> pd.DataFrame:
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
