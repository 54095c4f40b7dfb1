"""Votes of the first candidates, against loops over pairs; and what they are worth."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial import cKDTree

from rcir.data import votes as module
from rcir.data.relevance import SameLabel, SharedLabel
from rcir.data.votes import count_matches
from rcir.data.within_radius import WithinRadius
from rcir.risk import LabelledResults, MatchProbability, Request, RiskController, SearchResults
from rcir.risk.keys import VOTERS, count_votes

LABELS = [sorted({i % 7, i % 5 + 7} if i % 4 else set()) for i in range(60)]
PLACES = np.random.default_rng(1).uniform(0, 30, (60, 2))
KINDS = {
    "same": (SameLabel(np.arange(60) % 9), lambda i, j: i % 9 == j % 9),
    "shared": (SharedLabel.of_lists(LABELS, 12), lambda i, j: bool({*LABELS[i]} & {*LABELS[j]})),
    "places": (
        WithinRadius(PLACES, 8.0),
        lambda i, j: float(np.hypot(*(PLACES[i] - PLACES[j]))) <= 8,
    ),
}


def searched(n=17, depth=12):
    rng = np.random.default_rng(2)
    positions = np.array([rng.permutation(60)[:depth] for _ in range(n)])
    positions[::3, 7:], positions[1, 2:] = -1, -1
    return positions


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("among", [1, 5, 30])
@pytest.mark.parametrize("pairs", [1, 100, 2**16])
def test_votes_are_counted_as_a_loop_counts_them(kind, among, pairs, monkeypatch):
    monkeypatch.setattr(module, "PAIRS_TOGETHER", pairs)
    gallery, match = KINDS[kind]
    positions = searched()
    expected = [
        [sum(match(i, j) for j in row[:among] if j >= 0) if i >= 0 else 0 for i in row]
        for row in positions.tolist()
    ]
    assert count_matches(gallery, positions, among).tolist() == expected


def test_of_labels_the_votes_are_those_of_keys():
    gallery, positions = KINDS["same"][0], searched()
    keys = np.where(positions >= 0, gallery.labels[positions], -1)
    expected = np.where(positions >= 0, count_votes(keys), 0)
    np.testing.assert_array_equal(count_matches(gallery, positions, VOTERS), expected)


def test_nothing_is_counted_of_no_queries():
    for gallery, _ in KINDS.values():
        assert count_matches(gallery, np.zeros((0, 4), int), 3).shape == (0, 4)


def streets(n, seed, world):
    """Queries of places: near in the embedding are views of the place, and of one that looks so."""
    places, looks = world
    rng = np.random.default_rng(seed)
    target = rng.integers(len(places), size=n)
    where = places[target] + rng.normal(scale=3.0, size=(n, 2))
    noise = rng.gamma(1.0, size=(n, 1))
    seen = looks[target] + 0.2 * noise * rng.normal(size=(n, looks.shape[1]))
    distances, positions = cKDTree(looks).query(seen, k=60)
    results = SearchResults(
        distances[:, 0] ** 2 / 2, 60, distances, votes=None, positions=positions
    )
    gallery, queries = WithinRadius(places, 25.0), WithinRadius(where, 25.0)
    labelled = LabelledResults.of(results, queries.of(gallery, positions), queries.totals(gallery))
    return labelled, count_matches(gallery, positions, VOTERS)


def test_votes_make_the_sets_of_places_smaller_and_better():
    """1,000 calibration queries of places that look more, or less, alike from all sides."""
    rng = np.random.default_rng(0)
    places = np.repeat(rng.uniform(0, 4000, (300, 2)), 8, axis=0) + rng.normal(size=(2400, 2)) * 6
    spread = np.repeat(rng.choice([0.2, 1.2], 300), 8)[:, None]
    looks = np.repeat(rng.normal(size=(300, 6)), 8, axis=0) + spread * rng.normal(size=(2400, 6))
    parts = [streets(n, seed, (places, looks)) for n, seed in ((800, 1), (1000, 2), (1000, 3))]
    sizes, found = {}, {}
    for used in (False, True):
        tuning, calibration, test = (
            replace(labelled, votes=votes if used else None) for labelled, votes in parts
        )
        score_function = MatchProbability.fit(tuning, tuning.relevant)
        controller = RiskController(score_function, tuning, calibration)
        scored = test.scored(score_function)
        half = controller.decide(Request(0.5, 0.1, "recall")).threshold
        sizes[used] = scored.sizes(half).mean()
        wrong = controller.decide(Request(0.5, 0.1, "false-discovery")).threshold
        found[used] = scored.held(np.array([wrong]), scored.relevant).mean()
    assert sizes[True] < 0.9 * sizes[False]  # 45.3 against 53.0
    assert found[True] > 1.05 * found[False]  # 3.94 against 3.68 true matches
