"""The best of several retrievers by what test queries certify among themselves: it costs nothing.

Beside what is compared in `test_choice_among.py`, of which this is the same simulation: there the
smallest by sizes that calibration queries decide fails far more often than delta.
"""

import numpy as np
import pytest

from rcir.registry.promotion import halves
from rcir.risk import Certified, mean_size
from rcir.runs.results import RunResults
from tests.statistical.test_choice_among import ALPHA, DELTA, DEPTH, N, drawn_ranks, risk

__all__ = ["risk"]  # a fixture

pytestmark = pytest.mark.statistical
DRAWS, TESTED, RETRIEVERS = 2_000, 200, 12


def scores_of(ranks):
    return np.where(ranks < DEPTH, ranks, np.inf).astype(np.float32)


def test_the_smallest_on_test_queries_fails_no_more_often_than_any(risk, excess):
    rng = np.random.default_rng(7)
    candidates = np.tile(np.arange(DEPTH, dtype=np.float32), (TESTED, 1))
    failed = []
    for _ in range(DRAWS):
        calibrating = scores_of(drawn_ranks(rng, RETRIEVERS, N))
        tested = scores_of(drawn_ranks(rng, RETRIEVERS, TESTED))
        runs = [
            RunResults("test", "", [Certified(scores, candidates)], {}, "constant", "", own)
            for scores, own in zip(calibrating, tested, strict=True)
        ]
        chosen = runs[int(np.argmin([mean_size(halves(run), ALPHA, DELTA) for run in runs]))]
        (size, *_) = chosen.parts[0].sizes(ALPHA, DELTA)
        failed.append(risk[size] > ALPHA)
    assert excess(np.array(failed), DELTA) <= 3
    assert np.mean(failed) > DELTA / 4  # the simulation is one in which certificates fail
