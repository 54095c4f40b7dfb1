"""Measure which share of mistakes with devices the simulated GPU finds.

Removes every `device=...`, `.to(device)` and `.cpu()`, and puts a tensor of the CPU in the place of
every `.new_zeros(...)` and the like, one at a time; runs `tests/training/on_simulated_gpu.py` on
each of these mutants, and prints the share that fails, and what was not found:

    python -m tests.device_mutation_score

Mutants that fail on the CPU already do not count: any test finds them. Not all others are mistakes:
a GPU takes single numbers and indices from the CPU.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import BaseContext
from pathlib import Path

from tests.mutation_score import ROOT, Mutant, applied, copies

PACKAGES = ("rcir", "training")
NEW = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
HANG_S = 600
FOUND, NOT_FOUND, FAILS_ON_CPU = "found", "NOT FOUND", "fails on the CPU"
EXIT_STATUS = {FOUND: 1, NOT_FOUND: 0, FAILS_ON_CPU: 3}


def without_device(call: ast.Call) -> ast.expr | None:
    """Return the same call without its device, on the CPU; None if it has none."""
    function, keywords = call.func, {each.arg: each for each in call.keywords}
    if "device" in keywords and not isinstance(keywords["device"].value, ast.Constant):
        rest = [each for each in call.keywords if each.arg != "device"]
        return ast.Call(function, call.args, rest)
    if not isinstance(function, ast.Attribute):
        return None
    if function.attr == "cpu" and not call.args:
        return function.value
    if function.attr == "to" and call.args:
        target, *others = call.args
        name = ast.unparse(target)
        if name.startswith("torch.") or name.endswith("dtype"):
            return None
        options = [each for each in call.keywords if each.arg != "non_blocking"]
        if not name.endswith(("device", "CPU")):  # like another tensor
            others = [ast.Attribute(target, "dtype"), *others]
        return ast.Call(function, others, options) if others or options else function.value
    if function.attr in NEW:
        maker = ast.parse(f"__import__('torch').{function.attr.removeprefix('new_')}").body[0].value
        dtype = ast.keyword("dtype", ast.Attribute(function.value, "dtype"))
        extra = [] if "dtype" in keywords else [dtype]
        return ast.Call(maker, call.args, [*call.keywords, *extra])
    return None


def mutants() -> Iterator[Mutant]:
    """Yield every mutant."""
    for file in sorted(each for name in PACKAGES for each in (ROOT / name).rglob("*.py")):
        source = file.read_text()
        for node in ast.walk(ast.parse(source)):
            changed = without_device(node) if isinstance(node, ast.Call) else None
            if changed is not None:
                place = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
                yield Mutant(
                    "device",
                    file.relative_to(ROOT).as_posix(),
                    *place,
                    ast.get_source_segment(source, node),
                    f"({ast.unparse(changed)})",
                )


def run_checks(tree: Path) -> None:
    """Run the checks on a copy of the tree, and exit with the status of the result."""
    os.chdir(tree)
    sys.path[:] = [str(tree), *(each for each in sys.path if Path(each).resolve() != ROOT)]
    result = FAILS_ON_CPU
    try:
        from tests.training.on_simulated_gpu import CPU, checks, require_equal

        for _, work in checks():
            result = FAILS_ON_CPU
            expected = work(CPU)
            result = FOUND
            require_equal(work, expected)
        result = NOT_FOUND
    finally:
        os._exit(EXIT_STATUS[result])


def judge(context: BaseContext, tree: Path) -> str:
    """Return what the checks find in a copy of the tree."""
    process = context.Process(target=run_checks, args=(tree,))
    process.start()
    process.join(HANG_S)
    if process.is_alive():
        process.kill()
        return FOUND
    return next(name for name, status in EXIT_STATUS.items() if status == process.exitcode)


def main() -> None:
    """Run the checks on every mutant, and print the share that is found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1, help="mutants judged at a time (1)")
    options = parser.parse_args()
    # Processes start with what takes seconds to import.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.simulated_gpu", "torch._dynamo", "ray.train", "faiss"])
    with copies(options.processes) as trees:
        if judge(context, trees.queue[0]) != NOT_FOUND:
            raise SystemExit("error: the checks fail without a mutant: mend that first")

        def judged(mutant: Mutant) -> str:
            with applied(mutant, trees) as tree:
                result = judge(context, tree)
            change = f"{mutant.original} -> {mutant.replacement}".replace("\n", " ")
            print(f"{mutant.file}:{mutant.line}: {change[:150]}: {result}", flush=True)
            return result

        with ThreadPoolExecutor(options.processes) as pool:
            results = Counter(pool.map(judged, mutants()))
    n = results[FOUND] + results[NOT_FOUND]
    print(f"device mutation score: {results[FOUND]} of {n} found")


if __name__ == "__main__":
    main()
