"""The metrics of every epoch: on disk first, in MLflow as soon as it can be reached."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rcir.errors import CheckpointFailed, TrackingUnavailable
from rcir.files import write_json
from rcir.tracking import TrackedRun
from training.progress import console

METRICS_FILE = "metrics.json"


class History:
    """Metrics by epoch, in `metrics.json` of a run's folder and in its MLflow run.

    Training does not wait for a tracking server that is away: what could not be logged is logged
    with a later epoch, or by the process that continues the run. No epoch is logged twice.
    """

    def __init__(self, folder: Path, tracked: TrackedRun) -> None:
        self._file = folder / METRICS_FILE
        self._tracked = tracked

    def add(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Write down the metrics of an epoch, and log what is not logged yet.

        Raises:
            CheckpointFailed: the disk is full, or refuses.
        """
        try:
            write_json(self._file, self._written() | {str(epoch): dict(metrics)})
        except OSError as error:
            raise CheckpointFailed(
                f"{self._file} could not be written ({error.strerror or error}): make room, and "
                "give the same command again; it continues from the last checkpoint"
            ) from error
        try:
            self.log()
        except TrackingUnavailable as error:
            console.print(f"epoch {epoch} will be logged later: {error}", soft_wrap=True)

    def log(self) -> None:
        """Log the epochs that MLflow does not have; `TrackingUnavailable` if it is away."""
        written = {int(epoch): metrics for epoch, metrics in self._written().items()}
        for epoch in sorted(written.keys() - self._tracked.steps("loss")):
            self._tracked.log_metrics(written[epoch], step=epoch)

    def _written(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = (
            json.loads(self._file.read_text()) if self._file.is_file() else {}
        )
        return found
