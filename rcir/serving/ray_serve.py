"""The server on Ray Serve: as many replicas as requests need."""

from __future__ import annotations

import os
from typing import Any

from fastapi import FastAPI

from rcir.cluster import join_cluster
from rcir.serving.app import create_app
from rcir.serving.server import listen
from rcir.serving.settings import Settings
from rcir.serving.sources import source_of

NAME = "rcir"
ONGOING = 32  # requests that a replica answers at once before another one is started
MOST_ONGOING = 512


def serve_on_ray(
    place: str | os.PathLike[str],
    settings: Settings,
    replicas: tuple[int, int],
    gpus: float = 0,
    blocking: bool = True,
) -> None:
    """Serve a retriever by replicas on the Ray cluster of this process, behind one address.

    Each replica is the whole application, with a model and a gallery of its own: it takes new
    versions by itself, and reads the others' feedback from the file, which all of them must see.

    Args:
        place, settings: as for `rcir.serving.serve`; every node must see the folder.
        replicas: the least and the most.
        gpus: of a replica.
        blocking: return only when told to stop.

    Raises:
        InvalidConfig, RcirError: as `rcir.serving.serve` does.
    """
    from ray import serve

    source = source_of(place)
    source.version()  # what cannot be served is said here, not by each replica
    listen(settings).close()

    def build() -> FastAPI:
        return create_app(source, settings)

    join_cluster()
    least, most = replicas
    deployment: Any = serve.deployment(
        serve.ingress(build)(),
        name=NAME,
        autoscaling_config={
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": ONGOING,
        },
        max_ongoing_requests=MOST_ONGOING,
        ray_actor_options={"num_gpus": gpus},
    )
    serve.start(http_options={"host": settings.host, "port": settings.port})
    print(f"serving on http://{settings.host}:{settings.port}", flush=True)
    serve.run(deployment.bind(), name=NAME, route_prefix="/", blocking=blocking)
