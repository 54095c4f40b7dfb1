"""The report of a sweep: the best configuration, a table, figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import yaml

from rcir import figures
from rcir.errors import InvalidData
from rcir.files import write_file
from rcir.levels import ALPHAS
from rcir.printable import printable
from rcir.runs.compare import compare_runs, print_comparison
from rcir.runs.folder import RunFolder, read_run
from tuning.records import BEST_FILE, SWEEP_FILE, TABLE_FILE, Records
from tuning.watch import console


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


def publish_sweep(records: Records) -> None:
    """Write `best.yaml`, and log it with table and figures to MLflow."""
    run = best_run(records)
    text = yaml.safe_dump(_complete(records, run), sort_keys=False)
    note = (
        f"# The best of {len(records.trials)} trials, {run.path.name}, under a name of its own.\n"
    )
    write_file(records.folder / BEST_FILE, (note + text).encode())
    best = records.ranked()[0]
    tracked = records.tracked
    tracked.log_tags({"rcir.best": best.name})
    tracked.log_metrics({f"sweep/{name}": value for name, value in best.metrics.items()})
    for name, svg in sweep_figures(records).items():
        tracked.log_figure(svg, name)
    write_file(records.folder / TABLE_FILE, table_of(records).to_csv(index=False).encode())
    for file in (BEST_FILE, TABLE_FILE, SWEEP_FILE):
        tracked.log_file(records.folder / file)


def _complete(records: Records, run: RunFolder) -> dict[str, Any]:
    """The configuration of a trial, to be trained anew where and as the sweep was to train."""
    training = records.config["training"]
    where = {name: training[name] for name in ("storage", "num_workers", "use_gpu")}
    data = run.config["data"] | {"root": training["data"]["root"]}
    return run.config | where | {"name": f"{training['name']}-best", "data": data}


def sweep_figures(records: Records) -> dict[str, str]:
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


def table_of(records: Records) -> pd.DataFrame:
    """The trials, the best first: metrics at sweep's end, options, why they failed."""
    ranked = records.ranked()
    about = [
        {"trial": trial.name, "state": trial.state, "epochs": trial.epochs} for trial in ranked
    ]
    rest = [trial.metrics | trial.values | {"reason": trial.reason} for trial in ranked]
    return pd.DataFrame([first | more for first, more in zip(about, rest, strict=True)])


def print_sweep(records: Records) -> None:
    """Show the trials, the best first, as `rcir compare` does, and why any failed."""
    alpha, delta = records.config["alpha"], records.config["delta"]
    if any(trial.state == "finished" for trial in records.trials.values()):
        levels = sorted({alpha, *ALPHAS})
        print_comparison(compare_runs([str(records.folder)], levels, delta))
    for trial in records.ranked():
        if trial.reason:
            again = "" if trial.final else " (the same command tries it again)"
            console.print(f"{trial.name} failed: {printable(trial.reason)}{again}", soft_wrap=True)
