"""Metrics logged from a thread, so that training does not wait for the tracking store."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from queue import Full, Queue
from threading import Event, Thread

from rcir.errors import TrackingUnavailable
from rcir.terminal import console
from rcir.tracking.runs import IMPATIENT, TrackedRun, settings

QUEUE_SIZE = 1000  # steps
RETRY_AFTER_S = 60.0
DRAIN_S = 10.0


class MetricQueue:
    """Logs the metrics of steps from a thread, in order and each step once.

    After a failure the store is left alone for `RETRY_AFTER_S` seconds. Steps that are not logged
    until the queue is closed, or that find it full, are dropped: keep them, and log them later.

    Args:
        run: where metrics are logged.
        marker: a metric of every step. A step for which the run has it already is skipped.
    """

    def __init__(self, run: TrackedRun, marker: str) -> None:
        self._run = run
        self._marker = marker
        self._steps: Queue[tuple[int, Mapping[str, float], float | None] | None] = Queue(QUEUE_SIZE)
        self._closed = Event()
        self._failing = Event()
        self._dropped = Event()
        self._thread: Thread | None = None
        self._settings = ExitStack()

    def put(self, step: int, metrics: Mapping[str, float], at: float | None) -> None:
        """Add the metrics of a step, see `TrackedRun.log_metrics`; return at once."""
        if self._thread is None:
            # Here and not by the thread: others may read the environment when it changes.
            self._settings.enter_context(settings(IMPATIENT))
            self._thread = Thread(target=self._log, name="rcir-metrics", daemon=True)
            self._thread.start()
        with suppress(Full):
            self._steps.put_nowait((step, metrics, at))

    def close(self) -> None:
        """Log what waits, for at most `DRAIN_S` seconds; do not wait for a store that fails."""
        self._closed.set()
        with suppress(Full):
            self._steps.put_nowait(None)
        if self._thread is not None and not self._failing.is_set():
            self._thread.join(DRAIN_S)
        self._dropped.set()
        self._settings.close()

    def _log(self) -> None:
        logged: set[int] | None = None
        while (item := self._steps.get()) is not None:
            step, metrics, at = item
            while True:
                if self._dropped.is_set():
                    return
                try:
                    if logged is None:
                        logged = self._run.steps(self._marker)
                    # If an answer was lost, the same time lets MLflow see that it has the values.
                    if step not in logged:
                        self._run.log_metrics(metrics, step, at)
                except TrackingUnavailable as error:
                    if not (self._failing.is_set() or self._dropped.is_set()):
                        console.print(
                            f"metrics from step {step} on will be logged later: {error}",
                            soft_wrap=True,
                        )
                    self._failing.set()
                    if self._closed.wait(RETRY_AFTER_S):
                        return
                else:
                    self._failing.clear()
                    break
