"""A calibrated retriever measured again, and data whose images have not one label each."""

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from mlflow import MlflowClient
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score

import rcir
from calibration import CalibrationConfig, EvaluationConfig, calibrate, evaluate_retriever
from calibration.searching import images_outside
from rcir.cli import main
from rcir.data import DataConfig, ImageSet, load_splits
from rcir.data.division import Source
from rcir.data.registry import DATASETS, DataSet
from rcir.encoders import EncoderConfig
from rcir.errors import (
    CorruptRetriever,
    DataUnavailable,
    InvalidConfig,
    InvalidData,
    StaleCalibration,
)
from rcir.retrieval.storage import save
from training import train

LEVELS = ["--alphas", "0.001", "0.2", "0.3", "--delta", "0.05"]
NOISE = np.random.default_rng(0).integers(0, 256, (60, 8, 16), np.uint8)


class Noise(DataSet):
    """A data set of nothing but noise, published as 10 images to train with and 60 queries."""

    def read(self, root, **options):
        assert options == {}
        labels, ids = np.zeros(60, np.int64), [str(number) for number in range(60)]
        images = ImageSet(NOISE, labels, ids)
        return Source(images.subset(np.arange(10)), images, "queries")


@pytest.fixture(scope="module", autouse=True)
def _noise():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATASETS, "noise", Noise("noise", "", "", None, ""))
        yield


@pytest.fixture(scope="module")
def evaluated(outcome, tracking_uri, tmp_path_factory):
    """What `rcir evaluate` wrote and printed about the tiny run's retriever."""
    output = tmp_path_factory.mktemp("evaluated")
    screen = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(screen):
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        command = ["evaluate", "--retriever", str(outcome.folder), "--output", str(output)]
        assert main([*command, *LEVELS, "--ood", "noise"]) == 0
    return output, json.loads((output / "results.json").read_text()), screen.getvalue()


@pytest.fixture
def copy(outcome, tmp_path):
    """The retriever, in a folder of its own."""
    return shutil.copytree(outcome.folder, tmp_path / "kept" / "retriever")


def changed(outcome, tmp_path, change):
    """The folder of the retriever after a change of what is loaded."""
    loaded = rcir.load(outcome.folder)
    change(loaded)
    return save(loaded, tmp_path / "changed")


def test_the_numbers_are_those_of_the_calibration(evaluated, outcome):
    results = dict(evaluated[1])
    expected = json.loads((outcome.folder.parent / "results.json").read_text())
    for each in (results, expected):
        assert each.pop("seconds") > 0
    quality = results.pop("quality")
    added = {"ood_auroc", "ood_auprc", "ood_auprc_trapezoid"}
    assert quality.keys() - expected["quality"].keys() == added
    assert expected.pop("quality") == {
        name: value for name, value in quality.items() if name not in added
    }
    assert results == expected


def test_other_data_are_told_by_their_uncertainty(evaluated, outcome):
    quality = evaluated[1]["quality"]
    inside = outcome.test.uncertainty
    outside = rcir.load(outcome.folder).search(NOISE).uncertainty
    positive = np.repeat([0, 1], [len(inside), 60])
    score = np.r_[inside, outside]
    assert quality["ood_auroc"] == pytest.approx(roc_auc_score(positive, score))
    assert quality["ood_auprc"] == pytest.approx(average_precision_score(positive, score))


def test_page_and_results_are_written_and_the_screen_says_where(evaluated, outcome):
    output, results, screen = evaluated
    assert {path.name for path in output.iterdir()} == {"report.html", "results.json"}
    page = (output / "report.html").read_text(encoding="utf-8")
    assert page.count('alt="uncertainty in and out of distribution"') == 1
    assert page.count("data:image/svg+xml;base64,") == 12
    said = " ".join(page.split())
    auroc = f"<td>{results['quality']['ood_auroc']:.3f}</td>"
    assert f'<td class="left">AUROC out of distribution</td>{auroc}' in said
    assert f"report: {output / 'report.html'}" in screen
    for row in outcome.evaluation.rows[1:]:
        assert f"{row.test_risk:.4f}" in screen
    assert f"AUROC out of distribution: {results['quality']['ood_auroc']:.3f}" in screen


