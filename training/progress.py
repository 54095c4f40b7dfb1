"""Progress of a training on the screen."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rcir.terminal import console, progress_bar


class EpochBar:
    """A progress bar of one epoch on a terminal, and one line behind it anywhere."""

    def __init__(self, epoch: int, epochs: int, visible: bool) -> None:
        self._title = f"epoch {epoch}/{epochs}"
        self._progress = progress_bar(visible)
        self._task = self._progress.add_task(f"{self._title} mining", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def start(self, steps: int) -> None:
        """Mining is done; so many steps follow."""
        self._progress.update(self._task, description=self._title, total=steps)

    def advance(self) -> None:
        """One step is done."""
        self._progress.advance(self._task)

    def summary(self, metrics: Mapping[str, float]) -> None:
        """Print the line of the epoch."""
        line = f"{self._title}  loss {metrics['loss']:.4f}"
        line += f"  validation recall@1 {metrics['validation/recall_at_1']:.3f}"
        if "validation/auroc_miss" in metrics:
            line += f"  AUROC of misses {metrics['validation/auroc_miss']:.3f}"
        console.print(f"{line}  {metrics['seconds']:.1f} s", soft_wrap=True)
