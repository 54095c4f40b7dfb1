"""A sweep from its start, or from where it was interrupted, to its end, on Ray Tune."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import ray
import yaml
from ray import tune
from ray.exceptions import RayError
from ray.tune.schedulers import ASHAScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from rcir.cluster import alive_nodes, count_groups, cpus_per_gpu, join_cluster
from rcir.config import flatten
from rcir.data import data_root, load_splits
from rcir.encoders.base import stored_encoder
from rcir.errors import InvalidConfig, InvalidData, RcirError
from rcir.files import write_file
from rcir.risk import required_calibration
from rcir.runs.folder import (
    FOLDER_TAG,
    RESOURCES,
    SWEEP_FILE,
    as_json,
    lock_run,
    read_run,
    require_same_options,
)
from rcir.terminal import console, working
from rcir.tracking import DATASET_TAG, KIND_TAG, started_once
from rcir.tracking.runs import settings
from training.checks import check_encoder, check_images, check_places, find_rejects
from training.validation import assign_fold_roles
from tuning.config import TuningConfig, Values, build_domains, draw, list_variations, with_values
from tuning.records import TABLE_FILE, Records, Trial, read_records
from tuning.trial import (
    OBJECTIVE,
    Plan,
    average_metrics,
    describe_failure,
    run_trial,
    select_metrics,
    train_seed,
)
from tuning.watch import TrialWatch

# Options that may change when a sweep continues.
CHANGEABLE = ("gpus_per_trial", "calibrate", *(f"training.{name}" for name in RESOURCES))
# Ray Tune neither prints nor handles Ctrl-C.
QUIET_TUNE = {"RAY_AIR_NEW_OUTPUT": "0", "TUNE_DISABLE_SIGINT_HANDLER": "1"}


class RecordedOptunaSearch(OptunaSearch):
    """Optuna's search, whose suggestions are numbered and recorded."""

    def __init__(self, record: Callable[[int, Values], None], space: Any, **options: Any) -> None:
        super().__init__(space, **options)
        self._record = record
        self._suggested = 0

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: a sweep continues from its own records."""
        Path(checkpoint_path).touch()

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        values = super().suggest(trial_id)
        if values is None:
            return None
        number, self._suggested = self._suggested, self._suggested + 1
        self._record(number, values)
        return {"drawn": {"number": number, **values}}


def build_search(
    config: TuningConfig, earlier: Sequence[Values], record: Callable[[int, Values], None]
) -> Searcher | None:
    """Return the searcher; None if all trials are drawn beforehand.

    It suggests `earlier` values first; `record` gets number and values of each suggestion.
    """
    if config.search == "random":
        return None
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # A sweep that continues must not repeat its first draws.
    seed = np.random.SeedSequence([config.seed, len(earlier)]).generate_state(1)
    return RecordedOptunaSearch(
        record,
        OptunaSearch.convert_search_space(build_domains(config.training, config.space)),
        metric=OBJECTIVE,
        mode="min",
        sampler=optuna.samplers.TPESampler(
            seed=int(seed[0]), n_startup_trials=max(2, min(10, config.trials // 3))
        ),
        points_to_evaluate=[dict(values) for values in earlier] or None,
    )


def build_scheduler(config: TuningConfig) -> TrialScheduler | None:
    """Return the scheduler of trials: ASHA, or None."""
    if config.scheduler == "none":
        return None
    return ASHAScheduler(
        time_attr="epoch",
        metric=OBJECTIVE,
        mode="min",
        max_t=config.training.epochs * config.seeds + 1,  # the last epoch ends by itself
        grace_period=config.interval,
        reduction_factor=config.reduction,
    )


def find_resources(config: TuningConfig) -> dict[str, float]:
    """Return the resources of a trial; a byte of memory if workers hold its CPUs and GPUs."""
    training = config.training
    if training.most_workers:
        return {"memory": 1}
    threads = training.threads or 1
    if not training.use_gpu:
        return {"CPU": threads}
    share = int(cpus_per_gpu() * config.gpus_per_trial)
    return {"CPU": max(threads, share), "GPU": config.gpus_per_trial}


def count_parallel_trials(config: TuningConfig) -> int:
    """Return the number of trials for which the cluster has room; `InvalidConfig` if none."""
    training = config.training
    kind = "GPU" if training.use_gpu else "CPU"
    if training.most_workers:  # they may lie on several nodes
        needed: dict[str, float] = {kind: training.most_workers}
        count = count_groups(training.most_workers, training.use_gpu)
    else:
        needed = find_resources(config)
        count = sum(_room_on(node, needed) for node in alive_nodes())
    if not count:
        demand = " and ".join(f"{number:g} {name}s" for name, number in needed.items())
        total = ray.cluster_resources()
        available = ", ".join(f"{total.get(name, 0):g} {name}s" for name in needed)
        raise InvalidConfig(
            f"a trial needs {demand}, and Ray's cluster has {available}: reduce num_workers or "
            "threads of the training, set its use_gpu to false, or start more nodes"
        )
    return count


def _room_on(node: Mapping[str, float], needed: Mapping[str, float]) -> int:
    """Return the number of trials that fit on a node; a trial's share of a GPU is on one GPU."""
    return min(
        int(node.get(name, 0)) * int(1 / number) if number < 1 else int(node.get(name, 0) // number)
        for name, number in needed.items()
    )


@working("preparing the sweep", logged=True)
def sweep(config: TuningConfig) -> Records:
    """Train all trials on a Ray cluster, and record which is best.

    Trials are compared on the validation images, which are neither calibration nor test queries, so
    that the guarantee of a later calibration holds. A trial that fails does not end the sweep. The
    same call continues an interrupted sweep: trials that ended are not trained again, others
    continue from their last checkpoint, in the same MLflow runs; failures that may be temporary are
    tried again.

    Raises:
        InvalidConfig: no trial could be trained with this space and cluster, or the folder contains
            another sweep.
        InvalidData, DataUnavailable: of the data set, or there are too few validation images to
            certify `alpha`.
        TrackingUnavailable: MLflow cannot be reached at the start or at the end.
    """
    check_places(config.training)
    folder = Path(config.training.storage).absolute() / config.training.name
    earlier = _earlier_sweep(config, folder)
    if earlier is not None and earlier.finished:
        return earlier
    values = None  # with "tpe", they depend on earlier trials
    if config.search != "tpe":
        values = draw(config.training, config.space, config.trials, config.seed)
    rejects = _check_trials(config, values, folder)
    join_cluster()
    at_once = count_parallel_trials(config)
    with lock_run(folder):
        # Another process may have started it meanwhile.
        records = _earlier_sweep(config, folder) or start_sweep(config, folder)
        with records.tracked.active():
            done = _run(config, records, values, at_once, rejects)
            publish(records)
            records.finished = done
            records.write()
    return records


def _run(
    config: TuningConfig,
    records: Records,
    all_values: list[Values] | None,
    at_once: int,
    rejects: Mapping[str, str],
) -> bool:
    """Train the trials; return True if nothing is left to train."""
    total = config.trials if all_values is None else len(all_values)
    for number, values in enumerate(all_values or ()):
        records.trials.setdefault(number, Trial(number, values))
    earlier = [trial.values for _, trial in sorted(records.trials.items())]

    def record(number: int, values: Values) -> None:
        if number not in records.trials:
            records.trials[number] = Trial(number, values)
            records.write()

    records.write()
    data = replace(config.training.data, root=str(data_root(config.training.data)))
    # As many threads as Ray gives a trial, so that it can be repeated elsewhere.
    training = replace(config.training, data=data, threads=config.training.threads or 1)
    ended = {number: trial.state for number, trial in records.trials.items() if trial.done}
    plan = Plan(
        replace(config, training=training), str(records.folder), records.tracked, ended, rejects
    )
    watch = TrialWatch(records, total)
    shutil.rmtree(records.folder / "ray", ignore_errors=True)
    drawn = [{"number": number, **values} for number, values in enumerate(earlier)]
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(run_trial, plan=plan), find_resources(config)),
        param_space=None if all_values is None else {"drawn": tune.grid_search(drawn)},
        tune_config=tune.TuneConfig(
            num_samples=total if all_values is None else 1,
            search_alg=build_search(config, earlier, record),
            scheduler=build_scheduler(config),
            max_concurrent_trials=at_once,
            # A process that has imported everything runs the next trial.
            reuse_actors=not config.training.most_workers,
            trial_dirname_creator=lambda trial: f"{trial.config['drawn']['number']:03d}",
        ),
        run_config=tune.RunConfig(
            name=config.training.name,
            storage_path=str(records.folder / "ray"),
            callbacks=[watch],
            verbose=0,
        ),
    )
    console.print(f"{total} trials, {min(at_once, total)} at a time, in {records.folder}")
    # The records have failures.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    with settings(QUIET_TUNE), working(f"training {total} trials", logged=True):
        tuner.fit()
    watch.give_up()
    _confirm(config, plan, records, at_once)
    watch.log()
    done = [trial.done for trial in records.trials.values()]
    return len(done) == total and all(done)


