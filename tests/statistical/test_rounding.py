"""Pictures that recur: calibrated in a batch, asked later one by one, with other last digits."""

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from rcir.risk import (
    AbstentionController,
    JointController,
    LabelledResults,
    MissController,
    MonotoneController,
    Quantile,
    SearchResults,
)
from rcir.risk.score_functions import score_at_rank, set_sizes

pytestmark = pytest.mark.statistical

DRAWS, PICTURES, N, DEPTH, DELTA = 2_000, 25, 1_000, 12, 0.1
ALPHA = 0.215  # 5 of 25 pictures may be missed, half a picture more may not
ASKED = np.array([-1, -0.5, 0.5, 1])  # times the noise: how far off the scores of an asking are
NOISE = 1e-5
FEWER = {"DRAWS": 2}


def to_the_last_digit(candidate_scores, threshold):
    """Set sizes that allow no tolerance: what `set_sizes` is not."""
    return np.count_nonzero(candidate_scores <= np.float32(threshold), axis=1)


def risks(pool, threshold, noise, count):
    """The exact risks where each picture is asked as often, each time as far off."""
    candidate_scores = np.concatenate(
        [pool.candidate_scores * (1 + noise * asked) for asked in ASKED]
    )
    relevant, totals = np.tile(pool.relevant, (len(ASKED), 1)), np.tile(pool.totals, len(ASKED))
    sizes = count(candidate_scores.astype(np.float32), threshold)
    hits = (relevant & (np.arange(DEPTH) < sizes[:, None])).sum(axis=1)
    return {
        "miss": np.mean(hits == 0),
        "recall": np.mean(1 - hits / np.maximum(totals, 1)),
        "false-discovery": np.mean(1 - hits / np.maximum(sizes, 1)),
    }


@pytest.fixture(scope="module")
def drawn():
    """For each draw: its pictures, and which of them the tuning split and calibration take."""
    rng = np.random.default_rng(0)
    return [
        (rng.integers(20_000, size=PICTURES), *(rng.integers(PICTURES, size=n) for n in (100, N)))
        for _ in range(DRAWS)
    ]


@pytest.fixture(scope="module")
def violated(worlds, drawn):
    """Return for each draw whether a risk is above its alpha when calibration queries recur."""

    def violated(name, threshold_of, alphas, count=set_sizes, noise=NOISE):
        failed = np.zeros(DRAWS, bool)
        for draw, (rows, tuning, calibration) in enumerate(drawn):
            pool = worlds[name].population[rows]
            try:
                threshold = threshold_of(pool[calibration], pool[tuning])
            except RiskUnattainable:
                continue
            found = risks(pool, threshold, noise, count)
            failed[draw] = any(found[risk] > alpha + 1e-9 for risk, alpha in alphas.items())
        return failed

    return violated


@pytest.mark.parametrize("noise", [1e-6, 1e-4])
@pytest.mark.parametrize(
    ("name", "alpha"), [("minmax", ALPHA), ("learned", ALPHA), ("reranked", 0.095)]
)
def test_pictures_asked_again_are_missed_as_seldom_as_promised(
    violated, excess, name, alpha, noise
):
    def threshold(calibration, _):
        return MissController(None, calibration.scores, DEPTH).threshold(alpha, DELTA)

    assert excess(violated(name, threshold, {"miss": alpha}, noise=noise), DELTA) <= 3
    assert excess(violated(name, threshold, {"miss": alpha}, to_the_last_digit, noise), DELTA) > 3


def test_sets_of_pictures_asked_again_lack_no_more_matches(violated, excess):
    def threshold(calibration, tuning):
        return MonotoneController(calibration, tuning, "recall").threshold(0.5, DELTA)

    assert excess(violated("reranked", threshold, {"recall": 0.5}), DELTA) <= 3
    assert excess(violated("reranked", threshold, {"recall": 0.5}, to_the_last_digit), DELTA) > 3


