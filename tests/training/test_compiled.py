"""A compiled encoder trains as the one it was made of."""

import shutil

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from rcir.encoders import EncoderConfig
from rcir.mining import MiningConfig
from training import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("g++") is None and shutil.which("clang++") is None,
        reason="torch.compile needs a C++ compiler",
    ),
]


def test_compiling_changes_the_time_and_not_the_losses(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    options = {
        **{"epochs": 2, "batch": 50, "micro_batches": 2},
        "mining": MiningConfig("nearest", "hardest", scope="batch"),
        "encoder": EncoderConfig("deterministic", dim=8),
    }
    runs = [train(tiny(f"compile-{on}", compile=on, **options)) for on in (False, True)]
    assert list(tmp_path.glob("compiled/**/*.so"))
    eager, compiled = (
        [metric.value for metric in client.get_metric_history(run.mlflow_run, "loss")]
        for run in runs
        for client in [MlflowClient(run.tracking_uri)]
    )
    np.testing.assert_allclose(compiled, eager, rtol=1e-3)
    # The same names, without what torch.compile wraps them in.
    theirs, ours = (load_file(run.path / "encoder.safetensors") for run in runs)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values, rtol=0.05, atol=1e-3)
