"""A fusion has to be fitted on experts that did not see the items it is fitted on."""

from dataclasses import replace

import numpy as np

from rcir.label_model import Items, LabelModel
from rcir.risk.fusion import Fusion

L, D, PER_LABEL = 20, 60, 4


def nearest(queries, vectors, own=None):
    distances = np.linalg.norm(queries[:, None] - vectors, axis=2)
    if own is not None:
        distances[np.arange(len(queries)), own] = np.inf
    return np.argsort(distances, axis=1)[:, :50]


def query_loss(model, items, vectors, queries, labels):
    """Mean negative log likelihood of the labels of queries."""
    logs = model.log_probabilities(items, queries, nearest(queries, vectors))
    return -logs[np.arange(len(queries)), labels].mean()


def test_experts_that_saw_the_items_they_are_weighted_on_become_too_certain():
    """With hardly more items than dimensions, discriminants fit their own items too well."""
    held_out, seen = [], []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        means = 0.35 * rng.normal(size=(L, D))
        labels = np.repeat(np.arange(L), PER_LABEL)
        vectors, queries = (
            (means[y] + rng.normal(size=(len(y), D))).astype(np.float32)
            for y in (labels, np.repeat(np.arange(L), 20))
        )
        items = Items(labels, np.arange(len(labels)), vectors.__getitem__)
        rows = np.arange(len(labels))
        model = LabelModel.fit(items, rows, nearest(vectors, vectors, rows))
        blocks = model._experts(items, vectors, nearest(vectors, vectors, rows))
        experts = np.concatenate([block for _, block in blocks], axis=1)
        broken = replace(model, fusion=Fusion.fit(experts, labels[:, None] == np.arange(L)))
        right = np.repeat(np.arange(L), 20)
        held_out.append(query_loss(model, items, vectors, queries, right))
        seen.append(query_loss(broken, items, vectors, queries, right))
    assert max(held_out) < np.log(L)
    assert np.min(np.subtract(seen, held_out)) > 0.15  # nats; .29 to .37 were measured
