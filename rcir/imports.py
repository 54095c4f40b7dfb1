"""Imports by path, and of libraries that come with an extra."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from rcir.errors import InvalidConfig, MissingClass, MissingPackage
from rcir.trust import require_code

EXTRAS = {
    "faiss": "cpu",
    **dict.fromkeys(("torch", "torchvision", "ray", "mlflow", "optuna", "PIL", "pandas"), "train"),
    **dict.fromkeys(("jsonargparse", "yaml"), "train"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "pydantic"), "serve"),
    **dict.fromkeys(("prometheus_client", "python_multipart"), "serve"),
    "grpc_reflection": "ray-serve",
    **dict.fromkeys(("psycopg", "pgvector"), "pgvector"),
    "obstore": "cloud",
    "lancedb": "lancedb",
    "qdrant_client": "qdrant",
    "pillow_heif": "heif",
    "timm": "timm",
    "open_clip": "open_clip",
    "transformers": "transformers",
    "cv2": "verify",
}


@contextmanager
def naming_extras() -> Iterator[None]:
    """Replace the import error of an optional dependency by one that names its extra.

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
        extra = f"'.[{EXTRAS[package]}]'"
        if package == "faiss":
            extra += " (or '.[gpu]' for NVIDIA GPUs)"
        raise MissingPackage(
            f"{package} is not installed: run pip install {extra} in a clone of rcir"
        ) from error


def find_class(option: str, name: str, table: Mapping[str, str]) -> type[Any]:
    """Return the class that a table of import paths names, or one of the user.

    `name` is a name in the table, or an import path, "package.module:Class"; `option` is what
    messages call it, such as "index.kind".

    Raises:
        InvalidConfig: the name does not exist.
        MissingClass: the module or class does not exist, or cannot be imported.
        UntrustedFolder: a folder that is read names a class outside the table, see `rcir.trust`.
        MissingPackage: its module needs a package of an extra that is not installed.
    """
    path = str(table.get(name, name))
    if ":" not in path:
        raise InvalidConfig(
            f"{option} {name!r} is unknown; choose one of {', '.join(table)}, or the import path "
            'of a class, "package.module:Class"'
        )
    if path not in table.values():
        require_code(option, path)
    try:
        with naming_extras():
            value = resolve_name(path)
    except MissingPackage:
        raise
    except (ImportError, AttributeError, ValueError, SystemExit) as error:
        raise MissingClass(
            f"{option} {name!r} cannot be imported ({error!r}): install its package, or add its "
            "folder to PYTHONPATH"
        ) from error
    if not isinstance(value, type):
        raise MissingClass(f"{option} {name!r} is not a class")
    return value


def import_path(kind: type) -> str:
    """Return the path by which `find_class` finds a class, "package.module:Class"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def lazily(
    package: str, module_globals: dict[str, Any], homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` (PEP 562) that import names of a package on first use.

    `homes` maps modules to the names that the package exports of each.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with naming_extras():
            value = module_globals[name] = getattr(import_module(home_of[name]), name)
        return value

    return find, lambda: sorted({*module_globals, *home_of})
