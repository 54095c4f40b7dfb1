"""Calibration for another population: a sample of it among labelled queries of the first one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData
from rcir.retrieval.queries import queries_of, require_alike
from rcir.retrieval.query_uncertainty import (
    QUERY_UNCERTAINTIES,
    available_uncertainties,
    with_uncertainty,
)
from rcir.retrieval.search import Searcher
from rcir.risk import LabelledResults, SearchResults
from rcir.risk.features import fit_logistic

MIN_QUERIES = 50  # of the tuning split, and of the target, that a ratio is fitted to
MAX_OUTSIDE = 0.02  # share of target queries that may lie outside the labelled ones


@dataclass(frozen=True)
class Shift:
    """How calibration queries were drawn, so that they are a sample of a target population.

    Attributes:
        features: names of the features in which both populations may differ.
        n_target: number of unlabelled queries of the target population.
        n_labelled: number of labelled queries that the calibration queries were drawn from.
        n_kept: number of calibration queries, which is the effective sample size.
        overlap: estimated overlap of both populations: 1 minus their total variation distance.
    """

    features: tuple[str, ...]
    n_target: int
    n_labelled: int
    n_kept: int
    overlap: float

    def __str__(self) -> str:
        return (
            f"if both populations differ only in {', '.join(self.features)}, {self.n_kept} of "
            f"{self.n_labelled} calibration queries are a sample of that of {self.n_target} target "
            f"queries (overlap {self.overlap:.2f})"
        )


def draw_like_target(
    searcher: Searcher,
    tuning: LabelledResults,
    calibration: LabelledResults,
    target: SearchResults,
) -> tuple[LabelledResults, Shift]:
    """Return the calibration queries that are a sample of the target population.

    A logistic regression estimates the ratio w of the densities of target and tuning queries from
    features of their search results. Each calibration query is kept with probability w / B, where B
    is the largest w of tuning and target queries; larger ones are clipped. If w is right, the kept
    queries are drawn independently from the target population, and every bound applies to them
    (Park et al., "PAC prediction sets under covariate shift", ICLR 2022). The draw
    depends on the queries, not on what they match.

    Raises:
        InvalidConfig: the queries come in clusters or are gallery items, or have probabilities.
        InvalidData: there are too few queries, target queries lie outside the labelled ones, some
            are labelled, too, or no query is kept.
    """
    if calibration.population.clusters is not None or searcher.options.leave_one_out:
        raise InvalidConfig(
            "target needs independent queries, and these come in clusters or are gallery items: "
            "label queries of the target population, and calibrate on them"
        )
    splits = [queries_of(split) for split in (tuning, calibration)]
    queries = target.require("queries").with_population()
    if splits[0].probabilities is not None:
        raise InvalidConfig("target and probabilities of labels cannot be combined: omit one")
    require_alike(queries, splits[0])
    n_shared = sum(int(np.isin(queries.digests, split.digests).sum()) for split in splits)
    if n_shared:
        raise InvalidData(f"{n_shared} target queries are labelled queries, too: pass others")
    if min(len(tuning), len(target)) < MIN_QUERIES:
        raise InvalidData(
            f"{len(tuning)} tuning and {len(target)} target queries: a ratio of densities needs at "
            f"least {MIN_QUERIES} of each"
        )
    names = [
        kind
        for kind in available_uncertainties(searcher)
        if not QUERY_UNCERTAINTIES[kind].by_draws
        and (kind != "encoder" or queries.uncertainty is not None)  # it would be the cosine
    ]
    rows = [_features(searcher, part, names) for part in (tuning.results, target)]
    candidates = _features(searcher, calibration.results, names)
    names = [*names, "distance"]
    _require_within(names, np.concatenate([rows[0], candidates]), rows[1])
    is_target = np.arange(len(tuning) + len(target)) >= len(tuning)
    weights, intercept = fit_logistic(np.concatenate(rows), is_target)
    log_ratios = [part @ weights + intercept for part in rows]
    bound = max(float(ratio.max()) for ratio in log_ratios)
    uniform = np.random.default_rng(0).uniform(size=len(calibration))  # by digest, in any order
    places = np.argsort(np.argsort(splits[1].digests, kind="stable"))
    kept = accept(candidates @ weights + intercept, bound, uniform[places])
    if not kept.any():
        raise InvalidData("no calibration query resembles the target queries: label some of them")
    ratio = np.exp(log_ratios[0]) * len(tuning) / len(target)
    overlap = float(np.minimum(ratio / ratio.mean(), 1).mean())
    shift = Shift(tuple(names), len(target), len(calibration), int(kept.sum()), overlap)
    return calibration[kept], shift


def accept(
    log_ratio: NDArray[np.float64], log_bound: float, uniform: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """(n,) True with probability w / B, at most 1, given log w, log B and uniform numbers."""
    return np.asarray(uniform < np.exp(np.minimum(log_ratio - log_bound, 0)))


def _features(searcher: Searcher, results: SearchResults, names: list[str]) -> NDArray[np.float64]:
    """(n, f) uncertainties of queries, and the distance to the nearest item."""
    columns = [with_uncertainty(searcher, results, name).uncertainty for name in names]
    return np.column_stack([*columns, results.require("distances")[:, 0]]).astype(np.float64)


def _require_within(
    names: list[str], labelled: NDArray[np.float64], target: NDArray[np.float64]
) -> None:
    """Raise `InvalidData` if target queries lie outside the range of the labelled queries."""
    outside = ((target < labelled.min(axis=0)) | (target > labelled.max(axis=0))).mean(axis=0)
    worst = int(outside.argmax())
    if outside[worst] > MAX_OUTSIDE:
        raise InvalidData(
            f"{outside[worst]:.1%} of the target queries have a {names[worst]} outside the range "
            f"of the labelled queries, at most {MAX_OUTSIDE:.0%} may: nothing is known of them. "
            "Label queries of the target population, and calibrate on them"
        )
