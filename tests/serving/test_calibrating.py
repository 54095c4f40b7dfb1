"""Labelled feedback becomes the calibration queries, by an explicit command."""

from datetime import datetime

import numpy as np
import pytest

import rcir
from calibration import recalibrate
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData
from rcir.serving.sources import Folder
from rcir.serving.store import Store
from rcir.serving.terms import Feedback, Terms
from tests.serving.conftest import drawn

ALPHA, DELTA = 0.2, 0.1


def answered(retriever, place, file, vectors, labels):
    """Feedback with labels on answers of the retriever that lies at a place."""
    store = Store(file)
    queries = retriever.prepared(vectors).identified()
    answers = retriever.retrieve(vectors, ALPHA, DELTA)
    ids = store.add([(Folder(place).version(), Terms(alpha=ALPHA), queries, answers)])
    for own, answer, label in zip(ids, answers, labels.tolist(), strict=True):
        store.feed(Feedback(answer=own, match=label in answer.labels, label=label))
    store.close()


def risk_of(retriever, seed, noise):
    vectors, labels = drawn(6_000, seed, noise)
    answers = retriever.retrieve(vectors, ALPHA, DELTA)
    pairs = zip(answers, labels.tolist(), strict=True)
    return np.mean([label not in answer.labels for answer, label in pairs])


def test_queries_that_changed_are_certified_again(vectors, place, tmp_path):
    noise = 1.3  # calibrated at 0.9
    assert risk_of(vectors, 20, noise) > 1.3 * ALPHA
    file = tmp_path / "feedback.db"
    answered(vectors, place, file, *drawn(400, 21, noise))
    report = recalibrate(place, feedback=file)
    assert report.n_calibration == 400
    again = rcir.load(place)
    assert risk_of(again, 20, noise) <= ALPHA
    assert again.controller.score_function.name == "quantile"
    assert len(again.tuning_queries) == len(vectors.tuning_queries)
    # The answers were those of the retriever before; of this one nothing is labelled yet.
    with pytest.raises(InvalidData, match="no labelled feedback"):
        recalibrate(place, feedback=file)


@pytest.mark.slow
@pytest.mark.statistical
def test_the_guarantee_holds_over_calibrations_by_feedback(vectors, place, tmp_path):
    rounds = 40
    noise, risks = 1.3, []
    for seed in range(rounds):
        vectors.save(place)
        file = tmp_path / f"{seed}.db"
        answered(vectors, place, file, *drawn(300, 100 + seed, noise))
        recalibrate(place, feedback=file)
        risks.append(risk_of(rcir.load(place), 20, noise))
    # P(more violations than this at delta = 0.1) < 0.5%.
    assert sum(risk > ALPHA for risk in risks) <= 10
    assert np.mean(risks) > 0.7 * ALPHA  # not by sets that are too large


def test_a_file_that_is_not_there_is_named(place, tmp_path):
    with pytest.raises(DataUnavailable, match="serve --feedback"):
        recalibrate(place, feedback=tmp_path / "none.db")


def test_queries_that_are_not_new_are_left_out(vectors, place, tmp_path):
    asked, labels = drawn(300, 30)
    gallery, known = drawn(500, 1)
    twice = np.concatenate([asked, asked[:50], gallery[:20]])
    labelled = np.concatenate([labels, labels[:50], known[:20]])
    answered(vectors, place, tmp_path / "feedback.db", twice, labelled)
    assert recalibrate(place, feedback=tmp_path / "feedback.db").n_calibration == 300
    vectors.save(place)
    answered(vectors, place, tmp_path / "other.db", gallery[:20], known[:20])
    with pytest.raises(InvalidData, match="all labelled queries are of the gallery"):
        recalibrate(place, feedback=tmp_path / "other.db")


def test_queries_from_before_a_change_are_left_out(vectors, place, tmp_path):
    file = tmp_path / "feedback.db"
    answered(vectors, place, file, *drawn(200, 40))
    changed = datetime.now()
    answered(vectors, place, file, *drawn(300, 41, noise=1.3))
    assert recalibrate(place, feedback=file, since=changed).n_calibration == 300
    vectors.save(place)
    with pytest.raises(InvalidData, match=f"no labelled feedback on answers since {2100}"):
        recalibrate(place, feedback=file, since=datetime(2100, 1, 1))
    with pytest.raises(InvalidConfig, match="since is for the queries of feedback"):
        recalibrate(place, since=changed)
