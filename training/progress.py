"""Progress of a training on the screen, also of one whose workers are other processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Self

from rcir.terminal import console, progress_bar

LOG = "training.log"  # in a run's folder: what its first worker prints, and what starts workers
INTERVAL = 0.5  # seconds


def add_line(log: Path, line: str) -> None:
    """Add a line to a file that is followed, perhaps by another process."""
    with log.open("a") as file:
        file.write(f"{line}\n")


@contextmanager
def followed(logs: Mapping[Path, str]) -> Iterator[None]:
    """Print the lines that are added to some files inside the block.

    Ray could forward them, but among the notes of its own processes, and not all of them.

    Args:
        logs: files, which need not exist yet, and what to print before each of their lines.
    """
    read = {log: log.stat().st_size if log.is_file() else 0 for log in logs}
    ended = Event()

    def follow() -> None:
        last = False
        while not last:
            last = ended.wait(INTERVAL)
            for log, prefix in logs.items():
                with suppress(OSError), log.open("rb") as file:
                    file.seek(read[log])
                    lines, _, _ = file.read().rpartition(b"\n")
                    read[log] += len(lines) + 1 if lines else 0
                    for line in lines.decode().splitlines():
                        console.print(f"{prefix}{line}", soft_wrap=True)

    follower = Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


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
