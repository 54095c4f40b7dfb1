"""Checks of the arrays that metrics are given."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]


def check_columns(**arrays: NDArray[Any]) -> None:
    """Raise `InvalidData` unless the named arrays are (n,), of one n >= 1, without NaN."""
    shapes = {name: values.shape for name, values in arrays.items()}
    if len(set(shapes.values())) > 1 or any(len(s) != 1 or s[0] == 0 for s in shapes.values()):
        shapes_stated = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InvalidData(f"shapes are {shapes_stated}; needed is (n,), the same n >= 1 for each")
    for name, values in arrays.items():
        unusable = int(np.count_nonzero(~np.isfinite(values)))
        if unusable:
            raise InvalidData(
                f"{unusable} of {values.size} values of {name} are NaN or infinite: leave those "
                "queries out of every array (a query without a match has no average precision)"
            )


def check_rankings(relevant: NDArray[np.bool_], totals: Integers) -> None:
    """Raise `InvalidData` unless relevant is (n, depth) bool and totals (n,) counts that fit it."""
    if relevant.ndim != 2 or 0 in relevant.shape or totals.shape != relevant.shape[:1]:
        raise InvalidData(
            f"relevant has shape {relevant.shape}, totals {totals.shape}; needed are (n, depth) "
            "and (n,), n and depth at least 1"
        )
    if relevant.dtype != np.bool_ or totals.dtype.kind not in "iu":
        raise InvalidData(
            f"relevant is of type {relevant.dtype}, totals of {totals.dtype}; they must be bool "
            "and integer"
        )
    excess = int(np.count_nonzero(totals < np.count_nonzero(relevant, axis=1)))
    if excess:
        raise InvalidData(
            f"totals of {excess} queries are below the number of matches in their ranking: count "
            "the matches in the whole gallery, the query itself left out of both"
        )


def check_k(k: int, depth: int) -> None:
    """Raise `InvalidData` unless 1 <= k <= depth."""
    if not 1 <= k <= depth:
        raise InvalidData(f"k is {k}; allowed is 1 to {depth}, the depth of the rankings")
