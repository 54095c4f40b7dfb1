"""Writing vectors of pictures as a Parquet file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.files import write_file

SOURCE = "rcir.source"  # in the metadata: a digest of what the vectors were made of


def write_vectors(
    path: Path,
    vectors: NDArray[np.float32],
    ids: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    uncertainty: NDArray[np.float64] | None,
    model: str,
    shards: int = 1,
    source: str | None = None,
) -> None:
    """Write vectors of pictures, with what is known of each, as one Parquet file or not at all.

    Columns: ``id`` (string), ``vector`` (fixed_size_list of d float32), ``uncertainty`` (float64)
    if there is one, then the others: ``label`` (string), ``labels`` (list of string), ``x`` and
    ``y`` (float64), any other as its values are. The schema's metadata names the model as
    ``rcir.model``, and the number of files as ``rcir.shards`` where there are several.

    Args:
        path: of the file; one that is there is replaced.
        vectors: (n, d), of unit length.
        ids: n names.
        columns: further columns by name, n values each; None where a value is not known.
        uncertainty: (n,), larger is less certain; None from an encoder that states none.
        model: what made the vectors; those of another model are not compared with these.
        shards: number of files that these vectors and others are written to, see
            `rcir.data.vector_shards`.
        source: a digest of what they were made of, which goes into the metadata as
            ``rcir.source``.

    Raises:
        InvalidData: columns differ in length, or one has the name of those above.

    Example:
        >>> import tempfile
        >>> import pyarrow.parquet
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "vectors.parquet")
        ...     one = np.array([[0.6, 0.8]], np.float32)
        ...     write_vectors(path, one, ["1.jpg"], {"label": ["pear"]}, None, "timm:resnet18@1f")
        ...     pyarrow.parquet.read_table(path).to_pylist()
        [{'id': '1.jpg', 'vector': [0.6000000238418579, 0.800000011920929], 'label': 'pear'}]
    """
    import pyarrow
    from pyarrow import parquet

    n, d = vectors.shape
    lengths = {"ids": len(ids)} | {name: len(values) for name, values in columns.items()}
    if uncertainty is not None:
        lengths["uncertainty"] = len(uncertainty)
    for name, length in lengths.items():
        if length != n:
            raise InvalidData(f"{n} vectors but {length} values of {name}: give one each")
    if taken := sorted({"id", "vector", "uncertainty"} & columns.keys()):
        raise InvalidData(f"column {taken[0]!r} is written by itself: rename it")
    flat = pyarrow.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
    arrays = {
        "id": pyarrow.array(list(ids), pyarrow.string()),
        "vector": pyarrow.FixedSizeListArray.from_arrays(flat, d),
    }
    if uncertainty is not None:
        arrays["uncertainty"] = pyarrow.array(np.asarray(uncertainty, np.float64))
    text, number = pyarrow.string(), pyarrow.float64()
    types = {"label": text, "labels": pyarrow.list_(text), "x": number, "y": number}
    arrays |= {
        name: pyarrow.array(list(values), types.get(name)) for name, values in columns.items()
    }
    said = {"rcir.model": model} | ({"rcir.shards": str(shards)} if shards > 1 else {})
    said |= {} if source is None else {SOURCE: source}
    table = pyarrow.table(arrays).replace_schema_metadata(said)
    buffer = pyarrow.BufferOutputStream()
    parquet.write_table(table, buffer)
    write_file(path, buffer.getvalue().to_pybytes())
