"""`rcir evaluate`: a calibrated retriever measured again; images without exactly one label."""

import io
import json
import shutil
from contextlib import redirect_stdout
from copy import deepcopy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from mlflow import MlflowClient
from PIL import Image

import rcir
from calibration import CalibrationConfig, EvaluationConfig, calibrate, evaluate_retriever
from rcir.cli import main
from rcir.data import DataConfig, load_splits
from rcir.encoders import EncoderConfig
from rcir.errors import (
    CorruptRetriever,
    InvalidConfig,
    InvalidData,
    InvalidRiskLevel,
    NoRetriever,
    StaleCalibration,
)
from rcir.store.folder import current_version
from training import train

LEVELS = ["--alpha", "0.001", "0.2", "0.3", "--delta", "0.05"]


@pytest.fixture(scope="module")
def evaluated(outcome, tracking_uri, tmp_path_factory):
    """The files and output of `rcir evaluate` for the retriever of the tiny run."""
    output = tmp_path_factory.mktemp("evaluated")
    screen = io.StringIO()
    with redirect_stdout(screen):
        command = ["evaluate", "--retriever", str(outcome.folder), "--output", str(output)]
        assert main([*command, *LEVELS]) == 0
    return output, json.loads((output / "results.json").read_text()), screen.getvalue()


def changed(outcome, tmp_path, change):
    """The folder of the retriever after a change of what is loaded."""
    loaded = rcir.load(outcome.folder)
    change(loaded)
    return loaded.save(tmp_path / "changed")


def test_the_numbers_are_those_of_the_calibration(evaluated, outcome):
    results = deepcopy(evaluated[1])
    expected = json.loads((outcome.folder.parent / "results.json").read_text())
    for each in (results, expected):
        assert each.pop("seconds") > 0
        for row in each["rows"] + each["others"]:  # advice of a command names flags
            row["refusal"] = row["refusal"] is not None
    quality = results.pop("quality")
    assert expected.pop("quality") == quality
    assert results == expected


def test_page_results_and_screen_show_the_numbers(evaluated, outcome):
    output, _, screen = evaluated
    assert {path.name for path in output.iterdir()} == {"report.html", "results.json"}
    page = (output / "report.html").read_text(encoding="utf-8")
    assert 'alt="reliability diagram"' in page
    assert f"report: {output / 'report.html'}" in screen
    for row in outcome.evaluation.rows[1:]:
        assert f"{row.test_risk:.4f}" in screen


def test_an_evaluation_is_tracked_below_the_training(evaluated, trained, tracking_uri):
    client = MlflowClient(tracking_uri)
    place = client.get_run(trained.mlflow_run).info.experiment_id
    wanted = f"tags.`rcir.folder` = '{evaluated[0].absolute()}'"
    (run,) = client.search_runs([place], wanted)
    assert run.data.tags["kind"] == "evaluation"
    assert run.data.tags["mlflow.parentRunId"] == trained.mlflow_run
    assert run.data.metrics["quality/ausc"] == evaluated[1]["quality"]["ausc"]
    figures = {item.path for item in client.list_artifacts(run.info.run_id, "figures")}
    assert {f"figures/{name}.svg" for name in ("reliability", "risk")} <= figures


@pytest.mark.usefixtures("no_figures")
def test_without_an_output_and_a_known_run_it_replaces_the_one_beside_the_retriever(
    outcome, tmp_path
):
    def forget(loaded):
        loaded.origin = {name: loaded.origin[name] for name in ("data", "queries")}
        loaded.origin["run"] = "0" * 32

    folder, output = changed(outcome, tmp_path, forget), tmp_path / "evaluation"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for alphas in ((0.05, 0.2), (0.4,)):
        measured = evaluate_retriever(EvaluationConfig(str(folder), alphas=alphas))
        assert measured.mlflow_run is None
        assert measured.report == output / "report.html"
        assert {path.name for path in output.iterdir()} == {"report.html", "results.json"}
        results = json.loads((output / "results.json").read_text())
        assert [(row["alpha"], row["delta"]) for row in results["rows"]] == [
            (alpha, 0.1) for alpha in alphas
        ]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("no_figures")
