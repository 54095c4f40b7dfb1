"""The best of several retrievers calibrated on the same queries: what its certificate is worth."""

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from rcir.registry.promotion import halves
from rcir.risk import (
    Certified,
    Constant,
    LabelledResults,
    Request,
    RiskController,
    SearchResults,
    corrected,
    decide_chosen,
    mean_size,
    smallest_certified,
)
from rcir.runs.results import RunResults

pytestmark = pytest.mark.statistical

N, ALPHA, DELTA, DRAWS, DEPTH = 200, 0.1, 0.1, 2_000, 400
RETRIEVERS = (3, 12)


def drawn_ranks(rng, retrievers, n):
    """(retrievers, n) ranks of first true matches from 0: hard queries are hard for all of them.

    That of a retriever is exponential of mean 40 times the query's hardness, cut at the depth.
    """
    hardness = rng.gamma(2.0, 0.5, size=n)
    ranks = 40 * hardness * rng.exponential(size=(retrievers, n))
    return np.floor(ranks).astype(np.int64)


@pytest.fixture(scope="module")
def risk():
    """By number of images in a set: the share of queries without a match in it, in closed form.

    The rank is at least K where an exponential exceeds K / (40 hardness); the mean of that over
    hardness of Gamma(2, 1/2), by a fine grid.
    """
    hardness = np.linspace(1e-4, 12, 100_000)
    weight = 4 * hardness * np.exp(-2 * hardness)
    weight /= weight.sum()
    return np.array([np.exp(-size / (40 * hardness)) @ weight for size in range(DEPTH + 1)])


@pytest.fixture(scope="module")
def failures(risk):
    """Return for each draw of calibration queries whether the chosen one misses above alpha."""

    def failures(retrievers, among):
        rng = np.random.default_rng(retrievers)
        all_scores = np.arange(DEPTH, dtype=np.float32)[None]
        failed = []
        for _ in range(DRAWS):
            ranks = drawn_ranks(rng, retrievers, N)
            runs = [[Certified(each, all_scores)] for each in scores_of(ranks)]
            chosen = smallest_certified(runs, ALPHA, DELTA, among)
            if chosen is None:
                failed.append(False)  # refused
                continue
            (size,) = runs[chosen][0].sizes(ALPHA, corrected(DELTA, among))
            failed.append(risk[size] > ALPHA)
        return np.array(failed)

    return failures


def test_the_risk_of_the_simulation_is_that_of_many_queries(risk):
    ranks = drawn_ranks(np.random.default_rng(0), 1, 400_000)
    for size in (10, 50, 100, 200):
        share = np.mean(ranks >= size)
        assert abs(share - risk[size]) <= 4 * np.sqrt(share * (1 - share) / 400_000)


@pytest.mark.parametrize("retrievers", RETRIEVERS)
def test_the_smallest_of_several_fails_no_more_often_than_it_says(failures, excess, retrievers):
    assert excess(failures(retrievers, retrievers), DELTA) <= 3


@pytest.mark.parametrize("retrievers", RETRIEVERS)
def test_the_smallest_of_several_fails_too_often_if_none_is_certified_for_it(
    failures, excess, retrievers
):
    assert excess(failures(retrievers, 1), DELTA) > 3


def test_one_that_was_chosen_among_several_answers_with_the_sets_it_was_chosen_for():
    rng = np.random.default_rng(5)
    ranks = drawn_ranks(rng, 12, 400)
    all_scores = np.arange(DEPTH, dtype=np.float32)[None]
    runs = [[Certified(each.astype(np.float32), all_scores)] for each in ranks]
    chosen = smallest_certified(runs, ALPHA, DELTA, 12)
    relevant = np.arange(DEPTH) == ranks[chosen][:, None]
    queries = SearchResults(np.zeros(400), depth=DEPTH)
    labelled = LabelledResults.of(queries, relevant, np.ones(400, int)).scored(Constant())
    controller = RiskController(Constant(), labelled, labelled)
    decided = decide_chosen(controller, Request(ALPHA, DELTA), 12)
    assert decided.threshold == runs[chosen][0].threshold(ALPHA, DELTA / 12)
    assert decided.threshold > controller.decide(Request(ALPHA, DELTA)).threshold
    with pytest.raises(RiskUnattainable, match="chosen among 12 retrievers"):
        decide_chosen(controller, Request(0.001, DELTA), 12)


def scores_of(ranks):
    return np.where(ranks < DEPTH, ranks, np.inf).astype(np.float32)


def test_the_smallest_on_test_queries_fails_no_more_often_than_any(risk, excess):
    """Chosen by what test queries certify among themselves, it needs no correction."""
    rng = np.random.default_rng(7)
    candidates = np.tile(np.arange(DEPTH, dtype=np.float32), (N, 1))
    failed = []
    for _ in range(DRAWS):
        calibrating = scores_of(drawn_ranks(rng, 12, N))
        tested = scores_of(drawn_ranks(rng, 12, N))
        runs = [
            RunResults("test", "", [Certified(scores, candidates)], {}, "constant", "", own)
            for scores, own in zip(calibrating, tested, strict=True)
        ]
        chosen = runs[int(np.argmin([mean_size(halves(run), ALPHA, DELTA) for run in runs]))]
        (size, *_) = chosen.parts[0].sizes(ALPHA, DELTA)
        failed.append(risk[size] > ALPHA)
    assert excess(np.array(failed), DELTA) <= 3
    assert np.mean(failed) > DELTA / 4  # the simulation is one in which certificates fail
