"""The guarantee over random splits, each calibrated and measured by hand."""

import statistics
from types import SimpleNamespace

import numpy as np
import pytest

from calibration import resampling
from calibration.resampling import resample
from rcir.errors import RiskUnattainable
from rcir.risk import (
    Constant,
    LabelledResults,
    MinMax,
    Quantile,
    SearchResults,
    SetRule,
    order_statistic,
    score,
    score_ranks,
)
from rcir.risk.score_functions import widened

ALPHAS, DELTA = (0.001, 0.2, 0.3), 0.05


def judged(rng, n, depth=12):
    """Queries that need the more candidates the more uncertain they are."""
    uncertainty = rng.uniform(size=n)
    ranks = 1 + rng.poisson(6 * uncertainty)
    relevant = ranks[:, None] == np.arange(1, depth + 1)
    distances = np.sort(rng.uniform(0.1, 1.9, (n, depth)), axis=1).astype(np.float32)
    found = SearchResults(uncertainty, depth, distances)
    return LabelledResults(found, relevant, np.ones(n, np.int64))


def synthetic(n_calibration, n_test, score_function=MinMax, bound="binomial"):
    """Return the arguments of `resample` for queries without an encoder."""
    rng = np.random.default_rng(3)
    parts = [judged(rng, n) for n in (200, n_calibration, n_test)]
    fitted = score_function.fit(parts[0].results, parts[0].ranks)
    rule = SetRule(fitted, *(score(fitted, part) for part in parts[:2]), bound)
    calibrated = SimpleNamespace(main=rule)

    def judged_by(results, uncertainty):
        assert uncertainty == "cosine"
        nearest = results.results.distances[:, 0].astype(np.float64)
        return results.with_uncertainty(nearest**2 / 2)

    searcher = SimpleNamespace(judged=judged_by)
    return SimpleNamespace(require_calibration=lambda: calibrated, searcher=searcher), *parts


class Naive:
    """Every split, drawn as the seed draws it, calibrated and measured by itself."""

    def __init__(self, retriever, tuning, calibration, test, bound="binomial"):
        rng = np.random.default_rng(0)
        n, m = len(calibration.ranks), len(test.ranks)
        self.splits = [np.split(rng.permutation(n + m), [n]) for _ in range(resampling.SPLITS)]
        distances = np.concatenate([calibration.results.distances, test.results.distances])
        own = np.concatenate([calibration.results.uncertainty, test.results.uncertainty])
        near = distances[:, 0].astype(float) ** 2 / 2
        self.ranks = np.concatenate([calibration.ranks, test.ranks])
        fitted = retriever.require_calibration().main.score_function
        cosine = SearchResults(
            tuning.results.distances[:, 0].astype(float) ** 2 / 2, tuning.results.depth
        )
        depth = distances.shape[1]
        self.rules = {
            fitted.name: (fitted, SearchResults(own, depth, distances)),
            "constant": (Constant(), SearchResults(own, depth, distances)),
            "1 - cosine": (
                MinMax.fit(cosine, tuning.ranks),
                SearchResults(near, depth, distances),
            ),
        }
        self.first = fitted.name
        self.bound = bound

    def sizes(self, rule, split, alpha, delta):
        """Set sizes of the second part of a split; None where nothing is certified."""
        first, second = self.splits[split]
        score_function, results = self.rules[rule]
        scored = score_ranks(score_function, results[first], self.ranks[first])
        try:
            certificate = order_statistic(alpha, delta, scored, self.bound)
            return score_function.sizes(results[second], certificate.threshold)
        except RiskUnattainable:
            return None

    def uncontrolled(self, split, alpha):
        """The smallest set sizes that miss at most alpha of the first part."""
        first, second = self.splits[split]
        score_function, results = self.rules[self.first]
        scores = score_function.match_scores(results[first], self.ranks[first])
        good = [
            threshold
            for threshold in np.unique(scores[np.isfinite(scores)])
            if np.sum(scores > threshold) <= round(alpha * 1000) * len(first) / 1000
        ]
        return score_function.sizes(results[second], min(good)) if good else None

    def assert_measured(self, rule, place, sizes):
        """Return the numbers of a rule at (split, level); NaN if there are no sizes."""
        numbers = [getattr(rule, name)[place] for name in ("risk", "mean", "median", "high")]
        if sizes is None:
            assert np.isnan(numbers).all()
            return
        ranks = self.ranks[self.splits[place[0]][1]]
        expected = [np.mean(ranks > sizes), np.mean(sizes), np.median(sizes)]
        assert numbers == pytest.approx([*expected, np.percentile(sizes, 95)])


