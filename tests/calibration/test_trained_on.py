"""A folder of pictures that changes between training and calibration."""

import shutil

import numpy as np
import pytest
from PIL import Image

from calibration import CalibrationConfig, EvaluationConfig, calibrate, evaluate_retriever
from rcir.data import DataConfig
from rcir.encoders import EncoderConfig
from rcir.errors import InvalidData
from rcir.runs.folder import TrainedOn
from tests.training.helpers import Stop
from training import train

CLASSES = "fghijklm"  # of which g, i, l and m train; with a, b, c and d: a, b, d, i, l and m


def write(folder, names, seed=0):
    """Twelve pictures of each class, all different."""
    rng = np.random.default_rng(seed)
    for name in names:
        (folder / name).mkdir(parents=True)
        shade = rng.integers(0, 256, (8, 16))
        for number in range(12):
            pixels = np.clip(shade + rng.integers(-60, 60, (8, 16)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


@pytest.fixture(scope="module")
def grown(tiny, tracking_uri, tmp_path_factory):
    """A run on a folder of eight classes, and the folder."""
    folder = tmp_path_factory.mktemp("grown")
    write(folder / "photos", CLASSES)
    data = DataConfig("folder", root=str(folder), options={"path": "photos"})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run = train(tiny("grown", epochs=1, data=data, encoder=EncoderConfig(dim=4)))
    return run, folder / "photos"


@pytest.fixture
def photos(grown):
    """The folder; what a test changes in it is undone."""
    folder = grown[1]
    kept = shutil.copytree(folder, folder.with_name("kept"))
    yield folder
    shutil.rmtree(folder)
    kept.rename(folder)


def calibrated(run):
    return calibrate(CalibrationConfig(str(run.path), "out", "constant", depth=20, alphas=(0.5,)))


@pytest.mark.usefixtures("no_figures", "photos")
def test_a_folder_that_is_as_it_was_calibrates_all_of_its_queries(grown, capsys):
    outcome = calibrated(grown[0])
    assert outcome.evaluation.n_calibration == len(outcome.splits.data.calibration) == 7
    assert "left out" not in capsys.readouterr().out


@pytest.mark.usefixtures("never_embedded")
def test_classes_of_queries_that_trained_are_refused_by_name(grown, photos):
    """Half of the names train: with four more of them, g does no more."""
    write(photos, "abcd", seed=1)
    with pytest.raises(InvalidData, match=r"\(g\)"):
        calibrated(grown[0])


@pytest.mark.usefixtures("never_embedded")
def test_queries_that_trained_are_refused_by_name(grown, photos):
    """The pictures of a training class now lie in a class of queries."""
    shutil.rmtree(photos / "k")
    (photos / "g").rename(photos / "k")
    write(photos, "g", seed=2)
    with pytest.raises(InvalidData, match=r"\(k/\d+\.png"):
        calibrated(grown[0])


@pytest.mark.usefixtures("no_figures")
def test_duplicates_of_queries_are_left_out_and_counted(grown, photos, capsys):
    """Pictures of classes that are asked about are in two others of these too."""
    before = calibrated(grown[0]).splits.data
    for name in before.calibration.ids:
        for kind in "kh":
            shutil.copy(photos / name, photos / kind / f"copy-{name.replace('/', '-')}")
    capsys.readouterr()
    outcome = calibrated(grown[0])
    line = next(line for line in capsys.readouterr().out.splitlines() if "left out" in line)
    assert line.startswith("left out as duplicates of other images: ")
    measured = evaluate_retriever(EvaluationConfig(str(outcome.folder), "again", (0.5,)))
    assert line in capsys.readouterr().out
    assert measured.evaluation.rows == outcome.evaluation.rows
    parts = (outcome.splits.data.gallery, outcome.splits.data.tuning)
    contents = [{path.read_bytes() for path in part.images} for part in parts]
    asked = [
        path.read_bytes()
        for part in (outcome.splits.data.calibration, outcome.splits.data.test)
        for path in part.images
    ]
    assert len(asked) == len({*asked})
    assert {*asked}.isdisjoint(set.union(*contents))


def test_a_run_that_goes_on_is_trained_on_what_the_folder_held_before(
    grown, photos, tiny, monkeypatch
):
    data = DataConfig("folder", root=str(photos.parent), options={"path": "photos"})
    config = tiny("first", epochs=2, data=data, encoder=EncoderConfig(dim=4))
    with pytest.raises(SystemExit):
        train(config, callback=Stop(1))
    before = TrainedOn.read(config.folder)
    assert (before.classes, before.zero_shot) == ([*"gilm"], True)
    write(photos, "abcd", seed=1)
    second = train(config)
    after = TrainedOn.read(second.path)
    assert (after.classes, after.zero_shot) == ([*"abdgilm"], True)
    assert np.isin(before.images, after.images).all()
    assert len(after.images) == 7 * 12
    with pytest.raises(InvalidData, match=r"\(g\)"):
        calibrated(second)
