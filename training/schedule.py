"""The optimizer, and the learning rate of each epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

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
