"""Vectors of classes, for retrievers without an encoder, and files of vectors."""

import numpy as np
import pyarrow

from rcir.data.vector_files import MODEL_KEY, SHARDS_KEY, vector_table, write_tables


def draw_vectors(n, seed, classes=10, dim=6, noise=0.6):
    """Draw vectors (n, dim) around the centres of their classes, and (n,) the classes."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((classes, dim))
    labels = rng.integers(classes, size=n)
    vectors = centres[labels] + noise * rng.standard_normal((n, dim))
    return vectors.astype(np.float32), labels


def write_vectors(path, vectors, ids, columns, *, model, uncertainty=None, shards=1):
    """Write a file of vectors; ids, labels and numbers are lists or arrays."""
    arrays = {name: pyarrow.array(list(values)) for name, values in columns.items()}
    metadata = {MODEL_KEY: model} | ({SHARDS_KEY: str(shards)} if shards > 1 else {})
    write_tables(path, [vector_table(vectors, ids, arrays, uncertainty)], metadata)
