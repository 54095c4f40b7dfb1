"""What training leaves on disk."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from rcir.data import Augmentation, Preprocessing
from rcir.encoders import EncoderConfig
from rcir.errors import InvalidConfig, InvalidData
from rcir.mining import MiningConfig
from training import OptimizerConfig, TrainingConfig, train

SAMPLES_PER_CLASS = MiningConfig("farthest", "hardest", scope="batch", samples_per_class=2)


def tracked(run, name):
    """A metric of the validation images by epoch."""
    client = MlflowClient(run.tracking_uri)
    history = client.get_metric_history(run.mlflow_run, f"validation/{name}")
    return {metric.step: metric.value for metric in history}


@pytest.fixture
def best(trained):
    """The epoch with the smallest certified sets, of equal ones with the highest precision."""
    sizes, precisions = (
        tracked(trained, name) for name in ("certified_size_0.1", "mean_average_precision")
    )
    assert sorted(precisions) == [1, 2, 3, 4]
    return min(precisions, key=lambda epoch: (sizes.get(epoch, 1e9), -precisions[epoch], -epoch))


def test_the_folder_holds_nothing_but_what_is_documented(trained):
    assert {path.name for path in trained.path.iterdir()} == {
        "run.json",
        "metrics.json",
        "trained_on.json",
        "lock",
        "checkpoints",
        "encoder.safetensors",
        "validation.safetensors",
    }


def test_run_json_holds_the_configuration_and_the_mlflow_run(trained, tiny, tracking_uri):
    stored = json.loads((trained.path / "run.json").read_text())
    assert stored["config"] == json.loads(json.dumps(asdict(tiny(seed=4, micro_batches=1))))
    assert stored["finished"] is True
    assert stored["tracking_uri"] == tracking_uri
    assert MlflowClient(tracking_uri).get_run(stored["mlflow_run"]).info.run_name == "tiny"


def test_only_the_last_and_the_best_checkpoint_are_kept(trained, best):
    kept = {path.name for path in (trained.path / "checkpoints").iterdir()}
    assert kept == {f"epoch-{best:04d}", "epoch-0004"}


def test_the_encoder_has_the_weights_of_the_best_epoch(trained, best):
    expected = load_file(trained.path / "checkpoints" / f"epoch-{best:04d}" / "model.safetensors")
    stored = load_file(trained.path / "encoder.safetensors")
    loaded = trained.encoder().state_dict()
    assert stored.keys() == expected.keys() == loaded.keys()
    for name, values in expected.items():
        assert torch.equal(stored[name], values)
        assert torch.equal(loaded[name], values)


def test_a_finished_run_is_returned_as_it_is(trained, tiny, capsys):
    client = MlflowClient(trained.tracking_uri)
    experiment = client.get_run(trained.mlflow_run).info.experiment_id
    runs = len(client.search_runs([experiment]))
    before = trained.path.joinpath("encoder.safetensors").stat().st_mtime_ns
    # Resources may differ from those of the first call.
    again = train(tiny(seed=4, storage=str(trained.path.parent), num_workers=2))
    assert (again.path, again.mlflow_run) == (trained.path, trained.mlflow_run)
    assert "is trained already; choose another name" in capsys.readouterr().out
    assert trained.path.joinpath("encoder.safetensors").stat().st_mtime_ns == before
    assert len(client.search_runs([experiment])) == runs


def test_another_configuration_in_the_same_folder_is_refused(trained, tiny):
    before = (trained.path / "run.json").read_bytes()
    config = tiny(
        seed=4, storage=str(trained.path.parent), epochs=5, optimizer=OptimizerConfig(lr=0.5)
    )
    with pytest.raises(InvalidConfig, match=r"another epochs, optimizer\.lr:"):
        train(config)
    more = replace(config.data, options={**config.data.options, "train": 301})
    with pytest.raises(InvalidConfig, match=r"another data\.options\.train:"):
        train(tiny(seed=4, storage=config.storage, data=more))
    assert (trained.path / "run.json").read_bytes() == before


def test_a_run_that_is_not_finished_has_no_encoder(trained):
    with pytest.raises(InvalidData, match="run the same training command again"):
        replace(trained, finished=False).encoder()


def test_data_that_cannot_be_had_leave_no_run(tiny, tmp_path):
    config = tiny("nothing", storage=str(tmp_path))
    with pytest.raises(InvalidConfig, match="trian"):
        train(replace(config, data=replace(config.data, options={"trian": 5})))
    assert not (tmp_path / "nothing").exists()


def test_what_cannot_be_built_leaves_nothing_and_blocks_no_name(tiny, tmp_path):
    for wrong in (
        {"preprocessing": Preprocessing(size=(2, 2))},
        {"encoder": EncoderConfig(backbone="resnet50")},
    ):
        with pytest.raises(InvalidConfig):
            train(tiny("again", **wrong))
    assert not (tmp_path / "runs").exists()


def test_occlusion_needs_square_tiles():
    with pytest.raises(InvalidConfig, match="multiple of its height"):
        TrainingConfig(
            "tiles", augmentation=Augmentation(0.5), preprocessing=Preprocessing(size=(20, 30))
        )


def test_a_submitted_job_writes_nothing_into_its_copy_of_the_code(tiny, tmp_path, monkeypatch):
    """Ray sets this variable for the jobs that are submitted to it, and removes their folder."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(InvalidConfig, match="storage is runs, a folder in the job's copy"):
        train(tiny())
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(InvalidConfig, match="MLFLOW_TRACKING_URI is not set"):
        train(tiny(storage=str(tmp_path)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"options": {"train": 1}}, InvalidData, "no anchor has a positive and a negative"),
        ({"micro_batches": 310, "batch": 320}, InvalidData, "300 training images do not fill 310"),
        ({"batch": 280, "mining": SAMPLES_PER_CLASS}, InvalidData, "images of 60 labels"),
    ],
)
def test_images_that_cannot_be_trained_on_leave_nothing_behind(
    changes, error, said, tiny, tmp_path
):
    config = tiny(**{name: value for name, value in changes.items() if name != "options"})
    options = config.data.options | changes.get("options", {})
    with pytest.raises(error, match=said):
        train(replace(config, data=replace(config.data, options=options)))
    assert not list(tmp_path.iterdir())


