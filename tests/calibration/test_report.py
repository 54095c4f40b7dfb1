"""The report, one page that works without a network, and the tables on the screen."""

import base64
import html
import re
from xml.etree import ElementTree

import pytest

from calibration import print_table
from calibration.table import console

SVG = "{http://www.w3.org/2000/svg}"
ALPHAS = (0.001, 0.2, 0.3)
# Each figure in the order of the page, and a text that no other figure has.
FIGURES = {
    "risk over divisions against alpha": "Risk over 20 random splits",
    "mean set size over divisions against alpha": "What the guarantee costs",
    "distribution of set sizes": "Set sizes",
    "risk and size against delta": "Size at alpha",
    "reliability diagram": "Reliability",
    "calibration curves": "Calibration",
    "sparsification curves": "Without the most uncertain queries",
    "gallery cleaning": "Without the most uncertain gallery images",
    "two-dimensional projection of the test queries": "By class",
    "most certain queries with their sets": "u = {least:.4f}",
    "least certain queries with their sets": "u = {most:.4f}",
}


def tables_of(text):
    """The cells of each row of each table of a page."""
    tables = re.findall("<table>(.*?)</table>", text, re.DOTALL)
    rows = [re.findall("<tr>(.*?)</tr>", table, re.DOTALL) for table in tables]
    cells = re.compile("<t[dh][^>]*>(.*?)</t[dh]>", re.DOTALL)
    return [[[html.unescape(cell) for cell in cells.findall(row)] for row in each] for each in rows]


@pytest.fixture(scope="module")
def text(outcome):
    return outcome.report.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pictures(text):
    """Sources by alternative text."""
    return {alt: source for source, alt in re.findall('<img src="(.*?)" alt="(.*?)">', text)}


@pytest.fixture(scope="module")
def tables(text):
    return tables_of(text)


def drawing(source):
    """The SVG of a picture, with its texts in comments: letters are paths."""
    prefix, _, encoded = source.partition(",")
    assert prefix == "data:image/svg+xml;base64"
    builder = ElementTree.TreeBuilder(insert_comments=True)
    parser = ElementTree.XMLParser(target=builder)
    return ElementTree.fromstring(base64.b64decode(encoded, validate=True), parser)


def test_nothing_is_fetched_from_anywhere(text, pictures):
    assert not re.search(r"https?://|@import|url\(|<(script|link|iframe|object|embed)", text)
    assert len(re.findall(r"\b(?:src|href)\s*=", text)) == len(pictures)
    for source in pictures.values():
        for element in drawing(source).iter():
            for name, value in element.attrib.items():
                if name.endswith("href"):
                    assert value.startswith(("#", "data:"))


def test_every_figure_stands_in_its_place(outcome, pictures):
    assert list(pictures) == list(FIGURES), "each once, in the order of the page"
    ends = {"least": outcome.test.uncertainty.min(), "most": outcome.test.uncertainty.max()}
    for source, words in zip(pictures.values(), FIGURES.values(), strict=True):
        svg = drawing(source)
        assert len(list(svg.iter(f"{SVG}path"))) > 5
        comments = [each.text.strip() for each in svg.iter() if each.tag is ElementTree.Comment]
        assert any(each.startswith(words.format(**ends)) for each in comments), words
    assert len(list(svg.iter(f"{SVG}image"))) >= 8, "pictures are in the sets"


def assert_cells(cells, values, **tolerances):
    """Empty cells stand for None; numbers are rounded."""
    for cell, value in zip(cells, values, strict=True):
        if isinstance(value, str) or value is None:
            assert cell == (value or "")
        else:
            assert float(cell.removesuffix("%")) == pytest.approx(value, **tolerances)


def test_the_first_tables_state_what_was_measured(outcome, tables):
    rows, others, *_ = tables
    for cells, row in zip(rows[1:], outcome.evaluation.rows, strict=True):
        certified = "no" if row.threshold is None else "yes"
        values = [row.alpha, certified, row.test_risk, row.mean_size, row.constant_size]
        assert_cells(cells, [*values, row.threshold], abs=6e-3, rel=1e-3)
    for cells, row in zip(others[1:], outcome.evaluation.others, strict=True):
        certified = "no" if row.threshold is None else "yes"
        values = [row.guarantee, row.alpha, certified, row.test_risk, row.mean_size]
        assert_cells(cells, [*values, row.constant_size, row.answered], abs=6e-3, rel=1e-3)


