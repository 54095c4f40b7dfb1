import math
import time

import numpy as np
import pytest
from scipy.stats import beta

from rcir.errors import InvalidData
from rcir.risk import upper_confidence_bound

BOUNDS = ("binomial", "hoeffding", "bentkus", "hoeffding-bentkus", "betting")
LOSSES = {
    "wide": np.random.default_rng(0).uniform(size=80),
    "narrow": np.random.default_rng(1).beta(20, 80, size=200),
    "rare": 0.99 * (np.random.default_rng(2).uniform(size=300) < 0.05),
    "none": np.zeros(25),
    "one": np.array([0.3]),
}


def wealth(losses, mean, delta):
    """What is owned after each loss by who starts with 1 and follows the paper's stakes."""
    wealth, history, spread, seen = 1.0, [], 0.25, []
    for number, loss in enumerate(losses, start=1):
        variance = spread / number  # of the losses before this one, and one made up
        stake = min(1.0, math.sqrt(2 * math.log(1 / delta) / (len(losses) * variance)))
        wealth *= 1 + stake * (mean - loss)
        history.append(wealth)
        seen.append(loss)
        spread += (loss - (0.5 + sum(seen)) / (number + 1)) ** 2
    return history


def betting_bound(losses, delta, last=False):
    """The smallest mean against which the bettor ever, or at last, owns 1 / delta."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        history = wealth(losses, middle, delta)
        won = (history[-1] if last else max(history)) >= 1 / delta
        low, high = (low, middle) if won else (middle, high)
    return high


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("delta", [1e-6, 0.1, 0.5])
@pytest.mark.parametrize("bound", ["hoeffding", "bentkus", "hoeffding-bentkus"])
def test_it_is_the_smallest_mean_of_a_fine_scan_that_the_p_value_refutes(
    name, delta, bound, naive_p_value
):
    losses = LOSSES[name]
    total, n = math.fsum(losses), len(losses)
    scan = np.linspace(0, 1, 2001)[1:-1]
    refuted = (mean for mean in scan if naive_p_value(total, n, mean, bound) <= delta)
    expected = next(refuted, 1.0)
    assert expected - 1 / 2000 <= upper_confidence_bound(losses, delta, bound) <= expected + 1e-9


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("delta", [1e-6, 0.1, 0.5])
def test_betting_is_the_paper_s_capital_process_in_a_loop(name, delta):
    expected = betting_bound(LOSSES[name], delta)
    assert upper_confidence_bound(LOSSES[name], delta, "betting") == pytest.approx(
        expected, abs=1e-10
    )


@pytest.mark.parametrize("delta", [0.01, 0.2])
def test_betting_may_stop_when_the_most_is_owned(delta):
    losses = np.concatenate([np.full(150, 0.1), np.full(30, 0.9)])
    stopped, last = betting_bound(losses, delta), betting_bound(losses, delta, last=True)
    assert stopped < last - 0.05
    found = upper_confidence_bound(losses, delta, "betting")
    assert found == pytest.approx(stopped, abs=1e-10)
    backwards = upper_confidence_bound(losses[::-1], delta, "betting")
    assert backwards == pytest.approx(betting_bound(losses[::-1], delta), abs=1e-10)


@pytest.mark.parametrize(("misses", "n"), [(0, 1), (0, 30), (4, 30), (29, 30), (30, 30)])
@pytest.mark.parametrize("delta", [1e-12, 0.1])
def test_binomial_is_clopper_pearson(misses, n, delta):
    losses = np.random.default_rng(3).permutation(np.repeat([1.0, 0.0], [misses, n - misses]))
    expected = beta.isf(delta, misses + 1, n - misses) if misses < n else 1.0
    found = upper_confidence_bound(losses, delta, "binomial")
    assert found == pytest.approx(expected, rel=1e-9)
    assert upper_confidence_bound(losses.astype(bool), delta, "binomial") == found


def test_betting_is_the_smallest_where_losses_vary_little():
    for seed in range(5):
        losses = np.random.default_rng(seed).beta(5, 45, size=2000)
        others = [upper_confidence_bound(losses, 0.1, bound) for bound in BOUNDS[1:4]]
        assert 0.095 < upper_confidence_bound(losses, 0.1, "betting") < min(others)


@pytest.mark.parametrize("bound", BOUNDS)
def test_losses_of_one_bound_nothing_and_the_bound_is_never_below_the_mean(bound):
    assert upper_confidence_bound(np.ones(12), 0.1, bound) == 1.0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        losses = (rng.uniform(size=50) < rng.uniform()) * (1.0 if bound == "binomial" else 0.99)
        assert upper_confidence_bound(losses, 0.05, bound) > losses.mean() - 1e-12


@pytest.mark.parametrize("share", [0.02, 0.05, 0.5])
@pytest.mark.parametrize("delta", [1e-6, 1e-3])
def test_betting_takes_losses_of_one_after_a_stake_of_one(share, delta):
    losses = (np.random.default_rng(2).uniform(size=40) < share).astype(float)
    losses[3] = 1.0
    found = upper_confidence_bound(losses, delta, "betting")
    assert found == pytest.approx(betting_bound(losses, delta), abs=1e-10)


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_million_losses_take_about_a_second(bound):
    losses = (np.random.default_rng(4).uniform(size=10**6) < 0.1).astype(float)
    start = time.process_time()
    found = upper_confidence_bound(losses, 0.1, bound)
    assert time.process_time() - start < 3
    errors = (found - losses.mean()) / math.sqrt(0.09 / 10**6)
    assert 1.27 < errors < (1.29 if bound == "binomial" else 4)  # 1.28 are the normal limit's


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(
    "losses", [[], [[0.0, 1.0]], [0.0, 1.1], [-0.1, 0.0], [0.0, np.nan], [np.inf]]
)
def test_losses_that_make_no_sense_are_refused(losses, bound):
    with pytest.raises(InvalidData, match="losses"):
        upper_confidence_bound(losses, 0.1, bound)


def test_the_binomial_refuses_losses_between_zero_and_one():
    with pytest.raises(InvalidData, match="hoeffding-bentkus"):
        upper_confidence_bound([0.0, 0.5, 0.5], 0.1, "binomial")
