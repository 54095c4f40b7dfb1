"""Imports go in one direction: each part imports only from parts that stand before it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = (
    *(
        "rcir.printable",
        "rcir.errors",
        "rcir.levels",
        "rcir.files",
        "rcir.config",
        "rcir.options",
        "rcir.import_paths",
        "rcir.cluster",
        "rcir.tracking",
    ),
    *("rcir.embedding", "rcir.metrics", "rcir.losses", "rcir.index", "rcir.risk"),
    *("rcir.data", "rcir.mining", "rcir.encoders", "rcir.retrieval", "rcir.api", "rcir"),
    *("rcir.runs", "rcir.figures"),
    *("training", "calibration", "tuning", "rcir.demo", "rcir.cli"),
)
# Packages that one place alone knows.
ALONE = {"mlflow": "rcir/tracking.py", "faiss": "rcir/index/"}
FILES = sorted(
    path.relative_to(ROOT)
    for package in ("rcir", "training", "calibration", "tuning")
    for path in (ROOT / package).rglob("*.py")
)


def part(module):
    """The part that a module belongs to; `rcir` is what the package itself gives."""
    return ".".join(module.split(".")[: 2 if module.startswith("rcir.") else 1])


def imported(path):
    """Modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = [f"rcir.{name.name}" for name in node.names]
            yield from names if node.module == "rcir" else [node.module]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_imports_from_earlier_parts_only(path):
    own = part(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    for module in imported(path):
        if module.split(".")[0] in ("rcir", "training", "calibration", "tuning"):
            assert PARTS.index(part(module)) <= PARTS.index(own), f"{path} imports {module}"


@pytest.mark.parametrize("package", ALONE)
def test_a_package_is_known_in_one_place(package):
    users = {
        path.as_posix()
        for path in FILES
        for module in imported(path)
        if module.split(".")[0] == package
    }
    assert users
    assert all(user.startswith(ALONE[package]) for user in users)
