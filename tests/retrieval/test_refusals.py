"""Requests and calibrations that are refused, and what is said then."""

import pytest

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel, RiskUnattainable
from rcir.retrieval.storage import load
from rcir.risk import LabelledResults

DELTA = 0.1


@pytest.mark.parametrize(
    ("alpha", "delta", "options", "error", "said"),
    [
        (0.3, 0.1, {"risk": "hits"}, InvalidConfig, "'hits' is unknown; choose one of miss, recal"),
        (0.3, 0.1, {"distinct": "id"}, InvalidConfig, "distinct is 'id'; it can be 'label' or Non"),
        (0.3, 0.1, {"group": "red"}, InvalidConfig, "'red' has no .*are 'False', 'True'"),
        (
            0.3,
            0.1,
            {"abstain": True, "risk": "recall"},
            InvalidConfig,
            "bounds the miss risk among answers",
        ),
        (0.3, 0.1, {"simultaneous": True, "risk": "recall"}, InvalidConfig, "miss risk alone"),
        (0.3, 0.1, {"simultaneous": True, "abstain": True}, InvalidConfig, "miss risk alone"),
        (0.3, None, {"abstain": True}, InvalidConfig, "delta=None is for"),
        (0.3, None, {"risk": "false-discovery"}, InvalidConfig, "delta=None is for"),
        (0.3, None, {"simultaneous": True}, InvalidRiskLevel, "need a delta"),
        ({"miss": 0.3, "recall": 0.9}, None, {}, InvalidConfig, "delta=None is for"),
        ({"miss": 0.3}, 0.1, {"risk": "recall"}, InvalidConfig, "names several risks"),
        ({"miss": 0.3, "recall": 0.9}, 0.1, {"abstain": True}, InvalidConfig, "several risks"),
        (0.3, 0.1, {"abstain": "yes"}, InvalidConfig, "abstain is 'yes'; it must be True or False"),
        (0.3, 0.1, {"distinct": ["label"]}, InvalidConfig, "it can be 'label' or None"),
        (0.001, 0.1, {"group": "True"}, RiskUnattainable, "group 'True': alpha = 0.001"),
        ({"recall": 0.3}, 0.1, {"simultaneous": True}, InvalidConfig, "miss risk alone"),
        ({"hits": 0.3}, 0.1, {}, InvalidConfig, "'hits' is unknown"),
        ({}, 0.1, {}, InvalidConfig, "no risk to control"),
        ({"miss": 1.0, "recall": 0.9}, 0.1, {}, InvalidRiskLevel, "alpha of miss is 1.0"),
        (0.0, 0.1, {"abstain": True}, InvalidRiskLevel, "alpha is 0"),
        (2, 0.1, {"risk": "recall"}, InvalidRiskLevel, "alpha is 2"),
        (0.3, 0.0, {"risk": "false-discovery"}, InvalidRiskLevel, "delta is 0"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(retriever, splits, alpha, delta, options, error, said):
    with pytest.raises(error, match=said):
        retriever.retrieve(splits.test.images[0], alpha, delta, **options)


@pytest.mark.parametrize(
    ("alpha", "options", "possible"),
    [
        (0.01, {"risk": "recall"}, True),
        (0.1, {"risk": "false-discovery"}, True),
        ({"miss": 0.1, "false-discovery": 0.1}, {}, False),
        (0.01, {"abstain": True}, True),
        (0.01, {"distinct": "label"}, True),
        (0.01, {"group": "True"}, True),
        (0.01, {"simultaneous": True}, True),
    ],
    ids=str,
)
def test_what_is_not_attainable_says_what_is(retriever, splits, alpha, options, possible):
    image = splits.test.images[0]
    with pytest.raises(RiskUnattainable) as refused:
        retriever.retrieve(image, alpha, DELTA, **options)
    smallest = refused.value.minimum_alpha
    assert (smallest is not None) == possible
    if smallest is not None:
        # Rounded up: false discoveries are searched to four decimals.
        assert retriever.retrieve(image, smallest + 1e-9, DELTA, **options).size >= 1
        with pytest.raises(RiskUnattainable):
            retriever.retrieve(image, smallest - 2e-4, DELTA, **options)


def test_without_groups_none_is_known(folder, splits):
    retriever = load(folder)
    retriever.calibrate(
        *map(retriever.search_labelled, (splits.tuning, splits.calibration)), "minmax"
    )
    with pytest.raises(InvalidConfig, match=r"'True' has no calibration.*none have a group"):
        retriever.retrieve(splits.test.images[0], 0.3, DELTA, group="True")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"score_function": "best"},
            InvalidConfig,
            "'best' is unknown; choose one of .*learned, boosted, reranked, auto",
        ),
        ({"bound": "chernoff"}, InvalidConfig, "'chernoff' is unknown"),
        ({"alphas": (2.0,)}, InvalidRiskLevel, "alpha is 2"),
    ],
    ids=str,
)
def test_a_calibration_that_is_refused_leaves_the_one_before(
    retriever, splits, options, error, said
):
    first, second = (
        retriever.search_labelled(part) for part in (splits.tuning, splits.calibration)
    )
    before = retriever.retrieve(splits.test.images[0], 0.3, DELTA)
    controls = dict(retriever.controllers)
    with pytest.raises(error, match=said):
        retriever.calibrate(first, second, **options)
    one = LabelledResults.of(
        retriever.search(splits.tuning.images[:1]), first.relevant[:1], first.totals[:1]
    )
    with pytest.raises(InvalidData, match="at least 2"):
        retriever.calibrate(one, second)
    assert retriever.controllers == controls
    assert retriever.retrieve(splits.test.images[0], 0.3, DELTA).ids == before.ids
