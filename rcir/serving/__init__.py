"""Serving a retriever over HTTP: requests answered in batches, its guarantee watched."""

from rcir.imports import lazily

_HOMES = {
    "rcir.serving.app": ("create_app",),
    "rcir.serving.server": ("serve", "serve_on_ray"),
    "rcir.serving.settings": ("Settings",),
}

__all__ = ["Settings", "create_app", "serve", "serve_on_ray"]

__getattr__, __dir__ = lazily(__name__, globals(), _HOMES)
