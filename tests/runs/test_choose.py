"""`rcir compare --choose`: the best of several calibrated retrievers, and what it says then."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from mlflow import MlflowClient
from scipy.stats import binom

import rcir
from calibration import CalibrationConfig, EvaluationConfig, calibrate, evaluate_retriever
from rcir.cli import main
from rcir.data import DataConfig, load_splits
from rcir.errors import CorruptRetriever, InvalidConfig, RiskUnattainable
from rcir.retrieval.storage import load, save
from rcir.runs.compare import LOOKED
from rcir.runs.results import TEST, RunResults
from training import train

ALPHA, DELTA = 0.3, 0.1


@pytest.fixture(scope="module")
def originals(tiny, tracking_uri, tmp_path_factory):
    """Two trainings, one of them with two score functions, calibrated on the same queries."""
    folder = tmp_path_factory.mktemp("chosen")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        patch.setattr("calibration.drawing.draw_figures", lambda *_: {})
        config = tiny("larger", seed=4)
        larger = train(config)
        other = train(replace(config, name="other", epochs=1))
        runs = {"one": larger, "two": other, "three": larger}
        for name, run in runs.items():
            score_function = "constant" if name == "three" else "quantile"
            calibrate(
                CalibrationConfig(str(run.path), str(folder / name), score_function=score_function)
            )
    return folder


@pytest.fixture
def calibrated(originals, tmp_path, tracking_uri, monkeypatch):
    """Copies of them that a test may change."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
    names = ("one", "two", "three")
    return [shutil.copytree(originals / name, tmp_path / name) for name in names]


def shown(capsys, *arguments):
    assert main(["compare", *map(str, arguments), "--alphas", str(ALPHA), "0.4"]) == 0
    return capsys.readouterr().out


def chosen(capsys, *folders):
    return json.loads(shown(capsys, "--choose", *folders, "--json"))


def refused(capsys, *folders, alphas=("0.3",)):
    """The one line that the command ends with."""
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--choose", *map(str, folders), "--alphas", *alphas])
    assert stop.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def counted(folder, among):
    """The mean size on the test queries, with misses counted by SciPy's binomial distribution."""
    (part,) = RunResults.read(folder / TEST).parts
    n = len(part.scores)
    allowed = np.count_nonzero(binom.cdf(np.arange(n), n, ALPHA) <= DELTA / among) - 1
    threshold = np.sort(part.scores)[::-1][allowed]
    # The tolerance counts as paid.
    return np.mean(np.sum(part.candidate_scores <= threshold * (1 + 1e-3), axis=1))


def test_the_smallest_at_delta_over_k_is_chosen_and_marked(calibrated, capsys):
    sizes = [counted(folder, 3) for folder in calibrated]
    found = chosen(capsys, *calibrated)
    best = calibrated[int(np.argmin(sizes))]
    assert found["delta"] == pytest.approx(DELTA / 3)
    assert [run["sizes"]["0.3"]["value"] for run in found["runs"]] == pytest.approx(sizes)
    assert found["choice"]["run"] == best.name
    assert found["choice"]["retriever"] == str(best / "retriever")
    assert found["choice"]["mean_size"] == pytest.approx(min(sizes))
    assert found["choice"]["guarantee"]["chosen_among"] == 3
    assert found["choice"]["guarantee"]["delta"] == DELTA
    marked = {folder: load(folder / "retriever").chosen_among for folder in calibrated}
    assert marked == {folder: 3 if folder == best else 1 for folder in calibrated}


def test_the_chosen_one_answers_as_at_delta_over_k_and_says_so(calibrated, splits, capsys):
    text = shown(capsys, "--choose", *calibrated)
    (folder,) = (f for f in calibrated if load(f / "retriever").chosen_among == 3)
    retriever = load(folder / "retriever")
    answer = retriever.retrieve(splits.test.images[0], ALPHA, DELTA)
    sentence = str(answer.guarantee)
    assert sentence.startswith(
        "Chosen among 3 retrievers after looking: with probability at least 0.9, a true match is "
        "missing from at most 0.3 of the sets returned to queries like the 300 calibration queries"
    )
    assert f"{folder.name} has the smallest sets. {sentence}" in text
    assert "certified at delta = 0.03333" in text
    assert "it certifies every request at delta / 3 from now on" in text
    assert LOOKED not in text
    retriever.chosen_among = 1
    alone = retriever.retrieve(splits.test.images[0], ALPHA, DELTA / 3)
    assert alone.ids == answer.ids
    assert alone.guarantee.threshold == answer.guarantee.threshold
    assert (alone.guarantee.delta, answer.guarantee.delta) == (DELTA / 3, DELTA)


