import numpy as np
import pytest
from scipy.stats import binom

from rcir.risk import ADAPTERS, MinMax, RiskController, allowed_misses

pytestmark = pytest.mark.statistical

POPULATION, DRAWS, DEPTH, DELTA = 20_000, 2_000, 100, 0.1
ERROR = 3 * np.sqrt(DELTA * (1 - DELTA) / DRAWS)  # three standard errors of a share of the draws


def queries(n, seed):
    """Skewed uncertainties, and ranks of the first match that they predict."""
    rng = np.random.default_rng(seed)
    uncertainty = rng.lognormal(size=n)
    ranks = 1 + np.floor(rng.exponential(2 * uncertainty))
    return uncertainty, np.where(ranks > DEPTH, np.inf, ranks)


@pytest.fixture(scope="module")
def population():
    return queries(POPULATION, seed=0)


@pytest.fixture(scope="module", params=ADAPTERS.values(), ids=lambda kind: kind.name)
def adapter(request):
    return request.param.fit(queries(1_000, seed=1)[0])


def calibrated(adapter, population, n, bound="binomial", seed=2):
    """A controller for each of DRAWS calibration sets of n queries, drawn with replacement."""
    rows = np.random.default_rng(seed).integers(0, POPULATION, (DRAWS, n))
    uncertainty, ranks = population
    return [
        RiskController.calibrate(adapter, uncertainty[row], ranks[row], DEPTH, bound)
        for row in rows
    ]


def true_risks(adapter, population, kappas):
    """The exact risk of every kappa: the share of the whole population that it does not serve."""
    uncertainty, ranks = population
    distinct, where = np.unique(kappas, return_inverse=True)
    judge = RiskController(adapter, np.zeros(1), DEPTH)
    return np.array([(judge.sizes(uncertainty, kappa) < ranks).mean() for kappa in distinct])[where]


def violations(adapter, population, kappas, level):
    return (true_risks(adapter, population, kappas) > level).mean()


@pytest.mark.parametrize("bound", ["binomial", "hoeffding"])
def test_the_risk_exceeds_alpha_in_at_most_delta_of_the_calibrations(adapter, population, bound):
    controllers = calibrated(adapter, population, 300, bound)
    kappas = [controller.kappa(0.1, DELTA) for controller in controllers]
    assert violations(adapter, population, kappas, 0.1) <= DELTA + ERROR


def test_the_exact_bound_fails_about_as_often_as_it_may(population):
    adapter = MinMax.fit(queries(1_000, seed=1)[0])  # its scores are continuous
    n, alpha = 300, 0.1
    kappas = [controller.kappa(alpha, DELTA) for controller in calibrated(adapter, population, n)]
    # Misses are whole numbers, and so are the population's queries.
    discreteness = binom.pmf(allowed_misses(n, alpha, DELTA) + 1, n, alpha) + n / POPULATION
    share = violations(adapter, population, kappas, alpha)
    assert DELTA - ERROR - discreteness <= share <= DELTA + ERROR


@pytest.mark.parametrize("n", [40, 300])
def test_the_certified_risk_holds_where_it_is_below_alpha(adapter, population, n):
    controllers = calibrated(adapter, population, n)
    kappas = [controller.kappa(0.15, DELTA) for controller in controllers]
    certified = controllers[0].risk_bound(0.15, DELTA)
    assert certified < 0.15 - 1e-4
    assert violations(adapter, population, kappas, certified) <= DELTA + ERROR


def test_the_certified_risk_is_not_claimed_larger_than_it_is(population):
    adapter = MinMax.fit(queries(1_000, seed=1)[0])
    controllers = calibrated(adapter, population, 40)
    kappas = [controller.kappa(0.15, DELTA) for controller in controllers]
    certified = controllers[0].risk_bound(0.15, DELTA)
    assert violations(adapter, population, kappas, certified) >= DELTA - ERROR - 40 / POPULATION


def test_one_miss_too_many_would_be_noticed(population):
    adapter = MinMax.fit(queries(1_000, seed=1)[0])
    # P(Binomial(40, .1) <= 1) = .080 and P(Binomial(40, .1) <= 2) = .223
    controllers = calibrated(adapter, population, 40)
    right = [controller.kappa(0.1, DELTA) for controller in controllers]
    wrong = [
        controller.scores[40 - 1 - (allowed_misses(40, 0.1, DELTA) + 1)]
        for controller in controllers
    ]
    assert violations(adapter, population, right, 0.1) <= DELTA + ERROR
    assert violations(adapter, population, wrong, 0.1) > DELTA + ERROR


def test_scaling_uncertainty_by_each_batch_s_own_range_would_be_noticed(population):
    uncertainty, ranks = population
    rows = np.random.default_rng(2).integers(0, POPULATION, (DRAWS, 300))
    kappas = []
    for row in rows:
        own = MinMax.fit(uncertainty[row])  # of the calibration queries, not of other ones
        controller = RiskController.calibrate(own, uncertainty[row], ranks[row], DEPTH)
        kappas.append(controller.kappa(0.1, DELTA))
    of_the_test_batch = MinMax.fit(uncertainty)
    assert violations(of_the_test_batch, population, kappas, 0.1) > DELTA + ERROR


def test_a_probability_that_one_minus_delta_is_mistaken_for_would_be_noticed(adapter, population):
    controllers = calibrated(adapter, population, 300)
    kappas = [controller.kappa(0.1, 1 - DELTA) for controller in controllers]
    assert violations(adapter, population, kappas, 0.1) > DELTA + ERROR
