"""The same query again: alone or in a batch, on one thread or two, rounded differently."""

from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch

from rcir.data import Preprocessing
from rcir.encoders import EncoderConfig, build_encoder
from rcir.errors import InvalidData
from rcir.retrieval.retriever import Retriever
from rcir.risk import SCORE_FUNCTIONS, fit_score_function
from rcir.risk.results import TOLERANCE
from tests.retrieval.retrievers import build, calibrate, guarantee, missed, plain, retrieve
from tests.retrieval.whole_numbers import CALIBRATION, DELTA, TUNING, Part


def rounded(part, share):
    """The same queries, with uncertainties that differ by a share."""
    return Part(part.vectors, part.labels, part.uncertainty * (1 + share))


@pytest.mark.parametrize("score_function", ["minmax", "quantile", "learned", "auto"])
def test_queries_that_decide_the_threshold_are_served_when_they_are_rounded(score_function):
    own = calibrate(build(depth=40), score_function, groups=False)
    served = 0
    for alpha in (0.1, 0.2, 0.3, 0.4, 0.5):
        answers = retrieve(own, alpha, part=CALIBRATION)
        last = [
            answer.labels.index(label) == answer.size - 1 if label in answer.labels else False
            for answer, label in zip(answers, CALIBRATION.labels.tolist(), strict=True)
        ]
        edge = CALIBRATION[np.flatnonzero(last)]
        served += len(edge)
        for share in (-1e-6, 1e-6):
            part = rounded(edge, share)
            assert not missed(retrieve(own, alpha, part=part), part).any()
    assert served > 50


def test_without_the_tolerance_some_of_these_queries_would_be_missed(certified):
    lost = 0
    for alpha in (0.1, 0.2, 0.3, 0.4, 0.5):
        threshold = guarantee(certified, alpha).threshold
        edge = CALIBRATION[np.isclose(CALIBRATION.scores, threshold, rtol=1e-6)]
        assert len(edge) > 0
        lost += np.sum(rounded(edge, -1e-6).scores > threshold * (1 + 1e-6))
    assert lost > 0


def test_queries_that_decide_who_is_answered_are_answered_when_they_are_rounded(certified):
    for alpha in (0.3, 0.4):
        answers = retrieve(certified, alpha, part=TUNING, abstain=True)
        answered = np.array([not answer.abstained for answer in answers])
        assert 0 < answered.sum() < len(TUNING)
        largest = TUNING.uncertainty[answered].max()
        edge = TUNING[np.flatnonzero(TUNING.uncertainty == largest)]
        again = retrieve(certified, alpha, part=rounded(edge, 1e-6), abstain=True)
        assert not any(answer.abstained for answer in again)


# Vectors far from the origin


def far(offset, n=3200, dim=128):
    return np.random.default_rng(0).standard_normal((n, dim)) + offset


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("offset", [10, 1000, 10_000])
def test_scores_of_vectors_far_from_the_origin_are_those_of_each_query_alone(metric, offset):
    gallery, queries = np.split(far(offset), [2000])
    retriever = Retriever.from_embeddings(gallery, metric=metric, depth=20)
    batch = retriever.search(queries)
    for row in range(0, len(queries), 40):
        alone = retriever.search(queries[row : row + 1])
        np.testing.assert_array_equal(batch.positions[row], alone.positions[0])
        np.testing.assert_allclose(batch.distances[row], alone.distances[0], rtol=TOLERANCE / 10)
        assert batch.uncertainty[row] == pytest.approx(alone.uncertainty[0], rel=TOLERANCE / 10)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_vectors_are_refused_where_float32_has_lost_their_digits(metric, tmp_path):
    vectors = far(100_000, 300, 16)
    np.save(tmp_path / "vectors.npy", vectors)
    for gallery in (vectors, np.load(tmp_path / "vectors.npy", mmap_mode="r")):
        with pytest.raises(InvalidData, match="standard deviations"):
            Retriever.from_embeddings(gallery, metric=metric)
    constant = np.column_stack([far(0, 300, 16), np.full(300, 1e6)])
    assert len(Retriever.from_embeddings(constant, metric="euclidean").ids) == 300
    assert len(Retriever.from_embeddings(np.full((3, 2), 1e6), metric=metric).ids) == 3


# Images


@contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def searched(splits):
    """By method: a labelled tuning split, a search of images at once, and other searches."""
    images = np.concatenate([splits.tuning.images[:30], splits.calibration.images[:30]])

    @cache
    def searched(method):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            encoder = build_encoder(EncoderConfig(method), 1, (8, 16))
        retriever, others = Retriever.build(encoder, Preprocessing(), splits.gallery, 60), []
        for number, size in ((1, 1), (1, 7), (2, 32)):
            with threads(number):
                parts = np.split(images, range(size, len(images), size))
                others.append([retriever.search(part) for part in parts])
        return retriever.search_labelled(splits.tuning), retriever.search(images), others

    return searched


@pytest.mark.parametrize("method", ["btl", "deterministic"])
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("minmax", "learned") else pytest.param(name, marks=pytest.mark.slow)
        for name in (*SCORE_FUNCTIONS, "match-probability")
    ],
)
def test_scores_of_an_image_in_other_batches_and_threads_differ_by_far_less_than_the_tolerance(
    searched, method, name
):
    """If its candidates have the same ranks, as they do unless two are equally near."""
    labelled, batch, others = searched(method)
    score_function, _ = fit_score_function(name, labelled.results, labelled.relevant)

    def values(found):
        ranking = score_function.rank(found)
        return np.column_stack([ranking.scores, ranking.selection_score]).astype(np.float64)

    def places(found):
        return np.hstack([found.positions, score_function.rank(found).take(found.positions)])

    for parts in others:
        alike = (np.concatenate(list(map(places, parts))) == places(batch)).all(axis=1)
        assert alike.mean() > 0.8
        before, after = values(batch)[alike], np.concatenate(list(map(values, parts)))[alike]
        finite = np.isfinite(before)
        assert (np.isfinite(after) == finite).all()
        off = np.abs(after[finite] - before[finite]) / np.maximum(np.abs(before[finite]), 1e-30)
        assert off.max() < TOLERANCE / 10


def test_an_image_that_decides_the_threshold_is_served_when_it_is_searched_alone(retriever, splits):
    images, labels = splits.calibration.images, splits.calibration.labels.tolist()
    served = 0
    for alpha in (0.3, 0.4, 0.5):
        answers = retriever.retrieve(list(images), alpha, DELTA)
        for image, label, answer in zip(images, labels, answers, strict=True):
            if answer.labels[-1] == label not in answer.labels[:-1]:
                served += 1
                assert label in retriever.retrieve(image, alpha, DELTA).labels
    assert served > 10


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16], ids=str)
def test_the_precision_of_the_caller_changes_no_answer(retriever, splits, precision):
    images = list(splits.test.images[:5])
    before = plain(retriever.retrieve(images, 0.3, 0.1))
    with torch.autocast("cpu", dtype=precision):
        assert plain(retriever.retrieve(images, 0.3, 0.1)) == before
