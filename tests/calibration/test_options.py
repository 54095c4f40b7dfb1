"""Other score functions, bounds and encoders; requests that cannot be met; what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts

import rcir
from calibration import CalibrationConfig, calibrate, print_table
from calibration.evaluation import HEADLINE
from rcir.cli import main
from rcir.data import Splits, load_splits
from rcir.encoders import batches, pipeline
from rcir.errors import CorruptRetriever, InvalidConfig, InvalidData
from rcir.index import IndexConfig
from rcir.runs.results import RunResults

WRITTEN = {"retriever", "report.html", "results.json", "test.safetensors"}


def calibrated(run, output="output", **options):
    return calibrate(CalibrationConfig(str(run.path), output, **options))


def downloaded(uri):
    return Path(download_artifacts(uri)).read_text()


def names(folder):
    return {path.name for path in Path(folder).iterdir()}


@pytest.mark.usefixtures("no_figures")
def test_constant_sizes_are_the_same_for_all_and_larger_by_a_looser_bound(trained, capsys):
    exact, loose = (
        calibrated(trained, bound, score_function="constant", bound=bound, alphas=(0.2, 0.3))
        for bound in ("binomial", "hoeffding")
    )
    for row in (*exact.evaluation.rows, *exact.evaluation.others):
        assert row.score_function == "constant"
        if row.constant_size:
            assert row.mean_size == pytest.approx(row.constant_size)
        if row.guarantee == "miss":
            assert row.mean_size == row.threshold + 1
    images = list(exact.splits.data.test.images[:9])
    assert len({each.size for each in rcir.load(exact.folder).retrieve(images, 0.3, 0.1)}) == 1
    assert loose.evaluation.rows[0].threshold > exact.evaluation.rows[0].threshold
    assert rcir.load(loose.folder).calibration.miss_rule.bound == "hoeffding"
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("no_figures")
def test_run_group_score_function_and_index_are_named_on_the_command_line(trained, outcome, capsys):
    command = ["calibrate", "--run", trained.mlflow_run, "--output", "grouped", "--alpha", "0.3"]
    command += ["--group", "occluded", "--score_function", "learned", "--delta", "0.2"]
    command += ["--index.kind", "ivf", "--index.options", '{"nlist": 4, "nprobe": 4}']
    assert main(command) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "(learned)" in printed
    assert "retriever: grouped/retriever" in printed
    occluded = outcome.splits.data.calibration.attributes["occluded"]
    loaded = rcir.load("grouped/retriever")
    index = IndexConfig.of(loaded.index)
    assert (index.kind, index.options["nlist"]) == ("ivf", 4)
    for group in ("True", "False"):
        guarantee = loaded.guarantee(0.3, 0.2, group=group)
        assert (guarantee.request.group, guarantee.score_function) == (group, "learned")
        assert guarantee.n_calibration == np.sum(occluded == (group == "True"))
    rows = json.loads(Path("grouped/results.json").read_text())["others"]
    # The first match says nothing of the other matches: these risks have a score of their own.
    for row in rows:
        is_of_all = row["guarantee"] in ("recall", "false discovery")
        assert row["score_function"] == ("match-probability" if is_of_all else "learned")


@pytest.mark.usefixtures("no_figures")
def test_a_key_divides_gallery_and_queries(trained, monkeypatch):
    def of_two_sites(*arguments):
        parts = vars(load_splits(*arguments))
        sites = {name: np.resize(["north", "south"], len(part)) for name, part in parts.items()}
        return Splits(
            **{
                name: replace(part, attributes={**part.attributes, "site": sites[name]})
                for name, part in parts.items()
            }
        )

    monkeypatch.setattr("calibration.data_sets.load_splits", of_two_sites)
    made = calibrated(trained, key="site", alphas=(0.5,))
    data, loaded = made.splits.data, rcir.load(made.folder)
    sites = dict(zip(data.gallery.ids, data.gallery.attributes["site"], strict=True))
    for key in ("north", "south"):
        for answer in loaded.retrieve(list(data.test.images[:5]), 0.5, 0.1, key=key):
            assert {sites[item] for item in answer.ids} == {key}
        n = np.sum(data.calibration.attributes["site"] == key)
        assert loaded.guarantee(0.5, 0.1, group=key).n_calibration == n
    with pytest.raises(InvalidData, match="site of each query"):
        loaded.retrieve(data.test.images[0], 0.5, 0.1)


@pytest.mark.usefixtures("never_embedded")
def test_an_unknown_group_or_cluster_is_refused_by_name(trained, monkeypatch):
    with pytest.raises(InvalidData, match=r"'camera'; they have .*occluded"):
        calibrated(trained, group="camera")
    with pytest.raises(InvalidData, match=r"'camera'; they have .*occluded"):
        calibrated(trained, key="camera")
    with pytest.raises(InvalidConfig, match="cluster is 'video'"):
        calibrated(trained, cluster="video")

    def without_attributes_of_tuning(*arguments):
        splits = load_splits(*arguments)
        return replace(splits, tuning=replace(splits.tuning, attributes={}))

    monkeypatch.setattr("calibration.data_sets.load_splits", without_attributes_of_tuning)
    with pytest.raises(InvalidData, match="'occluded'; they have none"):
        calibrated(trained, group="occluded")
    assert not Path("output").exists()


def test_by_default_a_model_of_the_labels_sizes_the_sets(chosen):
    """Nothing is compared for misses, so that no query tunes."""
    evaluation = chosen.evaluation
    assert {row.score_function for row in evaluation.rows} == {"label-model"}
    assert rcir.load(chosen.folder).calibration.label_model is not None
    results = json.loads((chosen.folder.parent / "results.json").read_text())
    assert results["score_function_comparison"] == evaluation.comparison == {}


def test_a_shallow_search_certifies_nothing_explains_why_and_ends_with_status_3(
    trained, capsys, monkeypatch
):
    command = ["calibrate", "--run", str(trained.path), "--output", "none", "--depth", "3"]
    assert main([*command, "--alphas", "[0.001, 0.002]", "--score_function", "constant"]) == 3
    printed = " ".join(capsys.readouterr().out.split())
    page = " ".join(Path("none/report.html").read_text().split())
    results = json.loads(Path("none/results.json").read_text())
    assert {row["threshold"] for row in results["rows"] + results["others"]} == {None}
    # Two levels of the miss risk, and of eight other guarantees.
    assert page.count('class="no"') == 2 + 2 * 8
    assert results["beyond_depth"] > 30
    advice = f"{results['beyond_depth']} of 300 test queries have their true matches beyond"
    for text in (printed, page):
        assert "Nothing is certified with probability 0.9 on 300 calibration queries" in text
        assert "of 100 future queries" not in text
        assert advice in text
    assert results["rows"][1]["refusal"] in printed
    with pytest.raises(rcir.RiskUnattainable):
        rcir.load("none/retriever").retrieve(np.zeros((8, 16), np.uint8), 0.001, 0.1)
    monkeypatch.setattr("calibration.pipeline.draw_figures", lambda *_: {})
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "--retriever", "none/retriever", "--alpha", "0.001"])
    assert stop.value.code == 3


def test_mlflow_finds_calibrations_by_the_numbers_of_results_json(trained, outcome, tracking_uri):
    client = MlflowClient(tracking_uri)
    results = json.loads((outcome.folder.parent / "results.json").read_text())
    by_alpha = {f"{row['alpha']:g}": row for row in results["rows"]}
    size = by_alpha["0.2"]["mean_size"]
    wanted = [
        "tags.encoder = 'btl' and tags.dataset = 'digits' and tags.kind = 'calibration'",
        f"tags.`rcir.folder` = '{outcome.folder.parent.absolute()}'",
        f"metrics.`certified/alpha_0.2/mean_size` < {size + 1e-6}",
        "params.`encoder.method` = 'btl'",
    ]
    experiment = client.get_experiment_by_name("rcir").experiment_id
    (run,) = client.search_runs([experiment], " and ".join(wanted))
    assert run.info.run_id == outcome.mlflow_run
    metrics = run.data.metrics
    assert "certified/alpha_0.001/mean_size" not in metrics
    for alpha in ("0.2", "0.3"):
        for name, field in HEADLINE.items():
            assert metrics[f"certified/alpha_{alpha}/{name}"] == by_alpha[alpha][field]
    for name in ("recall_at_1", "auroc_miss", "ausc"):
        assert metrics[f"quality/{name}"] == results["quality"][name]
    assert len(metrics) <= 25

    for name, field in HEADLINE.items():
        curve = client.get_metric_history(run.info.run_id, f"curve/{name}")
        values = [(row.alpha, getattr(row, field)) for row in outcome.evaluation.curve]
        expected = {round(1000 * alpha): v for alpha, v in values if v is not None}
        assert {point.step: point.value for point in curve} == expected
    assert run.data.tags["mlflow.parentRunId"] == trained.mlflow_run
    assert (run.info.status, run.data.params["alphas"]) == ("FINISHED", "(0.001, 0.2, 0.3)")
    figures = {item.path for item in client.list_artifacts(run.info.run_id, "figures")}
    assert {f"figures/{name}.svg" for name in ("risk", "sizes", "reliability")} <= figures
    params = client.get_run(trained.mlflow_run).data.params
    for name in ("data.options.train", "encoder.dim", "mining.positive", "optimizer.lr", "seed"):
        assert run.data.params[name] == params[name]
    assert run.data.params["depth"] == "150"
    headline = client.get_run(trained.mlflow_run).data.metrics
    assert "certified/alpha_0.2/mean_size" in headline
    assert len(headline) <= 30


def test_a_calibration_has_its_data_set_model_card_and_tables_in_mlflow(outcome, tracking_uri):
    client = MlflowClient(tracking_uri)
    run = client.get_run(outcome.mlflow_run)
    (used,) = run.inputs.dataset_inputs
    measured = RunResults.read(outcome.folder.parent / "test.safetensors")
    assert used.dataset.name == "digits"
    assert measured.queries.startswith(used.dataset.digest)
    card = run.data.tags["mlflow.note.content"]
    (model,) = (client.get_logged_model(each.model_id) for each in run.outputs.model_outputs)
    assert model.name == outcome.folder.parent.name
    assert model.params == run.data.params
    assert card == downloaded(f"runs:/{outcome.mlflow_run}/{model.name}/README.md")
    loaded = rcir.load(f"runs:/{outcome.mlflow_run}/retriever")
    assert loaded.searcher.fingerprints() == outcome.retriever.searcher.fingerprints()
    (artifact,) = client.list_artifacts(run.info.run_id, "tables")[:1]
    table = json.loads(downloaded(f"runs:/{run.info.run_id}/{artifact.path}"))
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["guarantee"], row["alpha"]) for row in rows[:3]] == [
        ("miss", alpha) for alpha in (0.001, 0.2, 0.3)
    ]
    assert rows[1]["threshold"] == pytest.approx(outcome.evaluation.rows[1].threshold)


@pytest.mark.usefixtures("no_figures")
def test_without_output_and_name_a_calibration_lands_in_the_run_and_replaces_what_was_there(
    trained, outcome, tracking_uri, tmp_path
):
    moved = shutil.copytree(trained.path, tmp_path / "moved")
    shutil.copytree(outcome.folder.parent, moved, dirs_exist_ok=True)
    config = CalibrationConfig(str(moved), score_function="constant", alphas=(0.3,))
    with pytest.warns(UserWarning, match="calibration 2 of this retriever"):
        again = calibrate(config)
    name = MlflowClient(tracking_uri).get_run(again.mlflow_run).info.run_name
    assert name == "moved (calibration 2)"
    assert again.folder == moved / "retriever"
    assert names(moved) - names(trained.path) == WRITTEN
    assert rcir.load(again.folder).calibration.miss_rule.score_function.name == "constant"


@pytest.mark.usefixtures("never_embedded")
def test_a_run_that_is_not_finished_is_refused(trained, tmp_path):
    unfinished = replace(trained, path=tmp_path, finished=False)
    unfinished.write()
    with pytest.raises(InvalidData, match="not finished"):
        calibrated(unfinished)
    assert not (tmp_path / "output").exists()


@pytest.mark.usefixtures("never_embedded")
@pytest.mark.parametrize(
    ("file", "output", "error"),
    [
        ("retriever/thesis.txt", "output", CorruptRetriever),
        ("report.html", "output", InvalidData),
        ("test.safetensors", "output", InvalidData),
        ("results.json", "output", InvalidData),
        ("results.json", "output/results.json", InvalidData),
    ],
)
def test_an_output_of_something_else_is_left_alone(trained, file, output, error):
    place = Path("output", file)
    place.parent.mkdir(parents=True)
    place.write_text('["mine"]')
    with pytest.raises(error, match=r"left alone|something else|is a file"):
        calibrated(trained, output)
    assert [path for path in Path("output").rglob("*") if path.is_file()] == [place]
    assert place.read_text() == '["mine"]'


@pytest.mark.usefixtures("never_embedded")
def test_options_that_cannot_be_met_are_refused_before_anything_is_embedded(trained, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for options, word in (
        ({"num_workers": -1}, "num_workers"),
        ({"use_gpu": True}, "CUDA"),
    ):
        with pytest.raises(InvalidConfig, match=word):
            calibrated(trained, **options)
    assert not Path("output").exists()


@pytest.mark.usefixtures("no_figures")
def test_an_interrupted_calibration_embeds_what_is_missing(trained, outcome, monkeypatch):
    embedded, fill, limit = [], batches.embed_block, 7
    options = {"score_function": "constant", "alphas": (0.3,)}

    def interrupted(model, images):
        if len(embedded) == limit:
            raise KeyboardInterrupt
        embedded.append(len(images))
        return fill(model, images)

    monkeypatch.setattr(pipeline, "embed_block", interrupted)
    with monkeypatch.context() as patch:
        patch.setattr(batches, "BLOCK_SIZE", 128)  # the batches are those of one block
        with pytest.raises(KeyboardInterrupt):
            calibrated(trained, **options)
        # Three blocks of the gallery, three of the tuning split, one of the calibration split.
        assert names("output") == {"embeddings"}
        limit = None
        again = calibrated(trained, **options)
    assert sum(embedded[7:]) == 472
    assert names("output") == WRITTEN
    searchers = [each.retriever.searcher for each in (again, outcome)]
    assert searchers[0].fingerprints() == searchers[1].fingerprints()
    assert (again.splits.test.results.vectors == outcome.splits.test.results.vectors).all()


@pytest.mark.usefixtures("no_figures")
def test_sizes_depend_on_the_chosen_uncertainty(trained, capsys):
    outcome = calibrated(trained, query_uncertainty="vote", score_function="minmax", alphas=(0.4,))
    numbers = outcome.evaluation.quality.numbers
    assert numbers["auroc_miss"] == numbers["auroc_miss_vote"]
    print_table(outcome.evaluation)
    shown = " ".join(capsys.readouterr().out.split())
    assert "the uncertainty 'vote'" in shown
    assert ("better than chance" in shown) == (numbers["auroc_miss"] < 0.55)
    answer = rcir.load(outcome.folder).retrieve(outcome.splits.data.test.images[3], 0.4, 0.1)
    assert answer.uncertainty == pytest.approx(
        outcome.splits.test.results.uncertainty[3], rel=1e-4, abs=1e-6
    )
