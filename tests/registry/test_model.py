"""The model of a calibration in MLflow: its answers, its files, and its card."""

import base64
import io
import json
import re
import shutil
from copy import copy
from dataclasses import replace
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
import sklearn
from fastapi.testclient import TestClient
from mlflow import MlflowClient
from mlflow.pyfunc import scoring_server
from PIL import Image

import rcir
from rcir import tracking
from rcir.errors import CorruptRetriever, InvalidData
from rcir.index import IndexConfig
from rcir.registry.logged_model import (
    answer_table,
    build_signature,
    list_requirements,
    log_calibration,
    make_image_example,
    make_vector_example,
    read_results,
    write_card,
)
from rcir.store.folder import current_version

ROOT = Path(__file__).parents[2]
PARAMS = [
    {"alpha": 0.3},
    {"alpha": 0.3, "delta": 0.2, "distinct": "label"},
    {"alpha": 0.3, "simultaneous": True},
    {"alpha": 0.3, "delta": None},
]
both_kinds = pytest.mark.parametrize("kind", ["vectors", "pictures"])


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def table_of(one):
    """The queries of a calibration, as a client has them."""
    if one.retriever.encoder is None:
        return pd.DataFrame({"vector": [query.tolist() for query in one.queries]})
    return pd.DataFrame({"image": [png(query) for query in one.queries]})


def assert_same(row, answer):
    """Assert that a row of a prediction holds an answer."""
    assert tuple(row["ids"]) == answer.ids
    assert tuple(row["labels"]) == answer.labels
    np.testing.assert_allclose(row["distances"], answer.distances, atol=1e-3)
    np.testing.assert_allclose(row["probabilities"], answer.probabilities, atol=1e-3)
    assert row["match_probability"] == pytest.approx(answer.match_probability, abs=1e-3)
    assert (row["size"], row["abstained"]) == (answer.size, answer.abstained)
    assert row["uncertainty"] == pytest.approx(answer.uncertainty, rel=1e-3)
    assert row["guarantee"] == str(answer.guarantee)


def downloaded(uri):
    return Path(mlflow.artifacts.download_artifacts(uri))


@pytest.fixture(scope="module")
def models(both, tracking_uri):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
        return {name: mlflow.pyfunc.load_model(one.uri) for name, one in both.items()}


# Answers


@both_kinds
def test_the_model_answers_like_the_retriever(both, models, kind):
    one = both[kind]
    queries = np.array(one.queries) if kind == "vectors" else one.queries
    for params in PARAMS:
        rows = models[kind].predict(table_of(one), params=params)
        expected = one.retriever.retrieve(queries, **{"delta": 0.1, **params})
        assert len(rows) == len(expected) > 0
        for (_, row), answer in zip(rows.iterrows(), expected, strict=True):
            assert_same(row, answer)
    place = downloaded(one.uri)
    example = mlflow.models.Model.load(str(place)).load_input_example(str(place))
    assert models[kind].predict(example, params={"alpha": 0.3})["size"].tolist()[0] >= 1


def test_vectors_with_uncertainties_are_answered_with_them():
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=700)
    vectors = np.eye(4)[labels] + 0.5 * rng.standard_normal((700, 4))
    retriever = rcir.Retriever.from_embeddings(vectors[:200], labels=labels[:200])
    uncertainty = rng.uniform(size=500)
    retriever.calibrate(vectors[200:], labels[200:], uncertainty=uncertainty)
    columns = [column["name"] for column in build_signature(retriever)["inputs"]]
    assert columns == ["vector", "uncertainty"]
    stated = uncertainty[100:105]
    table = pd.DataFrame({"vector": list(vectors[300:305]), "uncertainty": stated})
    rows = answer_table(retriever, table, {"alpha": 0.2})
    expected = retriever.retrieve(vectors[300:305], 0.2, 0.1, uncertainty=stated)
    for (_, row), answer in zip(rows.iterrows(), expected, strict=True):
        assert_same(row, answer)
    assert {type(label) for label in rows["labels"][0]} == {int}


