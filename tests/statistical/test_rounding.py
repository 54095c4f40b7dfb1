"""Images that recur, with scores that differ in the last digits from those of calibration."""

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from rcir.risk import (
    Quantile,
    SearchResults,
    find_risk,
    learn_then_test,
    mean_loss,
    order_statistic,
    score_ranks,
    selective,
)
from rcir.risk.results import set_sizes
from tests.statistical.populations import answered

pytestmark = pytest.mark.statistical

DRAWS, IMAGES, N, DEPTH, DELTA = 500, 25, 1_000, 12, 0.1
SEVERAL_DRAWS = 1_000  # for several risks, whose broken variant fails in few draws
MANY = 10_000  # so that the bound is nearer to the risk than one image moves it
ALPHA = 0.215  # 5 of 25 images may be missed, but not 5.5
ERRORS = np.array([-1, -0.5, 0.5, 1])  # relative errors of scores, in units of the noise
NOISE = 1e-5


def exact_sizes(scores, threshold):
    """Broken: return set sizes without a tolerance."""
    return np.count_nonzero(scores <= np.float32(threshold), axis=1)


def risks(pool, threshold, noise, count_sizes):
    """Return the exact risks if each image recurs equally often with each error."""
    scores = np.concatenate([pool.scores * (1 + noise * error) for error in ERRORS])
    relevant = np.tile(pool.relevant, (len(ERRORS), 1))
    n_relevant = np.tile(pool.n_relevant, len(ERRORS))
    sizes = count_sizes(scores.astype(np.float32), threshold)
    hits = (relevant & (np.arange(DEPTH) < sizes[:, None])).sum(axis=1)
    return {
        "miss": np.mean(hits == 0),
        "recall": np.mean(1 - hits / np.maximum(n_relevant, 1)),
        "false-discovery": np.mean(1 - hits / np.maximum(sizes, 1)),
    }


@pytest.fixture(scope="module")
def drawn():
    """For each draw, its images, and the tuning and calibration queries among them."""
    rng = np.random.default_rng(0)
    return [
        (rng.integers(20_000, size=IMAGES), *(rng.integers(IMAGES, size=n) for n in (100, N)))
        for _ in range(SEVERAL_DRAWS)
    ]


@pytest.fixture(scope="module")
def violations(worlds, drawn):
    """For each draw, True if a risk of recurring calibration queries is above its alpha.

    Two such arrays: for sets with the tolerance, and for sets without it.
    """

    def violations(name, certify, alphas, noise=NOISE, count=None, n=N):
        failed = np.zeros((2, count or DRAWS), bool)
        for draw, (rows, tuning, calibration) in enumerate(drawn[: count or DRAWS]):
            pool = worlds[name].population[rows]
            if n > N:
                calibration = np.random.default_rng(draw).integers(IMAGES, size=n)
            try:
                threshold = certify(pool[calibration], pool[tuning]).threshold
            except RiskUnattainable:
                continue
            for variant, sizes in enumerate((set_sizes, exact_sizes)):
                true = risks(pool, threshold, noise, sizes)
                failed[variant, draw] = any(true[risk] > a + 1e-9 for risk, a in alphas.items())
        return failed

    return violations


@pytest.mark.parametrize(
    ("name", "alpha", "noise"),
    [
        ("minmax", ALPHA, 1e-6),
        ("learned", 0.13, 1e-4),
        pytest.param("minmax", ALPHA, 1e-4, marks=pytest.mark.slow),
        pytest.param("learned", 0.13, 1e-6, marks=pytest.mark.slow),
    ],
)
def test_the_miss_risk_of_recurring_images_holds(violations, excess, name, alpha, noise):
    def certify(calibration, _):
        return order_statistic(alpha, DELTA, calibration)

    valid, broken = violations(name, certify, {"miss": alpha}, noise)
    assert excess(valid, DELTA) <= 3
    assert excess(broken, DELTA) > 3


def test_the_recall_risk_of_recurring_images_holds(violations, excess):
    def certify(calibration, tuning):
        return mean_loss(find_risk("recall"), 0.5, DELTA, calibration)

    valid, broken = violations("constant", certify, {"recall": 0.5}, n=MANY)
    assert excess(valid, DELTA) <= 3
    assert excess(broken, DELTA) > 3


