"""The MLflow tracking store and the runs in it; `MetricQueue` logs metrics from a thread.

MLflow itself decides where runs are stored: `MLFLOW_TRACKING_URI`, or `mlflow.db` in the working
directory, which `mlflow ui` shows by default.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from queue import Full, Queue
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from filelock import FileLock

from rcir.errors import TrackingUnavailable, UntrustedFolder
from rcir.files import is_dead, owner, write_file, written_aside
from rcir.imports import naming_extras
from rcir.terminal import console
from rcir.trust import allow_servers, allows_server

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

SQLITE = "sqlite:///"
LOCAL_PAGE = "http://127.0.0.1:5000"  # of `mlflow ui`
LOCK_TIMEOUT = 30.0  # seconds
START_FILE = "start"  # in a folder that does not yet record its run
EXPERIMENT, EXPERIMENT_VARIABLE = "rcir", "MLFLOW_EXPERIMENT_NAME"
# Tags for filtering and grouping runs on MLflow's page.
KIND_TAG, ENCODER_TAG, DATASET_TAG, NOTE_TAG = "kind", "encoder", "dataset", "mlflow.note.content"
OWNER_TAG, START_TAG = "rcir.process", "rcir.start"
PARENT_TAG, SOURCE_TAG = "mlflow.parentRunId", "mlflow.source.name"
METRIC_BATCH_SIZE = 500  # metrics in a call; a server takes no more than 1,000
QUEUE_SIZE = 1000  # steps
RETRY_AFTER_S = 60.0
DRAIN_S = 10.0
STORE_FAILS = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "BAD_REQUEST")
NO_PROGRESS_BAR = {"MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}
# By default, MLflow waits minutes for a server that does not answer.
SHORT_WAITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
# At the end of a run, MLflow prints its address.
WITHOUT_ADDRESS = {"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
# User and password: all before the last @ of the host, or the next @ if the password has a slash.
USER_AND_PASSWORD = re.compile(r"(?<=://)(?:[^\s/?#]*@|[^\s/?#:@\[]*:(?!\d+\b)[^\s@]*@)")
SECRET_PARAMETER = re.compile(
    r"(?<=[?&])((?:password|passwd|pwd|token)=)[^\s&#'\"]*", re.IGNORECASE
)

_allowed_stores: dict[str, str] = {}  # addresses with user and password, by `_store_key`
_settings_lock = threading.Lock()
_settings_users: Counter[str] = Counter()  # number of blocks that need an option, in all threads


def without_credentials(text: str) -> str:
    """Remove user names and passwords from the addresses in a text, to print or store it.

    Example:
        >>> without_credentials("cannot reach http://user:s3cret@example.org:5000/api")
        'cannot reach http://example.org:5000/api'
        >>> without_credentials("postgresql://user@example.org/runs?password=s3cret")
        'postgresql://example.org/runs?password='
    """
    return SECRET_PARAMETER.sub(r"\1", USER_AND_PASSWORD.sub("", text))


def mlflow_package() -> Any:
    """Import MLflow, which is slow, when it is first used."""
    import mlflow

    # Quiet notes on new stores, checked models and monitors; MLflow sets levels on import.
    for name in ("mlflow.store.db.utils", "alembic", "mlflow.pyfunc", "mlflow.system_metrics"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").addFilter(_has_no_traceback)
    for handler in logging.getLogger("mlflow").handlers:  # of all loggers of MLflow
        handler.addFilter(_remove_credentials)
    return mlflow


def _has_no_traceback(record: logging.LogRecord) -> bool:
    """Leave out the exceptions of a store, which MLflow logs before it raises them."""
    return record.exc_info is None


def _remove_credentials(record: logging.LogRecord) -> bool:
    record.msg, record.args = without_credentials(record.getMessage()), ()
    return True


def open_client(uri: str) -> MlflowClient:
    """Return MLflow's client of a store, and of the model registry that belongs to it.

    The first client of an SQLite file creates its tables one by one. Processes that do so wait for
    each other and write the file aside: otherwise they, or one that is killed, would break it.
    """
    with naming_extras():
        connect = mlflow_package().MlflowClient
    file = sqlite_file(uri)
    with ExitStack() as alone:
        if file and file.parent.is_dir():
            lock = FileLock(file.with_name(f".{file.name}.lock"), timeout=LOCK_TIMEOUT, mode=0o666)
            with suppress(OSError):  # continue without a lock if there can be none, or not in time
                alone.enter_context(lock)
            if not os.access(*((file, os.R_OK) if file.exists() else (file.parent, os.W_OK))):
                # MLflow would try again for minutes.
                raise TrackingUnavailable(
                    f"the tracking store {file} cannot be read or created: change the permissions, "
                    "or set MLFLOW_TRACKING_URI to another"
                )
            if lock.is_locked and not file.exists():
                with written_aside(file) as aside:
                    connect(tracking_uri=f"{SQLITE}{aside}")
        client: MlflowClient = connect(tracking_uri=uri)
    return client


def is_chosen() -> bool:
    """Return True if the environment or the program has set a tracking store."""
    if "mlflow" not in sys.modules and not os.environ.get("MLFLOW_TRACKING_URI"):
        return False  # the program cannot have set one
    with naming_extras():
        return bool(mlflow_package().is_tracking_uri_set())


def store_uri() -> str:
    """Return the configured tracking store, with the absolute path of an SQLite file."""
    uri: str = mlflow_package().get_tracking_uri()
    file = sqlite_file(uri)
    return f"sqlite:///{file.absolute()}" if file else uri


def require_store(uri: str) -> str:
    """Return the address of a store that a folder names, with user and password, if it is allowed.

    These are of the configured store or of `allow_store`. A store has to be allowed, by its host or
    URI, because it receives MLflow's credentials or, as a file, decides where artifacts are sent.
    """
    configured = store_uri()
    if _store_key(uri) == _store_key(configured):
        return uri if without_credentials(configured) == configured else configured
    host = _parse_host(uri)
    if not allows_server(host):
        raise UntrustedFolder(
            f"the run is in the tracking store {without_credentials(uri)}, which is not the "
            "configured one: it, or a server that it names for artifacts, would receive your files "
            "and credentials. If you trust it, set MLFLOW_TRACKING_URI to it, or pass "
            f"--trust-server {host}"
        )
    return _allowed_stores.get(_store_key(uri), uri)


def allow_store(uri: str) -> None:
    """Allow a store that the program itself names, for as long as this process runs."""
    allow_servers([_parse_host(uri)])
    _allowed_stores[_store_key(uri)] = uri


def _store_key(uri: str) -> str:
    """Return a key that all addresses of a store share."""
    return without_credentials(uri).rstrip("/")


def _parse_host(uri: str) -> str:
    """Return the host of a store, or its URI if it has none."""
    return urlsplit(uri).hostname or without_credentials(uri)


def sqlite_file(uri: str) -> Path | None:
    """Return the file of an SQLite store; None for any other."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) else None


