"""The service behind HTTP: a retriever that answers, feedback on its answers, and new versions."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import repeat
from typing import Any

import numpy as np

from rcir.retrieval.answer import AtLevels, Retrieval, State
from rcir.retrieval.pictures import ItemPictures
from rcir.risk import make_request
from rcir.serving.batching import Batcher, PreparedRequest, answer_batch
from rcir.serving.errors import StoreUnavailable
from rcir.serving.middleware import Metrics, Shared
from rcir.serving.monitoring import Drift, Evidence
from rcir.serving.schemas import ExploreTerms, Feedback, Query, Terms
from rcir.serving.served import Served
from rcir.serving.settings import Settings
from rcir.serving.sources import RetrieverSource, ready_to_serve
from rcir.serving.store import Store

SECONDS_PER_DAY = 86400.0
RETRY_SECONDS = 60.0  # after which a refused version is tried again
_log = logging.getLogger("rcir.serving")


@dataclass(frozen=True, eq=False)
class Live:
    """The retriever that answers, pictures of its items and evidence on its guarantees."""

    served: Served
    pictures: ItemPictures
    evidence: Evidence
    drift: Drift


class Service:
    """A served retriever, which is replaced between two batches when its source has a new version.

    `trouble` says why a new version is not served, or that the source cannot be reached.
    """

    def __init__(self, source: RetrieverSource, settings: Settings) -> None:
        self.source, self.settings = source, settings
        self.metrics = Metrics()
        self.batcher = Batcher(self._work, settings.capacity)
        self.store = None if settings.store is None else Store(settings.store)
        self.trouble: str | None = None
        self.undecoded = Shared(settings.capacity, "queries wait to be decoded")
        self.decoders = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "rcir-decode")
        self._retry_at: dict[str, float] = {}  # by refused version
        self._polling: asyncio.Task[None] | None = None
        self._take(self._new_live())
        if self.live.pictures.expected:  # the first picture does not wait for the import
            self.decoders.submit(import_module, "rcir.data.images")

    def _new_live(self, version: str | None = None) -> Live:
        served = ready_to_serve(self.source, version)
        pictures = ItemPictures(served.retriever.origin, self.settings.pictures)
        wait = self.settings.feedback_days * SECONDS_PER_DAY
        evidence = Evidence(served, self.store, wait)
        return Live(served, pictures, evidence, Drift(served))

    def _take(self, live: Live) -> None:
        self.live = live
        for gauge in (self.metrics.model, self.metrics.evidence, self.metrics.alarm):
            gauge.clear()
        self.metrics.model.labels(live.served.version).set(1)
        self._show(live.evidence)
        self._show_drift(live)

    @property
    def served(self) -> Served:
        """The retriever that answers now."""
        return self.live.served

    async def start(self) -> None:
        """Start to check for new versions."""
        if self.settings.poll:
            self._polling = asyncio.create_task(self._poll())

    async def stop(self) -> None:
        """Answer the accepted requests, and stop."""
        if self._polling is not None:
            self._polling.cancel()
        await self.batcher.stop()
        self.decoders.shutdown(wait=False, cancel_futures=True)
        if self.store is not None:
            self.store.close()

    async def answer(self, query: Query[Terms]) -> list[dict[str, Any]]:
        """Return the answer to each query, as plain values."""
        self.batcher.require_room(query.n)  # before anything is decoded
        served, terms = self.served, query.terms
        if not served.calibration.has_certified(terms.request):  # the model does not wait for it
            await asyncio.to_thread(served.calibration.guarantee, terms.request)
        prepared = await self._prepare(query, served)
        return await self.batcher.ask(PreparedRequest(served, prepared, terms), query.n)

    async def explore(self, query: Query[ExploreTerms], alphas: Sequence[float]) -> dict[str, Any]:
        """Return the sets of one query at several ascending alphas as plain values."""
        served, options = self.served, query.terms.options
        requests = [make_request(alpha, simultaneous=True, **options) for alpha in alphas]
        await asyncio.to_thread(served.calibration.guarantee, requests[-1])
        prepared = await self._prepare(query, served)

        def work() -> AtLevels:
            (queries,) = served.queries([prepared])
            state = State(served.retriever.searcher, served.retriever.calibration)
            (levels,) = state.answer_at_levels(queries, requests, query.terms.outside)
            return levels

        levels = await self.batcher.run(work)
        means = await asyncio.to_thread(
            lambda: [
                served.mean_size(guarantee.threshold, options["distinct"], options["group"])
                for guarantee in levels.guarantees
            ]
        )
        return {
            "version": served.version,
            "alphas": list(levels.alphas),
            "sizes": levels.sizes.tolist(),
            "match_probabilities": levels.match_probabilities.round(6).tolist(),
            "mean_sizes": means,
            "sentences": [str(guarantee) for guarantee in levels.guarantees],
            "uncertainty_rank": served.uncertainty_rank(levels.largest),
            "largest": levels.largest.to_dict(),
        }

    def sample(self, rng: np.random.Generator) -> dict[str, Any]:
        """Return a query to try: a test picture in base64, or what `Served.sample` returns."""
        live = self.live
        if live.served.retriever.searcher.takes_vectors:
            return live.served.sample(rng)
        picture, label = live.pictures.query(rng)
        return {"picture": b64encode(picture).decode(), "label": label, "new": True, "key": None}

    async def _prepare(self, query: Query[Any], served: Served) -> Any:
        if not query.in_thread:
            return query.prepare(served)
        self.undecoded.take(query.client, query.n)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.decoders, query.prepare, served)
        finally:
            self.undecoded.give_back(query.client, query.n)

    def _work(self, batch: Sequence[PreparedRequest]) -> list[list[dict[str, Any]] | Exception]:
        """Return each request's answers as plain values, with the ids for feedback."""
        outcomes = list(zip(batch, answer_batch(batch), strict=True))
        answered = [(request, outcome) for request, outcome in outcomes if type(outcome) is tuple]
        n = sum(len(answers) for _, (_, answers) in answered)
        self.metrics.batch.observe(n)
        live = self.live
        for request, (queries, answers) in answered:
            if request.served is live.served:
                live.drift.add(queries, answers)
        self._show_drift(live)
        ids: Iterator[str | None] = repeat(None)
        if self.store is not None:
            rows = ((request.served.manifest, request.terms, *pair) for request, pair in answered)
            try:
                ids = iter(self.store.add(rows))
            except StoreUnavailable as error:
                _log.error("answers are given but not stored: %s", error)
                self.metrics.not_stored.inc(n)
        guarantees: dict[int, dict[str, Any]] = {}  # by id, because many answers share one

        def plain(served: Served, answer: Retrieval, encounter: str | None) -> dict[str, Any]:
            guarantee = answer.guarantee
            if id(guarantee) not in guarantees:
                shared = {"guarantee": guarantee.to_dict(), "sentence": str(guarantee)}
                guarantees[id(guarantee)] = shared
            rank = served.uncertainty_rank(answer)
            self.metrics.size.observe(answer.size)
            self.metrics.uncertainty.observe(rank)
            values = {
                "answer": next(ids),
                "encounter": encounter,
                "version": served.version,
                "uncertainty_rank": rank,
            }
            return values | answer.own_values() | guarantees[id(guarantee)]

        return [
            outcome
            if isinstance(outcome, Exception)
            else [
                plain(request.served, *named)
                for named in zip(outcome[1], request.terms.encounters, strict=False)
            ]
            for request, outcome in outcomes
        ]

    def feedback_trouble(self) -> str | None:
        """Return why answers and feedback are not stored; None if they are, or need not be."""
        return None if self.store is None else self.store.trouble

    async def feed(self, feedback: Feedback) -> dict[str, Any]:
        """Store feedback on an answer; it is on disk when this returns."""
        evidence = self.live.evidence
        number = await asyncio.to_thread(evidence.feed, feedback)
        if number is not None:
            self.metrics.feedback.labels(str(feedback.match).lower()).inc()
            self._show(evidence)
        watched = number is not None and evidence.watch.counts(number)
        new, alarm = number is not None, evidence.watch.alarm
        return {"accepted": True, "new": new, "watched": watched, "alarm": alarm}

    async def monitor(self) -> dict[str, Any]:
        """Return the evidence on the guarantees as plain values."""
        live = self.live
        rows, alarm = live.evidence.watch.rows, live.evidence.watch.alarm
        return {
            "version": live.served.version,
            "alarm": alarm,
            "guarantees": [asdict(row) for row in rows],
            "drift": live.drift.row,
        }

    def _show_drift(self, live: Live) -> None:
        row = live.drift.row
        self.metrics.drift.set(row["evidence"])
        self.metrics.drift_alarm.set(row["alarm"])

    def _show(self, evidence: Evidence) -> None:
        """Show the evidence on each guarantee in the metrics, unless another version is served."""
        if evidence is not self.live.evidence:
            return
        for row in evidence.watch.rows:
            terms = dict(sorted(row.terms.items()))
            alpha, delta = terms.pop("alpha"), terms.pop("delta")
            for name, field in Terms.model_fields.items():
                if name != "risk" and terms.get(name, ...) == field.default:
                    del terms[name]
            labels = (repr(alpha), repr(delta), json.dumps(terms))
            self.metrics.evidence.labels(*labels).set(row.evidence)
            self.metrics.alarm.labels(*labels).set(row.alarm)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self.settings.poll)
            try:
                await self.refresh()
            except Exception as error:  # the served version continues in any case
                self._refuse(None, error)
            try:  # feedback of other replicas
                evidence = self.live.evidence
                await asyncio.to_thread(evidence.watch.refresh)
                self._show(evidence)
            except Exception as error:
                _log.error("feedback cannot be read: %s", error)

    async def refresh(self) -> None:
        """Serve the source's version if it is a new one; an invalid one is refused for a minute.

        It is loaded, verified and warmed up in the background, and takes over between two batches.
        """
        version = await asyncio.to_thread(self.source.version)
        if version != self.served.version:
            if time.monotonic() < self._retry_at.get(version, 0):
                return
            try:
                self._take(await asyncio.to_thread(self._new_live, version))
            except Exception as error:
                self._refuse(version, error)
                return
            self.metrics.swaps.labels("taken").inc()
            _log.info("%s: version %s is served", self.source.name, self.served.version)
        self.trouble = None
        self._retry_at.clear()

    def _refuse(self, version: str | None, error: Exception) -> None:
        if version is not None:  # it may be incomplete yet, or its store unreachable for a moment
            self._retry_at[version] = time.monotonic() + RETRY_SECONDS
        reason = f"version {version} is refused" if version else "its version is not known"
        trouble = f"{self.source.name}: {reason}, {self.served.version} continues: {error}"
        if trouble != self.trouble:
            _log.error(trouble)
            self.metrics.swaps.labels("refused").inc()
        self.trouble = trouble
