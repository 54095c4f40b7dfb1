"""The risk of parts of the queries, counted answer by answer."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import binomtest

import rcir
from calibration.subgroups import Part, subgroups

DELTA = 0.05


@pytest.fixture(scope="module")
def answered(outcome):
    """Of each test query: whether it was missed, its size, and its uncertainty."""
    test = outcome.splits.test
    answers = rcir.load(outcome.folder).retrieve(list(test.images), 0.2, DELTA)
    missed = [
        label not in answer.labels for label, answer in zip(test.labels, answers, strict=True)
    ]
    sizes = [answer.size for answer in answers]
    return np.array(missed), np.array(sizes), np.array([each.uncertainty for each in answers])


def parts_of(evaluation, kind):
    return [part for part in evaluation.parts if part.kind == kind]


def holds(part, missed, sizes):
    """Whether a part is what was counted."""
    assert (part.n, part.missed) == (len(missed), missed.sum())
    assert part.risk == pytest.approx(missed.mean())
    assert part.mean_size == pytest.approx(sizes.mean())
    exact = binomtest(int(missed.sum()), len(missed)).proportion_ci(0.95, method="exact")
    assert (part.low, part.high) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_the_level_is_the_certified_one_nearest_to_a_tenth(outcome):
    assert [row.alpha for row in outcome.evaluation.certified] == [0.2, 0.3]
    assert outcome.evaluation.parts_alpha == 0.2


def test_tenths_of_uncertainty_are_counted_from_the_most_certain(outcome, answered):
    missed, sizes, uncertainty = answered
    tenths = parts_of(outcome.evaluation, "uncertainty")
    assert [part.name for part in tenths] == [str(number) for number in range(1, 11)]
    order = sorted(range(300), key=lambda row: uncertainty[row])
    for number, part in enumerate(tenths):
        rows = order[30 * number : 30 * (number + 1)]
        holds(part, missed[rows], sizes[rows])


def test_the_ten_classes_that_are_missed_most_are_shown(outcome, answered):
    missed, sizes, _ = answered
    labels = outcome.splits.test.labels
    shown = parts_of(outcome.evaluation, "class")
    for part in shown:
        rows = np.flatnonzero(labels == int(part.name))
        holds(part, missed[rows], sizes[rows])
    risks = [np.mean(missed[labels == label]) for label in np.unique(labels)]
    assert [part.risk for part in shown] == pytest.approx(sorted(risks, reverse=True)[:10])
    # Of equal risk those of more queries.
    for first, second in pairwise(shown):
        assert (first.risk, first.n) >= (second.risk, second.n)


def test_every_group_is_shown(outcome, answered):
    missed, sizes, _ = answered
    occluded = outcome.splits.test.attributes["occluded"].astype(str)
    groups = parts_of(outcome.evaluation, "group")
    assert [part.name for part in groups] == ["False", "True"]
    for part in groups:
        rows = np.flatnonzero(occluded == part.name)
        holds(part, missed[rows], sizes[rows])
    assert len(outcome.evaluation.parts) == 10 + 10 + 2


@pytest.mark.parametrize("threshold", [0.0, float("inf")])
def test_where_all_or_none_are_missed_an_end_of_the_interval_is_one_or_zero(outcome, threshold):
    """Of 25 or fewer queries; those of one true match at the first rank cannot be missed."""
    test, images = outcome.test, outcome.splits.test
    lost = np.isinf(test.ranks) if np.isinf(threshold) else test.ranks > 1
    found = subgroups(outcome.retriever, test, images, threshold)
    assert sum(part.missed for part in found if part.kind == "uncertainty") == lost.sum()
    for part in found:
        exact = binomtest(part.missed, part.n).proportion_ci(0.95, method="exact")
        assert (part.low, part.high) == pytest.approx((exact.low, exact.high), abs=1e-9)
        assert (part.low == 0) == (part.missed == 0)
        assert (part.high == 1) == (part.missed == part.n)


def test_of_queries_in_clusters_no_interval_is_claimed(outcome):
    """They depend on each other: the binomial distribution is not theirs."""
    test = replace(outcome.test, clusters=np.repeat([*"abcdef"], 50), cluster="drawer")
    plain = subgroups(outcome.retriever, outcome.test, outcome.splits.test, 10.0)
    found = subgroups(outcome.retriever, test, outcome.splits.test, 10.0)
    assert found == [replace(part, low=None, high=None) for part in plain]


def test_of_fewer_queries_than_ten_each_is_a_part(outcome):
    test = outcome.retriever.search_labelled(outcome.splits.test.subset(np.arange(4)))
    found = subgroups(outcome.retriever, test, outcome.splits.test.subset(np.arange(4)), 10.0)
    assert [part.n for part in found if part.kind == "uncertainty"] == [1] * 4
    assert isinstance(found[0], Part)
    assert not [part for part in found if part.kind == "group"]
