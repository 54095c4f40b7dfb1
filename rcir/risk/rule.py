"""Set rules: a score function, and the queries that certify its thresholds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.risk.balance import thresholds_of
from rcir.risk.bounds import Bound, check_among, check_bound, corrected
from rcir.risk.certification import certify, check_depths
from rcir.risk.guarantee import Guarantee
from rcir.risk.open_set import is_accepted
from rcir.risk.probability import MatchProbabilities, sizes_of
from rcir.risk.refusals import refused
from rcir.risk.request import Request
from rcir.risk.results import ScoredResults, SearchResults
from rcir.risk.score_functions import Ranking, ScoreFunction


@dataclass(frozen=True, eq=False)
class SetRule:
    """A rule that sizes sets: a score function, and the queries that certify its thresholds.

    Attributes:
        score_function: fitted on the tuning split.
        tuned: the queries of the tuning split, scored by it; None if there is none.
        evidence: the calibration queries, scored by it; they alone certify.
        bound: of the miss risk, see `rcir.risk.certify`.
        uncertainty: name of the uncertainty of queries that both splits have.

    Raises:
        InvalidConfig: there is no such bound.
        InvalidData: the splits were searched to different depths.

    Example:
        >>> from rcir.risk import Constant, LabelledResults, make_request, score
        >>> relevant = np.array([[True, False]] * 900 + [[False, True]] * 100)
        >>> queries = SearchResults(np.zeros(1000), depth=2)
        >>> labelled = LabelledResults(queries, relevant, np.ones(1000, int))
        >>> scored = score(Constant(), labelled)
        >>> rule = SetRule(Constant(), scored[::2], scored[1::2])
        >>> guarantee = rule.guarantee(make_request(0.05, 0.1))
        >>> rule.sets(queries[:3], guarantee)[1].tolist()
        [2, 2, 2]
    """

    score_function: ScoreFunction
    tuned: ScoredResults | None
    evidence: ScoredResults
    bound: Bound = "binomial"
    uncertainty: str = "encoder"

    def __post_init__(self) -> None:
        check_bound(self.bound)
        if self.tuned is not None:
            check_depths(self.tuned, self.evidence)

    def guarantee(self, request: Request, chosen_among: int = 1) -> Guarantee:
        """Certify a request.

        Args:
            request: with the delta that is to hold although the retriever was chosen.
            chosen_among: number of retrievers that it was chosen among, by results on the
                calibration queries. Each is certified at delta divided by it, see `corrected`.

        Raises:
            InvalidConfig: the request is impossible.
            RiskUnattainable: nothing certifies it.
        """
        if check_among(chosen_among) == 1:
            certificate = certify(request, self.evidence, self.tuned, self.bound)
        elif request.delta is None:
            raise InvalidConfig(
                f"delta is None, but the retriever was chosen among {chosen_among}: an average "
                "over calibrations does not survive a choice; give a delta, or calibrate on "
                "other queries"
            )
        else:
            at_delta = replace(request, delta=corrected(request.delta, chosen_among))
            among = f"chosen among {chosen_among} retrievers"
            with refused(f"{among}, each certified at delta / {chosen_among}"):
                certificate = certify(at_delta, self.evidence, self.tuned, self.bound)
        queries, unmatchable = self.evidence.of_group(request.group), None
        if request.counted == "matchable":
            unmatchable = queries.population[~queries.matchable]
            queries = queries[queries.matchable]
        population = queries.population
        labelled = self.evidence.population.single_labels is not None
        return Guarantee(
            request=request,
            certificate=certificate,
            score_function=self.score_function.name,
            n_calibration=len(population),
            cluster=population.cluster_word,
            n_clusters=None if population.clusters is None else population.n_units,
            chosen_among=chosen_among,
            n_labels=population.n_labels if labelled else None,
            query_label=population.label_word,
            n_unmatchable=None if unmatchable is None else len(unmatchable),
            n_unmatchable_units=None if unmatchable is None else unmatchable.n_units,
            n_unmatchable_labels=None if unmatchable is None else unmatchable.n_labels,
        )

    def sets(
        self, results: SearchResults, guarantee: Guarantee
    ) -> tuple[Ranking, NDArray[np.int64]]:
        """Size the sets of queries.

        Returns:
            The ranking of the candidates, and (n,) how many of them are in each set: 0 for a query
            that is not answered.

        Raises:
            InvalidData: the queries were searched to another depth.
        """
        by_label = self.score_function.by_label_probability  # in labels as likely as need be
        if results.depth != self.evidence.depth and not by_label:
            raise InvalidData(
                f"the queries were searched to depth {results.depth}, the calibration queries to "
                f"{self.evidence.depth}: search alike"
            )
        ranking = replace(
            self.score_function.rank(results),
            acceptance=results.acceptance,
            uncertainty=results.uncertainty,
        )
        return ranking, sizes_of(ranking, guarantee)

    def match_probabilities(self, guarantee: Guarantee) -> MatchProbabilities:
        """Return the probabilities of candidates, for queries like those that get a set."""
        request, limit = guarantee.request, guarantee.certificate.acceptance_threshold
        queries, tuned = self.evidence.of_group(request.group), self.tuned
        if request.labels == "new":
            queries = queries.by_label()
        if limit is not None:
            queries = _accepted(queries, limit) or queries
            tuned = None if tuned is None else _accepted(tuned, limit)
        return MatchProbabilities.fit(queries, tuned)

    def constant_size(
        self, request: Request, queries: ScoredResults, chosen_among: int = 1
    ) -> float | None:
        """Return the mean size of sets of the same size, as a baseline for adaptive sizes.

        Sets take the same candidates in the same order, until these run out.

        Args:
            request, chosen_among: see `guarantee`.
            queries: scored by the rule; of these sets.

        Returns:
            The mean, or None if nothing certifies such sets.
        """
        baseline = replace(
            self,
            tuned=None if self.tuned is None else self.tuned.of_constant_size,
            evidence=self.evidence.of_constant_size,
        )
        return baseline.mean_size(request, queries.of_constant_size, chosen_among)

    def mean_size(
        self, request: Request, queries: ScoredResults, chosen_among: int = 1
    ) -> float | None:
        """Return the mean size of the sets of queries that the rule scored, see `constant_size`."""
        try:
            certificate = self.guarantee(request, chosen_among).certificate
        except RiskUnattainable:
            return None
        sizes = queries.sizes(thresholds_of(certificate, queries.uncertainty))
        if (limit := certificate.acceptance_threshold) is not None:
            sizes = np.where(is_accepted(queries.require("acceptance"), limit), sizes, 0)
        return float(sizes.mean())


def _accepted(queries: ScoredResults, limit: float) -> ScoredResults | None:
    accepted = is_accepted(queries.require("acceptance"), limit)
    return queries[accepted] if accepted.any() else None
