"""A disk that takes no more while a checkpoint is written."""

import json
import resource

import pytest
import torch
from safetensors.torch import load_file

from rcir import tracking
from rcir.encoders import EncoderConfig
from rcir.errors import CheckpointFailed
from training import train
from training.history import History


def test_the_checkpoint_before_is_kept_and_training_continues_from_it(tiny, monkeypatch):
    # 1.5 MB of weights fit within the limit below, Adam's 3 MB do not.
    config = tiny("full", epochs=3, encoder=EncoderConfig(dim=400))
    whole = train(tiny("whole", epochs=3, encoder=EncoderConfig(dim=400)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    add = History.add

    def full_in_second(self, epoch, metrics):
        add(self, epoch, metrics)
        if epoch == 2:  # from here on, as the system sees it: no file may grow further
            resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))

    with monkeypatch.context() as patch:
        patch.setattr(History, "add", full_in_second)
        try:
            with pytest.raises(CheckpointFailed, match=r"epoch-0002 could not be written.*room"):
                train(config)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoints = whole.path.parent / "full" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["epoch-0001"]

    found = train(config)
    ours, theirs = (load_file(run.path / "encoder.safetensors") for run in (found, whole))
    assert all(torch.equal(ours[name], values) for name, values in theirs.items())


def test_metrics_that_cannot_be_written_down_are_no_other_error(tmp_path):
    history = History(tmp_path, tracking.start_run("full", {}))
    history.add(1, {"loss": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(CheckpointFailed, match=r"metrics\.json could not be written"):
            history.add(2, {"loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"1": {"loss": 1.0}}
