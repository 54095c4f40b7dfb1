"""Training: configuration in, tracked run folder with a trained encoder out.

What runs a training is resolved on first use: a worker and `--help` need none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rcir.import_paths import lazily

if TYPE_CHECKING:
    from training.certification import fold_roles
    from training.checkpoint import last_epoch, restore_validation
    from training.config import TrainingConfig, override
    from training.ensemble import member_configs
    from training.folder import as_json, run_lock, started_once
    from training.loop import PLACEMENT_GROUP
    from training.run import check_encoder, check_images, check_places, train
    from training.schedule import OptimizerConfig

_HOMES = {
    "training.certification": ("fold_roles",),
    "training.checkpoint": ("last_epoch", "restore_validation"),
    "training.config": ("TrainingConfig", "override"),
    "training.ensemble": ("member_configs",),
    "training.folder": ("as_json", "run_lock", "started_once"),
    "training.loop": ("PLACEMENT_GROUP",),
    "training.run": ("check_encoder", "check_images", "check_places", "train"),
    "training.schedule": ("OptimizerConfig",),
}

__all__ = [
    "PLACEMENT_GROUP",
    "OptimizerConfig",
    "TrainingConfig",
    "as_json",
    "check_encoder",
    "check_images",
    "check_places",
    "fold_roles",
    "last_epoch",
    "member_configs",
    "override",
    "restore_validation",
    "run_lock",
    "started_once",
    "train",
]

__getattr__, __dir__ = lazily(__name__, globals(), _HOMES)
