"""Figures of risks and set sizes show the arrays they are given."""

import numpy as np
import pytest

from rcir import figures

ALPHA = np.array([0.1, 0.2, 0.4])


def splits(rng=1, n=40):
    """Risks of random splits: rows are splits."""
    return np.random.default_rng(rng).uniform(0, 2 * ALPHA, (n, 3))


def test_the_spread_of_the_risk_is_median_band_and_diagonal(lines, heights_at):
    risk = splits()
    figure = figures.risk_spread(ALPHA, risk, above=0.1)
    (axes,) = figure.axes
    curves = lines(axes)
    np.testing.assert_array_equal(curves["risk = alpha"], np.c_[ALPHA, ALPHA])
    np.testing.assert_allclose(curves["median"], np.c_[ALPHA, np.median(risk, axis=0)])
    (band,) = axes.collections
    for level, column in zip(ALPHA, risk.T, strict=True):
        expected = np.percentile(column, [5, 95])
        np.testing.assert_allclose(heights_at(band, level), expected)


@pytest.mark.parametrize("delta", [0.05, 0.29, 0.5])
def test_the_quantile_is_above_the_diagonal_exactly_where_too_many_splits_violate(delta, lines):
    for seed in range(8):
        risk = splits(seed, 100) * np.random.default_rng(seed).uniform(0.5, 1.2)
        curves = lines(figures.risk_spread(ALPHA, risk, delta).axes[0])
        (name,) = (name for name in curves if "quantile" in name)
        violations = [sum(row[at] > ALPHA[at] for row in risk) for at in range(3)]
        too_many = [100 * count > round(10000 * delta) for count in violations]
        assert (curves[name][:, 1] > ALPHA).tolist() == too_many


def test_exactly_a_fraction_delta_of_the_splits_may_lie_above_the_quantile(lines):
    """0.29 * 100 is 28.999999999999996 in floating point."""
    risk = np.tile(np.arange(100.0)[:, None], 3) / 100
    curves = lines(figures.risk_spread(ALPHA, risk, 0.29).axes[0])
    assert curves["0.71 quantile"][0, 1] == 0.70


def test_splits_that_certify_nothing_violate_nothing_and_are_not_in_the_median(lines):
    risk = np.array([[np.nan, np.nan, 0.3]] * 2 + [[np.nan, 0.1, 0.2]] * 2 + [[0.5, 0.3, 0.1]])
    curves = lines(figures.risk_spread(ALPHA, risk, above=0.2).axes[0])
    np.testing.assert_allclose(curves["median"][:, 1], [np.nan, 0.1, 0.2])
    np.testing.assert_allclose(curves["0.8 quantile"][:, 1], [np.nan, 0.1, 0.3])


def test_the_spread_of_sizes_has_a_median_and_a_band_for_every_rule(lines, heights_at):
    rng = np.random.default_rng(0)
    sizes = {name: rng.uniform(1, 9, (30, 3)) for name in ("auto", "constant", "uncontrolled")}
    sizes["auto"][:20, 0] = np.nan
    sizes["auto"][:10, 1] = np.nan
    figure = figures.size_spread(ALPHA, sizes)
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    curves = lines(axes)
    assert list(curves) == list(sizes)
    expected = [np.nan, np.median(sizes["auto"][10:, 1]), np.median(sizes["auto"][:, 2])]
    np.testing.assert_allclose(curves["auto"][:, 1], expected)
    np.testing.assert_allclose(curves["constant"][:, 1], np.median(sizes["constant"], axis=0))
    bands = dict(zip(sizes, axes.collections, strict=True))
    expected = np.quantile(sizes["constant"][:, 2], [0.05, 0.95])
    np.testing.assert_allclose(heights_at(bands["constant"], 0.4), expected)


def test_spreads_of_which_nothing_is_certified_are_drawn_empty(lines, drawn):
    nothing = np.full((4, 3), np.nan)
    risk = figures.risk_spread(ALPHA, nothing, 0.1)
    size = figures.size_spread(ALPHA, {"auto": nothing})
    sweep = figures.delta_sweep(np.array([0.001, 0.1, 0.5]), nothing, nothing, alpha=0.1)
    assert np.isnan(lines(risk.axes[0])["median"][:, 1]).all()
    assert np.isnan(lines(size.axes[0])["auto"][:, 1]).all()
    assert np.isnan(lines(sweep.axes[1])["median"][:, 1]).all()
    limits = [*size.axes[0].get_ylim(), *sweep.axes[0].get_xlim(), *sweep.axes[1].get_xlim()]
    assert min(limits) > 0, "a logarithmic axis starts above 0"
    for figure in (risk, size, sweep):
        drawn(figure)


def test_the_sweep_over_delta_has_the_quantile_of_each_delta(lines, heights_at):
    delta = np.array([0.02, 0.1, 0.5])
    risk, size = splits(n=50), splits(2, 50) + 1
    figure = figures.delta_sweep(delta, risk, size, alpha=0.3)
    left, right = figure.axes
    curves = lines(left)
    expected = [sorted(risk[:, at])[-1 - above] for at, above in enumerate((1, 5, 25))]
    np.testing.assert_allclose(curves["1 - delta quantile"], np.c_[delta, expected])
    np.testing.assert_allclose(curves["median"], np.c_[delta, np.median(risk, axis=0)])
    assert set(curves["risk = alpha"][:, 1]) == {0.3}
    np.testing.assert_allclose(lines(right)["median"], np.c_[delta, np.median(size, axis=0)])
    (band,) = right.collections
    np.testing.assert_allclose(heights_at(band, 0.1), np.percentile(size[:, 1], [5, 95]))
    assert left.get_xscale() == right.get_xscale() == "log"
    half = figures.delta_sweep(delta, risk, size, 0.3, above=np.full(3, 0.5)).axes[0]
    (name,) = (name for name in lines(half) if "quantile" in name)
    expected = [sorted(column)[24] for column in risk.T]
    np.testing.assert_allclose(lines(half)[name][:, 1], expected)
    near = figures.delta_sweep(np.array([0.1, 0.2, 0.3]), risk, size, 0.3)
    assert near.axes[0].get_xscale() == "linear"


def test_distributions_of_sizes_are_cumulative_shares():
    rng = np.random.default_rng(0)
    sizes = {"alpha = 0.1": rng.integers(1, 30, 200), "alpha = 0.2": rng.integers(0, 5, 77)}
    figure = figures.size_distributions(sizes)
    (axes,) = figure.axes
    for line, (name, values) in zip(axes.get_lines(), sizes.items(), strict=True):
        assert line.get_label() == f"{name}: mean {sum(values) / len(values):.3g}"
        assert line.get_drawstyle() == "steps-post"
        x, y = line.get_data()
        for size in range(1, 31):
            shown = y[x <= size][-1]
            assert shown == pytest.approx(sum(value <= size for value in values) / len(values))
        assert y[0] == pytest.approx(sum(value == 0 for value in values) / len(values))


def test_a_distribution_of_one_size_is_one_step():
    for size in (0, 1, 500):
        (line,) = figures.size_distributions({"all": np.full(9, size)}).axes[0].get_lines()
        x, y = line.get_data()
        assert y[x <= max(size, 0.95)][-1] == 1