def test_requests_that_cannot_be_answered_are_refused(models, both):
    table = table_of(both["vectors"])
    uneven = pd.DataFrame({"vector": [[1.0] * 8, [1.0] * 7]})
    no_picture = pd.DataFrame({"image": [b"no picture"]})
    for kind, rows, params, word in (
        ("vectors", table, {"alpha": 0.001}, "RiskUnattainable"),
        ("vectors", table, {"alpha": 2.0}, "InvalidRiskLevel"),
        ("vectors", table, {"group": "x"}, "InvalidConfig"),
        ("vectors", uneven, {}, "7, 8"),
        ("pictures", no_picture, {}, "InvalidImage"),
        ("pictures", table, {}, "schema"),
    ):
        with pytest.raises(mlflow.exceptions.MlflowException, match=word) as refused:
            models[kind].predict(rows, params=params)
        assert refused.value.get_http_status_code() == 400


def test_an_example_holds_the_bytes_of_a_picture_file(tmp_path):
    grey = np.arange(48, dtype=np.uint8).reshape(6, 8)
    path = tmp_path / "one.png"
    path.write_bytes(png(grey))
    for picture in (path, str(path), path.read_bytes(), grey, Image.fromarray(grey)):
        read = np.asarray(Image.open(io.BytesIO(make_image_example(picture)["image"])).convert("L"))
        np.testing.assert_array_equal(read, grey)


# Files


@both_kinds
def test_no_file_is_a_pickle_or_names_a_folder_of_this_machine(both, kind, tmp_path_factory):
    files = [path for path in downloaded(both[kind].uri).rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"MLmodel", "README.md", "manifest.json", "results.json"} <= names
    places = [str(ROOT).encode(), str(tmp_path_factory.getbasetemp()).encode()]
    for path in files:
        if path.parent.name == "__pycache__":  # made by loading it from this store
            continue
        content = path.read_bytes()
        if path.suffix != ".safetensors":  # which begin with a length
            assert not re.match(rb"\x80[\x02-\x05]", content), path
        assert path.suffix not in (".pkl", ".pickle", ".pt", ".pth")
        assert not any(place in content for place in places), path


def test_the_retriever_is_stored_once_and_loaded_by_run_and_by_model(certifications):
    one = certifications["fine"]
    artifacts = Path(MlflowClient().get_run(one.run).info.artifact_uri.removeprefix("file://"))
    assert not (artifacts / "retriever").exists()
    assert len([*downloaded(one.uri).rglob("retriever.safetensors")]) == 1
    expected = [answer.ids for answer in one.retriever.retrieve(one.queries, 0.2, 0.1)]
    for uri in (f"runs:/{one.run}/retriever", one.uri):
        loaded = rcir.load(uri)
        assert [answer.ids for answer in loaded.retrieve(one.queries, 0.2, 0.1)] == expected


def test_a_changed_file_is_refused(certifications, tmp_path):
    copy = shutil.copytree(downloaded(certifications["fine"].uri), tmp_path / "copy")
    ids = copy / "artifacts" / "retriever" / "retriever.safetensors"
    ids.write_bytes(ids.read_bytes().replace(b"gallery 7", b"gallery 8"))
    with pytest.raises(CorruptRetriever, match=r"retriever\.safetensors"):
        mlflow.pyfunc.load_model(str(copy))


def test_the_latest_model_of_a_run_is_loaded(certifications):
    one = certifications["coarse"]
    run = tracking.start_run("again", {})
    version = current_version(one.folder / "retriever")
    tracking.log_retriever(run, version)  # as a folder, without a model
    assert tracking.find_model(run) is None
    assert rcir.load(f"runs:/{run.id}/retriever").searcher.options.metric == "cosine"
    example = make_vector_example(one.retriever)
    logged = [log_calibration(run, one.folder, one.retriever, example) for _ in range(2)]
    assert tracking.find_model(run) == logged[1] != logged[0]
    assert rcir.load(f"runs:/{run.id}/retriever").ids.tolist() == one.retriever.ids.tolist()


def test_requirements_are_those_of_the_retriever(both, pictured, monkeypatch):
    lines = (downloaded(both["vectors"].uri) / "requirements.txt").read_text().splitlines()
    assert lines == [f"mlflow=={mlflow.__version__}", f"rcir[cpu,train]=={rcir.__version__}"]
    encoder = rcir.load(pictured.folder / "retriever")
    assert list_requirements(encoder) == lines[1:]
    for backbone, extra in (("timm:resnet18", "timm"), ("open_clip:a/b", "open_clip")):
        monkeypatch.setitem(vars(encoder.encoder.config), "backbone", backbone)
        (line,) = list_requirements(encoder)
        extras = line.removeprefix("rcir[").removesuffix(f"]=={rcir.__version__}").split(",")
        assert sorted(extras) == sorted(["cpu", "train", extra])
    with monkeypatch.context() as patch:
        patch.setattr(IndexConfig, "of", lambda _: IndexConfig("gpu"))
        assert list_requirements(encoder)[0].startswith("rcir[gpu,open_clip,train]==")
    # A user's own class requires the package that it comes with.
    monkeypatch.setitem(vars(encoder.encoder.config), "method", "sklearn.base:Something")
    assert list_requirements(encoder)[1:] == [f"scikit-learn=={sklearn.__version__}"]


