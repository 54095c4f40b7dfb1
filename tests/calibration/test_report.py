"""The report, one page that works without a network, and the tables on the screen."""

import base64
import html
import io
import re
import shutil
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import rcir
from calibration import (
    CertificationConfig,
    RiskResult,
    certify,
    examples,
    report,
    screen,
    sentences,
)
from rcir.terminal import console

SVG = "{http://www.w3.org/2000/svg}"
CHROMIUM = shutil.which("chromium")


def tables_of(text):
    """The cells of each row of each table in the details of a page, by its name."""
    tables = re.findall('aria-label="([^"]*)"><table>(.*?)</table>', text, re.DOTALL)
    cells = re.compile("<t[dh][^>]*>(.*?)</t[dh]>", re.DOTALL)
    return {
        name: [
            [html.unescape(re.sub("<wbr>", "", cell)) for cell in cells.findall(row)]
            for row in re.findall("<tr>(.*?)</tr>", table, re.DOTALL)
        ]
        for name, table in tables
    }


@pytest.fixture(scope="module")
def text(outcome):
    return outcome.report.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def drawings(text):
    """The sources of figures."""
    return re.findall('<img src="(data:image/svg[^"]*)" alt="[^"]+">', text)


@pytest.fixture(scope="module")
def tables(text):
    return tables_of(text)


def content(source):
    """The bytes of a picture in the page."""
    kind, _, encoded = source.partition(";base64,")
    assert kind in ("data:image/svg+xml", "data:image/jpeg")
    return base64.b64decode(encoded, validate=True)


def test_nothing_is_fetched_from_anywhere(text, drawings):
    assert not re.search(r"https?://|@import|url\(|<(script|link|iframe|object|embed)", text)
    assert all(
        place.startswith(("#", "data:")) for place in re.findall('(?:src|href)="(.*?)"', text)
    )
    for source in drawings:
        for element in ElementTree.fromstring(content(source)).iter():
            for name, value in element.attrib.items():
                if name.endswith("href"):
                    assert value.startswith(("#", "data:"))


def test_every_figure_is_drawn(drawings):
    assert len(drawings) == 5
    for source in drawings:
        assert len(list(ElementTree.fromstring(content(source)).iter(f"{SVG}path"))) > 5


def gathered(outcome, **changes):
    """What the page shows of single queries, after changes of the splits."""
    evaluation, calibration = outcome.evaluation, outcome.retriever.calibration
    request = rcir.risk.make_request(evaluation.headline.alpha, evaluation.delta)
    splits = replace(outcome.splits, **changes)
    labels = [part.name for part in evaluation.parts if part.kind == "class"]
    return examples.gather(splits, calibration.guarantee(request), labels)


def test_rows_are_answers_to_queries_that_a_rule_chooses(outcome):
    images, evaluation = outcome.splits.data.test, outcome.evaluation
    alpha, uncertainty = evaluation.headline.alpha, outcome.splits.test.results.uncertainty
    answers = outcome.retriever.retrieve(list(images.images), alpha, evaluation.delta)
    found = [label in one.labels for label, one in zip(images.labels, answers, strict=True)]
    order = sorted(range(300), key=lambda row: (answers[row].size, uncertainty[row]))
    shown = gathered(outcome)
    ids = {example.kind: example.id for example in shown.rows}
    for kind, place in {"easy": 0.05, "typical": 0.5, "hard": 0.95, "missed": 0.5}.items():
        group = [row for row in order if found[row] == (kind != "missed")]
        chosen = group[round(place * (len(group) - 1))]
        assert ids[kind] == images.ids[chosen]
        order.remove(chosen)
    for example in (*shown.rows, *shown.missed):
        row = images.ids.index(example.id)
        answer, size = answers[row], len(example.items)
        assert (example.is_found, example.size) == (found[row], answer.size)
        assert [item.id for item in example.items] == list(answer.ids[:size])
        likely = [item.probability for item in example.items]
        np.testing.assert_allclose(likely, answer.probabilities[:size])
        matches = [item.name == example.name for item in example.items]
        assert [item.is_match for item in example.items] == matches
        assert size == min(answer.size, 12 if example in shown.rows else 3)
        if example.match is not None:
            assert example.match.name == example.name
            assert example.match.place > example.size
    assert shown.n_missed == found.count(False) == len(shown.missed)


def test_pictures_are_those_of_queries_and_items(outcome):
    data, (easy, *_) = outcome.splits.data, gathered(outcome).rows
    pairs = [(data.test, easy), *((data.gallery, item) for item in easy.items)]
    for images, shown in pairs:
        picture = Image.open(io.BytesIO(content(shown.picture.source)))
        expected = images.images[images.ids.index(shown.id)]
        assert (picture.width, picture.height) == (shown.picture.width, shown.picture.height)
        errors = np.asarray(picture.convert("L"), float) - np.asarray(expected, float)
        assert np.abs(errors).mean() < 12, "JPEG loses some"


