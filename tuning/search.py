"""What Ray Tune is told of a sweep: which trials to draw, which to stop, how many at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from rcir.errors import InvalidConfig
from tuning.config import TuningConfig
from tuning.space import Values, domains

MODES = {"certified_size": "min", "recall_at_1": "max"}


class Numbered(OptunaSearch):
    """Optuna's search, whose suggestions are numbered."""

    _suggested = 0

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        values = super().suggest(trial_id)
        if values is None:
            return None
        number, self._suggested = self._suggested, self._suggested + 1
        return {"drawn": numbered(number, values)}


def numbered(number: int, values: Values) -> Values:
    """What a trial is given: the values of its options, and its number."""
    return {"number": number} | values


def search(config: TuningConfig, known: Sequence[Values]) -> Searcher | None:
    """What suggests values, those that are known first; None if all trials are drawn beforehand."""
    if config.search == "random":
        return None
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Otherwise the draws of a sweep that goes on would be those that it began with.
    seed = np.random.SeedSequence([config.seed, len(known)]).generate_state(1)
    return Numbered(
        OptunaSearch.convert_search_space(domains(config.space)),
        metric=list(config.objectives) if len(config.objectives) > 1 else config.objectives[0],
        mode=(
            [MODES[name] for name in config.objectives]
            if len(config.objectives) > 1
            else MODES[config.objectives[0]]
        ),
        sampler=optuna.samplers.TPESampler(seed=int(seed[0])),
        points_to_evaluate=[dict(values) for values in known] or None,
    )


def scheduler(config: TuningConfig) -> TrialScheduler | None:
    """What stops trials, or sends them on from another's weights."""
    judged: dict[str, Any] = {"time_attr": "epoch", "metric": "certified_size", "mode": "min"}
    if config.scheduler == "asha":
        return ASHAScheduler(
            **judged,
            max_t=config.training.epochs * config.seeds + 1,  # the last epoch ends by itself
            grace_period=config.interval,
            reduction_factor=config.reduction,
        )
    if config.scheduler == "pbt":
        choices = {
            name: list(sampler["choice"])
            for name, sampler in config.space.items()
            if "choice" in sampler
        }
        return PopulationBasedTraining(
            **judged,
            perturbation_interval=config.interval,
            hyperparam_mutations={"drawn": domains(config.space) | choices},
            custom_explore_fn=lambda given: {"drawn": _within(config.space, given["drawn"])},
            log_config=False,
        )
    return None


def _within(space: Mapping[str, Mapping[str, Sequence[Any]]], drawn: Values) -> Values:
    """Values that were multiplied, back in their ranges."""
    for name, sampler in space.items():
        if "choice" not in sampler:
            low, high = next(iter(sampler.values()))
            drawn[name] = min(max(drawn[name], low), high)
    return drawn


def resources(config: TuningConfig) -> dict[str, float]:
    """What a trial holds. With workers they hold CPUs and GPUs, and it only waits: for one byte."""
    training = config.training
    if training.most_workers:
        return {"memory": 1}
    if not training.use_gpu:
        return {"CPU": 1}
    there = ray.cluster_resources()
    share = there.get("CPU", 1) * config.gpus_per_trial / there["GPU"]
    return {"CPU": max(1, int(share)), "GPU": config.gpus_per_trial}


def side_by_side(config: TuningConfig) -> int:
    """How many trials the cluster holds at a time.

    Raises:
        InvalidConfig: not one.
    """
    training = config.training
    kind = "GPU" if training.use_gpu else "CPU"
    each = config.gpus_per_trial if training.use_gpu and not training.most_workers else 1
    needed = max(1, training.most_workers) * each
    there = ray.cluster_resources().get(kind, 0)
    if there < needed:
        raise InvalidConfig(
            f"a trial needs {needed:g} {kind}s, and Ray's cluster has {there:g}: lower "
            "training.num_workers, set training.use_gpu to false, or start more nodes"
        )
    if each < 1:  # a trial's share lies on one GPU
        return int(there) * int(1 / each)
    return int(there // needed)
