"""Training on Ray workers gives what training in this process gives."""

import numpy as np
import pytest
from mlflow import MlflowClient
from safetensors.torch import load_file

from rcir.data import DataConfig
from rcir.errors import InvalidData
from training import train

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
    for name in ("loss", "validation/recall_at_1", "validation/auroc_miss"):
        np.testing.assert_allclose(history(together, name), history(alone, name), rtol=1e-3)
    # Adam's steps hardly depend on the scale of a gradient, but its moments do.
    for name in ("model.safetensors", "optimizer.safetensors"):
        file = f"checkpoints/epoch-0002/{name}"
        expected, found = load_file(alone.path / file), load_file(together.path / file)
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            assert (found[key] - values).norm() <= 1e-2 * values.norm(), (name, key)


def test_what_a_worker_raises_on_purpose_arrives_as_itself(tiny):
    lonely = DataConfig("digits", options={**PARTS, "train": 1})
    with pytest.raises(InvalidData, match="no anchor has a positive"):
        train(tiny(epochs=1, data=lonely, num_workers=2))
