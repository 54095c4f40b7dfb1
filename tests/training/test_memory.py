"""Micro-batches by a memory budget."""

import pytest
import torch

from rcir.data import DataConfig, Preprocessing
from rcir.encoders import EncoderConfig
from rcir.mining import MiningConfig
from training import train
from training.checks import within_memory
from training.config import OptimizerConfig, TrainingConfig, override

DIGITS = DataConfig("digits", options={"train": 96, "validation": 96})


def config_of(tmp_path, **options):
    encoder = EncoderConfig("deterministic", "resnet10", "avg", dim=8)
    preprocessing = Preprocessing((32, 32), 3)
    options = {"batch": 16, "epochs": 1, "freeze_batch_norm": "statistics"} | options
    return TrainingConfig(
        "run", str(tmp_path), data=DIGITS, encoder=encoder, preprocessing=preprocessing, **options
    )


def test_micro_batches_follow_from_the_budget(tmp_path):
    whole = within_memory(config_of(tmp_path))
    assert whole.micro_batches is None
    halves, quarters = (
        within_memory(config_of(tmp_path, memory_gib=gib)).micro_batches for gib in (0.02, 0.01)
    )
    assert 1 < halves < quarters <= 16
    assert quarters == pytest.approx(2 * halves, abs=1)
    assert within_memory(config_of(tmp_path, memory_gib=1e-6)).micro_batches == 16


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batches": 1},
        {"freeze_batch_norm": "nothing"},
        {"mining": MiningConfig(scope="batch")},
    ],
    ids=str,
)
def test_what_depends_on_micro_batches_keeps_their_number(tmp_path, options):
    config = config_of(tmp_path, memory_gib=1e-6, **options)
    assert within_memory(config) == config


def test_weights_do_not_depend_on_the_budget(tmp_path):
    options = {
        "optimizer": OptimizerConfig("sgd", lr=1e-3),  # Adam's first steps enlarge rounding
        "mining": MiningConfig(cache="sampled", sample=90, refresh=2),
    }
    many = config_of(tmp_path, memory_gib=0.02, **options)
    few = train(override(many, {"name": "few"}))
    one = train(override(config_of(tmp_path, **options), {"name": "one"}))
    assert few.config["micro_batches"] > one.config["micro_batches"] == 1
    first, second = few.encoder().state_dict(), one.encoder().state_dict()
    for name, weights in second.items():
        torch.testing.assert_close(first[name], weights, atol=1e-5, rtol=1e-3)
        assert weights.isfinite().all()
