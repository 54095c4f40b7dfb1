"""Optional dependencies, and the extra of rcir that installs each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rcir.errors import MissingPackage

EXTRAS = {
    **dict.fromkeys(("torch", "torchvision", "ray", "mlflow", "optuna", "PIL", "pandas"), "train"),
    **dict.fromkeys(("jsonargparse", "yaml"), "train"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "pydantic"), "serve"),
    **dict.fromkeys(("prometheus_client", "python_multipart"), "serve"),
    "grpc_reflection": "ray-serve",
    **dict.fromkeys(("pymilvus", "milvus_lite", "grpc"), "milvus"),
    **dict.fromkeys(("psycopg", "pgvector"), "pgvector"),
    "timm": "timm",
    "open_clip": "open_clip",
    "transformers": "transformers",
}


@contextmanager
def naming_extras() -> Iterator[None]:
    """Replace the import error of an optional dependency by one that names its extra.

    Raises:
        MissingPackage: a package of `EXTRAS` is not installed. Other errors are not changed.

    Example:
        >>> with naming_extras():
        ...     raise ModuleNotFoundError("No module named 'torch'", name="torch")
        Traceback (most recent call last):
        rcir.errors.MissingPackage: torch is not installed: run pip install '.[train]' in a clone \
of rcir
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise MissingPackage(
            f"{package} is not installed: run pip install '.[{EXTRAS[package]}]' in a clone of rcir"
        ) from error
