"""Processes that save, change and load one retriever folder; `test_folder_processes.py` runs this.

Arguments: a folder with the retrievers "first" and "second", of which nothing is the same; then
names of functions, each with a number.
"""

import multiprocessing
import random
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

import rcir
from calibration import recalibrate
from rcir.index import IndexConfig, build_index
from rcir.store.codec import encode
from rcir.store.folder import current_version

FORK = multiprocessing.get_context("fork")
QUERIES = np.random.default_rng(9).standard_normal((5, 4)).astype(np.float32)
BETWEEN = 0.2  # seconds between two saves, at most
READ = 0.01  # seconds between two looks at the current version
LIMIT = 60  # seconds to wait for another process, at most


def state(retriever):
    """All that distinguishes retrievers: gallery, queries, calibration, and answers."""
    calibration = retriever.require_calibration()
    parts = (*calibration.query_digests, *encode(calibration.miss_rule.evidence)[1].values())
    answers = [answer.to_dict() for answer in retriever.retrieve(QUERIES, 0.3, 0.1)]
    return tuple(retriever.ids), *(part.tobytes() for part in map(np.asarray, parts)), str(answers)


def start(work, *arguments):
    process = FORK.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def finish(processes):
    return [process.join() or process.exitcode for process in processes]


def killed(moment, work, *arguments):
    """Whether a process that works was killed so many seconds after it began."""
    process = start(work, *arguments)
    process.join(moment)
    process.kill()
    (code,) = finish([process])
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def require_tidy(folder, killed=False):
    """Nothing piles up: there are two versions, and what a killed process has left of one."""
    names = {path.name for path in folder.iterdir()}
    if killed:
        names = {name for name in names if not name.startswith(".current.json-")}
    assert names == {"current.json", "lock", "versions"}
    versions = [path.name for path in (folder / "versions").iterdir()]
    assert len(versions) <= 2 + killed, versions


class Overtaken:
    """The first load waits halfway, until another version is current."""

    def __init__(self, folder):
        self._folder, self._waited = folder, False
        sys.addaudithook(self._wait)

    def _wait(self, event, arguments):
        if event != "open" or self._waited or not str(arguments[0]).endswith("retriever.json"):
            return
        self._waited, version = True, Path(arguments[0]).parent
        limit = time.monotonic() + LIMIT
        while current_version(self._folder) == version:
            assert time.monotonic() < limit, "nobody saved"
            time.sleep(READ)


def read(folder, count, expected, overtaken):
    Overtaken(folder)
    for _ in range(count):
        before = current_version(folder)
        assert state(rcir.load(folder)) in expected
        with overtaken.get_lock():
            overtaken.value += current_version(folder) != before


