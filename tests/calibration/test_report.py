"""The report, one page that works without a network, and the tables on the screen."""

import base64
import html
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from calibration import RiskResult, report, screen, sentences
from rcir.terminal import console

SVG = "{http://www.w3.org/2000/svg}"
ALPHAS = (0.001, 0.2, 0.3)


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


def test_every_figure_is_drawn_and_the_extreme_queries_are_named(outcome, pictures):
    assert len(pictures) == 9
    drawn = [drawing(source) for source in pictures.values()]
    assert all(len(list(svg.iter(f"{SVG}path"))) > 5 for svg in drawn)
    shown = {e.text.strip() for svg in drawn for e in svg.iter() if e.tag is ElementTree.Comment}
    uncertainty = outcome.splits.test.results.uncertainty
    for end in (uncertainty.min(), uncertainty.max()):
        assert any(each.startswith(f"u = {end:.4f}") for each in shown)
    assert len(list(drawn[-1].iter(f"{SVG}image"))) >= 8, "pictures are in the sets"


def test_items_of_labels_without_candidates_are_drawn(chosen, monkeypatch):
    """Such labels have the position -1; the nearest candidate of each label is its nearest item."""
    drawn = []
    monkeypatch.setattr(
        "calibration.report.figures.draw_query_sets", lambda *row: drawn.append(row)
    )
    splits, arranged = replace(chosen.splits), chosen.splits.arranged_test
    for positions in (arranged.results.positions, np.full_like(arranged.results.positions, -1)):
        results = replace(arranged.results, positions=positions)
        splits.__dict__["arranged_test"] = replace(arranged, results=results)
        report._draw_queries(chosen.evaluation, splits)
    for (known, _), (found, _) in zip(drawn[:2], drawn[2:], strict=True):
        for before, after in zip(known, found, strict=True):
            np.testing.assert_array_equal(after.images, before.images)
            assert len(after.images) == min(8, len(after.matches)) > 0


def assert_cells(cells, values, **tolerances):
    """Empty cells stand for None; numbers are rounded."""
    for cell, value in zip(cells, values, strict=True):
        if isinstance(value, str) or value is None:
            assert cell == (value or "")
        else:
            assert float(cell.removesuffix("%")) == pytest.approx(value, **tolerances)


def assert_measured(cells, row):
    """Compare cells with a row: certified, risk, interval, mean size, one size, logistic."""
    certified = "no" if row.threshold is None else "yes"
    assert_cells(cells[:2], [certified, row.test_risk], abs=6e-5)
    interval = cells[2].split(" to ") if cells[2] else ["", ""]
    assert_cells(interval, [row.risk_low, row.risk_high], abs=6e-5)
    sizes = row.mean_size, row.constant_size, row.logistic_size
    assert_cells(cells[3:], sizes, abs=6e-3, rel=1e-3)


def test_the_first_tables_state_what_was_measured(outcome, tables):
    rows, others, *_ = tables
    for cells, row in zip(rows[1:], outcome.evaluation.rows, strict=True):
        assert_cells(cells[:1], [row.alpha])
        assert_measured(cells[1:7], row)
        assert_cells(cells[7:], [row.threshold], rel=1e-3)
        assert (row.logistic_size is None) == (row.threshold is None)
    for cells, row in zip(others[1:], outcome.evaluation.others, strict=True):
        assert_cells(cells[:2], [row.guarantee, row.alpha])
        assert_measured(cells[2:8], row)
        assert_cells(cells[8:], [row.answered], abs=6e-4)


def test_a_table_states_the_sizes_by_each_uncertainty(chosen):
    _, uncertainties, *_ = tables_of(chosen.report.read_text(encoding="utf-8"))
    for cells, sizes in zip(
        uncertainties[1:], chosen.evaluation.uncertainties.values(), strict=True
    ):
        assert_cells(cells[1:], sizes.values(), abs=6e-3)


def test_a_table_states_which_subgroups_are_missed_more_often(outcome, tables, text):
    _, _, rows, *_ = tables
    parts = outcome.evaluation.parts
    for cells, part in zip(rows[1:], parts, strict=True):
        assert cells[1] == part.name
        low, high = cells[5].split(" to ")
        numbers = [*cells[2:5], low, high, cells[6]]
        values = [part.n, part.missed, part.missed / part.n, part.low, part.high, part.mean_size]
        assert_cells(numbers, values, abs=6e-4, rel=1e-3)
    section = text.partition("<h2>Which queries are missed more often</h2>")[2].partition("<h2>")[0]
    assert section.count('<td class="no">') == sum(part.low > 0.2 for part in parts) > 0


