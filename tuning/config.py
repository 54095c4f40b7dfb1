"""The configuration of a sweep, and the space of options that it searches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, is_dataclass
from itertools import product
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
from ray import tune

from rcir.encoders import find_method
from rcir.errors import InvalidConfig
from rcir.options import ALPHA, DELTA, require_at_least
from rcir.risk import check_level
from rcir.runs.folder import RESOURCES
from rcir.storage import is_uri
from training.config import TrainingConfig, override

METHOD = "encoder.method"
SAMPLERS = ("uniform", "loguniform", "choice", "grid")
# Trials share what they are trained on, and what only says where.
SHARED_OPTIONS = ("name", "seed", "data", "changes", *RESOURCES)

Values = dict[str, Any]
Space = Mapping[str, Mapping[str, Sequence[Any]]]


def check_space(training: TrainingConfig, space: Space) -> None:
    """Raise `InvalidConfig` unless every option exists and can have its values (or range ends)."""
    if not space:
        raise InvalidConfig(
            "space is empty: add an option, such as loss.kl_scale: {loguniform: [1.0e-7, 1.0e-3]}"
        )
    for name, sampler in space.items():
        if name.partition(".")[0] in SHARED_OPTIONS:
            instead = "seeds" if name == "seed" else "training"
            raise InvalidConfig(f"space names {name}, which all trials share: set it in {instead}")
        group = getattr(training, name, None)
        if is_dataclass(group) or isinstance(group, dict) or name == "encoder.options":
            raise InvalidConfig(f"space names {name}, a group of options: name one, {name}.OPTION")
        if len(sampler) != 1 or next(iter(sampler)) not in SAMPLERS:
            raise InvalidConfig(
                f"space.{name} is {dict(sampler)}; pass one of {', '.join(SAMPLERS)} with a list"
            )
        _check_values(name, *next(iter(sampler.items())))
    list_variations(training, space)
    # Every method must have all options that vary.
    for method in next(iter(space.get(METHOD, {}).values()), ()):
        others = {name: next(iter(sampler.values()))[0] for name, sampler in space.items()}
        with_values(training, others | {METHOD: method})


def list_variations(training: TrainingConfig, space: Space) -> list[TrainingConfig]:
    """Return the training with each value (or end of a range) of each option, one at a time."""
    return [
        with_values(training, {name: value})
        for name, sampler in space.items()
        for value in next(iter(sampler.values()))
    ]


def with_values(training: TrainingConfig, values: Mapping[str, Any]) -> TrainingConfig:
    """Return a training with other values of dotted options, see `override`."""
    try:
        return override(training, values)
    except InvalidConfig as error:
        stated = ", ".join(f"{name} {value}" for name, value in values.items())
        raise InvalidConfig(f"space: with {stated}: {error}") from error


def draw(training: TrainingConfig, space: Space, n: int, seed: int) -> list[Values]:
    """Draw n times for each point of the grid; only return the grid if nothing is random."""
    rng = np.random.default_rng(seed)
    grids = {name: values["grid"] for name, values in space.items() if "grid" in values}
    values_by_name = {name: values for name, values in space.items() if name not in grids}
    ranges = build_domains(training, values_by_name)

    def sample(name: str) -> Any:
        value = ranges[name].sample(random_state=rng)
        return value.item() if isinstance(value, np.generic) else value

    return [
        {name: point[name] if name in point else sample(name) for name in space}
        for _ in range(n if ranges else 1)
        for point in (dict(zip(grids, values, strict=True)) for values in product(*grids.values()))
    ]


def build_domains(training: TrainingConfig, space: Space) -> dict[str, Any]:
    """Return the random options as Ray Tune's domains, of whole numbers for integer options."""
    result: dict[str, Any] = {}
    for name, sampler in space.items():
        kind, values = next(iter(sampler.items()))
        if kind == "choice":
            result[name] = tune.choice(list(values))
        elif _is_integer(training, name):
            draw_integer = tune.randint if kind == "uniform" else tune.lograndint
            result[name] = draw_integer(values[0], values[1] + 1)
        else:
            result[name] = (tune.uniform if kind == "uniform" else tune.loguniform)(*values)
    return result


def _is_integer(training: TrainingConfig, name: str) -> bool:
    group, _, option = name.rpartition(".")
    method = find_method(training.encoder.method)
    kinds = {"": TrainingConfig, "encoder.options": method.Options, "loss": method.LossOptions}
    owner = kinds[group] if group in kinds else type(getattr(training, group))
    kind = get_type_hints(owner)[option]
    types = get_args(kind) or (kind,)
    return int in types and float not in types


