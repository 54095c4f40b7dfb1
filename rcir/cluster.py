"""The Ray cluster that a process works on, and its notes on itself."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup, remove_placement_group

from rcir.errors import InvalidConfig

TOKEN_FILE = ".ray/auth_token"  # which Ray writes for all users of the machine to read
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit`


def join_cluster() -> None:
    """Join the cluster that RAY_ADDRESS names, or start one on this machine for this process alone.

    A process that has joined one stays in it. By itself Ray would join whatever runs on the
    machine, such as what another training started for itself, and end with it.
    """
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "local")
        ray.init(
            address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
        if address == "local":
            with suppress(OSError):  # there is none, or it is another user's
                (Path.home() / TOKEN_FILE).chmod(0o600)


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
