"""Work that is killed at random moments: a process imports all it needs, and forks each attempt."""

import os
import signal
import sys
import time
from collections.abc import Callable

import numpy as np

N_RUNS, N_KILLS_OF_RUN = 2, 4  # of trainings
N_DEMOS = 2


def finished(work: Callable[[], object]) -> float:
    """Do work in a forked process, until its end; return how many seconds it took."""
    started = time.monotonic()
    _, status = os.waitpid(_forked(work), 0)
    assert status == 0, status
    return time.monotonic() - started


def killed(work: Callable[[], object], seconds: float) -> None:
    """Do work in a forked process that is killed after some seconds."""
    process = _forked(work)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def _forked(work: Callable[[], object]) -> int:
    if process := os.fork():
        return process
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def trained(name: str, checkpoint_steps: int | None = None) -> None:
    from rcir.data import DataConfig
    from rcir.encoders import EncoderConfig
    from training import TrainingConfig, train

    parts = {"train": 300, "validation": 100, "gallery": 100, "tuning": 100, "calibration": 100}
    train(
        TrainingConfig(
            name=name,
            data=DataConfig("digits", options=parts),
            encoder=EncoderConfig(dim=8),
            epochs=4,
            batch=32,
            checkpoint_steps=checkpoint_steps,
        )
    )


def trainings() -> None:
    """Kill trainings again and again, and finish each of them in the end."""
    import ray.train  # noqa: F401
    from mlflow import MlflowClient  # noqa: F401

    import training.run  # noqa: F401

    rng = np.random.default_rng(0)
    seconds = finished(lambda: trained("whole"))
    for number in range(N_RUNS):
        for _ in range(N_KILLS_OF_RUN):
            killed(lambda name=f"killed-{number}": trained(name, 3), rng.uniform(0, 0.8 * seconds))
        finished(lambda name=f"killed-{number}": trained(name))


def demos() -> None:
    """Kill demos that write to one folder, and finish the last of them."""
    from pathlib import Path

    from rcir import demo

    seconds = finished(lambda: demo.run(Path("whole"), epochs=1))
    for moment in np.random.default_rng(0).uniform(0, seconds, N_DEMOS):
        killed(lambda: demo.run(Path("killed"), epochs=1), moment)
    finished(lambda: demo.run(Path("killed"), epochs=1))


if __name__ == "__main__":
    {"trainings": trainings, "demos": demos}[sys.argv[1]]()
