"""Feedback as evidence on guarantees."""

from dataclasses import replace

import numpy as np
import pytest

import rcir
from rcir.errors import InvalidData
from rcir.risk import RiskMonitor
from rcir.serving import guarantee_watch
from rcir.serving.guarantee_watch import GuaranteeWatch
from rcir.serving.store import Loss
from rcir.serving.terms import Terms
from tests.serving.conftest import drawn


class Told:
    """Feedback as a store gives it, each on another query unless one is named."""

    def __init__(self):
        self.losses = []

    def add(self, alpha, misses, query=None, **terms):
        key = Terms(alpha=alpha, **terms).key
        for miss in misses:
            number = len(self.losses) + 1
            digest = b"%d" % number if query is None else query
            self.losses.append(Loss(number, key, bool(miss), digest))

    def __call__(self, after):
        return self.losses[after:]


def test_it_goes_on_where_it_was():
    told = Told()
    parts = GuaranteeWatch(told)
    for miss in (0, 1, 1, 0, 1):
        told.add(0.1, [miss])
        told.add(0.2, [miss])
        parts.refresh()
    whole = GuaranteeWatch(told)
    for one, other in zip(whole.rows, parts.rows, strict=True):
        assert (one.terms, one.n, one.misses) == (other.terms, other.n, other.misses)
        assert one.evidence == pytest.approx(other.evidence)
    assert [row.n for row in whole.rows] == [5, 5]


def test_a_risk_that_rose_raises_the_alarm_of_its_alpha():
    told = Told()
    watch = GuaranteeWatch(told)
    rng = np.random.default_rng(0)
    told.add(0.1, rng.random(500) < 0.08)
    told.add(0.3, rng.random(500) < 0.25)
    watch.refresh()
    assert not watch.alarm
    told.add(0.1, rng.random(300) < 0.3)
    watch.refresh()
    assert [(row.terms["alpha"], row.alarm) for row in watch.rows] == [(0.1, True), (0.3, False)]


def test_each_guarantee_has_evidence_of_its_own():
    told = Told()
    told.add(0.1, [1, 1], delta=0.1)
    told.add(0.1, [0], delta=0.05)
    told.add(0.1, [0, 1, 0], group="night")
    rows = GuaranteeWatch(told).rows
    assert [(row.terms["delta"], row.terms["group"], row.n, row.misses) for row in rows] == [
        (0.1, None, 2, 2),
        (0.05, None, 1, 0),
        (0.1, "night", 3, 1),
    ]


def test_a_query_counts_once_for_a_guarantee():
    told = Told()
    watch = GuaranteeWatch(told)
    for _ in range(3):
        told.add(0.1, [1] * 20, query=b"again")
        told.add(0.2, [1] * 20, query=b"again")
        watch.refresh()
    assert [(row.terms["alpha"], row.n) for row in watch.rows] == [(0.1, 1), (0.2, 1)]
    assert [watch.counts(number) for number in (1, 2, 21, 22)] == [True, False, True, False]


def test_where_queries_recur_each_time_counts():
    told = Told()
    told.add(0.1, [1] * 20, query=b"again")
    assert [(row.n, row.misses) for row in GuaranteeWatch(told, recurring=True).rows] == [(20, 20)]


