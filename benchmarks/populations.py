"""Retrieval problems of which everything is known: what a simulation calibrates on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from rcir.errors import RiskUnattainable
from rcir.risk import (
    RISKS,
    LabelledResults,
    Request,
    RiskController,
    SearchResults,
    fit_score_function,
)
from rcir.metrics.labels import take_columns
from rcir.risk.results import TOLERANCE

POPULATION, SPLIT, TUNING = 4_000, 300, 60
LARGEST = float(np.finfo(np.float32).max)

Array = NDArray[np.float64]
Generator = np.random.Generator


class World:
    """A population scored by a score function, a tuning split, and the exact risk of every
    threshold.
    """

    def __init__(self, name: str, results: SearchResults, relevant: NDArray[np.bool_]) -> None:
        split, rest = slice(0, SPLIT), slice(SPLIT, None)
        self.score_function, _ = fit_score_function(name, results[split], relevant[split])
        self.tuning, self.population = (
            LabelledResults.of(results[rows], relevant[rows], relevant[rows].sum(axis=1)).scored(
                self.score_function
            )
            for rows in (slice(0, TUNING), rest)
        )
        hard = self.population.uncertainty
        self.groups = (1 * (hard > np.median(hard)) + (hard > np.quantile(hard, 0.8))).astype(str)
        self.names = sorted(set(self.groups.tolist()))

    def risk(self, risk: str, thresholds: Any, rows: Any = slice(None)) -> Array:
        """(n,) the mean loss of all, or of some rows, at (n,) thresholds; NaN where these are."""
        thresholds = np.atleast_1d(np.asarray(thresholds, np.float64))
        known, where = np.unique(thresholds[~np.isnan(thresholds)], return_inverse=True)
        losses = RISKS[risk].losses(
            self.population[rows], np.minimum(known * (1 + TOLERANCE), LARGEST)
        )
        found = np.full(thresholds.shape, np.nan)
        found[~np.isnan(thresholds)] = losses.mean(axis=0).round(9)[where]
        return found

    def level(self, risk: str, rng: Generator, rows: Any = slice(None)) -> float:
        """An alpha that the largest or the smallest sets meet, not far from .05 to .3."""
        ends = self.risk(risk, [0.0, LARGEST], rows)
        least = max(0.05, float(ends.min()) + 0.02)
        most = min(max(0.3, least + 0.1), max(float(ends.max()), least + 0.01))
        return round(float(rng.uniform(least, most)), 3)

    def thresholds(
        self, draws: NDArray[np.int64], requests: Sequence[Request], clusters: Any = None
    ) -> Array:
        """(requests, draws) what each calibration certifies; NaN where it refuses.

        Args:
            draws: (draws, n) rows of the population.
            requests: to each of the calibrations.
            clusters: (n,) of the queries, if they come in clusters.
        """
        tuning = self.tuning
        if clusters is not None:
            tuning = replace(tuning, clusters=np.arange(TUNING) // 3, cluster="video")
        found = np.full((len(requests), len(draws)), np.nan)
        for draw, rows in enumerate(draws):
            controller = RiskController(
                self.score_function,
                tuning,
                replace(
                    self.population[rows],
                    groups=self.groups[rows],
                    clusters=clusters,
                    cluster=None if clusters is None else "video",
                ),
            )
            for number, request in enumerate(requests):
                with suppress(RiskUnattainable):
                    found[number, draw] = controller.decide(request).threshold
        return found


def drawn_world(name: str, rng: Generator, distinct: bool = False) -> World:
    """A random population, in sets of distinct keys if asked for."""
    n, depth, keys = SPLIT + POPULATION, int(rng.integers(4, 16)), int(rng.integers(4, 40))
    hardness = rng.gamma(rng.uniform(0.7, 4), size=n)
    hardness *= rng.uniform(1, 2) / hardness.mean()
    number = np.arange(1.0, depth + 1)
    logit = rng.uniform(2.5, 4.0) - hardness[:, None] - rng.uniform(0, 1) * np.log(number)
    match = rng.uniform(size=(n, depth)) < expit(logit)
    key = rng.integers(keys, size=(n, 1))
    shown = np.where(match, key, (key + rng.integers(1, keys, size=(n, depth))) % keys)
    distances = np.cumsum(rng.exponential(0.2 + 0.1 * hardness[:, None], (n, depth)), axis=1)
    uncertainty = hardness * rng.lognormal(sigma=rng.uniform(0.1, 1), size=n)
    if rng.uniform() < 0.5:  # ties
        uncertainty, distances = np.ceil(4 * uncertainty) / 4, np.ceil(8 * distances) / 8
    if rng.uniform() < 0.3:  # a gallery in which some queries have fewer candidates
        beyond = number > rng.integers(2, depth + 1, size=(n, 1)) + depth // 2
        distances[beyond], shown[beyond], match[beyond] = np.inf, -1, False
    results = SearchResults(uncertainty, depth, distances, shown)
    if distinct:
        results, columns = results.distinct(), results.key_columns
        match = take_columns(match, columns, False)
    return World(name, results, match)


def rows_of(rng: Generator, draws: int, least: int, most: int) -> NDArray[np.int64]:
    """(draws, n) rows of a population, n between two numbers, log-uniform."""
    n = round(float(np.exp(rng.uniform(np.log(least), np.log(most)))))
    return rng.integers(POPULATION, size=(draws, n))