@pytest.fixture(scope="module")
def parts(outcome):
    """Retriever and searched splits of the calibrated tiny run."""
    retriever, splits = outcome.retriever, outcome.splits
    searched = (splits.tuning, splits.calibration, splits.test)
    return retriever, *map(retriever.search_labelled, searched)


@pytest.fixture(scope="module")
def resampled_run(parts):
    return resample(*parts, ALPHAS, DELTA)


def test_a_split_is_calibrated_and_measured_as_the_library_would(parts, resampled_run):
    naive = Naive(*parts)
    certified = set()
    for split in (0, 7, 19):
        for column, alpha in enumerate(resampled_run.alphas.tolist()):
            for rule in naive.rules:
                sizes = naive.sizes(rule, split, alpha, DELTA)
                certified.add(sizes is not None)
                naive.assert_measured(resampled_run.rules[rule], (split, column), sizes)
            rule = resampled_run.rules["uncontrolled"]
            sizes = naive.uncontrolled(split, alpha)
            naive.assert_measured(rule, (split, column), sizes)
    assert certified == {True, False}


@pytest.mark.parametrize("bound", ["binomial", "hoeffding"])
def test_bound_and_score_function_are_those_of_the_retriever(bound):
    parts = synthetic(250, 100, Quantile, bound)
    resampled = resample(*parts, (0.1,), 0.2)
    assert list(resampled.rules) == ["quantile", "constant", "1 - cosine", "uncontrolled"]
    naive = Naive(*parts, bound)
    for column, alpha in enumerate(resampled.alphas):
        sizes = naive.sizes("quantile", 0, alpha, 0.2)
        naive.assert_measured(resampled.rules["quantile"], (0, column), sizes)


def test_the_sweep_of_deltas_is_at_the_level_nearest_to_a_tenth():
    parts = synthetic(400, 300)
    resampled = resample(*parts, (0.02, 0.12, 0.3), 0.1)
    assert resampled.alpha == 0.12
    levels = resampled.alphas.tolist()  # 20 of the sweep, and those requested besides
    assert (levels, len(levels)) == (sorted({0.02, 0.12, 0.3, *levels}), 20)
    naive = Naive(*parts)
    for column, delta in enumerate(resampled.deltas):
        naive.assert_measured(
            resampled.by_delta, (0, column), naive.sizes("minmax", 0, 0.12, delta)
        )
    means = resampled.by_delta.mean.mean(axis=0)
    assert means[0] > means[-1] * 1.05, "a smaller delta needs larger sets"


def test_without_control_as_many_are_missed_as_alpha_allows(monkeypatch):
    """0.29 * 100 is 28.999999999999996 in floating point, and 29 misses in 100 are 0.29."""
    monkeypatch.setattr(resampling, "SWEPT_ALPHAS", np.array([0.29, 0.57, 0.58]))
    parts = synthetic(100, 100)
    rule = resample(*parts, (0.29,), 0.1).rules["uncontrolled"]
    naive = Naive(*parts)
    score_function, results = naive.rules["minmax"]
    for split, (first, second) in enumerate(naive.splits):
        scores = np.sort(score_function.match_scores(results[first], naive.ranks[first]))
        for column, misses in enumerate((29, 57, 58)):
            sizes = score_function.sizes(results[second], float(scores[-1 - misses]))
            naive.assert_measured(rule, (split, column), sizes)


def test_only_control_keeps_the_risk_in_all_but_a_fraction_delta(monkeypatch):
    """With so many test queries that their own noise adds little."""
    monkeypatch.setattr(resampling, "SPLITS", 300)
    monkeypatch.setattr(resampling, "SWEPT_ALPHAS", np.array([0.2]))
    monkeypatch.setattr(resampling, "DELTAS", np.array([0.1]))
    summary = resample(*synthetic(500, 8000), (0.2,), 0.1).summary((0.2,))
    noise = 3 * np.sqrt(0.1 * 0.9 / 300)
    for name in ("minmax", "constant", "1 - cosine"):
        assert summary[name]["0.2"]["violations"] <= 0.1 + noise
        assert summary[name]["0.2"]["certified"] == 1
    assert summary["uncontrolled"]["0.2"]["violations"] > 0.1 + noise + 0.2
    assert summary["minmax"]["0.2"]["mean"] < summary["constant"]["0.2"]["mean"]


