"""Configuration of a sweep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rcir.errors import InvalidConfig
from rcir.levels import ALPHA, DELTA
from rcir.risk import check_level
from training import TrainingConfig, member_configs
from tuning.space import check_space, variations


@dataclass(frozen=True)
class TuningConfig:
    """A sweep: trainings that differ in some options, compared by the set size they would certify.

    Args:
        training: what all trials have in common; its name is the sweep's.
        space: what differs: dotted names of training options, each with one of
            `{uniform: [low, high]}`, `{loguniform: [low, high]}`, `{choice: [...]}` (drawn at
            random) or `{grid: [...]}` (all of them).
        trials: number of draws: with search "random", for each point of the grid, if anything is
            drawn at all.
        seeds: how often each trial trains, with training.seed, training.seed + 1, ...; its
            objective is the mean.
        search: "random" draws, or "tpe" (Optuna's tree-structured Parzen estimator), which draws
            where earlier trials were good.
        objectives: what "tpe" is to improve; with both, it looks for all good compromises. Sizes
            decide which trial is best.
        scheduler: "none" trains every trial to the end; "asha" (asynchronous successive halving)
            stops those that are behind.
        interval: epochs before "asha" stops any.
        reduction: "asha" lets one in so many go on, at interval, interval * reduction, ... epochs.
        seed: of the draws.
        alpha, delta: the guarantee whose set size decides.
        gpus_per_trial: with training.use_gpu and no workers, the share of a GPU that a trial takes,
            in (0, 1].
        calibrate: whether the best trial becomes a calibrated retriever.
    """

    training: TrainingConfig
    space: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    trials: int = 4
    seeds: int = 1
    search: Literal["random", "tpe"] = "random"
    objectives: tuple[Literal["certified_size", "recall_at_1"], ...] = ("certified_size",)
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
        for name, least in (("trials", 1), ("seeds", 1), ("interval", 1), ("reduction", 2)):
            if getattr(self, name) < least:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; at least {least}")
        if self.seed < 0:
            raise InvalidConfig(f"seed is {self.seed}; at least 0")
        if not self.objectives or len(set(self.objectives)) < len(self.objectives):
            raise InvalidConfig("objectives: give certified_size, recall_at_1, or both")
        if self.search != "tpe" and self.objectives != ("certified_size",):
            raise InvalidConfig(
                f"objectives are {', '.join(self.objectives)}, and search is {self.search}, which "
                "has none: set search to tpe"
            )
        if not 0 < self.gpus_per_trial <= 1:
            raise InvalidConfig(f"gpus_per_trial is {self.gpus_per_trial}; it lies in (0, 1]")
        if self.gpus_per_trial < 1 and (self.training.most_workers or not self.training.use_gpu):
            raise InvalidConfig(
                f"gpus_per_trial is {self.gpus_per_trial}: a GPU is shared by trials that train on "
                "it without workers; set training.use_gpu to true and training.num_workers to 0"
            )
        check_space(self.training, self.space)
        grids = [name for name, sampler in self.space.items() if "grid" in sampler]
        if grids and self.search == "tpe":
            raise InvalidConfig(
                f"space.{grids[0]} is a grid, of which all points are trained, and tpe chooses by "
                "itself: give choice"
            )
        each = [self.training, *variations(self.training, self.space)]
        if self.scheduler != "none" and any(map(member_configs, each)):
            raise InvalidConfig(
                f"scheduler is {self.scheduler}, which looks at epochs, and an ensemble is "
                "measured when all members are trained: set scheduler to none"
            )
        if self.scheduler != "none" and self.interval >= self.training.epochs:
            raise InvalidConfig(
                f"interval is {self.interval} and training.epochs {self.training.epochs}: "
                f"{self.scheduler} would never act; give an interval below the epochs"
            )
        if self.scheduler == "asha" and "epochs" in self.space:
            raise InvalidConfig(
                "space names epochs, and asha compares trials of equally many: set training.epochs"
            )
