"""Embeddings of images, and conversion of arrays of other libraries to NumPy.

Vectors, labels, ids and uncertainties may be NumPy arrays, lists, PyTorch tensors on any device,
columns or frames of pandas, and Arrow arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.store.codec import convert

if TYPE_CHECKING:  # what needs no encoder needs no torch
    from torch import Tensor


@dataclass(frozen=True)
class Embedding:
    """Embeddings of a batch of images, with the encoder's own uncertainty.

    `map` and `tensors` cover all parts.

    Attributes:
        vectors: (n, d) float32, searched by L2 distance.
        variance: (n, 1) for an isotropic, (n, d') for a per-dimension variance, at least 0; None
            for an encoder without one.
        uncertainty: (n,) float32, larger is less certain; None for an encoder without one.
        extra: other tensors of a method by name, each (n, ...): a concentration, the components of
            a mixture, several draws.

    Raises:
        InvalidData: a tensor has another shape, or an extra one the name of an attribute.

    Example:
        >>> import torch
        >>> embedding = Embedding(torch.zeros(3, 8), torch.ones(3, 1), torch.tensor([.1, .2, .3]))
        >>> len(embedding), embedding[1:].uncertainty.tolist()
        (3, [0.20000000298023224, 0.30000001192092896])
        >>> list(Embedding(torch.zeros(3, 8), extra={"concentration": torch.ones(3, 1)}).tensors)
        ['vectors', 'concentration']
    """

    vectors: Tensor
    variance: Tensor | None = None
    uncertainty: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.vectors.ndim != 2:
            raise InvalidData(f"vectors has shape {tuple(self.vectors.shape)}; it must be (n, d)")
        n = len(self.vectors)
        if self.variance is not None and (self.variance.ndim != 2 or len(self.variance) != n):
            raise InvalidData(
                f"variance has shape {tuple(self.variance.shape)}; it must be ({n}, 1) or ({n}, d)"
            )
        if self.uncertainty is not None and self.uncertainty.shape != (n,):
            raise InvalidData(
                f"uncertainty has shape {tuple(self.uncertainty.shape)}; it must be ({n},)"
            )
        for name, values in self.extra.items():
            if name in ("vectors", "variance", "uncertainty", "extra"):
                raise InvalidData(f"extra holds {name!r}, which is an attribute: rename it")
            if values.ndim < 1 or len(values) != n:
                raise InvalidData(f"{name} has shape {tuple(values.shape)}; it must be ({n}, ...)")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return all parts by name."""
        names = ("vectors", "variance", "uncertainty")
        present = {name: v for name in names if (v := getattr(self, name)) is not None}
        return present | dict(self.extra)

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> Embedding:
        """Return the embedding that holds these `tensors`."""
        extra = dict(tensors)
        vectors = extra.pop("vectors")
        return Embedding(
            vectors, extra.pop("variance", None), extra.pop("uncertainty", None), extra
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return all parts by name, as arrays in the memory of this process."""
        return {name: values.cpu().numpy() for name, values in self.tensors.items()}

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> Embedding:
        """Return the embedding of these `arrays`."""
        import torch

        return Embedding.from_tensors(
            {name: torch.from_numpy(values) for name, values in arrays.items()}
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Embedding:
        """Return the embedding of changed tensors, whose rows belong to the same images."""
        return self.from_tensors({name: change(values) for name, values in self.tensors.items()})

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, rows: slice | Tensor | NDArray[Any]) -> Embedding:
        return self.map(lambda values: values[rows])

    @staticmethod
    def concatenate(parts: Sequence[Embedding]) -> Embedding:
        """Concatenate embeddings of one encoder; `InvalidData` if they have different parts."""
        import torch

        batches = [part.tensors for part in parts]
        if any(tensors.keys() != batches[0].keys() for tensors in batches):
            alternatives = " or ".join(sorted({", ".join(tensors) for tensors in batches}))
            raise InvalidData(f"embeddings of one encoder must have the same parts: {alternatives}")
        return Embedding.from_tensors(
            {name: torch.cat([tensors[name] for tensors in batches]) for name in batches[0]}
        )


convert(Embedding, Mapping[str, NDArray[Any]], Embedding.arrays, Embedding.from_arrays)


def as_numpy(values: Any) -> Any:
    """Return tensors and columns of other libraries as NumPy arrays, and all else unchanged.

    `InvalidData` if they are sparse, or a tensor without values.
    """
    if hasattr(values, "detach"):
        return _of_tensor(values)
    if hasattr(values, "toarray") and hasattr(values, "nnz"):
        raise InvalidData("the values are a sparse matrix of SciPy: pass values.toarray()")
    if hasattr(values, "column_names") and hasattr(values, "itercolumns"):  # an Arrow table
        return np.column_stack([as_numpy(column) for column in values.itercolumns()])
    if hasattr(values, "cast") and hasattr(values, "to_pylist"):  # an Arrow array, or its chunks
        chunks = values.combine_chunks() if hasattr(values, "combine_chunks") else values
        return chunks.to_numpy(zero_copy_only=False)
    if hasattr(values, "to_numpy"):
        return values.to_numpy()
    return values


def as_vectors(values: Any) -> NDArray[Any]:
    """Return a vector (d,) or vectors (n, d) of any library as an array of integers or floats.

    `InvalidData` if they are not real numbers, are sparse, or the rows differ in length.

    Example:
        >>> as_vectors([[1, 2], [3, 4]]).tolist()
        [[1, 2], [3, 4]]
        >>> as_vectors(["photo.png"])
        Traceback (most recent call last):
        rcir.errors.InvalidData: vectors are of type str: pass real numbers, as an array (n, d)
    """
    vectors = as_numpy(values)
    if np.ma.is_masked(vectors):  # masked values become NaN
        vectors = np.ma.filled(vectors.astype(np.float64), np.nan)
    dtypes = np.atleast_1d(getattr(values, "dtypes", np.empty(0))).tolist()  # of pandas
    numeric = bool(dtypes) and all(getattr(dtype, "kind", "O") in "fiu" for dtype in dtypes)
    if numeric and vectors.dtype.kind == "O":  # nullable types
        vectors = values.to_numpy(np.float64, na_value=np.nan)
    if not isinstance(vectors, np.ndarray):
        if hasattr(vectors, "__array__"):
            vectors = np.asarray(vectors)
        elif isinstance(vectors, str | bytes | Mapping) or not isinstance(vectors, Collection):
            raise _not_vectors(type(vectors).__name__)
    if not isinstance(vectors, np.ndarray) or vectors.dtype.kind == "O":
        vectors = _stacked([as_numpy(row) for row in vectors])
    if vectors.dtype.kind == "V" and vectors.dtype.names is None:  # bfloat16, for instance
        try:
            vectors = vectors.astype(np.float32)
        except (TypeError, ValueError):
            raise _not_vectors(str(vectors.dtype)) from None
    if vectors.dtype.kind not in "fiu":
        raise _not_vectors("str" if vectors.dtype.kind == "U" else str(vectors.dtype))
    if not vectors.ndim:
        raise _not_vectors("a number")
    return np.asarray(vectors)


def _of_tensor(tensor: Any) -> NDArray[Any]:
    """Return a PyTorch tensor of any type and device as an array."""
    if "strided" not in str(getattr(tensor, "layout", "strided")):
        raise InvalidData(f"the tensor is sparse ({tensor.layout}): pass tensor.to_dense()")
    try:
        try:
            array: NDArray[Any] = tensor.detach().cpu().numpy()
        except TypeError:  # NumPy has no bfloat16, nor floats of 8 bits
            array = tensor.detach().float().cpu().numpy()
    except (TypeError, RuntimeError) as error:
        raise InvalidData(f"the tensor cannot be converted ({error}): pass an array") from error
    return array


def _stacked(rows: list[Any]) -> NDArray[Any]:
    """Return rows of numbers, or numbers, as one array."""
    sizes = [-1 if row is None else np.size(row) if np.ndim(row) else 0 for row in rows]
    for row, size in enumerate(sizes):
        if size != sizes[0] or size < 0:
            what = "is missing" if size < 0 else f"has {size} numbers and row 0 has {sizes[0]}"
            raise InvalidData(f"row {row} of the vectors {what}: pass vectors of one length")
    try:
        array = np.asarray(rows)
    except ValueError as error:
        raise InvalidData(f"vectors are not an array (n, d) of numbers: {error}") from None
    if array.dtype.kind != "O":
        return array
    for kind in set(map(type, array.ravel().tolist())):
        if not issubclass(kind, (Real, Decimal, type(None))) or issubclass(kind, bool):
            raise _not_vectors(kind.__name__)
    return array.astype(np.float64)  # None becomes NaN


def _not_vectors(kind: str) -> InvalidData:
    return InvalidData(f"vectors are of type {kind}: pass real numbers, as an array (n, d)")
