"""The index and what is known of the gallery images as files, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as save_arrays

from rcir.data.digests import BYTES
from rcir.data.relevance import relevance_of
from rcir.data.relevance_protocol import Relevance
from rcir.embedding import Embedding
from rcir.files import read_array
from rcir.index import Index, IndexConfig, find_index
from rcir.retrieval.search import Searcher
from rcir.retrieval.storage.checks import require, require_array, require_texts

DIGESTS = np.dtype(f"S{2 * BYTES}")
PLAIN: dict[str, tuple[str, Any]] = {  # arrays (n,): their files and types
    "uncertainty": ("uncertainty.npy", np.float64),
    "digests": ("digests.npy", DIGESTS),
    "norms": ("norms.npy", np.float32),
}


def save_index(index: Index, folder: Path) -> dict[str, Any]:
    """Write an index to the folder `index`; returns what names it, and why it was chosen."""
    place = folder / "index"
    place.mkdir()
    index.save(place)
    why = {"why": index.why} if hasattr(index, "why") else {}
    return asdict(IndexConfig.of(index)) | why


def load_index(description: dict[str, Any], folder: Path) -> Index:
    """The index that was saved."""
    named = {name: value for name, value in description.items() if name != "why"}
    config = IndexConfig(**named)
    index: Any = find_index(config.kind).load(folder / "index", config.index_options())
    if "why" in description:
        require(isinstance(description["why"], str), "why the index was chosen")
        index.why = description["why"]
    loaded: Index = index
    return loaded


def save_gallery(searcher: Searcher, folder: Path) -> None:
    """Write what is known of the gallery images."""
    (folder / "gallery.json").write_text(json.dumps(searcher.ids.tolist()))
    if searcher.relevance is not None:
        facts = searcher.relevance.arrays()
        (folder / "relevance.safetensors").write_bytes(save_arrays(facts))
    if searcher.items is not None:
        held = searcher.items.arrays()
        (folder / "items.safetensors").write_bytes(save_arrays(held))
    for name, (file, _) in PLAIN.items():
        values = getattr(searcher.gallery, name)
        if values is not None and not (name == "norms" and (values == 1).all()):
            np.save(folder / file, values, allow_pickle=False)


def load_gallery(folder: Path, files: Set[str]) -> dict[str, Any]:
    """Read a saved gallery as arguments of a `Searcher`."""
    ids = json.loads((folder / "gallery.json").read_text())
    require_texts(ids, "gallery.json")
    known: dict[str, Any] = {"ids": ids}
    if "relevance.safetensors" in files:
        arrays = load_arrays(folder / "relevance.safetensors")
        known["labels"] = stored_relevance(arrays, len(ids))
    if "items.safetensors" in files:
        items = load_arrays(folder / "items.safetensors")
        for name, values in items.items():
            require_array(values, values.dtype, (len(ids), *(None,) * (values.ndim - 1)), name)
        known["items"] = Embedding.from_arrays(items)
    for name, (file, dtype) in PLAIN.items():
        if file in files:
            argument = "item_uncertainty" if name == "uncertainty" else name
            known[argument] = read_array(folder / file)
            several = name == "digests" and known[argument].ndim == 2  # pictures of templates
            require_array(known[argument], dtype, (len(ids), None)[: 1 + several], file)
    require("norms" not in known or (known["norms"] >= 0).all(), "norms.npy: some are below 0")
    return known


def stored_relevance(arrays: Mapping[str, NDArray[Any]], n: int) -> Relevance:
    """The relevance of n images that was saved; what scipy takes on trust is checked."""
    known = arrays
    if arrays.keys() == {"labels"}:
        require_array(arrays["labels"], np.int64, (n,), "labels")
    elif arrays.keys() == {"places", "radius"}:
        require_array(arrays["places"], np.float64, (n, None), "places")
        require_array(arrays["radius"], np.float64, (1,), "radius")
    else:
        if all(name.startswith("table.") for name in arrays):
            known = {name.removeprefix("table."): values for name, values in arrays.items()}
        require(known.keys() == {"shape", "indptr", "indices"}, "arrays of relevance.safetensors")
        require_array(known["shape"], np.int64, (2,), "shape")
        indptr, indices = known["indptr"], known["indices"]
        for name, values in (("indptr", indptr), ("indices", indices)):
            require(values.ndim == 1 and values.dtype in (np.int32, np.int64), name)
        rows, labels = known["shape"].tolist()
        require(rows == n and 0 <= labels < 2**31, "shape")
        require(len(indptr) == n + 1 and indptr[0] == 0 and indptr[-1] == len(indices), "indptr")
        require((np.diff(indptr) >= 0).all(), "indptr falls")
        require(((indices >= 0) & (indices < labels)).all(), "indices")
    return relevance_of(arrays)
