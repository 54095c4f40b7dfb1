"""Answers and feedback on disk."""

import os
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest

from rcir.embedding import Embedding
from rcir.errors import InvalidData
from rcir.retrieval.queries import Queries
from rcir.serving import store as module
from rcir.serving.store import Loss, Store, StoreUnavailable, UnknownAnswer
from rcir.serving.terms import Feedback, Terms
from tests.serving.conftest import drawn


@pytest.fixture
def file(tmp_path):
    return tmp_path / "feedback.db"


def kept(store, vectors, n=1, seed=5, **terms):
    """Ids of kept answers."""
    asked = Terms(**({"alpha": 0.2} | terms))
    queries = vectors.prepared(drawn(n, seed)[0])
    answers = vectors.retrieve(queries, asked.alpha, asked.delta, **asked.options)
    return store.add([("v1", asked, queries.identified(), answers)])


def test_what_was_acknowledged_is_there_when_it_is_opened_again(file, vectors):
    store = Store(file)
    first, second, third = kept(store, vectors, 3)
    store.feed(Feedback(answer=second, match=False, label=7))
    store.feed(Feedback(answer=first, match=True))
    store.close()
    again = Store(file)
    asked = vectors.prepared(drawn(3, 5)[0]).identified()
    known = [
        Loss(1, Terms(alpha=0.2).key, True, asked.digests[1]),
        Loss(2, Terms(alpha=0.2).key, False, asked.digests[0]),
    ]
    assert again.losses("v1") == known
    assert again.losses("v1", after=1) == known[1:]
    assert again.losses("v2") == []
    queries, labels = again.labelled("v1")
    assert labels == [7]
    np.testing.assert_array_equal(queries.vectors, asked.vectors[1:2])
    np.testing.assert_array_equal(queries.digests, asked.digests[1:2])
    assert again.feed(Feedback(answer=third, match=True)) == 3
    kept_answer = again.answer(third)
    expected = vectors.retrieve(drawn(3, 5)[0], 0.2, 0.1)[2]
    assert (kept_answer.version, kept_answer.items) == ("v1", list(expected.ids))


def test_all_that_an_encoder_says_of_a_query_is_kept(file, retriever, splits):
    embedding = retriever.embed(splits.test.images[:2])
    queries = Queries(
        embedding.vectors.numpy(),
        embedding.uncertainty.numpy().astype(np.float64),
        digests=np.array([b"a" * 32, b"b" * 32]),
        embedding=Embedding(embedding.vectors, embedding.variance, embedding.uncertainty),
    )
    answers = retriever.retrieve(embedding, 0.6, 0.1)
    store = Store(file)
    for own in store.add([("v1", Terms(alpha=0.6), queries, answers)]):
        store.feed(Feedback(answer=own, match=True, label=1))
    found, _ = store.labelled("v1")
    order = slice(None, None, -1)  # the latest first
    np.testing.assert_array_equal(found.vectors, queries.vectors[order])
    np.testing.assert_array_equal(found.uncertainty, queries.uncertainty[order])
    np.testing.assert_array_equal(found.digests, queries.digests[order])
    for name, values in queries.embedding.tensors.items():
        np.testing.assert_array_equal(found.embedding.tensors[name], values.flip(0))


def test_said_again_it_changes_nothing_and_said_otherwise_it_is_refused(file, vectors):
    store = Store(file)
    (own,) = kept(store, vectors)
    said = Feedback(answer=own, match=True, label=3)
    assert [store.feed(said) for _ in range(3)] == [1, None, None]
    for other in (Feedback(answer=own, match=False), Feedback(answer=own, match=True)):
        with pytest.raises(InvalidData, match="said otherwise"):
            store.feed(other)
    assert [loss.miss for loss in store.losses("v1")] == [False]


