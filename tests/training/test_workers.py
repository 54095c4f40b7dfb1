"""Training on Ray workers gives what training in this process gives."""

from collections import Counter

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from rcir.data import DataConfig, load_splits
from rcir.errors import InvalidData
from rcir.mining import MiningConfig
from training import loop, train

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]

# Nothing divides by two workers: neither 301 images, whose embeddings they share, nor batches.
PARTS = {"train": 301, "validation": 100, "gallery": 100, "adapter": 100, "test": 100}
DATA = DataConfig("digits", options={**PARTS, "calibration": 100})


def history(run, name):
    metrics = MlflowClient(run.tracking_uri).get_metric_history(run.mlflow_run, name)
    return [metric.value for metric in sorted(metrics, key=lambda metric: metric.step)]


def test_two_workers_take_the_steps_of_one_process(tiny):
    alone, together = (
        train(tiny(f"{workers}-workers", epochs=2, batch=33, data=DATA, num_workers=workers))
        for workers in (0, 2)
    )
    assert history(together, "tuples") == history(alone, "tuples")
    np.testing.assert_allclose(history(together, "loss"), history(alone, "loss"), rtol=1e-3)
    # Of 100 validation images, rounding may exchange the nearest ones of a few.
    for name in ("validation/recall_at_1", "validation/auroc_miss"):
        np.testing.assert_allclose(history(together, name), history(alone, name), atol=0.025)
    # Adam's steps hardly depend on the scale of a gradient, but its moments do: these after the
    # first epoch, before rounding exchanges a negative for one that is as near.
    for name in ("epoch-0002/model.safetensors", "epoch-0001/optimizer.safetensors"):
        file = f"checkpoints/{name}"
        expected, found = load_file(alone.path / file), load_file(together.path / file)
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            assert (found[key] - values).norm() <= 1e-2 * values.norm(), (name, key)


def test_a_worker_without_a_tuple_in_a_batch_waits_for_the_other(tiny):
    """A share is three images: a tuple needs two of them to match, and the third not to."""
    data = DataConfig("digits", options={**PARTS, "calibration": 100, "train": 240})
    mining = MiningConfig("random", "hardest", count=1, scope="batch")
    config = tiny("shares", epochs=2, batch=6, data=data, mining=mining, num_workers=2)
    labels = load_splits(data).train.labels
    kinds, expected = Counter(), []
    for epoch in (1, 2):
        generator = torch.Generator().manual_seed(loop._seed(config, epoch, rank=-1))
        order = torch.randperm(240, generator=generator).numpy()
        batches = [labels[order[start : start + 6]] for start in range(0, 240, 6)]
        found = [[len(set(batch[rank::2])) == 2 for rank in (0, 1)] for batch in batches]
        kinds.update(sum(shares) for shares in found)
        expected.append(2 * np.sum(found))
    assert kinds[0] > 0, "batches without a tuple on any worker"
    assert kinds[1] > 0, "batches with tuples on one worker"
    run = train(config)
    assert run.encoder().config.method == "btl"
    assert np.isfinite(history(run, "loss")).all()
    assert history(run, "tuples") == expected


def test_what_a_worker_raises_on_purpose_arrives_as_itself(tiny):
    lonely = DataConfig("digits", options={**PARTS, "train": 1})
    with pytest.raises(InvalidData, match="no anchor has a positive"):
        train(tiny(epochs=1, data=lonely, num_workers=2))
