"""How vectors that were embedded elsewhere are searched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.errors import InvalidConfig, InvalidData
from rcir.index import check_vectors
from rcir.inputs import as_numpy, as_vectors
from rcir.printable import printable
from rcir.stored_vectors import StoredVectors, batches

Metric = Literal["cosine", "euclidean"]


@dataclass(frozen=True)
class VectorOptions:
    """How vectors are searched that no encoder of rcir made.

    Args:
        metric: "cosine" brings all vectors to unit length, where the nearest by angle is the
            nearest by distance; "euclidean" takes them as they are.
        model: name of what embedded them, with its version; vectors of another one are refused.
        leave_one_out: queries may be gallery items, and items of the very same vector are left out
            of their search; without, such queries cannot calibrate.
    """

    metric: Metric = "euclidean"
    model: str | None = None
    leave_one_out: bool = False

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            raise InvalidConfig(
                f"metric {self.metric!r} is unknown; choose one of {', '.join(get_args(Metric))}"
            )

    def checked(self, vectors: ArrayLike, dim: int | None = None) -> NDArray[np.float32]:
        """Vectors (n, d) ready to be searched.

        Args:
            vectors: real numbers, (n, d). Those of a `numpy.memmap` are never all in memory: what
                is returned is mapped from a temporary file.
            dim: what d must be.

        Raises:
            InvalidData: see `rcir.index.check_vectors`; or some are zero, and have no angle.

        Example:
            >>> VectorOptions("cosine").checked([[3.0, 4.0]]).tolist()
            [[0.6000000238418579, 0.800000011920929]]
        """
        if isinstance(vectors, np.memmap) and vectors.ndim == 2:
            return self._stored(vectors, dim)
        found = as_vectors(vectors)  # what is no array of vectors is refused below
        given = check_vectors(vectors if found is None else found, dim)
        return given if self.metric == "euclidean" else _of_unit_length(given)

    def _stored(self, vectors: NDArray[Any], dim: int | None) -> NDArray[np.float32]:
        """The same of vectors that are mapped into memory, in a temporary file of their own."""
        stored = StoredVectors(vectors.shape[1])
        for rows in batches(*vectors.shape):
            given = check_vectors(vectors[rows], dim)
            unit = self.metric == "cosine"
            stored.append(_of_unit_length(given, rows.start) if unit else given)
        return stored.vectors

    @staticmethod
    def uncertainties(given: ArrayLike | None) -> NDArray[np.float64] | None:
        """Uncertainties (n,) that come with vectors, if any do.

        Raises:
            InvalidData: they are no numbers.
        """
        if given is None:
            return None
        try:
            return np.atleast_1d(np.asarray(as_numpy(given), np.float64))
        except (TypeError, ValueError):
            raise InvalidData(
                "uncertainty holds what is no number: give one for each vector, larger where it is "
                "less certain"
            ) from None

    def require_model(self, model: str | None) -> None:
        """Raise `InvalidData` if vectors are known to be of another model than the gallery's."""
        if None not in (model, self.model) and model != self.model:
            raise InvalidData(
                f"the vectors are of {printable(str(model))}, those of the gallery of "
                f"{printable(str(self.model))}: embed both with the same model"
            )


def _of_unit_length(given: NDArray[np.float32], first: int = 0) -> NDArray[np.float32]:
    """Vectors (n, d) over their lengths; the first of them has that number, for messages."""
    norms = np.linalg.norm(given, axis=1, keepdims=True)
    zero = np.flatnonzero(norms == 0)
    if len(zero):
        raise InvalidData(
            f"{len(zero)} of {len(given)} vectors are zero, first in row {first + zero[0]}, and "
            'have no angle to others: leave them out, or take metric="euclidean"'
        )
    unit: NDArray[np.float32] = given / norms
    return unit
