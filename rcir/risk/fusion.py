"""A fusion of experts, each of which gives every candidate of a query a number.

Each expert becomes a probability by a temperature of its own; the fusion is a weighted product of
these probabilities. Temperatures and weights are fitted by maximum likelihood on a tuning split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray

from rcir.store.codec import Array

ANY = 0.002  # share of an expert's probability that is of any candidate: none rules out one alone
RIDGE = 15.0
TINY = 1e-30  # instead of 0, so that its product with -inf is -inf
MAX_LOG_TEMPERATURE = 12.0  # relative to the scale of an expert


@dataclass(frozen=True, eq=False)
class Fusion:
    """A fitted fusion of experts: softmax of the weighted sum of their log probabilities.

    The log probability of expert f for one of k candidates is F = log(.998 softmax(b f) + .002 / k)
    with temperature b, and the fusion is softmax(sum of w F) with weights w >= 0. This is a
    logarithmic opinion pool (Genest and Zidek, Statistical Science 1986). Without the share of .002
    for any candidate, one expert that is certain on a clean tuning split could overrule all others
    on worse queries.

    Attributes:
        temperatures: (e,) b of each expert.
        weights: (e,) w of each expert.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> right = np.arange(5) == rng.integers(5, size=400)[:, None]
        >>> experts = np.stack([right + s * rng.normal(size=right.shape) for s in (0.5, 1, 100)])
        >>> fusion = Fusion.fit(experts, right)
        >>> bool(fusion.temperatures[0] > fusion.temperatures[2])
        True
        >>> fusion.log_probabilities(experts).shape
        (400, 5)
    """

    temperatures: Annotated[NDArray[np.float64], Array(1)]
    weights: Annotated[NDArray[np.float64], Array(1)]

    def __post_init__(self) -> None:
        for name in ("temperatures", "weights"):
            copy = np.array(getattr(self, name), np.float64)
            copy.setflags(write=False)
            object.__setattr__(self, name, copy)

    @classmethod
    def fit(
        cls, experts: NDArray[np.float64], right: NDArray[np.bool_], ridge: float = RIDGE
    ) -> Self:
        """Fit on queries of a tuning split.

        The weights minimise the sum of negative log likelihoods + ridge |w - t 1|^2, where t is the
        temperature of the sum of all experts. The likelihood of a query is the probability of all
        its right candidates together; queries without one are left out. The n queries share one
        more observation, which is equally likely to be of any candidate: without it, experts that
        make no mistake would become certain (`_likelihood`).

        Args:
            experts: (e, n, k) numbers, larger for likelier candidates; -inf where there is no
                candidate, for all experts alike.
            right: (n, k) True where a candidate is right.
            ridge: how strongly the weights are drawn to a common one.
        """
        from scipy.optimize import minimize  # slow to import

        usable = (right & np.isfinite(experts[0])).any(axis=1)
        experts, right = experts[:, usable], right[usable]
        temperatures = np.array([fit_temperature(expert, right) for expert in experts])
        logs = np.array(list(map(expert_log_probabilities, experts, temperatures.tolist())))
        common = fit_temperature(logs.sum(axis=0), right)
        finite = np.where(np.isfinite(logs), logs, 0.0)

        def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            logits = np.where(np.isfinite(logs[0]), np.tensordot(weights, finite, 1), -np.inf)
            value, gradient = _likelihood(logits, right)
            return (
                value + ridge * float(((weights - common) ** 2).sum()),
                np.tensordot(finite, gradient, 2) + 2 * ridge * (weights - common),
            )

        start = np.full(len(experts), common)
        bounds = [(0.0, None)] * len(experts)
        options = {"ftol": 1e-12, "gtol": 1e-8, "maxiter": 500}
        result = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        return cls(temperatures, result.x)

    def log_probabilities(self, experts: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n, k) log probabilities of candidates by experts (e, n, k), -inf where there is none."""
        total = np.zeros(experts.shape[1:], experts.dtype)
        parts = zip(experts, self.temperatures.tolist(), self.weights.tolist(), strict=True)
        for expert, temperature, weight in parts:
            logs = expert_log_probabilities(expert, temperature)
            logs *= max(weight, TINY)
            total += logs
        return log_softmax(total.astype(np.float64))


def expert_log_probabilities(expert: NDArray[Any], temperature: float) -> NDArray[Any]:
    """(n, k) log probabilities of one expert, -inf where there is no candidate."""
    missing = np.isneginf(expert)
    number = expert.shape[1] - (missing.sum(axis=1, keepdims=True) if missing.any() else 0)
    values: NDArray[Any] = max(temperature, TINY) * expert
    highest = values.max(axis=1, keepdims=True)
    values -= np.where(np.isfinite(highest), highest, 0.0)
    np.exp(values, out=values)
    values *= (1 - ANY) / np.maximum(values.sum(axis=1, keepdims=True), TINY)
    values += np.asarray(ANY / np.maximum(number, 1), values.dtype)
    np.log(values, out=values)
    values[missing] = -np.inf
    return values


def fit_temperature(expert: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """Return the factor b > 0 of numbers (n, k) that makes softmax(b f) likeliest.

    The likelihood of several right candidates need not be concave: the search begins on a grid.
    Experts that do not distinguish candidates get 0.
    """
    from scipy.optimize import minimize_scalar

    finite = np.isfinite(expert)
    gaps = np.where(finite, expert, -np.inf).max(axis=1, keepdims=True, initial=-np.inf) - expert
    scale = float(np.mean(gaps, where=finite)) if finite.any() else 0.0
    if not scale > 0:
        return 0.0

    def loss(log_factor: float) -> float:
        return _likelihood(np.where(finite, np.exp(log_factor) / scale * -gaps, -np.inf), right)[0]

    grid = np.linspace(-4, MAX_LOG_TEMPERATURE, 17)
    best = grid[int(np.argmin([loss(value) for value in grid]))]
    found = minimize_scalar(
        loss, bounds=(best - 1, best + 1), method="bounded", options={"xatol": 1e-6}
    )
    return float(np.exp(found.x) / scale)


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the log softmax over the last axis; -inf remains."""
    highest = logits.max(axis=-1, keepdims=True)
    shifted: NDArray[np.float64] = logits - np.where(np.isfinite(highest), highest, 0.0)
    sums = np.exp(shifted).sum(axis=-1, keepdims=True)
    shifted -= np.log(np.where(sums > 0, sums, 1.0))
    return shifted


def _likelihood(
    logits: NDArray[np.float64], right: NDArray[np.bool_]
) -> tuple[float, NDArray[np.float64]]:
    """Return the sum of negative log likelihoods and its gradient (n, k) by the logits.

    Each of the n queries is smoothed: a share of 1 / (n + 1) of it is of any candidate (label
    smoothing, Szegedy et al., CVPR 2016).
    """
    logs = log_softmax(logits)
    is_candidate = np.isfinite(logs)
    highest = np.where(right, logs, -np.inf).max(axis=1, keepdims=True)
    shares = np.exp(np.where(right, logs - highest, -np.inf))
    sums = shares.sum(axis=1, keepdims=True)
    smoothing = 1 / (len(logs) + 1)
    anything = is_candidate / is_candidate.sum(axis=1, keepdims=True)
    value = (1 - smoothing) * (highest + np.log(sums)).sum()
    value += smoothing * (anything * np.where(is_candidate, logs, 0)).sum()
    target = (1 - smoothing) * shares / sums + smoothing * anything
    return -float(value), np.exp(logs) - target
