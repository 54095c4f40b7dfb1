"""Guarantees: what a request is answered with, in numbers and in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any

from rcir.printable import printable
from rcir.risk.request import GuaranteeRequest
from rcir.risk.risks import find_risk

_OPTIONS = tuple(field.name for field in fields(GuaranteeRequest))


@dataclass(frozen=True)
class Guarantee:
    """The certificate of a request, and what it says of a set; `str` gives it in one sentence.

    The options of the request are attributes too: `guarantee.alpha` is `guarantee.request.alpha`.

    Attributes:
        request: what is guaranteed.
        threshold: candidates of at most this score are in the set, up to
            `rcir.risk.score_functions.TOLERANCE`.
        bound: the confidence bound behind the certificate, or "band" (simultaneous), "anytime" or
            "conformal" (on average).
        score_function: its name.
        n_calibration: number of calibration queries.
        risk_bound: the level that is certified, at most alpha (misses are whole numbers); None
            with several risks.
        selection_threshold: with `abstain`, the selection score up to which queries are answered.
        n_groups: number of groups of which any mix may come.
        cluster: what the clusters are that queries come in, such as "video"; each counts the same.
        n_clusters: number of clusters of the calibration queries.
        chosen_among: number of retrievers that the one that answered was chosen among, by results
            on the calibration queries; 1 without such a choice.
    """

    request: GuaranteeRequest
    threshold: float
    bound: str
    score_function: str
    n_calibration: int
    risk_bound: float | None
    selection_threshold: float | None = None
    n_groups: int | None = None
    cluster: str | None = None
    n_clusters: int | None = None
    chosen_among: int = 1

    def __getattr__(self, name: str) -> Any:
        if name in _OPTIONS:
            return getattr(self.request, name)
        raise AttributeError(f"a guarantee has no attribute {name!r}")

    @property
    def risk(self) -> str:
        """The name of the risk; of several, all names."""
        alpha = self.request.alpha
        return ", ".join(alpha) if isinstance(alpha, Mapping) else self.request.risk

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; several risks are named in one text."""
        values: dict[str, Any] = {name: getattr(self.request, name) for name in _OPTIONS}
        for name in ("alpha", "mix"):
            if isinstance(values[name], Mapping):
                values[name] = {key: float(value) for key, value in values[name].items()}
        values["risk"] = self.risk
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        del own["request"]
        return values | own

    def __str__(self) -> str:
        levels = self.alpha if isinstance(self.alpha, Mapping) else {self.risk: self.alpha}
        matches, items, distinct = "matches", "items", ""
        if self.distinct is not None:
            matches = items = f"{self.distinct}s"
            distinct = f" of distinct {items}"
        clauses = []
        for name, level in levels.items():
            risk = find_risk(name, self.abstain)
            named = {"sets": risk.sets + distinct, "matches": matches, "items": items}
            clauses.append(risk.clause.format(alpha=level, **named))
        sure = (
            "On average over calibrations, of which one that certifies nothing counts as none wrong"
            if self.delta is None
            else f"With probability at least {stated_confidence(self.delta)}"
        )
        if self.simultaneous:
            sure += ", whatever alpha is chosen"
        if self.anytime:
            sure += ", at every moment since calibration began"
        if self.mix == "any":
            sure += f", whatever the mix of the {self.n_groups} groups"
        elif isinstance(self.mix, Mapping):
            shares = ", ".join(f"{printable(group)} {share:g}" for group, share in self.mix.items())
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


def stated_confidence(delta: float) -> str:
    """One minus delta, in decimals, not rounded: a certificate must not claim more than it has.

    Example:
        >>> stated_confidence(0.1), stated_confidence(1e-5), stated_confidence(1e-30)
        ('0.9', '0.99999', '1 - 1e-30')
    """
    return f"{1 - Decimal(str(delta)):f}" if delta >= 1e-12 else f"1 - {delta}"
