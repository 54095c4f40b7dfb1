"""The report: one page that works without a network."""

import base64
import io
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from calibration import print_table
from calibration.drawing import draw_figures
from calibration.table import console

SVG = "{http://www.w3.org/2000/svg}"


class Page(HTMLParser):
    """Pictures, table cells and everything that would be fetched."""

    def __init__(self, text):
        super().__init__()
        self.pictures, self.fetched, self.open = {}, [], []
        self.tables, self.cells = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "img":
            self.pictures[found["alt"]] = found["src"]
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.cells = []
            self.tables[-1].append(self.cells)
        if tag in ("td", "th"):
            self.cells.append("")
        if tag in ("script", "link", "iframe", "object", "embed"):
            self.fetched.append(tag)
        self.fetched += [found[name] for name in ("src", "href") if name in found and tag != "img"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


@pytest.fixture(scope="module")
def text(outcome):
    return outcome.report.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def svg(source):
    """The drawing of a picture, with what it says in comments: letters are paths."""
    prefix, _, encoded = source.partition(",")
    assert prefix == "data:image/svg+xml;base64"
    return parsed(base64.b64decode(encoded, validate=True))


def parsed(text):
    builder = ElementTree.TreeBuilder(insert_comments=True)
    return ElementTree.fromstring(text, ElementTree.XMLParser(target=builder))


def words(drawing):
    return [
        element.text.strip() for element in drawing.iter() if element.tag is ElementTree.Comment
    ]


def test_nothing_is_fetched_from_anywhere(text, page):
    assert page.open == []
    assert page.fetched == []
    assert not re.search(r"https?://", text)
    assert not re.search(r"@import|url\(", text)
    for source in page.pictures.values():
        for element in svg(source).iter():
            for name, value in element.attrib.items():
                if name.endswith("href"):
                    assert value.startswith(("#", "data:"))


FIGURES = {
    "risk": "risk over divisions against alpha",
    "size": "mean set size over divisions against alpha",
    "sizes": "distribution of set sizes",
    "delta": "risk and size against delta",
    "reliability": "reliability diagram",
    "calibration": "calibration curves",
    "sparsification": "sparsification curves",
    "cleaning": "gallery cleaning",
    "projection": "two-dimensional projection of the test queries",
    "most_certain": "most certain queries with their sets",
    "least_certain": "least certain queries with their sets",
}


@pytest.fixture(scope="module")
def figures(outcome):
    return draw_figures(
        outcome.retriever,
        outcome.evaluation,
        outcome.test,
        outcome.splits.test,
        outcome.splits.gallery,
    )


def test_every_figure_is_in_it_and_is_a_drawing(figures, page):
    assert set(figures) == set(FIGURES)
    assert list(page.pictures) == list(FIGURES.values()), "each once, in the order of the page"
    for source in page.pictures.values():
        drawing = svg(source)
        assert drawing.tag == f"{SVG}svg"
        assert len(list(drawing.iter(f"{SVG}path"))) > 5


def test_no_figure_stands_in_the_place_of_another(figures, page):
    for name, alt in FIGURES.items():
        alone = io.BytesIO()
        figures[name].savefig(alone, format="svg")
        said = words(svg(page.pictures[alt]))
        assert said == words(parsed(alone.getvalue())) != []


def test_retrieved_pictures_are_in_the_sets(page):
    drawing = svg(page.pictures["least certain queries with their sets"])
    assert len(list(drawing.iter(f"{SVG}image"))) >= 8


def test_the_table_states_what_was_measured(outcome, page):
    rows, *_ = page.tables
    assert rows[0][:2] == ["alpha", "certified"]
    assert rows[1] == ["0.001", "no", "", "", "", ""]
    for cells, row in zip(rows[2:], outcome.evaluation.rows[1:], strict=True):
        assert cells[:2] == [f"{row.alpha:g}", "yes"]
        assert float(cells[2]) == pytest.approx(row.test_risk, abs=5e-5)
        assert float(cells[3]) == pytest.approx(row.mean_size, abs=5e-3)
        assert int(cells[4]) == row.constant_size
        assert float(cells[5]) == pytest.approx(row.threshold, rel=1e-3)


def test_a_second_table_states_what_else_was_measured(outcome, page):
    _, rows, *_ = page.tables
    assert not any(
        cells[0][:1] == ["score_function"] for cells in page.tables
    )  # minmax was asked for
    assert rows[0][0] == "risk"
    assert rows[0][-1] == "answered"
    for cells, row in zip(rows[1:], outcome.evaluation.others, strict=True):
        assert cells[:2] == [row.guarantee, f"{row.alpha:g}"]
        if row.threshold is None:
            assert cells[2:5] == ["no", "", ""]
            assert cells[6] == ""
            continue
        assert cells[2] == "yes"
        assert float(cells[3]) == pytest.approx(row.test_risk, abs=5e-5)
        assert float(cells[4]) == pytest.approx(row.mean_size, abs=5e-3)
        assert float(cells[6]) == pytest.approx(row.answered, abs=5e-4)
        if row.constant_size is None:
            assert cells[5] == ""
        else:
            assert float(cells[5]) == pytest.approx(row.constant_size, rel=1e-3)


def test_a_third_table_states_what_the_score_function_was_chosen_by(chosen):
    page = Page(chosen.report.read_text(encoding="utf-8"))
    _, _, rows, *_ = page.tables
    comparison = chosen.evaluation.comparison
    assert rows[0] == ["score function", *(f"alpha {alpha:g}" for alpha in comparison["constant"])]
    assert len(rows[0]) == 3
    names = ["constant", "minmax", "quantile", "learned", "reranked"]
    assert [name for name, *_ in rows[1:]] == names
    for name, *sizes in rows[1:]:
        expected = list(comparison[name].values())
        np.testing.assert_allclose([float(size) for size in sizes], expected, atol=5e-3)
    score_function = chosen.evaluation.rows[0].score_function
    assert f"; {score_function} was chosen before" in " ".join(chosen.report.read_text().split())


def test_a_table_states_whom_it_serves_less(outcome, page, text):
    _, _, rows, *_ = page.tables
    parts = outcome.evaluation.parts
    columns = ["queries", "missed", "risk", "95% interval", "mean size"]
    assert rows[0] == ["queries by", "", *columns]
    kinds = [cells[0] for cells in rows[1:]]
    assert [kind for kind in kinds if kind] == ["uncertainty", "class", "group"]
    assert [kinds.index(kind) for kind in ("uncertainty", "class", "group")] == [0, 10, 20]
    for cells, part in zip(rows[1:], parts, strict=True):
        assert cells[1:4] == [part.name, str(part.n), str(part.missed)]
        assert float(cells[4]) == pytest.approx(part.missed / part.n, abs=5e-4)
        low, high = (float(end) for end in cells[5].split(" to "))
        assert (low, high) == pytest.approx((part.low, part.high), abs=5e-4)
        assert float(cells[6]) == pytest.approx(part.mean_size, abs=5e-3)
    _, section = text.split("<h2>Whom it serves less</h2>")
    section, _ = section.split("<h2>Risk and size</h2>")
    red = sum(part.low > 0.2 for part in parts)
    assert section.count('<td class="no">') == red > 0
    words = " ".join(section.split())
    assert "At alpha = 0.2, of the test queries, by tenths of uncertainty (1: the most" in words
    assert "by class (those missed most), by group:" in words
    assert "Red: more than alpha, beyond the noise of these queries" in words


def test_a_table_summarises_the_divisions(outcome, page, text):
    _, _, _, rows, _, _ = page.tables
    summary = outcome.evaluation.repeats.summary((0.001, 0.2, 0.3))
    expected = [(name, *item) for name, levels in summary.items() for item in levels.items()]
    assert rows[0][:5] == ["sizes", "alpha", "certified", "risk", "risk above alpha"]
    assert len(expected) == 12
    for cells, (name, alpha, row) in zip(rows[1:], expected, strict=True):
        assert cells[:3] == [name, alpha, f"{100 * row['certified']:.0f}%"]
        if row["risk"] is None:
            assert cells[3:] == [""] * 5
            continue
        risk, size = (
            [float(number) for number in cells[place].split(" \N{PLUS-MINUS SIGN} ")]
            for place in (3, 5)
        )
        assert risk == pytest.approx([row["risk"], row["risk_std"]], abs=5e-5)
        assert cells[4] == f"{100 * row['violations']:.0f}%"
        assert size == pytest.approx([row["mean"], row["mean_std"]], abs=5e-3)
        sizes = [float(cell) for cell in cells[6:]]
        assert sizes == pytest.approx([row["median"], row["high"]], abs=0.051)
    assert "divided anew 20 times" in " ".join(text.split())


def test_a_table_has_every_number_once(outcome, page):
    """Expected calibration errors have a table of their own."""
    *_, rows, errors = page.tables
    numbers = dict(outcome.evaluation.quality.numbers)
    shown = {title: float(value) for title, value in rows}
    assert len(shown) == sum(not name.startswith("ece_") for name in numbers)
    for title, name in {
        "R@5": "recall_at_5",
        "mAP@10": "map_at_10",
        "MAP@R": "map_at_r",
        "AUSC of an oracle": "ausc_oracle",
        "AUROC of an occluded query": "auroc_occlusion",
        "average precision of telling pairs": "verification_ap",
        "mean average precision, whole ranking (micro)": "map",
    }.items():
        assert shown[title] == pytest.approx(numbers[name], abs=5e-4)
    assert sorted(shown.values()) == pytest.approx(
        sorted(value for name, value in numbers.items() if not name.startswith("ece_")), abs=5e-4
    )
    assert errors[0] == ["bins and confidence", "@1", "@5", "@10"]
    (*of_ks, votes) = errors[1:]
    assert votes[0] == "lam"
    assert float(votes[1]) == pytest.approx(numbers["ece_lam_at_1"], abs=5e-4)
    flavours = ("btl_width", "btl_percentile", "rcir")
    assert [cells[0] for cells in of_ks] == ["btl, width", "btl, percentile", "rcir"]
    for cells, flavour in zip(of_ks, flavours, strict=True):
        expected = [numbers[f"ece_{flavour}_at_{k}"] for k in (1, 5, 10)]
        assert [float(cell) for cell in cells[1:]] == pytest.approx(expected, abs=5e-4)


def test_the_sections_stand_in_this_order(text, chosen):
    sections = [
        "Other guarantees",
        "Whom it serves less",
        "Risk and size",
        "Retrieval and uncertainty",
        "The most certain queries",
        "The least certain queries",
    ]
    assert re.findall("<h2>(.*?)</h2>", text) == sections
    compared = re.findall("<h2>(.*?)</h2>", chosen.report.read_text(encoding="utf-8"))
    assert compared == [sections[0], "Choice of the score function", *sections[1:]]
    assert "Every test query has a match in the gallery." in text


def test_the_page_says_how_much_data_stand_behind_it(text):
    words = " ".join(text.split())
    assert "probability at least 0.95 over the 300 calibration queries" in words
    assert "Measured on 300 test queries" in words


def test_the_screen_says_no_where_nothing_is_certified(outcome, capsys):
    print_table(outcome.evaluation)
    lines = capsys.readouterr().out.splitlines()
    refused, *others = (line for line in lines if "0.001" in line)
    assert re.sub(r"[^\w.-]+", " ", refused).split() == ["0.001", "no", "-", "-", "-", "-"]
    assert len(others) == 8
    for line in others:
        words = re.sub(r"[^\w.,-]+", " ", line).split()
        assert words[words.index("0.001") :] == ["0.001", "-", "-", "-", "-"]
    certified = [line for line in lines if " yes " in line]
    assert len(certified) == 2
    for line, row in zip(certified, outcome.evaluation.rows[1:], strict=True):
        assert f"{row.test_risk:.4f}" in line
        assert f"{row.mean_size:.2f}" in line


def test_the_screen_lists_every_other_statement(outcome, capsys, monkeypatch):
    monkeypatch.setattr(console, "width", 120)
    print_table(outcome.evaluation)
    lines = capsys.readouterr().out.splitlines()
    for row in outcome.evaluation.others:
        if row.threshold is not None:
            words = f"{row.guarantee} {row.alpha:g} "
            (line,) = (line for line in lines if words in re.sub(r"[^\w.,-]+", " ", line))
            assert f"{row.test_risk:.4f}" in line
            assert f"{row.mean_size:.2f}" in line
            assert f"{row.answered:.3f}" in line
    assert not any("was chosen" in line for line in lines)


def test_the_screen_says_by_what_the_score_function_was_chosen(chosen, capsys):
    print_table(chosen.evaluation)
    shown = re.sub(r"[^\w.,-]+", " ", capsys.readouterr().out)
    assert "score function alpha 0.2 alpha 0.3 " in shown
    assert f"by which {chosen.evaluation.rows[0].score_function} was chosen" in shown
    for name, sizes in chosen.evaluation.comparison.items():
        assert f"{name} {' '.join(f'{size:.2f}' for size in sizes.values())} " in shown
