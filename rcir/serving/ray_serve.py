"""The server on Ray Serve: as many replicas as requests need."""

from __future__ import annotations

import os
import time
from typing import Any

from fastapi import FastAPI

from rcir import trust
from rcir.cluster import join_cluster
from rcir.serving.app import create_app
from rcir.serving.served import RetrieverSource, Served, source_of
from rcir.serving.server import address_of, listen
from rcir.serving.settings import Settings

NAME = "rcir"
ONGOING = 32  # requests that a replica answers at once before another one is started
MOST_ONGOING = 512


class OnGpu:
    """A source whose retrievers embed on the GPU that Ray gives to the process."""

    def __init__(self, source: RetrieverSource) -> None:
        self._source, self.name = source, source.name

    def version(self) -> str:
        return self._source.version()

    def load(self, version: str) -> Served:
        served = self._source.load(version)
        if served.retriever.encoder is not None:
            served.retriever.encoder.cuda()
        return served


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
        gpus: of a replica, which embeds pictures on it; may be a share of one.
        blocking: return only when told to stop.

    Raises:
        InvalidConfig, RcirError: as `rcir.serving.serve` does.
    """
    from ray import serve

    source = source_of(place) if not gpus else OnGpu(source_of(place))
    version = source.version()  # a source that cannot be served is refused here, not by replicas
    with listen(settings) as listening:
        port = listening.getsockname()[1]

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
        ray_actor_options={"num_gpus": gpus, "runtime_env": {"env_vars": trust.permissions()}},
    )
    serve.start(http_options={"host": settings.host, "port": port})
    serve.run(deployment.bind(), name=NAME, route_prefix="/")
    print(f"{source.name}, version {version}", flush=True)
    print(f"serving on {address_of(settings.host, port)}", flush=True)
    try:
        while blocking:
            time.sleep(1)
    except KeyboardInterrupt:
        serve.shutdown()
