"""No public name of a module has two meanings: each is defined in one module of all four packages.

Readers of data sets (`rcir/data/datasets/`) and commands (`rcir/cli/`) are left out: their files
define the same few names, each for its own data set or command, and no other file imports them.
"""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("rcir", "training", "calibration", "tuning")
ALIKE = ("rcir/data/datasets/", "rcir/cli/")

# One thing in two modules, on purpose.
ALLOWED = {
    "main": "the entry of `python -m`, in each package",
    "load": "rcir.load also takes an MLflow URI",
    "console": "the same screen",
}


def defined(module):
    """The public names that a module defines at its top level."""
    found = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {
                name.id
                for target in targets
                for name in ast.walk(target)
                if isinstance(name, ast.Name)
            }
    return {name for name in found if not name.startswith("_")}


@pytest.fixture(scope="module")
def homes():
    """Of each name the modules that define it."""
    homes = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            where = path.relative_to(ROOT).as_posix()
            if not where.startswith(ALIKE):
                for name in defined(path):
                    homes[name].append(where)
    return homes


def test_a_name_has_one_home(homes):
    twice = {name: where for name, where in homes.items() if len(where) > 1}
    assert {name: twice[name] for name in twice.keys() - ALLOWED.keys()} == {}


def test_what_was_told_apart_is_taken_off_the_list(homes):
    assert [name for name in ALLOWED if len(homes[name]) < 2] == []
