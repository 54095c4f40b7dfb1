"""Queries as bytes, to be searched again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from rcir.embedding import Embedding
from rcir.retrieval.queries import Queries


def rows_of(queries: Queries) -> list[bytes]:
    """Each query, as bytes in safetensors' format: all that it is searched by."""
    arrays: dict[str, NDArray[Any]] = {"vectors": queries.vectors}
    if queries.uncertainty is not None:
        arrays["uncertainty"] = queries.uncertainty
    if queries.digests is not None:
        arrays["digests"] = queries.digests.view(np.uint8).reshape(len(queries), -1)
    if queries.embedding is not None:
        held = queries.embedding.arrays()
        arrays |= {f"embedding.{name}": values for name, values in held.items()}
    arrays = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    return [
        save_arrays({name: values[row : row + 1] for name, values in arrays.items()})
        for row in range(len(queries))
    ]


def query_of(row: bytes) -> Queries:
    """The query of such a row."""
    arrays = load_arrays(row)
    known = arrays.pop("digests", None)
    vectors, uncertainty = arrays.pop("vectors"), arrays.pop("uncertainty", None)
    held = {name.removeprefix("embedding."): values for name, values in arrays.items()}
    return Queries(
        vectors,
        uncertainty,
        digests=None if known is None else known.view(f"S{known.shape[1]}")[:, 0],
        embedding=Embedding.from_arrays(held) if held else None,
    )
