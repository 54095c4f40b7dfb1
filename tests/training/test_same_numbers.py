"""Trainings give the numbers they gave before methods were one file each, recorded at that time."""

import json

import pytest
from safetensors.torch import load_file

from rcir.data import DataConfig
from rcir.encoders import EncoderConfig
from rcir.mining import MiningConfig
from training import TrainingConfig, train

PARTS = {"train": 120, "validation": 60, "gallery": 50, "tuning": 20, "test": 20}
DATA = DataConfig("digits", options={**PARTS, "calibration": 20})
# Options, losses of the epochs of each run, sums of absolute weights after the last one.
RECORDED = {
    "deterministic": (
        {},
        {"margin": 0.3, "form": "unsquared"},
        [0.4273615777492523, 0.286988228559494],
        [711.9037301267326],
    ),
    "mc-dropout": (
        {"passes": 3, "dropout": 0.2},
        {},
        [0.17354585230350494, 0.10332134366035461],
        [712.6948713228958],
    ),
    "deep-ensemble": (
        {"members": 2},
        {},
        [0.13283094763755798, 0.10539557039737701, 0.1614031046628952, 0.10363834351301193],
        [709.2951685558237, 716.6072404634817],
    ),
    "btl": (
        {"variance_hidden": 16},
        {"margin": 0.05, "kl_scale": 1e-4},
        [1.620672583580017, 2.2070987224578857],
        [943.2749648663544],
    ),
}


@pytest.mark.parametrize("method", RECORDED)
def test_the_same_seed_gives_the_same_numbers(method, tmp_path):
    options, loss, losses, weights = RECORDED[method]
    run = train(
        TrainingConfig(
            method,
            storage=str(tmp_path),
            **{"seed": 3, "epochs": 2, "batch": 32, "micro_batches": 2, "threads": 1, "data": DATA},
            encoder=EncoderConfig(method, dim=8, options=options),
            loss=loss,
            mining=MiningConfig(scope="batch" if method == "deterministic" else "epoch"),
        )
    )
    found, sums = [], []
    for path in sorted(run.path.rglob("metrics.json")):
        found += [epoch["loss"] for epoch in json.loads(path.read_text()).values()]
        last = load_file(path.parent / "checkpoints" / "epoch-0002" / "model.safetensors")
        sums.append(sum(values.double().abs().sum().item() for values in last.values()))
    assert found == pytest.approx(losses, rel=1e-6)
    assert sums == pytest.approx(weights, rel=1e-7)
