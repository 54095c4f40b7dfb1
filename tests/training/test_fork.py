"""Runs that go on from where another one was."""

import json
import os
from dataclasses import asdict, replace

import pytest
from mlflow import MlflowClient
from safetensors.torch import load_file

from rcir.errors import InvalidConfig, InvalidData
from rcir.runs.folder import RunFolder, read_run
from tests.training.test_callback import Recorder, same_weights
from tests.training.test_continued import equal, steps
from training import Change, OptimizerConfig, train
from training.checkpoint import best_epoch, last_epoch
from training.fork import fork_run, snapshot

NEW = (Change(3, {"optimizer.lr": 0.004, "loss.kl_scale": 1e-3}),)


@pytest.fixture(scope="module")
def place(tracking_uri, tmp_path_factory):
    """A folder of runs."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("forked")
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        yield folder / "runs"


@pytest.fixture(scope="module")
def make(tiny, place):
    return lambda name, **changes: tiny(name, storage=str(place), **changes)


@pytest.fixture(scope="module")
def half(make, place):
    """The folder of a run that was stopped after two of its four epochs."""
    with pytest.raises(SystemExit):
        train(make("half"), callback=Recorder(stop=2))
    assert last_epoch(place / "half") == 2
    return place / "half"


@pytest.fixture(scope="module")
def fresh(make):
    """A run with the options that change, from its start."""
    return train(make("fresh", changes=NEW))


def metrics(run):
    found = json.loads((run.path / "metrics.json").read_text())
    return {
        epoch: {name: value for name, value in values.items() if name != "seconds"}
        for epoch, values in found.items()
    }


def test_a_new_run_goes_on_to_the_weights_of_a_fresh_one(make, half, fresh):
    config = make("new", changes=NEW)
    fork_run(half, config)
    recorder = Recorder()
    run = train(config, callback=recorder)
    assert recorder.epochs == [3, 4]
    assert same_weights(run, fresh)
    assert metrics(run) == metrics(fresh)
    last = "checkpoints/epoch-0004/optimizer.safetensors"
    assert equal(load_file(run.path / last), load_file(fresh.path / last))
    assert steps(run, "loss") == [1, 2, 3, 4]
    assert run.mlflow_run not in (fresh.mlflow_run, read_run(half).mlflow_run)
    assert last_epoch(half) == 2  # which can still go on itself


@pytest.mark.parametrize("reached", [1, 3, 4])
def test_what_a_run_had_trained_is_replaced(make, half, fresh, reached):
    other = make(f"other-{reached}", optimizer=OptimizerConfig(lr=0.002), seed=7)
    if reached < 4:
        with pytest.raises(SystemExit):
            train(other, callback=Recorder(stop=reached))
    else:
        train(other)
    folder = half.parent / other.name
    (folder / "reports.json").write_text("kept")
    before = read_run(folder)
    config = make(other.name, changes=NEW)
    fork_run(half, config)
    assert not (folder / "encoder.safetensors").exists()

    run = train(config)
    assert (run.mlflow_run, run.path) == (before.mlflow_run, folder)
    assert same_weights(run, fresh)
    assert metrics(run) == metrics(fresh)
    assert run.config == json.loads(json.dumps(asdict(replace(config, micro_batches=1))))
    assert (folder / "reports.json").read_text() == "kept"
    assert {path.name for path in folder.iterdir() if path.name.startswith(".")} == set()
    assert steps(run, "loss") == [1, 2, 3, 4]


def test_a_snapshot_is_what_a_run_was(make, half, fresh, tmp_path):
    """The run goes on, and the snapshot does not: it shares its files, and they are not changed."""
    config = make("gone-on")
    fork_run(half, config)
    snapshot(half.parent / "gone-on", tmp_path / "kept")
    train(config)
    names = {str(path.relative_to(tmp_path / "kept")) for path in (tmp_path / "kept").rglob("*")}
    epochs = {f"checkpoints/epoch-{n:04d}" for n in (2, best_epoch(half))}
    files = ("model.safetensors", "optimizer.safetensors", "validation.safetensors", "state.json")
    assert names == {"run.json", "trained_on.json", "metrics.json", "checkpoints"} | epochs | {
        f"{epoch}/{file}" for epoch in epochs for file in files
    }
    late = make("late", changes=NEW)
    fork_run(tmp_path / "kept", late)
    assert same_weights(train(late), fresh)


def test_a_snapshot_takes_no_room_where_files_can_be_linked(half, tmp_path):
    snapshot(half, half.parent / "linked")
    weights = "checkpoints/epoch-0002/model.safetensors"
    assert (half.parent / "linked" / weights).samefile(half / weights)


def test_a_snapshot_on_another_disk_is_a_copy(half, tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    snapshot(half, tmp_path / "kept")
    weights = "checkpoints/epoch-0002/model.safetensors"
    assert not (tmp_path / "kept" / weights).samefile(half / weights)
    assert (tmp_path / "kept" / weights).read_bytes() == (half / weights).read_bytes()


def test_what_is_not_in_the_checkpoint_is_left_out_of_the_metrics(make, half, tmp_path):
    """A process that is killed between the two has written the metrics of one epoch more."""
    fork_run(half, make("ahead"))
    path = half.parent / "ahead" / "metrics.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"3": {"loss": 0.0}}))
    snapshot(half.parent / "ahead", tmp_path / "kept")
    assert set(json.loads((tmp_path / "kept" / "metrics.json").read_text())) == {"1", "2"}


@pytest.mark.parametrize("moment", ["cleared", "run.json", "metrics.json"])
def test_interrupted_it_leaves_a_run_that_begins_anew(make, half, fresh, monkeypatch, moment):
    """Whichever configuration it then has, its weights are those of that configuration."""
    name, first = f"cut-{moment}", OptimizerConfig(lr=0.002)
    with pytest.raises(SystemExit):
        train(make(name, optimizer=first), callback=Recorder(stop=2))
    folder, config = half.parent / name, make(name, changes=NEW)

    written = RunFolder.write

    def killed(*_):
        raise KeyboardInterrupt

    def write(self):
        if self.path != folder or not self.config["changes"]:
            written(self)
            return
        if moment == "cleared":
            killed()
        written(self)
        if moment == "run.json":
            killed()
        patch.setattr("pathlib.Path.rename", killed)  # of checkpoints; of metrics it is `replace`

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write", write)
        with pytest.raises(KeyboardInterrupt):
            fork_run(half, config)
    assert not (folder / "checkpoints").exists()
    if moment == "cleared":
        config = make(name, optimizer=first)
        fresh = train(make("fresh-other", optimizer=first))
    recorder = Recorder()
    assert same_weights(train(config, callback=recorder), fresh)
    assert recorder.epochs == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 8}, "another seed in epoch 1"),
        ({"optimizer": OptimizerConfig(lr=0.1)}, r"another optimizer\.lr in epoch 1"),
        ({"epochs": 5}, "another epochs in epoch 1"),
        ({"micro_batches": 2}, "another micro_batches in epoch 1"),
        ({"changes": (Change(2, {"loss.margin": 0.1}),)}, r"another loss\.margin in epoch 2"),
    ],
)
def test_a_run_that_would_not_have_come_there_is_refused(make, half, options, said):
    with pytest.raises(InvalidConfig, match=said):
        fork_run(half, make("refused", **options))
    assert not (half.parent / "refused").exists()


def test_changes_that_change_nothing_are_no_difference(make, half, fresh):
    config = make("nothing", changes=(Change(2, {"loss.kl_scale": 1e-6}), *NEW))
    fork_run(half, config)
    assert same_weights(train(config), fresh)


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(make, half, tmp_path):
    for source in (tmp_path, half / "checkpoints"):
        with pytest.raises(InvalidData, match="holds no checkpoint"):
            fork_run(source, make("none"))
        with pytest.raises(InvalidData, match="holds no checkpoint"):
            snapshot(source, tmp_path / "target")
    assert not (half.parent / "none").exists()


def test_the_mlflow_run_that_is_kept_ends_as_finished(make, half):
    with pytest.raises(SystemExit):
        train(make("noted", seed=9), callback=Recorder(stop=1))
    config = make("noted", changes=NEW)
    fork_run(half, config)
    run = train(config)
    assert MlflowClient(run.tracking_uri).get_run(run.mlflow_run).info.status == "FINISHED"
