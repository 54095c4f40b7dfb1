"""What feedback says of guarantees."""

import numpy as np
import pytest

from rcir.risk import RiskMonitor
from rcir.serving.guarantee_watch import LEVEL, GuaranteeWatch
from tests.serving.conftest import drawn


class Told:
    """Feedback as a store gives it."""

    def __init__(self):
        self.losses = []

    def add(self, alpha, misses):
        for miss in misses:
            self.losses.append((len(self.losses) + 1, alpha, int(miss)))

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
        assert (one.alpha, one.n, one.misses) == (other.alpha, other.n, other.misses)
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
    assert [(row.alpha, row.alarm) for row in watch.rows] == [(0.1, True), (0.3, False)]


@pytest.mark.statistical
def test_all_alphas_together_give_false_alarms_no_more_often_than_said(request):
    # At a larger level, where alarms can be counted; the shares of the alphas are the same.
    full = request.config.getoption("full")
    rounds, alphas, queries = 400 if full else 100, np.linspace(0.1, 0.3, 12), 300
    rng = np.random.default_rng(0)
    larger = 0.2
    shared = same = 0
    for _ in range(rounds):
        evidence = []
        for alpha in alphas:
            monitor = RiskMonitor(alpha, 0.5)
            monitor.update(rng.random(queries) < alpha)  # the risk is alpha, not less
            evidence.append(monitor.evidence)
        shares = [row_share(number) for number in range(1, len(alphas) + 1)]
        shared += any(e >= 1 / (larger * s) for e, s in zip(evidence, shares, strict=True))
        same += any(e >= 1 / larger for e in evidence)
    noise = 3 * np.sqrt(larger * (1 - larger) / rounds)
    assert shared / rounds <= larger + noise
    assert same / rounds > larger + noise  # each alpha at the whole level: too often


def row_share(number):
    """The share of the level that the watch gives its n-th alpha."""
    told = Told()
    for place in range(number):
        told.add(0.01 * (place + 1), [0])
    return GuaranteeWatch(told)._monitors[0.01 * number].level / LEVEL


def test_feedback_over_http_is_watched_and_survives_a_restart(place, serving):
    queries = drawn(40, 8)[0]
    with serving(place) as client:
        for query in queries:
            body = {"vector": query.tolist(), "alpha": 0.2}
            answer = client.post("/retrieve", json=body).json()["answer"]
            said = client.post("/feedback", json={"answer": answer, "match": False})
            assert said.status_code == 200
        assert said.json()["alarm"] is True
        before = client.get("/monitor").json()
        assert client.get("/ready").json()["alarm"] is True
        assert 'rcir_monitor_alarm{alpha="0.2"} 1.0' in client.get("/metrics").text
    with serving(place) as client:
        after = client.get("/monitor").json()
        assert 'rcir_monitor_alarm{alpha="0.2"} 1.0' in client.get("/metrics").text
    (now,), (then,) = after["alphas"], before["alphas"]
    assert now.pop("evidence") == pytest.approx(then.pop("evidence"))
    assert now == then == {"alpha": 0.2, "n": 40, "misses": 40, "alarm": True}


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


def test_a_label_that_the_gallery_cannot_have_is_refused(place, serving):
    with serving(place) as client:
        body = {"vector": drawn(1, 8)[0][0].tolist(), "alpha": 0.2}
        answer = client.post("/retrieve", json=body).json()["answer"]
        said = {"answer": answer, "match": True, "label": "fig"}
        refused = client.post("/feedback", json=said)
        assert (refused.status_code, refused.json()["error"]) == (400, "invalid-data")
        assert client.post("/feedback", json=said | {"label": 3}).status_code == 200


def test_a_server_that_keeps_no_answers_says_so(place, serving):
    with serving(place, store=None) as client:
        body = {"vector": drawn(1, 8)[0][0].tolist(), "alpha": 0.2}
        assert client.post("/retrieve", json=body).json()["answer"] is None
        refused = client.post("/feedback", json={"answer": "x", "match": True})
    assert (refused.status_code, refused.json()["error"]) == (409, "no-feedback")
    assert "--feedback" in refused.json()["message"]


def test_no_more_alphas_are_watched_than_alarms_can_come_from():
    told = Told()
    for number in range(1, 60):
        told.add(number / 100, [1])
    assert len(GuaranteeWatch(told).rows) == 32
