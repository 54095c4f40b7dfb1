"""The model of a calibration in MLflow: what it answers, what lies in it, and what it says."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
import sklearn
from mlflow import MlflowClient
from PIL import Image

import rcir
from rcir import tracking
from rcir.errors import CorruptRetriever, InvalidData
from rcir.registry.answers import answers, signature
from rcir.registry.card import card
from rcir.registry.logged_model import (
    image_example,
    log_calibration,
    read_results,
    vector_example,
)
from rcir.registry.requirements import requirements

ROOT = Path(__file__).parents[2]
ASKED = [
    {"alpha": 0.3},
    {"alpha": 0.3, "delta": 0.2, "distinct": "label"},
    {"alpha": 0.3, "simultaneous": True},
    {"alpha": 0.3, "delta": None},
]


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def table_of(one):
    """The queries of a calibration, as a client has them."""
    if one.retriever.encoder is None:
        return pd.DataFrame({"vector": [query.tolist() for query in one.queries]})
    return pd.DataFrame({"image": [png(query) for query in one.queries]})


def downloaded(uri):
    return Path(mlflow.artifacts.download_artifacts(uri))


@pytest.fixture(scope="module")
def models(both, tracking_uri):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        return {name: mlflow.pyfunc.load_model(one.uri) for name, one in both.items()}


@pytest.mark.parametrize("params", ASKED, ids=str)
@pytest.mark.parametrize("kind", ["vectors", "pictures"])
def test_the_model_answers_what_the_retriever_answers(both, models, kind, params):
    one = both[kind]
    found = models[kind].predict(table_of(one), params=params)
    options = {"delta": 0.1, **params}
    expected = one.retriever.retrieve(
        np.array(one.queries) if kind == "vectors" else one.queries, **options
    )
    assert len(found) == len(expected) > 0
    for (_, row), answer in zip(found.iterrows(), expected, strict=True):
        assert tuple(row["ids"]) == answer.ids
        assert tuple(row["labels"]) == answer.labels
        np.testing.assert_allclose(row["distances"], answer.distances, atol=1e-6)
        assert (row["size"], row["abstained"]) == (answer.size, answer.abstained)
        assert row["uncertainty"] == pytest.approx(answer.uncertainty, rel=1e-5)
        assert row["guarantee"] == str(answer.guarantee)


@pytest.mark.parametrize("kind", ["vectors", "pictures"])
def test_the_example_is_a_query_that_is_answered(both, models, kind):
    place = downloaded(both[kind].uri)
    example = mlflow.models.Model.load(str(place)).load_input_example(str(place))
    assert models[kind].predict(example, params={"alpha": 0.3})["size"].tolist()[0] >= 1


OTHER = """
import sys, json, mlflow, pandas as pd
model = mlflow.pyfunc.load_model(sys.argv[1])
table = pd.DataFrame({"vector": json.loads(sys.argv[2])})
print(model.predict(table, params={"alpha": 0.2}).to_json(orient="records"))
"""


@pytest.mark.slow
def test_another_process_loads_it_without_pickle(certifications, tmp_path):
    one = certifications["fine"]
    command = [sys.executable, "-c", OTHER, one.uri, json.dumps(one.queries.tolist())]
    environment = {"MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    expected = one.retriever.retrieve(one.queries, 0.2, 0.1)
    assert [tuple(row["ids"]) for row in rows] == [answer.ids for answer in expected]


@pytest.mark.parametrize("kind", ["vectors", "pictures"])
def test_no_file_of_it_is_a_pickle_or_names_a_place(both, kind, tmp_path_factory):
    files = [path for path in downloaded(both[kind].uri).rglob("*") if path.is_file()]
    assert {"MLmodel", "README.md", "model_code.py", "manifest.json", "results.json"} <= {
        path.name for path in files
    }
    places = [str(ROOT).encode(), str(tmp_path_factory.getbasetemp()).encode()]
    for path in files:
        if path.parent.name == "__pycache__":  # of whoever loaded it in this store
            continue
        content = path.read_bytes()
        assert not re.match(rb"\x80[\x02-\x05]", content), path
        assert path.suffix not in (".pkl", ".pickle", ".pt", ".pth")
        assert not any(place in content for place in places), path


def test_the_retriever_lies_in_mlflow_once_and_has_both_names(certifications):
    one = certifications["fine"]
    own = Path(MlflowClient().get_run(one.run).info.artifact_uri.removeprefix("file://"))
    assert not (own / "retriever").exists()
    assert (own / "results.json").is_file()
    for uri in (f"runs:/{one.run}/retriever", one.uri):
        (found,) = [*downloaded(uri).rglob("controller.safetensors")]
        assert found.parent.name == "retriever"
        loaded = rcir.load(uri)
        assert isinstance(loaded, rcir.Retriever)
        assert loaded.retrieve(one.queries, 0.2, 0.1)[3].ids == (
            one.retriever.retrieve(one.queries, 0.2, 0.1)[3].ids
        )


def test_what_is_refused_is_refused_in_words(models, both):
    table = table_of(both["vectors"])
    for params, words in (
        ({"alpha": 0.001}, r"RiskUnattainable: alpha = 0.001 .* cannot be certified"),
        ({"alpha": 2.0}, "InvalidRiskLevel"),
        ({"group": "x"}, "InvalidConfig: group 'x'"),
    ):
        with pytest.raises(mlflow.exceptions.MlflowException, match=words) as refused:
            models["vectors"].predict(table, params=params)
        assert refused.value.get_http_status_code() == 400
    uneven = pd.DataFrame({"vector": [[1.0] * 8, [1.0] * 7]})
    with pytest.raises(mlflow.exceptions.MlflowException, match=r"vectors of \[7, 8\] numbers"):
        models["vectors"].predict(uneven)
    with pytest.raises(mlflow.exceptions.MlflowException, match="InvalidImage"):
        models["pictures"].predict(pd.DataFrame({"image": [b"no picture"]}))
    with pytest.raises(mlflow.exceptions.MlflowException, match="Failed to enforce schema"):
        models["pictures"].predict(table)


def test_a_changed_file_is_refused(certifications, tmp_path):
    place = downloaded(certifications["fine"].uri)
    copied = tmp_path / "copied"
    subprocess.run(["cp", "-r", place, copied], check=True)
    ids = copied / "artifacts" / "retriever" / "gallery.json"
    ids.write_text(ids.read_text().replace("gallery 7", "gallery 8"))
    with pytest.raises(CorruptRetriever, match=r"gallery\.json"):
        mlflow.pyfunc.load_model(str(copied))


def rows_of(text):
    """The numbers of the table of a card."""
    lines = [line for line in text.splitlines() if re.match(r"\| 0\.", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("kind", ["vectors", "pictures"])
def test_the_card_holds_what_was_measured(both, kind):
    one = both[kind]
    results = json.loads((one.folder / "results.json").read_text())
    text = (downloaded(one.uri) / "README.md").read_text()
    rows = rows_of(text)
    assert len(rows) == len(results["rows"]) == 2
    for row, known in zip(rows, results["rows"], strict=True):
        assert [float(cell) for cell in row[:5]] == pytest.approx(
            [known[name] for name in ("alpha", "delta", "mean_size", "test_risk", "constant_size")],
            rel=1e-3,
        )
        assert row[5] == known["score_function"]
    answer = one.retriever.retrieve(one.queries, results["rows"][0]["alpha"], 0.1)[0]
    assert f"> {answer.guarantee}" in text
    for words in (
        f"Measured on {results['dataset']}.",
        f"Measured on {results['n_test']} test queries",
        f"- calibration queries: {results['n_calibration']}",
        f"- uncertainty of queries: {results['uncertainty']}",
        f"- version of rcir: {rcir.__version__}",
        f"- fingerprint of gallery: `{one.retriever.calibrated_on['gallery'][:12]}`",
        f"{len(one.retriever.ids)} gallery items",
    ):
        assert words in text
    assert len(text) < 5000  # as long as a registry's description may be


def test_the_card_says_what_is_not_certified(certifications):
    one = certifications["fine"]
    results = read_results(one.folder)
    first = {"threshold": None, "mean_size": None, "test_risk": None, "alpha": 0.001}
    results["rows"] = [results["rows"][0] | first]
    text = card(one.retriever, results)
    assert rows_of(text)[0][:4] == ["0.001", "0.1", "not certified", "-"]
    assert "Nothing of what was asked is certified." in text


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"n_calibration": 5}, "5 calibration"), ({"rows": 3}, "version of rcir")],
)
def test_results_of_something_else_make_no_card(certifications, changed, words):
    one = certifications["fine"]
    with pytest.raises(InvalidData, match=words):
        card(one.retriever, read_results(one.folder) | changed)


def test_vectors_with_uncertainties_are_asked_with_theirs():
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=700)
    vectors = np.eye(4)[labels] + 0.5 * rng.standard_normal((700, 4))
    retriever = rcir.Retriever.from_embeddings(vectors[:200], labels=labels[:200])
    own = rng.uniform(size=500)
    retriever.calibrate(vectors[200:], labels[200:], uncertainty=own)
    named = [column["name"] for column in signature(retriever)["inputs"]]
    assert named == ["vector", "uncertainty"]
    table = pd.DataFrame({"vector": list(vectors[300:305]), "uncertainty": own[100:105]})
    found = answers(retriever, table, {"alpha": 0.2})
    expected = retriever.retrieve(vectors[300:305], 0.2, 0.1, uncertainty=own[100:105])
    assert found["uncertainty"].tolist() == [answer.uncertainty for answer in expected]
    assert [tuple(ids) for ids in found["ids"]] == [answer.ids for answer in expected]
    assert found["labels"].map(type).tolist() == [list] * 5
    assert {type(label) for label in found["labels"][0]} == {int}


def test_pip_is_told_what_the_retriever_needs(both, pictured, monkeypatch):
    lines = (downloaded(both["vectors"].uri) / "requirements.txt").read_text().splitlines()
    assert lines == [f"mlflow=={mlflow.__version__}", f"rcir[train]=={rcir.__version__}"]
    encoder = rcir.load(pictured.folder / "retriever")
    assert requirements(encoder) == lines[1:]
    for backbone, extras in (("timm:resnet18", "timm,train"), ("open_clip:a/b", "open_clip,train")):
        monkeypatch.setitem(vars(encoder.encoder.config), "backbone", backbone)
        assert requirements(encoder) == [f"rcir[{extras}]=={rcir.__version__}"]
    # A class of one's own is required as the package that it comes with.
    monkeypatch.setitem(vars(encoder.encoder.config), "method", "sklearn.base:Something")
    assert requirements(encoder)[1:] == [f"scikit-learn=={sklearn.__version__}"]


def test_a_picture_is_an_example_as_the_bytes_of_a_file(tmp_path):
    grey = np.arange(48, dtype=np.uint8).reshape(6, 8)
    path = tmp_path / "one.png"
    path.write_bytes(png(grey))
    for given in (path, str(path), path.read_bytes(), grey, Image.fromarray(np.dstack([grey] * 3))):
        read = np.asarray(Image.open(io.BytesIO(image_example(given)["image"])).convert("L"))
        np.testing.assert_array_equal(read, grey)


def test_a_model_that_is_logged_again_is_the_later_one(certifications):
    one = certifications["coarse"]
    run = tracking.start_run("again", {})
    tracking.log_retriever(run, one.folder / "retriever")  # there is no model: as a folder
    assert tracking.find_model(run) is None
    assert rcir.load(f"runs:/{run.id}/retriever").options.metric == "cosine"
    example = vector_example(one.retriever)
    logged = [log_calibration(run, one.folder, one.retriever, example) for _ in range(2)]
    assert tracking.find_model(run) == logged[1] != logged[0]
    assert rcir.load(f"runs:/{run.id}/retriever").ids.tolist() == one.retriever.ids.tolist()
