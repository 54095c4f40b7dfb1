"""Approximate indexes: speed at equal recall, memory, certified sizes, and ten million vectors.

HNSW and IVF-PQ are compared with exact search of a million vectors, with the fastest search
parameters of a grid that find 99% of the 200 nearest. The vectors are clustered (products in
categories, along 24 directions, with a little noise; queries are further images of the products),
or Fashion-MNIST (128 principal components, each image repeated with noise; queries are the test
images). One item is added to a million, and ten million vectors are drawn shard by shard and
indexed, each in a separate process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is imported

import faiss
import numpy as np
from common import FORM, parser, report, sized

import rcir
from rcir.data import DataConfig, data_root
from rcir.data.datasets.small_images import read_fashion_mnist
from rcir.data.relevance import SameLabel
from rcir.errors import DataUnavailable
from rcir.index import DEPTH, IndexConfig, build_index, nearest_others, recall_of
from rcir.retrieval.gallery import Gallery
from rcir.retrieval.search import Searcher

SEED = 20_240
N, DIM = sized((1_000_000, 128), (30_000, 32))
CATEGORIES, PRODUCTS, INTRINSIC = sized(2000, 60), 10, 24
OFFSET, SPREAD, NOISE = 0.3, 0.45, 0.02
SIZES = sized((300, 4_000, 1_000), (50, 400, 200))  # queries for speed, calibration, and test
LISTS, CODES, TRAINED = sized((2048, 64, 65_536), (64, 16, 10_000))
PROBES = (4, 8, 16, 24, 32, 48, 64, 96, 128)
RANKED = [{"nprobe": n, "k_factor": f} for f in (1.5, 2.0, 3.0, 4.0) for n in PROBES]
WIDER = (200, 256, 320, 340, 360, 380, 400, 512, 800)
RECALL, ALPHA, DELTA = 0.99, 0.1, 0.1
LARGE, LARGE_DIM, SHARD = sized((10_000_000, 96, 250_000), (60_000, 32, 15_000))
LARGE_LISTS, LARGE_CODES = sized((2048, 48), (64, 16))
TIMES = sized(3, 1)


def draw(n: int, dim: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the vectors of a shard, and the product of each."""
    fixed = np.random.default_rng(SEED)
    centres = np.repeat(fixed.standard_normal((CATEGORIES, INTRINSIC), np.float32), PRODUCTS, 0)
    centres += np.float32(OFFSET) * fixed.standard_normal(centres.shape, np.float32)
    directions = fixed.standard_normal((INTRINSIC, dim), np.float32) / np.sqrt(np.float32(dim))
    rng = np.random.default_rng([SEED, number])
    labels = rng.integers(len(centres), size=n)
    inner = centres[labels] + np.float32(SPREAD) * rng.standard_normal((n, INTRINSIC), np.float32)
    noise = np.float32(NOISE) * rng.standard_normal((n, dim), np.float32)
    return inner @ directions + noise, labels


