"""Maps of points show the arrays they are given."""

from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_hex

from rcir import figures
from rcir.errors import InvalidData


@pytest.fixture(scope="module")
def clusters():
    rng = np.random.default_rng(0)
    label = rng.integers(4, size=200)
    centres = np.eye(4, 16) * 5
    return centres[label] + rng.normal(0, 0.3, (200, 16)), label


def test_near_vectors_become_near_points(clusters):
    vectors, label = clusters
    points, rows = figures.project(vectors, seed=1)
    assert points.shape == (200, 2)
    np.testing.assert_array_equal(rows, np.arange(200))
    distance = np.linalg.norm(points[:, None] - points[None], axis=2)
    nearest = (distance + 1e9 * np.eye(200)).argmin(axis=1)
    assert (label[nearest] == label).mean() > 0.95


def test_a_projection_is_the_same_every_time_and_of_a_draw_of_many(clusters):
    vectors, _ = clusters
    (points, rows), again = (figures.project(vectors, seed=5, limit=40) for _ in range(2))
    np.testing.assert_array_equal(points, again[0])
    np.testing.assert_array_equal(rows, again[1])
    assert points.shape == (40, 2)
    assert len(set(rows)) == 40
    assert (np.diff(rows) > 0).all()
    assert rows.max() >= 40, "not merely the first"


def test_too_few_vectors_are_refused():
    vectors = np.eye(9, 2)
    for few in (vectors[:3], vectors[:, :1]):
        with pytest.raises(InvalidData, match="vectors"):
            figures.project(few)


def test_the_map_colours_the_ten_most_frequent_classes():
    label = np.concatenate([np.full(20 - 1 * number, f"class {number:02}") for number in range(13)])
    points = np.random.default_rng(0).normal(size=(len(label), 2))
    uncertainty = np.random.default_rng(1).uniform(size=len(label))
    figure = figures.draw_projection(points, label, uncertainty)
    left, right, bar = figure.axes
    names = [f"class {number:02}" for number in range(10)]
    *classes, others = left.collections
    assert [scatter.get_label() for scatter in classes] == names
    assert others.get_label() == "3 others"
    for scatter in classes:
        expected = points[label == scatter.get_label()]
        np.testing.assert_array_equal(scatter.get_offsets(), expected)
    assert len(others.get_offsets()) == 10 + 9 + 8
    assert len({to_hex(s.get_facecolor()[0]) for s in left.collections}) == 11
    (scatter,) = right.collections
    order = np.argsort(uncertainty)
    np.testing.assert_array_equal(scatter.get_offsets(), points[order])
    np.testing.assert_array_equal(scatter.get_array(), uncertainty[order])
    np.testing.assert_allclose(scatter.get_clim(), np.percentile(uncertainty, [2, 98]))
    assert bar.get_ylabel() == "uncertainty"


def test_without_classes_the_map_is_by_uncertainty_alone():
    points, uncertainty = np.eye(50, 2), np.linspace(1, 0, 50)
    figure = figures.draw_projection(points, None, uncertainty)
    (scatter,) = figure.axes[0].collections
    np.testing.assert_array_equal(scatter.get_offsets(), points[::-1])
    np.testing.assert_array_equal(scatter.get_array(), uncertainty[::-1])
    assert figure.legends == []


NAMES = [r"$\frac{", "$a$", "_hidden", "p\udcffr", "two\nlines", r"\$b$"]


def test_names_are_no_formulas_and_none_is_left_out_of_the_legend(drawn):
    points = np.random.default_rng(0).normal(size=(60, 2))
    figure = figures.draw_projection(points, np.array(NAMES * 10), np.ones(60))  # all equal
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert sorted(shown) == sorted([*(NAMES[k] for k in (0, 1, 2, 5)), r"p\udcffr", r"two\nlines"])
    drawn(figure)
    ElementTree.fromstring(figures.to_svg(figure))
