"""The guarantee over random divisions, each calibrated and measured by hand."""

import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from calibration import repeats
from calibration.repeats import repeat
from rcir.errors import RiskUnattainable
from rcir.risk import (
    Constant,
    LabelledResults,
    MinMax,
    MissController,
    Quantile,
    RiskController,
    SearchResults,
)

ALPHAS, DELTA = (0.001, 0.2, 0.3), 0.05


def judged(rng, n, depth=12):
    """Queries that need the more candidates the more uncertain they are."""
    uncertainty = rng.uniform(size=n)
    ranks = 1 + rng.poisson(6 * uncertainty)
    relevant = ranks[:, None] == np.arange(1, depth + 1)
    distances = np.sort(rng.uniform(0.1, 1.9, (n, depth)), axis=1).astype(np.float32)
    found = SearchResults(uncertainty, depth, distances)
    return LabelledResults.of(found, relevant, np.ones(n, np.int64))


def synthetic(n_calibration, n_test, score_function=MinMax, bound="binomial"):
    """What `repeat` is given, of queries without an encoder."""
    rng = np.random.default_rng(3)
    parts = [judged(rng, n) for n in (200, n_calibration, n_test)]
    fitted = score_function.fit(parts[0], parts[0].ranks)
    controller = RiskController(fitted, *parts[:2], bound)

    def judged_by(results, uncertainty):
        assert uncertainty == "cosine"
        return replace(results, uncertainty=results.distances[:, 0].astype(np.float64) ** 2 / 2)

    return SimpleNamespace(controllers={None: controller}, judged=judged_by), *parts


@pytest.fixture(scope="module")
def given(outcome):
    """The same of the calibrated tiny run."""
    retriever, splits = outcome.retriever, outcome.splits
    parts = (
        retriever.search_labelled(part) for part in (splits.tuning, splits.calibration, splits.test)
    )
    return retriever, *parts


@pytest.fixture(scope="module")
def found(given):
    return repeat(*given, ALPHAS, DELTA)


@pytest.fixture(scope="module")
def divisions(given):
    """The rows of calibration and test in the pool of both, as the seed draws them."""
    rng = np.random.default_rng(0)
    n, m = (len(part.ranks) for part in given[2:])
    return [np.split(rng.permutation(n + m), [n]) for _ in range(20)]


def pool(calibration, test, near=False):
    """Results and ranks of all queries, by the distance to the nearest if asked."""
    results = (calibration, test)
    distances = np.concatenate([part.distances for part in results])
    uncertainty = np.concatenate([part.uncertainty for part in results])
    if near:
        uncertainty = distances[:, 0].astype(float) ** 2 / 2
    ranks = np.concatenate([calibration.ranks, test.ranks])
    return SearchResults(uncertainty, distances.shape[1], distances), ranks


def score_functions(retriever, tuning):
    own = retriever.controllers[None].score_function
    near = tuning.distances[:, 0].astype(float) ** 2 / 2
    nearest = MinMax.fit(SearchResults(near, tuning.depth), tuning.ranks)
    return {own.name: own, "constant": Constant(), "1 - cosine": nearest}


def assert_measured(rule, place, sizes, ranks):
    """The numbers of one rule at one division and level; of no sizes, NaN."""
    numbers = [getattr(rule, name)[place] for name in ("risk", "mean", "median", "high")]
    if sizes is None:
        assert np.isnan(numbers).all()
        return
    expected = [np.mean(ranks > sizes), np.mean(sizes), np.median(sizes)]
    assert numbers == pytest.approx([*expected, np.percentile(sizes, 95)])


@pytest.mark.parametrize("name", ["minmax", "constant", "1 - cosine"])
def test_a_division_is_calibrated_and_measured_as_the_library_would(given, found, divisions, name):
    retriever, *parts = given
    score_function = score_functions(retriever, parts[0])[name]
    results, ranks = pool(*parts[1:], near=name == "1 - cosine")
    known = set()
    for row in (0, 7, 19):
        first, second = divisions[row]
        controller = MissController.calibrate(score_function, results[first], ranks[first])
        for column, alpha in enumerate(found.alphas.tolist()):
            try:
                sizes = controller.sizes(results[second], controller.threshold(alpha, DELTA))
            except RiskUnattainable:
                sizes = None
            known.add(sizes is None)
            assert_measured(found.rules[name], (row, column), sizes, ranks[second])
    assert known == {True, False}


