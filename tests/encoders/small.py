"""Small encoders with weights by a seed, images for them, and what their tests share."""

import numpy as np
import torch

from rcir.data import Preprocessing
from rcir.encoders import EmbeddedTuples, build_encoder
from rcir.encoders.batches import embed
from rcir.retrieval.retriever import Retriever


def build(config, *, seed=0, channels=1, size=(8, 16)):
    """An encoder whose weights are drawn by the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_encoder(config, channels, size)


def pictures(n=6, *, seed=1, channels=1, size=(8, 16)):
    return torch.rand(n, channels, *size, generator=generator(seed))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def as_tuples(embedding, negatives=1):
    """Tuples of all images of an embedding, with so many negatives that all count."""
    n = len(embedding) // (2 + negatives)
    return EmbeddedTuples(embedding, torch.ones(n, negatives, dtype=torch.bool))


def check_ranking(encoder, splits, distances, *, queries=20, decides=True, rtol=1e-4):
    """Compare a search with `distances` of embeddings, (queries, items), in double precision.

    With `decides`, the ranking differs from that of the vectors.
    """
    images = splits.test.images[:queries], splits.gallery.images
    query, item = (
        embed(encoder, Preprocessing(), part).map(torch.Tensor.double) for part in images
    )
    expected = np.asarray(distances(query, item))
    retriever = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=300)
    results = retriever.search(images[0])
    np.testing.assert_allclose(results.distances, np.sort(expected, axis=1), rtol=rtol)
    chosen = np.take_along_axis(expected, results.positions, axis=1)
    np.testing.assert_allclose(results.distances, chosen, rtol=rtol)
    plain = torch.cdist(query.vectors, item.vectors).argsort(dim=1).numpy()
    assert ((results.positions != plain).mean() > 0.1) == decides
