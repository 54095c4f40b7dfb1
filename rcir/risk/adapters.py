"""Size adapters: how the set size depends on the uncertainty of the query.

Every adapter turns the uncertainty u of a query into a scale in (0, 1] and returns

    K = 1 + floor(kappa * scale(u))

images, so that kappa = 0 gives everybody one image, larger kappa never a smaller set, and the most
uncertain queries grow first. The smallest kappa that serves a query whose first match has rank r is
then exactly ``(r - 1) / scale(u)``. The guarantee holds for any adapter that was not fitted on the
calibration queries; only the mean size differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData

Floats = NDArray[np.floating[Any]]
State = Mapping[str, NDArray[np.float64]]


class SizeAdapter(ABC):
    """The rule that turns uncertainty and kappa into set sizes."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def fit(cls, uncertainty: Floats) -> Self:
        """Fit on the adapter split: (n,) uncertainties, n >= 2, none of them NaN or infinite."""

    @abstractmethod
    def scale(self, uncertainty: Floats) -> NDArray[np.float64]:
        """(n,) scales in (0, 1] of (n,) uncertainties, non-decreasing in the uncertainty."""

    @abstractmethod
    def state(self) -> State:
        """The fitted numbers, as arrays to store."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: State) -> Self:
        """The adapter of a stored `state`."""

    def scores(self, ranks: Floats, uncertainty: Floats) -> NDArray[np.float64]:
        """The smallest kappa that serves each query.

        Args:
            ranks: (n,) rank of the first true match, from 1; infinite where there is none.
            uncertainty: (n,) of the same queries.
        """
        return (np.asarray(ranks, np.float64) - 1) / self.scale(uncertainty)

    def sizes(self, kappa: float, uncertainty: Floats) -> NDArray[np.int64]:
        """(n,) set sizes, at least 1: the largest K that `kappa` pays for.

        Raises:
            InvalidData: some uncertainties are NaN or infinite.
        """
        scale = self.scale(_finite(uncertainty))
        sizes = 1 + np.floor(kappa * scale)
        # `scores` must agree to the last bit: kappa pays for K if it is at least (K - 1) / scale.
        sizes += sizes / scale <= kappa
        sizes -= (sizes - 1) / scale > kappa
        return sizes.astype(np.int64)


class Constant(SizeAdapter):
    """Every query gets the same size: the one to beat."""

    name = "constant"

    @classmethod
    def fit(cls, uncertainty: Floats) -> Self:
        _checked(uncertainty)
        return cls()

    def scale(self, uncertainty: Floats) -> NDArray[np.float64]:
        return np.ones(len(uncertainty))

    def state(self) -> State:
        return {}

    @classmethod
    def from_state(cls, state: State) -> Self:
        return cls()


class MinMax(SizeAdapter):
    """Size grows linearly between the extremes of the adapter split (Cai et al., AAAI 2025).

    Unlike there, the extremes never come from the queries at hand, which voids the guarantee, and
    the scale stops at `floor` instead of 0, so that every query can be served by some kappa. If
    all uncertainties are equal the scale is 1.
    """

    name = "minmax"

    def __init__(self, low: float, high: float, floor: float) -> None:
        self.low, self.high, self.floor = low, high, floor

    @classmethod
    def fit(cls, uncertainty: Floats) -> Self:
        checked = _checked(uncertainty)
        return cls(float(checked.min()), float(checked.max()), 1 / len(checked))

    def scale(self, uncertainty: Floats) -> NDArray[np.float64]:
        if self.high == self.low:
            return np.ones(len(uncertainty))
        relative = (np.asarray(uncertainty, np.float64) - self.low) / (self.high - self.low)
        return np.clip(relative, self.floor, 1.0)

    def state(self) -> State:
        return {"range": np.array([self.low, self.high, self.floor])}

    @classmethod
    def from_state(cls, state: State) -> Self:
        return cls(*(float(value) for value in state["range"]))


class Quantile(SizeAdapter):
    """Size grows with the share of the adapter split that is less uncertain: robust to outliers."""

    name = "quantile"

    def __init__(self, sample: NDArray[np.float64]) -> None:
        self.sample = sample

    @classmethod
    def fit(cls, uncertainty: Floats) -> Self:
        return cls(np.sort(_checked(uncertainty)))

    def scale(self, uncertainty: Floats) -> NDArray[np.float64]:
        below = np.searchsorted(self.sample, np.asarray(uncertainty, np.float64), side="right")
        return np.maximum(below, 1) / len(self.sample)

    def state(self) -> State:
        return {"sample": self.sample}

    @classmethod
    def from_state(cls, state: State) -> Self:
        return cls(state["sample"])


ADAPTERS: Mapping[str, type[SizeAdapter]] = {
    adapter.name: adapter for adapter in (Constant, MinMax, Quantile)
}


def adapter_class(name: str) -> type[SizeAdapter]:
    """The adapter of a name, or `InvalidConfig`."""
    if name not in ADAPTERS:
        raise InvalidConfig(f"adapter {name!r} is unknown; choose one of {', '.join(ADAPTERS)}")
    return ADAPTERS[name]


def _checked(uncertainty: Floats) -> NDArray[np.float64]:
    values = _finite(uncertainty)
    if values.ndim != 1 or len(values) < 2:
        raise InvalidData(
            f"the adapter split has uncertainties of shape {values.shape}; it must be (n,), n >= 2"
        )
    return values


def _finite(uncertainty: Floats) -> NDArray[np.float64]:
    values = np.asarray(uncertainty, np.float64)
    if not np.isfinite(values).all():
        raise InvalidData(
            f"{int((~np.isfinite(values)).sum())} of {values.size} uncertainties are NaN or "
            "infinite; an encoder that diverged in training does this"
        )
    return values
