"""Plots of risks, set sizes and uncertainties show the arrays they are given."""

import numpy as np
import pytest

from rcir import figures
from rcir.metrics import reliability

ALPHA = np.array([0.1, 0.2, 0.4])


def test_risk_is_a_curve_over_alpha_with_intervals(lines, heights_at, drawn):
    values = np.array([0.07, 0.15, 0.31])
    low, high = values - 0.01, values + np.array([0.02, 0.03, 0.04])
    low[0] = high[0] = np.nan  # one has no interval
    figure = figures.draw_risk_curve(ALPHA, values, low, high)
    (axes,) = figure.axes
    np.testing.assert_allclose(lines(axes)["measured risk"], np.c_[ALPHA, values])
    np.testing.assert_array_equal(lines(axes)["risk = alpha"], np.c_[ALPHA, ALPHA])
    (band,) = axes.collections
    np.testing.assert_allclose(heights_at(band, 0.4), [low[2], high[2]])
    drawn(figure)


def test_distributions_of_sizes_are_cumulative_shares():
    rng = np.random.default_rng(0)
    sizes = {"alpha = 0.1": rng.integers(1, 30, 200), "alpha = 0.2": rng.integers(0, 5, 77)}
    figure = figures.draw_size_distributions(sizes)
    (axes,) = figure.axes
    for line, (name, values) in zip(axes.get_lines(), sizes.items(), strict=True):
        assert line.get_label() == f"{name}: mean {sum(values) / len(values):.3g}"
        assert line.get_drawstyle() == "steps-post"
        x, y = line.get_data()
        shares = [np.mean(values <= size) for size in range(1, 31)]
        assert [y[x <= size][-1] for size in range(1, 31)] == pytest.approx(shares)
        assert y[0] == pytest.approx(np.mean(values == 0))
    for size in (0, 500):  # of one size, one step
        (line,) = figures.draw_size_distributions({"all": np.full(9, size)}).axes[0].get_lines()
        x, y = line.get_data()
        assert y[x <= max(size, 0.95)][-1] == 1


def test_the_reliability_diagram_has_a_bar_a_bin_with_queries():
    values = np.array([0.05, 0.05, 0.55, 0.95, 0.95, 0.95, 1.0])
    correct = np.array([False, False, True, True, True, False, True])
    diagram = reliability(values, correct)
    figure = figures.draw_reliability(diagram)
    (axes,) = figure.axes
    centres = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]
    np.testing.assert_allclose(centres, [0.05, 0.55, 0.95])
    np.testing.assert_allclose([bar.get_height() for bar in axes.patches], [0, 1, 0.75])
    assert [text.get_text() for text in axes.texts] == ["2", "1", "4"]
    assert f"{diagram.error:.3f}" in axes.get_title("left")


def test_sparsification_shows_references_and_encoders(lines):
    fractions = np.array([0, 0.25, 0.5])
    curves = {"random": np.full(3, 0.8), "btl": np.array([0.8, 0.85, 0.9])}
    curves["oracle"] = np.array([0.8, 1, 1])
    figure = figures.draw_sparsification(fractions, curves)
    (axes,) = figure.axes
    found = lines(axes)
    assert set(found) == set(curves)
    for name, values in curves.items():
        np.testing.assert_array_equal(found[name], np.c_[fractions, values])
    only = figures.draw_sparsification(fractions, {"btl": curves["btl"]})
    assert set(lines(only.axes[0])) == {"btl"}
