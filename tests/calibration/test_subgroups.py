"""The risk of subgroups of the queries, counted answer by answer."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import binomtest

import rcir
from calibration.measure import count_subgroups
from tests.populations import in_population

DELTA = 0.05


def assert_counted(part, missed, sizes):
    assert (part.n, part.missed) == (len(missed), missed.sum())
    assert part.risk == pytest.approx(missed.mean())
    assert part.mean_size == pytest.approx(sizes.mean())
    exact = binomtest(int(missed.sum()), len(missed)).proportion_ci(0.95, method="exact")
    assert (part.low, part.high) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_parts_are_fifths_of_uncertainty_classes_missed_most_and_groups(outcome):
    evaluation, images = outcome.evaluation, outcome.splits.data.test
    assert evaluation.parts_alpha == 0.2  # of the certified levels, 0.2 and 0.3, nearest to 0.1
    answers = rcir.load(outcome.folder).retrieve(list(images.images), 0.2, DELTA)
    pairs = zip(images.labels, answers, strict=True)
    missed = np.array([label not in answer.labels for label, answer in pairs])
    sizes = np.array([answer.size for answer in answers])
    fifths, classes, groups = (
        [part for part in evaluation.parts if part.kind == kind]
        for kind in ("uncertainty", "class", "group")
    )
    assert len(fifths) + len(classes) + len(groups) == len(evaluation.parts)
    assert [part.name for part in fifths] == [str(number) for number in range(1, 6)]
    order = sorted(range(300), key=lambda row: answers[row].uncertainty)
    for number, part in enumerate(fifths):  # from the most certain
        rows = order[60 * number : 60 * (number + 1)]
        assert_counted(part, missed[rows], sizes[rows])
    for part in classes:
        rows = images.labels == int(part.name)
        assert_counted(part, missed[rows], sizes[rows])
    risks = [np.mean(missed[images.labels == label]) for label in np.unique(images.labels)]
    assert [part.risk for part in classes] == pytest.approx(sorted(risks, reverse=True)[:10])
    for first, second in pairwise(classes):  # of equal risk, that of more queries first
        assert (first.risk, first.n) >= (second.risk, second.n)
    occluded = images.attributes["occluded"].astype(str)
    assert [part.name for part in groups] == ["False", "True"]
    for part in groups:
        assert_counted(part, missed[occluded == part.name], sizes[occluded == part.name])


@pytest.mark.parametrize("threshold", [0.0, float("inf")])
def test_where_all_or_none_are_missed_an_end_of_the_interval_is_one_or_zero(outcome, threshold):
    test = outcome.splits.test
    lost = np.isinf(test.ranks) if np.isinf(threshold) else test.ranks > 1
    parts = count_subgroups(outcome.splits, threshold)
    assert sum(part.missed for part in parts if part.kind == "uncertainty") == lost.sum()
    for part in parts:
        exact = binomtest(part.missed, part.n).proportion_ci(0.95, method="exact")
        assert (part.low, part.high) == pytest.approx((exact.low, exact.high), abs=1e-9)
        assert (part.low == 0) == (part.missed == 0)
        assert (part.high == 1) == (part.missed == part.n)


def test_no_interval_is_claimed_for_queries_in_clusters(outcome):
    """They depend on each other, so their misses are not binomial."""
    clusters = np.repeat([*"abcdef"], 50)
    test = in_population(outcome.splits.test, clusters=clusters, cluster_word="drawer")
    plain = count_subgroups(outcome.splits, 10.0)
    clustered = count_subgroups(replace(outcome.splits, test=test), 10.0)
    assert clustered == [replace(part, low=None, high=None) for part in plain]


def test_each_of_fewer_queries_than_five_is_a_part(outcome):
    images = outcome.splits.data.test.subset(np.arange(4))
    test = outcome.retriever.search_labelled(images)
    parts = count_subgroups(replace(outcome.splits, test=test, images=images), 10.0)
    assert [part.n for part in parts if part.kind == "uncertainty"] == [1] * 4
    assert not [part for part in parts if part.kind == "group"]
