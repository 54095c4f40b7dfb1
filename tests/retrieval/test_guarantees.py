"""The guarantee of every kind of request, recomputed from the calibration queries."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel, RiskUnattainable
from tests.retrieval.retrievers import build, calibrate, guarantee, name_case, retrieve, search
from tests.retrieval.whole_numbers import (
    CALIBRATION,
    DELTA,
    DEPTH,
    GALLERY,
    TEST,
    TUNING,
    hoeffding_bentkus,
)

HARD = CALIBRATION.groups == "hard"


def smallest_threshold(scores, certified):
    """The smallest threshold whose number of misses is certified, by trying all of them."""
    for threshold in np.unique(scores[np.isfinite(scores)]):
        if certified(np.sum(scores > threshold)):
            return threshold
    return None


def by_binomial(scores, alpha, delta=DELTA):
    return smallest_threshold(scores, lambda n: binom.cdf(n, len(scores), alpha) <= delta)


def sets(threshold, tolerance=1e-3):
    """(n, DEPTH) whether a rank is in the set of each calibration query."""
    return np.arange(DEPTH) / CALIBRATION.scale[:, None] <= threshold * (1 + tolerance)


@pytest.mark.parametrize("alpha", [0.1, 0.3])
def test_misses_are_certified_by_the_binomial_bound(certified, alpha):
    found = guarantee(certified, alpha)
    assert found.threshold == pytest.approx(by_binomial(CALIBRATION.scores, alpha), rel=1e-6)
    assert (found.bound, found.n_calibration) == ("binomial", 400)


def test_distinct_labels_are_certified_by_the_ranks_of_labels(certified):
    ranks = []
    for order, label in zip(CALIBRATION.order, CALIBRATION.labels.tolist(), strict=True):
        seen = list(dict.fromkeys(GALLERY.labels[order].tolist()))
        ranks.append(1 + seen.index(label) if label in seen else np.inf)
    found = guarantee(certified, 0.2, distinct="label")
    expected = by_binomial((np.array(ranks) - 1) / CALIBRATION.scale, 0.2)
    assert found.threshold == pytest.approx(expected, rel=1e-6)
    assert found.request.distinct == "label"
    recall = guarantee(certified, 0.6, distinct="label", risk="recall")
    assert "a query's true labels" in str(recall)


@pytest.mark.parametrize("alpha", [0.4, 0.6, 0.9])
def test_recall_is_certified_with_the_smallest_possible_threshold(certified, alpha):
    found = guarantee(certified, alpha, risk="recall")
    scores = np.unique((np.arange(DEPTH) / CALIBRATION.scale[:, None])[CALIBRATION.relevant])

    def p_value(threshold):  # scores are stored in single precision
        hits = (sets(threshold, tolerance=1e-6) & CALIBRATION.relevant).sum(axis=1)
        return hoeffding_bentkus(1 - hits / CALIBRATION.n_relevant, alpha)

    place = np.argmin(np.abs(scores - found.threshold))
    assert found.threshold == pytest.approx(scores[place], rel=1e-6)
    assert p_value(scores[place]) <= DELTA < p_value(scores[place - 1])
    assert (found.risk, found.bound) == ("recall", "hoeffding-bentkus")
    assert found.risk_bound == alpha


@pytest.mark.parametrize(
    ("alpha", "names"),
    [
        (0.9, ("false-discovery",)),
        ({"miss": 0.6, "false-discovery": 0.9}, ("miss", "false-discovery")),
        ({"miss": 0.4, "recall": 0.9}, ("miss", "recall")),
        ({"miss": 0.6, "recall": 0.95, "false-discovery": 0.95},) * 2,
    ],
    ids=name_case,
)
def test_every_requested_risk_is_certified_by_the_calibration_queries(certified, alpha, names):
    several = isinstance(alpha, dict)
    options = {} if several else {"risk": "false-discovery"}
    found = guarantee(certified, alpha, **options)
    hits = (sets(found.threshold) & CALIBRATION.relevant).sum(axis=1)
    losses = {
        "miss": hits == 0,
        "recall": 1 - hits / CALIBRATION.n_relevant,
        "false-discovery": 1 - hits / sets(found.threshold).sum(axis=1),
    }
    for risk in names:
        level = alpha[risk] if several else alpha
        if risk == "miss":
            assert binom.cdf(losses["miss"].sum(), 400, level) <= DELTA
        else:
            assert hoeffding_bentkus(losses[risk], level) <= DELTA
    assert (found.alpha, found.risk) == (alpha, ", ".join(names))
    assert found.risk_bound == (None if several else alpha)


def test_answers_are_wrong_no_more_often_than_the_binomial_bound_allows(learned):
    answers = retrieve(learned, 0.35, part=CALIBRATION, abstain=True)
    wrong = [
        answer.labels[0] != label
        for answer, label in zip(answers, CALIBRATION.labels, strict=True)
        if not answer.abstained
    ]
    assert 50 < len(wrong) < 350
    assert binom.cdf(sum(wrong), len(wrong), 0.35) <= DELTA
    # If all queries were answered, too many would be wrong.
    assert binom.cdf(np.sum(CALIBRATION.ranks > 1), 400, 0.35) > DELTA


def test_a_mix_with_more_hard_queries_needs_a_larger_threshold(certified):
    thresholds = []
    for share in (0.1, 0.5, 0.9):
        mix = {"hard": share, "easy": 1 - share}
        found = guarantee(certified, 0.3, mix=mix)
        missed = CALIBRATION.scores > found.threshold * (1 + 1e-3)
        weighted = share * missed[HARD].mean() + (1 - share) * missed[~HARD].mean()
        # Below alpha, as a certificate requires, but not by far.
        assert 0.15 < weighted < 0.3
        assert (found.to_dict()["mix"], found.bound) == (mix, "betting")
        thresholds.append(found.threshold)
    assert thresholds == sorted(set(thresholds))


# Requests that are refused


@pytest.mark.parametrize(
    ("alpha", "delta", "options", "error", "word"),
    [
        (0, 0.1, {}, InvalidRiskLevel, "alpha"),
        (0.3, 0.0, {"risk": "false-discovery"}, InvalidRiskLevel, "delta"),
        ({"miss": 1.0, "recall": 0.9}, 0.1, {}, InvalidRiskLevel, "miss"),
        (0.3, 0.1, {"risk": "hits"}, InvalidConfig, "hits"),
        (0.3, 0.1, {"distinct": "id"}, InvalidConfig, "distinct"),
        (0.3, 0.1, {"group": "red"}, InvalidConfig, "easy"),
        (0.3, 0.1, {"abstain": "yes"}, InvalidConfig, "abstain"),
        ({"recall": 0.3}, 0.1, {"simultaneous": True}, InvalidConfig, "miss"),
        ({"miss": 0.3}, 0.1, {"risk": "recall"}, InvalidConfig, "risk"),
        (0.001, 0.1, {"group": "hard"}, RiskUnattainable, "hard"),
    ],
    ids=name_case,
)
def test_a_request_that_makes_no_sense_is_refused(certified, alpha, delta, options, error, word):
    with pytest.raises(error, match=word):
        retrieve(certified, alpha, delta, **options)
    with pytest.raises(error, match=word):
        guarantee(certified, alpha, delta, **options)


@pytest.mark.parametrize(
    ("alpha", "options", "possible"),
    [
        (0.01, {"risk": "recall"}, True),
        (0.1, {"risk": "false-discovery"}, True),
        ({"miss": 0.1, "false-discovery": 0.1}, {}, False),
        (0.001, {"abstain": True}, True),
        (0.001, {"distinct": "label"}, True),
        (0.001, {"group": "hard"}, True),
    ],
    ids=name_case,
)
def test_an_unattainable_request_reports_the_smallest_attainable_alpha(
    certified, alpha, options, possible
):
    with pytest.raises(RiskUnattainable) as refused:
        guarantee(certified, alpha, **options)
    smallest = refused.value.minimum_alpha
    assert (smallest is not None) == possible
    if possible:
        # Rounded up: false discoveries are searched to four decimals.
        guarantee(certified, smallest + 1e-9, **options)
        with pytest.raises(RiskUnattainable):
            guarantee(certified, smallest - 2e-4, **options)


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"score_function": "best"}, InvalidConfig, "learned"),
        ({"bound": "chernoff"}, InvalidConfig, "chernoff"),
        ({"alphas": (2.0,)}, InvalidRiskLevel, "alpha"),
        ({"alphas": ()}, InvalidRiskLevel, "alphas"),
        ({"alphas": 0.1}, InvalidRiskLevel, "alphas"),
    ],
    ids=name_case,
)
def test_a_refused_calibration_leaves_the_previous_one(options, error, word):
    retriever = calibrate(build())
    before = guarantee(retriever, 0.3)
    tuning, calibration = (search(retriever, part) for part in (TUNING, CALIBRATION))
    with pytest.raises(error, match=word):
        retriever.calibrate_splits(tuning, calibration, **options)
    with pytest.raises(InvalidData, match="at least 2"):
        retriever.calibrate_splits(search(retriever, TUNING[:1]), calibration, "quantile")
    assert guarantee(retriever, 0.3) == before
    assert len(retrieve(retriever, 0.3)) == len(TEST)


@pytest.mark.parametrize("copied", [False, True])
def test_calibration_queries_cannot_choose_the_sizes(copied):
    retriever = build()
    queries = search(retriever, CALIBRATION)
    with pytest.raises(InvalidData, match="same"):
        retriever.calibrate_splits(replace(queries) if copied else queries, queries)
