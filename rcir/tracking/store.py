"""The tracking store: which one it is, and MLflow as it is asked.

Where runs go is MLflow's own setting: `MLFLOW_TRACKING_URI`, or else `mlflow.db` in the working
directory, which `mlflow ui` shows without being told.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from rcir.errors import TrackingUnavailable
from rcir.extras import naming_extras

if TYPE_CHECKING:
    from mlflow import MlflowClient

SQLITE = "sqlite:///"
LOCK_TIMEOUT = 30.0  # seconds
# By itself, MLflow waits minutes for a server that is away or does not answer.
IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


def mlflow_package() -> Any:
    """MLflow, imported when first used: it is slow to import, and not every worker logs."""
    import mlflow

    # A new SQLite store says how it was made, at whichever call comes first, and a model how it is
    # checked. MLflow sets the levels of its loggers when it is imported: these are set after it.
    for name in ("mlflow.store.db.utils", "alembic", "mlflow.pyfunc"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return mlflow


def client_of(uri: str) -> MlflowClient:
    """MLflow's client of a store, and of the model registry that belongs to it.

    The first client of an SQLite file makes its tables, one by one. Two processes that did so at
    once would leave a broken store: they wait for each other, half a minute at most.
    """
    with naming_extras():
        connect = mlflow_package().MlflowClient
    file = sqlite_file(uri)
    with ExitStack() as alone:
        if file and file.parent.is_dir():
            lock = FileLock(file.with_name(f".{file.name}.lock"), timeout=LOCK_TIMEOUT, mode=0o666)
            # Where none can be had, in time or at all, it goes without.
            with suppress(OSError):
                alone.enter_context(lock)
        client: MlflowClient = connect(tracking_uri=uri)
    return client


def is_chosen() -> bool:
    """Whether a tracking store was named, by the environment or in code.

    Raises:
        MissingPackage: one was, and MLflow is not installed.
    """
    if "mlflow" not in sys.modules and not os.environ.get("MLFLOW_TRACKING_URI"):
        return False  # no code can have named one
    with naming_extras():
        mlflow_package()
    return bool(mlflow_package().is_tracking_uri_set())


def store_uri() -> str:
    """The configured tracking store; a relative SQLite file is found from other folders too."""
    uri: str = mlflow_package().get_tracking_uri()
    file = sqlite_file(uri)
    return f"sqlite:///{file.absolute()}" if file else uri


def sqlite_file(uri: str) -> Path | None:
    """The file of a store in SQLite; None of any other."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) else None


@contextmanager
def settings(values: Mapping[str, str]) -> Iterator[None]:
    """Set options of MLflow in the environment, other than those that are set there already."""
    own = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)


@contextmanager
def reachable(uri: str) -> Iterator[None]:
    """Raise `TrackingUnavailable`, in half a minute, for a store that MLflow cannot use."""
    from mlflow.exceptions import MlflowException

    try:
        with settings(IMPATIENT):
            yield
    except MlflowException as error:
        reason = str(error).strip().partition("\n")[0]
        raise TrackingUnavailable(
            f"MLflow cannot use the tracking store {uri} ({reason}): start its server, or set "
            "MLFLOW_TRACKING_URI to another, for instance sqlite:///mlflow.db"
        ) from error
