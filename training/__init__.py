"""Training: configuration in, tracked run folder with a trained encoder out.

What runs a training is resolved on first use: a worker and `--help` need none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rcir.imports import lazily

if TYPE_CHECKING:
    from training.checkpoint import last_epoch, restore_validation
    from training.config import Change, OptimizerConfig, TrainingConfig, member_configs, override
    from training.loop import PLACEMENT_GROUP
    from training.run import (
        as_json,
        check_encoder,
        check_images,
        check_places,
        differing,
        readable_splits,
        run_lock,
        train,
    )
    from training.validation import fold_roles

_HOMES = {
    "training.checkpoint": ("last_epoch", "restore_validation"),
    "training.config": (
        "Change",
        "OptimizerConfig",
        "TrainingConfig",
        "member_configs",
        "override",
    ),
    "training.loop": ("PLACEMENT_GROUP",),
    "training.run": (
        *("as_json", "check_encoder", "check_images", "check_places", "differing"),
        *("readable_splits", "run_lock", "train"),
    ),
    "training.validation": ("fold_roles",),
}

__all__ = [
    "PLACEMENT_GROUP",
    "Change",
    "OptimizerConfig",
    "TrainingConfig",
    "as_json",
    "check_encoder",
    "check_images",
    "check_places",
    "differing",
    "fold_roles",
    "last_epoch",
    "member_configs",
    "override",
    "readable_splits",
    "restore_validation",
    "run_lock",
    "train",
]

__getattr__, __dir__ = lazily(__name__, globals(), _HOMES)
