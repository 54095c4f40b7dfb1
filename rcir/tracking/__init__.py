"""The one place that knows MLflow: the store, runs in it, models with their registry."""

from rcir.tracking.models import (
    INSIDE,
    INSIDE_RUN,
    ModelParts,
    RegisteredVersion,
    create_version,
    find_model,
    find_version,
    log_model,
    log_retriever,
    read_file,
    set_alias,
    with_downloaded,
)
from rcir.tracking.queue import MetricQueue
from rcir.tracking.runs import TrackedRun, find_tracked_run, is_chosen, run_tag, start_run

__all__ = [
    "INSIDE",
    "INSIDE_RUN",
    "MetricQueue",
    "ModelParts",
    "RegisteredVersion",
    "TrackedRun",
    "create_version",
    "find_model",
    "find_tracked_run",
    "find_version",
    "is_chosen",
    "log_model",
    "log_retriever",
    "read_file",
    "run_tag",
    "set_alias",
    "start_run",
    "with_downloaded",
]
