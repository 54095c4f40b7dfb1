"""Kill processes that change a retriever whose index is on a server.

`test_remote_indexes.py` runs this program with the options of the index, a folder, and the number
of kills. Only forked processes connect to the server, because clients do not survive a fork.
"""

import itertools
import json
import random
import sys
import time
from pathlib import Path

import numpy as np

import rcir
from calibration import recalibrate
from rcir.errors import StaleCalibration
from rcir.index import IndexConfig
from tests.retrieval.folder_processes import finish, killed, start

WHOLE, TO_RECALIBRATE, REFUSED = 10, 11, 12  # exit codes of `check`


def draw(numbers):
    """Return the vector and the label of each item or query, which depend on its number alone."""
    numbers = np.asarray(numbers, int)
    labels = numbers % 4
    noise = [np.random.default_rng(number).standard_normal(6) for number in numbers]
    return (2 * np.eye(4, 6)[labels] + noise).astype(np.float32), labels


def build(folder, config):
    vectors, labels = draw(range(60))
    ids = [str(number) for number in range(60)]
    retriever = rcir.Retriever.from_embeddings(
        vectors, ids, labels, metric="euclidean", depth=20, index=config
    )
    retriever.calibrate(*draw(range(10_000, 10_300)), "minmax", query_uncertainty="encoder")
    retriever.save(folder)


def change(folder, rounds):
    """Add and remove, by an object and by the command."""
    for _ in range(rounds):
        retriever = rcir.load(folder)
        last = max(map(int, retriever.ids)) + 1
        new = np.arange(last, last + 5)
        vectors, labels = draw(new)
        retriever.add(vectors, list(map(str, new)), labels)
        retriever.recalibrate()
        retriever.save(folder)
        retriever.remove(retriever.ids[:3].tolist())
        retriever.save(folder)
        retriever.recalibrate()
        retriever.save(folder)
        vectors, labels = draw(new + 5)
        files = folder.with_suffix(".npz"), folder.with_suffix(".txt")
        np.savez(files[0], vector=vectors, label=labels, id=np.array(list(map(str, new + 5))))
        files[1].write_text("\n".join(retriever.ids[:7]))
        recalibrate(folder, add=files[0], remove=files[1])


def check(folder):
    """Exit with a code: the retriever is whole, to be recalibrated, or refused as stale."""
    try:
        retriever = rcir.load(folder)
    except StaleCalibration:
        sys.exit(REFUSED)
    queries, _ = draw(range(20_000, 20_020))
    items, _ = draw(list(map(int, retriever.ids)))
    distances = np.linalg.norm(queries[:, None].astype(float) - items[None], axis=2)
    order = distances.argsort(axis=1)
    results = retriever.search(queries)
    assert (results.positions == order[:, :20]).all()
    np.testing.assert_allclose(results.distances, np.sort(distances)[:, :20], rtol=1e-4)
    changed, code = retriever.changes(), WHOLE
    if changed:
        try:
            retriever.retrieve(queries, 0.3, 0.1)
        except StaleCalibration:
            recalibrate(folder)
            retriever, code = rcir.load(folder), TO_RECALIBRATE
    for answer, nearest in zip(retriever.retrieve(queries, 0.3, 0.1), order, strict=True):
        assert list(answer.ids) == retriever.ids[nearest[: answer.size]].tolist()
    sys.exit(code)


def main(options, folder, count):
    numbers = itertools.count()

    def rebuild():
        config = IndexConfig("pgvector", options | {"table": f"kills{next(numbers)}"})
        assert finish([start(build, folder, config)]) == [0]

    rebuild()
    assert finish([start(change, folder, 1)]) == [0]
    started = time.perf_counter()
    assert finish([start(change, folder, 1)]) == [0]
    longest, codes = time.perf_counter() - started, []
    for _ in range(count):
        assert killed(random.uniform(0, longest), change, folder, 100)
        codes += finish([start(check, folder)])
        assert codes[-1] in (WHOLE, TO_RECALIBRATE, REFUSED)
        if codes[-1] == REFUSED:
            rebuild()
    counts = [codes.count(code) for code in (WHOLE, TO_RECALIBRATE, REFUSED)]
    print("{} whole, {} to be recalibrated, {} refused".format(*counts))
    assert counts[0] > 0


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
