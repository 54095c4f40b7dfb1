import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import InvalidData
from rcir.risk import ADAPTERS, Constant, RiskController

LEVELS = [(0.02, 0.1), (0.05, 0.01), (0.1, 0.1), (0.3, 0.5), (0.45, 0.05)]


def calibration(n=300, seed=0, depth=60):
    rng = np.random.default_rng(seed)
    uncertainty = rng.gamma(2.0, size=n)
    ranks = 1 + np.floor(rng.exponential(2 * uncertainty))
    return uncertainty, np.where(ranks > depth, np.inf, ranks)


@pytest.fixture(params=ADAPTERS.values(), ids=lambda kind: kind.name)
def adapter(request):
    return request.param.fit(np.random.default_rng(9).gamma(2.0, size=200))


def misses(controller, kappa, uncertainty, ranks):
    return int((controller.sizes(uncertainty, kappa) < ranks).sum())


@pytest.mark.parametrize(("alpha", "delta"), LEVELS)
def test_kappa_is_the_smallest_that_a_search_over_all_candidates_certifies(adapter, alpha, delta):
    uncertainty, ranks = calibration()
    controller = RiskController.calibrate(adapter, uncertainty, ranks, depth=60)
    # Every kappa at which some set grows; between two of them nothing changes.
    grows = np.unique(np.outer(1 / adapter.scale(uncertainty), np.arange(60)))
    allowed = max(m for m in range(-1, 300) if binom.cdf(m, 300, alpha) <= delta)
    kappa = controller.kappa(alpha, delta)
    assert misses(controller, kappa, uncertainty, ranks) <= allowed
    smaller = grows[grows < kappa * (1 - 1e-12)]
    for candidate in smaller[-200:]:
        assert misses(controller, candidate * (1 + 1e-13), uncertainty, ranks) > allowed


def test_one_more_miss_than_allowed_moves_kappa_to_the_next_rank():
    # 3,000 queries allow 134 misses at (0.05, 0.1).
    for late, expected in ((134, 0.0), (135, 6.0)):
        ranks = np.repeat([1.0, 7.0], [3000 - late, late])
        controller = RiskController.calibrate(Constant(), np.zeros(3000), ranks, depth=10)
        assert controller.kappa(0.05, 0.1) == expected


def test_sizes_stop_at_the_search_depth(adapter):
    controller = RiskController(adapter, np.zeros(1), depth=12)
    sizes = controller.sizes(np.array([0.1, 2.0, 50.0]), kappa=1e5)
    assert sizes.tolist() == [12, 12, 12]


def test_hoeffding_is_never_less_careful_than_the_exact_bound(adapter):
    uncertainty, ranks = calibration(n=2000)
    exact, hoeffding = (
        RiskController.calibrate(adapter, uncertainty, ranks, 60, bound)
        for bound in ("binomial", "hoeffding")
    )
    alphas = (0.05, 0.1, 0.2, 0.3)
    gaps = [hoeffding.kappa(alpha, 0.1) - exact.kappa(alpha, 0.1) for alpha in alphas]
    assert min(gaps) >= 0
    assert max(gaps) > 0


def test_the_order_of_the_queries_does_not_matter(adapter):
    uncertainty, ranks = calibration()
    shuffled = np.random.default_rng(5).permutation(300)
    first = RiskController.calibrate(adapter, uncertainty, ranks, 60)
    second = RiskController.calibrate(adapter, uncertainty[shuffled], ranks[shuffled], 60)
    np.testing.assert_array_equal(first.scores, second.scores)


@pytest.mark.parametrize("n", [30, 300, 3000])
@pytest.mark.parametrize("bound", ["binomial", "hoeffding"])
def test_the_certified_risk_is_at_most_alpha_and_allows_no_more_misses(n, bound):
    controller = RiskController(Constant(), np.zeros(n), 5, bound)
    for alpha in np.linspace(0.25, 0.9, 27):
        certified = controller.risk_bound(alpha, 0.1)
        assert certified <= alpha
        assert controller.risk_bound(certified * (1 + 1e-9), 0.1) == certified


@pytest.mark.parametrize(
    ("uncertainty", "ranks"),
    [
        (np.zeros(0), np.zeros(0)),
        (np.zeros(3), np.ones(4)),
        (np.zeros((3, 1)), np.ones((3, 1))),
        (np.array([0, np.nan]), np.ones(2)),
        (np.array([0, np.inf]), np.ones(2)),
        (np.zeros(2), np.array([1, np.nan])),
        (np.zeros(2), np.array([1, -np.inf])),
        (np.zeros(2), np.array([1, 0])),
        (np.zeros(2), np.array([1, 11])),
        (np.zeros(2), np.array([1, 2.5])),
    ],
)
def test_calibration_queries_that_make_no_sense_are_refused(uncertainty, ranks):
    with pytest.raises(InvalidData):
        RiskController.calibrate(Constant(), uncertainty, ranks, depth=10)