def test_figures_and_numbers_are_in_a_run_of_their_own(evaluated, trained, tracking_uri):
    client = MlflowClient(tracking_uri)
    place = client.get_run(trained.mlflow_run).info.experiment_id
    wanted = f"tags.`rcir.folder` = '{evaluated[0].absolute()}'"
    (run,) = client.search_runs([place], wanted)
    assert run.data.tags["rcir.kind"] == "evaluation"
    assert run.data.tags["mlflow.parentRunId"] == trained.mlflow_run
    for name in ("ood_auroc", "ausc"):
        assert run.data.metrics[f"test/{name}"] == evaluated[1]["quality"][name]
    figures = {item.path for item in client.list_artifacts(run.info.run_id, "figures")}
    names = ("outside", "delta", "calibration", "sparsification", "cleaning", "projection")
    assert {f"figures/{name}.svg" for name in names} <= figures


@pytest.mark.usefixtures("undrawn")
def test_without_an_output_it_is_beside_the_retriever_and_the_levels_are_the_usual(copy, capsys):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert main(["evaluate", "--retriever", str(copy)]) == 0
    output = copy.parent / "evaluation"
    assert {path.name for path in output.iterdir()} == {"report.html", "results.json"}
    results = json.loads((output / "results.json").read_text())
    assert [(row["alpha"], row["delta"]) for row in results["rows"]] == [
        (0.05, 0.1),
        (0.1, 0.1),
        (0.2, 0.1),
    ]
    assert not any(name.startswith("ood") for name in results["quality"])
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    assert main(["evaluate", "--retriever", str(copy), "--alphas", "0.4"]) == 0
    results = json.loads((output / "results.json").read_text())
    assert [row["alpha"] for row in results["rows"]] == [0.4], "an earlier one is replaced"


@pytest.mark.usefixtures("undrawn")
def test_a_retriever_of_mlflow_needs_an_output(outcome, tmp_path):
    uri = f"runs:/{outcome.mlflow_run}/retriever"
    with pytest.raises(InvalidConfig, match="name an output"):
        evaluate_retriever(EvaluationConfig(uri))
    assert list(tmp_path.iterdir()) == []
    measured = evaluate_retriever(EvaluationConfig(uri, "here", (0.3,), 0.05))
    assert measured.report == Path("here/report.html")
    assert measured.report.is_file()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("origin", [{"run": "0" * 32}, {}], ids=str)
def test_a_retriever_whose_run_is_not_known_here_is_measured_all_the_same(
    outcome, tmp_path, origin
):
    known = {name: outcome.retriever.origin[name] for name in ("data", "queries")}
    folder = changed(outcome, tmp_path, lambda each: setattr(each, "origin", known | origin))
    measured = evaluate_retriever(EvaluationConfig(str(folder), alphas=(0.3,)))
    assert measured.report == tmp_path / "evaluation" / "report.html"
    assert measured.report.is_file()


def refused(folder, error, match, **options):
    """Nothing is written beside a retriever that is refused."""
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(error, match=match):
        evaluate_retriever(EvaluationConfig(str(folder), **options))
    assert sorted(folder.parent.rglob("*")) == before


@pytest.mark.parametrize("name", ["data", "queries"])
def test_a_retriever_that_does_not_say_where_it_comes_from_is_refused(outcome, tmp_path, name):
    folder = changed(outcome, tmp_path, lambda loaded: loaded.origin.pop(name))
    refused(folder, InvalidData, "does not say which queries")


def test_a_retriever_that_is_not_calibrated_is_refused(outcome, tmp_path):
    folder = changed(outcome, tmp_path, lambda loaded: loaded.controllers.clear())
    refused(folder, InvalidData, "was not made by")


def test_another_gallery_is_refused(outcome, tmp_path):
    folder = changed(outcome, tmp_path, lambda loaded: loaded.origin["data"].update(seed=7))
    refused(folder, InvalidData, "digits gives another gallery")


def test_a_calibration_that_is_stale_is_refused(outcome, tmp_path):
    """Its encoder has changed: nothing that is measured would be what was calibrated."""

    def blur(loaded):
        with torch.no_grad():
            next(loaded.encoder.parameters()).mul_(0.5)

    folder = changed(outcome, tmp_path, blur)
    with pytest.raises(StaleCalibration):
        rcir.load(folder).retrieve(outcome.splits.test.images[0], 0.3, 0.1)
    refused(folder, StaleCalibration, "has changed since calibration")


def test_a_changed_file_is_refused(copy):
    (copy / "gallery.json").write_text("[]")
    refused(copy, CorruptRetriever, "gallery.json was changed")


