"""Calibration queries that are added in use: guarantees at every moment, and no others."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.integrate import quad

from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable, StaleCalibration
from rcir.retrieval.retriever import Retriever
from tests.populations import in_population
from tests.retrieval.retrievers import (
    build,
    calibrate,
    guarantee,
    missed,
    name_case,
    plain,
    retrieve,
    search,
)
from tests.retrieval.whole_numbers import CALIBRATION, DELTA, FURTHER, GALLERY, TEST, TUNING


@pytest.fixture
def own():
    """With 400 calibration queries."""
    return calibrate(build())


@pytest.fixture
def extended(own):
    """With 400 calibration queries, and 500 that were added."""
    own.extend_calibration(search(own, FURTHER))
    return own


def wealth(misses, n, alpha):
    """Return the wealth of a bet against "the risk is alpha", uniform over smaller risks."""

    def ratio(risk):
        return (risk / alpha) ** misses * ((1 - risk) / (1 - alpha)) ** (n - misses)

    return quad(ratio, 0, alpha, points=[misses / n], limit=200)[0] / alpha


def smallest_threshold(scores, alpha, delta=DELTA):
    """The smallest threshold at which the bet against its misses wins, by trying all of them."""
    for threshold in np.unique(scores[np.isfinite(scores)]):
        misses = np.sum(scores > threshold)
        if misses < alpha * len(scores) and wealth(misses, len(scores), alpha) >= 1 / delta:
            return threshold
    return None


@pytest.mark.parametrize("alpha", [0.2, 0.3])
def test_anytime_guarantees_rest_on_all_queries_so_far(own, alpha):
    before = guarantee(own, alpha, anytime=True)
    assert before.threshold == pytest.approx(
        smallest_threshold(CALIBRATION.scores, alpha), rel=1e-6
    )
    assert (before.n_calibration, before.bound, before.request.holds) == (
        400,
        "anytime",
        "at every moment",
    )
    own.extend_calibration(search(own, FURTHER))
    after = guarantee(own, alpha, anytime=True)
    both = np.concatenate([CALIBRATION.scores, FURTHER.scores])
    assert after.threshold == pytest.approx(smallest_threshold(both, alpha), rel=1e-6)
    assert (after.n_calibration, after.risk_bound) == (900, alpha)
    assert "every moment since this gallery was calibrated" in str(after)


def test_several_levels_are_refused_with_what_to_do(extended):
    with pytest.raises(InvalidConfig, match=r"at_levels is not available.*`retrieve`"):
        extended.at_levels(TEST.vectors, [0.2, 0.3], DELTA, uncertainty=TEST.uncertainty)


def test_more_queries_certify_what_fewer_did_not(own):
    with pytest.raises(RiskUnattainable) as refused:
        guarantee(own, 0.001, distinct="label", anytime=True)
    alpha = refused.value.minimum_alpha * 0.8
    with pytest.raises(RiskUnattainable):
        guarantee(own, alpha, distinct="label", anytime=True)
    own.extend_calibration(search(own, FURTHER))
    found = guarantee(own, alpha, distinct="label", anytime=True)
    assert (found.n_calibration, found.request.distinct) == (900, "label")


@pytest.mark.parametrize(
    ("alpha", "delta", "options"),
    [
        (0.3, DELTA, {}),
        (0.3, None, {}),
        (0.3, DELTA, {"simultaneous": True}),
        (0.3, DELTA, {"group": "hard"}),
        (0.3, DELTA, {"mix": "any"}),
        (0.3, DELTA, {"mix": {"hard": 0.5, "easy": 0.5}}),
        (0.3, DELTA, {"distinct": "label"}),
        (0.9, DELTA, {"risk": "recall"}),
        (0.9, DELTA, {"risk": "false-discovery"}),
        ({"miss": 0.5, "recall": 0.9}, DELTA, {}),
        (0.5, DELTA, {"abstain": True}),
        # And what never holds at every moment.
        (0.9, DELTA, {"anytime": True, "risk": "recall"}),
        ({"miss": 0.5, "recall": 0.9}, DELTA, {"anytime": True}),
        (0.5, DELTA, {"anytime": True, "abstain": True}),
        (0.5, DELTA, {"anytime": True, "simultaneous": True}),
        (0.5, DELTA, {"anytime": True, "mix": {"hard": 1.0}}),
        (0.5, None, {"anytime": True}),
    ],
    ids=name_case,
)
def test_every_other_request_is_refused(extended, alpha, delta, options):
    word = "delta" if options and delta is None else "anytime"
    with pytest.raises(InvalidConfig, match=word):
        retrieve(extended, alpha, delta, **options)


def test_groups_grow_with_their_own_queries(extended):
    both = CALIBRATION + FURTHER
    thresholds = []
    for group in ("hard", "easy"):
        scores = both.scores[both.groups == group]
        found = guarantee(extended, 0.4, group=group, anytime=True)
        assert found.n_calibration == len(scores)
        assert found.threshold == pytest.approx(smallest_threshold(scores, 0.4), rel=1e-6)
        thresholds.append(smallest_threshold(scores, 0.4, DELTA / 2))
    mixed = guarantee(extended, 0.4, mix="any", anytime=True)
    assert mixed.threshold == pytest.approx(max(thresholds), rel=1e-6)


def test_queries_added_in_two_parts_count_as_those_added_at_once(extended):
    twice = calibrate(build())
    for part in (FURTHER[:200], FURTHER[200:]):
        twice.extend_calibration(search(twice, part))
    for options in ({}, {"distinct": "label"}, {"group": "hard"}):
        first, second = (
            plain(retrieve(one, 0.3, anytime=True, **options)) for one in (extended, twice)
        )
        assert first == second


def test_an_extended_calibration_survives_saving_and_can_be_extended_again(extended, tmp_path):
    loaded = Retriever.load(extended.save(tmp_path / "extended"))
    for options in ({}, {"distinct": "label"}, {"group": "easy"}, {"mix": "any"}):
        before, after = (
            plain(retrieve(one, 0.3, anytime=True, **options)) for one in (extended, loaded)
        )
        assert after == before
    with pytest.raises(InvalidConfig, match="anytime"):
        guarantee(loaded, 0.3)
    np.testing.assert_array_equal(
        loaded.calibration.query_digests, extended.calibration.query_digests
    )
    with pytest.raises(InvalidData, match="500 of 500"):
        loaded.extend_calibration(search(loaded, FURTHER))
    loaded.extend_calibration(search(loaded, TEST))
    assert guarantee(loaded, 0.3, anytime=True).n_calibration == 1000


def test_queries_that_were_watched_calibrate_again_for_every_moment_only(extended):
    calibrate(extended, groups=False)
    with pytest.raises(InvalidConfig, match="anytime"):
        guarantee(extended, 0.3)
    assert guarantee(extended, 0.3, anytime=True).n_calibration == 400
    extended.extend_calibration(search(extended, TEST, groups=False))
    assert len(extended.calibration.query_digests) == 200 + 400 + 100


def test_recent_queries_are_checked_at_the_guarantee_they_were_answered_with(extended):
    found = extended.check(search(extended, TEST), alpha=0.4, delta=DELTA)
    misses = missed(retrieve(extended, 0.4, anytime=True), TEST).sum()
    assert (found.misses, found.n_calibration) == (misses, 900)
    assert not found.contradicted()


def test_a_chosen_retriever_stays_chosen_when_it_is_extended(extended):
    """Chosen among 4, every request is certified at a quarter of delta."""
    extended.calibration = replace(extended.calibration, chosen_among=4)
    chosen = guarantee(extended, 0.4, anytime=True)
    assert "Chosen among 4 retrievers" in str(chosen)
    extended.calibration = replace(extended.calibration, chosen_among=1)
    assert chosen.threshold == guarantee(extended, 0.4, DELTA / 4, anytime=True).threshold


# Queries that cannot be added


def test_queries_of_new_groups_are_refused_because_delta_is_divided_among_the_groups(extended):
    """With each group that joins, delta would be divided by one more, but not that of before."""
    groups = np.append(TEST.groups[:-1], "unheard of")
    for recurring in (False, True):
        with pytest.raises(InvalidData, match="unheard of"):
            extended.extend_calibration(
                in_population(search(extended, TEST), groups=groups), None, recurring
            )
    with pytest.raises(InvalidConfig, match="leave out groups"):
        extended.extend_calibration(search(extended, TEST), groups=groups)
    assert guarantee(extended, 0.5, mix="any", anytime=True).n_groups == 2
    with pytest.raises(InvalidConfig, match="unheard of"):
        guarantee(extended, 0.5, group="unheard of", anytime=True)


@pytest.mark.parametrize("recurring", [False, True])
def test_gallery_items_are_never_added(own, recurring):
    queries = search(own, TEST + GALLERY[:3])
    with pytest.raises(InvalidData, match=r"3 of 103 .* gallery \(rows 100, 101, 102\)"):
        own.extend_calibration(queries, recurring)


@pytest.mark.parametrize("part", [TUNING, CALIBRATION], ids=["tuning", "calibration"])
def test_queries_that_tuned_or_calibrated_are_added_only_if_they_recur(own, part):
    queries = search(own, TEST + part[:2])
    before = guarantee(own, 0.3)
    with pytest.raises(InvalidData, match=r"2 of 102 .*\(rows 100, 101\)"):
        own.extend_calibration(queries)
    # The refusal changed nothing.
    assert guarantee(own, 0.3) == before
    assert len(own.calibration.query_digests) == 600
    own.extend_calibration(queries, recurring=True)
    assert guarantee(own, 0.3, anytime=True).n_calibration == 502


def test_the_same_query_is_added_twice_only_if_it_recurs(own):
    twice = search(own, TEST + TEST[:1])
    with pytest.raises(InvalidData, match=r"1 of 101 .*\(row 100\)"):
        own.extend_calibration(twice)
    own.extend_calibration(twice, recurring=True)
    with pytest.raises(InvalidData, match="100 of 100"):
        own.extend_calibration(search(own, TEST))


def test_near_copies_of_gallery_items_cause_a_warning(own):
    copies = replace(GALLERY[:4], vectors=GALLERY[:4].vectors + np.float32(1 / 64))
    with pytest.warns(UserWarning, match=r"4 of 104 .*\(rows 100, 101, 102, 103\)"):
        own.extend_calibration(search(own, TEST + copies))


@pytest.mark.parametrize(
    "part", [TUNING, CALIBRATION, TEST], ids=["tuning", "calibration", "added"]
)
def test_near_copies_of_other_queries_cause_a_warning_unless_they_recur(own, part):
    copies = replace(part[:3], vectors=part[:3].vectors + np.float32(1 / 64))
    queries = search(own, TEST + copies)
    with pytest.warns(UserWarning, match=r"[36] of 103 queries to add .* another query"):
        own.extend_calibration(queries)
    calibrate(own).extend_calibration(queries, recurring=True)


def test_bursts_cause_a_warning_when_they_are_added(own):
    rng = np.random.default_rng(0)
    frames = FURTHER[np.repeat(np.arange(10), 20)]
    frames = replace(frames, vectors=frames.vectors + rng.integers(1, 64, (200, 4)) / 128)
    with pytest.warns() as caught:
        own.extend_calibration(search(own, frames))
    assert any("frames of one video" in str(one.message) for one in caught)


def test_queries_need_groups_if_and_only_if_the_others_have_them(own):
    with pytest.raises(InvalidData, match="group"):
        own.extend_calibration(search(own, TEST, groups=False))
    calibrate(own, "constant", groups=False)
    with pytest.raises(InvalidConfig, match="group"):
        guarantee(own, 0.3, group="hard")
    with pytest.raises(InvalidData, match="group"):
        own.extend_calibration(search(own, TEST))


def test_only_a_valid_calibration_is_extended_by_queries_it_searched(own):
    before, other = search(own, TEST), build(labels=GALLERY.labels[::-1])
    with pytest.raises(StaleCalibration, match="another retriever"):
        own.extend_calibration(search(other, TEST))
    own.remove(["7"])
    for queries in (before, search(own, TEST)):
        with pytest.raises(StaleCalibration):
            own.extend_calibration(queries)
