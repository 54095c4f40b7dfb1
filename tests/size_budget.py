"""Print the size and the structure of the project; fail beyond the budget or the limits below.

    python -m tests.size_budget

A line of code is neither blank nor a comment, nor part of a docstring or an import. The budget is
in pyproject.toml; whoever raises it says why in the commit. Structure is the share of the possible
imports between the files of a package, and functions with many positional parameters.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import defaultdict
from itertools import permutations
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PRODUCT = ["rcir", "training", "calibration", "tuning"]
SMALL_PACKAGE = range(3, 8)  # files
MAX_SMALL_SHARE = 0.6  # of the possible imports between files
MAX_SHARES = {"rcir.risk": 0.35}
MAX_POSITIONAL = 6


def main() -> int:
    """Print each size beside its budget; return 1 if one is exceeded."""
    sources = [path.read_text() for path in _tracked(*(f"{part}/*.py" for part in PRODUCT))]
    benchmarks = _tracked("benchmarks/*.py")
    sizes = {
        "product_lines": sum(map(_lines, sources)),
        "product_code": sum(map(_code_lines, sources)),
        "test_lines": sum(_lines(path.read_text()) for path in _tracked("tests/*.py")),
        "benchmark_files": len(benchmarks),
        "benchmark_lines": sum(_lines(path.read_text()) for path in benchmarks),
        "document_words": sum(
            len(path.read_text().split()) for path in _tracked("README.md", "docs/*.md")
        ),
    }
    budget = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["rcir"]["size-budget"]
    for name, size in sizes.items():
        print(f"{name:16}{size:>8,} of {budget[name]:,}")
    exceeded = [name for name, size in sizes.items() if size > budget[name]]
    if exceeded:
        print(
            f"error: over budget: {', '.join(exceeded)}; delete something, or raise the budget in "
            "pyproject.toml and say why in the commit"
        )
    beyond = _check_structure()
    return 1 if exceeded or beyond else 0


def _check_structure() -> list[str]:
    """Print how the packages are connected, and what is beyond the limits; return the latter."""
    beyond = []
    for package, (n_files, n_imports) in sorted(_sibling_imports().items()):
        share = n_imports / (n_files * (n_files - 1) / 2)
        limit = MAX_SHARES.get(package, MAX_SMALL_SHARE if n_files in SMALL_PACKAGE else 1)
        print(f"{package:20}{n_files:>4} files, {n_imports:>3} imports: {share:>4.0%} of possible")
        if share > limit:
            beyond.append(f"{package} has more than {limit:.0%} of the possible imports")
    for path in _tracked(*(f"{part}/*.py" for part in PRODUCT)):
        for name in _with_many_parameters(path.read_text()):
            beyond.append(
                f"{name} in {path.relative_to(ROOT)} has more than {MAX_POSITIONAL} positional "
                "parameters"
            )
    if beyond:
        print(f"error: {'; '.join(beyond)}")
    return beyond


def _sibling_imports() -> dict[str, tuple[int, int]]:
    """Return the numbers of files and of imports between them, by package of three or more."""
    graph = grimp.build_graph(*PRODUCT, cache_dir=None)
    packages = defaultdict(list)
    for module in graph.modules:
        if "." in module and not graph.find_children(module):
            packages[module.rpartition(".")[0]].append(module)
    return {
        package: (len(files), sum(_imports(graph, *pair) for pair in permutations(files, 2)))
        for package, files in packages.items()
        if len(files) >= SMALL_PACKAGE.start
    }


def _imports(graph: grimp.ImportGraph, importer: str, imported: str) -> bool:
    return graph.direct_import_exists(importer=importer, imported=imported)


def _with_many_parameters(source: str) -> list[str]:
    """Return the names of the functions with more than `MAX_POSITIONAL` positional parameters."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
            if len(parameters) - (parameters[:1] in (["self"], ["cls"])) > MAX_POSITIONAL:
                names.append(node.name)
    return names


def _tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).exists()]


def _lines(text: str) -> int:
    return len(text.splitlines())


def _code_lines(text: str) -> int:
    excluded: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            excluded.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = node.body[0] if node.body and ast.get_docstring(node) is not None else None
            if docstring is not None:
                end = docstring.end_lineno or docstring.lineno
                excluded.update(range(docstring.lineno, end + 1))
    return sum(
        number not in excluded and bool(line.strip()) and not line.strip().startswith("#")
        for number, line in enumerate(text.splitlines(), start=1)
    )


if __name__ == "__main__":
    sys.exit(main())