def test_of_queries_in_clusters_nothing_is_watched(tmp_path, serving):
    gallery, labels = drawn(500, 1)
    retriever = rcir.Retriever.from_embeddings(gallery, labels=labels)
    parts = []
    for seed, first in ((2, 0), (3, 90)):
        found = retriever.search_labelled(retriever.labelled(*drawn(450, seed)))
        parts.append(replace(found, clusters=np.arange(450) // 5 + first, cluster="video"))
    same = replace(parts[1], clusters=parts[0].clusters)
    with pytest.raises(InvalidData, match=r"90 clusters \(video 0, 1, 2\) are in the tuning split"):
        retriever.calibrate(parts[0], same)
    retriever.calibrate(*parts, score_function="quantile")
    with serving(retriever.save(tmp_path / "clustered")) as client:
        body = {"vector": drawn(1, 8)[0][0].tolist(), "alpha": 0.3}
        answer = client.post("/retrieve", json=body).json()
        feedback = {"answer": answer["answer"], "match": False}
        assert client.post("/feedback", json=feedback).json()["watched"] is False
        assert client.get("/monitor").json()["guarantees"] == []


@pytest.mark.parametrize(
    ("terms", "watched"),
    [
        ({}, True),
        ({"delta": 0.01, "group": "night", "distinct": "label", "abstain": True}, True),
        ({"mix": "any"}, True),
        ({"delta": 0.99}, False),  # likely to mislead: its misses contradict nothing
        ({"delta": None}, False),
        ({"simultaneous": True}, False),  # alpha may be chosen where the set misses
        ({"mix": {"day": 0.5, "night": 0.5}}, False),
        ({"risk": "recall"}, False),
        ({"alpha": {"miss": 0.3, "false-discovery": 0.9}}, False),
    ],
)
def test_misses_are_watched_where_they_can_contradict_the_guarantee(terms, watched):
    assert Terms(**({"alpha": 0.2} | terms)).watched is watched


@pytest.mark.statistical
def test_all_guarantees_together_give_false_alarms_no_more_often_than_said(request, monkeypatch):
    # At a larger level, where alarms can be counted. The risks are as large as is guaranteed; some
    # queries are asked many times, those that miss more often than others.
    monkeypatch.setattr(guarantee_watch, "LEVEL", 0.2)
    full = request.config.getoption("full")
    rounds, queries = (400 if full else 80), 250
    guarantees = [(alpha, delta) for alpha in (0.1, 0.2, 0.3) for delta in (0.05, 0.1)]
    rng = np.random.default_rng(0)
    alarms = {"watch": 0, "each at the whole level": 0, "each time that it is asked": 0}
    for _ in range(rounds):
        told, alone, repeated = Told(), [], []
        for number, (alpha, delta) in enumerate(guarantees):
            misses = rng.random(queries) < alpha
            times = np.where(misses, 3, 1)
            for row, (miss, often) in enumerate(zip(misses, times, strict=True)):
                told.add(alpha, [miss] * often, query=b"%d-%d" % (number, row), delta=delta)
            monitor = RiskMonitor(alpha, 0.2)
            monitor.update(misses)
            alone.append(monitor.alarm)
            share = 0.2 * 6 / (np.pi * (number + 1)) ** 2
            monitor = RiskMonitor(alpha, share)
            monitor.update(np.repeat(misses, times))
            repeated.append(monitor.alarm)
        alarms["watch"] += GuaranteeWatch(told).alarm
        alarms["each at the whole level"] += any(alone)
        alarms["each time that it is asked"] += any(repeated)
    most = rounds * 0.2 + 3 * np.sqrt(rounds * 0.2 * 0.8)
    assert alarms["watch"] <= most
    assert alarms["each at the whole level"] > alarms["watch"]
    assert alarms["each time that it is asked"] > most


ALARM = 'rcir_monitor_alarm{alpha="0.2",delta="0.1",terms="{\\"risk\\": \\"miss\\"}"} 1.0'


def test_feedback_over_http_is_watched_and_survives_a_restart(place, serving):
    queries, labels = drawn(2000, 8)
    with serving(place) as client:
        for query, label in zip(queries, labels.tolist(), strict=True):
            body = {"vector": query.tolist(), "alpha": 0.2}
            answer = client.post("/retrieve", json=body).json()
            if label in answer["labels"]:
                continue  # as if only complaints were told
            feedback = {"answer": answer["answer"], "match": False}
            said = client.post("/feedback", json=feedback).json()
            if said["alarm"]:
                break
        assert said == {"accepted": True, "new": True, "watched": True, "alarm": True}
        before = client.get("/monitor").json()
        assert client.get("/ready").json()["alarm"] is True
        assert ALARM in client.get("/metrics").text
    with serving(place) as client:
        after = client.get("/monitor").json()
        assert ALARM in client.get("/metrics").text
    (now,), (then,) = after["guarantees"], before["guarantees"]
    assert now.pop("evidence") == pytest.approx(then.pop("evidence"))
    assert now == then
    assert now["terms"]["alpha"] == 0.2
    assert now["misses"] == now["n"] > 3


def test_queries_that_it_knows_are_no_evidence(vectors, place, serving):
    known = vectors.calibration_queries.vectors[:3].tolist()
    gallery = drawn(500, 1)[0][:3].tolist()
    with serving(place) as client:
        for vector in (*known, *gallery, drawn(1, 8)[0][0].tolist()):
            answer = client.post("/retrieve", json={"vector": vector, "alpha": 0.2}).json()[
                "answer"
            ]
            said = client.post("/feedback", json={"answer": answer, "match": False}).json()
        (row,) = client.get("/monitor").json()["guarantees"]
    assert said["watched"] is True
    assert (row["n"], row["misses"]) == (1, 1)


def test_labelled_queries_are_compared_with_those_that_calibrated(vectors, place, serving):
    alike, labels = drawn(60, 9)
    shifted, others = drawn(60, 10, noise=2.5)
    found = {}
    for name, asked, known in (("alike", alike, labels), ("shifted", shifted, others)):
        with serving(place, store=place.with_name(f"{name}.db")) as client:
            for query, label in zip(asked, known.tolist(), strict=True):
                body = {"vector": query.tolist(), "alpha": 0.2}
                answer = client.post("/retrieve", json=body).json()
                match = label in answer["labels"]
                feedback = {"answer": answer["answer"], "match": match, "label": label}
                assert client.post("/feedback", json=feedback).json()["accepted"]
            found[name] = client.get("/monitor").json()["exchangeability"]
        recent = vectors.search_labelled(vectors.labelled(asked, known))
        assert found[name]["p_value"] == pytest.approx(vectors.check(recent, 0.2).p_value)
    assert found["alike"]["p_value"] > 0.01 > found["shifted"]["p_value"]


def test_feedback_that_cannot_be_true_is_refused(place, serving):
    with serving(place) as client:
        body = {"vector": drawn(1, 8)[0][0].tolist(), "alpha": 0.2}
        answer = client.post("/retrieve", json=body).json()
        held = answer["labels"][0]
        other = next(label for label in range(20) if label not in answer["labels"])
        for match, label in ((True, "fig"), (True, other), (False, held), (True, True), ("yes", 3)):
            said = {"answer": answer["answer"], "match": match, "label": label}
            assert client.post("/feedback", json=said).status_code == 400, said
        said = {"answer": answer["answer"], "match": True, "label": held}
        assert client.post("/feedback", json=said).json()["new"] is True


def test_a_server_that_keeps_no_answers_says_so(place, serving):
    with serving(place, store=None) as client:
        body = {"vector": drawn(1, 8)[0][0].tolist(), "alpha": 0.2}
        assert client.post("/retrieve", json=body).json()["answer"] is None
        refused = client.post("/feedback", json={"answer": "x", "match": True})
    assert (refused.status_code, refused.json()["error"]) == (409, "no-feedback")
    assert "--feedback" in refused.json()["message"]


def test_no_more_guarantees_are_watched_than_alarms_can_come_from():
    told = Told()
    for number in range(1, 60):
        told.add(number / 100, [1])
    watch = GuaranteeWatch(told)
    assert len(watch.rows) == 32
    assert [watch.counts(number) for number in (32, 33)] == [True, False]
