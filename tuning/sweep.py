"""A Ray Tune sweep: each trial trains, and says what set size it would certify."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import tune

from rcir import runs, tracking
from rcir.cluster import join_cluster
from rcir.config import flatten
from rcir.data import load_splits
from rcir.errors import InvalidConfig
from training import TrainingConfig, train
from training.validation import validate
from tuning.config import TuningConfig, override


@dataclass(frozen=True)
class Trial:
    """One training of a sweep.

    Attributes:
        values: the sampled options, by dotted name.
        certified_size: mean set size that the validation images would certify.
        recall_at_1: of the validation images.
        folder: of the training run.
    """

    values: dict[str, Any]
    certified_size: float
    recall_at_1: float
    folder: Path


def sweep(config: TuningConfig) -> list[Trial]:
    """Train all trials on a Ray cluster, one CPU each; the best first.

    Trials are judged on the validation images alone, which are neither calibration nor test
    queries, so that the guarantee of whatever is calibrated afterwards stands.
    """
    folder = Path(config.training.storage).absolute() / config.training.name
    parent = tracking.start_run(f"sweep {config.training.name}", {})
    parent.log_params(flatten(asdict(config)))
    with parent.active():
        tuner = tune.Tuner(
            # A trial only waits for its training workers: they hold the CPUs and GPUs, it one byte.
            tune.with_resources(
                tune.with_parameters(
                    _trial, config=config, folder=str(folder), parent=(parent.id, parent.uri)
                ),
                {"memory": 1},
            ),
            param_space=config.sampled(),
            tune_config=tune.TuneConfig(
                num_samples=config.trials,
                search_alg=tune.search.BasicVariantGenerator(
                    random_state=config.seed, max_concurrent=_side_by_side(config.training)
                ),
            ),
            run_config=tune.RunConfig(name="ray", storage_path=str(folder), verbose=0),
        )
        results = tuner.fit()
        done = [results[i] for i in range(len(results)) if results[i].error is None]
        trials = [
            Trial(
                result.config or {},
                found["certified_size"],
                found["recall_at_1"],
                Path(found["folder"]),
            )
            for result in done
            if (found := result.metrics)
        ]
        trials.sort(key=lambda trial: trial.certified_size)
        if trials:
            parent.log_metrics({"best/certified_size": trials[0].certified_size})
            parent.log_tags({"rcir.best": str(trials[0].folder)})
    return trials


def _trial(
    values: dict[str, Any], config: TuningConfig, folder: str, parent: tuple[str, str]
) -> dict[str, Any]:
    """Train with the sampled values. Inside Tune, Ray Train needs a worker: no local mode."""
    trial = tune.get_context().get_trial_id()
    chosen: TrainingConfig = override(config.training, values)
    run = train(
        replace(chosen, name=f"trial-{trial}", storage=folder, num_workers=chosen.num_workers or 1),
        tracking.TrackedRun(*parent),
    )
    return _judged(run, config) | {"folder": str(run.path)}


def _judged(run: runs.RunFolder, config: TuningConfig) -> dict[str, Any]:
    found = validate(run.encoder(), run.preprocessing, load_splits(run.data).validation)
    return {
        "certified_size": found.certified_size(config.alpha, config.delta),
        "recall_at_1": float(found.correct.mean()),
    }


def _workers(config: TrainingConfig) -> int:
    return max(1, config.most_workers)


def _side_by_side(config: TrainingConfig) -> int:
    """How many trials the cluster holds at a time: with more, workers would wait for each other."""
    join_cluster()
    total = ray.cluster_resources().get("GPU" if config.use_gpu else "CPU", 0)
    if total < _workers(config):
        raise InvalidConfig(
            f"a trial needs {_workers(config)} {'GPUs' if config.use_gpu else 'CPUs'}, the cluster "
            f"has {total:g}: lower training.num_workers"
        )
    return int(total // _workers(config))
