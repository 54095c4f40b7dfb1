"""Measure which share of deliberately broken lines the tests notice.

Draws mutants of the statistical core with a fixed seed, runs the tests that import the mutated
module on each of them, and prints the share that fails ("killed"):

    python -m tests.mutation_score --output mutants.json

`--earlier mutants.json` tries the test that killed a mutant before first. Tests marked `slow` are
not run. A mutant takes seconds if it is killed and minutes if it survives.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
TARGETS = ("rcir/risk", "rcir/mining", "rcir/losses", "rcir/retrieval", "training/checkpoint.py")
KINDS = ("comparison", "boundary", "constant", "dropped statement")
NEGATED = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
SHIFTED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
DROPPABLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Delete)
PYTEST = ("-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:randomly")
HANG_S = 300  # a mutant may loop for ever
PASSED, NOT_FOUND, NONE_SELECTED = 0, 4, 5  # exit statuses of pytest; 4 for a broken conftest too
ABORTED = "the run was aborted"


@dataclass(frozen=True)
class Mutant:
    """One changed expression or statement; columns count bytes, as `ast` does."""

    kind: str
    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    original: str
    replacement: str

    def apply(self, source: bytes) -> bytes:
        """Return the source of the file with the change."""
        lines = source.splitlines(keepends=True)
        before = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        after = lines[self.end_line - 1][self.end_column :] + b"".join(lines[self.end_line :])
        return before + self.replacement.encode() + after


def changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the kind and the replacement of every mutation of one syntax node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for kind, table in (("comparison", NEGATED), ("boundary", SHIFTED)):
            if replacement := table.get(type(node.ops[0])):
                yield kind, ast.unparse(ast.Compare(node.left, [replacement()], node.comparators))
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "constant", repr(not node.value)
        elif isinstance(node.value, int | float):
            yield "constant", repr(node.value + 1)
    elif isinstance(node, DROPPABLE):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring:
            yield "dropped statement", "pass"


def mutants_of(file: Path, root: Path) -> Iterator[Mutant]:
    """Yield every mutant of one file."""
    source = file.read_text()
    tree = ast.parse(source)
    module_level = {id(node) for node in tree.body}
    in_formatted_text = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        dropped = isinstance(node, DROPPABLE) and id(node) in module_level
        if dropped or id(node) in in_formatted_text:
            continue
        for kind, replacement in changes(node):
            original = ast.get_source_segment(source, node) or ""
            yield Mutant(
                kind,
                file.relative_to(root).as_posix(),
                node.lineno,
                node.col_offset,
                node.end_lineno,
                node.end_col_offset,
                original,
                replacement,
            )


def draw(root: Path, number: int, seed: int) -> list[Mutant]:
    """Draw mutants, the same number of every kind."""
    files = [
        file
        for target in TARGETS
        for file in sorted(
            (root / target).rglob("*.py") if (root / target).is_dir() else [root / target]
        )
    ]
    mutants = [mutant for file in files for mutant in mutants_of(file, root)]
    generator = random.Random(seed)
    drawn = []
    for kind in KINDS:
        drawn += generator.sample(
            [each for each in mutants if each.kind == kind], number // len(KINDS)
        )
    return drawn


@cache
def imported_modules(file: Path) -> frozenset[str]:
    """Return the modules that a file imports, and those that define the names it imports."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
            if node.module.split(".")[0] in ("rcir", "training"):
                modules |= {
                    module
                    for alias in node.names
                    for module in defining_modules(node.module, alias.name)
                }
    return frozenset(modules)


def defining_modules(module: str, name: str) -> set[str]:
    """Return the modules in which an imported name, or the bases of a class, are defined."""
    try:
        value = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return {f"{module}.{name}"}
    classes = value.__mro__ if isinstance(value, type) else [value]
    return {getattr(each, "__module__", None) or f"{module}.{name}" for each in classes}


def tests_of(mutant: Mutant, root: Path) -> list[str]:
    """Return the test files that import the mutated module, and all those of its package.

    What `conftest.py` imports counts for the tests beside it. Likely killers come first.
    """
    parts = Path(mutant.file).with_suffix("").parts
    module = ".".join(parts).removesuffix(".__init__")
    folder = root / "tests" / (parts[1] if parts[0] == "rcir" else parts[0])

    def imports_module(file: Path) -> bool:
        conftest = file.with_name("conftest.py")
        files = [file, conftest] if file.parent != root / "tests" and conftest.is_file() else [file]
        return any(module in imported_modules(each) for each in files)

    files = sorted((root / "tests").rglob("test_*.py"), key=lambda file: file.stat().st_size)
    distances = {file: (not imports_module(file)) + (file.parent != folder) for file in files}
    chosen = [file for file in files if file.parent == folder or imports_module(file)]
    return [str(file.relative_to(root)) for file in sorted(chosen, key=distances.__getitem__)]