@contextmanager
def settings(values: Mapping[str, str]) -> Iterator[None]:
    """Set options in the environment inside the block, unless the user has set them."""
    with _settings_lock:
        added = [name for name in values if name not in os.environ or _settings_users[name]]
        os.environ.update({name: values[name] for name in added})
        _settings_users.update(added)
    try:
        yield
    finally:
        with _settings_lock:
            _settings_users.subtract(added)
            for name in added:
                if not _settings_users[name]:
                    os.environ.pop(name, None)


@contextmanager
def reachable(uri: str, run_id: str | None = None, missing_ok: bool = False) -> Iterator[None]:
    """Raise `TrackingUnavailable`, within half a minute, for a store that MLflow cannot use.

    Neither the message nor MLflow's output contains user and password. With `missing_ok`,
    a missing entry ends the block without an error.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError  # of tables that cannot be made

    shown = without_credentials(uri)
    try:
        with settings(SHORT_WAITS if shown == uri else SHORT_WAITS | WITHOUT_ADDRESS):
            yield
    except (MlflowException, SQLAlchemyError) as error:
        code = getattr(error, "error_code", None)
        # Some stores reject an id of the wrong form as an invalid value.
        if missing_ok and code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return
        reason = without_credentials(str(error).strip().partition("\n")[0])
        store_answers = code not in (None, *STORE_FAILS)
        if run_id is not None and store_answers:  # it may have been deleted
            with suppress(MlflowException, SQLAlchemyError), settings(SHORT_WAITS):
                _require_active(open_client(uri), run_id, uri)
        if code in ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED"):
            remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to an account of it"
        elif code == "RESOURCE_DOES_NOT_EXIST":
            remedy = "start a new run or experiment if this one was deleted permanently"
        elif store_answers:
            remedy = "correct what the store reports"
        elif sqlite_file(uri):
            remedy = "make room there, check its permissions"
        else:
            remedy = "start its server"
        raise TrackingUnavailable(
            f"MLflow cannot use the tracking store {shown} ({reason}): {remedy}, or set "
            "MLFLOW_TRACKING_URI to another, for instance sqlite:///mlflow.db"
        ) from (error if shown == uri else None)  # a traceback would show the address


def _require_active(client: MlflowClient, run_id: str, uri: str) -> None:
    """Raise `TrackingUnavailable` if a run or its experiment is deleted, and can be restored."""
    info = client.get_run(run_id).info
    experiment = client.get_experiment(info.experiment_id)
    if experiment.lifecycle_stage == "deleted":
        raise _deleted_experiment(experiment, uri)
    if info.lifecycle_stage == "deleted":
        raise TrackingUnavailable(
            f"the run {run_id} in the tracking store {without_credentials(uri)} is deleted: "
            f"restore it with `mlflow runs restore --run-id {run_id}`"
        )


def _deleted_experiment(experiment: Experiment, uri: str) -> TrackingUnavailable:
    number = experiment.experiment_id
    return TrackingUnavailable(
        f"the experiment {experiment.name!r} in the tracking store {without_credentials(uri)} is "
        f"deleted: restore it with `mlflow experiments restore --experiment-id {number}`, or set "
        f"{EXPERIMENT_VARIABLE} to another one for new runs"
    )


class TrackedRun:
    """An MLflow run in a tracking store, which this process or its workers write to by its id."""

    def __init__(self, run_id: str, uri: str) -> None:
        self.id = run_id
        self.uri = uri

    @cached_property
    def _client(self) -> MlflowClient:
        return open_client(self.uri)

    def __reduce__(self) -> tuple[type[TrackedRun], tuple[str, str]]:
        return TrackedRun, (self.id, self.uri)  # for processes of a cluster

    @contextmanager
    def client(self) -> Iterator[MlflowClient]:
        """Use MLflow's client of the store; `TrackingUnavailable` as `reachable` raises it."""
        with reachable(self.uri, self.id):
            yield self._client

    def _read(self) -> Run:
        with self.client() as client:
            return client.get_run(self.id)

    @property
    def params(self) -> dict[str, str]:
        """The logged parameters."""
        return dict(self._read().data.params)

    @property
    def status(self) -> str:
        """The state in MLflow: "RUNNING", or how it ended."""
        return str(self._read().info.status)

    @property
    def experiment(self) -> str:
        """The id of its experiment."""
        return str(self._read().info.experiment_id)

    def tag(self, name: str) -> str | None:
        """Return a tag, or None."""
        value: str | None = self._read().data.tags.get(name)
        return value

    def require_active(self) -> None:
        """Raise `TrackingUnavailable` if the run cannot be written to, or is deleted."""
        with self.client() as client:
            _require_active(client, self.id, self.uri)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters once; those logged before keep their first value."""
        from mlflow.entities import Param

        with self.client() as client:
            logged = client.get_run(self.id).data.params
            new = [Param(name, str(value)) for name, value in params.items() if name not in logged]
            if new:
                client.log_batch(self.id, params=new)

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        from mlflow.entities import RunTag

        with self.client() as client:
            client.log_batch(self.id, tags=[RunTag(*item) for item in tags.items()])

    def log_metrics(
        self, metrics: Mapping[str, float], step: int = 0, at: float | None = None
    ) -> None:
        """Log metrics of one step, measured at a time (seconds since 1970), by default now.

        Metrics that are logged again with the same values and time are not stored twice.
        """
        at = time.time() if at is None else at
        self.log_points((name, step, value, at) for name, value in metrics.items())

    def log_points(
        self, points: Iterable[tuple[str, int, float, float]], of: Sequence[str] = ()
    ) -> None:
        """Log values of metrics: name, step, value and time (see `log_metrics`).

        They are also those `of` a logged model, by its id, on a data set, by its name and digest.
        """
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), int(1000 * at), step, *of)
            for name, step, value, at in points
        ]
        with self.client() as client:
            for start in range(0, len(metrics), METRIC_BATCH_SIZE):
                client.log_batch(self.id, metrics=metrics[start : start + METRIC_BATCH_SIZE])

    def steps(self, metric: str) -> set[int]:
        """Return the logged steps of a metric."""
        with self.client() as client:
            return {point.step for point in client.get_metric_history(self.id, metric)}

    def log_dataset(self, name: str, digest: str, context: str, source: Mapping[str, Any]) -> None:
        """Log a data set as an input; `context` is its use, such as "training".

        The digest has at most 36 characters; the source is plain values.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag
        from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

        dataset = Dataset(name, digest, source_type="rcir", source=json.dumps(source))
        inputs = [DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, context)])]
        with self.client() as client:
            client.log_inputs(self.id, inputs)

    def log_table(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """Log a table as the artifact `tables/NAME.json`, which MLflow's page shows."""
        import pandas as pd

        # With columns of the type for strings, MLflow makes pandas warn.
        table = pd.DataFrame(list(rows), dtype=object)
        with self.client() as client, settings(NO_PROGRESS_BAR):
            client.log_table(self.id, table, f"tables/{name}.json")

    def log_figure(self, svg: str, name: str) -> None:
        """Log a figure as `figures/NAME.svg`."""
        with self.client() as client:
            client.log_text(self.id, svg, f"figures/{name}.svg")

    def log_folder(self, folder: Path, name: str) -> None:
        """Log the files of a folder as the artifact folder `name`."""
        with self.client() as client:
            client.log_artifacts(self.id, str(folder), name)

    def log_file(self, path: Path) -> None:
        """Log a file as an artifact."""
        with self.client() as client:
            client.log_artifact(self.id, str(path))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Mark the run as running inside the block, as finished, failed or killed after it.

        The status is kept if another process ended the run, which made the block fail.
        """
        with self.client() as client:
            client.set_tag(self.id, OWNER_TAG, owner())
            client.update_run(self.id, status="RUNNING")
        try:
            with self._system_metrics():
                yield
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
            with suppress(TrackingUnavailable):  # `error` matters more
                if self.status == "RUNNING":
                    self.end("KILLED" if interrupted else "FAILED")
            raise
        self.end("FINISHED")

    @contextmanager
    def _system_metrics(self) -> Iterator[None]:
        """Log the load of this machine inside the block if MLflow's option for it is set."""
        from mlflow import environment_variables

        enabled: Any = environment_variables.MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING
        if not enabled.get():
            yield
            return
        from mlflow.system_metrics import system_metrics_monitor

        kind: Any = system_metrics_monitor.SystemMetricsMonitor
        with settings(SHORT_WAITS):
            monitor = kind(self.id, resume_logging=True, tracking_uri=self.uri)
            monitor.start()
            try:
                yield
            finally:
                monitor.finish()

    def end(self, status: str) -> None:
        """Mark the run as ended: "FINISHED", "FAILED" or "KILLED"."""
        with self.client() as client:
            client.set_terminated(self.id, status)


def start_run(
    name: str,
    tags: Mapping[str, str],
    parent: TrackedRun | None = None,
    start: str | None = None,
) -> TrackedRun:
    """Create a run in the experiment of its parent, or in MLFLOW_EXPERIMENT_NAME ("rcir").

    `tags` are added to those that MLflow sets (user, source, git revision). If a run has the token
    `start` of this start already, that run is returned.
    """
    from mlflow.tracking.context.registry import resolve_tags
    from mlflow.utils.git_utils import get_git_commit
    from mlflow.utils.mlflow_tags import MLFLOW_GIT_COMMIT

    uri = parent.uri if parent else store_uri()
    revision = get_git_commit(str(Path(__file__).parent))
    all_tags = {MLFLOW_GIT_COMMIT: revision} if revision else {}
    all_tags |= resolve_tags() | dict(tags)
    if parent:  # the source would be a process of Ray
        all_tags |= {PARENT_TAG: parent.id, SOURCE_TAG: parent.tag(SOURCE_TAG) or ""}
    with reachable(uri):
        client = open_client(uri)
        experiment_id = _experiment(client, uri, parent)
        _close_abandoned(client, experiment_id)
        all_tags[OWNER_TAG] = owner()
        if start is not None:
            all_tags[START_TAG] = start
            started = client.search_runs([experiment_id], f"tags.`{START_TAG}` = '{start}'")
            if started:
                return TrackedRun(started[0].info.run_id, uri)
        run = client.create_run(experiment_id, run_name=name, tags=all_tags)
    return TrackedRun(run.info.run_id, uri)


@contextmanager
def started_once(
    folder: Path, name: str, tags: Mapping[str, str], parent: TrackedRun | None = None
) -> Iterator[TrackedRun]:
    """Start a run that the block records in a folder.

    If this process is killed before, the next one finds the run by a token in the folder.
    """
    token = folder / START_FILE
    if not token.is_file():
        write_file(token, secrets.token_hex(16).encode())
    yield start_run(name, tags, parent, token.read_text())
    token.unlink()


def require_experiment() -> None:
    """Raise `TrackingUnavailable` if no run can be started in the configured store."""
    uri = store_uri()
    with reachable(uri):
        _experiment(open_client(uri), uri)


def _experiment(client: MlflowClient, uri: str, parent: TrackedRun | None = None) -> str:
    """Return the id of the experiment of new runs; create it if it does not exist."""
    from mlflow.exceptions import MlflowException

    name = os.environ.get(EXPERIMENT_VARIABLE) or EXPERIMENT
    if parent:
        experiment: Experiment | None = client.get_experiment(parent.experiment)
    else:
        experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name)
        except MlflowException:  # another process may have created it
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        raise _deleted_experiment(experiment, uri)
    return experiment.experiment_id


