"""Galleries in PostgreSQL beside one in this process: time to build and per query, certified sizes.

Clustered vectors of `index.py`; PostgreSQL with pgvector is started here, on loopback. Queries are
asked one by one, as a service does, and 100 together.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from common import parser, report, sized
from index import DELTA, calibrate, draw, mean_size

from rcir.index import DEPTH, IndexConfig, build_index, recall_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.index.servers import PostgresServer

N, DIM, ASKED, CALIBRATING = sized((20_000, 64, 300, 3000), (4000, 16, 20, 400))
KINDS = {
    "flat": ("flat", {}),
    "hnsw": ("hnsw", {}),
    "pgvector, exact": ("pgvector", {"method": "exact"}),
    "pgvector, hnsw": ("pgvector", {"method": "hnsw", "ef_search": 400}),
}


def known(queries: tuple, gallery: tuple) -> tuple:
    """Those queries of which the gallery holds a match."""
    rows = np.isin(queries[1], gallery[1])
    return queries[0][rows], queries[1][rows]


def main() -> None:
    options = parser(__doc__).parse_args()
    gallery = draw(N, DIM, 0)
    queries, calibrating = (known(draw(n, DIM, n), gallery) for n in (ASKED, CALIBRATING))
    rows, figures, truth, smallest = [], {}, None, None
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        postgres = PostgresServer(folder)
        stack.callback(postgres.stop)
        for number, (name, (kind, given)) in enumerate(KINDS.items()):
            if kind == "pgvector":
                given |= {"dsn": postgres.dsn, "table": f"t{number}", "timeout": 300.0}
            started = time.perf_counter()
            index = build_index(gallery[0], IndexConfig(kind, given))
            built = time.perf_counter() - started
            started = time.perf_counter()
            positions = np.concatenate([index.search(one[None], DEPTH)[1] for one in queries[0]])
            alone = (time.perf_counter() - started) / len(positions)
            started = time.perf_counter()
            for some in np.array_split(queries[0], max(1, len(positions) // 100)):
                index.search(some, DEPTH)
            together = (time.perf_counter() - started) / len(positions)
            truth = positions if truth is None else truth
            size = mean_size(calibrate(index, gallery, calibrating), queries[0])
            smallest = size if smallest is None else smallest
            recall = recall_of(positions, truth)
            cells = (f"{1000 * alone:.2f}", f"{1000 * together:.2f}", f"{recall:.4f}")
            rows.append([name, f"{built:.1f}", *cells, f"{size:.2f}"])
            key = name.replace(", ", "_").lower()
            figures[f"{key}_ms"] = 1000 * alone
            figures[f"{key}_size_over_flat"] = size / smallest
    columns = ["index", "s to build", "ms, one by one", "ms, together", "recall", "mean size"]
    title = f"{N:,} vectors of {DIM} numbers, {DEPTH} nearest, delta {DELTA:g}"
    report(title, columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
