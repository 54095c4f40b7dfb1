"""Retrievers in MLflow's model registry: a model with its card, and its versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rcir.imports import lazily

if TYPE_CHECKING:
    from rcir.registry.logged_model import answers
    from rcir.registry.registration import register

_HOMES = {
    "rcir.registry.logged_model": ("answers",),
    "rcir.registry.registration": ("register",),
}

__all__ = ["answers", "register"]

__getattr__, __dir__ = lazily(__name__, globals(), _HOMES)