def _close_abandoned(client: MlflowClient, experiment_id: str) -> None:
    """Mark runs as killed whose process on this host has ended."""
    for run in client.search_runs([experiment_id], "attributes.status = 'RUNNING'"):
        process = run.data.tags.get(OWNER_TAG)
        if process is not None and is_dead(process):
            client.set_terminated(run.info.run_id, "KILLED")


def find_tracked_run(run_id: str) -> TrackedRun | None:
    """Return the run with an id in the configured tracking store, or None."""
    uri = store_uri()
    with reachable(uri, missing_ok=True):
        open_client(uri).get_run(run_id)
        return TrackedRun(run_id, uri)
    return None


def table_link(runs: Sequence[TrackedRun], metric: str) -> str | None:
    """Return the address of MLflow's table of runs, ascending by a metric; None for two stores.

    For a file, it is that of `mlflow ui` on this machine.
    """
    uri = runs[0].uri if runs else ""
    if not runs or any(run.uri != uri for run in runs):
        return None
    ids = ", ".join(f"'{run.id}'" for run in runs)
    query = {
        "workflowType": "machine_learning",
        "searchFilter": f"attributes.run_id IN ({ids})",
        "orderByKey": f"metrics.`{metric}`",
        "orderByAsc": "true",
    }
    server = _store_key(uri) if uri.startswith("http") else LOCAL_PAGE
    return f"{server}/#/experiments/{runs[0].experiment}/runs?{urlencode(query)}"