def test_without_control_the_smallest_sizes_that_were_good_enough_are_taken(
    given, found, divisions
):
    retriever, *parts = given
    score_function = retriever.controllers[None].score_function
    results, ranks = pool(*parts[1:])
    for row in (0, 19):
        first, second = divisions[row]
        scores = score_function.scores(results[first], ranks[first])
        for column, alpha in enumerate(found.alphas.tolist()):
            good = [
                threshold
                for threshold in np.unique(scores[np.isfinite(scores)])
                if np.sum(scores > threshold) <= round(alpha * 1000) * len(first) / 1000
            ]
            sizes = score_function.sizes(results[second], min(good)) if good else None
            assert_measured(found.rules["uncontrolled"], (row, column), sizes, ranks[second])


@pytest.mark.parametrize("bound", ["binomial", "hoeffding"])
def test_another_bound_and_score_function_are_those_of_the_retriever(bound):
    retriever, *parts = synthetic(250, 100, Quantile, bound)
    found = repeat(retriever, *parts, (0.1,), 0.2)
    assert list(found.rules) == ["quantile", "constant", "1 - cosine", "uncontrolled"]
    first, second = np.split(np.random.default_rng(0).permutation(350), [250])
    results, ranks = pool(*parts[1:])
    score_function = retriever.controllers[None].score_function
    controller = MissController.calibrate(score_function, results[first], ranks[first], bound)
    for column, alpha in enumerate(found.alphas):
        try:
            sizes = controller.sizes(results[second], controller.threshold(alpha, 0.2))
        except RiskUnattainable:
            sizes = None
        assert_measured(found.rules["quantile"], (0, column), sizes, ranks[second])


def test_the_sweep_of_deltas_is_at_the_level_nearest_to_a_tenth():
    retriever, *parts = synthetic(400, 300)
    found = repeat(retriever, *parts, (0.02, 0.12, 0.3), 0.1)
    assert found.alpha == 0.12
    first, second = np.split(np.random.default_rng(0).permutation(700), [400])
    results, ranks = pool(*parts[1:])
    score_function = retriever.controllers[None].score_function
    controller = MissController.calibrate(score_function, results[first], ranks[first])
    for column, delta in enumerate(found.deltas):
        sizes = controller.sizes(results[second], controller.threshold(0.12, delta))
        assert_measured(found.by_delta, (0, column), sizes, ranks[second])
    means = found.by_delta.mean.mean(axis=0)
    assert means[0] > means[-1] * 1.05, "a smaller delta needs larger sets"


def test_as_many_misses_as_alpha_allows_are_taken_without_control(monkeypatch):
    """0.29 * 100 is 28.999999999999996 in floating point, and 29 misses in 100 are 0.29."""
    monkeypatch.setattr(repeats, "SWEPT_ALPHAS", np.array([0.29, 0.57, 0.58]))
    retriever, *parts = synthetic(100, 100)
    found = repeat(retriever, *parts, (0.29,), 0.1).rules["uncontrolled"]
    rng = np.random.default_rng(0)
    score_function = retriever.controllers[None].score_function
    results, ranks = pool(*parts[1:])
    for row in range(20):
        first, second = np.split(rng.permutation(200), [100])
        scores = np.sort(score_function.scores(results[first], ranks[first]))
        for column, misses in enumerate((29, 57, 58)):
            sizes = score_function.sizes(results[second], float(scores[-1 - misses]))
            assert_measured(found, (row, column), sizes, ranks[second])


def test_only_control_keeps_the_risk_in_all_but_a_fraction_delta(monkeypatch):
    """With test queries in numbers, so that their own noise adds little."""
    monkeypatch.setattr(repeats, "REPEATS", 300)
    monkeypatch.setattr(repeats, "SWEPT_ALPHAS", np.array([0.2]))
    monkeypatch.setattr(repeats, "DELTAS", np.array([0.1]))
    summary = repeat(*synthetic(500, 8000), (0.2,), 0.1).summary((0.2,))
    noise = 3 * np.sqrt(0.1 * 0.9 / 300)
    for name in ("minmax", "constant", "1 - cosine"):
        assert summary[name]["0.2"]["violations"] <= 0.1 + noise
        assert summary[name]["0.2"]["certified"] == 1
    assert summary["uncontrolled"]["0.2"]["violations"] > 0.1 + noise + 0.2
    assert summary["minmax"]["0.2"]["mean"] < summary["constant"]["0.2"]["mean"]