def test_items_of_labels_without_candidates_are_shown(chosen):
    """Such labels have the position -1; the nearest candidate of each label is its nearest item."""
    splits, arranged = replace(chosen.splits), chosen.splits.arranged_test
    known = gathered(chosen).rows
    results = replace(arranged.results, positions=np.full_like(arranged.results.positions, -1))
    splits.__dict__["arranged_test"] = replace(arranged, results=results)
    assert gathered(replace(chosen, splits=splits)).rows == known


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A calibration of vectors of noisy pictures, of which some are damaged and some missing."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("photographs")
    labels = rng.integers(40, size=500)
    vectors = rng.standard_normal((40, 8))[labels] + 2 * rng.standard_normal((500, 8))
    ids = np.array([f"a/{row}.png" for row in range(500)])
    np.savez(folder / "gallery.npz", vector=vectors.astype(np.float32), label=labels, id=ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calibration.pipeline.draw_figures", lambda *_: {})
        gallery, output = folder / "gallery.npz", folder / "out"
        outcome = certify(CertificationConfig(gallery=str(gallery), output=str(output)))
    (folder / "a").mkdir()
    for row in range(2, 500):
        pixels = rng.integers(256, size=(400, 500, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / ids[row], compress_level=0)
    (folder / ids[1]).write_bytes((folder / ids[2]).read_bytes()[:5000])
    outcome.retriever.origin["pictures"] = str(folder)
    return outcome


def test_the_page_is_small_whatever_the_pictures_which_may_be_missing(photographs):
    splits = photographs.splits
    pictures = examples.Pictures(splits)
    assert pictures.of_item(0) is pictures.of_item(1) is None
    assert (pictures.of_item(2).width, pictures.of_item(2).height) == (320, 256)
    row = splits.images.ids.index(next(name for name in splits.images.ids if name[2:] > "2"))
    assert pictures.of_query(row) is not None
    page = report.render(photographs.evaluation, splits, {})
    assert 1_500_000 < len(page.encode()) < 2_100_000, "there is no room for all pictures"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_and_prints_its_details(photographs, tmp_path, scheme):
    playwright = pytest.importorskip("playwright.sync_api")
    file = tmp_path / "report.html"
    file.write_text(report.render(photographs.evaluation, photographs.splits, {}))
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
        problems, requests = [], []
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: requests.append(request.url.partition(":")[0]))
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        table = page.get_by_role("region", name="numbers for each alpha")
        assert not table.is_visible()
        page.emulate_media(media="print")
        assert table.is_visible()
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 300) == (scheme == "dark")
        browser.close()
    assert problems == []
    assert set(requests) <= {"file", "data"}


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


def test_tables_state_what_was_measured(outcome, tables):
    rows, others = tables["numbers for each alpha"], tables["other guarantees"]
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
    tables = tables_of(chosen.report.read_text(encoding="utf-8"))
    for cells, sizes in zip(
        tables["sizes by uncertainty"][1:], chosen.evaluation.uncertainties.values(), strict=True
    ):
        assert_cells(cells[1:], sizes.values(), abs=6e-3)


def test_a_table_states_which_subgroups_are_missed_more_often(outcome, tables, text):
    rows, parts = tables["parts of the test queries"], outcome.evaluation.parts
    for cells, part in zip(rows[1:], parts, strict=True):
        assert cells[1] == part.name
        low, high = cells[5].split(" to ")
        numbers = [*cells[2:5], low, high, cells[6]]
        values = [part.n, part.missed, part.missed / part.n, part.low, part.high, part.mean_size]
        assert_cells(numbers, values, abs=6e-4, rel=1e-3)
    section = text.partition('aria-label="parts of the test queries"')[2].partition("</table>")[0]
    assert section.count('<td class="no">') == sum(part.low > 0.2 for part in parts) > 0


def test_a_table_has_every_number_once(outcome, tables):
    numbers = dict(outcome.evaluation.quality.numbers)
    rows = tables["quality of rankings and uncertainties"]
    shown = {title: float(value) for title, value in rows}
    for title, name in {
        "R@5": "recall_at_5",
        "MAP@R": "map_at_r",
        "AUSC of an oracle": "ausc_oracle",
        "AUROC of an occluded query": "auroc_occlusion",
    }.items():
        assert shown[title] == pytest.approx(numbers[name], abs=5e-4)
    assert sorted(shown.values()) == pytest.approx(sorted(numbers.values()), abs=5e-4)


def test_the_first_screen_states_the_headline(outcome, text):
    row = outcome.evaluation.headline
    first = html.unescape(text.partition('<section aria-labelledby="queries">')[0])
    missed = round(row.test_risk * outcome.evaluation.n_test)
    assert f"<b>at least {100 - 100 * row.alpha:g} of 100</b>" in first
    assert f"{missed} of {outcome.evaluation.n_test}; 95% interval" in first
    for size in (row.mean_size, row.logistic_size, row.constant_size):
        assert f">{size:.2f}</dd>" in first
    assert first.count('class="lost"') == round(100 * row.test_risk)
    assert first.count('class="found"') + first.count('class="lost"') == 100


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
