"""Going on from where another run was, as the members of a population do.

Jaderberg et al., "Population Based Training of Neural Networks", 2017. A run that goes on from
another one has the configuration that, trained from its start, would have come to the same.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rcir.config import flatten
from rcir.errors import InvalidConfig, InvalidData
from rcir.files import write_folder, write_json
from rcir.runs.folder import ENCODER_FILE, RunFolder, TrainedOn, read_run
from rcir.runs.results import VALIDATION
from rcir.tracking import TrackedRun
from training import checkpoint
from training.config import TrainingConfig
from training.folder import create_run, differing, folder_of, run_lock
from training.history import METRICS_FILE

ASIDE = ".fork"


def snapshot(run: Path, target: Path) -> None:
    """Copy what another run needs to go on from a run's last checkpoint, as hard links if possible.

    Args:
        run: folder of a run that nobody trains meanwhile; its callback may call this.
        target: a folder that is made, or replaced.

    Raises:
        InvalidData: the run has no checkpoint yet, or none of its own, as an ensemble.
    """
    found, last = _with_checkpoint(run)
    kept = {checkpoint.checkpoint_folder(run, last)}
    kept.add(checkpoint.checkpoint_folder(run, checkpoint.best_epoch(run)))
    metrics = json.loads((run / METRICS_FILE).read_text())
    trained = TrainedOn.read(run)

    def fill(folder: Path) -> None:
        replace(found, path=folder, finished=False).write()
        trained.write(folder)
        known = {epoch: values for epoch, values in metrics.items() if int(epoch) <= last}
        write_json(folder / METRICS_FILE, known)
        for each in kept:
            shutil.copytree(each, folder / each.relative_to(run), copy_function=_linked)

    write_folder(target, fill)


def fork_run(source: Path, config: TrainingConfig, parent: TrackedRun | None = None) -> None:
    """Let the run of a configuration go on from the last checkpoint of another run.

    The folder of `config` may hold a run, which keeps its MLflow run and other files; what it had
    trained is replaced. `train(config)` then continues. Interrupted, this leaves a run of the old
    configuration or of the new one, which `train` continues, or begins anew to the same weights.

    Args:
        source: a `snapshot`, or the folder of a run that nobody trains meanwhile.
        config: of the run that goes on; up to the last epoch of `source` the options in force are
            those of `source`, so that what is new is in `config.changes`.
        parent: the MLflow run that a new run is part of.

    Raises:
        InvalidConfig: `source` was trained with other options, or another process trains in the
            folder of `config`.
        InvalidData: `source` has no checkpoint.
    """
    plain = _continued(source, config)
    folder = folder_of(config)
    with run_lock(folder):
        aside = folder / ASIDE
        shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
        try:
            snapshot(source, aside / "new")
            run, trained = read_run(folder), TrainedOn.read(source)
            if run is None:
                run = create_run(config, parent, trained)
            else:
                TrainedOn.read(folder).joined(trained).write(folder)
                _cleared(run, aside / "old")
            replace(run, config=plain, finished=False).write()
            (aside / "new" / METRICS_FILE).replace(folder / METRICS_FILE)
            (aside / "new" / "checkpoints").rename(folder / "checkpoints")
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _cleared(run: RunFolder, old: Path) -> None:
    """Take away what a run has trained; whenever this ends, it is a run that can be continued."""
    replace(run, finished=False).write()
    for name in (ENCODER_FILE, VALIDATION):
        (run.path / name).unlink(missing_ok=True)
    if (run.path / "checkpoints").is_dir():
        (run.path / "checkpoints").rename(old)
    (run.path / METRICS_FILE).unlink(missing_ok=True)


def _with_checkpoint(run: Path) -> tuple[RunFolder, int]:
    """A run and the epoch of its last checkpoint."""
    found, last = read_run(run), checkpoint.last_epoch(run)
    if found is None or not last:
        raise InvalidData(
            f"{run} holds no checkpoint to go on from: give the folder of a run of at least one "
            "epoch, which is not an ensemble"
        )
    return found, last


def _continued(source: Path, config: TrainingConfig) -> dict[str, Any]:
    """A configuration as plain values, with the micro-batches of the run that it continues."""
    found, last = _with_checkpoint(source)
    old, new = found.config, asdict(config)
    if config.micro_batches is None:
        new["micro_batches"] = old["micro_batches"]
    changing = {change["epoch"] for plain in (old, new) for change in plain["changes"]}
    for epoch in sorted({1, *(epoch for epoch in changing if epoch <= last)}):
        different = differing(_in_force(old, epoch), _in_force(new, epoch))
        if different:
            raise InvalidConfig(
                f"{source} was trained with another {', '.join(different)} in epoch {epoch} than "
                f"{config.name} names: take its options, and let what is new hold from epoch "
                f"{last + 1} on, by changes"
            )
    return new


def _in_force(plain: Mapping[str, Any], epoch: int) -> dict[str, Any]:
    """The options of an epoch by dotted name, without the name of the run."""
    apart = ("name", "changes")
    flat = flatten({name: value for name, value in plain.items() if name not in apart})
    for change in plain["changes"]:
        if change["epoch"] <= epoch:
            flat |= change["options"]
    return flat


def _linked(source: str, target: str) -> str:
    """A file under another name: the same one, or a copy where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
