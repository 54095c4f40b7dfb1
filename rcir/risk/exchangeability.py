"""Do recent queries look like the calibration queries, and is the risk what was certified?"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtrc

from rcir.errors import InvalidData
from rcir.risk.bounds import check_level
from rcir.risk.labelled import LabelledResults
from rcir.risk.score_functions import widened


@dataclass(frozen=True)
class Exchangeability:
    """A test of "recent and calibration queries come from one source, at a risk of at most alpha".

    Attributes:
        p_values: of the two-sample Kolmogorov-Smirnov test of each quantity: "uncertainty" of the
            queries, and "score", the smallest threshold that serves them; and, where a risk was
            certified, of the one-sided binomial test of "risk", the share of recent queries that
            the certified threshold misses.
        p_value: of all together (Bonferroni); where the hypothesis is true, it is at most x with
            probability at most x.
        n_calibration, n_recent: numbers of queries.
        misses: number of recent queries that the certified threshold misses; None without one.
        alpha: the certified risk; None without one.
    """

    p_values: Mapping[str, float]
    n_calibration: int
    n_recent: int
    misses: int | None = None
    alpha: float | None = None

    @property
    def p_value(self) -> float:
        return min(1.0, len(self.p_values) * min(self.p_values.values()))

    def contradicted(self, level: float = 0.01) -> bool:
        """Whether the test rejects at a level in (0, 1): then the guarantee is void."""
        return self.p_value <= check_level("level", level)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:.3g}" for name, value in self.p_values.items())
        hypothesis = "that they come from one source"
        missed = ""
        if self.alpha is not None:
            hypothesis += f" and at most {self.alpha:g} are missed"
            missed = f"; {self.misses} of the recent ones were missed"
        return (
            f"{self.n_recent} recent against {self.n_calibration} calibration queries: p-value "
            f"{self.p_value:.3g} {hypothesis} ({parts}){missed}."
        )


def check_exchangeability(
    calibration: LabelledResults,
    recent: LabelledResults,
    certified: tuple[float, float] | None = None,
) -> Exchangeability:
    """Compare recent labelled queries with the calibration queries.

    No proof that they are alike: a small p-value says that they are not, a large one that these
    queries do not show it. Queries without any match within the search depth count as the largest
    score. With `certified` it is also tested whether the risk of the recent queries is at most the
    one that was certified, which tells a higher risk sooner than the comparison does. It may be
    higher without any change too: if the calibration was among the share delta.

    Args:
        calibration, recent: labelled results under the same score function.
        certified: (threshold, alpha): a threshold and the miss rate that it was certified for.

    Raises:
        InvalidData: fewer than 2 recent queries.
        InvalidRiskLevel: alpha is out of range.

    Example:
        >>> import numpy as np
        >>> from rcir.risk import Constant, SearchResults
        >>> rng = np.random.default_rng(0)
        >>> def labelled(n, risk, shift=0.0):  # sets of one candidate
        ...     queries = SearchResults(rng.normal(shift, size=n), depth=1)
        ...     found = rng.uniform(size=(n, 1)) >= risk
        ...     return LabelledResults.of(queries, found, np.ones(n, int)).scored(Constant())
        >>> calibration, same = labelled(400, 0.08), labelled(200, 0.08)
        >>> shifted, worse = labelled(200, 0.08, shift=1), labelled(200, 0.16)
        >>> recent = (same, shifted, worse)
        >>> [check_exchangeability(calibration, each).contradicted() for each in recent]
        [False, True, False]
        >>> check_exchangeability(calibration, worse, certified=(0.0, 0.1)).contradicted()
        True
    """
    if len(recent) < 2:
        raise InvalidData(f"{len(recent)} recent queries; at least 2 are needed to compare")
    pairs = {
        "uncertainty": (calibration.uncertainty, recent.uncertainty),
        "score": (calibration.scores, recent.scores),
    }
    from scipy.stats import ks_2samp  # slow to import

    with warnings.catch_warnings():
        # SciPy says so where the exact p-value is out of reach, and takes the asymptotic one.
        warnings.filterwarnings("ignore", "ks_2samp: Exact calculation", RuntimeWarning)
        p_values = {name: float(ks_2samp(*pair).pvalue) for name, pair in pairs.items()}
    if certified is None:
        return Exchangeability(p_values, len(calibration), len(recent))
    threshold, alpha = certified[0], check_level("alpha", certified[1])
    misses = int(np.count_nonzero(recent.scores > widened(threshold).astype(np.float32)))
    # P(Binomial(n, alpha) >= misses)
    p_values["risk"] = float(bdtrc(misses - 1, len(recent), alpha)) if misses else 1.0
    return Exchangeability(p_values, len(calibration), len(recent), misses, alpha)
