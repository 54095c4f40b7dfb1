"""Arrays of other libraries, converted to NumPy where they enter.

Vectors, labels, ids and uncertainties may be NumPy arrays, lists, PyTorch tensors on any device,
columns or frames of pandas, and Arrow arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


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