class MetricQueue:
    """Logs the metrics of steps to a run from a thread, in order and each step once.

    After a failure, the thread waits for `RETRY_AFTER_S` seconds. Steps that are not logged when
    the queue is closed, or that find it full, are dropped: the caller has to log them later.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._steps: Queue[tuple[str, int, Mapping[str, float], float] | None] = Queue(QUEUE_SIZE)
        self._closed = threading.Event()
        self._failing = threading.Event()
        self._dropped = threading.Event()
        self._thread: threading.Thread | None = None
        self._settings = ExitStack()

    def put(self, marker: str, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Add the metrics of a step, see `TrackedRun.log_metrics`, without waiting.

        `marker` is one of them; if the run has it at this step already, nothing is logged.
        """
        if self._thread is None:
            # Set in this thread: others may read the environment while it changes.
            self._settings.enter_context(settings(SHORT_WAITS))
            self._thread = threading.Thread(target=self._log, name="rcir-metrics", daemon=True)
            self._thread.start()
        with suppress(Full):
            self._steps.put_nowait((marker, step, metrics, at))

    def close(self) -> None:
        """Log the rest, for at most `DRAIN_S` seconds; do not wait for a store that fails."""
        self._closed.set()
        with suppress(Full):
            self._steps.put_nowait(None)
        if self._thread is not None and not self._failing.is_set():
            self._thread.join(DRAIN_S)
        self._dropped.set()
        self._settings.close()

    def _log(self) -> None:
        logged: dict[str, set[int]] = {}
        while (item := self._steps.get()) is not None:
            marker, step, metrics, at = item
            while True:
                if self._dropped.is_set():
                    return
                try:
                    if marker not in logged:
                        logged[marker] = self._run.steps(marker)
                    # If an answer was lost, MLflow recognises the values by their time.
                    if step not in logged[marker]:
                        self._run.log_metrics(metrics, step, at)
                        logged[marker].add(step)
                except TrackingUnavailable as error:
                    if not (self._failing.is_set() or self._dropped.is_set()):
                        note = f"metrics from step {step} of {marker} on will be logged later"
                        console.print(f"{note}: {error}", soft_wrap=True)
                    self._failing.set()
                    if self._closed.wait(RETRY_AFTER_S):
                        return
                else:
                    self._failing.clear()
                    break
