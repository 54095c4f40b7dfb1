"""Values that tests read from figures."""

import io
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg


@pytest.fixture
def lines():
    """The curves of a panel by their names in the legend."""
    return lambda axes: {line.get_label(): line.get_xydata() for line in axes.get_lines()}


@pytest.fixture
def drawn():
    """The figure as pixels, and saved as SVG: whatever cannot be drawn raises here."""

    def draw(figure):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg")
        assert ElementTree.fromstring(buffer.getvalue()).tag.endswith("svg")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())

    return draw


@pytest.fixture
def heights_at():
    """The lowest and highest corner of a band at some x."""

    def read(band, x):
        corners = band.get_paths()[0].vertices
        y = corners[np.isclose(corners[:, 0], x), 1]
        return y.min(), y.max()

    return read
