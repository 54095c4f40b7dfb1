"""Training: configuration in, tracked run folder with a trained encoder out.

What runs a training is resolved on first use: a worker and `--help` need none of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from training.config import TrainingConfig, override
from training.schedule import CHANGING, Change, OptimizerConfig

if TYPE_CHECKING:
    from training.certification import fold_roles
    from training.checkpoint import last_epoch, restore_validation
    from training.ensemble import member_configs
    from training.folder import as_json, run_lock
    from training.fork import fork_run, snapshot
    from training.loop import PLACEMENT_GROUP
    from training.run import check_encoder, check_images, check_places, train

_NAMES = {
    "certification": ("fold_roles",),
    "checkpoint": ("last_epoch", "restore_validation"),
    "ensemble": ("member_configs",),
    "folder": ("as_json", "run_lock"),
    "fork": ("fork_run", "snapshot"),
    "loop": ("PLACEMENT_GROUP",),
    "run": ("check_encoder", "check_images", "check_places", "train"),
}
_HOME_OF = {name: f"training.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "CHANGING",
    "PLACEMENT_GROUP",
    "Change",
    "OptimizerConfig",
    "TrainingConfig",
    "as_json",
    "check_encoder",
    "check_images",
    "check_places",
    "fold_roles",
    "fork_run",
    "last_epoch",
    "member_configs",
    "override",
    "restore_validation",
    "run_lock",
    "snapshot",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'training' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value
