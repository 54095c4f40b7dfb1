"""Results of a run on its queries, kept so that runs can be compared query by query.

One safetensors file: the arrays `scores.0`, `candidate_scores.0`, `scores.1`, ... of the parts, and
the rest as its metadata. Training writes `validation.safetensors` into its folder, calibration
`test.safetensors` beside its results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from rcir.errors import InvalidData
from rcir.files import write_file
from rcir.risk.bootstrap import Certified

VALIDATION, TEST = "validation.safetensors", "test.safetensors"
RESULTS = "results.json"  # beside the latter: all numbers of an evaluation
Split = Literal["validation", "test"]
DIGEST_LENGTH = 12  # characters of a digest that MLflow shows


def names_digest(names: Sequence[str]) -> str:
    """SHA-256 of names in order: two lists of queries are the same if these are.

    Example:
        >>> names_digest(["a", "b"]) == names_digest(("a", "b")) != names_digest(["b", "a"])
        True
    """
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()


@dataclass(frozen=True)
class RunResults:
    """Measurements of an encoder on some queries, and the sets that it gives them.

    Attributes:
        on: the split the queries are of.
        queries: `names_digest` of the queries that calibrate and are measured, in order.
        parts: what calibrates and what is measured; each query is measured in one part. None if
            there are too few queries.
        metrics: by name; "recall_at_1" and "ece" are what `rcir compare` shows.
        score_function: how set size depends on the query.
    """

    on: Split
    queries: str
    parts: list[Certified]
    metrics: dict[str, float]
    score_function: str

    def write(self, path: Path) -> None:
        """Write the file, all of it or nothing."""
        arrays: dict[str, NDArray[Any]] = {}
        for number, part in enumerate(self.parts):
            arrays[f"scores.{number}"] = np.ascontiguousarray(part.scores, np.float32)
            arrays[f"candidate_scores.{number}"] = np.ascontiguousarray(
                part.candidate_scores, np.float32
            )
        names = ("on", "queries", "metrics", "score_function")
        facts = {name: getattr(self, name) for name in names}
        metadata = {name: json.dumps(value) for name, value in facts.items()}
        write_file(path, save(arrays, metadata))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote.

        Raises:
            InvalidData: the file is damaged, or something else.
        """
        try:
            with safe_open(path, framework="np") as file:
                facts = {name: json.loads(value) for name, value in file.metadata().items()}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            parts = [
                Certified(arrays.pop(f"scores.{number}"), arrays.pop(f"candidate_scores.{number}"))
                for number in range((len(arrays) + 1) // 2)
            ]
            results = cls(parts=parts, **facts)
            _check(results)
        except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidData(
                f"{path} is damaged, or of another version of rcir ({error}): remove it, and train "
                "or calibrate again"
            ) from error
        return results


def _check(results: RunResults) -> None:
    """Raise ValueError for what no `RunResults` that was written holds."""
    for part in results.parts:
        one, two = part.scores, part.candidate_scores
        if (one.ndim, two.ndim) != (1, 2) or 0 in (one.size, two.size):
            raise ValueError(f"scores of shapes {one.shape} and {two.shape}")
        if {one.dtype, two.dtype} != {np.dtype(np.float32)}:
            raise ValueError("scores are not of type float32")
    texts = (results.queries, results.score_function)
    if results.on not in get_args(Split) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"measured on {results.on!r}")
    if not all(isinstance(value, int | float) for value in results.metrics.values()):
        raise ValueError("metrics that are no numbers")
