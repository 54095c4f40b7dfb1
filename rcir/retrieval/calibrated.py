"""A searcher whose neighbours are certified: calibrated with labelled queries, and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.digests import digests
from rcir.data.repeats import require_new, require_no_repeats, warn_of_copies, warn_of_twins
from rcir.errors import InvalidConfig, InvalidData, StaleCalibration
from rcir.levels import ALPHA, ALPHAS, DELTA
from rcir.retrieval.answer import Distinct
from rcir.retrieval.control import check_clusters, control, extended, nearest_other
from rcir.retrieval.searcher import Searcher
from rcir.risk import (
    Bound,
    Exchangeability,
    LabelledResults,
    Request,
    RiskController,
    check_exchangeability,
    decide_chosen,
)
from rcir.risk.bounds import check_bound
from rcir.risk.choice import ComparedSizes


class CalibratedSearcher(Searcher):
    """Finds neighbours, and knows how many of them a guarantee needs.

    Attributes:
        controllers: what decides the sizes: under None of sets of images and, if the gallery has
            labels, under "label" of sets of distinct labels; empty until calibrated.
        calibrated_on: fingerprints of all that the calibration depends on.
        query_digests: of the queries that it was tuned or calibrated with, see `rcir.data.digests`;
            none until calibrated.
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
        self.query_digests: NDArray[np.bytes_] = digests([])
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

    def calibrate(
        self,
        tuning: LabelledResults,
        calibration: LabelledResults,
        score_function: str = "auto",
        bound: Bound = "binomial",
        alphas: Sequence[float] = ALPHAS,
        delta: float = DELTA,
        recurring: bool = False,
    ) -> dict[Distinct, ComparedSizes]:
        """Calibrate on queries that this retriever, as it is now, has searched.

        Args:
            tuning: queries to fit the score function on; they calibrate nothing.
            calibration: other queries, drawn independently of each other from where those to come
                are; where they come in clusters, with these (`search_labelled`), clusters are.
            score_function: "constant", "minmax", "quantile", "learned", "boosted", "reranked", or
                "auto", for each risk which of them needs the smallest sets on the tuning split; see
                `rcir.risk.fit_score_function`.
            bound: confidence bound of the risk, see `rcir.risk.p_value`.
            alphas, delta: levels at which "auto" compares.
            recurring: allow calibration queries that are in the tuning split too, or come twice:
                for pictures that recur in use exactly as they do here, each query drawn
                independently of all others. Copies of one list of pictures are not.

        Returns:
            For sets of images (None) and sets of labels ("label") what "auto" compared, see
            `rcir.risk.fit_score_function`.

        Raises:
            StaleCalibration: the retriever has changed since it searched.
            InvalidData: of the queries; or some of them are pictures of the gallery, of the tuning
                split too, or the same (by digests; of pictures encoded anew it warns).

        Example:
            >>> import rcir
            >>> from rcir.data import DataConfig, load_splits
            >>> retriever = rcir.load("runs/demo/retriever")
            >>> splits = load_splits(DataConfig("digits", seed=1))
            >>> tuning = retriever.search_labelled(splits.tuning)
            >>> calibration = retriever.search_labelled(splits.calibration, group="occluded")
            >>> # These numbers are made of digits that recur.
            >>> sizes = retriever.calibrate(tuning, calibration, recurring=True)
            >>> sizes[None]["learned"][0.1] < sizes[None]["constant"][0.1]
            True
            >>> query = splits.test.images[0]
            >>> retriever.retrieve(query, 0.1, 0.1, group="True").guarantee.n_calibration < 3000
            True
        """
        check_bound(bound)
        if tuning is calibration or tuning.vectors is calibration.vectors:
            raise InvalidData(
                "tuning split and calibration queries are the same: the guarantee needs others"
            )
        for queries in (tuning, calibration):
            self._check_searched(queries)
        check_clusters(tuning, calibration)
        tuned, calibrated = (digests(part.known("images")) for part in (tuning, calibration))
        require_no_repeats(self.digests, tuned, calibrated, recurring)
        known = self.digests is not None
        warn_of_copies("queries of the tuning split", tuning.known("distances"), known)
        warn_of_copies("calibration queries", calibration.known("distances"), known)
        if not recurring:
            nearest = nearest_other(tuning, calibration)
            warn_of_twins("calibration queries", nearest, calibration.known("distances"))
        controllers: dict[Distinct, RiskController] = {}
        comparisons: dict[Distinct, ComparedSizes] = {}
        for distinct in (None, "label") if self.labels is not None else (None,):
            halves = (tuning, calibration)
            if distinct is not None:
                halves = (tuning.distinct(), calibration.distinct())
            controllers[distinct], comparisons[distinct] = control(
                *halves, score_function, bound, alphas, delta
            )
        self.controllers, self.chosen_among = controllers, 1
        self.calibrated_on = calibration.known("fingerprints")
        self.query_digests = np.concatenate([tuned, calibrated])
        return comparisons

    def extend(self, queries: LabelledResults, recurring: bool = False) -> None:
        """Add labelled queries to those calibrated on, in use, as often as wanted.

        The score functions stay as they are. From then on only guarantees that hold at every moment
        since calibration began are given (`anytime=True`), so that one may look at the sets and go
        on or stop; whoever does so with the others would stop where the queries mislead.

        Args:
            queries: exchangeable with the calibration queries, in the order in which their truth
                became known; with groups if these had some.
            recurring: allow queries that were tuned or calibrated with before, or come twice, as in
                `calibrate`.

        Raises:
            StaleCalibration: not calibrated, or changed since, or another one searched the queries.
            InvalidData: the calibration queries come in clusters, or have groups and these do not;
                or some queries are pictures of the gallery, of those before, or the same.

        Example:
            >>> import rcir
            >>> from rcir.data import DataConfig, load_splits
            >>> retriever = rcir.load("runs/demo/retriever")
            >>> test = load_splits(DataConfig("digits", seed=1)).test
            >>> retriever.extend(retriever.search_labelled(test))
            >>> answer = retriever.retrieve("runs/demo/queries/easy.png", 0.1, 0.1, anytime=True)
            >>> answer.guarantee.n_calibration > 5000
            True
        """
        self._valid_controller(None)
        self._check_searched(queries)
        added = digests(queries.known("images"))
        require_new(self.digests, self.query_digests, added, recurring)
        warn_of_copies("queries to add", queries.known("distances"), self.digests is not None)
        self.controllers = {
            distinct: extended(controller, queries if distinct is None else queries.distinct())
            for distinct, controller in self.controllers.items()
        }
        self.query_digests = np.concatenate([self.query_digests, added])

    def check(
        self, recent: LabelledResults, alpha: float = ALPHA, delta: float = DELTA
    ) -> Exchangeability:
        """Test whether recent labelled queries look like the calibration queries, and the risk.

        Args:
            recent: queries of which `search_labelled`, or you, know the true matches.
            alpha, delta: the guarantee for misses that they were, or would be, answered with.

        Raises:
            StaleCalibration: not calibrated, or changed since, or another one searched the queries.
            InvalidData: the queries come in clusters: the tests are of independent ones.
            InvalidRiskLevel: alpha or delta is out of range.
            RiskUnattainable: nothing certifies alpha at delta.
        """
        controller = self._valid_controller(None)
        self._check_searched(recent)
        cluster = controller.cluster or recent.cluster
        if cluster is not None:
            raise InvalidData(
                f"queries come in clusters ({cluster}), and are compared as independent ones: "
                "calibrate and check with one query of each"
            )
        request = Request(alpha, delta, anytime=controller.growing)
        threshold = decide_chosen(controller, request, self.chosen_among).threshold
        scored = recent.scored(controller.score_function)
        return check_exchangeability(controller.calibration, scored, certified=(threshold, alpha))

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
        current = self.fingerprints()
        parts = dict.fromkeys([*current, *self.calibrated_on])
        changed = [part for part in parts if current.get(part) != self.calibrated_on.get(part)]
        controller = self.controllers[distinct]
        if controller.depth != self.depth:
            changed.append("search depth")
        if not all(one.intact for one in (controller, *controller.own.values())):
            changed.append("score function")
        if changed:
            raise StaleCalibration(
                f"changed since calibration: {', '.join(changed)}. The guarantee does not cover "
                "that: search the labelled queries again and call `calibrate` with them; `search` "
                "gives neighbours without a guarantee"
            )
        return controller

    def _require_calibrated(self) -> None:
        if not self.controllers:
            raise StaleCalibration(
                "this retriever is not calibrated: call `calibrate` with labelled queries, or make "
                "one with `python -m calibration`; `search` gives neighbours without a guarantee"
            )
