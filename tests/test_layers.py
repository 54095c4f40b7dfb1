"""Imports go in one direction: each part imports only from parts that stand before it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = (
    *(
        "rcir.printable",
        "rcir.errors",
        "rcir.extras",
        "rcir.levels",
        "rcir.files",
        "rcir.stored_vectors",
        "rcir.memory",
        "rcir.config",
        "rcir.options",
        "rcir.import_paths",
        "rcir.cluster",
        "rcir.tracking",
    ),
    *("rcir.embedding", "rcir.metrics", "rcir.losses", "rcir.index", "rcir.risk"),
    *("rcir.data", "rcir.mining", "rcir.encoders", "rcir.retrieval", "rcir.api", "rcir"),
    *("rcir.runs", "rcir.figures", "rcir.registry", "rcir.serving"),
    *("training", "calibration", "tuning", "rcir.demo", "rcir.cli"),
)
# Packages that one place alone knows.
ALONE = {"mlflow": ("rcir/tracking/", "rcir/registry/model_code.py"), "faiss": "rcir/index/"}
PACKAGES = {"rcir", "rcir.data", "rcir.risk", "rcir.retrieval", "training", "calibration", "tuning"}
FILES = sorted(
    path.relative_to(ROOT)
    for package in ("rcir", "training", "calibration", "tuning")
    for path in (ROOT / package).rglob("*.py")
)


def part(module):
    """The part that a module belongs to; `rcir` is what the package itself gives."""
    return ".".join(module.split(".")[: 2 if module.startswith("rcir.") else 1])


def imported(path, first=False):
    """Modules that a file imports, wherever in it; or only those that it needs to be imported."""
    tree = ast.parse((ROOT / path).read_text())
    for node in tree.body if first else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = [f"{node.module}.{name.name}" for name in node.names]
            yield from names if node.module in PACKAGES else [node.module]


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


def tables():
    """Of each package whose files ARCHITECTURE.md lists in order: the line of each file."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    stated = "each line importing only from itself and those above it:"
    listed = rf"Inside `([a-z/]+)/`, {stated}\n\n((?:\|.*\n)+)"
    for package, table in re.findall(listed, text):
        rows = table.splitlines()[2:]
        files = [re.findall(r"`([\w/]+?)(?:\.py|/)`", row.split("|")[1]) for row in rows]
        yield package, {name: number for number, names in enumerate(files) for name in names}


TABLES = dict(tables())


@pytest.mark.parametrize("package", TABLES)
def test_files_import_from_lines_above_theirs_only(package):
    lines = TABLES[package]

    def line(module):
        """Of a module of this package; of what stands below all lines, none."""
        inner = module.removeprefix(package.replace("/", ".")).strip(".").split(".")[0]
        return lines.get(inner)

    for path in FILES:
        if not path.as_posix().startswith(f"{package}/") or path.name.startswith("__"):
            continue
        own = path.relative_to(package).parts[0].removesuffix(".py")
        assert own in lines, f"ARCHITECTURE.md does not list {path}"
        for module in imported(path, first=True):
            if module.startswith(package.replace("/", ".") + "."):
                at = line(module)
                assert at is None or at <= lines[own], f"{path} imports {module}"


def test_architecture_lists_packages_in_order():
    assert {"rcir/retrieval", "rcir/risk", "rcir/data", "training", "tuning"} <= TABLES.keys()
