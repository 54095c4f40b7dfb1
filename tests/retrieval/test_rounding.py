"""The same picture asked again: alone or in a batch, on one thread or two, under autocast."""

from contextlib import contextmanager, nullcontext, suppress
from functools import cache

import numpy as np
import pytest
import torch

from rcir.data import Preprocessing
from rcir.encoders import EncoderConfig, build_encoder
from rcir.errors import RiskUnattainable, StaleCalibration
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import load
from rcir.risk import Request, fit_score_function
from rcir.risk.choice import KNOWN
from rcir.risk.score_functions import TOLERANCE

METHODS, DEPTH = ("btl", "deterministic"), 60


@contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def untrained(splits):
    """By method: a retriever that is not calibrated."""

    @cache
    def untrained(method):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            encoder = build_encoder(EncoderConfig(method), 1, (8, 16))
        return Retriever.build(encoder, Preprocessing(), splits.gallery, DEPTH)

    return untrained


@pytest.fixture(scope="module")
def searches(untrained, splits):
    """By method: pictures, half of them of the tuning split, searched at once, then otherwise."""
    images = np.concatenate([splits.tuning.images[:75], splits.calibration.images[:75]])

    @cache
    def searches(method):
        retriever, otherwise = untrained(method), []
        for number, size in ((1, 1), (1, 7), (2, 1), (2, 32)):
            with threads(number):
                parts = np.split(images, range(size, len(images), size))
                otherwise.append([retriever.search(part) for part in parts])
        return retriever.search(images), otherwise

    return searches


def gathered(parts, values):
    return np.concatenate([values(part) for part in parts])


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("method", METHODS)
def test_scores_of_a_picture_asked_otherwise_differ_by_far_less_than_the_tolerance(
    untrained, searches, splits, method, name
):
    """Where its candidates are ranked alike, as they are unless two are equally near."""
    labelled = untrained(method).search_labelled(splits.tuning)
    score_function, _ = fit_score_function(name, labelled, labelled.relevant)
    batch, otherwise = searches(method)

    def values(found):
        results, _ = score_function.ordered(found)
        selection_score = score_function.selection_score(found, size=1)
        return np.column_stack([score_function.candidate_scores(results), selection_score]).astype(
            np.float64
        )

    def places(found):
        return np.hstack([found.positions, score_function.ordered(found)[0].positions])

    for parts in otherwise:
        alike = (gathered(parts, places) == places(batch)).all(axis=1)
        assert alike.mean() > 0.9
        before, after = values(batch)[alike], gathered(parts, values)[alike]
        finite = np.isfinite(before)
        assert (np.isfinite(after) == finite).all()
        off = np.abs(after[finite] - before[finite]) / np.maximum(np.abs(before[finite]), 1e-30)
        assert off.max() < TOLERANCE / 10


@pytest.mark.parametrize("risk", ["miss", "recall"])
@pytest.mark.parametrize("method", METHODS)
def test_a_picture_that_decides_the_calibration_gets_its_set_when_it_is_asked_alone(
    untrained, splits, method, risk
):
    retriever, lost = untrained(method), 0
    labelled = [retriever.search_labelled(part) for part in (splits.tuning, splits.calibration)]
    for name in ("minmax", "learned", "reranked"):
        retriever.calibrate(*labelled, score_function=name)
        controller = retriever.controllers[None].for_risk(Request(0.5, 0.1, risk))
        candidate_scores, relevant = (
            controller.calibration.candidate_scores,
            controller.calibration.relevant,
        )
        for alpha in np.linspace(0.1, 0.9, 17):
            with suppress(RiskUnattainable):
                threshold = controller.decide(Request(alpha, 0.1, risk)).threshold
                edge = np.flatnonzero(
                    ((candidate_scores == np.float32(threshold)) & relevant).any(axis=1)
                )
                for row in edge[:3]:
                    image = splits.calibration.images[row]
                    answer = retriever.retrieve(image, alpha, 0.1, risk=risk)
                    assert answer.size >= np.count_nonzero(
                        candidate_scores[row] <= np.float32(threshold)
                    )
                    found, _ = controller.score_function.ordered(retriever.search([image]))
                    alone = controller.score_function.candidate_scores(found)[0]
                    lost += np.count_nonzero(alone <= np.float32(threshold)) < answer.size
    assert lost > 0  # to the last digit, some would not have been served


def test_a_picture_that_decides_who_is_answered_is_answered_when_it_is_asked_alone(
    untrained, splits
):
    retriever, asked = untrained("deterministic"), 0
    retriever.calibrate(
        *(retriever.search_labelled(part) for part in (splits.tuning, splits.calibration))
    )
    controller = retriever.controllers[None]
    for alpha in np.linspace(0.2, 0.9, 15):
        with suppress(RiskUnattainable):
            threshold = controller.decide(Request(alpha, 0.1, abstain=True)).selection_threshold
            selection_score = controller.tuning.selection_score * (1 + TOLERANCE)
            (edge,) = np.flatnonzero(np.isclose(selection_score, threshold, rtol=1e-12))[:1]
            answer = retriever.retrieve(splits.tuning.images[edge], alpha, 0.1, abstain=True)
            assert not answer.abstained
            asked += 1
    assert asked >= 3


def same(one, other):
    return (
        one.ids == other.ids
        and one.distances.tolist() == other.distances.tolist()
        and one.uncertainty == other.uncertainty
    )


def test_the_callers_precision_changes_no_answer(folder, splits, monkeypatch):
    retriever, images = load(folder), list(splits.test.images[:5])
    before = retriever.retrieve(images, 0.3, 0.1)
    for precision in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=precision):
            after = retriever.retrieve(images, 0.3, 0.1)
        assert all(map(same, before, after))
    monkeypatch.setattr("rcir.encoders.base._full_precision", nullcontext)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not any(map(same, before, retriever.retrieve(images, 0.3, 0.1)))


def to_half_the_digits_and_back(retriever):
    retriever.encoder.bfloat16().float()


def a_hook(retriever):
    layer = next(iter(retriever.encoder.children()))
    layer.register_forward_hook(lambda module, given, output: output)


def the_score_function_in_place(retriever):
    score_function = retriever.controllers[None].score_function
    next(iter(score_function.state().values()))[...] *= 1.01


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (to_half_the_digits_and_back, "encoder"),
        (a_hook, "encoder"),
        (the_score_function_in_place, "score function"),
    ],
)
def test_what_changes_scores_makes_the_calibration_stale(folder, splits, change, named):
    retriever, image = load(folder), splits.test.images[0]
    retriever.retrieve(image, 0.3, 0.1)
    change(retriever)
    with pytest.raises(StaleCalibration, match=f"changed since calibration: {named}"):
        retriever.retrieve(image, 0.3, 0.1)
