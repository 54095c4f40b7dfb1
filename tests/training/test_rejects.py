"""Trainings and calibrations on a folder with images that cannot be read."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from calibration import CalibrationConfig, EvaluationConfig, calibrate, evaluate_retriever
from rcir import Retriever
from rcir.data import DataConfig, load_splits
from rcir.data.rejects import read_rejects
from rcir.encoders import EncoderConfig
from rcir.errors import InvalidImage
from rcir.runs.folder import TrainedOn, read_run
from training import train

CLASSES, EACH = "abcdefgh", 12


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of twelve pictures of each class, two of them unreadable in every split."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name in CLASSES:
        (folder / name).mkdir()
        shade = rng.integers(0, 256, (8, 16))
        for number in range(EACH):
            pixels = np.clip(shade + rng.integers(-60, 60, (8, 16)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    splits = vars(load_splits(data_of(folder)))
    bad = {part: list(images.ids[:2]) for part, images in splits.items()}
    for number, name in enumerate(sorted(name for names in bad.values() for name in names)):
        path = folder / name
        path.write_bytes(path.read_bytes()[:40] if number % 2 else b"no picture")
    return folder, bad


def data_of(folder):
    return DataConfig("folder", root=str(folder), options={"path": "."})


@pytest.fixture
def config(tiny, photos, tmp_path):
    data, encoder = data_of(photos[0]), EncoderConfig(dim=4)
    return tiny("rejects", epochs=1, data=data, encoder=encoder, storage=str(tmp_path / "runs"))


def test_all_unreadable_images_of_a_training_are_listed_before_it_begins(config, photos, capsys):
    bad = {*photos[1]["train"], *photos[1]["validation"]}
    for max_rejects in (0, 3, 0.01):
        with pytest.raises(InvalidImage, match=r"4 of .*--max-rejects"):
            train(replace(config, max_rejects=max_rejects))
        assert read_rejects(config.folder / "rejects.csv").keys() == bad
    assert read_run(config.folder) is None
    assert "epoch" not in capsys.readouterr().out


@pytest.mark.usefixtures("no_figures")
def test_tolerated_images_are_left_out_of_training_calibration_and_evaluation(
    config, photos, tmp_path, capsys
):
    bad = photos[1]
    run = train(replace(config, max_rejects=4))
    assert run.finished
    assert "4 of" in capsys.readouterr().out
    splits = load_splits(config.data)
    n_trained = len(splits.train) + len(splits.validation)
    assert len(TrainedOn.read(run.path).images) == n_trained - 4

    options = {"score_function": "constant", "depth": 20, "alphas": (0.5,)}
    queries = [name for part in ("gallery", "tuning", "calibration", "test") for name in bad[part]]
    with pytest.raises(InvalidImage, match=r"8 of .*--max-rejects"):
        calibrate(CalibrationConfig(str(run.path), "out", **options))
    assert [*read_rejects(tmp_path / "out" / "calibration-rejects.csv")] == queries
    calibrated = calibrate(CalibrationConfig(str(run.path), max_rejects=0.2, **options))
    assert [*read_rejects(run.path / "calibration-rejects.csv")] == queries
    assert len(read_rejects(run.path / "rejects.csv")) == 4  # the training's own table
    retriever = Retriever.load(run.path / "retriever")
    assert set(retriever.ids) == set(splits.gallery.ids) - set(bad["gallery"])
    n_calibration, n_test = len(splits.calibration) - 2, len(splits.test) - 2
    assert calibrated.evaluation.n_calibration == n_calibration
    assert calibrated.evaluation.n_test == n_test
    outcome = evaluate_retriever(EvaluationConfig(str(run.path / "retriever"), alphas=(0.5,)))
    assert outcome.evaluation.n_test == n_test


def test_members_of_an_ensemble_leave_out_what_the_ensemble_found(config, photos, monkeypatch):
    import training.checks

    checks = []

    def counted(*arguments):
        checks.append(1)
        return original(*arguments)

    original = training.checks.find_unreadable
    monkeypatch.setattr(training.checks, "find_unreadable", counted)
    encoder = EncoderConfig("deep-ensemble", dim=4, options={"members": 2})
    run = train(replace(config, name="ensemble", encoder=encoder, loss={}, max_rejects=4))
    assert run.finished
    assert len(checks) == 1
    tables = list(run.path.glob("members/*/rejects.csv"))
    assert len(tables) == 2
    assert all(len(read_rejects(table)) == 4 for table in tables)


def test_a_continued_run_leaves_out_what_became_unreadable_meanwhile(config, tmp_path):
    names = [f"{name}/{number}.png" for name in CLASSES for number in range(EACH)]
    rng = np.random.default_rng(1)
    for name in names:
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 16), dtype=np.uint8)).save(path)
    config = replace(config, name="continued", data=data_of(tmp_path / "own"), epochs=2)

    class Stopping:
        def after_report(self, run_context, metrics, checkpoint):
            raise SystemExit(0)

    with pytest.raises(SystemExit):
        train(config, callback=Stopping())
    (name,) = load_splits(config.data).train.ids[:1]
    (tmp_path / "own" / name).write_bytes(b"no picture")
    with pytest.raises(InvalidImage, match="1 of"):
        train(config)
    run = train(replace(config, max_rejects=1))
    assert run.finished
    assert [*read_rejects(run.path / "rejects.csv")] == [name]
