"""Figures of risks and set sizes show the arrays they are given."""

import numpy as np
import pytest

from rcir import figures

ALPHA = np.array([0.1, 0.2, 0.4])


def test_risk_and_size_are_curves_over_alpha_with_intervals(lines, heights_at, drawn):
    values = np.array([0.07, 0.15, 0.31])
    low, high = values - 0.01, values + np.array([0.02, 0.03, 0.04])
    low[0] = high[0] = np.nan  # one has no interval
    risk = figures.risk_curve(ALPHA, values, low, high)
    size = figures.size_curve(ALPHA, 10 * values, 10 * low, 10 * high, 20 * values)
    for figure, name, scale in ((risk, "measured risk", 1), (size, "mean size", 10)):
        (axes,) = figure.axes
        np.testing.assert_allclose(lines(axes)[name], np.c_[ALPHA, scale * values])
        (band,) = axes.collections
        np.testing.assert_allclose(heights_at(band, 0.4), [scale * low[2], scale * high[2]])
        drawn(figure)
    np.testing.assert_array_equal(lines(risk.axes[0])["risk = alpha"], np.c_[ALPHA, ALPHA])
    constant = lines(size.axes[0])["one size for all queries"]
    np.testing.assert_allclose(constant, np.c_[ALPHA, 20 * values])
    assert size.axes[0].get_yscale() == "log"


def test_distributions_of_sizes_are_cumulative_shares():
    rng = np.random.default_rng(0)
    sizes = {"alpha = 0.1": rng.integers(1, 30, 200), "alpha = 0.2": rng.integers(0, 5, 77)}
    figure = figures.size_distributions(sizes)
    (axes,) = figure.axes
    for line, (name, values) in zip(axes.get_lines(), sizes.items(), strict=True):
        assert line.get_label() == f"{name}: mean {sum(values) / len(values):.3g}"
        assert line.get_drawstyle() == "steps-post"
        x, y = line.get_data()
        shares = [np.mean(values <= size) for size in range(1, 31)]
        assert [y[x <= size][-1] for size in range(1, 31)] == pytest.approx(shares)
        assert y[0] == pytest.approx(np.mean(values == 0))
    for size in (0, 500):  # of one size, one step
        (line,) = figures.size_distributions({"all": np.full(9, size)}).axes[0].get_lines()
        x, y = line.get_data()
        assert y[x <= max(size, 0.95)][-1] == 1
