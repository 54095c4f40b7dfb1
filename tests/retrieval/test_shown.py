"""What Python and notebooks show of retrievers, answers and reports; answers as tables."""

import re
from base64 import b64decode
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import rcir

COLOURS = [(200, 40, 40), (40, 200, 40), (40, 40, 200), (200, 200, 40), (40, 200, 200)]
RNG = np.random.default_rng(0)
LABELS = RNG.integers(5, size=900)
VECTORS = np.eye(5)[LABELS] + 0.2 * RNG.standard_normal((900, 5))
IDS = [f"<b>&lt;{row}.png" for row in range(400)]  # text, not markup


class Page(HTMLParser):
    """The pictures, the visible text and the tags of the HTML of an object."""

    def __init__(self, item):
        super().__init__()
        self.pictures, self.texts, self.tags = [], [], []
        self.feed(item._repr_html_())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "img":
            _, encoded = dict(attributes)["src"].split("base64,")
            self.pictures.append(Image.open(BytesIO(b64decode(encoded))))

    def handle_data(self, data):
        self.texts += [data.strip()] * bool(data.strip())


@pytest.fixture
def fruit(tmp_path):
    """A calibrated retriever whose items are pictures, each of the colour of its label."""
    for name, label in zip(IDS, LABELS[:400], strict=True):
        Image.new("RGB", (300, 200), COLOURS[label]).save(tmp_path / name)
    retriever = rcir.Retriever.from_embeddings(VECTORS[:400], IDS, LABELS[:400])
    retriever.calibrate(VECTORS[400:], LABELS[400:], "constant", tuning="queries")
    retriever.origin["pictures"] = str(tmp_path)
    return retriever


def test_an_answer_shows_small_pictures_and_the_text_of_its_items(fruit, tmp_path):
    answer = fruit.retrieve([0.6, 0.5, 0.0, 0.0, 0.0], 0.2, 0.1, risk="recall")
    assert answer.size > 12
    page = Page(answer)
    colours = [np.asarray(picture.convert("RGB")).mean(axis=(0, 1)) for picture in page.pictures]
    expected = [COLOURS[label] for label in answer.labels[:12]]
    np.testing.assert_allclose(colours, expected, atol=4)
    assert max(max(picture.size) for picture in page.pictures) < 200
    assert len(answer._repr_html_()) < 200_000
    assert set(answer.ids[:12]) <= set(page.texts)
    assert "b" not in page.tags
    assert f"{answer.size - 12} more" in page.texts
    (tmp_path / answer.ids[0]).unlink()
    (tmp_path / answer.ids[1]).write_bytes(b"no picture")
    assert len(Page(answer).pictures) == 10
    assert len(repr(answer)) < 300


def test_pictures_of_a_data_set_are_found(folder, splits):
    loaded = rcir.load(folder)
    answer = loaded.retrieve(splits.test.images[0], 0.3, 0.1)
    assert Page(answer).pictures == []
    options = {name: len(part) for name, part in vars(splits).items()}
    loaded.origin = {"data": {"name": "digits", "options": options}}
    answer = loaded.retrieve(splits.test.images[0], 0.3, 0.1)
    rows = [splits.gallery.ids.index(name) for name in answer.ids[:12]]
    for row, picture in zip(rows, Page(answer).pictures, strict=True):
        difference = np.asarray(picture.convert("L")) - splits.gallery.images[row].astype(float)
        assert np.abs(difference).mean() < 12


def test_reports_show_their_tables(fruit):
    sizes = [fruit.calibration.certified_size(alpha).mean_size for alpha in (0.05, 0.1, 0.2)]
    assert {f"{size:.2f}" for size in sizes} <= set(Page(fruit).texts)
    assert str(fruit.guarantee(0.1, None)) in Page(fruit.guarantee(0.1, None)).texts
    plan = fruit.plan(0.1, 0.1, numbers=[50])
    texts = Page(plan).texts
    assert texts[texts.index("50") + 1] == f"{plan.rows[0].size:.2f}"


def test_the_text_of_a_retriever_is_one_line_with_its_numbers(fruit):
    assert "\n" not in repr(fruit)
    assert {"400", "5", "350"} <= set(re.findall(r"\d+", repr(fruit)))
    fruit.add(VECTORS[:3] + 0.1, ["a", "b", "c"], LABELS[:3])
    assert "403 items" in repr(fruit)
    assert "stale" in repr(fruit)
    assert "table" not in Page(fruit).tags


def test_answers_become_frames(fruit):
    answers = fruit.retrieve(VECTORS[400:420], 0.2, 0.1, risk="recall")
    frame = pd.concat([each.to_frame() for each in answers], keys=range(20), names=["query"])
    assert frame.index.names == ["query", "rank"]
    assert frame.groupby("query").size().tolist() == [each.size for each in answers]
    item, answer = frame.loc[(7, 2)], answers[7]
    expected = [answer.ids[1], answer.labels[1], answer.distances[1], answer.probabilities[1]]
    assert item[["id", "label", "distance", "probability"]].tolist() == expected