@working("training the finalists", logged=True)
def _confirm(config: TuningConfig, plan: Plan, records: Records, at_once: int) -> None:
    """Train the best trials with more seeds; if one fails, the next best takes its place."""
    needed = find_resources(config)
    task: Any = ray.remote(train_seed).options(
        num_cpus=needed.get("CPU", 0), num_gpus=needed.get("GPU", 0), memory=needed.get("memory")
    )
    while True:
        finished = [trial for trial in records.ranked() if trial.state == "finished"]
        finalists = [trial for trial in finished[: config.finalists] if not trial.confirmed]
        if not finalists:
            return
        names = ", ".join(trial.name for trial in finalists)
        console.print(f"{config.final_seeds} seeds for the finalists: {names}", soft_wrap=True)
        jobs: dict[int, list[Any]] = {trial.number: [] for trial in finalists}
        running: list[Any] = []
        for trial in finalists:
            for seed in range(config.seeds, config.final_seeds):
                if len(running) >= at_once:
                    _, running = ray.wait(running)
                jobs[trial.number].append(task.remote(plan, trial.number, trial.values, seed))
                running.append(jobs[trial.number][-1])
        for trial in finalists:
            try:
                ray.get(jobs[trial.number])
                confirmed = replace(trial, confirmed=True)
                folders = [records.folder / name for name in records.names(confirmed)]
                metrics = select_metrics(average_metrics(folders, config))
                records.trials[trial.number] = replace(confirmed, metrics=metrics)
            except (RcirError, RayError) as error:
                failure = describe_failure(getattr(error, "cause", error))
                records.trials[trial.number] = replace(trial, state="failed", **failure)
            records.write()


