"""Guarantees: what a request is answered with, in numbers and in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable, printable
from rcir.risk.bounds import Bound, Certificate, check_among, check_bound, corrected
from rcir.risk.certification import certify
from rcir.risk.losses import find_risk
from rcir.risk.options import Alpha
from rcir.risk.population import LABEL
from rcir.risk.request import Mix, Request
from rcir.risk.results import ScoredResults, SearchResults, set_sizes
from rcir.risk.score_functions import Ranking, ScoreFunction

AT_EVERY_MOMENT = "at every moment since this gallery was calibrated"
_CERTIFIED = tuple(field.name for field in fields(Certificate))


@dataclass(frozen=True)
class Guarantee:
    """A certified request; `str` states it in one sentence.

    The attributes of the certificate are attributes too, and so are alpha, delta and the risk of
    the request: `guarantee.threshold` is `guarantee.certificate.threshold`.

    Attributes:
        request: what is guaranteed.
        certificate: the threshold, with its bound and level.
        score_function: its name.
        n_calibration: number of calibration queries.
        cluster: what the clusters are that queries come in, such as "video"; each counts the same.
        n_clusters: number of clusters of the calibration queries.
        n_labels: number of labels of the calibration queries; None if they have no single label.
        query_label: what a label is: "label", or such as "250-wide cell" for places.
        attempts: number of calibrations, with different choices, of some of the same queries.
        seed: that divided the queries; None if it was not chosen.
        chosen_among: number of retrievers that the one that answered was chosen among, by results
            on the calibration queries; 1 without such a choice.
        left_out: "item", or what else the search of a query left out, such as "moment", if the
            calibration queries were items of the gallery; one query of each calibrated.
    """

    request: Request
    certificate: Certificate
    score_function: str
    n_calibration: int
    cluster: str | None = None
    n_clusters: int | None = None
    chosen_among: int = 1
    n_labels: int | None = None
    query_label: str = LABEL
    attempts: int = 1
    seed: int | None = None
    left_out: str | None = None

    @property
    def alpha(self) -> Alpha:
        """The largest risk that was requested; of several risks, each by its name."""
        return self.request.alpha

    @property
    def delta(self) -> float | None:
        """The probability with which the guarantee may fail; None if it holds on average."""
        return self.request.delta

    @property
    def risk(self) -> str:
        """The name of the risk; of several, all names."""
        return ", ".join(self.request.levels)

    @property
    def threshold(self) -> float:
        """Candidates with at most this score are in the set."""
        return self.certificate.threshold

    @property
    def selection_threshold(self) -> float | None:
        """With `abstain`, queries with at most this selection score are answered."""
        return self.certificate.selection_threshold

    @property
    def bound(self) -> str:
        """The name of the confidence bound."""
        return self.certificate.bound

    @property
    def risk_bound(self) -> float | None:
        """The certified level, at most alpha; None for several risks."""
        return self.certificate.risk_bound

    @property
    def n_groups(self) -> int | None:
        """Number of groups, if the guarantee holds for all mixes of groups."""
        return self.certificate.n_groups

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; several risks are named in one text."""
        values: dict[str, Any] = {**self.request.to_keywords(), "risk": self.risk}
        values |= {name: getattr(self.certificate, name) for name in _CERTIFIED}
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        del own["request"], own["certificate"]
        return values | own

    def __str__(self) -> str:
        request = self.request
        matches, items, distinct = "matches", "items", ""
        if request.distinct is not None:
            matches = items = f"{request.distinct}s"
            distinct = f" of distinct {items}"
        clauses = []
        for name, level in request.levels.items():
            risk = find_risk(name, request.abstain)
            words = {"sets": risk.sets + distinct, "matches": matches, "items": items}
            clauses.append(risk.clause.format(alpha=level, **words))
        conditions = []
        if request.holds == "for all alphas":
            conditions.append("whatever alpha is chosen")
        if request.holds == "at every moment":
            conditions.append(AT_EVERY_MOMENT)
        if request.groups == "any mix":
            conditions.append(f"whatever the mix of the {self.n_groups} groups")
        elif isinstance(request.groups, Mix):
            shares = ", ".join(
                f"{printable(group)} {share:g}" for group, share in request.groups.shares.items()
            )
            conditions.append(f"where the groups come as {shares}")
        sure = opening(self.delta, conditions, self.chosen_among)
        parameter = (
            f"threshold = {self.threshold:.4g}"
            if self.selection_threshold is None
            else f"answered up to a selection score of {self.selection_threshold:.4g}"
        )
        group = "" if request.group is None else f" of group {request.group!r}"
        queries, searched = f"queries{group}", ""
        calibrated = f"the {self.n_calibration} calibration queries"
        label = self.query_label
        like = f"{queries} like {calibrated}"
        if self.left_out is not None:
            queries = f"{in_plural(self.left_out)}{group}"
            searched = ", each searched without itself"
            counted = "" if self.left_out == "item" else " and counted once"
            like = (
                f"{queries} drawn from this gallery{searched}{counted}, like the "
                f"{self.n_calibration} that calibrated"
            )
        further = (
            f"{queries} of any further {label} like the {self.n_labels} that calibrated{searched}, "
            f"each {label} counted alike"
        )
        if request.labels == "new":
            like = further
        elif request.labels == "any":
            like += f" and to {further}, whatever the mix of both"
        elif self.left_out is None and self.n_labels is not None and label == LABEL:
            like = f"{queries} of the same {self.n_labels} labels as {calibrated}"
        if self.cluster is not None:
            like = (
                f"{queries} of any further {self.cluster} like the {self.n_clusters} of "
                f"{calibrated}, each {self.cluster} counted alike"
            )
        seed = "" if self.seed is None else f", queries divided by seed {self.seed}"
        again = ""
        if self.attempts > 1:
            again = (
                f" This is calibration {self.attempts} of some of these queries; the guarantee "
                "holds only if it was not chosen for its sets."
            )
        return (
            f"{sure}, {' and '.join(clauses)} returned to {like} ({self.score_function} sizes, "
            f"{self.bound} bound, {parameter}{seed}).{again}"
        )


