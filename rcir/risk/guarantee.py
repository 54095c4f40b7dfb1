"""Guarantees: what a request is answered with, in numbers and in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from decimal import Decimal

from rcir.errors import printable
from rcir.notebook import as_html
from rcir.risk.bounds import Certificate, corrected
from rcir.risk.losses import MISS, find_risk
from rcir.risk.options import Alpha
from rcir.risk.population import LABEL
from rcir.risk.request import Mix, Request

AT_EVERY_MOMENT = "at every moment since this gallery was calibrated"


@dataclass(frozen=True)
class Guarantee:
    """A certified request; `str` states it in one sentence.

    The attributes of the certificate are attributes too, and so are alpha, delta and the risk of
    the request: `guarantee.threshold` is `guarantee.certificate.threshold`.

    Attributes:
        request: what is guaranteed.
        certificate: the threshold, with its bound and level.
        score_function: its name; "own-probability" for probabilities of a model of the user's own,
            "label-model" or "label-lists" for what "auto" fits to the labels of the gallery.
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
        n_unmatchable: number of calibration queries without a match in the gallery, which are not
            among the `n_calibration`; None if both kinds count alike.
        n_unmatchable_units, n_unmatchable_labels: their number of independent units, and of
            different labels, None if some have no known, single label.
        by_own_model: True if the queries came with probabilities of labels by a model that is
            assumed to have seen no calibration query.
        target: how the calibration queries were drawn for a target population, and what is assumed
            of it; None if they were not.
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
    n_unmatchable: int | None = None
    n_unmatchable_units: int | None = None
    n_unmatchable_labels: int | None = None
    by_own_model: bool = False
    key: str | None = None
    encounters: bool = False
    target: str | None = None

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

    def to_dict(self) -> dict[str, object]:
        """Return plain values, for JSON; several risks are named in one text."""
        values: dict[str, object] = {**self.request.to_keywords(), "risk": self.risk}
        del values["key"], values["together"]  # they describe queries
        evidence = {field.name: getattr(self, field.name) for field in fields(self)}
        del evidence["request"], evidence["certificate"]
        certificate = asdict(self.certificate)
        for name in ("cuts", "thresholds"):
            certificate[name] = list(certificate[name])
        return values | certificate | evidence

    def __str__(self) -> str:
        parameter = (
            f"threshold{'s up to' if self.certificate.thresholds else ' ='} {self.threshold:.4g}"
            if self.selection_threshold is None
            else f"answered up to a selection score of {self.selection_threshold:.4g}"
        )
        seed = "" if self.seed is None else f", queries divided by seed {self.seed}"
        again = ""
        if self.attempts > 1:
            again = (
                f" This is calibration {self.attempts} of some of these queries; the guarantee "
                "holds only if it was not chosen for its sets."
            )
        if self.by_own_model:
            unseen = "no calibration query"
            if self.request.labels != "calibrated":
                unseen += ", and knows the labels of the calibration queries no better than others"
            again += f" It assumes that the model behind the label probabilities has seen {unseen}."
        if self.key is not None:
            again += f" Each query is searched among the items of its own {self.key}"
            if self.request.groups == "all":
                again += f", and they come from each {self.key} as often as in calibration"
            again += "."
        if self.encounters:
            again += " A query is all pictures of one encounter, as many as there happen to be."
        if self.target is not None:
            again += f" The covered queries are those of a target population: {self.target}."
        return (
            f"{_opening(self.delta, self._conditions(), self.chosen_among)}, {self._limits()} "
            f"returned to {self._covered_queries()}{self._unmatchable()} ({self.score_function} "
            f"sizes, {self.bound} bound, {parameter}{seed}).{again}"
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html("Guarantee", notes=[str(self)])

    def _unmatchable(self) -> str:
        """State what is limited of queries without a match in the gallery."""
        if self.request.beta is None:
            return ""
        group = "" if self.request.group is None else f" of group {self.request.group!r}"
        like = f"queries{group} without one, like the {self.n_unmatchable} that calibrated"
        if self.cluster is not None:
            like = (
                f"queries{group} without one of any further {self.cluster}, like the "
                f"{self.n_unmatchable_units} of the {self.n_unmatchable} that calibrated, each "
                f"{self.cluster} counted alike"
            )
        elif self.n_unmatchable_labels is not None:
            like = (
                f"queries{group} without one, of the same {self.n_unmatchable_labels} "
                f"{self.query_label}s as the {self.n_unmatchable} that calibrated"
            )
        return f", and at most {self.request.beta:g} of the {like}, get a set"

    def _limits(self) -> str:
        """State what is limited, for each risk."""
        request, limits = self.request, []
        matches, items, distinct = "matches", "items", ""
        if request.distinct is not None:
            matches = items = f"{request.distinct}s"
            distinct = f" of distinct {items}"
        for name, alpha in request.levels.items():
            risk = find_risk(name, request.abstain)
            sets = risk.sets + distinct
            limits.append(risk.clause.format(alpha=alpha, sets=sets, matches=matches, items=items))
        return " and ".join(limits)

    def _conditions(self) -> list[str]:
        """State the conditions under which the guarantee holds."""
        request, conditions = self.request, []
        if request.holds == "for all alphas":
            conditions.append("whatever alpha is chosen")
        if request.holds == "at every moment":
            conditions.append(AT_EVERY_MOMENT)
        if request.groups == "any mix":
            conditions.append(f"whatever the mix of the {self.n_groups} groups")
        if request.balance is not None:
            conditions.append("in each quarter of the uncertainty")
        if isinstance(request.groups, Mix):
            shares = (
                f"{printable(name)} {share:g}" for name, share in request.groups.shares.items()
            )
            conditions.append(f"where the groups come as {', '.join(shares)}")
        return conditions

    def _covered_queries(self) -> str:
        """State which queries the guarantee covers, by comparison with those that calibrated."""
        labels, label = self.request.labels, self.query_label
        group = "" if self.request.group is None else f" of group {self.request.group!r}"
        queries, searched = f"queries{group}", ""
        if self.left_out is not None:
            queries = f"{in_plural(self.left_out)}{group}"
            searched = ", each searched without itself"
        calibrated = f"the {self.n_calibration} calibration queries"
        if self.request.counted == "matchable":
            queries += " with a match in the gallery,"
            calibrated = f"the {self.n_calibration} such calibration queries"
        if self.cluster is not None:
            return (
                f"{queries} of any further {self.cluster} like the {self.n_clusters} of "
                f"{calibrated}, each {self.cluster} counted alike"
            )
        further = (
            f"{queries} of any further {label} like the {self.n_labels} that calibrated{searched}, "
            f"each {label} counted alike"
        )
        if labels == "new":
            return further
        like = f"{queries} like {calibrated}"
        if self.left_out is not None:
            counted = "" if self.left_out == "item" else " and counted once"
            like = (
                f"{queries} drawn from this gallery{searched}{counted}, like the "
                f"{self.n_calibration} that calibrated"
            )
        if labels == "any":
            return f"{like} and to {further}, whatever the mix of both"
        if self.left_out is None and self.n_labels is not None and label == LABEL:
            return f"{queries} of the same {self.n_labels} labels as {calibrated}"
        return like


def _opening(delta: float | None, conditions: Sequence[str] = (), chosen_among: int = 1) -> str:
    """Return the beginning of the sentence of a guarantee."""
    sure = (
        "On average over calibrations (one that certifies nothing counts as free of errors)"
        if delta is None
        else f"With probability at least {_stated_confidence(delta)}"
    )
    if chosen_among > 1:
        sure = f"Chosen among {chosen_among} retrievers after looking: {sure[0].lower()}{sure[1:]}"
    return ", ".join([sure, *conditions])


def in_plural(left_out: str) -> str:
    """Return what queries are called whose search leaves out "item", "moment" or a cluster."""
    simple = left_out in ("item", "moment", "cluster")
    return f"{left_out}s" if simple else f"clusters ({left_out})"


def at_every_level(delta: float, how: str, *, anytime: bool = False, chosen_among: int = 1) -> str:
    """State the guarantee of the miss risk at several levels, and how they were certified."""
    missing = MISS.clause.format(alpha="a fraction alpha", sets=MISS.sets)
    return f"{_opening(delta, [AT_EVERY_MOMENT] * anytime, chosen_among)}, {missing} ({how})."


def promise(
    alpha: float,
    delta: float,
    *,
    n_calibration: int,
    clusters: tuple[int, str] | None = None,
    left_out: str | None = None,
    other_labels: str | None = None,
    chosen_among: int = 1,
) -> str:
    """State the guarantee of the miss risk in numbers of 100 queries.

    `clusters` are the number and the kind of the clusters that calibrated. `other_labels` is the
    plural of what labels are called, if no test query has the label of a calibration query.
    """
    covered, calibrated = "future queries", f"{n_calibration} calibration queries"
    if clusters is not None:
        covered = f"queries of further clusters ({clusters[1]}, each counted alike)"
        calibrated += f" in {clusters[0]} clusters"
    elif left_out is not None:
        covered = f"{in_plural(left_out)} drawn from this gallery, each searched without itself,"
        calibrated = f"{n_calibration} {in_plural(left_out)} that calibrated"
    elif other_labels is not None:
        covered = f"future queries with the {other_labels} of the calibration queries"
    sentence = (
        f"With alpha = {alpha:g}, on average at least {100 * (1 - alpha):.4g} of 100 {covered} get "
        "a set that holds a right image. The chance that this is wrong, because the "
        f"{calibrated} were unluckily easy, is at most {100 * delta:.4g}%"
    )
    if chosen_among > 1:
        sentence += (
            f", also after the choice among {chosen_among} retrievers: each is certified at "
            f"delta = {corrected(delta, chosen_among):.4g}"
        )
    return f"{sentence}."


def nothing_certified(delta: float, n_calibration: int, reason: str | None) -> str:
    """State that no level is certified, and why."""
    return (
        f"Nothing is certified with probability {_stated_confidence(delta)} on {n_calibration} "
        f"calibration queries: {reason}."
    )


def _stated_confidence(delta: float) -> str:
    """Return one minus delta in decimals, not rounded: it must not claim more than is certified.

    Example:
        >>> _stated_confidence(0.1), _stated_confidence(1e-5), _stated_confidence(1e-30)
        ('0.9', '0.99999', '1 - 1e-30')
    """
    return f"{1 - Decimal(str(delta)):f}" if delta >= 1e-12 else f"1 - {delta}"
