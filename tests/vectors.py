"""Vectors of classes, for retrievers without an encoder."""

import numpy as np


def draw_vectors(n, seed, classes=10, dim=6, noise=0.6):
    """Draw vectors (n, dim) around the centres of their classes, and (n,) the classes."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((classes, dim))
    labels = rng.integers(classes, size=n)
    vectors = centres[labels] + noise * rng.standard_normal((n, dim))
    return vectors.astype(np.float32), labels
