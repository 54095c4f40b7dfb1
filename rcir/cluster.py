"""The Ray cluster that a process works on, and its notes on itself."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import ray
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup, remove_placement_group

from rcir.errors import InvalidConfig

LOCAL = "local"
TOKEN_FILE = ".ray/auth_token"  # which Ray writes for all users of the machine to read
ADDRESS_VARIABLE = "RAY_ADDRESS"
CLIENT, CLIENT_PORT = "ray", 10001  # of Ray's client, ray://host
PROBE_TIMEOUT_S = 3.0
# The head of a cluster speaks HTTP/2 (RFC 9113): a client's first bytes, and the type of the frame
# that a server answers with.
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
FRAME_HEADER, SETTINGS_FRAME = 9, 4  # bytes, and the byte at index 3
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit`


def join_cluster() -> None:
    """Join the cluster that RAY_ADDRESS names, or start one on this machine for this process alone.

    A process that has joined one stays in it. By itself Ray would join whatever runs on the
    machine, such as what another training started for itself, and end with it.

    Raises:
        InvalidConfig: no cluster answers at RAY_ADDRESS.
    """
    if not ray.is_initialized():
        require_cluster()
        address = os.environ.get(ADDRESS_VARIABLE) or LOCAL
        ray.init(
            address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
        if address == LOCAL:
            with suppress(OSError):  # there is none, or it is another user's
                (Path.home() / TOKEN_FILE).chmod(0o600)


def require_cluster() -> None:
    """Raise `InvalidConfig`, in seconds, if no cluster answers at RAY_ADDRESS.

    Ray itself tries again for minutes. A process that has joined a cluster need not ask.
    """
    address = os.environ.get(ADDRESS_VARIABLE) or LOCAL
    if address == LOCAL or ray.is_initialized():
        return
    remedy = (
        f"start the cluster (`ray start --head`), set {ADDRESS_VARIABLE} to the address that it "
        f"prints, or unset {ADDRESS_VARIABLE} to use this machine alone"
    )
    try:
        resolved = _last_started() if address == "auto" else address
        scheme, _, rest = resolved.rpartition("://")
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port or (CLIENT_PORT if scheme == CLIENT else None)
    except (ValueError, ConnectionError) as error:
        raise InvalidConfig(f"{ADDRESS_VARIABLE} is {address} ({error}): {remedy}") from None
    if scheme in ("http", "https"):
        raise InvalidConfig(
            f"{ADDRESS_VARIABLE} is {address}, where jobs are submitted: a process joins the "
            f"cluster at host:port, with the port of `ray start`; {remedy}"
        )
    if scheme not in ("", CLIENT):
        return  # of a package that extends Ray
    if not host or port is None:
        raise InvalidConfig(f"{ADDRESS_VARIABLE} is {address}, not host:port: {remedy}")
    if reason := _silence(host, port):
        shown = address if address == resolved else f"{address}, which means {resolved}"
        raise InvalidConfig(
            f"{ADDRESS_VARIABLE} is {shown}, and no Ray cluster answers there ({reason}): {remedy}"
        )


def _last_started() -> str:
    """Return the address that Ray takes for "auto"; ConnectionError if there is none.

    It is read from a file, which a cluster that was killed leaves behind.
    """
    from ray._private.services import canonicalize_bootstrap_address

    return str(canonicalize_bootstrap_address("auto"))


def _silence(host: str, port: int) -> str | None:
    """Return why no head of a cluster can be at an address, or None if one may be."""
    try:
        with socket.create_connection((host, port), PROBE_TIMEOUT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return None
            connection.sendall(HTTP2_PREFACE)
            answer = connection.recv(FRAME_HEADER, socket.MSG_WAITALL)
    except OSError as error:
        return str(error)
    is_settings = len(answer) == FRAME_HEADER and answer[3] == SETTINGS_FRAME
    return None if is_settings else "another program listens"


def alive_nodes() -> list[dict[str, float]]:
    """The resources of each node of the cluster that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def cpus_per_gpu() -> float:
    """CPUs for each GPU, to read images, on the node of the cluster that has the fewest.

    Raises:
        InvalidConfig: no node has a GPU.
    """
    shares = [node.get("CPU", 0) / node["GPU"] for node in alive_nodes() if node.get("GPU")]
    if not shares:
        raise InvalidConfig(
            "use_gpu is true, and Ray's cluster has no GPU: start a node with one, or set "
            "use_gpu=false"
        )
    return min(shares)


def free(group: str) -> None:
    """Give back what a placement group holds, by its id.

    Ray would ask its dashboard which ones a process that ended has left, and there need be none.
    """
    remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group)))


def in_submitted_job() -> bool:
    """Return whether this process was started by `ray job submit`."""
    return JOB_VARIABLE in os.environ


def cluster_tags() -> dict[str, str]:
    """Return Ray's name of this job and its number of nodes; nothing outside of a cluster."""
    if not ray.is_initialized():
        return {}
    metadata = json.loads(os.environ.get(JOB_VARIABLE, "{}")).get("metadata") or {}
    job = metadata.get("job_submission_id") or ray.get_runtime_context().get_job_id()
    return {"ray.job": job, "ray.nodes": str(sum(node["Alive"] for node in ray.nodes()))}


@contextmanager
def quiet(*names: str, level: int = logging.WARNING) -> Iterator[None]:
    """Quieten some of Ray's loggers: their notes are for Ray's log, not for the screen."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
