"""A searcher whose neighbours are certified: calibrated with labelled queries, and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from rcir.data.digests import digests
from rcir.errors import InvalidConfig, InvalidData, StaleCalibration
from rcir.levels import ALPHAS, DELTA
from rcir.retrieval.calibration_report import CalibrationReport, report
from rcir.retrieval.control import CalibrationOptions, control, grown
from rcir.retrieval.labelled_searcher import LabelledSearcher
from rcir.retrieval.queries import Queries, require_alike
from rcir.retrieval.query_uncertainty import QUERY_UNCERTAINTIES
from rcir.retrieval.splits import check_clusters, check_repeats, divide_queries
from rcir.risk import (
    Bound,
    LabelledResults,
    RiskController,
    smallest_uncertainty,
)
from rcir.risk.choice import ComparedSizes
from rcir.risk.fits import Fits
from rcir.risk.request import Distinct


class CalibratedSearcher(LabelledSearcher):
    """Finds neighbours, and knows how many of them a guarantee needs.

    Attributes:
        controllers: what decides the sizes: under None of sets of images and, if the gallery has
            labels, under "label" of sets of distinct labels; empty until calibrated.
        calibrated_on: fingerprints of all that the calibration depends on, and its uncertainty.
        calibrated_with: how it was calibrated.
        tuning_queries, calibration_queries: the queries that it was tuned and calibrated with, as
            they were searched; None until calibrated.
        origin: where it comes from, as plain values: the configuration of its data set ("data") and
            the MLflow run of its training ("run"), if known. No answer depends on it.
        chosen_among: number of retrievers that it was chosen among, by results on its calibration
            queries, see `rcir compare --choose`: every request is then certified at delta divided
            by it. 1 without such a choice, and after `calibrate`.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.controllers: dict[Distinct, RiskController] = {}
        self.calibrated_on: dict[str, str] = {}
        self.calibrated_with = CalibrationOptions()
        self.tuning_queries: Queries | None = None
        self.calibration_queries: Queries | None = None
        self.origin: dict[str, Any] = {}
        self.chosen_among: int = 1

    @property
    def controller(self) -> RiskController:
        """The controller of sets of images: `controllers[None]`.

        Raises:
            StaleCalibration: not calibrated.
        """
        self._require_calibrated()
        return self.controllers[None]

    @overload
    def calibrate(
        self,
        queries: LabelledResults,
        labels: LabelledResults,
        score_function: str = "auto",
        bound: Bound = "binomial",
        alphas: Sequence[float] = ALPHAS,
        delta: float = DELTA,
        recurring: bool = False,
        *,
        judged_by: str = "own",
    ) -> CalibrationReport: ...
    @overload
    def calibrate(
        self,
        queries: NDArray[np.floating[Any]],
        labels: object,
        score_function: str = "auto",
        bound: Bound = "binomial",
        alphas: Sequence[float] = ALPHAS,
        delta: float = DELTA,
        recurring: bool = False,
        *,
        judged_by: str = "own",
        seed: int = 0,
        **known: Any,
    ) -> CalibrationReport: ...

    def calibrate(
        self,
        queries: LabelledResults | NDArray[np.floating[Any]],
        labels: LabelledResults | object,
        score_function: str = "auto",
        bound: Bound = "binomial",
        alphas: Sequence[float] = ALPHAS,
        delta: float = DELTA,
        recurring: bool = False,
        *,
        judged_by: str = "own",
        seed: int = 0,
        **known: Any,
    ) -> CalibrationReport:
        """Calibrate on labelled queries: some fit the sizes, the others certify them.

        Either on two splits that this retriever, as it is now, has searched (`search_labelled`), or
        on vectors with their labels, which are divided here at random.

        Args:
            queries: a tuning split, which calibrates nothing; or vectors (n, d).
            labels: the calibration queries, others than those of the tuning split; or the labels of
                the vectors, of the kind that the gallery has (`Retriever.from_embeddings`).
                Calibration queries are drawn independently of each other from where those to come
                are; where they come in clusters, clusters are.
            score_function: "constant", "minmax", "quantile", "learned", "boosted", "reranked", or
                "auto", for each risk which of them needs the smallest sets on the tuning split; see
                `rcir.risk.fit_score_function`.
            bound: confidence bound of the risk, see `rcir.risk.p_value`.
            alphas, delta: levels at which "auto" compares, and to report.
            recurring: allow calibration queries that are in the tuning split too, or come twice:
                for pictures that recur in use exactly as they do here, each query drawn
                independently of all others. Copies of one list of pictures are not.
            judged_by: uncertainty of the queries: one of `uncertainties`, see `judged`; or "auto",
                which of them needs the smallest sets on the tuning split, see
                `rcir.risk.smallest_uncertainty`.
            seed: decides which vectors tune and which calibrate.
            known: of vectors, see `labelled`: uncertainty, model, groups, clusters.

        Returns:
            What is certified; `print` it.

        Raises:
            StaleCalibration: the retriever has changed since it searched.
            InvalidData: of the queries; or some of them are pictures of the gallery, of the tuning
                split too, or the same (by digests; of pictures encoded anew it warns, but not of
                those in templates, whose vectors are of several pictures).

        Example:
            >>> import rcir
            >>> from rcir.data import DataConfig, load_splits
            >>> retriever = rcir.load("runs/demo/retriever")
            >>> splits = load_splits(DataConfig("digits", seed=1))
            >>> tuning = retriever.search_labelled(splits.tuning)
            >>> calibration = retriever.search_labelled(splits.calibration, group="occluded")
            >>> # These numbers are made of digits that recur.
            >>> report = retriever.calibrate(tuning, calibration, recurring=True)
            >>> all(row.mean_size < row.constant_size for row in report.rows)
            True
            >>> query = splits.test.images[0]
            >>> retriever.retrieve(query, 0.1, 0.1, group="True").guarantee.n_calibration < 3000
            True
        """
        options = CalibrationOptions(score_function, bound, alphas, delta, recurring, judged_by)
        if isinstance(queries, LabelledResults):
            if not isinstance(labels, LabelledResults) or known:
                raise InvalidConfig(
                    "give two searched splits, to tune and to calibrate; or vectors and labels"
                )
            return self._calibrate(queries, labels, options)
        divided = divide_queries(self.labelled(queries, labels, **known), seed)
        tuning, calibration = (self._labelled(part) for part in divided)
        return self._calibrate(tuning, calibration, options)

    def _calibrate(
        self,
        tuning: LabelledResults,
        calibration: LabelledResults,
        options: CalibrationOptions,
        again: bool = False,
    ) -> CalibrationReport:
        """Calibrate; or, `again`, with queries that were checked before, by the same choices."""
        if tuning is calibration or tuning.vectors is calibration.vectors:
            raise InvalidData(
                "tuning split and calibration queries are the same: the guarantee needs others"
            )
        for queries in (tuning, calibration):
            self._check_searched(queries)
        require_alike(calibration.known("queries"), tuning.known("queries"))
        check_clusters(tuning, calibration)
        check_repeats(self, tuning, calibration, options.recurring, again)
        uncertainty, uncertainties = self._chosen_uncertainty(tuning, options, again)
        tuning, calibration = (self.judged(one, uncertainty) for one in (tuning, calibration))
        controllers: dict[Distinct, RiskController] = {}
        comparison: dict[Distinct, ComparedSizes] = {}
        fits, asked = Fits(tuning), calibration
        for distinct in (None, "label") if self.labels is not None else (None,):
            if distinct is not None:
                fits, asked = fits.distinct(), asked.distinct()
            before = self.controllers[distinct] if again else None
            controllers[distinct], comparison[distinct] = control(fits, asked, options, before)
        if again and self.controller.growing:
            controllers = {distinct: grown(one) for distinct, one in controllers.items()}
        self.controllers, self.chosen_among = controllers, self.chosen_among if again else 1
        self.uncertainty = uncertainty
        self.calibrated_on = dict(self.fingerprints(), uncertainty=uncertainty)
        self.calibrated_with = options
        self.tuning_queries = self._kept(tuning)
        self.calibration_queries = self._kept(calibration)
        return report(
            controllers[None],
            tuning,
            calibration,
            options.alphas,
            options.delta,
            comparison,
            uncertainties,
            self.chosen_among,
        )

    def _chosen_uncertainty(
        self, tuning: LabelledResults, options: CalibrationOptions, again: bool
    ) -> tuple[str, ComparedSizes]:
        if again or options.uncertainty != "auto":
            return self.uncertainty if again else options.uncertainty, {}
        held = tuning.known("queries").embedding is not None
        candidates = {
            kind: self.judged(tuning, kind)
            for kind in self.uncertainties
            if held or not QUERY_UNCERTAINTIES[kind].by_draws
        }
        return smallest_uncertainty(candidates, options.alphas, options.delta)

    def _kept(self, results: LabelledResults) -> Queries:
        """The queries of search results, to be searched again.

        Their relevance is kept where the truth of the results follows from it.
        """
        queries: Queries = results.known("queries").identified()
        relevance = queries.relevance
        if relevance is not None and self.relevance is not None:
            found = relevance.of(self.relevance, results.known("positions"))
            if not np.array_equal(found, results.relevant):
                relevance = None
        clusters = results.clusters
        return replace(
            queries,
            embedding=queries.embedding if self.keeps_embeddings else None,
            relevance=relevance,
            groups=results.groups,
            clusters=None if clusters is None else clusters.astype(str),
            cluster=results.cluster,
        )

    @property
    def keeps_embeddings(self) -> bool:
        """Whether queries are searched anew by all that the encoder says of them."""
        by_draws = QUERY_UNCERTAINTIES[self.uncertainty].by_draws
        return by_draws or (self.encoder is not None and self.encoder.reranks)

    @property
    def query_digests(self) -> NDArray[np.bytes_]:
        """(n,) of the queries that it was tuned or calibrated with, see `rcir.data.digests`."""
        kept = (self.tuning_queries, self.calibration_queries)
        return np.concatenate([digests([]), *(each.digests for each in kept if each is not None)])

    @property
    def known_digests(self) -> NDArray[np.bytes_]:
        """(n,) of the queries that say nothing of further ones, ascending.

        Those that it was tuned or calibrated with, and the items of its gallery, unless these are
        what asks; none where queries recur.
        """
        if self.calibrated_with.recurring:
            return digests([])
        gallery = None if self.options.leave_one_out else self.digests
        known = self.query_digests
        return np.sort(known if gallery is None else np.concatenate([known, gallery.ravel()]))

    def changes(self) -> list[str]:
        """Names of what differs from what it was calibrated on."""
        current = dict(self.fingerprints(), uncertainty=self.uncertainty)
        parts = dict.fromkeys([*current, *self.calibrated_on])
        return [part for part in parts if current.get(part) != self.calibrated_on.get(part)]

    def _check_searched(self, queries: LabelledResults) -> None:
        if queries.fingerprints != self.fingerprints() or queries.depth != self.depth:
            raise StaleCalibration(
                "the queries were searched by another retriever, or this one has changed since: "
                "search them again"
            )

    def _valid_controller(self, distinct: Distinct) -> RiskController:
        self._require_calibrated()
        if not isinstance(distinct, str | None) or distinct not in self.controllers:
            raise InvalidConfig(
                f"distinct is {distinct!r}; it can be "
                + ("'label' or None" if "label" in self.controllers else "None (no labels known)")
            )
        changed = self.changes()
        controller = self.controllers[distinct]
        if controller.depth != self.depth:
            changed.append("search depth")
        if not all(one.intact for one in (controller, *controller.own.values())):
            changed.append("score function")
        if changed:
            raise StaleCalibration(
                f"changed since calibration: {', '.join(changed)}. The guarantee does not cover "
                "that: call `recalibrate`, or `calibrate` with labelled queries; `search` gives "
                "neighbours without a guarantee"
            )
        return controller

    def _require_calibrated(self) -> None:
        if not self.controllers:
            raise StaleCalibration(
                "this retriever is not calibrated: call `calibrate` with labelled queries, or make "
                "one with `python -m calibration`; `search` gives neighbours without a guarantee"
            )
