"""Figures of sweeps show the trials they are given, and the front is of those that none beats."""

from collections import defaultdict

import numpy as np
import pytest

from rcir import figures
from rcir.errors import InvalidData


def beats(one, other):
    pairs = list(zip(one, other, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


@pytest.mark.parametrize(("columns", "missing"), [(1, False), (2, True), (3, True), (3, False)])
def test_the_front_is_that_of_a_double_loop(columns, missing):
    rng = np.random.default_rng(columns)
    for n in (0, 1, 2, 40):
        objectives = rng.integers(0, 6, (n, columns)).astype(float)  # many ties
        if missing:
            objectives[rng.random(objectives.shape) < 0.2] = np.nan
        usable = [row for row in objectives if not any(value != value for value in row)]
        expected = [
            not any(value != value for value in row)
            and not any(beats(other, row) for other in usable)
            for row in objectives
        ]
        assert figures.pareto_front(objectives).tolist() == expected


def test_a_front_worked_out_by_hand():
    size = np.array([3.0, 3.0, 4.0, 5.0, 5.0, 2.0, np.nan, np.inf])
    recall = np.array([0.7, 0.7, 0.6, 0.9, 0.8, np.nan, 1.0, 0.9])
    front = figures.pareto_front(np.c_[size, -recall])
    assert np.flatnonzero(front).tolist() == [0, 1, 3]


def test_objectives_that_are_no_matrix_are_refused():
    with pytest.raises(InvalidData, match=r"objectives has shape \(3,\)"):
        figures.pareto_front(np.ones(3))


def said(axes):
    return {text.get_text(): tuple(text.xy) for text in axes.texts}


def test_the_pareto_figure_shows_trials_front_smallest_and_default(lines):
    size = np.array([4.0, 6.0, 7.0, 6.0, 8.0, np.nan])
    recall = np.array([0.8, 0.9, 0.85, 0.9, 0.95, 0.99])
    front = figures.pareto_front(np.c_[size, -recall])
    figure = figures.pareto(size, recall, front, [10, 11, 12, 13, 14, 15], default=(7.5, 0.82))
    (axes,) = figure.axes
    found = lines(axes)
    np.testing.assert_array_equal(found["trials"], [[7, 0.85]])
    np.testing.assert_array_equal(found["Pareto front"], [[4, 0.8], [6, 0.9], [6, 0.9], [8, 0.95]])
    np.testing.assert_array_equal(found["smallest"], [[4, 0.8]])
    np.testing.assert_array_equal(found["default"], [[7.5, 0.82]])
    (step,) = (line for line in axes.get_lines() if line.get_label() == "Pareto front")
    assert step.get_drawstyle() == "steps-post"
    assert said(axes) == {"10": (4, 0.8), "11, 13": (6, 0.9), "14": (8, 0.95)}
    assert axes.get_xscale() == "linear"


def test_of_equally_small_trials_the_one_of_the_higher_recall_is_the_smallest(lines):
    size, recall = np.array([5.0, 4.0, 4.0]), np.array([0.9, 0.7, 0.8])
    figure = figures.pareto(size, recall, np.ones(3, bool), [0, 1, 2])
    found = lines(figure.axes[0])
    np.testing.assert_array_equal(found["smallest"], [[4, 0.8]])
    assert "default" not in found


def options(n, rng=0):
    """Eight options of all kinds, and which of them are logarithmic."""
    rng = np.random.default_rng(rng)
    dropout = rng.uniform(0, 0.5, n).tolist()
    values = {
        "loss.kl_scale": (10 ** rng.uniform(-7, -3, n)).tolist(),
        "optimizer.learning_rate": 10 ** rng.uniform(-3.6, -2.9, n),
        "loss.margin": rng.uniform(0, 0.1, n),
        "mining.positives": rng.choice(["hardest", "random", "easiest-in-the-class"], n).tolist(),
        "encoder.head.embedding_size": rng.choice([32, 64, 128, 256], n).tolist(),
        "encoder.dropout": [None if at % 3 == 0 else value for at, value in enumerate(dropout)],
        "encoder.freeze_batch_norm": rng.choice([True, False], n).tolist(),
        "seed": [3] * n,
    }
    return values, ("loss.kl_scale", "optimizer.learning_rate")


def ticks(axes):
    """For each axis, its tick labels with their heights."""
    found = defaultdict(dict)
    for text in axes.texts:
        x, height = text.xy
        found[int(x)][text.get_text().replace("\n", "")] = height
    return found


def paths(axes):
    """The lines of trials that finished and that did not, (n, axes) heights."""
    found = {c.get_label() == "not finished": c for c in axes.collections}
    return [np.array([line[:, 1] for line in found[kind].get_segments()]) for kind in (False, True)]


@pytest.mark.parametrize("n", [5, 100])
def test_every_line_passes_each_axis_where_its_ticks_say_the_value_is(n):
    values, log = options(n)
    size = np.random.default_rng(1).uniform(2, 9, n)
    finished = np.arange(n) % 4 != 1
    figure = figures.parallel_coordinates(values, size, finished, log)
    (axes,) = figure.axes
    done, stopped = paths(axes)
    order = sorted(np.flatnonzero(finished), key=lambda trial: -size[trial])
    rows = [*order, *np.flatnonzero(~finished)]  # small sizes are drawn last, on top
    heights = np.concatenate([done, stopped])
    assert heights.shape == (n, 9)
    assert heights.min() == 0
    assert heights.max() == 1
    columns = {**values, "certified mean set size": size}
    names = ["".join(label.get_text().split()) for label in axes.get_xticklabels()]
    assert names == ["".join(name.split()) for name in columns]
    for at, (name, column) in enumerate(columns.items()):
        written = ticks(axes)[at]
        for trial, height in zip(rows, heights[:, at], strict=True):
            value = column[trial]
            if value is None or isinstance(value, (str, bool)):
                assert height == written[str(value)]
        numbers = {float(text): y for text, y in written.items() if text[0].isdigit()}
        if len(numbers) > 1:
            known = [row for row, trial in enumerate(rows) if column[trial] is not None]
            scale = np.log if name in log else np.asarray
            slope, start = np.polyfit(scale(list(numbers)), list(numbers.values()), 1)
            expected = start + slope * scale([column[rows[row]] for row in known])
            np.testing.assert_allclose(heights[known, at], expected, atol=1e-3)


def test_the_best_is_the_smallest_of_those_that_finished(lines):
    size, finished = np.array([7.0, 3.0, 4.0, np.nan, 9.0]), np.array([1, 0, 1, 1, 1], bool)
    figure = figures.parallel_coordinates({"margin": [1, 2, 3, 4, 5]}, size, finished)
    (axes,) = figure.axes
    assert axes.get_title("left").endswith("(4 of 5 trials)")
    done, stopped = paths(axes)
    np.testing.assert_allclose(done, [[1, 1], [0, 2 / 3], [0.5, 1 / 6]])  # the largest first
    np.testing.assert_allclose(stopped, [[0.25, 0]])
    np.testing.assert_allclose(lines(axes)["best: 4"], [[0, 0.5], [1, 1 / 6]])
    (coloured,) = (c for c in axes.collections if c.get_label() != "not finished")
    np.testing.assert_allclose(coloured.get_array(), done[:, -1])


def test_none_is_below_the_numbers_and_numbers_come_before_words():
    values = {"a": [None, 2, 4, 3], "b": ["x", 16, None, 8]}
    figure = figures.parallel_coordinates(values, np.arange(1.0, 5), np.ones(4, bool))
    first, second, _ = (ticks(figure.axes[0])[at] for at in range(3))
    assert sorted(first, key=first.get) == ["None", "2", "3", "4"]
    assert first["2"] - first["None"] > 0.1
    assert sorted(second, key=second.get) == ["8", "16", "None", "x"]
    near = {"a": [1e6, 1e6 + 1, 1e6 + 2]}  # they need ticks that differ
    figure = figures.parallel_coordinates(near, np.array([1.0, 10.0, 100.0]), np.ones(3, bool))
    assert len(ticks(figure.axes[0])[0]) > 1
    assert ticks(figure.axes[0])[1] == {"1": 0, "10": 0.5, "100": 1}


@pytest.mark.parametrize("n", [1, 7])
def test_equal_values_have_one_tick_in_the_middle(n, drawn):
    values = {"a": [0.5] * n, "b": ["x"] * n, "c": [None] * n, "d": [1e-4] * n}
    figure = figures.parallel_coordinates(values, np.full(n, 3.0), np.ones(n, bool), ["d"])
    found = ticks(figure.axes[0])
    names = ["0.5", "x", "None", "0.0001", "3"]
    assert [found[at] for at in range(5)] == [{name: 0.5} for name in names]
    drawn(figure)


@pytest.mark.parametrize(
    ("values", "log", "word"), [({"a": [1, 2]}, (), "2 values"), ({"a": [1, 0, 2]}, ["a"], "0")]
)
def test_values_that_cannot_be_drawn_are_refused(values, log, word):
    with pytest.raises(InvalidData, match=word):
        figures.parallel_coordinates(values, np.ones(3), np.ones(3, bool), log)
    with pytest.raises(InvalidData, match="front"):
        figures.pareto(np.ones(2), np.ones(2), np.ones(1, bool), [0, 1])
