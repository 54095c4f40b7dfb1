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
    """

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._steps: Queue[tuple[str, int, Mapping[str, float], float] | None] = Queue(QUEUE_SIZE)
        self._closed = Event()
        self._failing = Event()
        self._dropped = Event()
        self._thread: Thread | None = None
        self._settings = ExitStack()

    def put(self, marker: str, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Add the metrics of a step, see `TrackedRun.log_metrics`; return at once.

        Args:
            marker: one of the metrics. If the run has it at this step already, nothing is logged.
        """
        if self._thread is None:
            # Here and not by the thread: others may read the environment when it changes.
            self._settings.enter_context(settings(IMPATIENT))
            self._thread = Thread(target=self._log, name="rcir-metrics", daemon=True)
            self._thread.start()
        with suppress(Full):
            self._steps.put_nowait((marker, step, metrics, at))

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
        logged: dict[str, set[int]] = {}
        while (item := self._steps.get()) is not None:
            marker, step, metrics, at = item
            while True:
                if self._dropped.is_set():
                    return
                try:
                    if marker not in logged:
                        logged[marker] = self._run.steps(marker)
                    # If an answer was lost, the same time lets MLflow see that it has the values.
                    if step not in logged[marker]:
                        self._run.log_metrics(metrics, step, at)
                        logged[marker].add(step)
                except TrackingUnavailable as error:
                    if not (self._failing.is_set() or self._dropped.is_set()):
                        console.print(
                            f"metrics from step {step} of {marker} on will be logged later: "
                            f"{error}",
                            soft_wrap=True,
                        )
                    self._failing.set()
                    if self._closed.wait(RETRY_AFTER_S):
                        return
                else:
                    self._failing.clear()
                    break