def test_feedback_on_what_is_not_kept_is_refused(file):
    store = Store(file)
    with pytest.raises(UnknownAnswer, match="no answer 'abc'"):
        store.answer("abc")
    with pytest.raises(UnknownAnswer, match="no answer 'abc'"):
        store.feed(Feedback(answer="abc", match=True))


def test_only_guarantees_that_misses_contradict_are_watched(file, vectors):
    store = Store(file)
    for terms in ({}, {"risk": "recall", "alpha": 0.4}, {"delta": None}, {"simultaneous": True}):
        (own,) = kept(store, vectors, **terms)
        store.feed(Feedback(answer=own, match=False))
    assert [loss.number for loss in store.losses("v1")] == [1]


def test_queries_asked_before_a_time_are_left_out(file, vectors):
    store = Store(file)
    (own,) = kept(store, vectors)
    store.feed(Feedback(answer=own, match=True, label=3))
    now = time.time()
    assert store.labelled("v1", since=now - 60)[1] == [3]
    assert store.labelled("v1", since=now + 60) is None


def test_old_answers_are_forgotten_but_not_those_with_feedback(file, vectors, monkeypatch):
    monkeypatch.setattr(module, "MOST_ANSWERS", 10)
    monkeypatch.setattr(module, "FORGETTING", 5)
    store = Store(file)
    first = kept(store, vectors, 5, seed=1)
    store.feed(Feedback(answer=first[0], match=True))
    later = [kept(store, vectors, 5, seed=seed) for seed in range(2, 6)]
    with pytest.raises(UnknownAnswer):
        store.feed(Feedback(answer=first[1], match=True))
    store.feed(Feedback(answer=later[-1][0], match=True))
    assert len(store.losses("v1")) == 2


def test_a_file_of_another_program_is_left_alone(file):
    with sqlite3.connect(file) as other:
        other.execute("CREATE TABLE recipes (name TEXT)")
    before = file.read_bytes()
    with pytest.raises(StoreUnavailable, match="another program's"):
        Store(file)
    text = file.with_name("poem.txt")
    text.write_text("a poem, " * 100)
    with pytest.raises(StoreUnavailable, match="not a database"):
        Store(text)
    with sqlite3.connect(file) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("recipes",)]
    assert len(file.read_bytes()) == len(before)


def test_a_full_disk_keeps_what_was_there(file, vectors):
    store = Store(file)
    (own,) = kept(store, vectors)
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")  # as a disk with no room
    with pytest.raises(StoreUnavailable, match=r"full.*free space"):
        kept(store, vectors, 100)
    store._connection.execute(f"PRAGMA max_page_count = {10 * pages}")
    assert store.feed(Feedback(answer=own, match=True)) == 1
    assert len(kept(store, vectors, 100)) == 100


WRITER = """
import sys
import numpy as np
from pathlib import Path
from rcir.retrieval.queries import Queries
from rcir.serving.store import Store
from rcir.serving.terms import Feedback, Terms
import rcir

retriever = rcir.load(sys.argv[2])
queries = retriever.calibration_queries[:50]
answers = retriever.retrieve(queries, 0.2, 0.1)
store = Store(Path(sys.argv[1]))
while True:
    for own in store.add([("v1", Terms(alpha=0.2), queries, answers)]):
        store.feed(Feedback(answer=own, match=False))
        print(own, flush=True)
"""


def test_a_killed_process_loses_nothing_that_it_acknowledged(file, place):
    command = [sys.executable, "-c", WRITER, str(file), str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        acknowledged = [process.stdout.readline() for _ in range(70)]
        os.kill(process.pid, signal.SIGKILL)
        acknowledged += process.stdout.readlines()
    store = Store(file)
    known = {row[0] for row in store._connection.execute("SELECT answer FROM feedback")}
    whole = {line.strip() for line in acknowledged if line.endswith("\n")}
    assert whole <= known
    assert len(known - whole) <= 1  # written, and not said yet
    assert len(store.losses("v1")) == len(known) >= 70
