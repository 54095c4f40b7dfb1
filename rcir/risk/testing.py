"""Learn Then Test: several risks at once, risks that need not fall, and abstention."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.errors import InvalidConfig, RiskUnattainable, as_option
from rcir.risk.bounds import Bound, Certificate, check_level, p_values, required_calibration
from rcir.risk.losses import find_risk
from rcir.risk.results import ScoredResults, widen

N_THRESHOLDS = 256
N_SELECTION_THRESHOLDS = 200
ALPHA_STEPS = 10_000  # the smallest attainable alpha is reported in these steps


def learn_then_test(
    alphas: Mapping[str, float],
    delta: float,
    calibration: ScoredResults,
    tuning: ScoredResults,
    bound: Bound = "hoeffding-bentkus",
    *,
    by_label: bool = False,
) -> Certificate:
    """Certify several risks together, or one that need not fall as sets grow.

    Each of a few hundred thresholds is a hypothesis ("some risk is too large at this threshold"),
    which p-values of the calibration queries reject (Angelopoulos et al., "Learn Then Test", 2021,
    theorem 1). The thresholds and the order in which they are tested (`fixed_sequence`) come from
    the tuning split: the most promising first. Of the certified thresholds the smallest is used;
    for risks that small sets satisfy best, such as false discoveries, the largest.

    Args:
        alphas: for each risk, its level in (0, 1).
        delta: probability, in (0, 1), that any risk is above its level.
        calibration: the scored calibration queries.
        tuning: the scored tuning split.
        bound: of mean losses, see `rcir.risk.p_value`; losses 0 or 1 of independent queries have
            the binomial bound.
        by_label: True to certify the mean over the labels of the queries as well, each label
            counted alike. A threshold is then rejected by the larger p-value, at the same delta.

    Raises:
        InvalidConfig: no risk, or an unknown one.
        InvalidRiskLevel: a level is outside (0, 1).
        RiskUnattainable: no threshold is certified.

    Example:
        >>> scores = np.tile(np.arange(3, dtype=np.float32), (1000, 1))
        >>> relevant = np.array([[True, False, True]] * 900 + [[False, True, False]] * 100)
        >>> split = ScoredResults.from_scores(scores, relevant)
        >>> levels = {"miss": 0.05, "false-discovery": 0.6}
        >>> learn_then_test(levels, 0.1, split[::2], split[1::2]).threshold
        1.0
    """
    if not alphas:
        raise InvalidConfig("there is no risk to control: give at least one with its alpha")
    risks = {name: find_risk(name) for name in alphas}
    for name, alpha in alphas.items():
        check_level(f"alpha of {name}", alpha)
    check_level("delta", delta)
    thresholds = tuning.size_thresholds(N_THRESHOLDS)
    of_means: Bound = "hoeffding-bentkus" if bound == "binomial" else bound
    splits = [[calibration], [tuning]]  # the means that are certified, of each split
    if by_label:
        splits = [[*means, means[0].by_label()] for means in splits]
    bound_of: dict[str, Bound] = {
        name: "binomial" if risk.binary and splits[0][-1].population.clusters is None else of_means
        for name, risk in risks.items()
    }
    # Of the sets that these thresholds give, which have a tolerance.
    sums = [
        {
            name: [risk.unit_losses(part, widen(thresholds)).sum(axis=0) for part in split]
            for name, risk in risks.items()
        }
        for split in splits
    ]

    def certified(levels: Mapping[str, float]) -> NDArray[np.float32]:
        """Return the certified thresholds."""
        largest = [
            np.max(
                [
                    p_values(total, part.population.n_units, alpha, bound_of[name])
                    for name, alpha in levels.items()
                    for part, total in zip(split, totals[name], strict=True)
                ],
                axis=0,
            )
            for split, totals in zip(splits, sums, strict=True)
        ]
        order = np.argsort(largest[1], kind="stable")
        return thresholds[order[fixed_sequence(largest[0][order], delta)]]

    def certifies(name: str, alpha: float) -> bool:
        """Return True if a threshold is certified for one risk alone."""
        return len(certified({name: alpha})) > 0

    chosen = certified(alphas)
    if len(chosen) == 0:
        smallest = {name: smallest_of_steps(partial(certifies, name)) for name in alphas}
        requested = ", ".join(f"{name} {alpha:g}" for name, alpha in alphas.items())
        alone = ", ".join(f"{name} {alpha or 1:.4f}" for name, alpha in smallest.items())
        each = ", each alone" if len(alphas) > 1 else ""
        population = splits[0][-1].population
        unit, units = population.unit_word, population.n_units
        of_units = f"{units} {'' if unit == 'queries' else f'{unit} of '}calibration queries"
        raise RiskUnattainable(
            f"{requested} at delta = {delta:g} cannot be certified with {of_units}: request a "
            f"larger alpha (the smallest that can be certified{each}: {alone}), or calibrate on "
            f"more {unit}",
            minimum_alpha=next(iter(smallest.values())) if len(alphas) == 1 else None,
            required_calibration=None,
        )
    falls = any(risk.monotone for risk in risks.values())
    return Certificate(
        float(chosen.min() if falls else chosen.max()),
        " and ".join(dict.fromkeys(bound_of.values())),
        float(next(iter(alphas.values()))) if len(alphas) == 1 else None,
    )


def require_tuning(tuning: ScoredResults | None) -> ScoredResults:
    """Return the scored tuning split, or raise `InvalidConfig` if there is none."""
    if tuning is None:
        raise InvalidConfig(
            "this request needs a tuning split, and nothing tuned: calibrate with "
            f"{as_option('tuning', 'queries')}"
        )
    return tuning


def fixed_sequence(p_values: ArrayLike, delta: float) -> NDArray[np.bool_]:
    """Reject hypotheses in the order given until one is not rejected.

    The order must not come from the data that the p-values come from. A true hypothesis is rejected
    with probability at most delta. Source: Learn Then Test (Angelopoulos et al., 2021,
    proposition 4).

    Example:
        >>> fixed_sequence([0.01, 0.09, 0.2, 0.001], delta=0.1).tolist()
        [True, True, False, False]
    """
    check_level("delta", delta)
    return np.logical_and.accumulate(np.asarray(p_values, np.float64) <= delta)


def smallest_of_steps(certifies: Callable[[float], bool]) -> float | None:
    """Return the smallest alpha, to 4 decimals, that is certified; None if none below 1 is."""
    steps = range(1, ALPHA_STEPS)
    place = bisect_left(steps, True, key=lambda step: certifies(step / ALPHA_STEPS))
    return steps[place] / ALPHA_STEPS if place < len(steps) else None


def selective(
    alpha: float, delta: float, calibration: ScoredResults, tuning: ScoredResults
) -> Certificate:
    """Certify the miss risk among answers of one candidate, given only where it is likely right.

    The miss rate among the answered queries is bounded exactly: given how many calibration queries
    a selection threshold answers, their misses are binomial. Thresholds are tested from the one
    that looks safest on the tuning split towards those that answer more, until one is not certified
    (fixed-sequence testing). The aim is that of Geifman and El-Yaniv, "Selective classification for
    deep neural networks", NeurIPS 2017, without its union bound.

    Raises:
        InvalidRiskLevel: alpha or delta is outside (0, 1).
        RiskUnattainable: no selection threshold is certified.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> score = rng.uniform(size=4000)
        >>> right = rng.uniform(size=(4000, 1)) > score[:, None]
        >>> scores = np.zeros((4000, 1), np.float32)
        >>> split = ScoredResults.from_scores(scores, right, selection_score=score)
        >>> threshold = selective(0.2, 0.1, split[::2], split[1::2]).selection_threshold
        >>> bool(0.3 < threshold < 0.4)  # below t, t/2 of the answers are wrong
        True
    """
    check_level("alpha", alpha)
    check_level("delta", delta)
    scores = np.sort(tuning.require("selection_score"))
    places = np.linspace(0, len(scores) - 1, N_SELECTION_THRESHOLDS).astype(np.int64)
    thresholds = np.unique(widen(scores[places]))
    calibrated, tuned = (_selection_counts(split, thresholds) for split in (calibration, tuning))

    def certified(alpha: float) -> NDArray[np.float64]:
        """Return the certified selection thresholds, ascending."""
        safest = int(np.argmin(_selection_p_values(*tuned, alpha)))
        values = _selection_p_values(*calibrated, alpha)[safest:]
        return thresholds[safest:][fixed_sequence(values, delta)]

    chosen = certified(alpha)
    if len(chosen) == 0:
        smallest = smallest_of_steps(lambda level: len(certified(level)) > 0)
        needed = required_calibration(alpha, delta) or "half a billion"
        advice = "" if smallest is None else f"request alpha >= {smallest:.4f} on new queries, or "
        raise RiskUnattainable(
            f"alpha = {alpha:g} at delta = {delta:g} cannot be certified among answered queries, "
            f"however few of the {len(calibration)} are answered: {advice}calibrate on more (at "
            f"least {needed} must be answered)",
            minimum_alpha=smallest,
            required_calibration=None,
        )
    return Certificate(0.0, "binomial", float(alpha), selection_threshold=float(chosen[-1]))


def _selection_counts(
    scored: ScoredResults, thresholds: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the misses among answered queries, and their number, at each threshold."""
    scores = scored.require("selection_score")
    order = np.argsort(scores, kind="stable")
    wrong = ~scored.require("relevant")[order, 0]
    misses = np.concatenate([[0], np.cumsum(wrong)])
    counts = np.searchsorted(scores[order], thresholds, side="right")
    return misses[counts].astype(np.float64), counts


def _selection_p_values(
    misses: NDArray[np.float64], counts: NDArray[np.int64], alpha: float
) -> NDArray[np.float64]:
    return np.where(counts > 0, p_values(misses, np.maximum(counts, 1), alpha), 1.0)
