"""Sweeps that are refused before anything is started or written."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import tuning
from rcir.cli import main
from rcir.config import parse
from rcir.data import DataConfig
from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel
from training import TrainingConfig
from training.config import override
from tuning import TuningConfig, sweep

BASE = TrainingConfig("base")
SPACE = {"optimizer.lr": {"choice": [1e-3, 1e-4]}}
GRID = {"loss.margin": {"grid": [0.1]}}
ASHA = {"scheduler": "asha"}


@pytest.mark.parametrize(
    ("training", "changes", "message"),
    [
        *(({}, {name: 0}, name) for name in ("trials", "seeds", "interval")),
        ({}, {"reduction": 1}, "reduction"),
        ({}, {"seed": -1}, "seed"),
        ({}, {"finalists": -1}, "finalists"),
        ({}, {"finalists": 2, "seeds": 3}, "final_seeds"),
        ({}, {"space": {}}, "space"),
        *(({"use_gpu": True}, {"gpus_per_trial": share}, "gpus_per_trial") for share in (0.0, 2.0)),
        ({}, {"gpus_per_trial": 0.5}, "use_gpu"),
        ({"use_gpu": True, "num_workers": 1}, {"gpus_per_trial": 0.5}, "num_workers"),
        ({}, {"search": "tpe", "space": GRID}, "grid"),
        ({}, {**ASHA, "interval": 8}, "interval"),  # of 8 epochs
        ({}, {**ASHA, "space": {"epochs": {"choice": [4, 8]}}}, "epochs"),
        ({"encoder.method": "deep-ensemble"}, ASHA, "ensemble"),
        (
            {},
            {**ASHA, "space": {"encoder.method": {"choice": ["btl", "deep-ensemble"]}}},
            "ensemble",
        ),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(training, changes, message):
    with pytest.raises(InvalidConfig, match=message):
        TuningConfig(override(BASE, training), **({"space": SPACE} | changes))


@pytest.mark.parametrize("name", ["alpha", "delta"])
def test_the_risk_level_and_delta_are_checked(name):
    with pytest.raises(InvalidRiskLevel, match=name):
        TuningConfig(BASE, SPACE, **{name: 1.0})


def test_sweeps_that_make_sense_are_accepted():
    TuningConfig(replace(BASE, use_gpu=True), SPACE, gpus_per_trial=0.25)
    with pytest.raises(InvalidConfig, match="storage"):
        TuningConfig(replace(BASE, storage="s3://bucket/runs"), SPACE)
    TuningConfig(BASE, SPACE, **ASHA, interval=7)
    TuningConfig(override(BASE, {"encoder.method": "deep-ensemble"}), SPACE, seeds=2)


@pytest.fixture
def nothing_starts(monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("it starts something")

    monkeypatch.setattr(sys.modules["tuning.run"], "join_cluster", start)
    monkeypatch.setattr(sys.modules["tuning.run"], "start_sweep", start)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(("validation", "alpha"), [(80, 0.1), (4, 0.5)])
def test_too_few_validation_images_to_certify_anything_are_refused(
    tmp_path, tiny, validation, alpha
):
    """At delta 0.1, 22 are the fewest that certify 0.1: 0.9^22 < 0.1 < 0.9^21."""
    data = DataConfig("digits", options={"train": 100, "validation": validation})
    config = TuningConfig(tiny("few", data=data), SPACE, alpha=alpha)
    with pytest.raises(InvalidData, match=f"{validation} validation images"):
        sweep(config)
    assert list(tmp_path.iterdir()) == []
    data = DataConfig("digits", options={"train": 100, "validation": 120})
    with pytest.raises(AssertionError, match="starts"):
        sweep(TuningConfig(tiny("enough", data=data), SPACE))


@pytest.mark.usefixtures("nothing_starts")
def test_draws_that_do_not_fit_together_are_refused(tmp_path, tiny):
    """Each of them would with the other options as they are."""
    space = {"mining.num_negatives": {"grid": [2, 8]}, "mining.pool": {"grid": [10, 5]}}
    with pytest.raises(InvalidConfig, match=r"mining\.num_negatives 8, mining\.pool 5"):
        sweep(TuningConfig(tiny("draws"), space))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({}, 1, "space"),
        ({"space": {"epochs": {"uniform": "a"}}}, 2, "space"),
        ({"space": SPACE, "training": {"epochs": 3}}, 2, "name"),
    ],
)
def test_an_error_in_a_file_is_one_line(tmp_path, capsys, changes, status, message):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({"training": {"name": "s", "epochs": 4}, "space": {}} | changes))
    with pytest.raises(SystemExit) as stop:
        main(["tune", "--config", str(path)])
    error = capsys.readouterr().err
    assert stop.value.code == status
    assert message in error.partition("error:")[2]
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


def test_the_published_sweep_can_be_parsed():
    path = Path(tuning.__file__).parents[1] / "configs" / "tune-digits-btl.yaml"
    config = parse(TuningConfig, ["--config", str(path)], "prog")
    assert config.space["encoder.dim"] == {"choice": [16, 32, 64]}
