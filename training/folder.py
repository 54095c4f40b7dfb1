"""The folder of a run, as training finds, begins and locks it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rcir import tracking
from rcir.config import flatten
from rcir.errors import InvalidConfig
from rcir.files import write_file
from rcir.runs.folder import FOLDER_TAG, RESOURCES, RunFolder, TrainedOn, read_run
from training.config import TrainingConfig

LOCK, START = "lock", "start"


def folder_of(config: TrainingConfig) -> Path:
    """Where a run lies, absolute."""
    return Path(config.storage).absolute() / config.name


def existing_run(config: TrainingConfig) -> RunFolder | None:
    """The run that the folder holds, if any; `InvalidConfig` if it is of another configuration."""
    folder = folder_of(config)
    found = read_run(folder)
    if found is None:
        return None
    old, new = flatten(found.config), flatten(asdict(config))
    if config.micro_batches is None:  # it keeps those that it was begun with
        new["micro_batches"] = old.get("micro_batches")
    changed = differing(old, new)
    if changed:
        raise InvalidConfig(
            f"{folder} holds a run with another {', '.join(changed)}: choose another name, or "
            "remove that folder"
        )
    return found


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Names of the options, resources apart, that differ between two flat configurations."""
    return sorted(
        name
        for name in old.keys() | new.keys()
        if name not in RESOURCES and as_json(old.get(name)) != as_json(new.get(name))
    )


def create_run(
    config: TrainingConfig, parent: tracking.TrackedRun | None, trained: TrainedOn
) -> RunFolder:
    """A new run, in its folder and in MLflow; `trained` is what it will have been trained on."""
    folder, plain = folder_of(config), asdict(replace(config, micro_batches=config.n_micro_batches))
    trained.write(folder)  # first: a run without it is taken for one of an earlier version
    with started_once(folder, config.name, {FOLDER_TAG: str(folder)}, parent) as tracked:
        run = RunFolder(folder, plain, tracked.id, tracked.uri)
        run.write()
    return run


@contextmanager
def started_once(
    folder: Path,
    name: str,
    tags: Mapping[str, str],
    parent: tracking.TrackedRun | None = None,
) -> Iterator[tracking.TrackedRun]:
    """A new MLflow run, to be noted in a folder inside the block.

    Killed before it is noted, the next start finds it in MLflow by what lies in the folder.
    """
    start = folder / START
    if not start.is_file():
        write_file(start, secrets.token_hex(16).encode())
    yield tracking.start_run(name, dict(tags), parent, start.read_text())
    start.unlink()


@contextmanager
def run_lock(folder: Path, patience: float = 0) -> Iterator[None]:
    """Keep other processes from training in a folder; the lock ends with the process.

    Args:
        folder: made if it is not there.
        patience: seconds to wait for another process.

    Raises:
        InvalidConfig: another process trains in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / LOCK, timeout=patience):
            yield
    except Timeout as error:
        raise InvalidConfig(
            f"{folder} is being trained by another process: wait for it or stop it, or choose "
            "another name"
        ) from error


def as_json(value: Any) -> Any:
    """A value as it is after a round trip through JSON."""
    return json.loads(json.dumps(value))