def test_its_own_data_set_is_not_out_of_distribution(copy):
    refused(copy, InvalidConfig, "ood is digits, the set that the retriever searches", ood="digits")
    refused(copy, InvalidConfig, "'birdsong' is unknown", ood="birdsong")


@pytest.mark.usefixtures("undrawn")
def test_of_a_data_set_that_is_drawn_the_test_queries_are_asked(copy, monkeypatch):
    """Such a set has no published halves."""
    monkeypatch.setitem(DATASETS, "more digits", DATASETS["digits"])
    config = EvaluationConfig(str(copy), alphas=(0.3,), ood="more digits")
    outside = evaluate_retriever(config).evaluation.quality.outside
    drawn = load_splits(DataConfig("more digits")).test
    np.testing.assert_array_equal(outside, rcir.load(copy).search(drawn.images).uncertainty)


def test_other_data_are_fetched_where_the_own_are(monkeypatch):
    asked = []

    def read(self, root, **options):
        asked.append(options)
        raise DataUnavailable("there is no network")

    monkeypatch.setattr(DataSet, "read", read)
    for name, downloads in (("far", True), ("near", False)):
        monkeypatch.setitem(DATASETS, name, DataSet(name, "", (), None, "", downloads=downloads))
        for fetch in (False, True):
            with pytest.raises(DataUnavailable, match="no network"):
                images_outside(DataConfig(download=fetch), name)
    assert asked == [{}, {"download": True}, {}, {}]


@pytest.mark.usefixtures("never_embedded")
@pytest.mark.parametrize("name", ["report.html", "results.json"])
def test_an_output_of_something_else_is_left_alone(copy, tmp_path, name):
    place = tmp_path / "thesis"
    place.mkdir()
    (place / name).write_text('["mine"]')
    refused(copy, InvalidData, f"holds {name} of something else", output=str(place))
    assert [(path.name, path.read_text()) for path in place.iterdir()] == [(name, '["mine"]')]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--alphas", "0"], "alpha is 0.0"),
        (["--delta", "1"], "delta is 1.0"),
        (["--retriever", "nowhere"], "nowhere holds no retriever"),
        (["--ood", "digits"], "ood is digits"),
    ],
    ids=str,
)
def test_what_is_refused_is_one_line_of_the_command(copy, capsys, options, said):
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "--retriever", str(copy), *options])
    assert stop.value.code == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_no_levels_are_no_evaluation():
    with pytest.raises(InvalidConfig, match="alphas is empty"):
        EvaluationConfig("retriever", alphas=())


@pytest.mark.usefixtures("undrawn")
def test_other_queries_are_refused(splits, tiny, tmp_path):
    """With one more row, the parts are drawn anew: a test query may have calibrated."""
    rows, parts = [], ["train"] * 3 + ["gallery"] * 2 + ["query"] * 3
    for row, (image, number) in enumerate(
        zip(splits.gallery.images, splits.gallery.labels, strict=True)
    ):
        Image.fromarray(image).save(tmp_path / f"{row}.png")
        rows.append((f"{row}.png", f"tens {number // 10}", parts[row % 8]))
    columns = ["path", "label", "split"]
    pd.DataFrame(rows[:-1], columns=columns).to_csv("table.csv", index=False)
    data = DataConfig("table", root=str(tmp_path), options={"path": "table.csv"})
    run = train(tiny("table", epochs=1, data=data, encoder=EncoderConfig(dim=4)))
    outcome = calibrate(CalibrationConfig(str(run.path), "out", depth=30, alphas=(0.5,)))
    config = EvaluationConfig(str(outcome.folder), alphas=(0.5,))
    assert evaluate_retriever(config).evaluation.rows == outcome.evaluation.rows

    rows[-1] = (*rows[-1][:2], "query")
    pd.DataFrame(rows, columns=columns).to_csv("table.csv", index=False)
    assert load_splits(data).gallery.ids == outcome.splits.gallery.ids
    moved = shutil.copytree(outcome.folder, tmp_path / "kept" / "retriever")
    refused(moved, InvalidData, "table gives other queries")