def test_a_retriever_of_mlflow_needs_an_output(outcome):
    uri = f"runs:/{outcome.mlflow_run}/retriever"
    with pytest.raises(InvalidConfig, match="output"):
        evaluate_retriever(EvaluationConfig(uri))
    measured = evaluate_retriever(EvaluationConfig(uri, "here", (0.3,), 0.05))
    assert measured.report == Path("here/report.html")
    assert measured.evaluation.rows == outcome.evaluation.rows[2:]


def refused(folder, error, match, **options):
    """Nothing is written beside a retriever that is refused."""
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(error, match=match):
        evaluate_retriever(EvaluationConfig(str(folder), **options))
    assert sorted(folder.parent.rglob("*")) == before


def blur(loaded):
    """Nothing that would be measured would be what was calibrated."""
    with torch.no_grad():
        next(loaded.encoder.parameters()).mul_(0.5)


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        (lambda loaded: loaded.origin.pop("data"), InvalidData, "data set"),
        (lambda loaded: setattr(loaded, "calibration", None), InvalidData, "data set"),
        (lambda loaded: loaded.origin["data"].update(seed=7), InvalidData, "another gallery"),
        (lambda loaded: loaded.origin["queries"].update(test="0"), InvalidData, "other queries"),
        (lambda loaded: loaded.origin["data"].update(colour=7), InvalidConfig, "colour"),
        (blur, StaleCalibration, "has changed"),
    ],
    ids=["no data", "not calibrated", "gallery", "queries", "field", "stale"],
)
def test_a_retriever_that_cannot_be_measured_is_refused(outcome, tmp_path, change, error, word):
    refused(changed(outcome, tmp_path, change), error, word)


def test_options_that_do_not_fit_and_damaged_folders_are_refused(outcome, tmp_path):
    copy = shutil.copytree(outcome.folder, tmp_path / "kept" / "retriever")
    refused(copy, InvalidRiskLevel, "alphas", alphas=())
    refused(copy.with_name("missing"), NoRetriever, "missing")
    (current_version(copy) / "retriever.json").write_text("[]")
    refused(copy, CorruptRetriever, "retriever.json")


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
        patch.setattr("calibration.pipeline.draw_figures", lambda *_: {})
        run = train(tiny(request.param, epochs=1, data=data, encoder=EncoderConfig(dim=4)))
        config = CalibrationConfig(str(run.path), "out", group="group", depth=30, alphas=(0.3, 0.5))
        return request.param, folder, calibrate(config)


def number_of(name):
    return int(str(name).rsplit("-", 1)[1].removesuffix(".png"))


def test_images_without_one_label_are_retrieved_with_the_guarantee(table):
    """True matches counted by the numbers in the names of the files."""
    kind, folder, outcome = table
    test = outcome.splits.data.test
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
    every_query_matches = (outcome.splits.calibration.n_relevant > 0).all()
    assert {each.guarantee for each in outcome.evaluation.others} == {
        *(() if every_query_matches else ("miss, queries with a match",)),
        *(
            "miss, each quarter of the uncertainty",
            "miss, abstaining",
            "recall",
            "false discovery",
            "miss, whatever alpha",
        ),
        *("miss, group left", "miss, group right", "miss, any mix of groups"),
    }
    with pytest.raises(InvalidConfig, match="single label"):
        loaded.retrieve(test.images[0], 0.5, 0.1, distinct="label")


@pytest.mark.usefixtures("no_figures")
def test_their_retriever_measures_the_same_again(table):
    _, folder, outcome = table
    config = EvaluationConfig(str(folder / outcome.folder), "again", (0.3, 0.5))
    again = evaluate_retriever(config).evaluation
    assert again.quality.numbers == outcome.evaluation.quality.numbers
    assert (again.rows, again.others) == (outcome.evaluation.rows, outcome.evaluation.others)


def test_a_table_that_says_something_else_now_gives_another_gallery(table, tmp_path):
    """The names are as before; the matches are not."""
    kind, folder, outcome = table
    copy = shutil.copytree(folder, tmp_path / "copy")
    retriever = rcir.load(folder / outcome.folder)
    retriever.origin["data"]["root"] = str(copy)
    retriever.save(copy / "retriever")
    changed = pd.read_csv(copy / "table.csv")
    if kind == "labels":
        changed["labels"] = "tens 1"
    else:
        changed["x"] = 0.0
    changed.to_csv(copy / "table.csv", index=False)
    load_splits(DataConfig(**retriever.origin["data"]))
    refused(copy / "retriever", InvalidData, "another gallery")