def _check_trials(
    config: TuningConfig, all_values: list[Values] | None, folder: Path
) -> Mapping[str, str]:
    """Check that all trials can be trained and compared; return the rejects."""
    splits = load_splits(config.training.data, partial(console.print, soft_wrap=True))
    rejects = find_rejects(config.training, splits, folder)
    splits = splits.without(rejects)
    trainings = [with_values(config.training, values) for values in all_values or ()]
    for training in trainings or list_variations(config.training, config.space):
        check_encoder(training)
        check_images(training.at(1), splits.train)
    counts = [len(roles.calibration) for roles in assign_fold_roles(splits.validation)]
    needed = required_calibration(config.alpha, config.delta)
    if not counts or needed is None or min(counts) < needed:
        raise InvalidData(
            f"{len(splits.validation)} validation images leave {min(counts, default=0)} queries to "
            f"calibrate in a fold, and alpha {config.alpha:g} with delta {config.delta:g} needs "
            f"{needed}: use more, or choose a larger alpha"
        )
    return rejects


def _earlier_sweep(config: TuningConfig, folder: Path) -> Records | None:
    """Return the sweep in the folder, if any; `InvalidConfig` if its configuration differs."""
    earlier = read_records(folder)
    if earlier is None:
        if read_run(folder) is not None:
            raise InvalidConfig(f"{folder} contains a training run: choose another training.name")
        return None
    options, old = as_json(asdict(config)), earlier.config
    encoder = old["training"]["encoder"]
    if encoder["method"] == config.training.encoder.method:
        old = old | {"training": old["training"] | {"encoder": stored_encoder(encoder)}}
    require_same_options(old, options, CHANGEABLE, f"{folder} contains a sweep")
    return earlier


def start_sweep(config: TuningConfig, folder: Path) -> Records:
    """Start a new sweep, in its folder and in MLflow."""
    name = config.training.name
    plain = as_json(asdict(config))
    tags = {
        FOLDER_TAG: str(folder),
        "rcir.sweep": name,
        KIND_TAG: "sweep",
        DATASET_TAG: config.training.data.name,
    }
    with started_once(folder, name, tags) as tracked:
        records = Records(folder, plain, tracked.id, tracked.uri)
        records.write()
    # Its trials log the options of the training.
    tracked.log_params(flatten({name: plain[name] for name in plain if name != "training"}))
    return records


def publish(records: Records) -> None:
    """Write `best.yaml`, and log it with the table to MLflow."""
    run, training = records.best_run(), records.config["training"]
    # To be trained again with the storage, data and workers of the sweep.
    config = run.config | {name: training[name] for name in ("storage", "num_workers", "use_gpu")}
    config["name"] = f"{training['name']}-best"
    config["data"] = config["data"] | {"root": training["data"]["root"]}
    note = f"# The best of {len(records.trials)} trials, {run.path.name}, under another name.\n"
    text = note + yaml.safe_dump(config, sort_keys=False)
    write_file(records.best_file, text.encode())
    best, tracked = records.ranked()[0], records.tracked
    tracked.log_tags({"rcir.best": best.name})
    tracked.log_metrics({f"sweep/{name}": value for name, value in best.metrics.items()})
    table = pd.DataFrame(
        {"trial": trial.name, "state": trial.state, "epochs": trial.epochs}
        | {**trial.metrics, **trial.values, "reason": trial.reason}
        for trial in records.ranked()
    )
    write_file(records.folder / TABLE_FILE, table.to_csv(index=False).encode())
    for file in (records.best_file, records.folder / TABLE_FILE, records.folder / SWEEP_FILE):
        tracked.log_file(file)
