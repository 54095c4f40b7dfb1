"""What a sweep varies: options of a training, each with the values it may take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from ray import tune

from rcir.errors import InvalidConfig
from training import TrainingConfig
from training.config import override

KINDS = ("uniform", "loguniform", "choice", "grid")
# What decides where and on what a run is trained, not what it learns; trials share it.
SHARED = (
    "name",
    "storage",
    "seed",
    "num_workers",
    "max_failures",
    "use_gpu",
    "threads",
    "data",
    "changes",
)

Values = dict[str, Any]
Space = Mapping[str, Mapping[str, Sequence[Any]]]


def check_space(training: TrainingConfig, space: Space) -> None:
    """Raise `InvalidConfig` unless every option exists and can take each of its values.

    Of ranges, both ends are tried.
    """
    if not space:
        raise InvalidConfig(
            "space names no option: give at least one, for instance loss.kl_scale: "
            "{loguniform: [1.0e-7, 1.0e-3]}"
        )
    for name, sampler in space.items():
        if name.partition(".")[0] in SHARED:
            instead = "seeds" if name == "seed" else "training"
            raise InvalidConfig(f"space names {name}, which all trials share: set it in {instead}")
        if len(sampler) != 1 or next(iter(sampler)) not in KINDS:
            raise InvalidConfig(
                f"space.{name} is {dict(sampler)}; give one of {', '.join(KINDS)} with a list"
            )
        kind, values = next(iter(sampler.items()))
        _check_values(name, kind, values)
        for value in values:
            with_values(training, {name: value})


def with_values(training: TrainingConfig, values: Mapping[str, Any]) -> TrainingConfig:
    """A training with other values of dotted options; `InvalidConfig` if it cannot have them."""
    try:
        return override(training, values)
    except InvalidConfig as error:
        given = ", ".join(f"{name} {value}" for name, value in values.items())
        raise InvalidConfig(f"space: with {given}: {error}") from error


def draw(space: Space, n: int, seed: int) -> list[Values]:
    """n random draws for each point of the grid; the first points of the grid come first.

    Every draw is new: the points of a grid do not share them.
    """
    rng = np.random.default_rng(seed)
    grids = {name: values["grid"] for name, values in space.items() if "grid" in values}
    ranges = domains({name: values for name, values in space.items() if name not in grids})
    return [
        {
            name: point[name] if name in point else _plain(ranges[name].sample(random_state=rng))
            for name in space
        }
        for _ in range(n)
        for point in (dict(zip(grids, values, strict=True)) for values in product(*grids.values()))
    ]


def domains(space: Space) -> dict[str, Any]:
    """What is drawn at random, as Ray Tune samples it; whole numbers between whole numbers."""
    found = {}
    for name, sampler in space.items():
        kind, values = next(iter(sampler.items()))
        whole = kind != "choice" and all(isinstance(value, int) for value in values)
        if kind == "choice":
            found[name] = tune.choice(list(values))
        elif kind == "uniform":
            low, high = values
            found[name] = tune.randint(low, high + 1) if whole else tune.uniform(low, high)
        elif kind == "loguniform":
            low, high = values
            found[name] = tune.lograndint(low, high + 1) if whole else tune.loguniform(low, high)
        else:
            raise InvalidConfig(
                f"space.{name} is a grid, which leaves nothing to search: give choice"
            )
    return found


def _check_values(name: str, kind: str, values: Sequence[Any]) -> None:
    if kind in ("choice", "grid"):
        if not values or any(value in values[:i] for i, value in enumerate(values)):
            raise InvalidConfig(
                f"space.{name}.{kind} is {list(values)}; give at least one value, each once"
            )
        return
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    good = len(values) == len(numbers) == 2 and all(map(math.isfinite, numbers))
    if not good or not numbers[0] < numbers[1]:
        raise InvalidConfig(f"space.{name}.{kind} is {list(values)}; give two numbers [low, high]")
    if kind == "loguniform" and numbers[0] <= 0:
        raise InvalidConfig(f"space.{name}.loguniform is {list(values)}; both must be above 0")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
