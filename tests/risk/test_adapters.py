import itertools

import numpy as np
import pytest

from rcir.errors import InvalidConfig, InvalidData
from rcir.risk import ADAPTERS, Constant, MinMax, Quantile, adapter_class

KINDS = tuple(ADAPTERS.values())


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def adapter(request):
    return request.param.fit(np.random.default_rng(1).lognormal(size=300))


def queries(n=400, seed=2):
    inside = np.random.default_rng(seed).lognormal(size=n)
    return np.concatenate([inside, [-5.0, 0.0, 1e-300, 1e6]])  # and some beyond the adapter split


@pytest.mark.parametrize("kappa", [0.0, 0.3, 1.0, 7.5, 123.4])
def test_sizes_follow_the_definition_query_by_query(kappa):
    split, asked = np.random.default_rng(1).lognormal(size=300), queries()
    low, high = min(split), max(split)
    for u, constant, minmax, quantile in zip(
        asked,
        Constant.fit(split).sizes(kappa, asked),
        MinMax.fit(split).sizes(kappa, asked),
        Quantile.fit(split).sizes(kappa, asked),
        strict=True,
    ):
        assert constant == 1 + int(kappa)
        relative = min(max((u - low) / (high - low), 1 / 300), 1)
        assert minmax == 1 + int(kappa * relative)
        not_more = max(1, sum(other <= u for other in split))
        assert quantile == 1 + int(kappa * not_more / 300)


def test_sizes_never_shrink_as_kappa_grows(adapter):
    asked = queries()
    kappas = np.sort(np.random.default_rng(3).uniform(0, 500, 200))
    sizes = np.stack([adapter.sizes(kappa, asked) for kappa in kappas])
    assert (np.diff(sizes, axis=0) >= 0).all()
    assert (sizes >= 1).all()
    assert sizes.dtype == np.int64


def test_sizes_never_shrink_as_uncertainty_grows(adapter):
    sizes = adapter.sizes(250.0, np.sort(queries()))
    assert (np.diff(sizes) >= 0).all()


def test_kappa_zero_gives_everybody_one_image(adapter):
    assert (adapter.sizes(0.0, queries()) == 1).all()


@pytest.mark.parametrize("seed", range(3))
def test_a_score_is_the_smallest_kappa_that_serves_to_the_last_bit(adapter, seed):
    rng = np.random.default_rng(seed)
    uncertainty = queries(n=500, seed=seed)
    ranks = rng.integers(2, 200, len(uncertainty))
    scores = adapter.scores(ranks, uncertainty)
    for query, rank, score in zip(uncertainty, ranks, scores, strict=True):
        one = np.array([query])
        assert adapter.sizes(score, one)[0] >= rank
        assert adapter.sizes(np.nextafter(score, 0), one)[0] < rank


def test_rank_one_needs_nothing_and_no_match_needs_the_impossible(adapter):
    scores = adapter.scores(np.array([1.0, np.inf]), np.array([0.7, 0.7]))
    assert scores.tolist() == [0.0, np.inf]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_uncertainties_make_a_constant_adapter(kind):
    adapter = kind.fit(np.full(50, 3.0))
    assert adapter.sizes(4.0, np.full(9, 3.0)).tolist() == [5] * 9


@pytest.mark.parametrize("kind", [MinMax, Quantile])
def test_uncertainty_beyond_the_adapter_split_counts_as_its_extreme(kind):
    split = np.linspace(1, 2, 100)
    adapter = kind.fit(split)
    beyond = adapter.sizes(60.0, np.array([-9.0, 0.99, 2.01, 1e9]))
    extreme = adapter.sizes(60.0, np.array([1.0, 2.0]))
    assert beyond.tolist() == [extreme[0], extreme[0], extreme[1], extreme[1]]
    assert extreme[1] == 61


@pytest.mark.parametrize(("kind", "bad"), list(itertools.product(KINDS, (np.nan, np.inf, -np.inf))))
def test_uncertainty_that_is_no_number_is_refused(kind, bad):
    with pytest.raises(InvalidData, match="1 of 3 uncertainties are NaN or infinite"):
        kind.fit(np.array([0.1, bad, 0.3]))
    adapter = kind.fit(np.array([0.1, 0.2, 0.3]))
    with pytest.raises(InvalidData, match="1 of 2 uncertainties are NaN or infinite"):
        adapter.sizes(3.0, np.array([0.1, bad]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0,), (1,), (4, 1)])
def test_an_adapter_split_of_the_wrong_shape_is_refused(kind, shape):
    with pytest.raises(InvalidData, match="n >= 2"):
        kind.fit(np.zeros(shape))


def test_state_restores_the_same_sizes(adapter):
    restored = type(adapter).from_state({k: v.copy() for k, v in adapter.state().items()})
    for kappa in (0.5, 17.25, 400.0):
        np.testing.assert_array_equal(
            restored.sizes(kappa, queries()), adapter.sizes(kappa, queries())
        )


def test_an_unknown_adapter_is_refused_with_the_choices():
    with pytest.raises(InvalidConfig, match="choose one of constant, minmax, quantile"):
        adapter_class("min-max")
