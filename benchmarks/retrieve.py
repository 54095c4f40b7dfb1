"""The cost of `retrieve` beyond the encoder's forward pass and the raw FAISS search.

The demo's encoder and gallery, which is the hard case: a forward pass of the small network takes
tens of microseconds per image, so that every per-query step in Python would show. The first query
of a large gallery of vectors after it was loaded, against later ones. And, on one thread, a batch
of queries of a gallery of vectors against the search alone, and the calibration of such a gallery.
And the peak memory of `rcir embed`, if the weights are among the data sets.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import faiss
import numpy as np
import torch
from common import DIGITS, parser, report, sized
from PIL import Image

import rcir
from rcir.data import DataConfig, data_root, load_splits
from rcir.encoders.batches import BATCH

QUERIES, REPEATS, SINGLES = sized((1000, 30, 300), (50, 2, 2))
ITEMS, DIM = sized((1_000_000, 64), (5000, 8))
VECTORS, VECTOR_DIM, CALIBRATION = sized((100_000, 128, 5000), (2000, 32, 400))
LABELS = sized(1000, 20)
PHOTOGRAPHS, LITE0 = sized(2000, 10), "timm:tf_efficientnet_lite0"
ALPHA = DELTA = 0.1


def seconds(call: Callable[[], object]) -> float:
    """Duration of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def prepare() -> tuple[rcir.Retriever, faiss.Index]:
    """A trained and calibrated retriever and its bare index, made by other processes.

    This one then holds what a process that answers queries holds: neither Ray nor MLflow.
    """
    with tempfile.TemporaryDirectory() as folder:
        train = ["training", "--name", "run", "--storage", folder, "--epochs", "2"]
        train += ["--data.options", json.dumps(DIGITS)]
        for job in (train, ["calibration", "--run", f"{folder}/run"]):
            subprocess.run([sys.executable, "-m", *job], check=True, stdout=subprocess.DEVNULL)
        retriever = rcir.load(f"{folder}/run/retriever")
        vectors = np.load(retriever.version_folder / "index" / "vectors.npy")
        bare = faiss.IndexFlatL2(vectors.shape[1])
        bare.add(vectors)
        return retriever, bare


def after_loading() -> tuple[list[tuple[str, str]], dict[str, float]]:
    """Time the first queries after a large gallery was loaded, and after an item was added."""
    rng = np.random.default_rng(0)
    labels = rng.integers(1000, size=ITEMS + QUERIES)
    centres = rng.standard_normal((1000, DIM), np.float32)
    vectors = centres[labels] + 0.5 * rng.standard_normal((len(labels), DIM), np.float32)
    gallery = rcir.Retriever.from_embeddings(vectors[:ITEMS], labels=labels[:ITEMS])
    gallery.calibrate(vectors[ITEMS:], labels[ITEMS:], "constant")
    with tempfile.TemporaryDirectory() as folder:
        retriever = rcir.load(gallery.save(f"{folder}/retriever"))
    queries = vectors[ITEMS:]
    times = [
        seconds(partial(retriever.retrieve, query, ALPHA, DELTA)) for query in queries[:SINGLES]
    ]
    retriever.add(queries[:1], ["another"], labels[ITEMS : ITEMS + 1])
    figures = {
        "first_query_ms": 1e3 * times[0],
        "later_query_ms": 1e3 * statistics.median(times[1:]),
        "digests_of_added_item_ms": 1e3 * seconds(retriever.changes),
    }
    names = ("first query after loading", "later query", "digests after an item was added")
    rows = [
        (f"{name}, {ITEMS} items", f"{value:.2f}")
        for name, value in zip(names, figures.values(), strict=True)
    ]
    return rows, figures