def _check_values(name: str, kind: str, values: Sequence[Any]) -> None:
    if kind in ("choice", "grid"):
        if not values or any(value in values[:i] for i, value in enumerate(values)):
            raise InvalidConfig(
                f"space.{name}.{kind} is {list(values)}; pass at least one value, each once"
            )
        return
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    finite = len(values) == len(numbers) == 2 and all(map(math.isfinite, numbers))
    if not finite or not numbers[0] < numbers[1]:
        raise InvalidConfig(f"space.{name}.{kind} is {list(values)}; pass two numbers [low, high]")
    if kind == "loguniform" and numbers[0] <= 0:
        raise InvalidConfig(f"space.{name}.loguniform is {list(values)}; both must be above 0")


@dataclass(frozen=True)
class TuningConfig:
    """A sweep: trainings that differ in some options, compared by the set size they would certify.

    Args:
        training: what all trials have in common; its name is the sweep's.
        space: options that differ, by dotted name: each `{uniform: [low, high]}`,
            `{loguniform: [low, high]}`, `{choice: [...]}` (random) or `{grid: [...]}` (all values).
        trials: number of draws; with search "random" and a grid, for each point of the grid, or one
            if nothing is random.
        seeds: how often each trial trains, with training.seed, training.seed + 1, ...; its
            objective is the mean.
        finalists: number of the best trials that train with `final_seeds` before one of them is
            chosen by the mean; 0 chooses at once.
        final_seeds: of each finalist, more than `seeds`.
        search: "random" draws, or "tpe" (Optuna's tree-structured Parzen estimator), which prefers
            the surroundings of good trials.
        scheduler: "none" trains every trial to the end; "asha" (asynchronous successive halving)
            stops trials that are behind.
        interval: epochs before "asha" stops any.
        reduction: "asha" continues one trial in so many, at interval, interval * reduction, ...
            epochs.
        seed: of the draws.
        alpha, delta: levels of the guarantee whose set size decides.
        gpus_per_trial: share of a GPU for each trial, in (0, 1], with training.use_gpu and no
            workers.
        calibrate: calibrate a retriever with the best trial.
    """

    training: TrainingConfig
    space: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    trials: int = 4
    _: KW_ONLY
    seeds: int = 1
    finalists: int = 0
    final_seeds: int = 3
    search: Literal["random", "tpe"] = "random"
    scheduler: Literal["none", "asha"] = "none"
    interval: int = 1
    reduction: int = 3
    seed: int = 0
    alpha: float = ALPHA
    delta: float = DELTA
    gpus_per_trial: float = 1.0
    calibrate: bool = False

    def __post_init__(self) -> None:
        check_level("alpha", self.alpha)
        check_level("delta", self.delta)
        require_at_least(self, trials=1, seeds=1, interval=1, reduction=2, finalists=0, seed=0)
        if is_uri(self.training.storage):
            raise InvalidConfig(
                f"training.storage is {self.training.storage}; the trials of a sweep need a "
                "folder, shared by all nodes: train the best configuration in the bucket"
            )
        if self.finalists and self.final_seeds <= self.seeds:
            raise InvalidConfig(
                f"final_seeds is {self.final_seeds}; it must exceed seeds, {self.seeds}"
            )
        if not 0 < self.gpus_per_trial <= 1:
            raise InvalidConfig(f"gpus_per_trial is {self.gpus_per_trial}; it must lie in (0, 1]")
        if self.gpus_per_trial < 1 and (self.training.most_workers or not self.training.use_gpu):
            raise InvalidConfig(
                f"gpus_per_trial is {self.gpus_per_trial}; a share needs training.use_gpu true and "
                "training.num_workers 0"
            )
        check_space(self.training, self.space)
        grids = [name for name, sampler in self.space.items() if "grid" in sampler]
        if grids and self.search == "tpe":
            raise InvalidConfig(f"space.{grids[0]} is a grid, which tpe cannot search: use choice")
        if self.scheduler == "none":
            return
        if any(t.has_members for t in (self.training, *list_variations(self.training, self.space))):
            raise InvalidConfig(
                "asha compares trials by epochs, and an ensemble has none: set scheduler to none"
            )
        if self.interval >= self.training.epochs:
            raise InvalidConfig(f"interval is {self.interval}; it must be below training.epochs")
        if "epochs" in self.space:
            raise InvalidConfig("asha compares trials with equal epochs: set training.epochs")