KINDS = {
    "labels": lambda one, other: one // 10 == other // 10 or one % 10 == other % 10,
    "places": lambda one, other: np.hypot(one // 10 - other // 10, one % 10 - other % 10) <= 1.5,
}


@pytest.fixture(scope="module", params=KINDS)
def table(request, splits, tiny, tracking_uri, tmp_path_factory):
    """A training on a table of 240 pictures, calibrated: kind, folder, outcome."""
    folder = tmp_path_factory.mktemp(request.param)
    chosen = np.random.default_rng(0).permutation(len(splits.gallery))[:240]
    numbers = splits.gallery.labels[chosen]
    columns = {"path": [f"{row}-{number}.png" for row, number in enumerate(numbers)]}
    for name, row in zip(columns["path"], chosen, strict=True):
        Image.fromarray(splits.gallery.images[row]).save(folder / name)
    columns["group"] = np.where(np.arange(240) % 2, "left", "right")
    if request.param == "labels":
        columns["labels"] = [f"tens {n // 10};units {n % 10}" for n in numbers]
    else:
        columns |= {"x": 10.0 * (numbers // 10), "y": 10.0 * (numbers % 10)}
    pd.DataFrame(columns).to_csv(folder / "table.csv", index=False)
    options = {"path": "table.csv", "radius": 15.0}
    data = DataConfig("table", root=str(folder), options=options)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        run = train(tiny(request.param, epochs=2, data=data, encoder=EncoderConfig(dim=4)))
        config = CalibrationConfig(
            str(run.path), "out", group="group", depth=30, alphas=(0.3, 0.5), ood="noise"
        )
        return request.param, folder, calibrate(config)


def number_of(name):
    return int(str(name).rsplit("-", 1)[1].removesuffix(".png"))


def test_images_without_one_label_are_retrieved_with_the_guarantee(table):
    """True matches counted by the numbers in the names of the files."""
    kind, folder, outcome = table
    test = outcome.splits.test
    row = outcome.evaluation.rows[1]
    loaded = rcir.load(folder / outcome.folder)
    answers = loaded.retrieve(list(test.images), 0.5, 0.1)
    missed = [
        not any(KINDS[kind](number_of(query), number_of(found)) for found in answer.ids)
        for query, answer in zip(test.ids, answers, strict=True)
    ]
    assert (row.alpha, row.delta, len(missed)) == (0.5, 0.1, len(test))
    assert row.test_risk == pytest.approx(np.mean(missed))
    assert row.mean_size == pytest.approx(np.mean([answer.size for answer in answers]))
    assert answers[0].labels is None
    with pytest.raises(InvalidConfig, match="no labels known"):
        loaded.retrieve(test.images[0], 0.5, 0.1, distinct="label")


def test_their_report_leaves_out_what_takes_one_label(table):
    _, folder, outcome = table
    page = (folder / outcome.report).read_text(encoding="utf-8")
    shown = alternatives(page)
    assert {
        "uncertainty in and out of distribution",
        "risk and size against delta",
        "reliability diagram",
        "gallery cleaning",
        "two-dimensional projection of the test queries",
        "least certain queries with their sets",
    } < shown
    guarantees = [row.guarantee for row in outcome.evaluation.others]
    assert "miss, distinct labels" not in guarantees
    assert {"recall", "miss, group left", "miss, group right"} < set(guarantees)
    numbers = outcome.evaluation.quality.numbers
    left_out = {"knn_accuracy", "knn_accuracy_gallery", "verification_ap", "map_macro"}
    assert not left_out & numbers.keys()
    assert {"map", "map_cleaned_20", "recall_at_10", "ood_auroc"} < numbers.keys()


def alternatives(page):
    """The alternative texts of all pictures."""
    return {part.split('"')[0] for part in page.split('alt="')[1:]}


@pytest.mark.usefixtures("undrawn")
def test_their_retriever_measures_the_same_again(table):
    _, folder, outcome = table
    config = EvaluationConfig(str(folder / outcome.folder), "again", (0.3, 0.5), ood="noise")
    again = evaluate_retriever(config).evaluation
    assert again.quality.numbers == outcome.evaluation.quality.numbers
    assert again.rows == outcome.evaluation.rows
    assert again.others == outcome.evaluation.others


def test_a_table_that_says_something_else_now_gives_another_gallery(table):
    """The names are as before; what matches which is not."""
    kind, folder, outcome = table
    path = folder / "table.csv"
    before = path.read_text()
    changed = pd.read_csv(path)
    if kind == "labels":
        changed["labels"] = "tens 1"
    else:
        changed["x"] = 0.0
    changed.to_csv(path, index=False)
    try:
        load_splits(DataConfig(**outcome.retriever.origin["data"]))
        refused(folder / outcome.folder, InvalidData, "another gallery")
    finally:
        path.write_text(before)
