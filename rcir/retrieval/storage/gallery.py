"""The index and what is known of the gallery images as files, and back."""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as save_arrays

from rcir.data.relevance import relevance_of
from rcir.encoders.batches import from_arrays, to_arrays
from rcir.files import read_array
from rcir.index import Index, IndexConfig, find_index
from rcir.retrieval.searcher import Searcher

PLAIN = {"uncertainty": "uncertainty.npy", "digests": "digests.npy", "norms": "norms.npy"}


def save_index(index: Index, folder: Path) -> dict[str, Any]:
    """Write an index to the folder `index`; returns what names it."""
    place = folder / "index"
    place.mkdir()
    index.save(place)
    return asdict(IndexConfig.of(index))


def load_index(description: dict[str, Any], folder: Path) -> Index:
    """The index that was saved."""
    config = IndexConfig(**description)
    return find_index(config.kind).load(folder / "index", config.index_options())


def save_gallery(searcher: Searcher, folder: Path) -> None:
    """Write what is known of the gallery images."""
    (folder / "gallery.json").write_text(json.dumps(searcher.ids.tolist()))
    if searcher.relevance is not None:
        facts = searcher.relevance.arrays()
        (folder / "relevance.safetensors").write_bytes(save_arrays(facts))
    if searcher.items is not None:
        held = to_arrays(searcher.items)
        (folder / "items.safetensors").write_bytes(save_arrays(held))
    for name, file in PLAIN.items():
        values = getattr(searcher.gallery, name)
        if values is not None and not (name == "norms" and (values == 1).all()):
            np.save(folder / file, values, allow_pickle=False)


def load_gallery(folder: Path, files: Set[str]) -> dict[str, Any]:
    """What was saved, as arguments of a `Searcher`."""
    known: dict[str, Any] = {"ids": json.loads((folder / "gallery.json").read_text())}
    if "relevance.safetensors" in files:
        known["labels"] = relevance_of(load_arrays(folder / "relevance.safetensors"))
    if "items.safetensors" in files:
        known["items"] = from_arrays(load_arrays(folder / "items.safetensors"))
    for name, file in PLAIN.items():
        if file in files:
            argument = "item_uncertainty" if name == "uncertainty" else name
            known[argument] = read_array(folder / file)
    return known
