"""The search space of a sweep: options of a training, each with the values it may take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from itertools import product
from typing import Any, get_args, get_type_hints

import numpy as np
from ray import tune

from rcir.encoders import find_method
from rcir.errors import InvalidConfig
from rcir.runs.folder import RESOURCES
from training import TrainingConfig, override

METHOD = "encoder.method"
KINDS = ("uniform", "loguniform", "choice", "grid")
# Trials share what they are trained on, and what only says where.
SHARED = ("name", "seed", "data", *RESOURCES)

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
        group = getattr(training, name, None)
        if is_dataclass(group) or isinstance(group, dict) or name == "encoder.options":
            raise InvalidConfig(f"space names {name}, a group of options: name one, {name}.OPTION")
        if len(sampler) != 1 or next(iter(sampler)) not in KINDS:
            raise InvalidConfig(
                f"space.{name} is {dict(sampler)}; give one of {', '.join(KINDS)} with a list"
            )
        _check_values(name, *next(iter(sampler.items())))
    variations(training, space)
    # Each method has to have all options that vary.
    for method in next(iter(space.get(METHOD, {}).values()), ()):
        others = {name: next(iter(sampler.values()))[0] for name, sampler in space.items()}
        with_values(training, others | {METHOD: method})


def variations(training: TrainingConfig, space: Space) -> list[TrainingConfig]:
    """The training with each value of each option, and both ends of ranges, one at a time."""
    return [
        with_values(training, {name: value})
        for name, sampler in space.items()
        for value in next(iter(sampler.values()))
    ]


def with_values(training: TrainingConfig, values: Mapping[str, Any]) -> TrainingConfig:
    """A training with other values of dotted options; `InvalidConfig` if it cannot have them.

    With another encoder, its defaults take the place of this one's, see `override`.
    """
    try:
        return override(training, values)
    except InvalidConfig as error:
        given = ", ".join(f"{name} {value}" for name, value in values.items())
        raise InvalidConfig(f"space: with {given}: {error}") from error


def draw(training: TrainingConfig, space: Space, n: int, seed: int) -> list[Values]:
    """n random draws for each point of the grid, or each point once if all is a grid.

    Every draw is new: the points of a grid do not share them.
    """
    rng = np.random.default_rng(seed)
    grids = {name: values["grid"] for name, values in space.items() if "grid" in values}
    drawn = {name: values for name, values in space.items() if name not in grids}
    ranges = domains(training, drawn)
    return [
        {
            name: point[name] if name in point else _plain(ranges[name].sample(random_state=rng))
            for name in space
        }
        for _ in range(n if ranges else 1)
        for point in (dict(zip(grids, values, strict=True)) for values in product(*grids.values()))
    ]


def domains(training: TrainingConfig, space: Space) -> dict[str, Any]:
    """The random options as Ray Tune's domains; of whole numbers for options that are."""
    found: dict[str, Any] = {}
    for name, sampler in space.items():
        kind, values = next(iter(sampler.items()))
        if kind == "choice":
            found[name] = tune.choice(list(values))
            continue
        low, high = values
        if _is_whole(training, name):
            draw_whole = tune.randint if kind == "uniform" else tune.lograndint
            found[name] = draw_whole(low, high + 1)
        else:
            found[name] = (tune.uniform if kind == "uniform" else tune.loguniform)(low, high)
    return found


def _is_whole(training: TrainingConfig, name: str) -> bool:
    """Whether an option takes whole numbers only."""
    group, _, option = name.rpartition(".")
    method = find_method(training.encoder.method)
    own = {"": TrainingConfig, "encoder.options": method.Options, "loss": method.LossOptions}
    kind = get_type_hints(own[group] if group in own else type(getattr(training, group)))[option]
    kinds = get_args(kind) or (kind,)
    return int in kinds and float not in kinds


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
