"""`rcir serve RETRIEVER`"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rcir.serving.settings import Settings


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: retriever and settings of the server."""
    parser.add_argument("retriever", help="folder, or models:/NAME@ALIAS of MLflow's registry")
    parser.add_argument(
        "--host",
        default=Settings.host,
        help="address to listen on; others than loopback need RCIR_TOKEN",
    )
    parser.add_argument("--port", type=int, default=Settings.port, help="0 takes a free one")
    parser.add_argument(
        "--feedback", type=Path, help="SQLite file that keeps answers and feedback on them"
    )
    parser.add_argument("--pictures", type=Path, help="folder with a picture of each item, by id")
    parser.add_argument(
        "--poll",
        type=float,
        default=Settings.poll,
        help="seconds between looks for a new version; 0: none",
    )
    parser.add_argument(
        "--capacity",
        type=int,
        default=Settings.capacity,
        help="queries that may wait for the model",
    )
    for name, what in (
        ("decode-seconds", "seconds to decode the images of a request"),
        ("header-seconds", "seconds for the headers of a request to arrive"),
        ("body-seconds", "seconds for the body of a request to arrive"),
        ("client-connections", "connections of one address, such as that of a reverse proxy"),
    ):
        default = getattr(Settings, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=type(default), default=default, help=what)
    parser.add_argument(
        "--feedback-days",
        type=float,
        default=Settings.feedback_days,
        help="days after which a monitored query without feedback counts as a miss",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="serve by so many replicas on Ray Serve, on the cluster of RAY_ADDRESS if it is set",
    )
    parser.add_argument("--gpus", type=float, default=0.0, help="of each replica on Ray Serve")


def run(options: Namespace) -> None:
    """Serve until told to stop."""
    from rcir.serving import serve, serve_on_ray

    settings = Settings(
        host=options.host,
        port=options.port,
        token=Settings.token_of_environment(),
        store=options.feedback,
        pictures=options.pictures,
        capacity=options.capacity,
        poll=options.poll,
        feedback_days=options.feedback_days,
        decode_seconds=options.decode_seconds,
        header_seconds=options.header_seconds,
        body_seconds=options.body_seconds,
        client_connections=options.client_connections,
    )
    if options.replicas is None:
        serve(options.retriever, settings)
    else:
        serve_on_ray(options.retriever, settings, tuple(options.replicas), options.gpus)
