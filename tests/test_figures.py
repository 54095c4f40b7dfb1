"""Figures show the arrays they are given."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from rcir import figures
from rcir.metrics import reliability

ALPHA = np.array([0.1, 0.2, 0.4])


def lines(figure):
    """The curves of a figure by their names in the legend."""
    (axes,) = figure.axes
    return {line.get_label(): line.get_xydata() for line in axes.get_lines()}


def drawn(figure):
    """The figure as pixels: whatever cannot be drawn raises here."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def test_the_risk_curve_has_the_risks_the_diagonal_and_the_noise_of_the_test():
    risk = np.array([0.08, np.nan, 0.35])
    figure = figures.risk_curve(ALPHA, {"ours": risk, "theirs": risk / 2}, n_test=100)
    curves = lines(figure)
    np.testing.assert_array_equal(curves["ours"], np.c_[ALPHA, risk])
    np.testing.assert_array_equal(curves["theirs"], np.c_[ALPHA, risk / 2])
    np.testing.assert_array_equal(curves["risk = alpha"], np.c_[ALPHA, ALPHA])
    (band,) = figure.axes[0].collections
    corners = band.get_paths()[0].vertices
    at_first = corners[np.isclose(corners[:, 0], 0.1), 1]
    assert at_first.min() == pytest.approx(0.1)
    assert at_first.max() == pytest.approx(0.1 + 2 * np.sqrt(0.1 * 0.9 / 100))
    drawn(figure)


def test_the_size_curve_has_the_sizes():
    sizes = {"ours": np.array([9.5, 4, 1]), "constant": np.array([20.0, 7, 2])}
    figure = figures.size_curve(ALPHA, sizes)
    for name, values in sizes.items():
        np.testing.assert_array_equal(lines(figure)[name], np.c_[ALPHA, values])
    drawn(figure)


@pytest.mark.parametrize("curve", [figures.risk_curve, figures.size_curve])
def test_curves_of_which_nothing_is_certified_are_drawn_empty(curve):
    nothing = {"ours": np.full(3, np.nan)}
    figure = curve(ALPHA, nothing, 50) if curve is figures.risk_curve else curve(ALPHA, nothing)
    assert np.isnan(lines(figure)["ours"][:, 1]).all()
    drawn(figure)


def test_the_size_distribution_has_one_bar_a_size():
    sizes = np.array([1, 1, 1, 2, 5])
    figure = figures.size_distribution(sizes, alpha=0.1, delta=0.05)
    bars = figure.axes[0].patches
    centres = [bar.get_x() + bar.get_width() / 2 for bar in bars]
    np.testing.assert_allclose(centres, [1, 2, 3, 4, 5])
    np.testing.assert_allclose([bar.get_height() for bar in bars], [0.6, 0.2, 0, 0, 0.2])
    (mean,) = figure.axes[0].get_lines()
    assert mean.get_xdata()[0] == 2
    assert "alpha = 0.1, delta = 0.05" in figure.axes[0].get_title("left")


def test_many_sizes_share_bars_evenly():
    """Each bar of a uniform distribution has the same height: none holds one size more."""
    sizes = np.arange(1, 151)
    bars = figures.size_distribution(sizes, 0.1, 0.1).axes[0].patches
    heights = np.array([bar.get_height() for bar in bars])
    assert len(bars) <= 40
    assert heights.sum() == pytest.approx(1)
    np.testing.assert_allclose(heights[:-1], heights[0])


def test_no_curve_is_left_out():
    curves = {f"curve {number}": ALPHA + number for number in range(6)}
    assert set(curves) < set(lines(figures.risk_curve(ALPHA, curves, 50)))
    assert set(curves) == set(lines(figures.size_curve(ALPHA, curves)))


@pytest.mark.parametrize("size", [1, 7])
def test_a_single_size_is_a_single_bar(size):
    figure = figures.size_distribution(np.full(30, size), 0.1, 0.1)
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert [height for height in heights if height] == [pytest.approx(1)]
    drawn(figure)


def test_the_reliability_diagram_has_a_bar_a_bin_with_queries():
    values = np.array([0.05, 0.05, 0.55, 0.95, 0.95, 0.95, 1.0])
    correct = np.array([False, False, True, True, True, False, True])
    diagram = reliability(values, correct)
    figure = figures.reliability_diagram(diagram)
    (axes,) = figure.axes
    centres = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]
    np.testing.assert_allclose(centres, [0.05, 0.55, 0.95])
    np.testing.assert_allclose([bar.get_height() for bar in axes.patches], [0, 1, 0.75])
    assert [text.get_text() for text in axes.texts] == ["2", "1", "4"]
    assert f"{diagram.error:.3f}" in axes.get_title("left")
    drawn(figure)


def frame(axes):
    return {to_hex(spine.get_edgecolor()) for spine in axes.spines.values()}


def row(matches, pixel=10):
    images = [np.full((4, 8), pixel + rank, np.uint8) for rank in range(len(matches))]
    return figures.QuerySet(np.full((4, 8), 200, np.uint8), "a query", images, matches)


def test_query_sets_show_the_pictures_in_order_framed_by_whether_they_match():
    figure = figures.query_sets([row([True, False, True]), row([False], 90)], columns=4)
    grid = np.array(figure.axes).reshape(2, 5)
    assert grid[0, 0].get_title("left") == "a query"
    assert grid[0, 0].images[0].get_array().min() == 200
    shown = [axes.images[0].get_array().max() for axes in grid[0, 1:4]]
    assert shown == [10, 11, 12]
    assert [frame(axes) for axes in grid[0, 1:4]] == [
        {figures.GREEN},
        {figures.RED},
        {figures.GREEN},
    ]
    assert grid[1, 1].images[0].get_array().max() == 90
    assert not grid[0, 4].images
    assert not any(axes.images for axes in grid[1, 2:])
    drawn(figure)


def test_a_set_that_is_wider_than_the_page_says_how_much_is_left_out():
    figure = figures.query_sets([row([True] * 7)], columns=3)
    assert [len(axes.images) for axes in figure.axes] == [1, 1, 1, 1]
    assert figure.axes[3].get_title("left") == "+ 4 more"


def test_a_single_colour_query_with_a_set_of_one():
    colour = np.zeros((6, 6, 3), np.uint8)
    colour[..., 0] = 255
    single = figures.QuerySet(colour, "red", [colour], [True])
    figure = figures.query_sets([single], columns=1)
    pixels = drawn(figure)
    assert (pixels[..., :3] == [255, 0, 0]).all(axis=-1).any()
