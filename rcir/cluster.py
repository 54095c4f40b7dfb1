"""The Ray cluster of a process."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from urllib.parse import urlsplit

import ray
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup, remove_placement_group

from rcir.errors import InvalidConfig
from rcir.terminal import working

LOCAL = "local"
_joined = threading.Event()  # set if this module joined, and not its caller
TOKEN_FILE = ".ray/auth_token"  # Ray lets all users of the machine read it
ADDRESS_VARIABLE = "RAY_ADDRESS"
CLIENT, CLIENT_PORT = "ray", 10001  # of Ray's client, ray://host
PROBE_TIMEOUT_S = 3.0
# The head of a cluster speaks HTTP/2 (RFC 9113): the first bytes of a client, and the type of the
# first frame of a server.
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
FRAME_HEADER, SETTINGS_FRAME = 9, 4  # bytes, and the byte at index 3
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit`


def join_cluster() -> None:
    """Join the cluster at RAY_ADDRESS, or start one on this machine for this process alone.

    By default, Ray would join any cluster on the machine, such as that of another training, and end
    with it. `InvalidConfig` if no cluster answers at RAY_ADDRESS.
    """
    if not ray.is_initialized():
        require_cluster()
        address = os.environ.get(ADDRESS_VARIABLE) or LOCAL
        # It warns of its own default.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        if in_submitted_job():  # a second node on this machine would delete the working directory
            os.chdir(gettempdir())
        with working("starting Ray" if address == LOCAL else f"joining Ray at {address}"):
            ray.init(
                address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        _joined.set()
        if address == LOCAL:
            with suppress(OSError):  # it does not exist, or belongs to another user
                (Path.home() / TOKEN_FILE).chmod(0o600)


def leave_cluster() -> None:
    """Leave the cluster that `join_cluster` joined or started: at its exit, Ray says nothing."""
    if ray.is_initialized() and _joined.is_set():
        _joined.clear()
        with working("stopping Ray", logged=True):
            ray.shutdown()


def require_cluster() -> None:
    """Raise `InvalidConfig` within seconds if no cluster answers at RAY_ADDRESS.

    Ray itself would retry for minutes.
    """
    address = os.environ.get(ADDRESS_VARIABLE) or LOCAL
    if address == LOCAL or ray.is_initialized():
        return
    remedy = (
        f"start the cluster (`ray start --head`), set {ADDRESS_VARIABLE} to the address that it "
        f"prints, or unset {ADDRESS_VARIABLE} to use this machine alone"
    )
    try:
        resolved = address
        if address == "auto":  # Ray reads it from a file that a killed cluster leaves behind
            from ray._private.services import canonicalize_bootstrap_address

            resolved = str(canonicalize_bootstrap_address(address))
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
        return  # of an extension of Ray
    if not host or port is None:
        raise InvalidConfig(f"{ADDRESS_VARIABLE} is {address}, not host:port: {remedy}")
    if reason := _why_no_cluster(host, port):
        named = address if address == resolved else f"{address}, which means {resolved}"
        raise InvalidConfig(
            f"{ADDRESS_VARIABLE} is {named}, and no Ray cluster answers there ({reason}): {remedy}"
        )


def _why_no_cluster(host: str, port: int) -> str | None:
    """Return why there is no cluster at an address, or None if there may be one."""
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
    """Return the resources of each live node of the cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def cpus_per_gpu() -> float:
    """Return the smallest number of CPUs per GPU of any node, for reading images."""
    shares = [node.get("CPU", 0) / node["GPU"] for node in alive_nodes() if node.get("GPU")]
    if not shares:
        raise InvalidConfig(
            "use_gpu is true, but Ray's cluster has no GPU: start a node with one, or set "
            "use_gpu=false"
        )
    return min(shares)


def count_groups(workers: int, use_gpu: bool) -> int:
    """Return how many groups of so many workers the CPUs or GPUs of the cluster suffice for."""
    return int(ray.cluster_resources().get("GPU" if use_gpu else "CPU", 0) // workers)


def free(group: str) -> None:
    """Free the resources of a placement group by its id, without Ray's dashboard."""
    remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group)))


def in_submitted_job() -> bool:
    """Return True if `ray job submit` started this process."""
    return JOB_VARIABLE in os.environ


def read_cluster_tags() -> dict[str, str]:
    """Return Ray's name of this job and the number of nodes; nothing outside of a cluster."""
    if not ray.is_initialized():
        return {}
    metadata = json.loads(os.environ.get(JOB_VARIABLE, "{}")).get("metadata") or {}
    job = metadata.get("job_submission_id") or ray.get_runtime_context().get_job_id()
    return {"ray.job": job, "ray.nodes": str(len(alive_nodes()))}
