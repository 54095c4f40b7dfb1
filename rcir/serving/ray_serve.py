"""Replicas of the server on Ray Serve."""

from __future__ import annotations

import os
import time
from typing import Any

from fastapi import FastAPI

from rcir import trust
from rcir.cluster import join_cluster
from rcir.serving.app import create_app
from rcir.serving.server import address_of, listen
from rcir.serving.settings import Settings
from rcir.serving.sources import source_of

APPLICATION_NAME = "rcir"
TARGET_REQUESTS = 32  # requests in progress of a replica, above which another one is started
MAX_REQUESTS = 512  # requests in progress of a replica


def serve_on_ray(
    place: str | os.PathLike[str], settings: Settings, replicas: tuple[int, int], gpus: float = 0
) -> None:
    """Serve a retriever by replicas on the Ray cluster of this process, behind one address.

    It returns when the process is stopped. Each replica is a whole application that loads new
    versions by itself and reads the feedback of the others from the file.

    Args:
        place, settings: as for `rcir.serving.serve`; every node must reach all folders and files.
        replicas: minimum and maximum number.
        gpus: number of GPUs of a replica, which embed pictures; may be a fraction.

    Raises:
        RcirError: as `rcir.serving.serve` does.
    """
    from ray import serve

    source = source_of(place, on_gpu=gpus > 0)
    version = source.version()  # refuses a missing retriever here, not in the replicas
    with listen(settings) as listening:
        port = listening.getsockname()[1]

    def build() -> FastAPI:
        return create_app(source, settings)

    join_cluster()
    minimum, maximum = replicas
    deployment: Any = serve.deployment(
        serve.ingress(build)(),
        name=APPLICATION_NAME,
        autoscaling_config={
            "min_replicas": minimum,
            "max_replicas": maximum,
            "target_ongoing_requests": TARGET_REQUESTS,
        },
        max_ongoing_requests=MAX_REQUESTS,
        ray_actor_options={"num_gpus": gpus, "runtime_env": {"env_vars": trust.permissions()}},
    )
    serve.start(http_options={"host": settings.host, "port": port})
    serve.run(deployment.bind(), name=APPLICATION_NAME, route_prefix="/")
    print(f"{source.name}, version {version}", flush=True)
    print(f"serving on {address_of(settings.host, port)}", flush=True)
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        serve.shutdown()
