"""Certified sets for vectors that people already have: sizes and risk, time, weight.

The photographs are CUB-200-2011, kinds 26 to 50, embedded by EfficientNet-Lite0 as ImageNet left
it. Over random divisions into gallery and queries, and of the queries, 300 calibrate; the risk is
measured on those that are left.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import parser, report, sized
from cub import birds, gallery_and_queries
from scipy.stats import betabinom

import rcir
from rcir.index import build_index
from rcir.risk import allowed_misses

ALPHA = DELTA = 0.1
SPLITS, DIVISIONS = sized((20, 10), (2, 2))  # 200 re-splits
CALIBRATION = sized(300, 60)
GALLERY, DIM, ASKED, GROWN = sized((100_000, 768, 5000, 1000), (2000, 32, 300, 50))
LABELS = sized(5000, 50)
INTRINSIC, SPREAD = 24, 0.8
TIMES = sized(7, 1)
ROOT = Path(__file__).parents[1]


def on_birds() -> tuple[list[list[str]], dict[str, float]]:
    """Mean sizes and risk over re-splits."""
    table = birds()
    sizes, constants, risks = [], [], []
    for split in range(SPLITS):
        gallery, queries = gallery_and_queries(table, split)
        retriever = rcir.Retriever.from_embeddings(gallery.vectors, gallery.ids, gallery.labels)
        labelled = retriever.labelled(queries.vectors, queries.labels)
        results = retriever.search_labelled(labelled)
        rng = np.random.default_rng(split)
        for _ in range(DIVISIONS):
            calibrating, left = np.split(rng.permutation(len(labelled)), [CALIBRATION])
            tuning, test = np.split(left, [len(left) // 2])
            report = retriever.calibrate_splits(
                results[tuning], results[calibrating], alphas=(ALPHA,)
            )
            answers = retriever.retrieve(queries.vectors[test], ALPHA, DELTA)
            truth = np.asarray(queries.labels)[test].tolist()
            missed = [
                name not in answer.labels for name, answer in zip(truth, answers, strict=True)
            ]
            risks.append(np.mean(missed))
            sizes.append(np.mean([answer.size for answer in answers]))
            constants.append(report.rows[0].constant_size)
    above = float(np.mean(np.asarray(risks) > ALPHA))
    # Of as many test queries as there are, whose own noise is added to that of the calibration.
    allowed = allowed_misses(CALIBRATION, ALPHA, DELTA)
    law = betabinom(len(test), allowed + 1, CALIBRATION - allowed)
    figures = {
        "cub_size_over_constant": float(np.mean(sizes) / np.mean(constants)),
        "violation_rate": above,
        "violation_expected": float(law.sf(np.floor(ALPHA * len(test)))),
    }
    row = [f"{np.mean(sizes):.2f}", f"{np.mean(constants):.2f}", f"{np.mean(risks):.3f}"]
    return [["CUB, kinds 26 to 50", *row, f"{above:.3f}"]], figures


def drawn(n: int, seed: int, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of overlapping clusters that vary in few directions; the number of each one's."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(len(centres), size=n)
    inner = centres[labels] + SPREAD * rng.standard_normal((n, INTRINSIC))
    directions = np.random.default_rng(0).standard_normal((INTRINSIC, DIM)).astype(np.float32)
    return inner.astype(np.float32) @ directions, labels


def at_size() -> dict[str, float]:
    """Seconds of `rcir certify`, and of calibrating again after a gallery has grown."""
    centres = np.random.default_rng(0).standard_normal((LABELS, INTRINSIC))
    gallery, queries, new = (
        drawn(n, seed, centres) for seed, n in enumerate((GALLERY, ASKED, GROWN))
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, (vectors, labels) in (("gallery", gallery), ("queries", queries)):
            np.savez(f"{folder}/{name}.npz", vector=vectors, label=labels)
        command = ["certify", "--gallery", f"{folder}/gallery.npz", "--output", f"{folder}/out"]
        command += ["--queries", f"{folder}/queries.npz", "--alpha", "0.1", "0.3"]
        started = time.perf_counter()
        asked = [sys.executable, "-m", "rcir.cli", *command]
        outcome = subprocess.run(asked, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        if outcome.returncode not in (0, 3):
            raise RuntimeError(f"rcir certify ended with status {outcome.returncode}")
    retriever = rcir.Retriever.from_embeddings(gallery[0], labels=gallery[1])
    retriever.calibrate(*queries, query_uncertainty="encoder")
    retriever.add(new[0], [f"new {row}" for row in range(GROWN)], new[1])
    unit = retriever.searcher.options.checked(queries[0])
    index = build_index(retriever.searcher.options.checked(np.concatenate([gallery[0], new[0]])))
    seconds_of: tuple[list[float], list[float]] = ([], [])
    for _ in range(TIMES):
        for measured, run in zip(
            seconds_of,
            (retriever.recalibrate, lambda: index.search(unit, retriever.depth)),
            strict=True,
        ):
            started = time.perf_counter()
            run()
            measured.append(time.perf_counter() - started)
    ratio = float(np.median(seconds_of[0]) / np.median(seconds_of[1]))
    return {"certify_seconds": seconds, "recalibrate_over_search": ratio}


IMPORT = """
import time
started = time.perf_counter()
import numpy as np, rcir
vectors = np.eye(100, dtype=np.float32)
rcir.Retriever.from_embeddings(vectors, labels=np.arange(100))
print(time.perf_counter() - started)
"""


def bare_core() -> dict[str, float]:
    """What the extra "cpu" weighs in an environment of its own, and how long it takes to import."""
    uv = Path(sys.executable).with_name("uv")
    with tempfile.TemporaryDirectory() as folder:
        source, environment = Path(folder) / "source", Path(folder) / "environment"
        python = environment / "bin" / "python"
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", source]
        subprocess.run(build, check=True, capture_output=True)
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, environment], check=True)
        install = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python]
        constraints = ["--constraint", ROOT / "constraints.txt"]
        wheels = [f"{wheel}[cpu]" for wheel in source.glob("dist/*.whl")]
        subprocess.run([*install, *constraints, *wheels], check=True)
        files = [path for path in environment.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files if not path.is_symlink())
        seconds = [
            float(subprocess.run([python, "-c", IMPORT], check=True, capture_output=True).stdout)
            for _ in range(5)
        ]
    return {"core_install_mb": size / 2**20, "import_seconds": float(np.median(seconds))}


def main() -> None:
    """Measure all of it."""
    options = parser(__doc__).parse_args()
    rows, figures = on_birds()
    figures |= at_size() | bare_core()
    columns = ["queries", "mean size", "constant", "risk", "above alpha"]
    report(f"Vectors, alpha = delta = {ALPHA}", columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
