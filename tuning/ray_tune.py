"""A sweep in terms of Ray Tune: search algorithm, scheduler (ASHA), resources of a trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.tune.schedulers import ASHAScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from rcir.errors import InvalidConfig
from tuning.config import TuningConfig
from tuning.space import Values, domains
from tuning.trial import OBJECTIVE

MODES = {OBJECTIVE: "min", "recall_at_1": "max"}
METRICS = {"certified_size": OBJECTIVE, "recall_at_1": "recall_at_1"}  # of objectives, in reports


class Numbered(OptunaSearch):
    """Optuna's search, whose suggestions are numbered, and noted before anything comes of them."""

    def __init__(self, note: Callable[[int, Values], None], *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._note = note
        self._suggested = 0

    def save(self, checkpoint_path: str) -> None:
        """Nothing: a sweep goes on from its own records."""
        Path(checkpoint_path).touch()

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        values = super().suggest(trial_id)
        if values is None:
            return None
        number, self._suggested = self._suggested, self._suggested + 1
        self._note(number, values)
        return {"drawn": numbered(number, values)}


def numbered(number: int, values: Values) -> Values:
    """The configuration that Ray Tune gives a trial: its number and option values."""
    return {"number": number} | values


def search(
    config: TuningConfig, known: Sequence[Values], note: Callable[[int, Values], None]
) -> Searcher | None:
    """The searcher, given earlier trials first; None if all trials are drawn beforehand.

    Args:
        known: of the trials of an earlier start, by number.
        note: called with the number and values of each suggestion.
    """
    if config.search == "random":
        return None
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Otherwise the draws of a sweep that goes on would be those that it began with.
    seed = np.random.SeedSequence([config.seed, len(known)]).generate_state(1)
    metrics = [METRICS[name] for name in config.objectives]
    modes = [MODES[name] for name in metrics]
    several = len(metrics) > 1
    return Numbered(
        note,
        OptunaSearch.convert_search_space(domains(config.training, config.space)),
        metric=metrics if several else metrics[0],
        mode=modes if several else modes[0],
        sampler=optuna.samplers.TPESampler(
            seed=int(seed[0]), n_startup_trials=max(2, min(10, config.trials // 3))
        ),
        points_to_evaluate=[dict(values) for values in known] or None,
    )


def scheduler(config: TuningConfig) -> TrialScheduler | None:
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


def resources(config: TuningConfig) -> dict[str, float]:
    """Resources of a trial; where workers hold its CPUs and GPUs, a byte of memory."""
    training = config.training
    if training.most_workers:
        return {"memory": 1}
    threads = training.threads or 1
    if not training.use_gpu:
        return {"CPU": threads}
    # Its share of the CPUs beside a GPU, to read images.
    beside = [node.get("CPU", 1) / node["GPU"] for node in _nodes() if node.get("GPU")]
    share = int(min(beside, default=1) * config.gpus_per_trial)
    return {"CPU": max(threads, share), "GPU": config.gpus_per_trial}


def trials_at_once(config: TuningConfig) -> int:
    """How many trials the cluster holds at a time.

    Raises:
        InvalidConfig: not one.
    """
    training = config.training
    kind = "GPU" if training.use_gpu else "CPU"
    if training.most_workers:  # they may lie on several nodes
        held: dict[str, float] = {kind: training.most_workers}
        count = int(ray.cluster_resources().get(kind, 0) // training.most_workers)
    else:
        held = resources(config)
        count = sum(_held_by(node, held) for node in _nodes())
    if not count:
        needed = " and ".join(f"{number:g} {name}s" for name, number in held.items())
        there = ", ".join(f"{ray.cluster_resources().get(name, 0):g} {name}s" for name in held)
        raise InvalidConfig(
            f"a trial needs {needed}, and Ray's cluster has {there}: lower training.num_workers or "
            "training.threads, set training.use_gpu to false, or start more nodes"
        )
    return count


def _nodes() -> list[dict[str, float]]:
    """The resources of the nodes that are alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _held_by(node: Mapping[str, float], held: Mapping[str, float]) -> int:
    """How many trials a node has room for; shares of a GPU lie on one each."""
    return min(
        int(node.get(name, 0)) * int(1 / number) if number < 1 else int(node.get(name, 0) // number)
        for name, number in held.items()
    )
