"""Do recent queries look like the calibration queries?"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from scipy.stats import ks_2samp

from rcir.errors import InvalidData
from rcir.risk.bounds import check_level
from rcir.risk.outcomes import Outcomes


@dataclass(frozen=True)
class Exchangeability:
    """A test of "recent and calibration queries come from one source".

    Attributes:
        p_values: of the two-sample Kolmogorov-Smirnov test of each quantity: "uncertainty" of the
            queries, and "score", the smallest kappa that serves them.
        p_value: of both together (Bonferroni); where the hypothesis is true, it is at most x with
            probability at most x.
        n_calibration, n_recent: numbers of queries.
    """

    p_values: Mapping[str, float]
    n_calibration: int
    n_recent: int

    @property
    def p_value(self) -> float:
        return min(1.0, len(self.p_values) * min(self.p_values.values()))

    def contradicted(self, level: float = 0.01) -> bool:
        """Whether the test rejects at a level in (0, 1): then the guarantee is void."""
        return self.p_value <= check_level("level", level)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:.3g}" for name, value in self.p_values.items())
        return (
            f"{self.n_recent} recent against {self.n_calibration} calibration queries: p-value "
            f"{self.p_value:.3g} that they come from one source ({parts})."
        )


def check_exchangeability(calibration: Outcomes, recent: Outcomes) -> Exchangeability:
    """Compare recent labelled queries with the calibration queries.

    No proof that they are alike: a small p-value says that they are not, a large one that these
    queries do not show it. Queries without any match within the search depth count as the largest
    score.

    Raises:
        InvalidData: fewer than 2 recent queries.

    Example:
        >>> import numpy as np
        >>> from rcir.risk import Constant, Rankings
        >>> def outcomes(uncertainty):
        ...     queries = Rankings(uncertainty, depth=1)
        ...     found = np.ones((len(queries), 1), bool)
        ...     return Outcomes.of(Constant(), queries, found, np.ones(len(queries), int))
        >>> rng = np.random.default_rng(0)
        >>> calibration = outcomes(rng.normal(size=1000))
        >>> check_exchangeability(calibration, outcomes(rng.normal(size=200))).contradicted()
        False
        >>> check_exchangeability(calibration, outcomes(rng.normal(1, size=200))).contradicted()
        True
    """
    if len(recent) < 2:
        raise InvalidData(f"{len(recent)} recent queries; at least 2 are needed to compare")
    pairs = {
        "uncertainty": (calibration.uncertainty, recent.uncertainty),
        "score": (calibration.scores, recent.scores),
    }
    with warnings.catch_warnings():
        # SciPy says so where the exact p-value is out of reach, and takes the asymptotic one.
        warnings.filterwarnings("ignore", "ks_2samp: Exact calculation", RuntimeWarning)
        p_values = {name: float(ks_2samp(*pair).pvalue) for name, pair in pairs.items()}
    return Exchangeability(
        p_values,
        len(calibration),
        len(recent),
    )
