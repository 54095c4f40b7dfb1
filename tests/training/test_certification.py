"""Certified sizes of the validation images, counted one by one; who plays which role in them."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest

from rcir.data import ImageSet
from rcir.data.relevance import SharedLabel
from rcir.data.within_radius import WithinRadius
from rcir.risk.score_functions import Constant
from tests.training.helpers import match_rank_bounds
from training import certification
from training.certification import certify_folds, fold_roles

QUERIES = ("tuning", "calibration", "measured")


def draw(n, seed=0):
    """Images of six labels and what an encoder may say of them: clusters, and who is unsure."""
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
    """The images of these labels, matching as one kind does; and whether two of them match."""
    if kind == "labels":
        return pictures(labels), lambda a, b: labels[a] == labels[b]
    if kind == "places":
        where = np.stack([10.0 * labels, np.arange(len(labels)) % 7], axis=1)
        near = WithinRadius(where, 3.0)
        return pictures(labels, near), lambda a, b: np.hypot(*(where[a] - where[b])) <= 3
    lists = [[label, (label + 1) % 6] if label < 2 else [label] for label in labels]
    shared = SharedLabel.of_lists(lists, 6)
    return pictures(labels, shared), lambda a, b: bool({*lists[a]} & {*lists[b]})


@pytest.mark.parametrize("kind", ["labels", "places", "shared"])
@pytest.mark.parametrize("n", [41, 400])
def test_each_image_is_searched_once_and_is_a_query_where_something_matches_it(n, kind):
    images, match = alike(kind, draw(n)[2].labels)
    found = fold_roles(images)
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


def test_each_label_is_dealt_to_all_quarters_alike_and_at_random():
    images = pictures(np.repeat(np.arange(50), np.arange(50) % 9 + 1))
    found = fold_roles(images)
    counts = [Counter(images.labels[roles.searched].tolist()) for roles in found]
    for label in range(50):
        each = [count[label] for count in counts]
        assert max(each) - min(each) <= 1
    # Labels with one image each are not all in the same fold.
    alone = [sum(count[label] for label in range(0, 50, 9)) for count in counts]
    assert max(alone) < 6
    # No fold is a stretch of the images.
    assert all(np.ptp(roles.searched) > 150 for roles in found)


def test_neighbours_in_the_set_may_be_in_the_same_quarter():
    """As they are not if the images of a label are dealt in their order."""
    found = fold_roles(pictures(np.zeros(400, np.int64)))
    assert [len(roles.searched) for roles in found] == [100] * 4
    fold = np.empty(400, np.int64)
    for number, roles in enumerate(found):
        fold[roles.searched] = number
    assert np.mean(fold[1:] == fold[:-1]) == pytest.approx(0.25, abs=0.1)


def test_images_that_nothing_matches_are_searched_but_never_ask():
    labels = np.r_[np.repeat(np.arange(6), 20), 100 + np.arange(40)]
    found = fold_roles(pictures(labels))
    assert sum(len(roles.searched) for roles in found) == 160
    for roles in found:
        assert (labels[np.r_[roles.tuning, roles.calibration, roles.measured]] < 100).all()


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0] * 7, 0),
        ([0] * 8, 4),
        (range(100), 0),  # no two match
        ([0] * 3, 0),
    ],
)
def test_of_too_few_images_nothing_is_certified(labels, expected):
    images = pictures(np.array(labels))
    assert len(fold_roles(images)) == expected
    vectors = np.eye(4, dtype=np.float32)[np.arange(len(images)) % 4]
    assert len(certify_folds(vectors, None, images)) == expected


@pytest.mark.parametrize("kind", ["labels", "places", "shared"])
@pytest.mark.parametrize("n", [41, 199, 1000])
def test_scores_are_those_of_a_brute_force_search(n, kind, monkeypatch):
    """With a constant score function, a score is the rank of the first match, less one."""
    monkeypatch.setattr(certification, "fit_score_function", lambda *_: (Constant(), {}))
    vectors, uncertainty, images = draw(n)
    images, match = alike(kind, images.labels)
    parts = certify_folds(vectors, uncertainty, images)
    assert len(parts) == 4
    exact, bounds, scores = vectors.astype(np.float64), [], []
    for part, roles in zip(parts, fold_roles(images), strict=True):
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


def test_few_images_get_a_constant_score_function():
    vectors, uncertainty, images = draw(180)  # fewer than 50 fit the score function
    for part, roles in zip(
        certify_folds(vectors, uncertainty, images), fold_roles(images), strict=True
    ):
        assert len(roles.tuning) < 50
        expected = np.tile(np.arange(len(roles.searched)), (len(roles.measured), 1))
        np.testing.assert_array_equal(part.candidate_scores, expected)


class Witness(Constant):
    """Notes who is priced, by uncertainty, which no two images share."""

    def __init__(self, fitted):
        self.seen = {"tuning": fitted.uncertainty}

    def scores(self, results, ranks):
        self.seen["calibration"] = results.uncertainty
        self.seen["searched"] = np.unique(results.candidate_uncertainty)
        return np.zeros(len(results), np.float32)

    def candidate_scores(self, results):
        self.seen["measured"] = results.uncertainty
        assert {*results.candidate_uncertainty.ravel()} == {*self.seen["searched"]}
        return np.zeros((len(results), results.depth), np.float32)


@pytest.mark.parametrize("n", [63, 400])
def test_each_quarter_does_what_it_is_for_and_nothing_else(n, monkeypatch):
    vectors, _, images = draw(n)
    witnesses = []

    def fit(name, results, ranks):
        assert name == "auto"
        witnesses.append(Witness(results))
        return witnesses[-1], {}

    monkeypatch.setattr(certification, "fit_score_function", fit)
    certify_folds(vectors, np.arange(n) + 0.5, images)
    for witness, roles in zip(witnesses, fold_roles(images), strict=True):
        for name in ("searched", *QUERIES):
            expected = sorted(getattr(roles, name) + 0.5)
            assert sorted(witness.seen[name]) == expected


@pytest.mark.parametrize("stated", [True, False])
def test_an_image_has_no_part_in_what_sizes_it(stated):
    """Wherever it is embedded, what others are given stays as it is."""
    vectors, uncertainty, images = draw(
        260
    )  # enough to fit a score function that is not the simplest
    given = uncertainty if stated else None
    before = certify_folds(vectors, given, images)
    assert any(len(np.unique(part.candidate_scores[:, 1])) > 1 for part in before)
    for turn, (part, roles) in enumerate(zip(before, fold_roles(images), strict=True)):
        moved = vectors.copy()
        moved[roles.measured[7]] *= -1
        after = certify_folds(moved, given, images)[turn]
        np.testing.assert_array_equal(after.scores, part.scores)
        others = np.arange(len(part.candidate_scores)) != 7
        np.testing.assert_array_equal(after.candidate_scores[others], part.candidate_scores[others])


def test_where_an_image_calibrates_only_its_own_score_depends_on_it(monkeypatch):
    monkeypatch.setattr(certification, "fit_score_function", lambda *_: (Constant(), {}))
    vectors, uncertainty, images = draw(80)
    before = certify_folds(vectors, uncertainty, images)[0]
    row = int(np.argmin(before.scores))
    moved = vectors.copy()
    moved[fold_roles(images)[0].calibration[row]] *= -1
    after = certify_folds(moved, uncertainty, images)[0]
    assert after.scores[row] > before.scores[row] == 0
    np.testing.assert_array_equal(np.delete(after.scores, row), np.delete(before.scores, row))
