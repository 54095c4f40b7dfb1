"""Certified sizes of the validation images: their folds, and scores by brute force."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest

from rcir.data import ImageSet
from rcir.data.relevance import SharedLabel, WithinRadius
from rcir.risk import Constant
from tests.training.helpers import match_rank_bounds
from training import validation
from training.validation import assign_fold_roles, certify_folds

QUERIES = ("tuning", "calibration", "measured")


def draw(n, seed=0):
    """Vectors in clusters, uncertainties, and images of six labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 6, n)
    noise = rng.gamma(1.0, size=n)
    vectors = rng.normal(size=(6, 4))[labels] + noise[:, None] * rng.normal(size=(n, 4)) * 0.5
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32), noise, pictures(labels)


def pictures(labels, relevance=None):
    n = len(labels)
    pixels, ids = np.zeros((n, 1, 1), np.uint8), [str(number) for number in range(n)]
    return ImageSet(pixels, labels if relevance is None else None, ids, relevance=relevance)


def alike(kind, labels):
    """Images of these labels with one kind of relevance, and a function that says if two match."""
    if kind == "labels":
        return pictures(labels), lambda a, b: labels[a] == labels[b]
    if kind == "places":
        where = np.stack([10.0 * labels, np.arange(len(labels)) % 7], axis=1)
        near = WithinRadius(where, 3.0)
        return pictures(labels, near), lambda a, b: np.hypot(*(where[a] - where[b])) <= 3
    lists = [[label, (label + 1) % 6] if label < 2 else [label] for label in labels]
    shared = SharedLabel.from_lists(lists, 6)
    return pictures(labels, shared), lambda a, b: bool({*lists[a]} & {*lists[b]})


@pytest.mark.parametrize(("n", "kind"), [(41, "labels"), (200, "places"), (41, "shared")])
def test_each_image_is_searched_once_and_is_a_query_where_something_matches_it(n, kind):
    images, match = alike(kind, draw(n)[2].labels)
    found = assign_fold_roles(images)
    folds = [{*roles.searched.tolist()} for roles in found]
    assert sorted(chain(*folds)) == list(range(n))
    assert max(map(len, folds)) - min(map(len, folds)) <= (6 if kind == "labels" else 1)
    measured = list(chain(*(roles.measured for roles in found)))
    assert len(measured) == len({*measured})
    for turn, roles in enumerate(found):
        for number, name in enumerate(QUERIES, start=1):
            queries = getattr(roles, name).tolist()
            assert len(queries) == len({*queries})
            assert {*queries} == {
                image
                for image in folds[(turn + number) % 4]
                if any(match(image, other) for other in folds[turn])
            }


def test_each_label_is_divided_evenly_and_at_random_among_the_folds():
    images = pictures(np.repeat(np.arange(50), np.arange(50) % 9 + 1))
    found = assign_fold_roles(images)
    counts = [Counter(images.labels[roles.searched].tolist()) for roles in found]
    for label in range(50):
        each = [count[label] for count in counts]
        assert max(each) - min(each) <= 1
    # Labels with one image each are not all in the same fold.
    alone = [sum(count[label] for label in range(0, 50, 9)) for count in counts]
    assert max(alone) < 6
    # No fold is a stretch of the images.
    assert all(np.ptp(roles.searched) > 150 for roles in found)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0] * 7, 0),
        ([0] * 8, 4),
        (range(100), 0),  # no two match
        ([0] * 3, 0),
    ],
)
def test_too_few_images_certify_nothing(labels, expected):
    images = pictures(np.array(labels))
    assert len(assign_fold_roles(images)) == expected
    vectors = np.eye(4, dtype=np.float32)[np.arange(len(images)) % 4]
    assert len(certify_folds(vectors, None, images)) == expected


@pytest.mark.parametrize(
    ("n", "kind"),
    [(41, "places"), (199, "shared"), (1000, "labels")],
)
def test_scores_are_those_of_a_brute_force_search(n, kind, monkeypatch):
    """With a constant score function, a score is the rank of the first match, less one."""
    monkeypatch.setattr(validation, "fit_score_function", lambda *_: (Constant(), {}))
    vectors, uncertainty, images = draw(n)
    images, match = alike(kind, images.labels)
    parts = certify_folds(vectors, uncertainty, images)
    assert len(parts) == 4
    exact, bounds, scores = vectors.astype(np.float64), [], []
    for part, roles in zip(parts, assign_fold_roles(images), strict=True):
        depth = min(200, len(roles.searched))
        for query in roles.calibration:
            distances = np.square(exact[roles.searched] - exact[query]).sum(1)
            matches = np.array([bool(match(one, query)) for one in roles.searched])
            bounds.append(match_rank_bounds(distances, matches, 1e-6))
        scores += [*np.where(part.scores < depth, part.scores, depth)]
        expected = np.tile(np.arange(depth), (len(roles.measured), 1))
        np.testing.assert_array_equal(part.candidate_scores, expected)
    lowest, highest = np.minimum(np.array(bounds).T - 1, depth)
    assert np.mean(lowest == highest) > 0.9
    assert ((lowest <= scores) & (scores <= highest)).all()


@pytest.mark.parametrize("stated", [True, False])
def test_an_image_changes_only_what_its_role_allows(stated):
    """Scores of others do not depend on an image that is measured or calibrates."""
    vectors, uncertainty, images = draw(260)  # enough to fit more than a constant
    uncertainty, roles = uncertainty if stated else None, assign_fold_roles(images)[1]
    part = certify_folds(vectors, uncertainty, images)[1]
    assert len(np.unique(part.candidate_scores[:, 1])) > 1
    for name, row in (("tuning", slice(None)), ("calibration", 7), ("measured", 7)):
        moved = vectors.copy()
        moved[getattr(roles, name)[row]] *= -1
        after = certify_folds(moved, uncertainty, images)[1]
        changed = after.scores != part.scores, (after.candidate_scores != part.candidate_scores)
        rows = [np.flatnonzero(each.reshape(len(each), -1).any(1)).tolist() for each in changed]
        if name == "tuning":  # it fits the score function
            assert len(rows[0]) > 1 < len(rows[1])
        else:
            assert rows == ([[7], []] if name == "calibration" else [[], [7]])
