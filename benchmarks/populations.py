"""Retrieval problems with known risks, for simulations of calibration."""

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
    LabelledResults,
    Request,
    SearchResults,
    certify,
    find_risk,
    fit_score_function,
    score,
)
from rcir.risk.results import widened

POPULATION, SPLIT, TUNING = 4_000, 300, 60
LARGEST = float(np.finfo(np.float32).max)

Array = NDArray[np.float64]
Generator = np.random.Generator


class World:
    """A population scored by a score function, its tuning split, and the exact risks."""

    def __init__(self, name: str, labelled: LabelledResults) -> None:
        split, rest = labelled[:SPLIT], labelled[SPLIT:]
        self.score_function, _ = fit_score_function(name, split.results, split.relevant)
        self.tuning, self.population = (
            score(self.score_function, part) for part in (split[:TUNING], rest)
        )
        hard = self.population.require("uncertainty")
        self.groups = (1 * (hard > np.median(hard)) + (hard > np.quantile(hard, 0.8))).astype(str)
        self.names = sorted(set(self.groups.tolist()))

    def risk(self, risk: str, thresholds: Any, rows: Any = slice(None)) -> Array:
        """(n,) mean losses of all or some rows at (n,) thresholds; NaN where these are."""
        thresholds = np.atleast_1d(np.asarray(thresholds, np.float64))
        certified = ~np.isnan(thresholds)
        distinct, where = np.unique(thresholds[certified], return_inverse=True)
        limits = np.minimum(widened(distinct), LARGEST)
        losses = find_risk(risk).losses(self.population[rows], limits)
        risks = np.full(thresholds.shape, np.nan)
        risks[certified] = losses.mean(axis=0).round(9)[where]
        return risks

    def level(self, risk: str, rng: Generator, rows: Any = slice(None)) -> float:
        """Return an alpha near .05 to .3 that the largest or the smallest sets satisfy."""
        ends = self.risk(risk, [0.0, LARGEST], rows)
        least = max(0.05, float(ends.min()) + 0.02)
        most = min(max(0.3, least + 0.1), max(float(ends.max()), least + 0.01))
        return round(float(rng.uniform(least, most)), 3)

    def thresholds(
        self, draws: NDArray[np.int64], requests: Sequence[Request], clusters: Any = None
    ) -> Array:
        """(requests, draws) certified thresholds of each calibration; NaN if unattainable.

        Args:
            draws: (draws, n) rows of the population.
            requests: to each of the calibrations.
            clusters: (n,) of the queries, if they come in clusters.
        """
        tuning, cluster = self.tuning, None if clusters is None else "video"
        if clusters is not None:
            tuning = replace(tuning, clusters=np.arange(TUNING) // 3, cluster=cluster)
        thresholds = np.full((len(requests), len(draws)), np.nan)
        for draw, rows in enumerate(draws):
            calibration = replace(
                self.population[rows], groups=self.groups[rows], clusters=clusters, cluster=cluster
            )
            for number, request in enumerate(requests):
                with suppress(RiskUnattainable):
                    thresholds[number, draw] = certify(request, calibration, tuning).threshold
        return thresholds


def drawn_world(name: str, rng: Generator, distinct: bool = False) -> World:
    """Draw a population; with `distinct`, candidates have distinct labels."""
    n, depth, labels = SPLIT + POPULATION, int(rng.integers(4, 16)), int(rng.integers(4, 40))
    hardness = rng.gamma(rng.uniform(0.7, 4), size=n)
    hardness *= rng.uniform(1, 2) / hardness.mean()
    number = np.arange(1.0, depth + 1)
    logit = rng.uniform(2.5, 4.0) - hardness[:, None] - rng.uniform(0, 1) * np.log(number)
    match = rng.uniform(size=(n, depth)) < expit(logit)
    label = rng.integers(labels, size=(n, 1))
    candidate_labels = np.where(
        match, label, (label + rng.integers(1, labels, size=(n, depth))) % labels
    )
    distances = np.cumsum(rng.exponential(0.2 + 0.1 * hardness[:, None], (n, depth)), axis=1)
    uncertainty = hardness * rng.lognormal(sigma=rng.uniform(0.1, 1), size=n)
    if rng.uniform() < 0.5:  # ties
        uncertainty, distances = np.ceil(4 * uncertainty) / 4, np.ceil(8 * distances) / 8
    if rng.uniform() < 0.3:  # a gallery in which some queries have fewer candidates
        beyond = number > rng.integers(2, depth + 1, size=(n, 1)) + depth // 2
        distances[beyond], candidate_labels[beyond], match[beyond] = np.inf, -1, False
    results = SearchResults(uncertainty, depth, distances, candidate_labels)
    labelled = LabelledResults(results, match, match.sum(axis=1))
    return World(name, labelled.first_of_each_label() if distinct else labelled)


def rows_of(rng: Generator, draws: int, least: int, most: int) -> NDArray[np.int64]:
    """(draws, n) rows of a population; n is log-uniform between two numbers."""
    n = round(float(np.exp(rng.uniform(np.log(least), np.log(most)))))
    return rng.integers(POPULATION, size=(draws, n))
