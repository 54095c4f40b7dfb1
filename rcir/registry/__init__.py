"""Retrievers in MLflow's model registry: a model with its card, and its versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rcir.imports import lazily

if TYPE_CHECKING:
    from rcir.registry.logged_model import answer_table, register

_HOMES = {"rcir.registry.logged_model": ("answer_table", "register")}

__all__ = ["answer_table", "register"]

__getattr__, __dir__ = lazily(__name__, globals(), _HOMES)
