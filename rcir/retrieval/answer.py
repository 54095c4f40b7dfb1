"""What an answer is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from rcir.printable import printable
from rcir.risk import Decision, Request, Risk, RiskController
from rcir.risk.request import Alpha, Mix

Distinct = Literal["label"] | None

CLAUSES: Mapping[str, str] = {
    "miss": "a true match is missing from at most {alpha} of the {sets}",
    "recall": (
        "at most {alpha} of a query's true {matches}, on average over queries, are missing from "
        "the {sets}"
    ),
    "false-discovery": (
        "at most {alpha} of a set's {items}, on average over queries, are wrong in the {sets}"
    ),
}


class Options(TypedDict, total=False):
    """The keywords of `Retriever.retrieve`, which explains them."""

    risk: Risk
    distinct: Distinct
    group: str | None
    abstain: bool
    simultaneous: bool
    anytime: bool
    mix: Mix


@dataclass(frozen=True)
class Guarantee:
    """The statement that holds for a retrieved set; `str` gives it in one sentence.

    Attributes:
        alpha: level of the risk; with several risks, the level of each.
        delta: probability, at most, that the calibration queries misled; None: on average.
        risk: "miss", "recall" or "false-discovery"; with several risks, all of them.
        distinct: "label" if sets hold distinct labels.
        group: the group of queries it speaks of; None for all.
        abstain: whether it speaks of the queries that got an answer only.
        simultaneous: whether it holds for all alpha at once.
        threshold: the calibrated parameter of the score function.
        bound: what it rests on: a confidence bound, "band" (simultaneous), "anytime" or "conformal"
            (on average).
        score_function: the score function.
        n_calibration: number of calibration queries.
        risk_bound: the level that is certified in fact, at most alpha (misses are whole numbers);
            None with several risks.
        selection_threshold: with `abstain`, the selection score up to which queries are answered.
        anytime: whether it holds at every moment since calibration began.
        mix: the mix of groups that it speaks of: "any", or the share of each; None: as calibrated.
        n_groups: number of groups of which any mix may come.
        cluster: what the clusters are that queries come in, such as "video"; each counts alike.
        n_clusters: number of those that the calibration queries came in.
        chosen_among: number of retrievers that the one that answered was chosen among, by results
            on the calibration queries; 1 without such a choice.
    """

    alpha: Alpha
    delta: float | None
    risk: str
    distinct: Distinct
    group: str | None
    abstain: bool
    simultaneous: bool
    threshold: float
    bound: str
    score_function: str
    n_calibration: int
    risk_bound: float | None
    selection_threshold: float | None = None
    anytime: bool = False
    mix: Mix = None
    n_groups: int | None = None
    cluster: str | None = None
    n_clusters: int | None = None
    chosen_among: int = 1

    @classmethod
    def of(
        cls,
        request: Request,
        decision: Decision,
        controller: RiskController,
        distinct: Distinct,
        chosen_among: int = 1,
    ) -> Guarantee:
        """The guarantee of a controller's decision on a request."""
        alpha = request.alpha
        return cls(
            alpha={risk: float(level) for risk, level in alpha.items()}
            if isinstance(alpha, Mapping)
            else float(alpha),
            delta=None if request.delta is None else float(request.delta),
            risk=", ".join(alpha) if isinstance(alpha, Mapping) else request.risk,
            distinct=distinct,
            group=request.group,
            abstain=request.abstain,
            simultaneous=request.simultaneous,
            threshold=decision.threshold,
            bound=decision.bound,
            score_function=controller.score_function.name,
            n_calibration=decision.n_calibration,
            risk_bound=decision.risk_bound,
            selection_threshold=decision.selection_threshold,
            anytime=request.anytime,
            mix=dict(request.mix) if isinstance(request.mix, Mapping) else request.mix,
            n_groups=decision.n_groups,
            cluster=controller.cluster,
            n_clusters=decision.n_clusters,
            chosen_among=chosen_among,
        )

    def __str__(self) -> str:
        levels = self.alpha if isinstance(self.alpha, Mapping) else {self.risk: self.alpha}
        sets = "answers" if self.abstain else "sets"
        if self.distinct is not None:
            sets += f" of distinct {self.distinct}s"
        named = {
            "matches": "matches" if self.distinct is None else f"{self.distinct}s",
            "items": "items" if self.distinct is None else f"{self.distinct}s",
        }
        clauses = [
            CLAUSES[risk].format(alpha=level, sets=sets, **named) for risk, level in levels.items()
        ]
        sure = (
            "On average over calibrations, of which one that certifies nothing counts as none wrong"
            if self.delta is None
            else f"With probability at least {confidence(self.delta)}"
        )
        if self.simultaneous:
            sure += ", whatever alpha is chosen"
        if self.anytime:
            sure += ", at every moment since calibration began"
        if self.mix == "any":
            sure += f", whatever the mix of the {self.n_groups} groups"
        elif isinstance(self.mix, Mapping):
            shares = ", ".join(f"{group} {share:g}" for group, share in self.mix.items())
            sure += f", where the groups come as {shares}"
        if self.chosen_among > 1:
            sure = (
                f"Chosen among {self.chosen_among} retrievers after looking: "
                f"{sure[0].lower()}{sure[1:]}"
            )
        parameter = (
            f"threshold = {self.threshold:.4g}"
            if self.selection_threshold is None
            else f"answered up to a selection score of {self.selection_threshold:.4g}"
        )
        queries = "queries" if self.group is None else f"queries of group {self.group!r}"
        like = f"{queries} like the {self.n_calibration} calibration queries"
        if self.cluster is not None:
            like = (
                f"{queries} of any further {self.cluster} like the {self.n_clusters} of the "
                f"{self.n_calibration} calibration queries, each {self.cluster} counted alike"
            )
        return (
            f"{sure}, {' and '.join(clauses)} returned to {like} ({self.score_function} sizes, "
            f"{self.bound} bound, {parameter})."
        )