@dataclass(frozen=True, eq=False)
class SetRule:
    """A rule that sizes sets: a score function, and the queries that certify its thresholds.

    Attributes:
        score_function: fitted on the tuning split.
        tuning, calibration: the two splits, scored by it.
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
    tuning: ScoredResults
    calibration: ScoredResults
    bound: Bound = "binomial"
    uncertainty: str = "encoder"

    def __post_init__(self) -> None:
        check_bound(self.bound)
        if self.tuning.depth != self.calibration.depth:
            raise InvalidData(
                f"the tuning split was searched to depth {self.tuning.depth}, the calibration "
                f"queries to {self.calibration.depth}: search both alike"
            )

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
        at_delta = request
        if check_among(chosen_among) > 1:
            if request.delta is None:
                raise InvalidConfig(
                    f"delta is None, but the retriever was chosen among {chosen_among}: an average "
                    "over calibrations does not survive a choice; give a delta, or calibrate on "
                    "other queries"
                )
            at_delta = replace(request, delta=corrected(request.delta, chosen_among))
        try:
            certificate = certify(at_delta, self.calibration, self.tuning, self.bound)
        except RiskUnattainable as error:
            if chosen_among == 1:
                raise
            raise RiskUnattainable(
                f"chosen among {chosen_among} retrievers, each certified at delta / "
                f"{chosen_among}: {error}",
                minimum_alpha=error.minimum_alpha,
                required_calibration=error.required_calibration,
            ) from None
        population = self.calibration.of_group(request.group).population
        labels = None if self.calibration.population.single_labels is None else population.labels
        return Guarantee(
            request=request,
            certificate=certificate,
            score_function=self.score_function.name,
            n_calibration=len(population),
            cluster=population.cluster_word,
            n_clusters=None if population.clusters is None else population.n_units,
            chosen_among=chosen_among,
            n_labels=None if labels is None else len(np.unique(labels)),
            query_label=population.label_word,
        )

    def sets(
        self, results: SearchResults, guarantee: Guarantee
    ) -> tuple[Ranking, NDArray[np.int64]]:
        """Size the sets of queries.

        Args:
            results: of n queries, searched to the same depth.
            guarantee: what is guaranteed of the sets.

        Returns:
            The ranking of the candidates, and (n,) how many of them are in each set: 0 for a query
            that is not answered.

        Raises:
            InvalidData: the queries were searched to another depth.
        """
        if results.depth != self.calibration.depth:
            raise InvalidData(
                f"the queries were searched to depth {results.depth}, the calibration queries to "
                f"{self.calibration.depth}: search alike"
            )
        limit = guarantee.selection_threshold
        ranking = self.score_function.rank(results, guarantee.threshold)
        if limit is not None:
            return ranking, (ranking.selection_score <= limit).astype(np.int64)
        sizes = set_sizes(ranking.scores, guarantee.threshold)
        return ranking, np.minimum(sizes, guarantee.request.max_size or results.depth)

    def of_constant_size(self) -> SetRule:
        """Return the rule that gives every query the same size: what adaptive sizes save.

        It takes the same candidates in the same order, so that the comparison shows what it is
        worth to adapt the size, and not what the order is worth. Only its calibration can be used:
        `sets` needs test queries that were scored with it (`ScoredResults.of_constant_size`).
        """
        return replace(
            self,
            tuning=self.tuning.of_constant_size(),
            calibration=self.calibration.of_constant_size(),
        )


def opening(delta: float | None, conditions: Sequence[str] = (), chosen_among: int = 1) -> str:
    """Return the beginning of the sentence of a guarantee.

    Example:
        >>> opening(0.1, [AT_EVERY_MOMENT])
        'With probability at least 0.9, at every moment since this gallery was calibrated'
    """
    sure = (
        "On average over calibrations, of which one that certifies nothing counts as none wrong"
        if delta is None
        else f"With probability at least {stated_confidence(delta)}"
    )
    if chosen_among > 1:
        sure = f"Chosen among {chosen_among} retrievers after looking: {sure[0].lower()}{sure[1:]}"
    return ", ".join([sure, *conditions])


def in_plural(left_out: str) -> str:
    """Return what queries are called whose search leaves out "item", "moment" or a cluster.

    Example:
        >>> in_plural("moment"), in_plural("encounter_id")
        ('moments', 'clusters (encounter_id)')
    """
    simple = left_out in ("item", "moment", "cluster")
    return f"{left_out}s" if simple else f"clusters ({left_out})"


def stated_confidence(delta: float) -> str:
    """Return one minus delta in decimals, not rounded: it must not claim more than is certified.

    Example:
        >>> stated_confidence(0.1), stated_confidence(1e-5), stated_confidence(1e-30)
        ('0.9', '0.99999', '1 - 1e-30')
    """
    return f"{1 - Decimal(str(delta)):f}" if delta >= 1e-12 else f"1 - {delta}"