def test_a_table_has_every_number_once(outcome, tables):
    numbers = dict(outcome.evaluation.quality.numbers)
    shown = {title: float(value) for title, value in tables[-1]}
    for title, name in {
        "R@5": "recall_at_5",
        "MAP@R": "map_at_r",
        "AUSC of an oracle": "ausc_oracle",
        "AUROC of an occluded query": "auroc_occlusion",
    }.items():
        assert shown[title] == pytest.approx(numbers[name], abs=5e-4)
    assert sorted(shown.values()) == pytest.approx(sorted(numbers.values()), abs=5e-4)


def test_the_screen_shows_the_same_numbers(outcome, capsys, monkeypatch):
    monkeypatch.setattr(console, "width", 120)
    screen.print_evaluation(outcome.evaluation)
    shown = capsys.readouterr().out
    lines = [re.sub(r"[^\w.,-]+", " ", line) for line in shown.splitlines()]
    assert any(line.split() == ["0.001", "no", "-", "-", "-", "-", "-"] for line in lines)
    for row in outcome.evaluation.certified:
        (line,) = (line for line in lines if f" {row.alpha:g} yes" in line)
        interval = f"{row.risk_low:.4f} to {row.risk_high:.4f}"
        sizes = f"{row.mean_size:.2f} {row.constant_size:g} {row.logistic_size:.2f}"
        assert f"{row.test_risk:.4f} {interval} {sizes}" in line


def result(alpha=0.2, risk=0.15, low=0.1, high=0.2, size=1.5, **changed):
    values = {"threshold": 2.0, "mean_size": size, "constant_size": 3.0, "answered": 1.0}
    row = RiskResult("miss", alpha, 0.1, "learned", "binomial", test_risk=risk)
    return replace(row, risk_low=low, risk_high=high, **values | changed)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (result(), []),
        (result(risk=0.21, low=0.19, high=0.23), ["0.2100", "within the noise of the 300"]),
        (result(risk=0.3, low=0.25, high=0.35), ["0.3000", "by more than the noise", "0.1"]),
        (result(size=1), ["smallest size"]),
        (result(threshold=None, risk=None, refusal="22 queries are needed"), ["22 queries"]),
    ],
)
def test_surprising_results_are_explained_in_words(outcome, row, words):
    rows = [result(alpha=0.4), row]
    evaluation = replace(outcome.evaluation, rows=rows, beyond_depth=0, labels=None)
    explained = " ".join(sentences.remarks(evaluation))
    assert all(word in explained for word in words)
    assert bool(explained) == bool(words)


def test_the_promise_its_cost_and_what_sizes_the_sets_are_stated_in_numbers(outcome):
    sizes = {"encoder": {0.1: 4.0, 0.3: 2.0}, "vote": {0.1: 3.0, 0.3: 1.5}}
    evaluation = replace(
        outcome.evaluation,
        delta=0.1,
        rows=[result(alpha=0.1, risk=0.09, low=0.06, high=0.13)],
        comparison={"learned": {0.1: 2.5}},
        uncertainties=sizes,
        uncertainty="vote",
    )
    assert "at least 90 of 100" in sentences.promise(evaluation)
    assert "at most 10%" in sentences.promise(evaluation)
    stated = sentences.cost(evaluation)
    assert all(number in stated for number in ("1.50", " 3.", "9.0%", "6.0%", "13.0%"))
    source = sentences.size_source(evaluation)
    assert all(number in source for number in ("2.50", "3.00", "4.00"))


def test_the_probabilities_are_measured_on_the_answers_to_test_queries(outcome):
    splits, evaluation = outcome.splits, outcome.evaluation
    alpha = evaluation.headline.alpha
    queries = splits.test.results.queries
    answers = splits.retriever.retrieve(queries, alpha, evaluation.delta)
    probabilities = np.concatenate([answer.probabilities for answer in answers])
    labels = splits.retriever.searcher.label_names or {}
    true = [labels.get(int(label), label) for label in splits.test.population.labels]
    matches = np.concatenate(
        [np.array(answer.labels) == label for answer, label in zip(answers, true, strict=True)]
    )
    sets = np.array([answer.match_probability for answer in answers])
    hits = np.array([label in one.labels for one, label in zip(answers, true, strict=True)])
    diagrams, numbers = evaluation.quality.probabilities, evaluation.quality.numbers
    for name, values, outcomes in (("item", probabilities, matches), ("set", sets, hits)):
        diagram = diagrams[name]
        assert diagram.count.sum() == len(values)
        np.testing.assert_allclose(diagram.confidence @ diagram.count, values.sum(), rtol=1e-3)
        np.testing.assert_allclose(diagram.accuracy @ diagram.count, outcomes.sum())
        assert numbers[f"ece_{name}"] == diagram.error
