"""A calibrated searcher kept up to date: its gallery changes, labelled queries come in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.repeats import require_new, warn_of_copies
from rcir.errors import InvalidData, StaleCalibration
from rcir.index import lengths
from rcir.levels import ALPHA, DELTA
from rcir.retrieval.calibrated import CalibratedSearcher
from rcir.retrieval.calibration_report import CalibrationReport
from rcir.retrieval.control import extended
from rcir.retrieval.gallery import Gallery
from rcir.retrieval.queries import Queries, require_alike
from rcir.retrieval.searcher import Asked
from rcir.retrieval.splits import digests_of, vector_distances
from rcir.risk import (
    Exchangeability,
    LabelledResults,
    Request,
    check_exchangeability,
    decide_chosen,
)


class MaintainedSearcher(CalibratedSearcher):
    """Its gallery grows and shrinks, its calibration queries are searched again and added to."""

    def add(
        self,
        images: Asked,
        ids: Sequence[str],
        labels: object = None,
        uncertainty: NDArray[np.floating[Any]] | None = None,
        model: str | None = None,
    ) -> None:
        """Add images to the gallery. The calibration is stale from then on: `recalibrate`.

        Args:
            images: pictures, or as for `search`.
            ids: a name for each, other than those of the gallery images.
            labels: of each, if and only if the gallery has labels, of the same kind; or its
                `Relevance`.
            uncertainty: (n,) of vectors, if and only if those of the gallery have any.
            model: what embedded the vectors, see `VectorOptions`.

        Raises:
            InvalidData: of ids, labels, vectors and uncertainties; nothing was added.
            InvalidConfig, InvalidImage: as `embed` does.
        """
        if isinstance(images, str | bytes | os.PathLike):
            raise InvalidData(f"images is {images!r}: give a list, of one image per id")
        named = self.gallery.new_ids(ids, len(images))
        numbered = self.encoder is not None  # then its data set gave the labels their numbers
        relevance, names = self.gallery.new_relevance(labels, named, self.label_names, numbered)
        added = self.prepared(images, None, uncertainty, model)
        longer = self.gallery.joined(
            Gallery(
                named,
                lengths(added.vectors),
                relevance,
                added.uncertainty,
                None if self.digests is None else added.identified().digests,
                added.embedding,
            )
        )
        self.index.add(added.vectors)
        self.gallery, self.label_names = longer, names

    def remove(self, ids: Sequence[str]) -> None:
        """Remove images from the gallery. The calibration is stale from then on: `recalibrate`.

        Raises:
            InvalidData: some ids are of no gallery image, or none would be left; nothing was
                removed.
        """
        gone = self.gallery.positions(ids)
        if len(gone) == len(self.gallery):
            raise InvalidData("no image would be left in the gallery: build another one")
        self.index.remove(gone)
        self.gallery = self.gallery.subset(np.delete(np.arange(len(self.gallery)), gone))

    def recalibrate(self) -> CalibrationReport:
        """Calibrate anew with the same queries, after the gallery has changed.

        No pictures are needed: the queries are kept as they were searched. The score functions are
        fitted anew, of the kinds that were chosen before, and the uncertainty is the same. Each
        gallery's guarantee holds with its own delta, if the gallery was not changed in view of
        these queries.

        Raises:
            StaleCalibration: not calibrated, or the encoder has changed, of which the queries'
                vectors are no more.
            InvalidData: of some gallery items it is not known which queries they match.

        Example:
            >>> import numpy as np, rcir
            >>> rng = np.random.default_rng(0)
            >>> labels = rng.integers(5, size=900)
            >>> vectors = np.eye(5)[labels] + 0.2 * rng.standard_normal((900, 5))
            >>> retriever = rcir.Retriever.from_embeddings(vectors[:400], labels=labels[:400])
            >>> _ = retriever.calibrate(vectors[400:800], labels[400:800])
            >>> retriever.add(vectors[800:], [f"new {n}" for n in range(100)], labels[800:])
            >>> retriever.recalibrate().n_calibration
            280
        """
        kept = self.kept_queries()
        tuning, calibration = (self._labelled(queries) for queries in kept)
        return self._calibrate(tuning, calibration, self.calibrated_with, again=True)

    def kept_queries(self) -> tuple[Queries, Queries]:
        """The tuning and calibration queries, to calibrate with them anew.

        Raises:
            StaleCalibration, InvalidData: as `recalibrate`.
        """
        self._require_calibrated()
        if self.tuning_queries is None or self.calibration_queries is None:
            raise StaleCalibration("the calibration queries were not kept: calibrate again")
        for part in self.changes():
            if part in ("encoder", "preprocessing", "options"):
                raise StaleCalibration(
                    f"the {part} changed since calibration, so that the vectors of its queries are "
                    "no longer what it makes: search the labelled queries again and `calibrate`"
                )
        kept = self.tuning_queries, self.calibration_queries
        if self.relevance is None or any(queries.relevance is None for queries in kept):
            raise InvalidData(
                "it is not known which queries the gallery items match, so that the queries cannot "
                "be searched anew: give labelled queries to `calibrate`"
            )
        return kept

    def extend_calibration(
        self,
        queries: LabelledResults | NDArray[np.floating[Any]],
        labels: object = None,
        recurring: bool = False,
        **known: Any,
    ) -> None:
        """Add labelled queries to those calibrated on, in use, as often as wanted.

        The score functions stay as they are. From then on only guarantees that hold at every moment
        since calibration began are given (`anytime=True`), so that one may look at the sets and go
        on or stop; whoever does so with the others would stop where the queries mislead.

        Args:
            queries: exchangeable with the calibration queries, in the order in which their truth
                became known, searched by this retriever; or vectors (n, d). With groups if those
                had some.
            labels: of the vectors.
            recurring: allow queries that were tuned or calibrated with before, or come twice, as in
                `calibrate`.
            known: of vectors, see `labelled`.

        Raises:
            StaleCalibration: not calibrated, or changed since, or another one searched the queries.
            InvalidData: the calibration queries come in clusters, or have groups and these do not;
                or some queries are pictures of the gallery, of those before, or the same.

        Example:
            >>> import rcir
            >>> from rcir.data import DataConfig, load_splits
            >>> retriever = rcir.load("runs/demo/retriever")
            >>> test = load_splits(DataConfig("digits", seed=1)).test
            >>> retriever.extend_calibration(retriever.search_labelled(test))
            >>> answer = retriever.retrieve("runs/demo/queries/easy.png", 0.1, 0.1, anytime=True)
            >>> answer.guarantee.n_calibration > 5000
            True
        """
        self._valid_controller(None)
        if not isinstance(queries, LabelledResults):
            queries = self._labelled(self.labelled(queries, labels, **known))
        self._check_searched(queries)
        require_alike(queries.known("queries"), self.calibration_queries)
        queries = self.judged(queries)
        added = self._kept(queries)
        gallery = None if self.options.leave_one_out else self.digests
        require_new(gallery, self.query_digests, digests_of(queries), recurring)
        if not self.options.leave_one_out:
            distances = vector_distances(self, queries)
            warn_of_copies("queries to add", distances, self.digests is not None)
        assert self.calibration_queries is not None
        controllers = {
            distinct: extended(controller, queries if distinct is None else queries.distinct())
            for distinct, controller in self.controllers.items()
        }
        self.calibration_queries = Queries.joined([self.calibration_queries, added])
        if recurring:
            self.calibrated_with = replace(self.calibrated_with, recurring=True)
        self.controllers = controllers

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
        require_alike(recent.known("queries"), self.calibration_queries)
        recent = self.judged(recent)
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
