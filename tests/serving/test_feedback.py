"""Feedback on answers: kept on disk, evidence on guarantees, source of calibration queries."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from copy import copy
from datetime import datetime
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import rcir
from calibration import recalibrate
from rcir.embedding import Embedding
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, RiskUnattainable
from rcir.retrieval.queries import Queries
from rcir.risk import Population, RiskMonitor, make_request
from rcir.serving import monitoring
from rcir.serving import store as module
from rcir.serving.errors import StoreUnavailable, UnknownAnswer
from rcir.serving.monitoring import GuaranteeWatch
from rcir.serving.schemas import Feedback, Terms
from rcir.serving.sources import Folder
from rcir.serving.store import Loss, MonitoredQuery, Store
from tests.populations import in_population
from tests.serving.conftest import drawn

ALPHA, DELTA = 0.2, 0.1


@pytest.fixture
def file(tmp_path):
    return tmp_path / "feedback.db"


# The file


def keep(store, vectors, n=1, seed=5, **terms):
    """Keep answers of a retriever in a store; return their ids."""
    terms = Terms(**({"alpha": ALPHA} | terms))
    queries = vectors.searcher.prepare(drawn(n, seed)[0])
    answers = vectors.retrieve(queries, **terms.options)
    return store.add([("v1", terms, queries.with_population(), answers)])


def test_acknowledged_feedback_is_there_after_reopening(file, vectors):
    store = Store(file)
    first, second, third = keep(store, vectors, 3)
    before = time.time()
    store.feed(Feedback(answer=second, match=False, label=7))
    store.feed(Feedback(answer=first, match=True))
    store.close()
    store = Store(file)
    expected = vectors.searcher.prepare(drawn(3, 5)[0]).with_population()
    key, now = Terms(alpha=ALPHA).guarantee, time.time()
    losses = store.losses("v1")
    assert [(loss.number, loss.terms, loss.miss, loss.answer, loss.digest) for loss in losses] == [
        (1, key, True, 2, expected.digests[1]),
        (2, key, False, 1, expected.digests[0]),
    ]
    assert before <= losses[0].time <= losses[1].time <= now
    assert (store.losses("v1", after=1), store.losses("v2")) == (losses[1:], [])
    queries = store.monitored("v1", key, 0, 2)
    assert [(query.number, query.digest) for query in queries] == [
        *enumerate(expected.digests[:2], 1)
    ]
    assert all(query.time <= before for query in queries)
    assert [query.number for query in store.monitored("v1", key, 2, 9)] == [3]
    reported = store.reported("v1")  # the latest first
    assert (reported.matches, reported.labels) == ([False, True], [7, None])
    np.testing.assert_array_equal(reported.queries.vectors, expected.vectors[1::-1])
    np.testing.assert_array_equal(reported.queries.digests, expected.digests[1::-1])
    assert store.reported("v1", since=now - 600).labels == [7, None]
    assert store.reported("v1", since=now + 600) is None
    assert store.n_unreported("v1") == 1
    assert store.feed(Feedback(answer=third, match=True)) == 3
    answer = vectors.retrieve(drawn(3, 5)[0], ALPHA, DELTA)[2]
    assert store.answer(third) == ("v1", list(answer.ids))
    (unwatched,) = keep(store, vectors, simultaneous=True)
    store.feed(Feedback(answer=unwatched, match=False))
    assert [loss.number for loss in store.losses("v1")] == [1, 2, 3]


def test_the_whole_embedding_of_a_query_is_kept(file, retriever, splits):
    embedding = retriever.embed(splits.test.images[:2])
    queries = Queries(
        embedding.vectors.numpy(),
        embedding.uncertainty.numpy().astype(np.float64),
        embedding=Embedding(embedding.vectors, embedding.variance, embedding.uncertainty),
        population=Population(2, np.array([b"a" * 32, b"b" * 32])),
    )
    store = Store(file)
    answers = retriever.retrieve(embedding, 0.6, 0.1)
    for name in store.add([("v1", Terms(alpha=0.6), queries, answers)]):
        store.feed(Feedback(answer=name, match=True, label=1))
    kept = store.reported("v1").queries
    for name in ("vectors", "uncertainty", "digests"):  # the latest first
        np.testing.assert_array_equal(getattr(kept, name), getattr(queries, name)[::-1])
    for name, values in queries.embedding.tensors.items():
        np.testing.assert_array_equal(kept.embedding.tensors[name], values.flip(0))


def test_repeated_feedback_changes_nothing_and_contradictions_are_refused(file, vectors):
    store = Store(file)
    (name,) = keep(store, vectors)
    plain, named = (Feedback(answer=name, match=True, label=label) for label in (None, 3))
    assert [store.feed(feedback) for feedback in (plain, plain, named, named, plain)] == [
        1,
        *[None] * 4,
    ]
    assert store.reported("v1").labels == [3]
    for other in ({"match": False}, {"match": True, "label": 4}):
        other = Feedback(answer=name, **other)
        with pytest.raises(InvalidData, match="contradicts"):
            store.feed(other)
    assert [loss.miss for loss in store.losses("v1")] == [False]
    for work in (store.answer, lambda name: store.feed(Feedback(answer=name, match=True))):
        with pytest.raises(UnknownAnswer, match="abc"):
            work("abc")


def test_old_answers_are_deleted_unless_they_have_feedback(file, vectors, monkeypatch):
    monkeypatch.setattr(module, "MAX_ANSWERS", 10)
    monkeypatch.setattr(module, "DELETION_INTERVAL", 5)
    store = Store(file)
    first = keep(store, vectors, 5, seed=1)
    store.feed(Feedback(answer=first[0], match=True))
    later = [keep(store, vectors, 5, seed=seed) for seed in range(2, 6)]
    with pytest.raises(UnknownAnswer):
        store.feed(Feedback(answer=first[1], match=True))
    store.feed(Feedback(answer=later[-1][0], match=True))
    assert len(store.losses("v1")) == 2
    kept = [one.number for one in store.monitored("v1", Terms(alpha=ALPHA).guarantee, 0, 21)]
    for seed in range(6, 9):
        keep(store, vectors, 5, seed=seed)
    # Those before one with feedback may count as misses.
    assert [
        one.number for one in store.monitored("v1", Terms(alpha=ALPHA).guarantee, 0, 21)
    ] == kept


def test_a_file_of_another_program_is_left_alone(file):
    with sqlite3.connect(file) as other:
        other.execute("CREATE TABLE recipes (name TEXT)")
    with pytest.raises(StoreUnavailable, match="another program"):
        Store(file)
    with sqlite3.connect(file) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("recipes",)]


def test_a_locked_file_delays_one_batch_and_then_none_for_a_while(
    place, serving, file, monkeypatch
):
    body = {"vector": drawn(1, 5)[0][0].tolist(), "alpha": ALPHA}
    with serving(place, store=file) as client:
        assert client.post("/retrieve", json=body).json()["answer"]
        assert client.get("/ready").json()["feedback_trouble"] is None
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        response = client.post("/retrieve", json=body)
        assert time.monotonic() - began < module.LOCK_SECONDS / 2
        assert response.status_code == 200
        assert response.json()["answer"] is None
        ready = client.get("/ready")
        assert ready.status_code == 200
        assert "locked" in ready.json()["feedback_trouble"]
        other.execute("ROLLBACK")
        other.close()
        # The next ones do not try the file.
        monkeypatch.setattr(module, "ANSWER_PAUSE_SECONDS", 1e9)
        assert client.post("/retrieve", json=body).json()["answer"] is None
        monkeypatch.setattr(module, "ANSWER_PAUSE_SECONDS", 0.0)
        assert client.post("/retrieve", json=body).json()["answer"]
        assert client.get("/ready").json()["feedback_trouble"] is None


@pytest.mark.parametrize("harm", ["removed", "truncated", "replaced"])
def test_feedback_is_not_acknowledged_without_its_file(file, vectors, tmp_path, harm):
    store = Store(file)
    (answer,) = keep(store, vectors)
    if harm == "removed":
        file.unlink()
    elif harm == "truncated":
        os.truncate(file, 0)
    else:
        Store(tmp_path / "other.db").close()
        (tmp_path / "other.db").replace(file)
    assert harm in store.trouble
    with pytest.raises(StoreUnavailable, match=harm):
        store.feed(Feedback(answer=answer, match=True))
    with pytest.raises(StoreUnavailable, match=harm):
        keep(store, vectors)
    store.close()


def test_trouble_does_not_disturb_a_writer(file, vectors, monkeypatch):
    store, stat, nested = Store(file), Path.stat, []

    def growing(path, **options):
        """Another process lets the file grow, and a thread asks, while the writer looks at it."""
        state = stat(path, **options)
        if path == file and not nested:
            os.truncate(file, state.st_size + 4096)
            nested.append(path)
            assert store.trouble is None
            nested.clear()
        return state

    monkeypatch.setattr(Path, "stat", growing)
    assert len(keep(store, vectors)) == 1
    store.close()


WRITER = """
import sys
from pathlib import Path
import rcir
from rcir.serving.store import Store
from rcir.serving.schemas import Feedback, Terms