def test_a_table_states_how_the_score_function_was_chosen(chosen):
    text = chosen.report.read_text(encoding="utf-8")
    _, _, rows, *_ = tables_of(text)
    comparison = chosen.evaluation.comparison
    assert len(rows) == 1 + len(comparison) == 6
    for cells, (name, sizes) in zip(rows[1:], comparison.items(), strict=True):
        assert_cells(cells, [name, *sizes.values()], abs=5e-3)
    score_function = chosen.evaluation.rows[0].score_function
    assert f"; {score_function} was chosen before" in " ".join(text.split())


def test_a_table_states_which_subgroups_are_missed_more_often(outcome, tables, text):
    _, _, rows, *_ = tables
    parts = outcome.evaluation.parts
    for cells, part in zip(rows[1:], parts, strict=True):
        assert cells[1] == part.name
        low, high = cells[5].split(" to ")
        numbers = [*cells[2:5], low, high, cells[6]]
        values = [part.n, part.missed, part.missed / part.n, part.low, part.high, part.mean_size]
        assert_cells(numbers, values, abs=6e-4, rel=1e-3)
    section = text.partition("<h2>Whom it serves less</h2>")[2].partition("<h2>")[0]
    assert section.count('<td class="no">') == sum(part.low > 0.2 for part in parts) > 0


def test_a_table_summarises_the_divisions(outcome, tables):
    _, _, _, rows, _, _ = tables
    summary = outcome.evaluation.repeats.summary(ALPHAS)
    expected = [(name, *item) for name, levels in summary.items() for item in levels.items()]
    for cells, (name, alpha, row) in zip(rows[1:], expected, strict=True):
        assert_cells(cells[:3], [name, alpha, 100 * row["certified"]])
        if row["risk"] is None:
            assert cells[3:] == [""] * 5
            continue
        risk, size = (cells[place].split(" \N{PLUS-MINUS SIGN} ") for place in (3, 5))
        assert_cells(risk, [row["risk"], row["risk_std"]], abs=5e-5)
        assert_cells(cells[4:5], [100 * row["violations"]])
        assert_cells(size, [row["mean"], row["mean_std"]], abs=5e-3)
        assert_cells(cells[6:], [row["median"], row["high"]], abs=0.051)


def test_a_table_has_every_number_once(outcome, tables):
    """Expected calibration errors have a table of their own."""
    *_, rows, errors = tables
    numbers = dict(outcome.evaluation.quality.numbers)
    shown = {title: float(value) for title, value in rows}
    for title, name in {
        "R@5": "recall_at_5",
        "MAP@R": "map_at_r",
        "AUSC of an oracle": "ausc_oracle",
        "AUROC of an occluded query": "auroc_occlusion",
    }.items():
        assert shown[title] == pytest.approx(numbers[name], abs=5e-4)
    assert sorted(shown.values()) == pytest.approx(
        sorted(value for name, value in numbers.items() if not name.startswith("ece_")), abs=5e-4
    )
    *of_ks, votes = errors[1:]
    assert float(votes[1]) == pytest.approx(numbers["ece_lam_at_1"], abs=5e-4)
    for cells, flavour in zip(of_ks, ("btl_width", "btl_percentile", "rcir"), strict=True):
        expected = [numbers[f"ece_{flavour}_at_{k}"] for k in (1, 5, 10)]
        assert_cells(cells[1:], expected, abs=5e-4)


def test_the_screen_shows_the_same_numbers(outcome, chosen, capsys, monkeypatch):
    monkeypatch.setattr(console, "width", 120)
    print_table(outcome.evaluation)
    lines = [re.sub(r"[^\w.,-]+", " ", line) for line in capsys.readouterr().out.splitlines()]
    assert any(line.split() == ["0.001", "no", "-", "-", "-", "-"] for line in lines)
    for row in (*outcome.evaluation.certified, *outcome.evaluation.others):
        words = (
            f" {row.alpha:g} yes" if row.guarantee == "miss" else f"{row.guarantee} {row.alpha:g} "
        )
        (line,) = (line for line in lines if words in line)
        if row.threshold is not None:
            assert f"{row.test_risk:.4f} {row.mean_size:.2f} " in line
    assert not any("was chosen" in line for line in lines)

    print_table(chosen.evaluation)
    shown = re.sub(r"[^\w.,-]+", " ", capsys.readouterr().out)
    assert f"by which {chosen.evaluation.rows[0].score_function} was chosen" in shown
    for name, sizes in chosen.evaluation.comparison.items():
        assert f"{name} {' '.join(f'{size:.2f}' for size in sizes.values())} " in shown
