"""Validation of places asks the queries and searches the database, and nothing else."""

from dataclasses import replace

import numpy as np
import torch

from rcir.data import ImageSet
from rcir.data.within_radius import WithinRadius
from rcir.embedding import Embedding
from training.certification import fold_roles
from training.validation import validate


def street(n=60):
    """Every query stands 12 m from a database image; its four views are one place."""
    held = np.column_stack([np.arange(n) * 100.0, np.zeros(n)])
    asked = np.repeat(held + np.array([0.0, 12.0]), 4, axis=0)
    places = np.concatenate([held, asked])
    database = np.arange(len(places)) < n
    names = [str(number) for number in range(len(places))]
    relevance = WithinRadius(places, 25.0, 10.0, database)
    return ImageSet(np.zeros((len(places), 2, 2), np.uint8), None, names, {}, relevance)


def unit(vectors):
    return torch.nn.functional.normalize(torch.from_numpy(vectors), dim=1)


def test_views_of_the_own_place_that_ask_too_are_not_found():
    images = street()
    n = 60
    rng = np.random.default_rng(0)
    held = rng.normal(size=(n, 16)).astype(np.float32)
    own = rng.normal(size=(n, 16)).astype(np.float32)  # as far from the database as can be
    views = np.repeat(own, 4, axis=0) + rng.normal(size=(4 * n, 16)).astype(np.float32) * 1e-3
    vectors = unit(np.concatenate([held, views]))
    found = validate(Embedding(vectors), images)
    nearest = (vectors[n:] @ vectors[:n].T).argmax(1)
    expected = (nearest == torch.arange(n).repeat_interleave(4)).numpy()
    assert len(found.ranks) == len(found.uncertainty) == len(found.matched) == 4 * n
    np.testing.assert_array_equal(found.correct, expected)
    assert found.metrics()["validation/recall_at_1"] < 0.2
    # Among themselves every view finds another one of its place.
    plain = replace(images, relevance=WithinRadius(images.relevance.places, 25.0))
    assert validate(Embedding(vectors), plain).correct[n:].all()


def test_folds_search_the_database_and_measure_every_query_once():
    images = street()
    roles = fold_roles(images)
    assert len(roles) == 3
    for role in roles:
        np.testing.assert_array_equal(role.searched, np.arange(60))
        asked = np.concatenate([role.tuning, role.calibration, role.measured])
        assert sorted(asked.tolist()) == list(range(60, 300))
    measured = np.concatenate([role.measured for role in roles])
    assert sorted(measured.tolist()) == list(range(60, 300))
