"""A retrieval problem of which everything is known, and the one check that all simulations make."""

from dataclasses import dataclass

import numpy as np
import pytest
from scipy.special import expit

from rcir.errors import RiskUnattainable
from rcir.risk import (
    SCORE_FUNCTIONS,
    LabelledResults,
    ScoreFunction,
    SearchResults,
    fit_score_function,
)
from rcir.risk.score_functions import TOLERANCE

POPULATION, SPLIT, DEPTH, DRAWS, KEYS = 20_000, 400, 12, 2_000, 15
# Without --full, a module takes one in so many of the draws that it names; FEWER of its own says
# otherwise, where broken variants would not be noticed any more.
FEWER = {"DRAWS": 4, "STREAMS": 4, "SAMPLES": 4}


@pytest.fixture(scope="session")
def full(request):
    """Return True if simulations are of full size."""
    return request.config.getoption("full")


@pytest.fixture(scope="module", autouse=True)
def _fewer(request, full):
    with pytest.MonkeyPatch.context() as patch:
        for name, one_in in getattr(request.module, "FEWER", FEWER).items():
            if not full and hasattr(request.module, name):
                patch.setattr(request.module, name, getattr(request.module, name) // one_in)
        yield


@dataclass(frozen=True)
class Queries:
    """Labelled queries: their candidates, which of them match, and all matches in the gallery."""

    results: SearchResults
    relevant: np.ndarray
    totals: np.ndarray

    @property
    def ranks(self):
        return np.where(self.relevant.any(1), self.relevant.argmax(1) + 1.0, np.inf)

    def __getitem__(self, rows):
        return Queries(self.results[rows], self.relevant[rows], self.totals[rows])


@dataclass(frozen=True)
class World:
    """A score function, the split that it was fitted on, and the queries there are, both as it
    scores them.
    """

    score_function: ScoreFunction
    tuning: LabelledResults
    population: LabelledResults


def draw_queries(n, seed):
    """Skewed hardness, seen with noise; matches thin out along the ranks, one rival does not."""
    rng = np.random.default_rng(seed)
    hardness = rng.gamma(2.0, size=n)
    number = np.arange(1.0, DEPTH + 1)
    match = rng.uniform(size=(n, DEPTH)) < expit(3.5 - hardness[:, None] - 0.8 * np.log(number))
    key = rng.integers(KEYS, size=(n, 1))
    rival = (key + rng.integers(1, KEYS, size=(n, 1))) % KEYS
    other = (key + rng.integers(1, KEYS, size=(n, DEPTH))) % KEYS
    keys = np.where(match, key, np.where(rng.uniform(size=(n, DEPTH)) < 0.4, rival, other))
    results = SearchResults(
        hardness * rng.lognormal(sigma=0.3, size=n),
        DEPTH,
        distances=np.cumsum(rng.exponential(0.2 + 0.1 * hardness[:, None], (n, DEPTH)), axis=1),
        keys=keys,
        candidate_uncertainty=rng.gamma(2.0, size=(n, DEPTH)) - match,
    )
    return Queries(results, match, match.sum(axis=1) + rng.poisson(1, n))


@pytest.fixture(scope="session")
def queries():
    return draw_queries


@pytest.fixture(scope="session")
def split():
    """The tuning split."""
    return draw_queries(SPLIT, seed=1)


@pytest.fixture(scope="session")
def everybody():
    """The population that calibration queries are drawn from, and of which the risk is known."""
    return draw_queries(POPULATION, seed=0)


@pytest.fixture(scope="session")
def worlds(split, everybody):
    """By name of the score function."""

    def world(name):
        score_function, _ = fit_score_function(name, split.results, split.ranks)
        tuning, population = (
            LabelledResults.of(part.results, part.relevant, part.totals).scored(score_function)
            for part in (split, everybody)
        )
        return World(score_function, tuning, population)

    return {name: world(name) for name in SCORE_FUNCTIONS}


@pytest.fixture(scope="session")
def draws(full):
    """`draws(n)`: the rows of n calibration queries, drawn with replacement, DRAWS times.

    Without --full, one in four times, or another share of them.
    """

    def draws(n, seed=2, size=POPULATION, one_in=4):
        count = DRAWS // (1 if full else one_in)
        return np.random.default_rng(seed).integers(0, size, (count, n))

    return draws


@pytest.fixture(scope="session")
def answers():
    """Call `ask` on each controller; NaN if the request is unattainable."""

    def answers(ask, controllers, met=0.5):
        found = []
        for controller in controllers:
            try:
                found.append(ask(controller))
            except RiskUnattainable:
                found.append(np.nan)
        assert np.isfinite(found).mean() > met, "too few requests are met to show anything"
        return np.array(found)

    return answers


@pytest.fixture(scope="session")
def true_risk():
    """`true_risk(labelled, risk)`: a function from thresholds to the exact mean loss of all
    labelled results.

    Of the sets that are given out, which hold what scores up to a tolerance more than threshold.
    The loss of a query changes by a known amount at the score of each candidate, so that one sort
    of all scores and the running sum of the changes give the risk of every threshold.
    """

    def true_risk(labelled, risk):
        hits = np.cumsum(labelled.relevant, axis=1)
        losses = {
            "miss": (hits == 0).astype(float),
            "recall": 1 - hits / np.maximum(labelled.totals, 1)[:, None],
            "false-discovery": 1 - hits / np.arange(1, hits.shape[1] + 1),
        }[risk]
        changes = np.diff(losses, axis=1, prepend=0)
        known = np.isfinite(labelled.candidate_scores)
        order = np.argsort(labelled.candidate_scores[known])
        all_scores = labelled.candidate_scores[known][order]
        risks = np.concatenate([[0], np.cumsum(changes[known][order])]) / len(labelled)

        def of(thresholds):
            thresholds = np.asarray(thresholds, np.float64)
            largest = np.minimum(thresholds * (1 + TOLERANCE), np.finfo(np.float32).max)
            place = np.searchsorted(all_scores, largest.astype(np.float32), side="right")
            # Rounded, so that a risk of exactly alpha is not above it.
            return np.where(np.isnan(thresholds), np.nan, np.round(risks[place], 9))

        return of

    return true_risk


@pytest.fixture(scope="session")
def excess(full):
    """Return how many standard errors the failure rate lies above `level`.

    A simulation asserts at most 3, that of a broken variant more than 3. Numbers in place of
    failures are compared with `level` by their mean.
    """

    def excess(failures, level):
        failures = np.asarray(failures)
        assert len(failures) >= DRAWS // (1 if full else 4)
        spread = np.sqrt(level * (1 - level)) if failures.dtype == bool else failures.std()
        return float((failures.mean() - level) / (spread / np.sqrt(len(failures))))

    return excess
