"""A LanceDB table as gallery: rates, recall, time to certify, and memory.

Clustered vectors of `index.py` are written in batches, indexed by LanceDB (IVF, whole vectors), and
attached. Search parameters are the first of a grid that find 95% and 99% of what LanceDB finds
without its index. Time to certify is that of `rcir certify` with 4,000 labelled queries, a reader
of the table included. With `--rows`, other numbers of rows; then nothing is certified.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from common import parser, report, sized
from index import draw

import rcir
from calibration import CertificationConfig, certify
from rcir.data.vector_files import vector_table, write_tables
from rcir.index import DEPTH, IndexConfig, recall_of
from rcir.risk.results import TOLERANCE

N, DIM, QUERIES, LABELLED = sized((1_000_000, 128, 200, 4000), (3000, 32, 20, 600))
SHARD, GRID = 50_000, (2, 4, 8, 16, 32, 64, 128, 256)
RECALLS = (0.95, 0.99)


def resident() -> float:
    """Memory of this process, MiB."""
    return float(psutil.Process().memory_info().rss) / 2**20


def fill(folder: Path, n: int) -> tuple[float, float]:
    """Write and index n vectors; return the seconds of both."""
    import lancedb
    from lancedb.index import IvfFlat

    def batches():
        for first in range(0, n, SHARD):
            vectors, labels = draw(min(SHARD, n - first), DIM, first)
            lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), DIM)
            ids = [f"item {number}" for number in range(first, first + len(labels))]
            yield pa.record_batch([ids, labels.astype(str), lists], ["id", "label", "vector"])

    started = time.perf_counter()
    schema = pa.schema(
        [("id", pa.string()), ("label", pa.string()), ("vector", pa.list_(pa.float32(), DIM))]
    )
    table = lancedb.connect(folder).create_table("items", batches(), schema=schema)
    filled = time.perf_counter()
    lists = max(1, round(np.sqrt(n)))
    table.create_index("vector", config=IvfFlat(distance_type="cosine", num_partitions=lists))
    return filled - started, time.perf_counter() - filled


def _with_probes(retriever: rcir.Retriever, probes: int) -> rcir.Retriever:
    """Return a retriever that searches by the table's index, without reading the table again."""
    index = copy(retriever.index)
    index.options = replace(index.options, nprobes=probes, exact=False)
    index.__dict__.pop("_index", None)
    return rcir.Retriever(replace(retriever.searcher, index=index))


def _seconds(retriever: rcir.Retriever, batches: Iterable[np.ndarray]) -> float:
    started = time.perf_counter()
    for queries in batches:
        retriever.search(queries)
    return time.perf_counter() - started


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--rows", type=int, default=N)
    options = command.parse_args()
    rows, figures, wanted = [], {}, list(RECALLS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures["ingest_s"], figures["index_s"] = fill(folder, options.rows)
        address, file = f"lancedb:{folder}#items", folder / "queries.parquet"
        queries, labels = draw(LABELLED, DIM, options.rows + 1)
        before, started = resident(), time.perf_counter()
        exact = rcir.attach(address, exact=True)
        figures["attach_s"] = time.perf_counter() - started
        figures["bytes_per_row"] = (resident() - before) * 2**20 / options.rows
        truth = exact.search(queries[:QUERIES])
        for probes in GRID:
            retriever = _with_probes(exact, probes)
            results = retriever.search(queries[:QUERIES])  # also warms up
            together = _seconds(retriever, [queries[:QUERIES]]) / QUERIES
            alone = _seconds(retriever, queries[:20, None]) / 20
            recall = recall_of(results.positions, truth.positions)
            cells = (f"{recall:.4f}", f"{1000 * together:.2f}", f"{1000 * alone:.2f}")
            rows.append([str(probes), *cells])
            same = results.positions == truth.positions
            apart = np.abs(results.distances[same] / truth.distances[same] - 1).max(initial=0)
            assert apart < TOLERANCE, apart
            while wanted and recall >= wanted[0]:
                key = f"recall_{round(100 * wanted.pop(0))}"
                figures |= {f"{key}_nprobes": probes, f"{key}_queries_per_s": 1 / together}
                figures |= {f"{key}_ms_alone": 1000 * alone, f"{key}_measured": recall}
            if not wanted:
                break
        if options.rows == N:
            ids = [f"query {number}" for number in range(len(labels))]
            columns = {"label": pa.array(labels.astype(str))}
            write_tables(file, [vector_table(queries, ids, columns, None)], {})
            started, index = time.perf_counter(), IndexConfig("lancedb", {"nprobes": probes})
            output = str(folder / "out")
            outcome = certify(CertificationConfig(address, str(file), output=output, index=index))
            figures["certify_minutes"] = (time.perf_counter() - started) / 60
            row = outcome.evaluation.certified[0]
            figures |= {"alpha": row.alpha, "test_risk": row.test_risk, "mean_size": row.mean_size}
        figures["resident_mb"] = resident()
    title = f"{options.rows:,} vectors of {DIM} numbers in LanceDB, {DEPTH} nearest"
    report(title, ["nprobes", "recall", "ms together", "ms alone"], rows, figures, options.json)


if __name__ == "__main__":
    main()