def test_several_risks_of_pictures_asked_again_hold_together(violated, excess, monkeypatch):
    alphas = {"miss": ALPHA, "false-discovery": 0.65}

    def threshold(calibration, tuning):
        few = tuning[:25]  # hence few thresholds to test
        return JointController(calibration, few).threshold(alphas, DELTA)

    assert excess(violated("learned", threshold, alphas), DELTA) <= 3
    monkeypatch.setattr("rcir.risk.joint.widened", lambda thresholds: thresholds)
    assert excess(violated("learned", threshold, alphas, to_the_last_digit), DELTA) > 3


def answered_wrongly(alpha):
    """Return for each draw of pictures that recur whether too many answers to them are wrong.

    The second-to-last query by selection score is correct and frequent; the last is wrong and
    frequent. A threshold between them answers the former in a batch; to the last digit, it answers
    it half as often in a request of its own.
    """
    failed, rng = np.zeros(DRAWS, bool), np.random.default_rng(1)
    weight = np.array([0.35 / (PICTURES - 2)] * (PICTURES - 2) + [0.35, 0.3])
    for draw in range(DRAWS):
        selection_score = np.sort(rng.gamma(2.0, size=PICTURES))
        missed = np.append(rng.uniform(size=PICTURES - 2) < 0.3, [False, True])
        split, calibration = (
            LabelledResults(
                selection_score[some],
                1,
                relevant=~missed[some, None],
                totals=np.ones(len(some), int),
                selection_score=selection_score[some],
            )
            for some in (rng.choice(PICTURES, n, p=weight) for n in (200, N))
        )
        try:
            threshold = AbstentionController(calibration, split).threshold(alpha, DELTA)
        except RiskUnattainable:
            continue
        asked = weight * np.mean(
            selection_score[:, None] * (1 + NOISE * ASKED) <= threshold, axis=1
        )
        failed[draw] = asked @ missed / max(asked.sum(), 1e-12) > alpha + 1e-9
    return failed


def test_answers_to_pictures_asked_again_are_wrong_as_seldom_as_promised(excess, monkeypatch):
    assert excess(answered_wrongly(0.2), DELTA) <= 3
    monkeypatch.setattr("rcir.risk.risks.abstention.widened", lambda thresholds: thresholds)
    assert excess(answered_wrongly(0.2), DELTA) > 3


@pytest.fixture(scope="module")
def in_the_split(everybody, drawn):
    """Return for each draw whether queries in both tuning and calibration split miss too often."""

    def in_the_split():
        failed = np.zeros(DRAWS, bool)
        for draw, (rows, tuning, calibration) in enumerate(drawn):
            ranks, uncertainty = everybody.ranks[rows], everybody.results.uncertainty[rows]
            score_function = Quantile(np.sort(uncertainty[tuning]))
            scores = score_function.scores(SearchResults(uncertainty, DEPTH), ranks)
            try:
                threshold = MissController(score_function, scores[calibration], DEPTH).threshold(
                    ALPHA, DELTA
                )
            except RiskUnattainable:
                continue
            again = [SearchResults(uncertainty * (1 + NOISE * asked), DEPTH) for asked in ASKED]
            missed = [score_function.sizes(queries, threshold) < ranks for queries in again]
            failed[draw] = np.mean(missed) > ALPHA
        return failed

    return in_the_split


def test_pictures_of_the_tuning_split_are_scaled_alike_when_they_are_asked_again(
    in_the_split, excess, monkeypatch
):
    assert excess(in_the_split(), DELTA) <= 3
    monkeypatch.setattr("rcir.risk.score_functions.widened", lambda values: values)
    assert excess(in_the_split(), DELTA) > 3


@pytest.mark.parametrize("name", ["minmax", "learned", "boosted", "reranked"])
def test_the_tolerance_makes_sets_larger_by_less_than_half_a_percent(worlds, name):
    population = worlds[name].population
    all_scores = population.candidate_scores[np.isfinite(population.candidate_scores)]
    for threshold in np.quantile(
        score_at_rank(population.candidate_scores, population.ranks), [0.8, 0.85, 0.9]
    ):
        exact = np.searchsorted(np.sort(all_scores), np.float32(threshold), side="right") / len(
            population
        )
        assert set_sizes(population.candidate_scores, float(threshold)).mean() <= 1.005 * exact