def vectors_on_one_thread() -> tuple[list[tuple[str, str]], dict[str, float]]:
    """Time the calibration of a gallery of vectors, and a batch of queries against FAISS alone."""
    rng = np.random.default_rng(0)
    labels = rng.integers(LABELS, size=VECTORS + CALIBRATION + QUERIES)
    centres = rng.standard_normal((LABELS, VECTOR_DIM), np.float32)
    vectors = centres[labels] + 1.2 * rng.standard_normal((len(labels), VECTOR_DIM), np.float32)
    gallery, calibration, queries = np.split(vectors, [VECTORS, VECTORS + CALIBRATION])
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    retriever = rcir.Retriever.from_embeddings(gallery, labels=labels[:VECTORS])
    started = time.process_time()
    retriever.calibrate(calibration, labels[VECTORS : VECTORS + CALIBRATION])
    figures = {"calibrate_seconds": time.process_time() - started}
    raw = faiss.IndexFlatL2(VECTOR_DIM)
    raw.add(retriever.index.vectors)
    unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    answering, searching = [], []
    for _ in range(REPEATS):
        answering.append(seconds(lambda: retriever.retrieve(queries, ALPHA, DELTA)))
        searching.append(seconds(lambda: raw.search(unit, retriever.depth)))
    faiss.omp_set_num_threads(threads)
    ratio = statistics.median(answering) / statistics.median(searching)
    figures["retrieve_over_faiss_1000x128"] = ratio
    of = f"{QUERIES} queries, {VECTORS} vectors, d = {VECTOR_DIM}, one thread"
    rows = [
        (f"retrieve, {of}", f"{1e3 * statistics.median(answering):.2f}"),
        (f"FAISS search, {of}", f"{1e3 * statistics.median(searching):.2f}"),
    ]
    return rows, figures


EMBED = """
import resource, sys
from rcir.cli import main
main(["embed", *sys.argv[1:]])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


def memory_of_embedding() -> tuple[list[tuple[str, str]], dict[str, float]]:
    """Measure the peak memory of `rcir embed` on photographs of 500 x 375 pixels, with Lite0."""
    weights = data_root(DataConfig()) / "models" / "tf_efficientnet_lite0.safetensors"
    if not weights.is_file():
        return [], {}
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder, "photos")
        photos.mkdir()
        for number in range(PHOTOGRAPHS):
            coarse = Image.fromarray(rng.integers(0, 256, (15, 20, 3), np.uint8))
            coarse.resize((500, 375), Image.Resampling.BICUBIC).save(photos / f"{number}.jpg")
        command = [sys.executable, "-c", EMBED, str(photos), "--model", LITE0, "--checkpoint"]
        command += [str(weights), "--output", f"{folder}/vectors.parquet"]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak = float(printed.split()[-1])
    return [(f"GiB, embedding {PHOTOGRAPHS} photographs", f"{peak:.2f}")], {"embed_peak_gib": peak}


def main() -> None:
    """Measure in alternation, so that a slow moment of the machine hits all parts alike."""
    options = parser(__doc__).parse_args()
    retriever, raw = prepare()
    queries = list(load_splits(DataConfig("digits", options=DIGITS)).test.images[:QUERIES])
    tensor = retriever.preprocessing(queries)

    def forward(images: torch.Tensor) -> np.ndarray:
        parts = [retriever.encoder.embed(batch).vectors for batch in images.split(BATCH)]
        return torch.cat(parts).numpy()

    def bare() -> object:
        return raw.search(forward(tensor), retriever.depth)

    # In alternation: what runs next finds the threads of what ran before still spinning.
    parts: dict[str, list[float]] = {"retrieve": [], "forward pass and FAISS search": []}
    for _ in range(REPEATS):
        parts["retrieve"].append(seconds(lambda: retriever.retrieve(queries, ALPHA, DELTA)))
        parts["forward pass and FAISS search"].append(seconds(bare))
    ratios = [whole / part for whole, part in zip(*parts.values(), strict=True)]
    overheads = []
    for number in range(SINGLES):
        row = number % QUERIES
        one, image = queries[row], tensor[row : row + 1]
        whole = seconds(lambda: retriever.retrieve(one, ALPHA, DELTA))  # noqa: B023
        alone = seconds(lambda: raw.search(forward(image), retriever.depth))  # noqa: B023
        overheads.append(1e3 * (whole - alone))

    rows = [
        (f"{name}, {QUERIES} queries", f"{1e3 * statistics.median(values):.2f}")
        for name, values in parts.items()
    ]
    rows.append(("overhead, one query", f"{statistics.median(overheads):.3f}"))
    loaded_rows, figures = after_loading()
    vector_rows, vector_figures = vectors_on_one_thread()
    memory_rows, memory_figures = memory_of_embedding()
    figures |= (
        vector_figures
        | memory_figures
        | {
            "batch_overhead_ratio": statistics.median(ratios),
            "single_overhead_ms": statistics.median(overheads),
        }
    )
    rows += [*loaded_rows, *vector_rows, *memory_rows]
    report("retrieve against its parts", ["part", "median ms"], rows, figures, options.json)


if __name__ == "__main__":
    main()
