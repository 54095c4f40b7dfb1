"""What a sweep leaves behind: the best configuration, a table, figures."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import yaml
from rich.box import SIMPLE
from rich.table import Table

from rcir import figures
from rcir.errors import InvalidData
from rcir.measured import VALIDATION, Measured
from rcir.risk.certified import compare
from rcir.runs import RunFolder, read_run
from tuning.records import BEST_FILE, SWEEP_FILE, Records, Trial
from tuning.watch import console, shown

WIDTH = 120  # at least, where there is no terminal to fit into


def best_run(records: Records) -> RunFolder:
    """The (first) training run of the best trial.

    Raises:
        InvalidData: no trial has finished.
    """
    best = records.ranked()[0] if records.trials else None
    run = read_run(records.folder / best.name) if best and best.state == "finished" else None
    if run is None:
        failed = [trial for trial in records.trials.values() if trial.reason]
        why = f"; {failed[0].name} failed: {failed[0].reason}" if failed else ""
        raise InvalidData(f"no trial of {records.folder} has finished{why}")
    return run


def publish(records: Records) -> None:
    """Write `best.yaml`, and log it with table and figures to MLflow."""
    run = best_run(records)
    text = yaml.safe_dump(_complete(records, run), sort_keys=False)
    note = (
        f"# The best of {len(records.trials)} trials, {run.path.name}, under a name of its own.\n"
    )
    (records.folder / BEST_FILE).write_text(note + text)
    best = records.ranked()[0]
    tracked = records.tracked
    tracked.log_tags({"rcir.best": best.name})
    tracked.log_metrics({f"sweep/{name}": value for name, value in best.metrics.items()})
    for name, svg in draw(records).items():
        tracked.log_figure(svg, name)
    tracked.log_table(rows(records), "trials")
    for file in (BEST_FILE, SWEEP_FILE):
        tracked.log_file(records.folder / file)


def _complete(records: Records, run: RunFolder) -> dict[str, Any]:
    """The configuration of a trial, to be trained anew where and as the sweep was to train."""
    training = records.config["training"]
    where = {name: training[name] for name in ("storage", "num_workers", "use_gpu")}
    data = run.config["data"] | {"root": training["data"]["root"]}
    return run.config | where | {"name": f"{training['name']}-best", "data": data}


def draw(records: Records) -> dict[str, str]:
    """The figures, as SVG."""
    trials = list(records.trials.values())
    finished = np.array([trial.state == "finished" for trial in trials])
    size = np.array([trial.certified_size for trial in trials])
    recall = np.array([trial.metrics.get("recall_at_1", np.nan) for trial in trials])
    ended = np.where(finished, size, np.nan)
    front = figures.pareto_front(np.c_[ended, -recall])
    space = records.config["space"]
    drawn = {
        "parallel_coordinates": figures.parallel_coordinates(
            {name: [trial.values[name] for trial in trials] for name in space},
            size,
            finished,
            log=[name for name, sampler in space.items() if "loguniform" in sampler],
        ),
        "pareto": figures.pareto(ended, recall, front, [trial.number for trial in trials]),
    }
    return {name: figures.to_svg(figure) for name, figure in drawn.items()}


def rows(records: Records) -> dict[str, list[Any]]:
    """The trials as columns, the best first."""
    ranked = records.ranked()
    metrics = dict.fromkeys(name for trial in ranked for name in trial.metrics)
    columns: dict[str, list[Any]] = {
        "trial": [trial.number for trial in ranked],
        "state": [trial.state for trial in ranked],
        "epochs": [trial.epochs for trial in ranked],
    }
    columns |= {name: [trial.metrics.get(name) for trial in ranked] for name in metrics}
    columns |= {
        name: [trial.values.get(name) for trial in ranked] for name in records.config["space"]
    }
    return columns | {"reason": [trial.reason for trial in ranked]}


def print_table(records: Records) -> None:
    """Show the trials, the best first."""
    alpha, delta = records.config["alpha"], records.config["delta"]
    ranked = records.ranked()
    intervals = _intervals(records, ranked)
    names = _short(records.config["space"])
    table = Table("trial", "certified size, 95%", "recall", "epochs", *names.values(), box=SIMPLE)
    for number, column in enumerate(table.columns):
        column.no_wrap, column.overflow = number < 4, "fold"
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    for trial in ranked:
        size = f"{trial.certified_size:.2f}{intervals.get(trial.number, '')}"
        recall = f"{trial.metrics['recall_at_1']:.3f}" if trial.metrics else "-"
        epochs = f"{trial.epochs}" + ("" if trial.state == "finished" else f" {trial.state}")
        values = (shown(trial.values[name]) for name in names)
        size = size if trial.metrics else "-"
        table.add_row(f"{trial.number:03d}", size, recall, epochs, *values)
    console.print(
        f"Mean certified set size at alpha {alpha:g}, delta {delta:g}, of the validation images:"
    )
    console.print(table)
    for trial in ranked:
        if trial.reason:
            console.print(f"{trial.name} failed: {trial.reason}", soft_wrap=True)


def _short(names: Collection[str]) -> dict[str, str]:
    """Dotted names by what is behind the last dot, where that tells them apart."""
    last = [name.rpartition(".")[2] for name in names]
    return {
        name: end if last.count(end) == 1 else name for name, end in zip(names, last, strict=True)
    }


def _intervals(records: Records, ranked: list[Trial]) -> dict[int, str]:
    """Of the trials that finished, those of their first seed."""
    finished = [trial for trial in ranked if trial.state == "finished"]
    found = [Measured.read(records.folder / trial.name / VALIDATION) for trial in finished]
    levels = records.config["alpha"], records.config["delta"]
    sizes, _ = compare([each.parts for each in found], *levels) if found else ([], [])
    return {
        trial.number: f" [{size.low:.2f}, {size.high:.2f}]"
        for trial, size in zip(finished, sizes, strict=True)
    }
