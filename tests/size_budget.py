"""Print the size of the project; fail if it exceeds the budget in pyproject.toml.

    python -m tests.size_budget

A line of code is neither blank nor a comment, nor part of a docstring or an import. Whoever raises
a budget says why in the commit.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ["rcir", "training", "calibration", "tuning"]


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
    return 1 if exceeded else 0


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
