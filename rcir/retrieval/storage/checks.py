"""Whether stored values are what they have to be: shapes, types, ranges, finite numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Kinds = type | tuple[type, ...]
DESCRIPTION: dict[str, Kinds] = {
    "encoder": (dict, NoneType),
    "preprocessing": (dict, NoneType),
    "index": dict,
    "max_depth": int,
    "calibrated_on": dict,
    "origin": dict,
    "chosen_among": int,
    "options": dict,
    "uncertainty": str,
    "calibrated_with": dict,
    "label_names": dict,
    "controllers": list,
}
CONTROLLER: dict[str, Kinds] = {
    "distinct": (str, NoneType),
    "score_functions": dict,
    "bound": str,
    "groups": (list, NoneType),
    "cluster": (str, NoneType),
    "growing": bool,
}


def require(holds: bool | np.bool_, otherwise: str) -> None:
    """Raise `ValueError` unless something holds."""
    if not holds:
        raise ValueError(otherwise)


def require_fields(values: Any, kinds: Mapping[str, Kinds], what: str) -> None:
    """Raise `ValueError` unless a mapping has just these fields, each of its kind."""
    require(isinstance(values, dict) and values.keys() == kinds.keys(), f"fields of {what}")
    for name, kind in kinds.items():
        value = values[name]
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        require(fits, f"{what}: {name} is {str(value)[:40]!r}")


def require_texts(values: Any, what: str) -> None:
    """Raise `ValueError` unless all items of a list, or of a mapping, are texts."""
    items = [*values.keys(), *values.values()] if isinstance(values, dict) else values
    texts = isinstance(items, list) and all(isinstance(item, str) for item in items)
    require(texts, f"{what}: there are others than texts")


def require_finite(values: Any, what: str) -> None:
    """Raise `ValueError` if a number within plain values is NaN or infinite."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list):
        for value in values:
            require_finite(value, what)
    elif isinstance(values, float):
        require(bool(np.isfinite(values)), f"{what}: there is {values}")


def require_array(
    values: NDArray[Any], dtype: Any, shape: tuple[int | None, ...], what: str
) -> None:
    """Raise `ValueError` unless an array has a type, and a shape (None: any length), and its
    numbers, if they are floats, are finite.
    """
    fits = len(values.shape) == len(shape) and all(
        wanted in (None, length) for wanted, length in zip(shape, values.shape, strict=True)
    )
    require(fits and values.dtype == dtype, f"{what}: {values.dtype} of shape {values.shape}")
    if values.dtype.kind == "f":
        require(np.isfinite(values).all(), f"{what}: some numbers are NaN or infinite")