def load(pair, count):
    """Loads while others are saved: each is one of them as a whole."""
    first, second, folder = pair / "first", pair / "second", pair / "it"
    expected, overtaken = [state(rcir.load(each)) for each in (first, second)], FORK.Value("i")
    rcir.load(first).save(folder)
    readers, saves = 2, 0
    arguments = (folder, count // readers, expected, overtaken)
    processes = [start(read, *arguments) for _ in range(readers)]
    while any(process.is_alive() for process in processes):
        saves += 1
        rcir.load((first, second)[saves % 2]).save(folder)
        time.sleep(random.uniform(0, BETWEEN))
    assert finish(processes) == [0] * readers
    require_tidy(folder)
    print(f"{readers * (count // readers)} loads, {overtaken.value} overtaken by {saves} saves")
    assert overtaken.value >= readers


def save_together(pair, count):
    """Several processes that save to one folder."""
    sources, folder = [pair / "first", pair / "second"], pair / "it"

    def work(source):
        for _ in range(count):
            rcir.load(source).save(folder)

    assert finish([start(work, source) for source in (*sources, sources[0])]) == [0, 0, 0]
    assert state(rcir.load(folder)) in [state(rcir.load(source)) for source in sources]
    require_tidy(folder)


def report_kills(kills, seen):
    saved = np.count_nonzero(np.diff(seen))
    print(f"{kills} of {len(seen) - 1} processes were killed, and {saved} had saved")
    assert kills > len(seen) / 4
    assert saved > len(seen) / 20


def change(folder, pair):
    """Remove the item "x", or add it; with the queries that calibrated."""
    if "x" in rcir.load(folder).ids:
        recalibrate(folder, remove=pair / "x.txt")
    else:
        recalibrate(folder, add=pair / "x.npz")


def prepare_change(pair):
    (pair / "x.txt").write_text("x\n")
    (pair / "gone.txt").write_text("first-7\n")
    np.savez(pair / "x.npz", vector=QUERIES[:1], label=np.array([3]), id=np.array(["x"]))


def kill_recalibration(pair, count):
    """Kills of processes that recalibrate: the item was added or removed, or it was not."""
    prepare_change(pair)
    folder, other = (shutil.copytree(pair / "first", pair / name) for name in ("it", "other"))
    states = [state(rcir.load(folder))]
    for _ in range(2):
        started = time.perf_counter()
        change(other, pair)
        longest = 3 * (time.perf_counter() - started)  # the first one imports what it needs
        states.append(state(rcir.load(other)))
    # The calibration is the same, and so is the order of the items.
    assert states[2] == states[0] != states[1]
    seen, kills = [0], 0
    for _ in range(count):
        kills += killed(random.uniform(0, longest), change, folder, pair)
        require_tidy(folder, killed=True)
        seen.append(states.index(state(rcir.load(folder))))
    change(folder, pair)
    assert states.index(state(rcir.load(folder))) == 1 - seen[-1]
    require_tidy(folder)
    report_kills(kills, seen)


def pairs(pair, count):
    """Two recalibrations at once, one of which adds and one of which removes."""
    prepare_change(pair)
    for number in range(count):
        folder = shutil.copytree(pair / "first", pair / f"it{number}")
        before, barrier = set(rcir.load(folder).ids), FORK.Barrier(2)

        def work(options, folder=folder, barrier=barrier):
            barrier.wait()
            recalibrate(folder, **options)

        options = ({"add": pair / "x.npz"}, {"remove": pair / "gone.txt"})
        assert finish([start(work, each) for each in options]) == [0, 0]
        after = rcir.load(folder)
        assert set(after.ids) == before - {"first-7"} | {"x"}
        assert after.changes() == []


def kill_holder(pair, count):
    """The holder of the lock is killed while another one waits for it."""
    prepare_change(pair)
    for number in range(count):
        folder, holds = shutil.copytree(pair / "first", pair / f"held{number}"), FORK.Event()
        before = set(rcir.load(folder).ids)

        def hold(folder=folder, holds=holds):
            def wait(_):
                holds.set()
                time.sleep(600)

            rcir.Retriever.recalibrate = wait
            recalibrate(folder, add=pair / "x.npz")

        holder = start(hold)
        assert holds.wait(LIMIT), "it did not recalibrate while it held the lock"
        waiting = start(lambda folder=folder: recalibrate(folder, remove=pair / "gone.txt"))
        waiting.join(3)
        assert waiting.exitcode is None, "it did not wait"
        holder.kill()
        assert finish([waiting, holder]) == [0, -signal.SIGKILL]
        assert set(rcir.load(folder).ids) == before - {"first-7"}
        require_tidy(folder)


def hold_version(pair, count):
    """A version that is in use while many others are written, and deleted."""
    folder, own = pair / "it", rcir.load(pair / "first")
    vectors = own.index.vectors_at(np.arange(len(own.ids)))
    mapped = build_index(vectors, IndexConfig("hnsw"))
    own.searcher = replace(own.searcher, index=mapped)
    own.recalibrate()
    own.save(folder)
    held, size = rcir.load(folder), []
    expected = state(held)
    for number in range(count):
        rcir.load(pair / ("second", "first")[number % 2]).save(folder)
        files = [path for path in folder.rglob("*") if path.is_file()]
        size.append(sum(path.stat().st_size for path in files))
    assert not held.version_folder.exists()
    require_tidy(folder)
    assert max(size) < 1.1 * size[1]
    assert state(held) == expected


if __name__ == "__main__":
    for name, number in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        globals()[name](Path(sys.argv[1]), int(number))