def confidence(delta: float) -> str:
    """One minus delta, in decimals, not rounded: a certificate must not claim more than it has.

    Example:
        >>> confidence(0.1), confidence(1e-5), confidence(1e-30)
        ('0.9', '0.99999', '1 - 1e-30')
    """
    return f"{1 - Decimal(str(delta)):f}" if delta >= 1e-12 else f"1 - {delta}"


@dataclass(frozen=True, eq=False, slots=True)
class Retrieval:
    """The answer to one query: gallery items, the likeliest first, as many as the guarantee needs.

    Attributes:
        ids: names of the items.
        distances: (size,) L2 distances in embedding space; ascending, unless the sizes rank
            candidates anew ("reranked", "match-probability").
        uncertainty: of the query; larger is less certain; comparable within one retriever only.
        guarantee: what is guaranteed of this set.
        labels: labels of the items, if the gallery has labels: names where its data set names them,
            else numbers.
    """

    ids: tuple[str, ...]
    distances: NDArray[np.float32]
    uncertainty: float
    guarantee: Guarantee
    labels: tuple[int, ...] | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        others = (len(self.distances), len(self.ids if self.labels is None else self.labels))
        if others != (len(self.ids),) * 2:
            raise ValueError(f"{len(self.ids)} ids, but distances and labels number {others}")

    @property
    def size(self) -> int:
        """Number of items."""
        return len(self.ids)

    @property
    def abstained(self) -> bool:
        """Whether no answer was given, for want of certainty."""
        return self.size == 0

    def __str__(self) -> str:
        if self.abstained:
            head = f"no answer: too uncertain, uncertainty {self.uncertainty:.4g}"
            return f"{head}\n{self.guarantee}"
        head = f"{self.size} image{'s' * (self.size > 1)}, uncertainty {self.uncertainty:.4g}"
        names = ["id", *map(printable, self.ids)]
        labels = self.labels or ()
        if any(isinstance(label, str) for label in labels):  # numbers would tell a reader nothing
            width = max(map(len, names))
            columns = zip(names, ("label", *map(printable, labels)), strict=True)
            names = [f"{name:{width}}  {label}" for name, label in columns]
        rows = (
            f"{rank:4d}  {distance:8.4f}  {name}"
            for rank, (name, distance) in enumerate(zip(names[1:], self.distances, strict=True), 1)
        )
        return "\n".join([head, f"rank  distance  {names[0]}", *rows, str(self.guarantee)])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "ids": list(self.ids),
            "labels": None if self.labels is None else list(self.labels),
            "distances": [round(float(distance), 6) for distance in self.distances],
            "size": self.size,
            "abstained": self.abstained,
            "uncertainty": self.uncertainty,
            "guarantee": asdict(self.guarantee),
        }
