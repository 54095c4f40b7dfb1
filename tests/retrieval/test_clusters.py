"""Queries that come in clusters, such as all that one person drew."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.retrieval.storage import load, save

DELTA = 0.1


def drawn(images, first, people):
    """The same images with who drew them: unequally many each, named from a number on."""
    number = np.sort(np.random.default_rng(first).integers(0, people, len(images)))
    names = np.array([f"d{first + each}" for each in number])
    return replace(images, attributes={**images.attributes, "drawer": names})


@pytest.fixture(scope="module")
def people(splits):
    """Tuning split, calibration and test queries by 30, 80 and 20 others."""
    return (
        drawn(splits.tuning, 0, 30),
        drawn(splits.calibration, 100, 80),
        drawn(splits.test, 200, 20),
    )


@pytest.fixture
def own(folder):
    return load(folder)


def calibrated(own, people, group=None, **options):
    parts = (own.search_labelled(part, group, cluster="drawer") for part in people[:2])
    own.calibrate(*parts, **({"score_function": "quantile"} | options))
    return own


def test_every_query_is_in_the_cluster_that_its_attribute_names(own, people):
    judged = own.search_labelled(people[1], "occluded", cluster="drawer")
    assert judged.clusters.tolist() == people[1].attributes["drawer"].tolist()
    assert judged.cluster == "drawer"
    assert judged.groups.tolist() == people[1].attributes["occluded"].astype(str).tolist()
    assert own.search_labelled(people[1]).clusters is None
    with pytest.raises(InvalidData, match=r"no attribute 'video'; they have .*drawer"):
        own.search_labelled(people[1], cluster="video")


def test_queries_that_know_of_clusters_are_warned_of_unless_one_is_named(own, people):
    known = replace(people[1], cluster="drawer")
    with pytest.warns(UserWarning, match=r"queries come in clusters \(drawer\), .*'drawer'"):
        assert own.search_labelled(known).clusters is None
    assert own.search_labelled(known, cluster="drawer").cluster == "drawer"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"clusters": np.array(["a"] * 99)}, r"400 queries, clusters \(99,\) of type"),
        (
            {"clusters": np.arange(400) / 7},
            r"clusters \(400,\) of type float64: give each a string",
        ),
        ({"clusters": None}, "give clusters and what they are"),
        ({"cluster": None}, "give clusters and what they are"),
    ],
    ids=["few", "numbers", "unnamed", "missing"],
)
def test_clusters_that_are_no_names_of_each_query_are_refused(own, people, change, said):
    judged = own.search_labelled(people[1], cluster="drawer")
    with pytest.raises(InvalidData, match=said):
        replace(judged, **change)


@pytest.fixture
def losses(own, splits, people):
    """Of each drawer the share of calibration queries that a threshold misses, and all prices."""
    sample = own.search(splits.tuning.images).uncertainty
    found = own.search(people[1].images)
    # Of the sample counts what is up to a thousandth above, which rounding may do to a picture.
    scale = np.array([max(1, np.sum(sample <= 1.001 * u)) / 200 for u in found.uncertainty])
    relevant = splits.gallery.labels[found.positions] == people[1].labels[:, None]
    scores = np.where(relevant.any(1), relevant.argmax(1) / scale, np.inf)
    drawers = people[1].attributes["drawer"]

    def shares(threshold):
        missed = scores > threshold
        return np.array([missed[drawers == name].mean() for name in sorted(set(drawers))])

    return shares, np.unique(scores[np.isfinite(scores)])


def hoeffding_bentkus(values, alpha):
    n, mean = len(values), np.mean(values)
    if mean >= alpha:
        return 1.0
    kl = (mean * math.log(mean / alpha) if mean else 0) + (1 - mean) * math.log(
        (1 - mean) / (1 - alpha)
    )
    tail = binom.cdf(math.ceil(round(float(np.sum(values)), 9)), n, alpha)
    return min(math.exp(-n * kl), math.e * tail)


@pytest.mark.parametrize("alpha", [0.3, 0.5])
def test_drawers_are_counted_and_each_counts_alike(own, people, losses, alpha):
    shares, prices = losses
    calibrated(own, people, bound="hoeffding-bentkus")
    guarantee = own.retrieve(people[2].images[0], alpha, DELTA).guarantee
    n = len(set(people[1].attributes["drawer"].tolist()))
    # The tolerance counts as paid.
    p_values = [hoeffding_bentkus(shares(threshold * (1 + 1e-3)), alpha) for threshold in prices]
    first = next(threshold for threshold, p in zip(prices, p_values, strict=True) if p <= DELTA)
    assert guarantee.threshold == pytest.approx(first, rel=2e-3)
    assert (guarantee.cluster, guarantee.n_clusters, guarantee.n_calibration) == ("drawer", n, 400)
    # As many independent queries would certify it with smaller sets.
    plain = own.search_labelled(people[0]), own.search_labelled(people[1])
    own.calibrate(*plain, "quantile", "hoeffding-bentkus")
    assert own.retrieve(people[2].images[0], alpha, DELTA).guarantee.threshold < guarantee.threshold


def test_the_sentence_is_of_further_drawers(own, people, losses):
    shares, _ = losses
    guarantee = calibrated(own, people).retrieve(people[2].images[0], 0.4, DELTA).guarantee
    n = len(set(people[1].attributes["drawer"].tolist()))
    assert str(guarantee) == (
        "With probability at least 0.9, a true match is missing from at most 0.4 of the sets "
        f"returned to queries of any further drawer like the {n} of the 400 calibration queries, "
        f"each drawer counted alike (quantile sizes, betting bound, "
        f"threshold = {guarantee.threshold:.4g})."
    )
    assert 0 < shares(guarantee.threshold).mean() < 0.4


def test_a_group_has_the_clusters_of_its_own_queries(own, people):
    calibrated(own, people, "occluded")
    occluded = people[1].attributes["occluded"] == 1
    guarantee = own.retrieve(people[2].images[0], 0.6, DELTA, group="True").guarantee
    drawers = set(people[1].attributes["drawer"][occluded].tolist())
    assert (guarantee.n_calibration, guarantee.n_clusters) == (occluded.sum(), len(drawers))
    said = (
        f"to queries of group 'True' of any further drawer like the {len(drawers)} of the "
        f"{occluded.sum()} calibration queries, each drawer counted alike ("
    )
    assert said in str(guarantee)
    mixed = own.retrieve(people[2].images[0], 0.6, DELTA, mix="any").guarantee
    assert mixed.threshold >= guarantee.threshold
    assert "whatever the mix of the 2 groups" in str(mixed)


@pytest.mark.parametrize(
    ("alpha", "delta", "options", "said"),
    [
        (0.5, DELTA, {"abstain": True}, r"come in clusters \(drawer\): abstain=True needs indep"),
        (0.5, DELTA, {"simultaneous": True}, r"clusters \(drawer\): neither simultaneous nor any"),
        (0.5, DELTA, {"anytime": True}, r"clusters \(drawer\): neither simultaneous nor anytime"),
        (0.5, DELTA, {"mix": {"True": 1.0}}, r"clusters \(drawer\): mix can be 'any' only"),
    ],
    ids=str,
)
def test_what_needs_independent_queries_is_refused(own, people, alpha, delta, options, said):
    calibrated(own, people, "occluded")
    with pytest.raises(InvalidConfig, match=said):
        own.retrieve(people[2].images[0], alpha, delta, **options)


REQUESTS = (
    (0.4, DELTA, {}),
    (0.5, DELTA, {"distinct": "label"}),
    (0.9, DELTA, {"risk": "recall"}),
    (0.95, DELTA, {"risk": "false-discovery"}),
    ({"miss": 0.6, "false-discovery": 0.98}, DELTA, {}),
    (0.4, None, {}),
    (0.6, DELTA, {"group": "False"}),
    (0.6, DELTA, {"mix": "any"}),
)


@pytest.mark.parametrize("score_function", ["quantile", "reranked"])
def test_every_other_answer_is_the_same_after_loading(own, people, tmp_path, score_function):
    calibrated(own, people, "occluded", score_function=score_function)
    loaded = load(save(own, tmp_path / "clustered"))
    assert loaded.controllers[None].cluster == "drawer"
    images = list(people[2].images[:20])
    for alpha, delta, options in REQUESTS:
        before, after = (
            [answer.to_dict() for answer in each.retrieve(images, alpha, delta, **options)]
            for each in (own, loaded)
        )
        assert after == before
        sentence = str(loaded.retrieve(images[0], alpha, delta, **options).guarantee)
        assert " of any further drawer like the " in sentence
    with pytest.raises(RiskUnattainable):
        loaded.retrieve(images[0], 0.001, DELTA)


def test_a_drawer_in_both_splits_is_refused(own, people):
    first = own.search_labelled(people[0], cluster="drawer")
    names = people[1].attributes["drawer"].copy()
    names[:5] = people[0].attributes["drawer"][0]
    names[5:9] = people[0].attributes["drawer"][-1]
    shared = replace(people[1], attributes={"drawer": names})
    with pytest.raises(
        InvalidData,
        match=r"^2 clusters \(drawer d0, d29\) are in the tuning split and among the calibration "
        "queries: divide the queries by clusters$",
    ):
        own.calibrate(first, own.search_labelled(shared, cluster="drawer"))
    # Nothing was changed by a refusal.
    assert own.retrieve(people[2].images[0], 0.4, DELTA).guarantee.cluster is None


def test_both_splits_come_in_the_same_kind_of_clusters_or_in_none(own, people):
    first, second = (own.search_labelled(part, cluster="drawer") for part in people[:2])
    with pytest.raises(InvalidData, match="tuning split is of clusters None, the calibration q"):
        own.calibrate(own.search_labelled(people[0]), second)
    with pytest.raises(InvalidData, match="of clusters 'drawer', the calibration queries of None"):
        own.calibrate(first, own.search_labelled(people[1]))
    with pytest.raises(InvalidData, match="search both with the same"):
        own.calibrate(first, replace(second, cluster="video"))


def test_queries_in_clusters_are_not_checked_as_independent_ones(own, people):
    with pytest.raises(InvalidData, match=r"queries come in clusters \(drawer\), and are compared"):
        own.check(own.search_labelled(people[2], cluster="drawer"), 0.5)
    calibrated(own, people)
    with pytest.raises(InvalidData, match="calibrate and check with one query of each"):
        own.check(own.search_labelled(people[2]), 0.5)
    with pytest.raises(InvalidData, match="no queries can be added where they come in clusters"):
        own.extend_calibration(own.search_labelled(people[2]))
