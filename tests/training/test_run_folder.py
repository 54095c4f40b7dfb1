"""Files and MLflow records of a training."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from rcir.data import Preprocessing
from rcir.encoders import EncoderConfig
from rcir.errors import InvalidConfig, InvalidData
from rcir.mining import MiningConfig
from rcir.runs.folder import TrainedOn
from tests.training.helpers import equal, logged
from training import Change, OptimizerConfig, train
from training.checkpoint import checkpoint_folder, read_state, restore_validation
from training.run import create_run, find_existing_run

PER_CLASS = MiningConfig("farthest", "hardest", scope="batch", samples_per_class=2)


@pytest.fixture(scope="module")
def client(trained):
    return MlflowClient(trained.tracking_uri)


@pytest.fixture(scope="module")
def tracked(client, trained):
    """The run in MLflow."""
    return client.get_run(trained.mlflow_run)


@pytest.fixture
def best(trained):
    """Among epochs within 1% of the smallest sets so far, the higher precision is kept."""
    sizes, precisions = (
        logged(trained, f"validation/{name}")
        for name in ("certified_size_0.1", "mean_average_precision")
    )
    assert sorted(precisions) == [1, 2, 3, 4]
    kept = 1
    for epoch in (2, 3, 4):
        limit = 1.01 * min(sizes.get(each, np.inf) for each in range(1, epoch + 1))
        near = [each for each in (kept, epoch) if sizes.get(each, np.inf) <= limit]
        kept = max(near, key=lambda each: (precisions[each], each))
    return kept


def test_run_json_and_mlflow_hold_the_configuration(trained, tiny, tracking_uri, tracked):
    stored = json.loads((trained.path / "run.json").read_text())
    assert stored["config"] == json.loads(json.dumps(asdict(tiny(seed=4, micro_batches=1))))
    assert stored["finished"] is True
    assert stored["tracking_uri"] == tracking_uri
    assert stored["mlflow_run"] == tracked.info.run_id
    assert (tracked.info.run_name, tracked.info.status) == ("tiny", "FINISHED")
    assert tracked.data.tags["rcir.folder"] == str(trained.path)
    assert "mlflow.parentRunId" not in tracked.data.tags
    expected = {"data.options.train": "300", "preprocessing.size": "(8, 16)"}
    assert tracked.data.params.items() >= (expected | {"optimizer.lr": "0.001"}).items()


def test_the_encoder_has_the_weights_of_the_best_epoch(trained, best):
    names = {path.name for path in (trained.path / "checkpoints").iterdir()}
    assert names == {f"epoch-{best:04d}", "epoch-0004"}
    expected = load_file(checkpoint_folder(trained.path, best) / "model.safetensors")
    assert equal(load_file(trained.path / "encoder.safetensors"), expected)
    assert equal(trained.encoder().state_dict(), expected)


def test_every_epoch_has_its_metrics_in_mlflow(tracked, trained):
    names = {"loss", "seconds", "validation/recall_at_1", "validation/auroc_miss"}
    assert set(tracked.data.metrics) >= names
    for name in names:
        assert [*logged(trained, name)] == [1, 2, 3, 4]
    # 300 images of 60 classes, five each: each image is an anchor once.
    assert [*logged(trained, "tuples").values()] == [300] * 4
    rates = [*logged(trained, "lr").values()]
    assert rates == pytest.approx(
        [1e-3 * share for share in (1, 0.853553, 0.5, 0.146447)], rel=1e-5
    )
    assert [*logged(trained, "validation/constant_units").values()] == [0.0] * 4
    for share in ("0.05", "0.5", "0.95"):
        value = logged(trained, f"validation/uncertainty_{share}")[4]
        uncertainty = restore_validation(trained.path, 4).uncertainty
        assert value == pytest.approx(np.quantile(uncertainty, float(share)))
    for name in ("recall_at_1", "mean_average_precision"):
        values = logged(trained, f"validation/{name}")
        assert tracked.data.metrics[f"chosen/{name}"] == values[read_state(trained.path).best_epoch]


def test_the_best_checkpoint_and_a_figure_are_artifacts(client, trained, tmp_path):
    folder = client.download_artifacts(trained.mlflow_run, "checkpoint", str(tmp_path))
    source = checkpoint_folder(trained.path, read_state(trained.path).best_epoch)
    assert {path.name for path in Path(folder).iterdir()} == {
        path.name for path in source.iterdir()
    }
    artifact = load_file(Path(folder) / "model.safetensors")
    assert equal(artifact, trained.encoder().state_dict())
    figure = "figures/validation_reliability.svg"
    path = client.download_artifacts(trained.mlflow_run, figure, str(tmp_path))
    assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_a_finished_run_is_returned_without_training(trained, tiny, capsys):
    before = trained.path.joinpath("encoder.safetensors").stat().st_mtime_ns
    # Resources may differ from those of the first call.
    again = train(tiny(seed=4, storage=str(trained.path.parent), num_workers=2))
    assert (again.path, again.mlflow_run) == (trained.path, trained.mlflow_run)
    assert "trained already" in capsys.readouterr().out
    assert trained.path.joinpath("encoder.safetensors").stat().st_mtime_ns == before


def test_a_run_keeps_the_batch_that_it_was_begun_with(tiny, splits):
    config = tiny("scaled", epochs=1, batch_per_worker=16, micro_batches=4)
    config.folder.mkdir(parents=True)
    run = create_run(config, None, TrainedOn.from_splits(splits))
    assert (run.config["batch"], run.config["batch_per_worker"]) == (16, None)
    # With more workers it would be another batch, were it begun now.
    assert find_existing_run(replace(config, num_workers=4)).path == run.path
    with pytest.raises(InvalidConfig, match="another batch"):
        find_existing_run(replace(config, batch=64, batch_per_worker=None))


def test_another_configuration_in_the_same_folder_is_refused(trained, tiny):
    before = (trained.path / "run.json").read_bytes()
    config = tiny(seed=4, storage=str(trained.path.parent))
    more = replace(config.data, options={**config.data.options, "train": 301})
    for changes, message in (
        ({"epochs": 5, "optimizer": OptimizerConfig(lr=0.5)}, r"epochs, optimizer\.lr"),
        ({"data": more}, r"data\.options\.train"),
        ({"micro_batches": 2}, "micro_batches"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            train(replace(config, **changes))
    assert (trained.path / "run.json").read_bytes() == before


def test_an_unfinished_run_has_no_encoder_and_keeps_its_micro_batches(trained, tiny, tmp_path):
    half = replace(trained, path=tmp_path / "runs" / "tiny", finished=False)
    half.path.mkdir(parents=True)
    half.write()
    shutil.copy(trained.path / "trained_on.json", half.path)
    with pytest.raises(InvalidData, match="again"):
        half.encoder()
    with pytest.raises(InvalidConfig, match="micro-batches"):
        train(tiny(seed=4, num_workers=2))


def test_a_run_that_names_no_activation_has_the_relu_that_it_was_trained_with(tiny, tmp_path):
    config = tiny(epochs=1, encoder=EncoderConfig(dim=8, options={"activation": "relu"}))
    run = train(config)
    encoder, file = run.encoder(), run.path / "run.json"
    stored = json.loads(file.read_text())
    assert stored["config"]["encoder"]["options"].pop("activation") == "relu"
    file.write_text(json.dumps(stored))
    old = find_existing_run(config)
    images = torch.rand(9, 1, 8, 16, generator=torch.Generator().manual_seed(0))
    for before, after in zip(
        encoder.embed(images).tensors.values(),
        old.encoder().embed(images).tensors.values(),
        strict=True,
    ):
        assert torch.equal(before, after)
    assert old.encoder().fingerprint() == encoder.fingerprint()
    with pytest.raises(InvalidConfig, match=r"encoder\.options\.activation"):
        train(tiny(epochs=1))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"options": {"trian": 5}}, InvalidConfig, "trian"),
        ({"options": {"train": 1}}, InvalidData, "anchor"),
        ({"micro_batches": 310, "batch": 320}, InvalidData, "310"),
        ({"batch": 280, "mining": PER_CLASS}, InvalidData, "60 labels"),
        (
            {
                "batch": 280,
                "changes": (Change(2, {"mining.scope": "batch", "mining.samples_per_class": 2}),),
            },
            InvalidData,
            "60 labels",
        ),
        ({"preprocessing": Preprocessing(size=(2, 2))}, InvalidConfig, "size"),
        ({"encoder": EncoderConfig(backbone="resnet50")}, InvalidConfig, "channels"),
    ],
)
def test_what_cannot_be_trained_leaves_nothing_behind(changes, error, message, tiny, tmp_path):
    config = tiny(**{name: value for name, value in changes.items() if name != "options"})
    options = config.data.options | changes.get("options", {})
    with pytest.raises(error, match=message):
        train(replace(config, data=replace(config.data, options=options)))
    assert not list(tmp_path.iterdir())


def test_a_job_without_a_cluster_or_with_a_lost_folder_writes_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    with pytest.raises(InvalidConfig, match="nowhere"):
        train(tiny(num_workers=2))
    # Ray sets this variable for the jobs that are submitted to it, and removes their folder.
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(InvalidConfig, match="storage"):
        train(tiny())
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(InvalidConfig, match="MLFLOW_TRACKING_URI"):
        train(tiny(storage=str(tmp_path)))
    assert not list(tmp_path.iterdir())