retriever = rcir.load(sys.argv[2])
queries = retriever.calibration.calibration_queries[:50]
answers = retriever.retrieve(queries, 0.2, 0.1)
store = Store(Path(sys.argv[1]))
while True:
    for name in store.add([("v1", Terms(alpha=0.2), queries, answers)]):
        store.feed(Feedback(answer=name, match=False))
        print(name, flush=True)
"""


def test_a_killed_process_loses_nothing_that_it_acknowledged(file, place):
    command = [sys.executable, "-c", WRITER, str(file), str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(70)]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.readlines()
    store = Store(file)
    with sqlite3.connect(file) as connection:
        written = {row[0] for row in connection.execute("SELECT answer FROM feedback")}
    acknowledged = {line.strip() for line in lines if line.endswith("\n")}
    assert acknowledged <= written
    assert len(written - acknowledged) <= 1  # killed between writing and printing
    assert len(store.losses("v1")) == len(written) >= 70


# Evidence on guarantees


@cache
def key_of(alpha, **terms):
    return Terms(alpha=alpha, **terms).guarantee


class Losses:
    """Queries and feedback as a store returns them, each of another query unless one is named."""

    def __init__(self):
        self.losses, self.queries = [], []

    def query(self, alpha, digest=None, time=0.0, **terms):
        """Return a function that keeps feedback on a query."""
        key, number = key_of(alpha, **terms), len(self.queries) + 1
        query = MonitoredQuery(number, time, b"%d" % number if digest is None else digest)
        self.queries.append((key, query))

        def feed(miss, time=0.0):
            loss = Loss(len(self.losses) + 1, key, bool(miss), number, time, query.digest)
            self.losses.append(loss)

        return feed

    def add(self, alpha, misses, digest=None, **terms):
        for miss in misses:
            self.query(alpha, digest, **terms)(miss)

    def watch(self, wait=60.0, recurring=False):
        return GuaranteeWatch(lambda after: self.losses[after:], self.between, wait, recurring)

    def between(self, terms, after, until):
        return [query for key, query in self.queries[after:until] if key == terms]


def test_each_guarantee_has_its_own_evidence_whenever_it_is_refreshed():
    losses = Losses()
    often = losses.watch()
    for miss in (0, 1, 1, 0, 1):
        losses.add(0.1, [miss], delta=0.1)
        losses.add(0.1, [0], delta=0.05)
        losses.add(0.1, [1, miss], group="night")
        losses.add(0.2, [1])
        often.refresh()
    once = losses.watch()
    for one, other in zip(once.rows, often.rows, strict=True):
        assert (one.terms, one.n, one.misses) == (other.terms, other.n, other.misses)
        assert one.evidence == pytest.approx(other.evidence)
    rows = [(row.terms["delta"], row.terms["group"], row.n, row.misses) for row in once.rows]
    assert rows == [(0.1, None, 5, 3), (0.05, None, 5, 0), (0.1, "night", 10, 8), (0.1, None, 5, 5)]


def test_a_higher_risk_raises_the_alarm_of_its_alpha_only():
    losses, rng = Losses(), np.random.default_rng(0)
    watch = losses.watch()
    losses.add(0.1, rng.random(500) < 0.08)
    losses.add(0.3, rng.random(500) < 0.25)
    watch.refresh()
    assert not watch.alarm
    losses.add(0.1, rng.random(300) < 0.3)
    watch.refresh()
    assert [(row.terms["alpha"], row.alarm) for row in watch.rows] == [(0.1, True), (0.3, False)]


def test_a_query_counts_once_for_a_guarantee_unless_queries_recur():
    losses = Losses()
    watch = losses.watch()
    for _ in range(3):
        losses.add(0.1, [1] * 20, digest=b"again")
        losses.add(0.2, [1] * 20, digest=b"again")
        watch.refresh()
    assert [(row.terms["alpha"], row.n) for row in watch.rows] == [(0.1, 1), (0.2, 1)]
    assert [watch.counts(number) for number in (1, 2, 21, 22)] == [True, False, True, False]
    recurring = losses.watch(recurring=True)
    assert [(row.n, row.misses) for row in recurring.rows] == [(60, 60), (60, 60)]


def test_the_number_of_watched_guarantees_is_bounded():
    losses = Losses()
    for number in range(1, 60):
        losses.add(number / 100, [1])
    watch = losses.watch()
    assert len(watch.rows) == 32
    assert [watch.counts(number) for number in (32, 33)] == [True, False]


def test_misses_are_watched_where_they_can_contradict_the_guarantee():
    watched = [
        {},
        {"delta": 0.01, "group": "night", "distinct": "label", "abstain": True},
        {"mix": "any"},
    ]
    others = [
        {"delta": 0.99},  # its misses contradict nothing
        {"delta": None},
        {"simultaneous": True},  # alpha may be chosen where the set misses
        {"mix": {"day": 0.5, "night": 0.5}},
        {"risk": "recall"},
        {"alpha": {"miss": 0.3, "false-discovery": 0.9}},
    ]
    for terms in (*watched, *others):
        assert Terms(**({"alpha": 0.2} | terms)).watched is (terms in watched), terms


def test_losses_count_in_the_order_of_the_queries_not_of_the_feedback():
    losses, expected = Losses(), RiskMonitor(0.1, monitoring.LEVEL * 6 / np.pi**2)
    misses = np.random.default_rng(0).random(300) < 0.09
    queries = [losses.query(0.1) for _ in misses]
    watch = losses.watch(wait=np.inf)
    for row in np.argsort(np.arange(300) + 100 * ~misses, kind="stable"):  # misses are known sooner
        queries[row](misses[row])
        watch.refresh()
    assert not expected.update(misses)
    (row,) = watch.rows
    assert (row.n, row.misses, row.unreported, row.waiting) == (300, misses.sum(), 0, 0)
    assert row.evidence == pytest.approx(expected.evidence)
    assert not watch.alarm


def test_a_query_without_feedback_is_waited_for_and_then_counts_as_a_miss(monkeypatch):
    def counts():
        watch.refresh()
        return [(row.n, row.misses, row.unreported, row.waiting) for row in watch.rows]

    now = 0.0
    monkeypatch.setattr(monitoring.time, "time", lambda: now)
    losses = Losses()
    queries = [losses.query(0.1, time=float(second)) for second in range(5)]
    losses.query(0.1, b"2", time=5.0)  # the second one again
    queries += [losses.query(0.1, time=float(second)) for second in (6, 7)]
    watch = losses.watch(wait=60)
    assert counts() == []
    for number in (1, 3, 5):
        queries[number](miss=False, time=now)
    assert counts() == [(0, 0, 0, 3)]
    now = 60.5  # nothing known precedes the first query, which is therefore left out
    assert counts() == [(1, 0, 0, 2)]
    queries[2](miss=False, time=62.1)
    now = 62.1  # too late
    assert counts() == [(3, 1, 1, 1)]
    queries[4](miss=True, time=now)
    assert counts() == [(5, 2, 1, 0)]
    now = 100.0  # no feedback follows on the last one
    assert counts() == [(5, 2, 1, 0)]
    before = watch.rows
    watch = losses.watch(wait=60)
    assert watch.rows == before


@pytest.mark.statistical
def test_an_order_that_depends_on_the_outcome_raises_false_alarms_and_that_of_queries_does_not():
    rng, n, alarms, naive = np.random.default_rng(1), 400, 0, 0
    for _ in range(100):
        losses, misses = Losses(), rng.random(n) < 0.07
        queries = [losses.query(0.1) for _ in misses]
        order = np.argsort(np.arange(n) + 200 * ~misses, kind="stable")
        for row in order:
            queries[row](misses[row])
        alarms += losses.watch().alarm
        naive += RiskMonitor(0.1, monitoring.LEVEL).update(misses[order])
    assert alarms <= 4  # P(more than this at level 0.01) < 0.5%
    assert naive > 90


@pytest.mark.statistical
def test_false_alarms_of_all_guarantees_together_are_at_most_the_level(request, monkeypatch):
    # At a larger level, where alarms can be counted. The risks are as large as is guaranteed; some
    # queries are repeated many times, those that miss more often than others.
    monkeypatch.setattr(monitoring, "LEVEL", 0.2)
    rounds, queries = (400 if request.config.getoption("full") else 80), 250
    guarantees = [(alpha, delta) for alpha in (0.1, 0.2, 0.3) for delta in (0.05, 0.1)]
    rng = np.random.default_rng(0)
    alarms = {"watch": 0, "each at the whole level": 0, "repeated queries": 0}
    for _ in range(rounds):
        losses, alone, repeated = Losses(), [], []
        for number, (alpha, delta) in enumerate(guarantees):
            misses = rng.random(queries) < alpha
            times = np.where(misses, 3, 1)
            for row, (miss, often) in enumerate(zip(misses, times, strict=True)):
                losses.add(alpha, [miss] * often, digest=b"%d-%d" % (number, row), delta=delta)
            monitor = RiskMonitor(alpha, 0.2)
            monitor.update(misses)
            alone.append(monitor.alarm)
            share = 0.2 * 6 / (np.pi * (number + 1)) ** 2
            monitor = RiskMonitor(alpha, share)
            monitor.update(np.repeat(misses, times))
            repeated.append(monitor.alarm)
        alarms["watch"] += losses.watch().alarm
        alarms["each at the whole level"] += any(alone)
        alarms["repeated queries"] += any(repeated)
    most = rounds * 0.2 + 3 * np.sqrt(rounds * 0.2 * 0.8)
    assert alarms["watch"] <= most
    assert alarms["each at the whole level"] > alarms["watch"]
    assert alarms["repeated queries"] > most


# Over HTTP


def respond(client, vector, label=None, **feedback):
    """The outcome of feedback on the answer to a vector; by default, whether its set matches."""
    body = {"vector": vector.tolist(), "alpha": ALPHA}
    answer = client.post("/retrieve", json=body).json()
    if label is not None:
        feedback |= {"match": label in answer["labels"], "label": label}
    return client.post("/feedback", json={"answer": answer["answer"]} | feedback).json()


ALARM = 'rcir_monitor_alarm{alpha="0.2",delta="0.1",terms="{\\"risk\\": \\"miss\\"}"} 1.0'


def test_an_alarm_of_feedback_survives_a_restart(place, serving):
    with serving(place) as client:
        for vector in drawn(60, 8)[0]:
            outcome = respond(client, vector, match=False)
            if outcome["alarm"]:
                break
        assert outcome == {"accepted": True, "new": True, "watched": True, "alarm": True}
        before = client.get("/monitor").json()
        assert client.get("/ready").json()["alarm"] is True
        assert ALARM in client.get("/metrics").text
    with serving(place) as client:
        after = client.get("/monitor").json()
        assert ALARM in client.get("/metrics").text
    (now,), (then,) = after["guarantees"], before["guarantees"]
    assert now.pop("evidence") == pytest.approx(then.pop("evidence"))
    assert now == then
    assert now["terms"]["alpha"] == ALPHA
    assert now["misses"] == now["n"] > 3


def test_queries_of_the_calibration_and_the_gallery_are_no_evidence(place, serving):
    queries = [
        drawn(900, 2)[0][:3],  # which tuned or calibrated
        drawn(500, 1)[0][:3],
        drawn(1, 8)[0],
    ]
    with serving(place) as client:
        for vector in np.concatenate(queries):
            outcome = respond(client, vector, match=False)
        (row,) = client.get("/monitor").json()["guarantees"]
    assert outcome["watched"] is True
    assert (row["n"], row["misses"]) == (1, 1)


def test_unmonitored_queries_are_not_waited_for_and_old_ones_are_misses(place, serving, tmp_path):
    first, sampled_out, unknown, last = drawn(4, 8)[0]

    def counts():
        (row,) = client.get("/monitor").json()["guarantees"]
        return [row[name] for name in ("n", "misses", "unreported", "waiting")]

    with serving(place) as client:
        assert respond(client, first, match=False)["watched"] is True
        body = {"vector": sampled_out.tolist(), "alpha": ALPHA, "monitored": False}
        assert client.post("/retrieve", json=body).status_code == 200
        client.post("/retrieve", json={"vector": unknown.tolist(), "alpha": ALPHA})
        assert respond(client, last, match=False)["watched"] is False
        assert counts() == [1, 1, 0, 1]
    with sqlite3.connect(tmp_path / "feedback.db") as connection:
        for table in ("answers", "feedback"):
            connection.execute(f"UPDATE {table} SET time = time - 2 * 86400")
    with serving(place) as client:
        assert counts() == [1, 1, 0, 1]
    with serving(place, feedback_days=1.9) as client:
        assert counts() == [3, 3, 1, 0]


def test_clustered_queries_are_no_evidence(tmp_path, serving):
    gallery, labels = drawn(500, 1)
    retriever = rcir.Retriever.from_embeddings(gallery, labels=labels)
    parts = []
    for seed, first in ((2, 0), (3, 90)):
        results = retriever.search_labelled(retriever.labelled(*drawn(450, seed)))
        parts.append(
            in_population(results, clusters=np.arange(450) // 5 + first, cluster_word="video")
        )
    retriever.calibrate_splits(*parts, score_function="quantile")
    with serving(retriever.save(tmp_path / "clustered")) as client:
        assert respond(client, drawn(1, 8)[0][0], match=False)["watched"] is False
        monitor = client.get("/monitor").json()
        assert monitor["guarantees"] == []
        assert (monitor["drift"]["n"], monitor["drift"]["alarm"]) == (0, False)
        assert "clusters (video)" in monitor["drift"]["sentence"]


def test_changed_queries_raise_an_alarm_without_feedback(vectors, place, serving):
    changed = drawn(200, 9, noise=2.5)[0]
    earlier = drawn(900, 2)[0][:50]  # they tuned or calibrated
    with serving(place, store=None) as client:
        for batch in (drawn(300, 8)[0], earlier, changed[:3].repeat(100, axis=0)):
            body = {"vectors": batch.tolist(), "alpha": ALPHA}
            assert client.post("/retrieve/batch", json=body).status_code == 200
        before = client.get("/monitor").json()
        assert (before["drift"]["n"], before["drift"]["alarm"]) == (303, False)
        assert client.get("/ready").json()["drift_alarm"] is False
        client.post("/retrieve/batch", json={"vectors": changed.tolist(), "alpha": ALPHA})
        after = client.get("/monitor").json()
        assert (after["drift"]["n"], after["drift"]["alarm"], after["alarm"]) == (500, True, False)
        assert "not show that the risk" in after["drift"]["sentence"]
        assert client.get("/ready").json()["drift_alarm"] is True
        assert "rcir_drift_alarm 1.0" in client.get("/metrics").text
    monitor = vectors.query_monitor()
    answers = vectors.retrieve(np.concatenate([drawn(300, 8)[0], changed]), ALPHA, DELTA)
    for answer in answers[:303]:
        assert not monitor.update([answer])
    assert monitor.update(answers[303:])


def test_feedback_that_contradicts_the_answer_is_refused(place, serving):
    with serving(place) as client:
        body = {"vector": drawn(1, 8)[0][0].tolist(), "alpha": ALPHA}
        answer = client.post("/retrieve", json=body).json()
        inside = answer["labels"][0]
        outside = next(label for label in range(20) if label not in answer["labels"])
        for match, label in (
            *((True, "fig"), (True, outside), (False, inside), (True, True), ("yes", 3)),
        ):
            feedback = {"answer": answer["answer"], "match": match, "label": label}
            assert client.post("/feedback", json=feedback).status_code == 400, feedback
        feedback = {"answer": answer["answer"], "match": True, "label": inside}
        assert client.post("/feedback", json=feedback).json()["new"] is True
    with serving(place, store=None) as client:
        assert client.post("/retrieve", json=body).json()["answer"] is None
        refused = client.post("/feedback", json={"answer": "x", "match": True})
    assert (refused.status_code, refused.json()["error"]) == (409, "no-feedback")


# Calibration


def keep_feedback(retriever, place, file, vectors, labels, unlabelled=None):
    """Keep feedback on answers of the retriever in a folder, some of it without a label.

    Hits have none if `unlabelled` is True, and misses if it is False.
    """
    store = Store(file)
    queries = retriever.searcher.prepare(vectors).with_population()
    answers = retriever.retrieve(vectors, ALPHA, DELTA)
    names = store.add([(Folder(place).version(), Terms(alpha=ALPHA), queries, answers)])
    for name, answer, label in zip(names, answers, labels.tolist(), strict=True):
        match = label in answer.labels
        label = None if match is unlabelled else label
        store.feed(Feedback(answer=name, match=match, label=label))
    store.close()


def risk_of(retriever, noise, n=6000):
    vectors, labels = drawn(n, 20, noise=noise)
    answers = retriever.retrieve(vectors, ALPHA, DELTA)
    pairs = zip(answers, labels.tolist(), strict=True)
    return np.mean([label not in answer.labels for answer, label in pairs])


def test_queries_that_changed_are_certified_again(vectors, place, file):
    noise = 1.3  # calibrated at 0.9
    assert risk_of(vectors, noise, 2000) > 1.3 * ALPHA
    keep_feedback(vectors, place, file, *drawn(400, 21, noise=noise))
    assert recalibrate(place, feedback=file).n_calibration == 400
    loaded = rcir.load(place)
    assert risk_of(loaded, noise, 2000) <= ALPHA
    assert loaded.calibration.miss_rule.score_function.name == "quantile"
    assert len(loaded.calibration.tuning_queries) == len(vectors.calibration.tuning_queries)
    # The answers were those of the previous version; there is no feedback on this one.
    with pytest.raises(InvalidData, match="no feedback"):
        recalibrate(place, feedback=file)
    keep_feedback(loaded, place, file, *drawn(50, 22), unlabelled=True)
    with pytest.raises(InvalidData, match="match: true have no label"):
        recalibrate(place, feedback=file)
    with pytest.raises(DataUnavailable, match="--feedback"):
        recalibrate(place, feedback=file.with_name("none.db"))


def test_misses_without_a_label_calibrate_as_queries_that_match_nothing(
    vectors, place, file, capsys
):
    noise = 1.3
    queries, labels = drawn(400, 21, noise=noise)
    answers = vectors.retrieve(queries, ALPHA, DELTA)
    pairs = zip(labels.tolist(), answers, strict=True)
    missed = np.array([label not in answer.labels for label, answer in pairs])
    keep_feedback(vectors, place, file, queries, labels, unlabelled=False)
    keep_feedback(vectors, place, file, drawn(500, 1)[0][:3], drawn(500, 1)[1][:3])
    assert recalibrate(place, feedback=file).n_calibration == 400
    said = capsys.readouterr().out
    assert [f"{count} " in said for count in (400, missed.sum(), 3)] == [True] * 3
    loaded = rcir.load(place)
    scores = loaded.calibration.miss_rule.evidence.match_score[::-1]  # the latest first
    np.testing.assert_array_equal(np.isinf(scores), missed)
    assert missed.mean() > 1.3 * ALPHA
    with pytest.raises(RiskUnattainable):
        loaded.guarantee(ALPHA, DELTA)
    loaded.recalibrate()
    for options in ({"counted": "matchable"}, {"beta": 0.9}):  # such misses may have a match
        with pytest.raises(InvalidConfig, match="unlabelled_misses"):
            loaded.guarantee(0.5, DELTA, **options)


def test_feedback_certifies_rules_that_the_gallery_tuned(tmp_path, file):
    gallery, labels = drawn(500, 1)
    retriever = rcir.Retriever.from_embeddings(gallery, labels=labels)
    retriever.calibrate(*drawn(150, 2), "quantile")
    place = retriever.save(tmp_path / "few")
    keep_feedback(retriever, place, file, *drawn(200, 21), unlabelled=False)
    assert recalibrate(place, feedback=file).calibration.tuned_on_gallery
    calibration = rcir.load(place).calibration
    assert len(calibration.calibration_queries) == 200
    assert not calibration.can_cover_new_labels  # the labels of misses are unknown
    with pytest.raises(InvalidConfig, match="known"):
        calibration.guarantee(make_request(0.5, DELTA, query_labels="new"))


def test_the_label_of_a_set_with_only_one_is_that_of_a_query_with_a_match(
    vectors, place, serving, tmp_path
):
    queries, labels = drawn(40, 9, noise=0.3)
    answers = vectors.retrieve(queries, ALPHA, DELTA)
    pairs = zip(answers, labels.tolist(), strict=True)
    one = next(row for row, (answer, label) in enumerate(pairs) if set(answer.labels) == {label})
    several = next(row for row, answer in enumerate(answers) if len(set(answer.labels)) > 1)
    with serving(place) as client:
        for row in (one, several):
            assert respond(client, queries[row], match=True)["accepted"]
    reported = Store(tmp_path / "feedback.db").reported(Folder(place).version())
    assert reported.labels == [None, labels[one]]


@pytest.mark.slow
@pytest.mark.statistical
def test_the_guarantee_holds_over_calibrations_by_feedback(vectors, place, tmp_path):
    noise, risks = 1.3, []
    for seed in range(40):
        copy(vectors).save(place)
        file = tmp_path / f"{seed}.db"
        keep_feedback(vectors, place, file, *drawn(300, 100 + seed, noise=noise))
        recalibrate(place, feedback=file)
        risks.append(risk_of(rcir.load(place), noise))
    # P(more violations than this at delta = 0.1) < 0.5%.
    assert sum(risk > ALPHA for risk in risks) <= 10
    assert np.mean(risks) > 0.7 * ALPHA  # not by sets that are too large


def test_repeated_queries_gallery_items_and_old_queries_are_left_out(vectors, place, file):
    gallery, labels = drawn(500, 1)
    keep_feedback(vectors, place, file, gallery[:20], labels[:20])
    with pytest.raises(InvalidData, match="gallery"):
        recalibrate(place, feedback=file)
    keep_feedback(vectors, place, file, *drawn(200, 40))
    changed = datetime.now()
    queries, more = drawn(300, 41, noise=1.3)
    parts = [np.concatenate(each) for each in ((queries, queries[:50]), (more, more[:50]))]
    keep_feedback(vectors, place, file, *parts)
    assert recalibrate(place, feedback=file, since=changed).n_calibration == 300
    copy(vectors).save(place)
    assert recalibrate(place, feedback=file).n_calibration == 500
    copy(vectors).save(place)
    with pytest.raises(InvalidData, match="2100"):
        recalibrate(place, feedback=file, since=datetime(2100, 1, 1))
    with pytest.raises(InvalidConfig, match="since"):
        recalibrate(place, since=changed)
