"""Training that stopped between two of its steps goes on from there, to the same weights."""

import json
import shutil

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from rcir.encoders import EncoderConfig
from rcir.errors import InvalidData
from rcir.runs.folder import find_run
from training import train


def unfinish(path):
    """Make of a finished run one that stopped just before it chose its weights."""
    (path / "encoder.safetensors").unlink()
    stored = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(stored | {"finished": False}))


def equal(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(values, second[name]) for name, values in first.items())


def steps(run, name):
    history = MlflowClient(run.tracking_uri).get_metric_history(run.mlflow_run, name)
    return [metric.step for metric in history]


def test_a_run_that_stopped_after_its_last_epoch_repeats_none(tiny, capsys):
    run = train(tiny(epochs=2))
    weights = load_file(run.path / "encoder.safetensors")
    unfinish(run.path)
    # What a process that was killed while it wrote a checkpoint leaves.
    half = run.path / "checkpoints" / ".epoch-0003-0123abcd"
    half.mkdir()
    (half / "state.json").write_text("{")
    capsys.readouterr()

    again = train(tiny(epochs=2))
    assert "epoch" not in capsys.readouterr().out
    assert again.finished
    assert again.mlflow_run == run.mlflow_run
    assert steps(run, "loss") == [1, 2]
    assert equal(load_file(run.path / "encoder.safetensors"), weights)


def test_a_checkpoint_of_another_version_is_refused(tiny):
    run = train(tiny(epochs=1))
    unfinish(run.path)
    state = run.path / "checkpoints" / "epoch-0001" / "state.json"
    numbers = json.loads(state.read_text())
    numbers["train_state"]["best"] = numbers["train_state"].pop("best_precision")
    state.write_text(json.dumps(numbers))
    with pytest.raises(InvalidData, match="epoch-0001 was written by another version"):
        train(tiny(epochs=1))


def test_a_run_of_another_version_is_refused(tiny):
    run = train(tiny(epochs=1))
    stored = json.loads((run.path / "run.json").read_text())
    stored["config"]["encoder"]["members"] = 3  # as options were, side by side
    (run.path / "run.json").write_text(json.dumps(stored))
    with pytest.raises(InvalidData, match="written by another version"):
        find_run(str(run.path)).encoder()


def test_an_ensemble_keeps_the_members_it_has(tiny):
    config = tiny(epochs=1, encoder=EncoderConfig("deep-ensemble", dim=8, options={"members": 2}))
    run = train(config)
    weights = load_file(run.path / "encoder.safetensors")
    unfinish(run.path)
    first, second = (run.path / "members" / f"member-{number}" for number in (0, 1))
    shutil.rmtree(second)
    before = (first / "encoder.safetensors").stat().st_mtime_ns

    again = train(config)
    assert again.mlflow_run == run.mlflow_run
    assert (first / "encoder.safetensors").stat().st_mtime_ns == before
    assert equal(load_file(run.path / "encoder.safetensors"), weights)