@pytest.mark.parametrize(("n", "m", "delta"), [(300, 300, 0.1), (500, 8000, 0.05)])
def test_expected_violations_include_the_noise_of_the_test_queries(n, m, delta):
    """Simulated: the true risk exceeds alpha with probability delta, the measured one more."""
    resampled = resample(*synthetic(n, m), (0.2,), delta)
    assert (resampled.n_calibration, resampled.n_test) == (n, m)
    rng = np.random.default_rng(0)
    alpha, draws, noise = 0.2, 200_000, np.sqrt(0.2 * 0.8)
    margin = np.quantile(rng.normal(0, noise / np.sqrt(n), draws), 1 - delta)
    true = alpha - margin + rng.normal(0, noise / np.sqrt(n), draws)
    measured = true + rng.normal(0, noise / np.sqrt(m), draws)
    assert resampled.expected == pytest.approx(np.mean(measured > alpha), abs=0.005)
    assert np.mean(true > alpha) == pytest.approx(delta, abs=0.005)


def test_a_query_whose_match_is_in_its_set_is_not_missed():
    """Whatever float32 makes of the threshold and its tolerance."""
    thresholds = np.arange(1, 100, dtype=np.float32) / 7
    limits = widened(thresholds).astype(np.float32)
    for threshold, limit in zip(thresholds, limits, strict=True):
        scores = np.array([threshold] * 30 + [limit] * 10)
        candidates = np.stack([np.zeros(40, np.float32), scores], axis=1)
        split = [np.arange(30), np.arange(30, 40)]
        rule = resampling._Rule(candidates, scores, "binomial", [split]).at([(0.2, 0.1)])
        assert (rule.risk.item(), rule.mean.item()) == (0, 2)


def test_the_summary_is_of_the_splits_that_certified_something(resampled_run, outcome):
    summary = resampled_run.summary(ALPHAS)
    assert outcome.evaluation.resampling.summary(ALPHAS) == summary
    for name, levels in summary.items():
        for alpha, row in zip(ALPHAS, levels.values(), strict=True):
            column = resampled_run.alphas.tolist().index(alpha)
            rule = resampled_run.rules[name]
            certified = ~np.isnan(rule.risk[:, column])
            risks = rule.risk[certified, column].tolist()
            assert row["certified"] == len(risks) / resampling.SPLITS
            assert row["violations"] == sum(risk > alpha for risk in risks) / resampling.SPLITS
            if not risks:
                assert {row[part] for part in row.keys() - {"certified", "violations"}} == {None}
                continue
            for part in ("risk", "mean", "median", "high"):
                values = getattr(rule, part)[certified, column].tolist()
                assert row[part] == pytest.approx(statistics.fmean(values))
            spread = statistics.pstdev(rule.mean[certified, column].tolist())
            assert row["mean_std"] == pytest.approx(spread)
            assert row["risk_std"] == pytest.approx(statistics.pstdev(risks))
            assert row["coverage"] == pytest.approx(1 - statistics.fmean(risks))
    assert summary["minmax"]["0.001"]["certified"] == 0
    assert summary["minmax"]["0.3"]["certified"] == 1


def test_the_summary_of_deltas_is_at_their_one_level():
    resampled = resample(*synthetic(400, 300), (0.12, 0.3), 0.05)
    summary = resampled.summary_of_deltas()
    for column, row in enumerate(summary.values()):
        risks = resampled.by_delta.risk[:, column]
        certified = risks[~np.isnan(risks)].tolist()
        assert row["certified"] == len(certified) / resampling.SPLITS
        assert row["violations"] == sum(risk > 0.12 for risk in certified) / resampling.SPLITS
        assert row["risk"] == pytest.approx(statistics.fmean(certified))
    # The delta of the sweep of levels has the same splits, hence the same numbers.
    assert summary["0.05"] == resampled.summary((0.12,))["minmax"]["0.12"]
