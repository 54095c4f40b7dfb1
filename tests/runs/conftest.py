"""Calibrations of two trainings on the same queries."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from calibration import CalibrationConfig, calibrate
from rcir.cli import main
from rcir.index import IndexConfig
from rcir.registry.logged_model import log_calibration, make_image_example
from rcir.retrieval.retriever import Retriever
from rcir.tracking import start_run
from tests.training.conftest import skip_figures
from training import train

BRUTE = IndexConfig("tests.index.brute:BruteIndex", {"block": 50})


@pytest.fixture(scope="session")
def calibrations(trained, tiny, tracking_uri, tmp_path_factory):
    """The folders of three calibrations, to be read only: of a training, of a smaller one, and of
    the first one with other options.
    """
    folder = tmp_path_factory.mktemp("calibrations")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("calibration.pipeline.draw_figures", lambda *_: {})
        skip_figures(patch)
        config = tiny("other", seed=4)
        other = train(replace(config, epochs=1, encoder=replace(config.encoder, dim=4)))
        changed = {"score_function": "constant", "depth": 150, "index": BRUTE}
        for name, run, options in (
            *(("one", trained, {}), ("two", other, {}), ("three", trained, changed)),
        ):
            output = str(folder / name)
            options = {"score_function": "quantile", "alphas": (0.3, 0.4)} | options
            calibrate(CalibrationConfig(str(run.path), output, **options))
    return [folder / name for name in ("one", "two", "three")]


@pytest.fixture
def copies(calibrations, tmp_path, monkeypatch):
    """Copies of these folders that a test may change, without a run in MLflow."""
    monkeypatch.setenv("RCIR_TRUST_CODE", "1")
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in calibrations]
    for folder in folders:
        retriever = Retriever.load(folder / "retriever")
        del retriever.origin["calibration"]
        retriever.save(folder / "retriever")
    return folders


@pytest.fixture
def tracked_copies(copies, splits, new_store, tmp_path, monkeypatch):
    """Two of these copies, each with a run and a model in a store of the test."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_store(tmp_path / "mlflow.db"))
    for folder in copies[:2]:
        run = start_run(folder.name, {})
        retriever = Retriever.load(folder / "retriever")
        retriever.origin["calibration"] = run.id
        retriever.save(folder / "retriever")
        log_calibration(run, folder, retriever, make_image_example(splits.test.images[0]))
        run.end("FINISHED")
    return copies[:2]


@pytest.fixture
def compare(capsys):
    """`rcir compare`: its screen, its JSON, and the one line with which it refuses."""

    def screen(*arguments):
        assert main(["compare", *map(str, arguments)]) == 0
        return capsys.readouterr().out

    def refused(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["compare", *map(str, arguments)])
        assert stop.value.code == 1
        output = capsys.readouterr()
        assert output.out == ""
        (line,) = output.err.splitlines()
        return line

    def results(*arguments):
        return json.loads(screen(*arguments, "--json"))

    return SimpleNamespace(screen=screen, json=results, refused=refused)