@pytest.fixture
def without_tolerance(monkeypatch):
    """Break a module: compare with its values as they are, without a tolerance."""
    return lambda module: monkeypatch.setattr(f"rcir.risk.{module}.widen", lambda values: values)


def test_several_risks_of_recurring_images_hold_together(violations, excess, without_tolerance):
    alphas = {"miss": ALPHA, "false-discovery": 0.65}

    def certify(calibration, tuning):  # few tuning queries, hence few thresholds to test
        return learn_then_test(alphas, DELTA, calibration, tuning[:25])

    assert excess(violations("minmax", certify, alphas)[0], DELTA) <= 3
    without_tolerance("testing")
    _, broken = violations("minmax", certify, alphas, count=SEVERAL_DRAWS)
    assert excess(broken, DELTA) > 3


def answer_wrongly(alpha):
    """For each draw of recurring images, True if too many answers to them are wrong.

    The second-to-last query by selection score is correct and frequent; the last is wrong and
    frequent. In a batch, a threshold between them answers the former. Without a tolerance, it
    answers only half of the single queries with the former.
    """
    failed, rng = np.zeros(DRAWS, bool), np.random.default_rng(1)
    weight = np.array([0.35 / (IMAGES - 2)] * (IMAGES - 2) + [0.35, 0.3])
    for draw in range(DRAWS):
        selection_score = np.sort(rng.gamma(2.0, size=IMAGES))
        missed = np.append(rng.uniform(size=IMAGES - 2) < 0.3, [False, True])
        split, calibration = (
            answered(selection_score[rows], missed[rows])
            for rows in (rng.choice(IMAGES, n, p=weight) for n in (200, N))
        )
        try:
            threshold = selective(alpha, DELTA, calibration, split).selection_threshold
        except RiskUnattainable:
            continue
        answers = weight * np.mean(
            selection_score[:, None] * (1 + NOISE * ERRORS) <= threshold, axis=1
        )
        failed[draw] = answers @ missed / max(answers.sum(), 1e-12) > alpha + 1e-9
    return failed


def test_the_risk_among_answers_to_recurring_images_holds(excess, without_tolerance):
    assert excess(answer_wrongly(0.2), DELTA) <= 3
    without_tolerance("testing")
    assert excess(answer_wrongly(0.2), DELTA) > 3


@pytest.fixture(scope="module")
def in_both_splits(everybody, drawn):
    """For each draw, True if images of the tuning and the calibration split miss too often."""

    def in_both_splits():
        failed = np.zeros(DRAWS, bool)
        for draw, (rows, tuning, calibration) in enumerate(drawn[:DRAWS]):
            ranks, uncertainty = everybody.ranks[rows], everybody.results.uncertainty[rows]
            score_function = Quantile(np.sort(uncertainty[tuning]))
            scored = score_ranks(score_function, SearchResults(uncertainty, DEPTH), ranks)
            try:
                threshold = order_statistic(ALPHA, DELTA, scored[calibration]).threshold
            except RiskUnattainable:
                continue
            again = [SearchResults(uncertainty * (1 + NOISE * error), DEPTH) for error in ERRORS]
            missed = [score_function.sizes(queries, threshold) < ranks for queries in again]
            failed[draw] = np.mean(missed) > ALPHA
        return failed

    return in_both_splits


def test_recurring_images_of_the_tuning_split_are_scaled_alike(
    in_both_splits, excess, without_tolerance
):
    assert excess(in_both_splits(), DELTA) <= 3
    without_tolerance("score_functions")
    assert excess(in_both_splits(), DELTA) > 3


@pytest.mark.parametrize("name", ["minmax", "learned"])
def test_the_tolerance_enlarges_sets_by_less_than_half_a_percent(worlds, name):
    population = worlds[name].population
    all_scores = np.sort(population.scores[np.isfinite(population.scores)])
    for threshold in np.quantile(population.match_score, [0.8, 0.85, 0.9]):
        exact = np.searchsorted(all_scores, np.float32(threshold), side="right") / len(population)
        assert population.sizes(float(threshold)).mean() <= 1.005 * exact
