"""Verified shortlists: the threshold of a shortlist and that of a verifier, certified together.

A verifier scores a query and a candidate: the inliers of local features, a vision-language model,
a person. It is better than the search, and slow, so that it sees a shortlist, the candidates up to
a threshold of their nonconformity scores; an item is accepted if its verification score reaches a
second threshold. The answer is one item, or none. Two risks are certified together:

- the miss rate, P(no true match is accepted | a match in the gallery), at most alpha;
- the wrong rate, P(an item is accepted that is not a match), at most `wrong`.

To certify each stage at its own level does not control the miss rate: misses of both stages add up
(Xu et al., IJCAI 2025, arXiv 2404.17769). Here each pair of thresholds is a hypothesis of Learn
then Test (Angelopoulos et al., 2021). The tuning split fixes which are tested, in which order:
those that no other one beats in both p-value and cost, from safe to cheap (Laufer-Goldshlager et
al., "Efficiently controlling multiple risks with Pareto testing", ICLR 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.risk.bounds import check_level, p_values
from rcir.risk.population import Rows, check_arrays
from rcir.risk.results import ScoredResults
from rcir.risk.testing import fixed_sequence, smallest_of_steps

Policy = Literal["first", "best"]
POLICIES: tuple[Policy, ...] = ("first", "best")
N_SHORTLISTS, N_ACCEPTANCES = 32, 16  # thresholds; acceptances of matches, and as many of others


class Pair(NamedTuple):
    """What decides the answer to a query.

    Attributes:
        policy: "first" verifies the shortlist in order and accepts the first candidate whose score
            reaches `acceptance`; "best" verifies all of it and accepts the best, if that does.
        shortlist: largest nonconformity score of a candidate that is verified.
        acceptance: least verification score of an item that is accepted.
    """

    policy: Policy
    shortlist: float
    acceptance: float


class Grid(NamedTuple):
    """Pairs of policies, shortlists and acceptances, see `Pair`; in this order, they have m pairs.

    Attributes:
        policies, shortlists, acceptances: the values, each with all others.
    """

    policies: Sequence[Policy]
    shortlists: NDArray[np.float32]
    acceptances: NDArray[np.float64]

    def pair(self, number: int) -> Pair:
        """Return one of the m pairs."""
        shape = len(self.policies), len(self.shortlists), len(self.acceptances)
        policy, shortlist, acceptance = map(int, np.unravel_index(number, shape))
        return Pair(
            self.policies[policy],
            float(self.shortlists[shortlist]),
            float(self.acceptances[acceptance]),
        )


class Counts(NamedTuple):
    """Sums over the queries of a split, for m pairs.

    Attributes:
        missed, wrong, verified: (m,) queries with a match of which none is accepted, queries of
            which a wrong item is accepted, and verifications.
    """

    missed: NDArray[np.int64]
    wrong: NDArray[np.int64]
    verified: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class VerifiedResults:
    """n queries with the candidates that may be verified, and all their verification scores.

    Attributes:
        queries: nonconformity scores (n, k) and relevance of the first k candidates, and the number
            of matches in the gallery; independent of each other.
        verification: (n, k) scores of the verifier in the same order, larger for a likelier match;
            anything where there is no candidate.

    Raises:
        InvalidConfig: the queries come in clusters.
        InvalidData: shapes differ, a score is NaN, or no query has a match.
    """

    queries: ScoredResults
    verification: NDArray[np.float64]

    def __post_init__(self) -> None:
        check_arrays(self, {"verification": self.queries.require("scores").shape})
        if np.isnan(self.verification).any():
            raise InvalidData("some verification scores are NaN: pass a number for each candidate")
        if self.queries.population.clusters is not None:
            raise InvalidConfig(
                "the queries come in clusters, of which the binomial bound does not hold: verify "
                "one query of each cluster"
            )
        if not self.queries.matchable.any():
            raise InvalidData("no query has a match in the gallery: pass some that have one")

    def __len__(self) -> int:
        return len(self.queries)

    def __getitem__(self, rows: Rows) -> VerifiedResults:
        """Return the results of some queries."""
        return VerifiedResults(self.queries[rows], self.verification[rows])

    @property
    def of_constant_size(self) -> VerifiedResults:
        """The results with shortlists of one size for all queries, as a baseline."""
        return replace(self, queries=self.queries.of_constant_size)

    def grid(self, policies: Sequence[Policy]) -> Grid:
        """Return a grid of pairs: shortlists of all sizes, and acceptances at quantiles."""
        relevant = self.queries.require("relevant")
        is_candidate = np.isfinite(self.queries.require("scores"))
        best_wrong = np.where(is_candidate & ~relevant, self.verification, -np.inf).max(axis=1)
        quantiles = [
            np.quantile(scores[np.isfinite(scores)], np.linspace(0, 1, N_ACCEPTANCES))
            for scores in (self.verification[relevant], best_wrong)
            if np.isfinite(scores).any()
        ]
        acceptances = np.unique(np.concatenate(quantiles or [np.zeros(1)]))
        return Grid(policies, self.queries.size_thresholds(N_SHORTLISTS), acceptances)

    def counts(self, grid: Grid) -> Counts:
        """Count errors and verifications of all pairs of a grid."""
        scores, relevant = self.verification, self.queries.require("relevant")
        rows, k = np.arange(len(self)), scores.shape[1]
        matchable = self.queries.matchable[:, None]
        sizes = np.column_stack([self.queries.sizes(float(each)) for each in grid.shortlists])
        shape = len(grid.policies), len(grid.shortlists), len(grid.acceptances)
        counts = np.empty((3, *shape), np.int64)
        for place, policy in enumerate(grid.policies):
            for number in range(shape[2] if policy == "first" else shape[1]):
                if policy == "first":
                    reaches = scores >= grid.acceptances[number]
                    column = np.where(reaches.any(axis=1), reaches.argmax(axis=1), k)
                    accepted = column[:, None] < sizes
                    verified = np.minimum(column[:, None] + 1, sizes)
                    cells: Any = (slice(None), place, slice(None), number)
                else:
                    within = np.arange(k) < sizes[:, number, None]
                    column = np.where(within, scores, -np.inf).argmax(axis=1)
                    accepted = scores[rows, column][:, None] >= grid.acceptances
                    verified = sizes[:, number, None]
                    cells = (slice(None), place, number)
                right = accepted & relevant[rows, np.minimum(column, k - 1)][:, None]
                errors = [(matchable & ~right).sum(axis=0), (accepted & ~right).sum(axis=0)]
                counts[cells] = [*errors, np.broadcast_to(verified.sum(axis=0), errors[0].shape)]
        return Counts(*counts.reshape(3, -1))

    def p_values(self, counts: Counts, alpha: float, wrong: float) -> NDArray[np.float64]:
        """(m,) exact p-values of the hypotheses that one of both rates is above its level.

        Both have to be rejected, so that the larger p-value is one of their union.
        """
        n_matchable = int(np.count_nonzero(self.queries.matchable))
        return np.maximum(
            p_values(counts.missed.astype(np.float64), n_matchable, alpha),
            p_values(counts.wrong.astype(np.float64), len(self), wrong),
        )


@dataclass(frozen=True)
class VerifierCertificate:
    """A certified pair of thresholds; `str` states the guarantee.

    Attributes:
        pair: what decides the answers.
        alpha, wrong: the levels of the miss rate, among queries with a match, and of the rate of
            wrong items, among all.
        delta: probability of misleading calibration queries.
        n_calibration, n_matchable: number of calibration queries, and of those with a match.
        mean_verified: verifications of a calibration query on average.
        depth: candidates of a query that may be verified at most.
    """

    pair: Pair
    alpha: float
    wrong: float
    delta: float
    n_calibration: int
    n_matchable: int
    mean_verified: float
    depth: int

    def __str__(self) -> str:
        return (
            f"With probability at least {1 - self.delta:g}, of the queries that have a match at "
            f"most {self.alpha:g} end without it, and at most {self.wrong:g} of all queries end "
            f"with a wrong item ({self.n_calibration} calibration queries, {self.n_matchable} of "
            f"them with a match). These took {self.mean_verified:.1f} verifications per query on "
            f"average, instead of {self.depth}."
        )


def certify_verification(
    tuning: VerifiedResults,
    calibration: VerifiedResults,
    alpha: float,
    wrong: float,
    delta: float,
    policies: Sequence[Policy] = POLICIES,
) -> VerifierCertificate:
    """Certify the cheapest pair of thresholds that keeps both risks.

    Args:
        tuning: queries that choose the pairs and their order; they are not calibration queries.
        calibration: queries that certify; the nonconformity scores do not depend on them.
        alpha: largest miss rate among queries with a match, in (0, 1).
        wrong: largest rate of wrong items among all queries, in (0, 1).
        delta: probability, in (0, 1), that one of both is above its level.
        policies: which of both may be chosen.

    Raises:
        InvalidRiskLevel: a level is outside (0, 1).
        RiskUnattainable: no pair is certified.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> relevant = np.arange(8) == rng.geometric(0.6, 1200)[:, None] - 1
        >>> scores = np.tile(np.arange(8, dtype=np.float32), (1200, 1))
        >>> queries = ScoredResults.from_scores(scores, relevant, n_relevant=np.ones(1200, int))
        >>> verified = VerifiedResults(queries, 4.0 * relevant + rng.standard_normal((1200, 8)))
        >>> certificate = certify_verification(verified[:400], verified[400:], 0.1, 0.1, 0.1)
        >>> certificate.pair.policy, certificate.mean_verified < 2
        ('first', True)
    """
    alpha, wrong = check_level("alpha", alpha), check_level("wrong", wrong)
    grid = tuning.grid(policies)
    tuned, counts = tuning.counts(grid), calibration.counts(grid)

    def cheapest(alpha: float, wrong: float) -> int | None:
        """Return the number of the cheapest certified pair; None if none is certified."""
        path = _safe_to_cheap(tuning.p_values(tuned, alpha, wrong), tuned.verified)
        p = calibration.p_values(counts, alpha, wrong)[path]
        n_rejected = int(np.count_nonzero(fixed_sequence(p, delta)))
        return int(path[n_rejected - 1]) if n_rejected else None

    chosen = cheapest(alpha, wrong)
    n, n_matchable = len(calibration), int(np.count_nonzero(calibration.queries.matchable))
    if chosen is None:
        least = smallest_of_steps(lambda level: cheapest(level, wrong) is not None)
        other = smallest_of_steps(lambda level: cheapest(alpha, level) is not None)
        advice = [
            f"{name} >= {level:.4f} with this {fixed}"
            for name, level, fixed in (("alpha", least, "wrong"), ("wrong", other, "alpha"))
            if level is not None
        ]
        raise RiskUnattainable(
            f"alpha = {alpha:g} and wrong = {wrong:g} at delta = {delta:g} cannot be certified "
            f"with {n} verified queries, {n_matchable} of them with a match: request "
            f"{' or '.join(advice) or 'larger levels'} (on new queries, as it is chosen after "
            "looking), verify more candidates of each, or calibrate on more queries",
            minimum_alpha=least,
            required_calibration=None,
        )
    return VerifierCertificate(
        pair=grid.pair(chosen),
        alpha=alpha,
        wrong=wrong,
        delta=delta,
        n_calibration=n,
        n_matchable=n_matchable,
        mean_verified=float(counts.verified[chosen] / n),
        depth=calibration.queries.depth,
    )


def _safe_to_cheap(p: NDArray[np.float64], cost: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the pairs that no other one beats in both p-value and cost, the safest first."""
    order = np.lexsort((p, cost))
    ascending = p[order]
    best_before = np.minimum.accumulate(np.append(np.inf, ascending[:-1]))
    return order[ascending < best_before][::-1]
