"""What a training configuration refuses."""

import math

import pytest

from rcir.data import DataConfig
from rcir.errors import InvalidConfig
from training import OptimizerConfig, TrainingConfig


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("seed", -1), ("epochs", 0), ("batch", 0), ("num_workers", -1), ("patience", -1)),
        *(("min_delta", -0.1), ("min_delta", 1.0), ("min_delta", math.nan), ("max_failures", -1)),
    ],
)
def test_counts_below_their_least_are_refused_by_name(option, value):
    with pytest.raises(InvalidConfig, match=f"{option} is {value}"):
        TrainingConfig("run", **{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("lr", value) for value in (0.0, -1.0, math.nan, math.inf)),
        *(("weight_decay", value) for value in (-0.1, math.nan)),
        *(("gamma", value) for value in (0.0, 1.1, math.nan)),
    ],
)
def test_an_optimizer_that_cannot_learn_is_refused_by_name(option, value):
    with pytest.raises(InvalidConfig, match=rf"optimizer\.{option} is {value}"):
        OptimizerConfig(**{option: value})


def test_every_worker_needs_a_tuple_of_each_batch():
    with pytest.raises(
        InvalidConfig, match="batch of 3 tuples in 4 micro-batches does not fill 4 workers"
    ):
        TrainingConfig("run", batch=3, num_workers=4)
    assert TrainingConfig("run", batch=4, num_workers=4).n_micro_batches == 4


def test_every_worker_needs_a_part_of_each_batch():
    with pytest.raises(InvalidConfig, match="in 2 micro-batches does not fill 3 workers"):
        TrainingConfig("run", micro_batches=2, num_workers=(1, 3))
    with pytest.raises(InvalidConfig, match="of 8 tuples in 9 micro-batches"):
        TrainingConfig("run", batch=8, micro_batches=9)
    assert TrainingConfig("run", num_workers=(1, 3)).n_micro_batches == 3
    assert TrainingConfig("run", micro_batches=6, num_workers=2).n_micro_batches == 6


@pytest.mark.parametrize("range_", [(0, 2), (3, 2), (1, 2, 3)])
def test_a_range_of_workers_goes_up(range_):
    with pytest.raises(InvalidConfig, match=r"num_workers is .*give one number, or the fewest"):
        TrainingConfig("run", num_workers=range_)


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", ".hidden"])
def test_a_name_that_leaves_the_storage_folder_is_refused(name):
    with pytest.raises(InvalidConfig, match="name is"):
        TrainingConfig(name)


def test_the_seed_of_the_splits_is_checked_too():
    with pytest.raises(InvalidConfig, match=r"data\.seed is -1"):
        DataConfig(seed=-1)
