"""What a training run is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from rcir.data import Augmentation, DataConfig, Preprocessing
from rcir.encoders import EncoderConfig
from rcir.errors import InvalidConfig
from rcir.losses import LossConfig
from rcir.mining import MiningConfig, Negatives, Positive


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam and its schedule.

    Args:
        lr: learning rate at the start.
        weight_decay: L2 penalty.
        schedule: "cosine" to 0 over all epochs, "exponential" by `gamma` per epoch, or "constant".
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


# Smallest certified sets and highest recall on `digits`; printed by benchmarks/mining.py.
MINING: dict[str, tuple[Positive, Negatives]] = {
    "deterministic": ("nearest", "top-random"),
    "mc-dropout": ("nearest", "top-random"),
    "deep-ensemble": ("nearest", "top-random"),
    "btl": ("random", "semi-hard"),
}


@dataclass(frozen=True)
class TrainingConfig:
    """A training run.

    Args:
        name: of the run and of its folder.
        storage: folder of all runs; on a cluster, one that every node sees.
        seed: decides initial weights, order, mining and augmentation; at least 0.
        epochs: passes over the training images, each of them once an anchor.
        batch: tuples per step, over all workers; with mining.scope "batch", images.
        num_workers: Ray workers; 0 trains in this process.
        use_gpu: one GPU per worker; with 0 workers, the GPU of this process.
        precision: of the backbone while it is trained; "bfloat16" is several times as fast where
            the processor has it. Weights, heads and losses stay in float32, and so does all
            embedding outside of training.
        data: the data set.
        preprocessing: from images to the encoder's input.
        augmentation: random changes of training images.
        encoder: what is trained.
        loss: margins and weights of the loss.
        mining: how tuples are chosen; what is left open becomes the best for the encoder.
        optimizer: Adam and its schedule.
    """

    name: str
    storage: str = "runs"
    seed: int = 0
    epochs: int = 8
    batch: int = 64
    num_workers: int = 0
    use_gpu: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    data: DataConfig = field(default_factory=DataConfig)
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    augmentation: Augmentation = field(default_factory=Augmentation)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    mining: MiningConfig = field(default_factory=MiningConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("epochs", 1), ("batch", 1), ("num_workers", 0)):
            if getattr(self, name) < least:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; at least {least}")
        if self.batch < self.num_workers:
            raise InvalidConfig(
                f"a batch of {self.batch} tuples does not fill {self.num_workers} workers: raise "
                "batch"
            )
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise InvalidConfig(f"name is {self.name!r}; it must be usable as the name of a folder")
        height, width = self.preprocessing.size
        if self.augmentation.occlusion and width % height:
            raise InvalidConfig(
                f"augmentation.occlusion needs images of square tiles, not {height} x {width}: "
                "make the width of preprocessing.size a multiple of its height"
            )
        positive, negatives = MINING[self.encoder.method]
        mining = replace(
            self.mining,
            positive=self.mining.positive or positive,
            negatives=self.mining.negatives or negatives,
        )
        object.__setattr__(self, "mining", mining)
