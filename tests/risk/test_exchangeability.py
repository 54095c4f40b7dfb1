import numpy as np
import pytest
from scipy.stats import binom, binomtest, ks_2samp

from rcir.errors import InvalidData, InvalidRiskLevel
from rcir.risk import Constant, LabelledResults, SearchResults, check_exchangeability


def draw(n, seed, shift=0.0, later=0.0, depth=8):
    """Queries with normal uncertainty, whose first match is later the larger `later` is."""
    rng = np.random.default_rng(seed)
    first = np.minimum(rng.poisson(1 + later, n), depth)  # no match at all if it is the depth
    relevant = np.arange(depth) == first[:, None]
    return LabelledResults.of(
        SearchResults(rng.normal(shift, size=n), depth), relevant, np.ones(n, int)
    ).scored(Constant())


@pytest.mark.parametrize("shift", [0.0, 0.3])
@pytest.mark.parametrize("later", [0.0, 0.5])
def test_the_p_values_are_those_of_scipy(shift, later):
    calibration, recent = draw(300, 0), draw(80, 1, shift, later)
    found = check_exchangeability(calibration, recent)
    ranks = [
        [row.index(True) if True in row else np.inf for row in labelled.relevant.tolist()]
        for labelled in (calibration, recent)
    ]
    expected = {
        "uncertainty": ks_2samp(calibration.uncertainty, recent.uncertainty).pvalue,
        "score": ks_2samp(*ranks).pvalue,  # a constant score function's scores are in their order
    }
    assert found.p_values == pytest.approx(expected)
    assert found.p_value == pytest.approx(min(1.0, 2 * min(expected.values())))
    assert (found.n_calibration, found.n_recent) == (300, 80)


@pytest.mark.parametrize(("shift", "later"), [(1.0, 0.0), (0.0, 2.0)])
def test_a_shift_of_either_quantity_contradicts(shift, later):
    found = check_exchangeability(draw(500, 0), draw(200, 1, shift, later))
    assert found.contradicted()
    shifted = "uncertainty" if shift else "score"
    assert min(found.p_values, key=found.p_values.get) == shifted
    assert f"200 recent against 500 calibration queries: p-value {found.p_value:.3g}" in str(found)


@pytest.mark.parametrize("level", [0.05, 0.2])
def test_one_source_is_contradicted_about_as_seldom_as_the_level_says(level):
    rejected = sum(
        check_exchangeability(draw(100, seed), draw(40, seed + 1000)).contradicted(level)
        for seed in range(200)
    )
    assert rejected <= binom.ppf(0.999, 200, level)


def test_the_level_itself_contradicts():
    found = check_exchangeability(draw(200, 0), draw(100, 1, shift=0.4))
    assert found.contradicted(found.p_value)
    assert not found.contradicted(found.p_value * (1 - 1e-9))


def test_queries_without_a_match_count_as_the_largest_score():
    none = np.zeros((100, 8), bool)
    lost = LabelledResults.of(
        SearchResults(draw(100, 5).uncertainty, 8), none, np.zeros(100, int)
    ).scored(Constant())
    assert check_exchangeability(draw(300, 0), lost).p_values["score"] < 1e-10
    assert check_exchangeability(lost, lost).p_values["score"] == 1.0


@pytest.mark.parametrize("later", [0.0, 0.7])
@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_a_certified_risk_is_tested_by_scipys_binomial_test(later, alpha):
    calibration, recent = draw(300, 0), draw(80, 1, later=later)
    threshold = float(np.sort(calibration.scores)[-20])
    plain = check_exchangeability(calibration, recent)
    found = check_exchangeability(calibration, recent, certified=(threshold, alpha))
    # A constant score function's threshold is a number of ranks, counted from 0.
    misses = sum(not any(row[: int(threshold) + 1]) for row in recent.relevant.tolist())
    expected = binomtest(misses, 80, alpha, alternative="greater").pvalue
    assert 0 < misses < 80
    assert found.p_values == pytest.approx({**plain.p_values, "risk": expected})
    assert found.p_value == pytest.approx(min(1.0, 3 * min(found.p_values.values())))
    assert (found.misses, found.alpha) == (misses, alpha)
    assert (plain.misses, plain.alpha) == (None, None)
    assert f"one source and at most {alpha} are missed" in str(found)
    assert f"{misses} of the recent ones were missed" in str(found)
    assert "missed" not in str(plain)


def test_no_miss_is_no_evidence_of_a_risk():
    found = check_exchangeability(draw(300, 0), draw(80, 1), certified=(7.0, 0.1))
    assert (found.misses, found.p_values["risk"]) == (0, 1.0)


def test_queries_without_a_match_are_missed_at_any_threshold():
    none = np.zeros((100, 8), bool)
    lost = LabelledResults.of(
        SearchResults(draw(100, 5).uncertainty, 8), none, np.zeros(100, int)
    ).scored(Constant())
    assert check_exchangeability(lost, lost, certified=(7.0, 0.5)).misses == 100


@pytest.mark.parametrize("alpha", [0, 1, -0.1, None, float("nan")])
def test_a_certified_risk_that_is_none_is_refused(alpha):
    with pytest.raises(InvalidRiskLevel, match="alpha is"):
        check_exchangeability(draw(50, 0), draw(20, 1), certified=(1.0, alpha))


@pytest.mark.parametrize("n", [1])
def test_a_single_recent_query_is_refused(n):
    with pytest.raises(InvalidData, match="1 recent queries; at least 2"):
        check_exchangeability(draw(50, 0), draw(n, 1))