def run(
    tests: list[str], tree: Path, survived: tuple[int, ...] = (PASSED, NONE_SELECTED)
) -> str | None:
    """Run tests in a copy of the tree; return the one that failed, or None.

    Args:
        tests: names of tests and files, and options of pytest.
        tree: the copy.
        survived: exit statuses that are no failure.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, *PYTEST, f"--basetemp={tree}-tmp", f"--timeout={HANG_S}", *tests],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    if process.returncode in survived:
        return None
    failures = [
        line.partition(" ")[2].partition(" - ")[0]
        for line in process.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    return failures[0] if failures else ABORTED


def verify(tests: list[str], tree: Path) -> None:
    """Exit unless all these tests pass in a copy without a mutant."""
    if failing := run(tests, tree, (PASSED,)):
        raise SystemExit(f"error: {failing} fails without a mutant: mend it first")


def not_copied(folder: str, names: list[str]) -> list[str]:
    """Return the names in a folder that a copy of the tree does not need."""
    at_root = {".git", ".venv", "runs", "mlruns"} if Path(folder) == ROOT else set()
    return [
        name for name in names if name in {*at_root, "__pycache__"} or name.endswith(".egg-info")
    ]


@contextmanager
def copies(number: int) -> Iterator[Queue[Path]]:
    """Yield copies of the tree, to be taken and to be put back."""
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for i in range(number):
            tree = Path(folder, f"tree-{i}")
            shutil.copytree(ROOT, tree, ignore=not_copied)
            trees.put(tree)
        yield trees


@contextmanager
def applied(mutant: Mutant, trees: Queue[Path]) -> Iterator[Path]:
    """Yield a copy of the tree with a mutant, which is removed afterwards."""
    tree = trees.get()
    file = tree / mutant.file
    source = file.read_bytes()
    file.write_bytes(mutant.apply(source))
    try:
        yield tree
    finally:
        file.write_bytes(source)
        trees.put(tree)


def judge(mutant: Mutant, trees: Queue[Path], earlier: str | None) -> str | None:
    """Return the test that kills a mutant, or None if it survives."""
    with applied(mutant, trees) as tree:
        # If the test has vanished since, or cannot be imported, all tests decide.
        if earlier and (killer := run([earlier], tree, (PASSED, NOT_FOUND, NONE_SELECTED))):
            return killer
        tests = tests_of(mutant, tree)
        return run(tests, tree) if tests else None


def main() -> None:
    """Draw mutants, run the tests on each, and print the share that is killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=100, help="number of mutants (100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (0)")
    parser.add_argument("--processes", type=int, default=1, help="mutants judged at a time (1)")
    parser.add_argument("--output", type=Path, help="JSON file of the judged mutants")
    parser.add_argument("--earlier", type=Path, help="output of an earlier run")
    options = parser.parse_args()
    rows = json.loads(options.earlier.read_text()) if options.earlier else []
    earlier = {
        (row["file"], row["line"], row["column"]): row["killed_by"]
        for row in rows
        if row["killed_by"] != ABORTED
    }

    with copies(options.processes) as trees:
        verify(["--collect-only", "tests"], trees.queue[0])

        def judged(mutant: Mutant) -> dict[str, object]:
            place = mutant.file, mutant.line, mutant.column
            killer = judge(mutant, trees, earlier.get(place))
            verdict = f"killed by {killer}" if killer else "SURVIVED"
            change = f"{mutant.original} -> {mutant.replacement}".replace("\n", " ")
            print(
                f"{mutant.file}:{mutant.line} {mutant.kind}: {change[:100]}: {verdict}", flush=True
            )
            return {**asdict(mutant), "killed_by": killer}

        with ThreadPoolExecutor(options.processes) as pool:
            rows = list(pool.map(judged, draw(ROOT, options.mutants, options.seed)))
        if killers := sorted({row["killed_by"] for row in rows} - {None, ABORTED}):
            verify(killers, trees.queue[0])
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    killed = Counter(row["kind"] for row in rows if row["killed_by"])
    for kind, number in Counter(row["kind"] for row in rows).items():
        print(f"{kind}: {killed[kind]} of {number} killed")
    print(f"mutation score: {killed.total()} of {len(rows)} killed")


if __name__ == "__main__":
    main()
