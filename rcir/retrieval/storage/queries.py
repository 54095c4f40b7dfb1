"""The queries that a retriever was tuned and calibrated with, as files, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as save_arrays

from rcir.embedding import Embedding
from rcir.files import read_array
from rcir.retrieval.calibration import Calibration
from rcir.retrieval.queries import Queries
from rcir.retrieval.storage.checks import require, require_array, require_fields
from rcir.retrieval.storage.gallery import DIGESTS, stored_relevance

QUERY_SPLITS = ("tuning", "calibration")
NAMED_PARTS = ("groups", "clusters")


def save_queries(calibration: Calibration, folder: Path) -> None:
    """Write the queries of both splits, with all that is known of them."""
    arrays: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    for split in QUERY_SPLITS:
        queries: Queries = getattr(calibration, f"{split}_queries")
        found: dict[str, Any] = {"vectors": queries.vectors}
        if queries.uncertainty is not None:
            found["uncertainty"] = queries.uncertainty
        for name in ("relevance", "embedding"):
            part = getattr(queries, name)
            held = {} if part is None else part.arrays()
            found |= {f"{name}.{key}": values for key, values in held.items()}
        arrays |= {f"{split}.{name}": np.ascontiguousarray(v) for name, v in found.items()}
        texts[split] = {"cluster": queries.cluster}
        for name in NAMED_PARTS:
            values = getattr(queries, name)
            texts[split][name] = None if values is None else values.tolist()
    (folder / "queries.safetensors").write_bytes(save_arrays(arrays))
    (folder / "queries.json").write_text(json.dumps(texts))
    np.save(folder / "queries.npy", calibration.query_digests, allow_pickle=False)


def load_queries(folder: Path, sizes: tuple[int, int]) -> tuple[Queries, Queries]:
    """The queries of both splits.

    Args:
        folder: of the retriever.
        sizes: how many queries tuned and calibrated it.

    Raises:
        ValueError, KeyError, RcirError, and other exceptions: they are not there.
    """
    arrays = load_arrays(folder / "queries.safetensors")
    texts = json.loads((folder / "queries.json").read_text())
    require_fields(texts, dict.fromkeys(QUERY_SPLITS, dict), "queries.json")
    digests = read_array(folder / "queries.npy")
    require_array(digests, DIGESTS, (sum(sizes),), "queries.npy")
    known = zip(QUERY_SPLITS, sizes, np.split(digests, [sizes[0]]), strict=True)
    found = []
    for split, n, own in known:
        prefix = f"{split}."
        part = {name: arrays.pop(name) for name in list(arrays) if name.startswith(prefix)}
        part = {name.removeprefix(prefix): values for name, values in part.items()}
        found.append(_queries(part, texts[split], n, own))
    require(not arrays, f"there are further arrays: {', '.join(arrays)}")
    stated = {queries.uncertainty is None for queries in found}
    require(len(stated) == 1, "uncertainties of the queries of one split alone")
    return found[0], found[1]


def _queries(arrays: dict[str, Any], texts: dict[str, Any], n: int, digests: Any) -> Queries:
    vectors = arrays.pop("vectors")
    require_array(vectors, np.float32, (n, None), "vectors of the queries")
    uncertainty = arrays.pop("uncertainty", None)
    if uncertainty is not None:
        require_array(uncertainty, np.float64, (n,), "uncertainty of the queries")
    parts: dict[str, dict[str, Any]] = {"relevance": {}, "embedding": {}}
    for name, values in arrays.items():
        part, _, key = name.partition(".")
        parts[part][key] = values
    held = parts["embedding"]
    same = np.array_equal(held.get("vectors", vectors[:0]), vectors)
    require(same or not held, "embeddings of the queries")
    for name, values in held.items():
        require(len(values) == n and np.isfinite(values).all(), f"{name} of the queries")
    require(texts.keys() == {"cluster", *NAMED_PARTS}, "fields of queries.json")
    named = {}
    for name in NAMED_PARTS:
        values = texts[name]
        fits = values is None or (len(values) == n and all(isinstance(v, str) for v in values))
        require(fits, f"{name} of the queries")
        named[name] = None if values is None else np.array(values, str)
    return Queries(
        vectors,
        uncertainty,
        digests=digests,
        embedding=Embedding.from_arrays(parts["embedding"]) if parts["embedding"] else None,
        relevance=stored_relevance(parts["relevance"], n) if parts["relevance"] else None,
        cluster=texts["cluster"],
        **named,
    )
