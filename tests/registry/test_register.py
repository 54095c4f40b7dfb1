"""`rcir register`: versions and aliases."""

import json
import shutil
from dataclasses import replace

import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient

import rcir
from rcir.cli import main
from rcir.errors import InvalidConfig, InvalidData
from rcir.registry import register
from rcir.retrieval.retriever import Retriever
from rcir.runs.results import TEST
from rcir.store.folder import current_version
from tests.registry.conftest import certified, write

pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.fixture
def client():
    return MlflowClient()


@pytest.fixture
def name(request):
    """The name of a registered model that no other test uses."""
    return request.node.name.replace("[", "-").replace("]", "")


def ids_of(uri):
    return rcir.load(uri).ids.tolist()


# Versions


def test_the_first_version_has_its_card_tags_and_alias(certifications, client, name, capsys):
    one = certifications["coarse"]
    assert main(["register", str(one.folder), "--name", name, "--alias", "champion"]) == 0
    assert f"models:/{name}@champion" in capsys.readouterr().out
    version = client.get_model_version_by_alias(name, "champion")
    assert (int(version.version), version.run_id, version.source) == (1, one.run, one.uri)
    results = json.loads((one.folder / "results.json").read_text())
    for row in results["rows"]:
        assert f"| {row['alpha']:g} | 0.1 | {row['mean_size']:.4g} |" in version.description
        tag = f"rcir.alpha-{row['alpha']:g}"
        assert float(version.tags[f"{tag}.mean_size"]) == pytest.approx(row["mean_size"])
        assert float(version.tags[f"{tag}.test_risk"]) == pytest.approx(row["test_risk"])
    assert version.tags["rcir.n_calibration"] == "400"
    assert ids_of(f"models:/{name}@champion") == ids_of(f"models:/{name}/1")
    assert ids_of(f"models:/{name}/1") == one.retriever.ids.tolist()
    register(str(one.folder), name, "champion")  # changes nothing
    assert len(client.search_model_versions(f"name = '{name}'")) == 1
    fine = certifications["fine"]
    assert register(str(fine.folder), name).uri == f"models:/{name}/2"
    assert ids_of(f"models:/{name}@champion") == one.retriever.ids.tolist()
    assert register(fine.run, name, "champion").version == 3
    assert client.get_model_version_by_alias(name, "champion").source == fine.uri


def test_an_untracked_calibration_is_logged_first(name, client, tmp_path, monkeypatch):
    write(tmp_path)
    with monkeypatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI")
        outcome = certified(tmp_path, "fine")
    assert not (tmp_path / "mlflow.db").exists()
    assert "calibration" not in outcome.retriever.origin
    registered = register("fine", name, "champion")
    run = client.get_run(client.get_model_version(name, "1").run_id)
    assert run.info.status == "FINISHED"
    assert ids_of(registered.uri) == outcome.retriever.ids.tolist()


def test_a_retriever_that_was_marked_as_chosen_is_logged_again(pictured, client, name, tmp_path):
    folder = shutil.copytree(pictured.folder, tmp_path / "marked")
    marked = Retriever.load(folder / "retriever")
    marked.calibration = replace(marked.calibration, chosen_among=3)
    marked.save(folder / "retriever")
    registered = register(str(folder), name)
    version = client.get_model_version(name, "1")
    assert version.source != pictured.uri
    assert "delta / 3" in version.description
    assert version.tags["rcir.chosen_among"] == "3"
    assert rcir.load(registered.uri).calibration.chosen_among == 3
    assert rcir.load(pictured.uri).calibration.chosen_among == 1


# Refusals


def recalibrate(folder):
    """Calibrate a retriever anew, beside what was measured of it before."""
    retriever = Retriever.load(folder / "retriever")
    rng = np.random.default_rng(3)
    labels = rng.choice([*retriever.label_names.values()], size=600)
    retriever.calibrate(rng.standard_normal((600, 8)), labels, "constant")
    retriever.save(folder / "retriever")


def make_stale(folder):
    retriever = Retriever.load(folder / "retriever")
    retriever.remove(["gallery 7"])
    retriever.save(folder / "retriever")


def tamper(folder):
    ids = current_version(folder / "retriever") / "retriever.safetensors"
    ids.write_bytes(ids.read_bytes().replace(b"gallery 7", b"gallery 8"))


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (recalibrate, InvalidData),
        (make_stale, rcir.StaleCalibration),
        (lambda folder: (folder / "results.json").unlink(), InvalidData),
        (lambda folder: (folder / TEST).unlink(), InvalidData),
        (tamper, rcir.CorruptRetriever),
    ],
    ids=["recalibrated", "stale", "no results", "no measurements", "tampered"],
)
def test_an_incomplete_calibration_is_not_registered(
    certifications, client, name, tmp_path, spoil, error
):
    folder = shutil.copytree(certifications["fine"].folder, tmp_path / "spoiled")
    spoil(folder)
    with pytest.raises(error):
        register(str(folder), name)
    assert client.search_registered_models(f"name = '{name}'") == []


def test_invalid_names_and_references_are_refused(certifications, tmp_path):
    folder = str(certifications["fine"].folder)
    with pytest.raises(InvalidConfig, match="name"):
        register(folder, "a/b")
    for alias in ("v1", "a b"):
        with pytest.raises(InvalidConfig, match="alias"):
            register(folder, "never", alias)
    with pytest.raises(InvalidData, match="not a folder"):
        register("0123456789abcdef0123456789abcdef", "never")
    with pytest.raises(rcir.NoRetriever):
        register(str(tmp_path), "never")
    with pytest.raises(rcir.NoRetriever, match="never@champion"):
        rcir.load("models:/never@champion")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("server")
def test_mlflow_sorts_the_models_of_encoders_by_certified_size(tmp_path):
    write(tmp_path)
    for part in ("gallery", "queries"):  # an encoder of five numbers in place of eight
        arrays = dict(np.load(tmp_path / f"fine-{part}.npz"))
        np.savez(tmp_path / f"short-{part}.npz", **arrays | {"vector": arrays["vector"][:, :5]})
    outcomes = {name: certified(tmp_path, name) for name in ("short", "fine", "coarse")}
    sizes = {name: outcome.evaluation.rows[0].mean_size for name, outcome in outcomes.items()}
    key = "certified/alpha_0.1/mean_size"
    found = mlflow.search_logged_models(
        experiment_ids=[mlflow.get_experiment_by_name("rcir").experiment_id],
        filter_string="params.score_function = 'quantile'",
        order_by=[{"field_name": f"metrics.{key}", "ascending": True}],
        output_format="list",
    )
    assert [model.name for model in found] == sorted(sizes, key=sizes.get)
    assert len(set(sizes.values())) == 3
    datasets = set()
    for model in found:
        run = model.source_run_id
        measured = {metric.key: metric for metric in model.metrics}
        assert measured[key].value == sizes[model.name]
        assert "quality/recall_at_1" in measured
        data = measured[key]
        datasets.add((data.dataset_name, data.dataset_digest))
        assert mlflow.get_run(run).info.run_name == f"{model.name} (certification)"
        ids = outcomes[model.name].retriever.ids.tolist()
        for name in ("retriever", model.name):
            assert rcir.load(f"runs:/{run}/{name}").ids.tolist() == ids
    assert len(datasets) == 1  # for MLflow's page to have one column of sizes
    (point,) = MlflowClient().get_metric_history(run, key)  # logged once
    assert point.value == sizes[model.name]
