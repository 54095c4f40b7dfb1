"""Results of a run on its queries, kept so that runs can be compared query by query."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from rcir.errors import InvalidData
from rcir.files import write_file
from rcir.options import ALPHA
from rcir.risk.bootstrap import Certified
from rcir.store.codec import decode, encode

VALIDATION, TEST = "validation.safetensors", "test.safetensors"
RESULTS, RETRIEVER = "results.json", "retriever"  # beside TEST: all numbers, and a folder
Split = Literal["validation", "test"]
DIGEST_LENGTH = 12  # characters of a digest that MLflow shows
# What MLflow's tables show: of each of a few levels, and of the quality of rankings.
HEADLINE_LEVELS = 3
HEADLINE = {"mean_size": "mean_size", "constant_size": "constant_size", "risk": "test_risk"}
HEADLINE_QUALITY = ["recall_at_1", "map_at_r", "auroc_miss", "auroc_unmatched", "ausc"]
HEADLINE_QUALITY += ["ece", "ece_item", "ece_set"]


def digest_names(names: Sequence[str]) -> str:
    """Return the SHA-256 of names in order, to compare lists of queries."""
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()


def headline_metrics(
    rows: Sequence[Mapping[str, Any]], quality: Mapping[str, float | None]
) -> dict[str, float]:
    """Return the numbers of an evaluation that MLflow compares, see docs/sweeps.md.

    They are of the three levels nearest to `ALPHA`; levels that are not certified are left out.
    """
    numbers: dict[str, float | None] = {}
    for row in sorted(rows, key=lambda row: abs(row["alpha"] - ALPHA))[:HEADLINE_LEVELS]:
        for name, field in HEADLINE.items():
            numbers[f"certified/alpha_{row['alpha']:g}/{name}"] = row[field]
    numbers |= {f"quality/{name}": quality.get(name) for name in HEADLINE_QUALITY}
    return {name: value for name, value in numbers.items() if value is not None}


@dataclass(frozen=True)
class RunResults:
    """Measurements of an encoder on queries, and the sizes of their sets."""

    on: Split
    queries: str  # `digest_names` of those that calibrate and are measured, in order
    # What calibrates and what is measured, each query in one part; empty if there are too few.
    parts: list[Certified]
    metrics: dict[str, float]  # `rcir compare` shows "recall_at_1" and "ece"
    score_function: str

    def write(self, path: Path) -> None:
        """Write one safetensors file, all of it or nothing; omit metrics that are not finite."""
        finite = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        plain, arrays = encode(replace(self, metrics=finite))
        write_file(path, save(arrays, {"results": json.dumps(plain)}))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote; `InvalidData` for a damaged file or one with other contents."""
        try:
            with safe_open(path, framework="np") as file:
                plain = json.loads(file.metadata()["results"])
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return decode(cls, plain, arrays)
        except (SafetensorError, ValueError, TypeError, KeyError) as error:
            raise InvalidData(
                f"{path} is damaged, or of another version of rcir ({error}): remove it, and train "
                "or calibrate again"
            ) from error
