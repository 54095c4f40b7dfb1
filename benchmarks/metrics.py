"""The cost of retrieval metrics beyond the search that they measure, and against peers.

R@k and mAP@k for k = 1, 5, 10 and MAP@R of 10,000 queries against 60,000 items of 128 dimensions
and 600 classes, from the positions that FAISS found: ours with the look-up of labels and the count
of matches. PyTorch Metric Learning knows R@1 and MAP@R of these; torchmetrics R@k, from tables of
relevance that it is handed ready-made, here of the first 10 candidates. Each is timed on the part
that it can do, without its search; values are compared where definitions agree.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from common import parser, report, sized
from numpy.typing import NDArray
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import FaissKNN
from torchmetrics.retrieval import RetrievalHitRate

from rcir.data.relevance import SameLabel
from rcir.metrics import RankingScores, score_rankings

QUERIES, GALLERY, DIMENSIONS, CLASSES = sized((10_000, 60_000, 128, 600), (100, 600, 16, 30))
T = TypeVar("T")
KS, NOISE = (1, 5, 10), 1.7
REPEATS, FAST_REPEATS = sized((5, 15), (1, 2))

# Our part in a process of its own: its peak memory, that of what it imports included.
ALONE = """
import resource, sys
import numpy as np
from rcir.data.relevance import SameLabel
from rcir.metrics import score_rankings
arrays = np.load(sys.argv[1])
queries, gallery = SameLabel(arrays["labels"]), SameLabel(arrays["gallery"])
score_rankings(queries.of(gallery, arrays["positions"]), queries.totals(gallery))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


class TimedSearch(FaissKNN):
    """The peer's own search, which notes how long it took and what it found."""

    seconds: float
    positions: NDArray[np.int64]

    def __call__(self, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        started = time.perf_counter()
        distances, positions = super().__call__(*arguments)
        self.seconds = time.perf_counter() - started
        self.positions = positions.numpy()
        return distances, positions


def clusters() -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int64], NDArray[np.int64]]:
    """Unit vectors of queries and gallery around the centres of their classes, and labels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, QUERIES + GALLERY)
    centres = rng.standard_normal((CLASSES, DIMENSIONS), np.float32)
    vectors = centres[labels] + NOISE * rng.standard_normal((len(labels), DIMENSIONS), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = torch.from_numpy(vectors)
    return unit[:QUERIES], unit[QUERIES:], labels[:QUERIES], labels[QUERIES:]


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Duration of one call, and its result."""
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def hit_rates(relevant: torch.Tensor) -> list[float]:
    """R@k by torchmetrics."""
    score = torch.arange(relevant.shape[1], 0, -1.0).expand(relevant.shape)
    query = torch.arange(len(relevant))[:, None].expand(relevant.shape)
    return [RetrievalHitRate(top_k=k)(score, relevant, query).item() for k in KS]


def peak_gib(labels: SameLabel, gallery: SameLabel, positions: NDArray[np.int64]) -> float:
    """Peak memory of a process that does our part only."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.npz")
        np.savez(path, labels=labels.labels, gallery=gallery.labels, positions=positions)
        command = [sys.executable, "-c", ALONE, str(path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout) / 2**20


def main() -> None:
    """Measure in alternation, so that a slow moment of the machine hits all parts alike."""
    options = parser(__doc__).parse_args()
    vectors, items, own, theirs = clusters()
    queries, gallery = SameLabel(own), SameLabel(theirs)
    search = TimedSearch()
    figures_of_peer = ("precision_at_1", "mean_average_precision_at_r")
    calculator = AccuracyCalculator(
        figures_of_peer, k="max_bin_count", knn_func=search, device=torch.device("cpu")
    )

    def ours() -> RankingScores:
        relevant = queries.of(gallery, search.positions)
        return score_rankings(relevant, queries.totals(gallery), KS)

    names = ("search", "rcir", "PyTorch Metric Learning", "torchmetrics, R@k only")
    durations: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(REPEATS):
        whole, found = timed(lambda: calculator.get_accuracy(vectors, own, items, theirs))
        durations["search"].append(search.seconds)
        durations["PyTorch Metric Learning"].append(whole - search.seconds)
        for _ in range(FAST_REPEATS):
            seconds, scores = timed(ours)
            durations["rcir"].append(seconds)
        relevant = torch.from_numpy(queries.of(gallery, search.positions[:, : max(KS)]))
        seconds, rates = timed(lambda: hit_rates(relevant))  # noqa: B023
        durations["torchmetrics, R@k only"].append(seconds)

    median = {name: statistics.median(values) for name, values in durations.items()}
    differences = [scores.recall[1] - found["precision_at_1"]]
    differences.append(scores.map_at_r - found["mean_average_precision_at_r"])
    differences += [scores.recall[k] - rate for k, rate in zip(KS, rates, strict=True)]
    rows = [(name, f"{1e3 * seconds:.1f}") for name, seconds in median.items()]
    rows += [(f"R@{k}", f"{value:.4f}") for k, value in scores.recall.items()]
    rows += [(f"mAP@{k}", f"{value:.4f}") for k, value in scores.mean_average_precision.items()]
    rows += [("MAP@R", f"{scores.map_at_r:.4f}"), ("depth", str(search.positions.shape[1]))]
    figures = {
        "speedup_over_fastest_peer": min(median[name] for name in names[2:]) / median["rcir"],
        "metrics_over_search": median["rcir"] / median["search"],
        "largest_difference": max(map(abs, differences)),
        "peak_gib": peak_gib(queries, gallery, search.positions),
    }
    report("metrics beyond the search", ["part", "median ms"], rows, figures, options.json)


if __name__ == "__main__":
    main()