@pytest.mark.parametrize(("n", "m", "delta"), [(300, 300, 0.1), (500, 8000, 0.05)])
def test_expected_violations_count_the_noise_of_the_test_queries(n, m, delta):
    """Simulated: the true risk is above alpha with probability delta, the measured one oftener."""
    found = repeat(*synthetic(n, m), (0.2,), delta)
    assert (found.n_calibration, found.n_test) == (n, m)
    rng = np.random.default_rng(0)
    alpha, draws, noise = 0.2, 200_000, np.sqrt(0.2 * 0.8)
    margin = np.quantile(rng.normal(0, noise / np.sqrt(n), draws), 1 - delta)
    true = alpha - margin + rng.normal(0, noise / np.sqrt(n), draws)
    measured = true + rng.normal(0, noise / np.sqrt(m), draws)
    assert found.expected == pytest.approx(np.mean(measured > alpha), abs=0.005)
    assert np.mean(true > alpha) == pytest.approx(delta, abs=0.005)


def test_no_division_has_a_query_on_both_sides_or_loses_one(monkeypatch):
    drawn = []
    rule = repeats._Rule
    monkeypatch.setattr(repeats, "_Rule", lambda *parts: drawn.append(parts[-1]) or rule(*parts))
    repeat(*synthetic(120, 80), (0.2,), 0.1)
    assert len(drawn) == 4
    for each in drawn:
        assert each is drawn[0], "all rules are compared on the same divisions"
    assert len(drawn[0]) == 20
    for first, second in drawn[0]:
        assert (len(first), len(second)) == (120, 80)
        assert sorted([*first, *second]) == list(range(200))
    assert len({tuple(first) for first, _ in drawn[0]}) == 20


def test_the_summary_is_of_the_divisions_that_certified_something(found):
    summary = found.summary(ALPHAS)
    assert list(summary) == ["minmax", "constant", "1 - cosine", "uncontrolled"]
    for name, levels in summary.items():
        assert list(levels) == ["0.001", "0.2", "0.3"]
        for alpha, row in zip(ALPHAS, levels.values(), strict=True):
            column = found.alphas.tolist().index(alpha)
            risks = [risk for risk in found.rules[name].risk[:, column] if not np.isnan(risk)]
            assert row["certified"] == len(risks) / 20
            assert row["violations"] == sum(risk > alpha for risk in risks) / 20
            for part in ("risk", "mean", "median", "high"):
                if not risks:
                    assert row[part] is None
                    continue
                values = getattr(found.rules[name], part)[:, column]
                assert row[part] == pytest.approx(sum(values[~np.isnan(values)]) / len(risks))
            if risks:
                sizes = found.rules[name].mean[:, column]
                spread = statistics.pstdev(sizes[~np.isnan(sizes)].tolist())
                assert row["mean_std"] == pytest.approx(spread)
                assert row["risk_std"] == pytest.approx(statistics.pstdev(risks))
                assert row["coverage"] == pytest.approx(1 - sum(risks) / len(risks))
            else:
                assert {row[part] for part in ("mean_std", "risk_std", "coverage")} == {None}
    assert summary["minmax"]["0.001"]["certified"] == 0
    assert summary["minmax"]["0.001"]["violations"] == 0
    assert summary["minmax"]["0.3"]["certified"] == 1


def test_the_summary_of_deltas_is_at_their_one_level():
    """Violations are of the level that the deltas share."""
    found = repeat(*synthetic(400, 300), (0.12, 0.3), 0.05)
    summary = found.summary_of_deltas()
    assert list(summary) == [f"{delta:g}" for delta in found.deltas]
    for column, row in enumerate(summary.values()):
        risks = found.by_delta.risk[:, column]
        known = risks[~np.isnan(risks)].tolist()
        assert row["certified"] == len(known) / 20
        assert row["violations"] == sum(risk > 0.12 for risk in known) / 20
        assert row["risk"] == pytest.approx(statistics.fmean(known))
    # Delta of the sweep of levels: the same divisions, the same numbers.
    assert summary["0.05"] == found.summary((0.12,))["minmax"]["0.12"]


def test_the_evaluation_reports_these_repeats(outcome, found):
    assert outcome.evaluation.repeats.summary(ALPHAS) == found.summary(ALPHAS)


def test_asked_levels_join_the_sweep():
    found = repeat(*synthetic(120, 80), (0.03, 0.2, 0.77), 0.1)
    levels = found.alphas.tolist()
    assert levels == sorted(levels)
    assert {0.03, 0.2, 0.77, 0.02, 0.4} < set(levels)
    assert len(levels) == 20 + 2
