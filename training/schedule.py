"""Schedules: the learning rate, and option overrides from an epoch on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from rcir.errors import InvalidConfig


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam and its schedule.

    Args:
        lr: learning rate at the start.
        weight_decay: L2 penalty.
        schedule: "cosine" to 0 over all epochs (Loshchilov & Hutter, ICLR 2017), "exponential" by
            `gamma` per epoch, or "constant".
        gamma: factor per epoch of the exponential schedule.
    """

    lr: float = 1e-3
    weight_decay: float = 0.0
    schedule: Literal["cosine", "exponential", "constant"] = "cosine"
    gamma: float = 0.99

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise InvalidConfig(f"optimizer.lr is {self.lr}; it must be above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise InvalidConfig(f"optimizer.weight_decay is {self.weight_decay}; at least 0")
        if not 0 < self.gamma <= 1:
            raise InvalidConfig(f"optimizer.gamma is {self.gamma}; it must lie in (0, 1]")

    def rate(self, epoch: int, epochs: int) -> float:
        """The learning rate of an epoch, from 1 on, of so many.

        Example:
            >>> optimizer = OptimizerConfig(lr=0.1)
            >>> [round(optimizer.rate(epoch, 4), 3) for epoch in (1, 2, 3, 4)]
            [0.1, 0.085, 0.05, 0.015]
        """
        if self.schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * (epoch - 1) / epochs)) / 2
        return self.lr * self.gamma ** (epoch - 1) if self.schedule == "exponential" else self.lr


CHANGING = ("optimizer", "loss", "mining", "augmentation")  # options that need not stay the same


@dataclass(frozen=True)
class Change:
    """Options that change while a run is trained.

    Args:
        epoch: the first with these values; at least 2.
        options: values by dotted name, of optimizer, loss, mining or augmentation.
    """

    epoch: int
    options: dict[str, Any]

    def __post_init__(self) -> None:
        if self.epoch < 2:
            raise InvalidConfig(
                f"changes name epoch {self.epoch}; at least 2: what holds from the first epoch on "
                "belongs into the configuration itself"
            )
        for name in self.options:
            group, dot, _ = name.partition(".")
            if group not in CHANGING or not dot:
                raise InvalidConfig(
                    f"changes name {name}; only options of {', '.join(CHANGING)} may change"
                )
