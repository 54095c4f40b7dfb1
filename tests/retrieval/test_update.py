"""`update`: the next version is made aside, and every query is answered by one version."""

import threading
import time
from copy import copy
from dataclasses import replace

import numpy as np
import pytest

import rcir
from rcir.errors import InvalidData, SaveConflict, StaleCalibration
from rcir.index import IndexConfig
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.search import Searcher

RNG = np.random.default_rng(0)
LABELS = RNG.integers(20, size=3000)
VECTORS = np.eye(20)[LABELS] + 0.3 * RNG.standard_normal((3000, 20))
QUERIES = VECTORS[2900:2920]


def built(**options):
    retriever = rcir.Retriever.from_embeddings(VECTORS[:400], labels=LABELS[:400], **options)
    retriever.calibrate(VECTORS[2000:2900], LABELS[2000:2900], "quantile")
    return retriever


def grow(retriever, number):
    rows = slice(400 + 100 * number, 500 + 100 * number)
    ids = [f"added {row}" for row in range(rows.start, rows.stop)]
    retriever.add(VECTORS[rows], ids, LABELS[rows])


def answers(retriever):
    return [answer.to_dict() for answer in retriever.retrieve(QUERIES, 0.1, 0.1)]


@pytest.mark.parametrize("index", ["flat", "hnsw"])
def test_an_update_is_the_same_as_changing_and_recalibrating(index):
    updated, changed = built(index=IndexConfig(index)), built(index=IndexConfig(index))
    before = answers(updated)
    with updated.update() as next_version:
        grow(next_version, 0)
        next_version.remove(["3", "5"])
        assert answers(updated) == before
    grow(changed, 0)
    changed.remove(["3", "5"])
    changed.recalibrate()
    assert answers(updated) == answers(changed) != before
    assert updated.changes() == []


def test_a_failed_update_changes_nothing():
    retriever = built()
    before = answers(retriever)

    def fail():
        with retriever.update() as next_version:
            grow(next_version, 0)
            next_version.remove(["no such item"])

    with pytest.raises(InvalidData, match="no such item"):
        fail()
    assert answers(retriever) == before
    assert len(retriever.ids) == len(retriever.index) == 400


def test_overlapping_changes_are_not_lost():
    retriever = built()

    def overlap(change):
        with retriever.update() as next_version:
            grow(next_version, 0)
            change()

    def another_update():
        with retriever.update() as other:
            grow(other, 1)

    with pytest.raises(SaveConflict, match="repeat"):
        overlap(another_update)
    assert len(retriever.ids) == 500
    assert "added 500" in retriever.ids
    with pytest.raises(SaveConflict, match="repeat"):
        overlap(retriever.recalibrate)
    with pytest.raises(SaveConflict, match="changed"):
        overlap(lambda: grow(retriever, 2))
    assert "added 600" in retriever.ids


def test_labels_that_are_numbered_during_an_update_are_kept():
    names = np.array([f"kind {label}" for label in LABELS])
    retriever = rcir.Retriever.from_embeddings(VECTORS[:400], labels=names[:400])
    with retriever.update() as next_version:
        next_version.add(VECTORS[400:500], [f"added {row}" for row in range(100)], names[400:500])
        new = retriever.labelled(VECTORS[:1], ["new"]).population.labels
    assert len(retriever.ids) == 500
    assert retriever.labelled(VECTORS[:1], ["new"]).population.labels == new
    assert retriever.label_names[int(new[0])] == "new"


def test_a_change_during_a_query_does_not_affect_its_answer(monkeypatch):
    retriever = built()
    expected, named_labels = answers(retriever), Searcher.named_labels

    def change_first(searcher, positions):
        grow(retriever, 0)
        return named_labels(searcher, positions)

    monkeypatch.setattr(Searcher, "named_labels", change_first)
    assert answers(retriever) == expected
    with pytest.raises(StaleCalibration, match="gallery"):
        answers(retriever)


def test_an_update_notices_its_changes_while_the_old_version_is_queried():
    """Both versions compute fingerprints, which must not be taken for each other's."""
    retriever = built()
    with retriever.update() as next_version:
        grow(next_version, 0)
        answers(retriever)
        changed = next_version.changes()
        answers(retriever)
        assert next_version.changes() == changed == ["gallery", "index"]
        next_version.searcher = replace(next_version.searcher, max_depth=50)
    assert retriever.changes() == []
    assert answers(retriever)


def test_what_is_saved_or_copied_during_a_change_is_one_version(tmp_path, monkeypatch):
    retriever = built()
    before, searcher, numbers = answers(retriever), Retriever.searcher, iter(range(2))

    def change_after(self):
        """Read the search, and then replace the version as another thread would."""
        found = searcher.fget(self)
        monkeypatch.undo()
        with self.update() as next_version:
            grow(next_version, next(numbers))
        return found

    monkeypatch.setattr(Retriever, "searcher", property(change_after))
    saved = rcir.load(retriever.save(tmp_path / "saved"))
    monkeypatch.setattr(Retriever, "searcher", property(change_after))
    copied = copy(retriever)
    assert saved.changes() == copied.changes() == []
    assert answers(saved) == before


def test_a_retriever_that_is_saved_during_an_update_can_be_saved_after_it(tmp_path):
    retriever = built()
    retriever.save(tmp_path / "retriever")
    with retriever.update() as next_version:
        grow(next_version, 0)
        retriever.save(tmp_path / "retriever")
    retriever.save(tmp_path / "retriever")
    assert len(rcir.load(tmp_path / "retriever").ids) == 500


def test_without_a_calibration_only_the_gallery_changes():
    retriever = rcir.Retriever.from_embeddings(VECTORS[:400], labels=LABELS[:400])
    with retriever.update() as next_version:
        grow(next_version, 0)
    assert len(retriever.ids) == 500
    assert retriever.calibration is None


@pytest.mark.parametrize(
    ("n_threads", "seconds"),
    [(4, 0), pytest.param(16, 60, marks=pytest.mark.slow)],
    ids=["four threads", "sixteen threads for a minute"],
)
def test_each_answer_of_many_threads_is_that_of_one_state(n_threads, seconds):
    """Threads query while items are added and removed, twice or more each between two changes."""
    retriever, grown = built(), built()
    grow(grown, 0)
    grown.recalibrate()
    expected = [answers(retriever), answers(grown)]
    added = sorted(set(grown.ids) - set(retriever.ids))
    seen, done, end = [], threading.Event(), time.monotonic() + seconds

    def query():
        while not done.is_set():
            seen.append(answers(retriever))

    def wait_for_answers():
        until, before = time.monotonic() + 60, len(seen)
        while len(seen) < before + 2 * n_threads and time.monotonic() < until:
            time.sleep(0.01)

    threads = [threading.Thread(target=query) for _ in range(n_threads)]
    swaps = 0
    try:
        for thread in threads:
            thread.start()
        while swaps < 4 or time.monotonic() < end:
            wait_for_answers()
            with retriever.update() as next_version:
                next_version.remove(added) if swaps % 2 else grow(next_version, 0)
            swaps += 1
    finally:
        done.set()
        for thread in threads:
            thread.join()
    print(f"{len(seen)} answers of {n_threads} threads during {swaps} swaps")
    assert {expected.index(answer) for answer in seen} == {0, 1}
    assert answers(retriever) == expected[swaps % 2]