# The card


def rows_of(text):
    """The cells of the table of a card."""
    lines = [line for line in text.splitlines() if re.match(r"\| 0\.", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@both_kinds
def test_the_card_holds_what_was_measured(both, kind):
    one = both[kind]
    results = json.loads((one.folder / "results.json").read_text())
    text = (downloaded(one.uri) / "README.md").read_text()
    assert len(rows_of(text)) == len(results["rows"]) == 2
    names = ("alpha", "delta", "mean_size", "constant_size", "test_risk")
    for row, expected in zip(rows_of(text), results["rows"], strict=True):
        numbers = [expected[name] for name in names]
        assert [float(cell) for cell in row[:5]] == pytest.approx(numbers, rel=1e-3)
        interval = [expected["risk_low"], expected["risk_high"]]
        assert [float(end) for end in row[5].split(" to ")] == pytest.approx(interval, rel=1e-3)
        assert row[6] == expected["score_function"]
    answer = one.retriever.retrieve(one.queries, results["rows"][0]["alpha"], 0.1)[0]
    numbers = (results["n_test"], results["n_calibration"], len(one.retriever.ids))
    fingerprint = one.retriever.calibration.fingerprints["gallery"][:12]
    for words in (answer.guarantee, results["dataset"], rcir.__version__, fingerprint, *numbers):
        assert str(words) in text
    assert len(text) < 5000  # the limit of a description in a registry


def test_the_card_reports_unattainable_levels_and_refuses_other_results(certifications):
    one = certifications["fine"]
    results = read_results(one.folder)
    first = {"threshold": None, "mean_size": None, "test_risk": None, "alpha": 0.001}
    text = write_card(one.retriever, results | {"rows": [results["rows"][0] | first]})
    assert rows_of(text)[0][:3] == ["0.001", "0.1", "not certified"]
    for changed, message in (({"n_calibration": 5}, "calibration"), ({"rows": 3}, "version")):
        with pytest.raises(InvalidData, match=message):
            write_card(one.retriever, results | changed)


def test_the_card_states_the_requested_delta_of_a_retriever_chosen_before(certifications):
    one, results = certifications["fine"], read_results(certifications["fine"].folder)
    chosen = copy(one.retriever)
    chosen.calibration = replace(chosen.calibration, chosen_among=4)
    alpha = 2 * results["rows"][-1]["alpha"]
    row = results["rows"][-1] | {"alpha": alpha, "delta": 0.1 / 4}
    text = write_card(chosen, results | {"rows": [row], "chosen_among": 4})
    assert str(chosen.guarantee(alpha, 0.1)) in text
    assert "measured at delta" not in text


# MLflow's server


def test_the_server_of_mlflow_answers_like_the_retriever(pictured, models, monkeypatch):
    monkeypatch.setenv("__MLFLOW_IS_IN_SERVING_ENVIRONMENT", "true")  # which the server sets
    with TestClient(scoring_server.init(models["pictures"])) as client:

        def invoke(**body):
            response = client.post("/invocations", json=body)
            return response.status_code, response.json()

        rows = [{"image": base64.b64encode(png(query)).decode()} for query in pictured.queries]
        status, body = invoke(dataframe_records=rows, params={"alpha": 0.3})
        assert status == 200
        expected = pictured.retriever.retrieve(pictured.queries, 0.3, 0.1)
        for row, answer in zip(body["predictions"], expected, strict=True):
            assert_same(row, answer)
        invalid = {"dataframe_records": [{"image": "bm90aGluZw=="}]}
        unattainable = {"dataframe_records": rows[:1], "params": {"alpha": 0.001}}
        for request, word in ((unattainable, "RiskUnattainable"), (invalid, "InvalidImage")):
            status, body = invoke(**request)
            assert status == 400
            assert word in body["message"]
            assert "stack_trace" not in body
