"""Results of a run on its queries, kept so that runs can be compared query by query.

One safetensors file: the arrays `scores.0`, `candidate_scores.0`, `scores.1`, ... of the parts, and
the rest as its metadata. Training writes `validation.safetensors` into its folder, calibration
`test.safetensors` beside its results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
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
    """Return the SHA-256 of names in order, to compare lists of queries.

    Example:
        >>> names_digest(["a", "b"]) == names_digest(("a", "b")) != names_digest(["b", "a"])
        True
    """
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()


def certified_arrays(parts: Sequence[Certified]) -> dict[str, NDArray[np.float32]]:
    """Return the arrays of parts by name, for `certified_parts`."""
    return {
        f"{name}.{number}": np.ascontiguousarray(getattr(part, name), np.float32)
        for number, part in enumerate(parts)
        for name in ("scores", "candidate_scores")
    }


def certified_parts(arrays: Mapping[str, NDArray[Any]]) -> list[Certified]:
    """Restore the parts that `certified_arrays` wrote; `KeyError` if one is incomplete."""
    numbers = range(sum(name.startswith("scores.") for name in arrays))
    return [Certified(arrays[f"scores.{n}"], arrays[f"candidate_scores.{n}"]) for n in numbers]


@dataclass(frozen=True)
class RunResults:
    """Measurements of an encoder on queries, and the sizes of their sets.

    Attributes:
        on: the split of the queries.
        queries: `names_digest` of the queries that calibrate and are measured, in order.
        parts: what calibrates and what is measured; each query is measured in one part. Empty if
            there are too few queries.
        metrics: by name; `rcir compare` shows "recall_at_1" and "ece".
        score_function: how set size depends on the query.
    """

    on: Split
    queries: str
    parts: list[Certified]
    metrics: dict[str, float]
    score_function: str

    def write(self, path: Path) -> None:
        """Write the file, all of it or nothing."""
        names = ("on", "queries", "metrics", "score_function")
        metadata = {name: json.dumps(getattr(self, name)) for name in names}
        write_file(path, save(certified_arrays(self.parts), metadata))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote.

        Raises:
            InvalidData: the file is damaged, or contains something else.
        """
        try:
            with safe_open(path, framework="np") as file:
                facts = {name: json.loads(value) for name, value in file.metadata().items()}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            results = cls(parts=certified_parts(arrays), **facts)
            if len(arrays) != 2 * len(results.parts):
                raise ValueError("incomplete scores")
            _check(results)
        except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidData(
                f"{path} is damaged, or of another version of rcir ({error}): remove it, and train "
                "or calibrate again"
            ) from error
        return results


def _check(results: RunResults) -> None:
    """Raise ValueError for contents that `RunResults.write` does not write."""
    for part in results.parts:
        scores, candidate_scores = part.scores, part.candidate_scores
        if (scores.ndim, candidate_scores.ndim) != (1, 2) or 0 in (
            scores.size,
            candidate_scores.size,
        ):
            raise ValueError(f"scores of shapes {scores.shape} and {candidate_scores.shape}")
        if {scores.dtype, candidate_scores.dtype} != {np.dtype(np.float32)}:
            raise ValueError("scores are not of type float32")
    texts = (results.queries, results.score_function)
    if results.on not in get_args(Split) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"measured on {results.on!r}")
    if not all(isinstance(value, int | float) for value in results.metrics.values()):
        raise ValueError("metrics that are not numbers")
