"""MLflow's autologging, switched off for fits that are a step of something else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _InsideBlock(threading.local):
    """True in threads that are inside `without_autologging`, False in all others."""

    depth = 0

    def __bool__(self) -> bool:
        return self.depth > 0


_inside = _InsideBlock()


@contextmanager
def without_autologging() -> Iterator[None]:
    """Keep `mlflow.autolog()` from logging the models that this thread fits inside the block.

    A calibration fits hundreds of small scikit-learn models, each of which would become a run of
    the user. MLflow's own switch is global: here it is set for good to a value that depends on the
    thread, so that models fitted outside of blocks are logged as before. Also a decorator.
    """
    mlflow: Any = sys.modules.get("mlflow.utils.autologging_utils")
    # True means that somebody has turned autologging off.
    if mlflow is not None and mlflow._AUTOLOGGING_GLOBALLY_DISABLED is not True:
        mlflow._AUTOLOGGING_GLOBALLY_DISABLED = _inside
    _inside.depth += 1
    try:
        yield
    finally:
        _inside.depth -= 1
