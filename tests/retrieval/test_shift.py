"""Calibration for an unlabelled target population."""

from copy import copy

import numpy as np
import pytest

import rcir
from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from tests.vectors import draw_vectors

CLASSES, DIM = 20, 8


def draw(n, seed, noise=0.9):
    return draw_vectors(n, seed, classes=CLASSES, dim=DIM, noise=noise)


@pytest.fixture(scope="module")
def target():
    """Queries that were chosen by their distance from the gallery alone: far ones more often."""
    vectors = draw(3000, 4)[0]
    distance = nearest(make(), vectors)
    odds = np.exp(1.5 * (distance - np.median(distance)) / distance.std())
    return vectors[np.random.default_rng(0).uniform(size=3000) < odds / (1 + odds)]


def make():
    gallery, labels = draw(500, 1)
    return rcir.Retriever.from_embeddings(gallery, labels=labels)


def nearest(retriever, queries):
    return retriever.search(queries).distances[:, 0]


@pytest.fixture(scope="module")
def calibrated(target):
    made = make()
    made.calibrate(*draw(1200, 2), score_function="quantile", target=target)
    return made


def test_the_queries_that_are_kept_resemble_the_target(calibrated, target):
    shift = calibrated.calibration.shift
    queries = (calibrated.calibration.calibration_queries, draw(1200, 2)[0], target)
    kept, source, wanted = (nearest(calibrated, each) for each in queries)
    spread = wanted.std() / np.sqrt(len(kept))
    assert abs(kept.mean() - wanted.mean()) < 4 * spread < wanted.mean() - source.mean()
    assert (shift.n_target, shift.n_labelled, shift.n_kept) == (len(target), 840, len(kept))
    assert set(shift.features) == {"cosine", "gap", "vote", "distance"}
    assert 0 < shift.overlap < 1


def test_the_guarantee_names_target_and_assumption_and_is_stored(calibrated, tmp_path):
    loaded = rcir.load(copy(calibrated).save(tmp_path / "shifted"))
    sentence = str(loaded.guarantee(0.3, 0.1))
    assert str(loaded.calibration.shift) in sentence
    assert "target population" in sentence
    n_kept = loaded.calibration.shift.n_kept
    loaded.add(draw(5, 9)[0], [f"new {n}" for n in range(5)], labels=draw(5, 9)[1])
    assert str(loaded.calibration.shift) in str(loaded.recalibrate())
    assert len(loaded.calibration.calibration_queries) == n_kept


def test_what_is_undefined_for_a_target_is_refused(calibrated):
    with pytest.raises(InvalidConfig, match="target"):
        calibrated.guarantee(0.3, 0.1, query_labels="new")
    with pytest.raises(InvalidData, match="target"):
        copy(calibrated).extend_calibration(*draw(5, 8))
    with pytest.raises(InvalidConfig, match="ratio"):
        calibrated.query_monitor()
    with pytest.raises(RiskUnattainable):
        calibrated.guarantee(0.001, 0.1)


@pytest.mark.parametrize(
    ("error", "word", "options"),
    [
        (InvalidConfig, "tuning", {"tuning": "gallery"}),
        (InvalidConfig, "clusters", {"clusters": np.arange(1200) // 2}),
        (InvalidConfig, "probabilities", {"probabilities": np.full((1200, CLASSES), 1 / CLASSES)}),
        (InvalidData, "uncertainties", {"uncertainty": np.ones(1200)}),
        (InvalidData, "outside", {"target": draw(200, 5, noise=4.0)[0]}),
        (InvalidData, "at least 50", {"target": draw(20, 5)[0]}),
        (InvalidData, "labelled", {"target": draw(1200, 2)[0]}),
    ],
)
def test_unsuitable_queries_are_refused(target, error, word, options):
    with pytest.raises(error, match=word):
        make().calibrate(*draw(1200, 2), **({"target": target} | options))


def test_gallery_items_are_refused(target):
    vectors, labels = draw(600, 1)
    made = rcir.Retriever.from_embeddings(vectors, labels=labels, leave_one_out=True)
    with pytest.raises(InvalidConfig, match="gallery items"):
        made.calibrate(vectors, labels, target=target)
    made.calibrate(vectors, labels, score_function="quantile")
    with pytest.raises(InvalidConfig, match="gallery items"):
        made.query_monitor()
