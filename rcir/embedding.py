"""The embedding of images that every encoder returns, and arrays of other libraries as NumPy's.

Vectors, labels, ids and uncertainties may be NumPy arrays, lists, PyTorch tensors on any device,
columns or frames of pandas, and Arrow arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData

if TYPE_CHECKING:  # what needs no encoder needs no torch
    from torch import Tensor


@dataclass(frozen=True)
class Embedding:
    """Embeddings of a batch of images, with what the encoder knows of its own uncertainty.

    Moving, gathering, slicing, joining and storing an embedding go through `map` or `tensors`, with
    all that it holds.

    Attributes:
        vectors: (n, d) float32; what is indexed and searched by L2 distance.
        variance: (n, 1) for an isotropic, (n, d') for a per-dimension variance, larger than or
            equal to 0; None for an encoder without one. A deep ensemble ranks by the joint vector
            of its members and states one variance per image.
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
        present = {
            "vectors": self.vectors,
            "variance": self.variance,
            "uncertainty": self.uncertainty,
        }
        return {name: values for name, values in present.items() if values is not None} | dict(
            self.extra
        )

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> Embedding:
        """The embedding that holds these `tensors`."""
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
        """The embedding of these `arrays`."""
        import torch

        return Embedding.from_tensors(
            {name: torch.from_numpy(values) for name, values in arrays.items()}
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Embedding:
        """The embedding of each changed tensor; their rows stay those of the same images."""
        return self.from_tensors({name: change(values) for name, values in self.tensors.items()})

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, rows: slice | Tensor | NDArray[Any]) -> Embedding:
        return self.map(lambda values: values[rows])

    @staticmethod
    def concatenate(parts: Sequence[Embedding]) -> Embedding:
        """The embeddings of several batches of one encoder, one after the other.

        Raises:
            InvalidData: they do not all hold the same.
        """
        import torch

        tensors = [part.tensors for part in parts]
        if any(each.keys() != tensors[0].keys() for each in tensors):
            alternatives = " or ".join(sorted({", ".join(each) for each in tensors}))
            raise InvalidData(
                f"embeddings of one encoder hold {alternatives}: each must hold the same"
            )
        return Embedding.from_tensors(
            {name: torch.cat([each[name] for each in tensors]) for name in tensors[0]}
        )


def as_numpy(values: Any) -> Any:
    """Return tensors and columns of other libraries as NumPy arrays, and all else unchanged.

    Example:
        >>> import pyarrow as pa
        >>> as_numpy(pa.array(["pear", "fig"])).tolist(), as_numpy([1, 2])
        (['pear', 'fig'], [1, 2])
    """
    if hasattr(values, "detach"):  # a PyTorch tensor; NumPy has no bfloat16
        tensor = values.detach().cpu()
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if hasattr(values, "column_names") and hasattr(values, "itercolumns"):  # an Arrow table
        return np.column_stack([as_numpy(column) for column in values.itercolumns()])
    if hasattr(values, "cast") and hasattr(values, "to_pylist"):  # an Arrow array, or its chunks
        chunks = values.combine_chunks() if hasattr(values, "combine_chunks") else values
        return chunks.to_numpy(zero_copy_only=False)
    if hasattr(values, "to_numpy"):
        return values.to_numpy()
    return values


def as_vectors(values: Any) -> NDArray[Any] | None:
    """Return real numbers as an array (d,) or (n, d); None if they are anything else.

    Whole numbers are accepted from lists, frames and tensors, but not from a NumPy array, which may
    be an image.

    Args:
        values: a vector, or vectors as an array, a list, a tensor, a frame or a column of lists.

    Example:
        >>> as_vectors([[1, 2], [3, 4]]).tolist(), as_vectors(["photo.png"])
        ([[1.0, 2.0], [3.0, 4.0]], None)
    """
    vectors = as_numpy(values)
    if not isinstance(vectors, np.ndarray) or vectors.dtype.kind == "O":
        if not isinstance(vectors, list | tuple | np.ndarray):
            return None
        try:
            vectors = np.asarray([as_numpy(each) for each in vectors])
        except ValueError:  # of different lengths
            return None
    if vectors.dtype.kind in "iu" and vectors is not values:
        vectors = vectors.astype(np.float32)
    return vectors if vectors.dtype.kind == "f" and vectors.ndim in (1, 2) else None
