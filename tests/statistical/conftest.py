"""A retrieval problem with known risks, and the check that all simulations share."""

from dataclasses import dataclass

import numpy as np
import pytest
from scipy.special import expit

from rcir.errors import RiskUnattainable
from rcir.risk import (
    SCORE_FUNCTIONS,
    LabelledResults,
    ScoredResults,
    ScoreFunction,
    SearchResults,
    fit_score_function,
    score,
)
from rcir.risk.results import widen

POPULATION, SPLIT, DEPTH, DRAWS, LABELS = 20_000, 400, 12, 400, 15


@dataclass(frozen=True)
class World:
    """A score function, and the tuning split and the population scored by it."""

    score_function: ScoreFunction
    tuning: ScoredResults
    population: ScoredResults


def draw_queries(n, seed):
    """Draw labelled queries of skewed hardness, which the uncertainty shows with noise.

    True matches become rarer along the ranks; the candidates of one wrong label do not.
    """
    rng = np.random.default_rng(seed)
    hardness = rng.gamma(2.0, size=n)
    number = np.arange(1.0, DEPTH + 1)
    match = rng.uniform(size=(n, DEPTH)) < expit(3.5 - hardness[:, None] - 0.8 * np.log(number))
    label = rng.integers(LABELS, size=(n, 1))
    rival = (label + rng.integers(1, LABELS, size=(n, 1))) % LABELS
    other = (label + rng.integers(1, LABELS, size=(n, DEPTH))) % LABELS
    labels = np.where(match, label, np.where(rng.uniform(size=(n, DEPTH)) < 0.4, rival, other))
    results = SearchResults(
        hardness * rng.lognormal(sigma=0.3, size=n),
        DEPTH,
        distances=np.cumsum(rng.exponential(0.2 + 0.1 * hardness[:, None], (n, DEPTH)), axis=1),
        labels=labels,
        candidate_uncertainty=rng.gamma(2.0, size=(n, DEPTH)) - match,
    )
    return LabelledResults(results, match, match.sum(axis=1) + rng.poisson(1, n))


@pytest.fixture(scope="session")
def queries():
    return draw_queries


@pytest.fixture(scope="session")
def split():
    """The tuning split."""
    return draw_queries(SPLIT, seed=1)


@pytest.fixture(scope="session")
def everybody():
    """The population that calibration queries are drawn from; its mean loss is the true risk."""
    return draw_queries(POPULATION, seed=0)


@pytest.fixture(scope="session")
def worlds(split, everybody):
    """A world for each score function, by its name."""

    def world(name):
        score_function, _ = fit_score_function(name, split.results, split.ranks)
        return World(score_function, *(score(score_function, part) for part in (split, everybody)))

    return {name: world(name) for name in SCORE_FUNCTIONS}


@pytest.fixture(scope="session")
def draws():
    """`draws(n)`: (DRAWS, n) rows of calibration queries, drawn with replacement."""

    def draws(n, seed=2, size=POPULATION, count=DRAWS):
        return np.random.default_rng(seed).integers(0, size, (count, n))

    return draws


@pytest.fixture(scope="session")
def thresholds_of():
    """`thresholds_of(certify, samples)`: a threshold of each sample, NaN if unattainable."""

    def thresholds_of(certify, samples, met=0.5):
        thresholds = []
        for sample in samples:
            try:
                thresholds.append(certify(sample))
            except RiskUnattainable:
                thresholds.append(np.nan)
        assert np.isfinite(thresholds).mean() > met, "too few requests are met to show anything"
        return np.array(thresholds)

    return thresholds_of


@pytest.fixture(scope="session")
def true_risk():
    """`true_risk(scored, risk)`: a function from thresholds to the exact mean loss of all queries.

    The loss is that of the sets that are returned, which include a tolerance. The loss of a query
    changes by a known amount at the score of each candidate, so that one sort of all scores and
    the running sum of the changes give the risk of every threshold.
    """

    def true_risk(scored, risk):
        hits = np.cumsum(scored.relevant, axis=1)
        losses = {
            "miss": (hits == 0).astype(float),
            "recall": 1 - hits / np.maximum(scored.n_relevant, 1)[:, None],
            "false-discovery": 1 - hits / np.arange(1, hits.shape[1] + 1),
        }[risk]
        changes = np.diff(losses, axis=1, prepend=0)
        finite = np.isfinite(scored.scores)
        order = np.argsort(scored.scores[finite])
        all_scores = scored.scores[finite][order]
        risks = np.concatenate([[0], np.cumsum(changes[finite][order])]) / len(scored)

        def of(thresholds):
            thresholds = np.asarray(thresholds, np.float64)
            limits = np.minimum(widen(thresholds), np.finfo(np.float32).max)
            places = np.searchsorted(all_scores, limits.astype(np.float32), side="right")
            # Rounded, so that a risk of exactly alpha is not above it.
            return np.where(np.isnan(thresholds), np.nan, np.round(risks[places], 9))

        return of

    return true_risk


@pytest.fixture(scope="session")
def excess():
    """`excess(failures, level)`: standard errors by which the failure rate lies above `level`.

    A simulation asserts at most 3, that of a broken variant more than 3. If the failures are
    numbers, their mean is compared with `level`.
    """

    def excess(failures, level):
        failures = np.asarray(failures)
        assert len(failures) >= DRAWS
        spread = np.sqrt(level * (1 - level)) if failures.dtype == bool else failures.std()
        return float((failures.mean() - level) / (spread / np.sqrt(len(failures))))

    return excess
