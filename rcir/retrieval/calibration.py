"""Calibration: from labelled queries to everything that certifies the answers of a retriever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rcir.data.digests import digests
from rcir.errors import InvalidConfig, InvalidData, StaleCalibration
from rcir.levels import ALPHAS, DELTA
from rcir.retrieval.calibration_report import CalibrationReport, report
from rcir.retrieval.queries import Queries, require_alike
from rcir.retrieval.query_uncertainty import (
    QUERY_UNCERTAINTIES,
    checked_uncertainty,
    current_name,
)
from rcir.retrieval.search import Searcher
from rcir.retrieval.splits import check_clusters, check_repeats
from rcir.risk import (
    RISKS,
    Bound,
    Guarantee,
    GuaranteeRequest,
    LabelledResults,
    RiskController,
    decide_chosen,
    fit_score_function,
    smallest_uncertainty,
)
from rcir.risk.bounds import check_bound
from rcir.risk.choice import ComparedSizes
from rcir.risk.fits import Fits
from rcir.risk.request import Distinct


@dataclass(frozen=True)
class CalibrationOptions:
    """How a retriever is calibrated, see `Retriever.calibrate`."""

    score_function: str = "auto"
    bound: Bound = "binomial"
    alphas: Sequence[float] = ALPHAS
    delta: float = DELTA
    recurring: bool = False
    uncertainty: str = "auto"

    def __post_init__(self) -> None:
        check_bound(self.bound)
        object.__setattr__(self, "uncertainty", checked_uncertainty(self.uncertainty))
        if not isinstance(self.alphas, Sequence | np.ndarray) or not len(self.alphas):
            raise InvalidConfig(f"alphas is {self.alphas!r}; give a list of at least one")
        object.__setattr__(self, "alphas", tuple(self.alphas))


@dataclass(frozen=True, eq=False)
class Calibration:
    """Everything that a calibration is; nothing of it changes.

    Attributes:
        controllers: what certifies: under None of sets of items and, if the gallery has labels,
            under "label" of sets of distinct labels.
        fingerprints: digests of all that it depends on, see `Searcher.fingerprints`.
        options: how it was made.
        uncertainty: of the queries, see `Searcher.judged`.
        tuning_queries, calibration_queries: as they were searched.
        chosen_among: number of retrievers that this one was chosen among, by results on the
            calibration queries; every request is then certified at delta divided by it.
    """

    controllers: Mapping[Distinct, RiskController]
    fingerprints: Mapping[str, str]
    options: CalibrationOptions
    uncertainty: str
    tuning_queries: Queries
    calibration_queries: Queries
    chosen_among: int = 1

    def __post_init__(self) -> None:
        parts = {part: current_name(value) for part, value in self.fingerprints.items()}
        object.__setattr__(self, "fingerprints", parts)
        object.__setattr__(self, "uncertainty", current_name(self.uncertainty))

    @property
    def controller(self) -> RiskController:
        """The controller of sets of items."""
        return self.controllers[None]

    @property
    def query_digests(self) -> NDArray[np.bytes_]:
        """(n,) of the tuning and the calibration queries, see `rcir.data.digests`."""
        kept = (self.tuning_queries, self.calibration_queries)
        return np.concatenate([digests([]), *(queries.identities for queries in kept)])

    def changed(self, fingerprints: Mapping[str, str]) -> list[str]:
        """Return the names of what differs from what it depends on."""
        parts = dict.fromkeys([*fingerprints, *self.fingerprints])
        return [part for part in parts if fingerprints.get(part) != self.fingerprints.get(part)]

    def controller_of(self, distinct: Distinct) -> RiskController:
        """Return the controller of sets of items, or of labels.

        Raises:
            InvalidConfig: there is none.
        """
        if not isinstance(distinct, str | None) or distinct not in self.controllers:
            raise InvalidConfig(
                f"distinct is {distinct!r}; it can be "
                + ("'label' or None" if "label" in self.controllers else "None (no labels known)")
            )
        return self.controllers[distinct]

    def guarantee(self, request: GuaranteeRequest) -> tuple[RiskController, Guarantee]:
        """Certify a request; return what makes its sets as well.

        Raises:
            InvalidConfig, InvalidRiskLevel: of the request.
            RiskUnattainable: nothing certifies it.
        """
        controller = self.controller_of(request.distinct).for_risk(request)
        return controller, decide_chosen(controller, request, self.chosen_among)

    def extended(self, queries: LabelledResults, added: Queries, recurring: bool) -> Calibration:
        """Return the calibration with further queries, which grow one by one from now on.

        Args:
            queries: their search results, with the uncertainty of the calibration.
            added: the queries, to be kept.
            recurring: whether queries may come twice.
        """
        return replace(
            self,
            controllers={
                distinct: extended(controller, queries if distinct is None else queries.distinct())
                for distinct, controller in self.controllers.items()
            },
            calibration_queries=Queries.joined([self.calibration_queries, added]),
            options=replace(self.options, recurring=True) if recurring else self.options,
        )


def calibrate(
    searcher: Searcher,
    tuning: LabelledResults,
    calibration: LabelledResults,
    options: CalibrationOptions,
    like: Calibration | None = None,
) -> tuple[Calibration, CalibrationReport]:
    """Calibrate on two searched splits.

    Args:
        searcher: that searched both, as it is now.
        tuning, calibration: the two splits.
        options: how.
        like: an earlier calibration with the same queries, whose uncertainty and kinds of score
            functions are kept, and in spite of whose choice among several the new one holds.

    Raises:
        StaleCalibration: the searcher has changed since it searched.
        InvalidData: of the queries, see `Retriever.calibrate`.
    """
    if tuning is calibration or tuning.vectors is calibration.vectors:
        raise InvalidData(
            "tuning split and calibration queries are the same: the guarantee needs others"
        )
    for queries in (tuning, calibration):
        check_searched(searcher, queries)
    require_alike(calibration.known("queries"), tuning.known("queries"))
    check_clusters(tuning, calibration)
    check_repeats(searcher, tuning, calibration, options.recurring, like is not None)
    uncertainty, uncertainties = _chosen_uncertainty(searcher, tuning, options, like)
    tuning, calibration = (searcher.judged(one, uncertainty) for one in (tuning, calibration))
    controllers: dict[Distinct, RiskController] = {}
    comparison: dict[Distinct, ComparedSizes] = {}
    fits, searched = Fits(tuning), calibration
    for distinct in (None, "label") if searcher.labels is not None else (None,):
        if distinct is not None:
            fits, searched = fits.distinct(), searched.distinct()
        before = like.controllers[distinct] if like else None
        controllers[distinct], comparison[distinct] = control(fits, searched, options, before)
    if like and like.controller.growing:
        controllers = {distinct: grown(one) for distinct, one in controllers.items()}
    made = Calibration(
        controllers=controllers,
        fingerprints=dict(searcher.fingerprints(), uncertainty=uncertainty),
        options=options,
        uncertainty=uncertainty,
        tuning_queries=kept_queries(searcher, tuning, uncertainty),
        calibration_queries=kept_queries(searcher, calibration, uncertainty),
        chosen_among=like.chosen_among if like else 1,
    )
    return made, report(
        controllers[None],
        tuning,
        calibration,
        options.alphas,
        options.delta,
        comparison,
        uncertainties,
        made.chosen_among,
    )


def check_searched(searcher: Searcher, queries: LabelledResults) -> None:
    """Raise `StaleCalibration` unless the searcher, as it is now, searched the queries."""
    if queries.fingerprints != searcher.fingerprints() or queries.depth != searcher.depth:
        raise StaleCalibration(
            "the queries were searched by another retriever, or this one has changed since: "
            "search them again"
        )


def keeps_embeddings(searcher: Searcher, uncertainty: str) -> bool:
    """Return whether queries are searched again by all that the encoder states of them."""
    by_draws = QUERY_UNCERTAINTIES[current_name(uncertainty)].by_draws
    return by_draws or (searcher.encoder is not None and searcher.encoder.reranks)


def kept_queries(searcher: Searcher, results: LabelledResults, uncertainty: str) -> Queries:
    """Return the queries of search results, to be searched again.

    Their relevance is kept if the truth of the results follows from it.
    """
    queries: Queries = results.known("queries").identified()
    relevance = queries.relevance
    if relevance is not None and searcher.relevance is not None:
        found = relevance.of(searcher.relevance, results.known("positions"))
        if not np.array_equal(found, results.relevant):
            relevance = None
    clusters = results.clusters
    return replace(
        queries,
        embedding=queries.embedding if keeps_embeddings(searcher, uncertainty) else None,
        relevance=relevance,
        groups=results.groups,
        clusters=None if clusters is None else clusters.astype(str),
        cluster=results.cluster,
    )


def _chosen_uncertainty(
    searcher: Searcher,
    tuning: LabelledResults,
    options: CalibrationOptions,
    like: Calibration | None,
) -> tuple[str, ComparedSizes]:
    if like:
        return like.uncertainty, {}
    if options.uncertainty != "auto":
        return options.uncertainty, {}
    held = tuning.known("queries").embedding is not None
    candidates = {
        kind: searcher.judged(tuning, kind)
        for kind in searcher.uncertainties
        if held or not QUERY_UNCERTAINTIES[kind].by_draws
    }
    return smallest_uncertainty(candidates, options.alphas, options.delta)


def control(
    fits: Fits,
    calibration: LabelledResults,
    options: CalibrationOptions,
    before: RiskController | None = None,
) -> tuple[RiskController, ComparedSizes]:
    """The controller of two splits that were searched alike, for every risk with its own score
    function.

    Args:
        fits: on the tuning split.
        calibration: the calibration queries.
        options: how.
        before: whose kinds of score functions are taken, of each risk; else they are chosen.

    Returns:
        The controller, and what was compared for the miss risk.
    """
    tuning = fits.split
    made: dict[str, RiskController] = {}

    def of(risk: str) -> tuple[RiskController, ComparedSizes]:
        kept = None if before is None else before.own.get(risk, before).score_function.name
        fitted, compared = fit_score_function(
            kept or options.score_function,
            tuning,
            tuning.relevant,
            options.alphas,
            options.delta,
            risk,
            tuning.totals,
            fits,
        )
        if fitted.name not in made:
            made[fitted.name] = RiskController(fitted, tuning, calibration, options.bound)
        return made[fitted.name], compared

    main, compared = of("miss")
    for name, risk in RISKS.items():
        if risk.own_score_function(tuning):
            own, _ = of(name)
            if own.score_function.name != main.score_function.name:
                main.own[name] = own
    return main, compared


def extended(controller: RiskController, queries: LabelledResults) -> RiskController:
    """A controller of its calibration queries and further ones, which grow one by one."""
    if controller.cluster is not None or queries.cluster is not None:
        raise InvalidData("no queries can be added where they come in clusters: calibrate again")
    return RiskController(
        controller.score_function,
        controller.tuning,
        controller.calibration.joined(queries.scored(controller.score_function)),
        controller.bound,
        own={risk: extended(own, queries) for risk, own in controller.own.items()},
        growing=True,
    )


def grown(controller: RiskController) -> RiskController:
    """The same controller, of calibration queries that grow one by one."""
    own = {risk: grown(one) for risk, one in controller.own.items()}
    return RiskController(
        *(controller.score_function, controller.tuning, controller.calibration, controller.bound),
        own=own,
        growing=True,
    )