def test_a_run_keeps_the_parts_it_was_begun_with(trained, tiny):
    assert train(tiny(seed=4, storage=str(trained.path.parent))).finished
    with pytest.raises(InvalidConfig, match="another micro_batches"):
        train(tiny(seed=4, storage=str(trained.path.parent), micro_batches=2))
    begun = train(tiny("begun", epochs=1))
    (begun.path / "encoder.safetensors").unlink()
    replace(begun, finished=False).write()
    with pytest.raises(InvalidConfig, match=r"begun with 1 micro-batches.* instead of 2"):
        train(tiny("begun", epochs=1, num_workers=2))


def test_two_processes_do_not_train_in_one_folder(tiny, tmp_path):
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    code = f"from filelock import FileLock; held = FileLock('{folder}/lock').acquire(); input()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        while not (folder / "lock").exists():
            time.sleep(0.02)
        time.sleep(0.2)
        with pytest.raises(InvalidConfig, match="is being trained by another process"):
            train(tiny(epochs=1))
    finally:
        other.kill()
        other.communicate()
    assert train(tiny(epochs=1)).finished  # the lock ended with the process


def test_the_environment_names_the_folder_of_runs(monkeypatch):
    assert TrainingConfig("run").storage == "runs"
    monkeypatch.setenv("RCIR_RUNS", "/shared/runs")
    assert TrainingConfig("run").storage == "/shared/runs"
    assert TrainingConfig("run", storage="here").storage == "here"
