"""Rules are fitted when a request needs them first, and do not depend on the order of requests."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import rcir
from rcir.retrieval.label_ranking import list_items
from rcir.retrieval.rules import RuleKind, Rules

RNG = np.random.default_rng(0)
LABELS = RNG.integers(20, size=900)
VECTORS = RNG.normal(size=(20, 8))[LABELS] + 0.9 * RNG.normal(size=(900, 8))
REQUESTS = [
    {"alpha": 0.2},
    {"alpha": 0.4, "distinct": "label"},
    {"alpha": 0.7, "risk": "recall"},
    {"alpha": 0.9, "risk": "false-discovery"},
    {"alpha": {"miss": 0.3, "recall": 0.9}},
    {"alpha": 0.5, "query_labels": "new"},
    {"alpha": 0.9, "query_labels": "any", "risk": "recall"},
]


def calibrated():
    retriever = rcir.Retriever.from_embeddings(VECTORS[:400], labels=LABELS[:400])
    retriever.calibrate(VECTORS[400:], LABELS[400:], tuning="queries")
    return retriever


def thresholds(retriever, requests):
    return [retriever.guarantee(delta=0.1, **request).threshold for request in requests]


@pytest.fixture(scope="module")
def expected():
    return thresholds(calibrated(), REQUESTS)


def test_the_rule_of_a_risk_is_fitted_by_its_first_request_and_no_other(monkeypatch):
    calls = []  # only risks of all matches list all items of a label
    counted = lambda *data: calls.append(1) or list_items(*data)  # noqa: E731
    monkeypatch.setattr("rcir.retrieval.calibrate.list_items", counted)
    retriever = calibrated()
    thresholds(retriever, REQUESTS[:2])
    assert not calls
    thresholds(retriever, REQUESTS[2:3])
    number = len(calls)
    assert number
    thresholds(retriever, REQUESTS[:3])
    assert len(calls) == number


def test_the_order_of_requests_makes_no_difference(expected):
    assert thresholds(calibrated(), REQUESTS[::-1]) == expected[::-1]


def test_a_saved_retriever_answers_what_was_not_requested_before(expected, tmp_path):
    loaded = rcir.load(calibrated().save(tmp_path / "saved"))
    assert thresholds(loaded, REQUESTS) == expected
    assert not any(rules.source for rules in loaded.calibration.rules.values())


def test_a_pickled_retriever_answers_what_was_not_requested_before(expected):
    assert thresholds(pickle.loads(pickle.dumps(calibrated())), REQUESTS) == expected


def test_threads_that_request_a_rule_together_get_the_same_one(expected):
    retriever = calibrated()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: thresholds(retriever, REQUESTS), range(8)))
    assert results == [expected] * 8
    rules = retriever.calibration.rules[RuleKind()]
    assert rules["recall"] is rules.fitted["recall"]


def test_rules_are_listed_while_another_thread_fits_one():
    class Growing(dict):
        def get(self, risk):
            self[f"risk {len(self)}"] = "new"
            return super().get(risk)

    rules = Rules(Growing(miss="miss", recall="recall"))
    assert {"miss", "recall"} <= rules.fit_all().keys()


def test_the_report_fits_what_it_shows(expected):
    retriever = rcir.Retriever.from_embeddings(VECTORS[:400], labels=LABELS[:400])
    report = retriever.calibrate(VECTORS[400:], LABELS[400:], tuning="queries")
    rules = retriever.calibration.rules
    assert [len(rules[kind].fitted) for kind in (RuleKind(), RuleKind("label"))] == [1, 0]
    assert not report.comparison["label"]  # a model of the labels needs none
    assert [len(rules[kind].fitted) for kind in (RuleKind(), RuleKind("label"))] == [1, 1]
    assert thresholds(retriever, REQUESTS) == expected