def test_the_copy_in_mlflow_is_marked_too(calibrated, tracking_uri, capsys):
    assert chosen(capsys, *calibrated[:2])["choice"]["marked_in_mlflow"]
    (folder,) = (f for f in calibrated if load(f / "retriever").chosen_among == 2)
    run = load(folder / "retriever").origin["calibration"]
    MlflowClient(tracking_uri).get_run(run)
    assert rcir.load(f"runs:/{run}/retriever").chosen_among == 2


def test_where_mlflow_does_not_know_the_run_copies_are_said_not_to_be_marked(calibrated, capsys):
    for folder in calibrated:
        retriever = load(folder / "retriever")
        retriever.origin = {}
        save(retriever, folder / "retriever")
    assert "is marked (copies made before are not)" in shown(capsys, "--choose", *calibrated)


def test_one_that_was_chosen_before_counts_as_all_that_it_was_chosen_among(calibrated, capsys):
    """Chosen among 2 and among 5, and one that was not: 8 certificates hold together."""
    for folder, among in zip(calibrated, (2, 5, 1), strict=True):
        retriever = load(folder / "retriever")
        retriever.chosen_among = among
        save(retriever, folder / "retriever")
    found = chosen(capsys, *calibrated)
    assert found["choice"]["guarantee"]["chosen_among"] == 8
    assert found["choice"]["mean_size"] == pytest.approx(
        min(counted(folder, 8) for folder in calibrated)
    )


def test_a_comparison_without_a_choice_warns_and_marks_nothing(calibrated, capsys):
    assert LOOKED in shown(capsys, *calibrated)
    assert LOOKED not in shown(capsys, calibrated[0])
    assert {load(folder / "retriever").chosen_among for folder in calibrated} == {1}


def test_an_evaluation_of_the_chosen_one_measures_the_sets_that_it_returns(
    calibrated, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("calibration.drawing.draw_figures", lambda *_: {})
    size = chosen(capsys, *calibrated)["choice"]["mean_size"]
    (folder,) = (f for f in calibrated if load(f / "retriever").chosen_among == 3)
    config = EvaluationConfig(str(folder / "retriever"), str(tmp_path / "again"), (ALPHA,), DELTA)
    (row,) = evaluate_retriever(config).evaluation.rows
    assert row.mean_size == pytest.approx(size)
    assert row.delta == pytest.approx(DELTA / 3)


def test_what_cannot_be_chosen_is_one_line_and_marks_nothing(calibrated, trained, tmp_path, capsys):
    one, two, three = calibrated
    assert "two or more calibrations, each named once" in refused(capsys, one)
    assert "two or more calibrations, each named once" in refused(capsys, one, two, one)
    assert f"no calibrated retriever in {trained.path}" in refused(capsys, one, trained.path)
    assert "alpha is 2.0" in refused(capsys, one, two, alphas=["2"])
    unmet = refused(capsys, one, two, alphas=["0.001", "0.3"])
    assert "chosen among 2 retrievers, each certified at delta / 2: alpha = 0.001" in unmet
    assert "ask for alpha >= " in unmet
    measured = RunResults.read(two / TEST)
    replace(measured, queries="others").write(two / TEST)
    assert "calibration or test queries differ" in refused(capsys, one, two)
    shutil.copy(one / TEST, two / TEST)
    assert "is not of the retriever there: calibrate again" in refused(capsys, one, two)
    retriever = load(three / "retriever")
    retriever.controllers[None].bound = "hoeffding"
    save(retriever, three / "retriever")
    assert "calibrate with --bound binomial" in refused(capsys, one, three)
    grown = load(one / "retriever")
    grown.extend_calibration(
        grown.search_labelled(load_splits(DataConfig(**grown.origin["data"])).test), recurring=True
    )
    save(grown, one / "retriever")
    assert f"queries were added to {one / 'retriever'} one by one" in refused(capsys, one, three)
    assert {load(folder / "retriever").chosen_among for folder in calibrated} == {1}


def test_how_many_it_was_chosen_among_survives_and_calibrating_anew_ends_it(folder, splits):
    retriever = load(folder)
    assert retriever.chosen_among == 1
    retriever.chosen_among = 12
    again = load(save(retriever, folder))
    assert again.chosen_among == 12
    with pytest.raises(InvalidConfig, match="chosen among 12: an average"):
        again.retrieve(splits.test.images[0], 0.5, None)
    with pytest.raises(RiskUnattainable, match="chosen among 12 retrievers"):
        again.retrieve(splits.test.images[0], 0.001, 0.1)
    again.calibrate(
        again.search_labelled(splits.tuning), again.search_labelled(splits.calibration), "constant"
    )
    assert again.chosen_among == 1
    retriever.chosen_among = 0
    save(retriever, folder)
    with pytest.raises(CorruptRetriever, match="chosen among 0; it is a number of retrievers"):
        load(folder)
