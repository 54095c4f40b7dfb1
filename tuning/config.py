"""What a sweep is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from ray import tune

from rcir.errors import InvalidConfig
from rcir.risk import check_level
from training import TrainingConfig

SAMPLERS = {
    "choice": lambda *values: tune.choice(list(values)),
    "grid": lambda *values: tune.grid_search(list(values)),
    "loguniform": tune.loguniform,
    "uniform": tune.uniform,
}


@dataclass(frozen=True)
class TuningConfig:
    """A sweep.

    Args:
        training: what every trial has in common.
        space: what differs: dotted names of training options, each with one of
            `{uniform: [low, high]}`, `{loguniform: [low, high]}`, `{choice: [...]}` (drawn at
            random) or `{grid: [...]}` (all of them).
        trials: number of random draws, for each point of the grid.
        seed: of the draws.
        alpha, delta: the guarantee whose set size decides.
    """

    training: TrainingConfig
    space: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    trials: int = 4
    seed: int = 0
    alpha: float = 0.1
    delta: float = 0.1

    def __post_init__(self) -> None:
        check_level("alpha", self.alpha)
        check_level("delta", self.delta)
        if self.trials < 1 or not self.space:
            raise InvalidConfig(
                f"trials is {self.trials} and space names {len(self.space)} options; needed: at "
                "least 1 of each"
            )
        for name, sampler in self.space.items():
            override(self.training, {name: _present(self.training, name)})
            if len(sampler) != 1 or next(iter(sampler)) not in SAMPLERS:
                raise InvalidConfig(
                    f"space.{name} is {sampler}; give one of {', '.join(SAMPLERS)} with a list"
                )

    def sampled(self) -> dict[str, Any]:
        """The space as Ray Tune samples it."""
        return {
            name: SAMPLERS[kind](*values)
            for name, sampler in self.space.items()
            for kind, values in sampler.items()
        }


def override(config: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a configuration with other values of dotted names."""
    for name, value in values.items():
        head, _, rest = name.partition(".")
        new = override(getattr(config, head), {rest: value}) if rest else value
        config = replace(config, **{head: new})
    return config


def _present(config: Any, name: str) -> Any:
    for part in name.split("."):
        if not is_dataclass(config) or part not in {each.name for each in fields(config)}:
            raise InvalidConfig(f"space names {name}, which is no option of a training")
        config = getattr(config, part)
    return config