def seconds_per_query(index: object, queries: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the seconds per query of the fastest of several batches, and the positions."""
    best = np.inf
    for _ in range(TIMES):
        started = time.perf_counter()
        positions = index.search(queries, DEPTH)[1]
        best = min(best, (time.perf_counter() - started) / len(queries))
    return best, positions


def fastest(index: object, grid: list, queries: np.ndarray, truth: np.ndarray) -> tuple:
    """Give an index the first parameters of a grid that reach the recall, or come nearest.

    Returns the parameters, the seconds per query and the recall.
    """
    best = {}, np.inf, -1.0
    for parameters in grid:
        set_parameters(index, parameters)
        seconds, positions = seconds_per_query(index, queries)
        best = max(best, (parameters, seconds, recall_of(positions, truth)), key=itemgetter(2))
        if best[2] >= RECALL:
            break  # wider searches are slower
    set_parameters(index, best[0])
    return best


def set_parameters(index: object, parameters: dict) -> None:
    index.options = replace(index.options, **parameters)


def describe(parameters: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in parameters.items())


def calibrate(index: object, gallery: tuple, queries: tuple) -> rcir.Retriever:
    """Return a retriever over an index, calibrated through it."""
    vectors, labels = gallery
    ids = np.array([str(row) for row in range(len(vectors))], object)
    norms = np.linalg.norm(vectors, axis=1).astype(np.float32)
    retriever = rcir.Retriever(Searcher(Gallery(ids, norms, SameLabel(labels)), index))
    retriever.calibrate(
        *queries, "quantile", alphas=(ALPHA,), delta=DELTA, query_uncertainty="encoder"
    )
    return retriever


def mean_size(retriever: rcir.Retriever, queries: np.ndarray) -> float:
    return float(np.mean([answer.size for answer in retriever.retrieve(queries, ALPHA, DELTA)]))


def clustered() -> tuple:
    """Return a gallery and three sets of queries, each with labels."""
    return draw(N, DIM, 0), *(draw(n, DIM, 1 + i) for i, n in enumerate(SIZES))


def fashion() -> tuple:
    """Do so for Fashion-MNIST, with noise of half the distance to the nearest other image."""
    import torch  # not in the process whose memory is measured

    source = read_fashion_mnist(data_root(DataConfig()))
    parts = [part.images.reshape(len(part), -1) / 255 for part in (source.train, source.queries)]
    mean = parts[0].mean(axis=0)
    axes = np.linalg.svd(np.cov((parts[0] - mean).T))[0][:, :DIM]
    gallery_images, query_images = (((part - mean) @ axes).astype(np.float32) for part in parts)
    labels, query_labels = source.train.labels, source.queries.labels
    apart = np.median(nearest_others(torch.from_numpy(gallery_images[:5_000]), 1)[0])
    rng = np.random.default_rng(SEED)
    rows = np.arange(N) % len(gallery_images)
    scale = np.float32(apart / 2 / np.sqrt(DIM))
    gallery = gallery_images[rows] + scale * rng.standard_normal((N, DIM), np.float32)
    order = np.split(rng.permutation(len(query_images)), np.cumsum(SIZES))[: len(SIZES)]
    return (gallery, labels[rows]), *((query_images[some], query_labels[some]) for some in order)


def compare(sets: tuple, figures: dict[str, float], prefix: str = "") -> list[list[str]]:
    gallery, queries, calibration, fresh = sets
    rows, built = [], {}
    flat = build_index(gallery[0])
    flat_seconds, truth = seconds_per_query(flat, queries[0])
    rows.append(["flat", "", f"{1 / flat_seconds:.1f}", "1", f"{flat.memory / 2**20:.0f}", ""])
    print(rows[-1], flush=True)
    codes = {"nlist": LISTS, "m": CODES, "train_size": TRAINED}
    configs = {
        "hnsw": (IndexConfig("hnsw"), [{"ef_search": ef} for ef in WIDER]),
        "ivf-pq": (IndexConfig("ivf-pq", codes), RANKED),
    }
    for name, (config, grid) in configs.items():
        started = time.perf_counter()
        index = build_index(gallery[0], config)
        minutes = (time.perf_counter() - started) / 60
        parameters, seconds, recall = fastest(index, grid, queries[0], truth)
        # One after the other, so that other work on the machine slows both.
        seconds = min(seconds, seconds_per_query(index, queries[0])[0])
        flat_seconds = min(flat_seconds, seconds_per_query(flat, queries[0])[0])
        built[name] = index, seconds
        cells = (f"{1 / seconds:.1f}", f"{recall:.4f}", f"{index.memory / 2**20:.0f}")
        rows.append([name, describe(parameters), *cells, f"{minutes:.1f}"])
        print(rows[-1], flush=True)
    figures[prefix + "hnsw_speedup"] = flat_seconds / built["hnsw"][1]
    figures[prefix + "ivfpq_speedup"] = flat_seconds / built["ivf-pq"][1]
    figures[prefix + "ivfpq_memory_over_flat"] = built["ivf-pq"][0].memory / flat.memory
    retriever = calibrate(built["hnsw"][0], gallery, calibration)
    exact = calibrate(flat, gallery, calibration)
    sizes = [mean_size(r, fresh[0][: len(fresh[0]) // 2]) for r in (retriever, exact)]
    figures[prefix + "certified_size_over_flat"] = sizes[0] / sizes[1]
    ratios = []
    raw_parameters = faiss.SearchParametersHNSW(efSearch=retriever.index.options.ef_search)
    for _ in range(max(TIMES, 3)):
        times = []
        for run in (
            lambda: retriever.retrieve(fresh[0], ALPHA, DELTA),
            lambda: retriever.index._index.search(fresh[0], DEPTH, params=raw_parameters),
        ):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        ratios.append(times[0] / times[1])
    figures[prefix + "retrieve_over_raw"] = float(np.median(ratios))
    started = time.perf_counter()
    gone = np.random.default_rng(SEED).choice(N, N // 1000, replace=False)
    built["hnsw"][0].remove(gone)
    figures[prefix + "remove_ms"] = 1000 * (time.perf_counter() - started)
    print(figures, flush=True)
    return rows


def ten_million() -> None:
    """Build and search an index, and print what that took, as JSON."""
    started = time.perf_counter()
    options = {"nlist": LARGE_LISTS, "m": LARGE_CODES, "nprobe": 16, "train_size": TRAINED}
    index = None
    for number in range(LARGE // SHARD):
        vectors, _ = draw(SHARD, LARGE_DIM, 100 + number)
        if index is None:
            index = build_index(vectors, IndexConfig("ivf-pq", options))
        else:
            index.add(vectors)
    minutes = (time.perf_counter() - started) / 60
    peak = peak_memory() / 2**30
    queries, _ = draw(SIZES[0], LARGE_DIM, 1)
    nearest = faiss.ResultHeap(len(queries), DEPTH)
    for number in range(LARGE // SHARD):
        distances, positions = faiss.knn(queries, draw(SHARD, LARGE_DIM, 100 + number)[0], DEPTH)
        nearest.add_result(distances, positions + number * SHARD)
    nearest.finalize()
    parameters, seconds, recall = fastest(index, RANKED, queries, nearest.I)
    print(
        json.dumps(
            {
                "minutes": minutes,
                "peak": peak,
                "per_second": 1 / seconds,
                "n": len(index),
                "parameters": describe(parameters),
                "recall": recall,
                "memory": index.memory / 2**20,
            }
        )
    )


def add_one() -> None:
    """Add an item to a gallery, and print what that took, in copies of its vectors, as JSON."""
    rng = np.random.default_rng(SEED)
    vectors = rng.standard_normal((N, DIM), np.float32)
    retriever = rcir.Retriever.from_embeddings(vectors, labels=rng.integers(10_000, size=N))
    retriever.changes()  # the digests of the gallery before are known
    copies, started = [vectors.copy()], time.perf_counter()
    copies.append(vectors.copy())  # into new memory, as the copy of the index is
    seconds = time.perf_counter() - started
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the memory of now
    before, started = peak_memory(), time.perf_counter()
    retriever.add(vectors[:1] + 1, ["new"], [3])
    time_in_copies = (time.perf_counter() - started) / seconds
    memory = (peak_memory() - before) / vectors.nbytes
    print(json.dumps({"time": time_in_copies, "memory": memory}))


def peak_memory() -> int:
    """Return the largest number of bytes of this process that were in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def apart(part: str) -> dict[str, float]:
    """Return the figures that a part of this script prints in a process of its own."""
    command = [sys.executable, Path(__file__), part, *FORM]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--ten-million", action="store_true", help="that part alone")
    command.add_argument("--add-one", action="store_true", help="that part alone")
    options = command.parse_args()
    if options.ten_million or options.add_one:
        return ten_million() if options.ten_million else add_one()
    figures: dict[str, float] = {}
    rows = compare(clustered(), figures)
    try:
        clothes = compare(fashion(), figures, "fashion_")
        rows += [[f"fashion, {name}", *cells] for name, *cells in clothes]
    except DataUnavailable as error:
        print(error)
    added = apart("--add-one")
    figures["add_one_copies_of_time"] = added["time"]
    figures["add_one_copies_of_memory"] = added["memory"]
    large = apart("--ten-million")
    figures["build_minutes_10m"] = large["minutes"]
    figures["peak_gib_10m"] = large["peak"]
    figures["recall_10m"] = large["recall"]
    rows.append(
        [
            f"ivf-pq, {large['n']:,} x {LARGE_DIM}",
            large["parameters"],
            f"{large['per_second']:.1f}",
            f"{large['recall']:.4f}",
            *(f"{large['memory']:.0f}", f"{large['minutes']:.1f}"),
        ]
    )
    columns = ["index", "parameters", "queries/s", "recall", "MiB in memory", "minutes to build"]
    title = f"{N:,} vectors of {DIM} numbers, {DEPTH} nearest, one thread"
    report(title, columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
