"""Which size adapters there are, and which of them suits the data at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig
from rcir.risk.adapters import (
    Constant,
    MinMax,
    Quantile,
    SizeAdapter,
    check_split,
    price_of_rank,
)
from rcir.risk.bounds import allowed_misses
from rcir.risk.learned import Learned
from rcir.risk.rankings import Floats, Rankings

ADAPTERS: Mapping[str, type[SizeAdapter]] = {
    adapter.name: adapter for adapter in (Constant, MinMax, Quantile, Learned)
}
ALPHAS = (0.05, 0.1, 0.2)
FOLDS, FEWEST = 5, 50

Comparison = Mapping[str, Mapping[float, float]]


def adapter_class(name: str) -> type[SizeAdapter]:
    """The adapter of a name, or `InvalidConfig`."""
    if not isinstance(name, str) or name not in ADAPTERS:
        raise InvalidConfig(
            f"adapter {name!r} is unknown; choose one of {', '.join(ADAPTERS)}, auto"
        )
    return ADAPTERS[name]


def fit_adapter(
    name: str,
    rankings: Rankings,
    ranks: Floats,
    alphas: Sequence[float] = ALPHAS,
    delta: float = 0.1,
) -> tuple[SizeAdapter, Comparison]:
    """Fit the named adapter, or with "auto" the one that needs the smallest sets (miss risk).

    "auto" compares all adapters on the adapter split alone, each query sized by an adapter that
    was fitted on the other four fifths, and takes the one with the smallest sets among those that
    never need more than `Constant`. The calibration queries have no part in it, so that the
    guarantee stands whatever it takes.

    Args:
        name: "constant", "minmax", "quantile", "learned" or "auto".
        rankings, ranks: the adapter split, see `SizeAdapter.fit`.
        alphas, delta: levels at which sizes are compared.

    Returns:
        The adapter, fitted on the whole split, and for "auto" the mean set size of each adapter at
        each alpha that as many calibration queries could certify (empty with fewer than 50
        queries, on which nothing can be compared: then it is `Constant`).

    Raises:
        InvalidConfig: there is no such adapter.
        InvalidData: of the split.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> u = rng.uniform(size=2000)
        >>> ranks = np.where(rng.uniform(size=2000) < u / 2, rng.integers(2, 20, 2000), 1)
        >>> adapter, sizes = fit_adapter("auto", Rankings(u, depth=20), ranks)
        >>> sizes[adapter.name][0.1] < sizes["constant"][0.1]
        True
    """
    if name != "auto":
        return adapter_class(name).fit(rankings, ranks), {}
    checked = check_split(rankings, ranks)
    if len(rankings) < FEWEST:
        return Constant(), {}
    comparison = {
        kind.name: _sizes(_cross_fitted(kind, rankings, checked), checked, alphas, delta)
        for kind in ADAPTERS.values()
    }
    constant = comparison["constant"]

    def log_ratio(sizes: Mapping[float, float]) -> float:
        ratios = [sizes[alpha] / constant[alpha] for alpha in constant]
        return float(np.log(ratios).mean()) if ratios and max(ratios) <= 1 else np.inf

    best = min(ADAPTERS, key=lambda kind: (log_ratio(comparison[kind]), kind != "constant"))
    return ADAPTERS[best].fit(rankings, checked), comparison


def _cross_fitted(
    kind: type[SizeAdapter], rankings: Rankings, ranks: NDArray[np.float64]
) -> NDArray[np.float32]:
    """(n, depth) costs, those of every fifth query by an adapter fitted on the others."""
    fold = np.arange(len(rankings)) % FOLDS
    costs = np.empty((len(rankings), rankings.depth), np.float32)
    for held in range(FOLDS):
        inside, outside = fold == held, fold != held
        costs[inside] = kind.fit(rankings[outside], ranks[outside]).costs(rankings[inside])
    return costs


def _sizes(
    costs: NDArray[np.float32],
    ranks: NDArray[np.float64],
    alphas: Sequence[float],
    delta: float,
) -> dict[float, float]:
    """The mean set size at each alpha that this many queries certify."""
    falling = np.sort(price_of_rank(costs, ranks))[::-1]
    sizes = {}
    for alpha in alphas:
        allowed = allowed_misses(len(falling), alpha, delta)
        if allowed >= 0 and np.isfinite(falling[allowed]):
            sizes[alpha] = float(np.count_nonzero(costs <= falling[allowed], axis=1).mean())
    return sizes
