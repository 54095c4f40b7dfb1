"""Work that is killed at random moments: a process imports all it needs, and forks each attempt."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable

import numpy as np

N_RUNS, N_KILLS_OF_RUN = 2, 4  # of trainings
N_DEMOS = 3
N_SERVERS = 30


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


def trained(name: str) -> None:
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
            killed(lambda name=f"killed-{number}": trained(name), rng.uniform(0, 0.8 * seconds))
        finished(lambda name=f"killed-{number}": trained(name))


def demos() -> None:
    """Kill demos that write to one folder, and finish the last of them."""
    from pathlib import Path

    from rcir import demo

    seconds = finished(lambda: demo.run(Path("whole"), epochs=1))
    for moment in np.random.default_rng(0).uniform(0, seconds, N_DEMOS):
        killed(lambda: demo.run(Path("killed"), epochs=1), moment)
    finished(lambda: demo.run(Path("killed"), epochs=1))


def servers(place: str, store: str) -> None:
    """Kill servers while feedback is sent to them; print the ids of what was acknowledged."""
    import socket
    import threading
    from contextlib import suppress
    from pathlib import Path

    import httpx

    import rcir
    from rcir.serving import Settings, serve

    query = rcir.load(place).calibration.calibration_queries.vectors[0].tolist()
    rng, acknowledged = np.random.default_rng(0), []

    def send(address: str, stop: threading.Event) -> None:
        with httpx.Client(base_url=address) as client:
            while not stop.is_set():
                with suppress(httpx.TransportError):
                    body = {"vector": query, "alpha": 0.2}
                    answer = client.post("/retrieve", json=body).json()["answer"]
                    feedback = {"answer": answer, "match": True}
                    if client.post("/feedback", json=feedback).status_code == 200:
                        acknowledged.append(answer)

    for _ in range(N_SERVERS):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        settings = Settings(port=port, store=Path(store))
        process = _forked(lambda settings=settings: serve(place, settings))
        before, stop = len(acknowledged), threading.Event()
        thread = threading.Thread(target=send, args=(f"http://127.0.0.1:{port}", stop))
        thread.start()
        until = time.monotonic() + 60
        while len(acknowledged) == before and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.5))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        stop.set()
        thread.join()
        assert len(acknowledged) > before
    json.dump(acknowledged, sys.stdout)


if __name__ == "__main__":
    works = {"trainings": trainings, "demos": demos, "servers": servers}
    works[sys.argv[1]](*sys.argv[2:])
