"""Sweeps that cannot be, refused before anything is started or written."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import tuning
from rcir.config import parse
from rcir.data import DataConfig
from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel
from training import TrainingConfig
from training.config import override
from tuning import TuningConfig, sweep
from tuning.__main__ import main

BASE = TrainingConfig("base")
SPACE = {"optimizer.lr": {"choice": [1e-3, 1e-4]}}
PBT = {"scheduler": "pbt"}
ENSEMBLE = {"encoder.method": "deep-ensemble"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 0}, "trials is 0; at least 1"),
        ({"seeds": 0}, "seeds is 0; at least 1"),
        ({"interval": 0}, "interval is 0; at least 1"),
        ({"reduction": 1}, "reduction is 1; at least 2"),
        ({"seed": -1}, "seed is -1"),
        ({"space": {}}, "space names no option"),
        ({"objectives": ()}, "objectives: give"),
        ({"objectives": ("recall_at_1",)}, "set search to tpe"),
        ({"objectives": ("recall_at_1", "recall_at_1")}, "objectives: give"),
        ({"gpus_per_trial": 0.0}, r"gpus_per_trial is 0\.0; it lies in \(0, 1\]"),
        ({"gpus_per_trial": 2.0}, r"gpus_per_trial is 2\.0; it lies"),
        ({"gpus_per_trial": 0.5}, "set training.use_gpu to true"),
        ({"search": "tpe", "space": {"loss.margin": {"grid": [0.1]}}}, "is a grid"),
        ({**PBT, "space": {"loss.margin": {"grid": [0.1]}}}, "is a grid"),
        ({"scheduler": "asha", "interval": 8}, "interval is 8 and training.epochs 8"),
        ({**PBT, "interval": 9}, "interval is 9 and training.epochs 8"),
        ({"scheduler": "asha", "space": {"epochs": {"choice": [4, 8]}}}, "space names epochs"),
        (
            {
                "scheduler": "asha",
                "space": {"encoder.method": {"choice": ["btl", "deep-ensemble"]}},
            },
            "an ensemble is measured when",
        ),
        ({**PBT, "trials": 1}, "2 trials at least"),
        ({**PBT, "seeds": 2}, "one seed"),
        ({**PBT, "search": "tpe"}, "search random"),
        ({**PBT, "space": {"encoder.dim": {"choice": [4, 8]}}}, r"encoder\.dim cannot be"),
        ({**PBT, "space": {**SPACE, "batch": {"choice": [8]}}}, "batch cannot be"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(InvalidConfig, match=message):
        TuningConfig(BASE, **({"space": SPACE} | changes))


@pytest.mark.parametrize(
    ("training", "changes", "message"),
    [
        ({"num_workers": 1}, PBT, "members of a population train without workers"),
        ({"num_workers": (1, 2)}, PBT, "members of a population train without workers"),
        ({"use_gpu": True, "num_workers": 1}, {"gpus_per_trial": 0.5}, "num_workers to 0"),
        (ENSEMBLE, {"scheduler": "asha"}, "an ensemble"),
        (ENSEMBLE, PBT, "an ensemble"),
    ],
)
def test_a_training_that_does_not_fit_the_sweep_is_refused(training, changes, message):
    with pytest.raises(InvalidConfig, match=message):
        TuningConfig(override(BASE, training), SPACE, **changes)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1])
def test_the_guarantee_that_decides_must_be_one(level):
    with pytest.raises(InvalidRiskLevel, match=f"alpha is {level}"):
        TuningConfig(BASE, SPACE, alpha=level)
    with pytest.raises(InvalidRiskLevel, match=f"delta is {level}"):
        TuningConfig(BASE, SPACE, delta=level)


def test_what_is_allowed_is_not_refused():
    shared = replace(BASE, use_gpu=True)
    assert TuningConfig(shared, SPACE, gpus_per_trial=0.25).gpus_per_trial == 0.25
    assert TuningConfig(BASE, SPACE, scheduler="asha", interval=7).interval == 7
    ensemble = override(BASE, ENSEMBLE)
    assert TuningConfig(ensemble, SPACE, seeds=2).seeds == 2
    space = {"mining.margin": {"uniform": [0.1, 0.2]}, "augmentation.occlusion": {"choice": [0.1]}}
    assert TuningConfig(BASE, SPACE | space, scheduler="pbt").trials == 4


@pytest.fixture
def nothing_starts(monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("it starts something")

    monkeypatch.setattr(sys.modules["tuning.sweep"], "join_cluster", start)
    monkeypatch.setattr(sys.modules["tuning.sweep"], "start_sweep", start)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(("validation", "alpha"), [(80, 0.1), (400, 0.01), (4, 0.5)])
def test_too_few_validation_images_to_certify_anything_are_refused(
    tmp_path, tiny, validation, alpha
):
    """At delta 0.1, 22 are the fewest that certify 0.1: 0.9^22 < 0.1 < 0.9^21."""
    data = DataConfig("digits", options={"train": 100, "validation": validation})
    config = TuningConfig(tiny("few", data=data), SPACE, alpha=alpha)
    with pytest.raises(InvalidData, match=f"{validation} validation images, of which a fold"):
        sweep(config)
    assert list(tmp_path.iterdir()) == []
    data = DataConfig("digits", options={"train": 100, "validation": 120})
    with pytest.raises(AssertionError, match="it starts something"):
        sweep(TuningConfig(tiny("enough", data=data), SPACE))


@pytest.mark.usefixtures("nothing_starts")
def test_draws_that_do_not_fit_together_are_refused(tmp_path, tiny):
    """Each of them would with the other options as they are."""
    space = {"mining.num_negatives": {"grid": [2, 8]}, "mining.pool": {"grid": [10, 5]}}
    with pytest.raises(
        InvalidConfig, match=r"mining\.num_negatives 8, mining\.pool 5: mining\.pool is 5"
    ):
        sweep(TuningConfig(tiny("draws"), space))
    assert list(tmp_path.iterdir()) == []


def written(folder, **changes):
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"training": {"name": "s", "epochs": 4}, "space": {}} | changes))
    return str(path)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({}, 1, "space names no option"),
        ({"space": {"epochs": {"choice": ["a"]}}}, 1, "epochs a"),
        ({"space": {"epochs": {"uniform": "a"}}}, 2, "space"),
        ({"space": {"epochs": 3}}, 2, "space"),
        ({"space": SPACE, "scheduler": "magic"}, 2, "scheduler"),
        ({"space": SPACE, "alpha": 1.5}, 1, "alpha is 1.5"),
        ({"space": SPACE, "training": {"name": "s", "epochs": 0}}, 1, "epochs is 0"),
        ({"space": SPACE, "training": {"epochs": 3}}, 2, "name"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_line(tmp_path, capsys, changes, status, message):
    with pytest.raises(SystemExit) as stop:
        main(["--config", written(tmp_path, **changes)])
    error = capsys.readouterr().err
    assert stop.value.code == status
    assert message in error.partition("error:")[2]
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


def test_the_sweep_that_is_published_can_be_parsed():
    folder = Path(tuning.__file__).parents[1] / "configs"
    config = parse(TuningConfig, ["--config", str(folder / "tune-digits-btl.yaml")], "prog", "")
    assert config.space["encoder.dim"] == {"choice": [16, 32, 64]}
    assert config.training.loss["kl_scale"] == 1e-5
