"""Queries without a match in the gallery get empty sets, whatever says which items match."""

import warnings

import numpy as np
import pytest
from scipy.stats import binom

import rcir
from rcir.errors import InvalidConfig
from tests.retrieval.test_unmatched_queries import (
    FEW,
    GALLERY,
    KINDS,
    LABELS,
    QUERIES,
    VECTORS,
    build,
    mixed,
)

ALPHA, BETA, DELTA = 0.5, 0.8, 0.1
# Vectors of strangers lie farther from all others, but not by much.
ASKED = np.where(FEW[:, None], VECTORS[QUERIES], 0.6 * VECTORS[QUERIES] + 0.4)


def calibrated(kind="numbers", rows=slice(None), **options):
    """A retriever, calibrated on queries of which 70% have no match, and the labels of all."""
    gallery, matching, others = KINDS[kind]
    retriever, labels = build(gallery), mixed(matching, others, FEW)
    if isinstance(labels, rcir.data.WithinRadius):
        labels = labels.subset(np.arange(len(FEW))[rows])
    else:
        labels = labels[rows]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of queries without a match
        retriever.calibrate(ASKED[rows], labels, **options)
    return retriever


def allowed(n, level):
    """The largest number of n errors that certifies a level at delta / 2."""
    return int(np.flatnonzero(binom.cdf(np.arange(n), n, level) <= DELTA / 2)[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_calibration_queries_are_answered_with_as_many_errors_as_scipy_allows(kind):
    alpha = 0.8 if kind == "table" else ALPHA  # all match one item, which lies anywhere
    retriever = calibrated(kind)
    answered = retriever.retrieve(ASKED, alpha, DELTA, beta=BETA)
    evidence = retriever.calibration.miss_rule.evidence
    digests = list(retriever.calibration.calibration_queries.digests)
    every = list(retriever.searcher.prepare(ASKED).with_population().digests)
    sizes = np.array([answered[every.index(digest)].size for digest in digests])
    matchable = evidence.matchable
    assert 0 < matchable.sum() < len(matchable)
    assert np.count_nonzero(sizes[~matchable]) == allowed((~matchable).sum(), BETA)
    missed = sizes[matchable] < evidence.match_rank[matchable]
    assert missed.sum() <= allowed(matchable.sum(), alpha)


def test_strangers_are_told_apart_better_than_by_chance_also_if_none_tunes():
    """Where strangers do not tune, they are imitated; where the gallery's items tune, too."""
    for options in ({"tuning": "queries"}, {"tuning": "gallery"}):
        retriever = calibrated(**options)
        sizes = [len(one.ids) for one in retriever.retrieve(ASKED, 0.7, DELTA, beta=0.5)]
        assert np.mean(np.array(sizes)[FEW] > 0) > np.mean(np.array(sizes)[~FEW] > 0) + 0.2


def test_a_stored_retriever_answers_alike_and_an_empty_set_says_why(tmp_path):
    retriever = calibrated()
    loaded = rcir.load(retriever.save(tmp_path / "saved"))
    options = {"alpha": ALPHA, "delta": DELTA, "beta": BETA}
    before, after = (each.retrieve(ASKED[:60], **options) for each in (retriever, loaded))
    assert [one.ids for one in before] == [one.ids for one in after]
    empty = next(one for one in before if not one.size)
    assert empty.abstained
    assert "no match" in str(empty)
    assert f"at most {BETA:g} of the queries without one" in str(empty.guarantee)


def test_items_that_are_left_out_of_their_own_search_cannot_tell_of_strangers():
    labels = np.where(np.arange(300) < 5, np.arange(300) + 100, LABELS[GALLERY])
    retriever = rcir.Retriever.from_embeddings(VECTORS[GALLERY], labels=labels, leave_one_out=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        retriever.calibrate(VECTORS[GALLERY], labels, "constant", clusters=None)
    with pytest.raises(InvalidConfig, match="Leave all items of some kinds out"):
        retriever.guarantee(ALPHA, DELTA, beta=BETA)
    with pytest.raises(InvalidConfig, match="leaves items out"):
        retriever.guarantee(ALPHA, DELTA, counted="matchable")


@pytest.mark.parametrize("tuning", ["auto", "queries"])
def test_individuals_with_one_photograph_each_can_be_unknown(tuning):
    """No label has a second item from which the odds could be learnt."""
    rng = np.random.default_rng(0)
    gallery = rng.standard_normal((200, 16))
    known = rng.integers(200, size=400)
    strange = np.arange(400) % 3 == 0
    asked = gallery[known] + 0.3 * rng.standard_normal((400, 16))
    asked[strange] = rng.standard_normal((strange.sum(), 16))
    retriever = rcir.Retriever.from_embeddings(gallery, labels=np.arange(200))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        retriever.calibrate(asked, np.where(strange, 1000 + known, known), tuning=tuning)
    sizes = np.array([one.size for one in retriever.retrieve(asked, 0.3, DELTA, beta=0.3)])
    assert (sizes[strange] > 0).mean() <= 0.3
    assert (sizes[~strange] > 0).mean() > 0.8


def test_probabilities_are_those_of_queries_that_get_a_set():
    """Where most unknown queries are rejected, a set holds a match more often than without beta."""
    retriever = calibrated(tuning="queries")
    plain, with_beta = (
        [one for one in retriever.retrieve(ASKED, **options) if one.size]
        for options in ({"alpha": 0.8, "delta": DELTA}, {"alpha": 0.6, "delta": DELTA, "beta": 0.6})
    )
    means = [np.mean([one.match_probability for one in each]) for each in (plain, with_beta)]
    assert means[1] > means[0]
