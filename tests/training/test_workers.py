"""Training on any number of Ray workers gives what training in this process gives."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import ray.train
from mlflow import MlflowClient
from safetensors.torch import load_file

from rcir.data import Augmentation, DataConfig, Preprocessing
from rcir.encoders import EncoderConfig
from rcir.errors import TrainingDiverged
from rcir.mining import MiningConfig
from tests.methods import config_of
from training import OptimizerConfig, train

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]

# Nothing divides by two or three workers: neither images, nor batches, nor the last batch.
PARTS = {"train": 313, "validation": 100, "gallery": 100, "tuning": 100, "test": 100}
DATA = DataConfig("digits", options={**PARTS, "calibration": 100})
PLAIN = {"epochs": 2, "batch": 35, "micro_batches": 6, "data": DATA}
# Batch normalisation, dropout, augmentation, and tuples across the shares of the workers. One step:
# Adam's first goes by the signs of gradients, so that rounding tells after it.
ONLINE = {
    "epochs": 1,
    "batch": 80,
    "micro_batches": 3,
    "data": replace(DATA, options=DATA.options | {"train": 140}),
    "encoder": EncoderConfig("mc-dropout", "resnet50", "gem", dim=8, options={"passes": 2}),
    "preprocessing": Preprocessing(size=(32, 32), channels=3),
    "augmentation": Augmentation(0.5, flip=True, rotation=10, jitter=(0.2, 0.2, 0.2, 0.1)),
    "mining": MiningConfig(
        "farthest", "hardest", num_negatives=1, scope="batch", samples_per_class=2
    ),
}
# A loss that draws, and has parameters of its own.
DRAWING = {
    "epochs": 1,
    "batch": 79,
    "micro_batches": 3,
    "data": DATA,
    "encoder": EncoderConfig("hib", dim=4),
    "mining": MiningConfig(scope="batch"),
}
# What the other methods do beside: distributions, a curvature that all workers share, labels.
OTHERS = {
    name: DRAWING | {"encoder": config_of(name, dim=4, options=options)}
    for name, options in {
        "vmf": {},
        "tripreg": {"unit": True},  # else nothing depends on where all vectors lie: no gradient
        "lam": {"online": True},
        "norm-softmax": {"classes": 100},
    }.items()
}
KINDS = {"plain": PLAIN, "online": ONLINE, "drawing": DRAWING} | OTHERS


def history(run, name):
    metrics = MlflowClient(run.tracking_uri).get_metric_history(run.mlflow_run, name)
    return [metric.value for metric in sorted(metrics, key=lambda metric: metric.step)]


@pytest.fixture(scope="module")
def alone(tiny, tracking_uri, tmp_path_factory):
    """`alone(kind)`: the training in this process; to be read only."""

    def trained(kind):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("alone"))
            patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
            return train(tiny(kind, **KINDS[kind]))

    return cache(trained)


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """What a callback of the plain training on workers writes."""
    return tmp_path_factory.mktemp("reported") / "reported"


@pytest.fixture(scope="module")
def together(ray_cluster, reported, tiny, tracking_uri, tmp_path_factory):
    """`together(kind)`: the training on workers; to be read only."""

    class Written(ray.train.UserCallback):  # carried to Ray's controller by value
        def after_report(self, run_context, metrics, checkpoint):
            with reported.open("a") as file:
                first = metrics[0]
                file.write(f"{len(metrics)} {first['epoch']} {first['validation/recall_at_1']}\n")

    def trained(kind):
        workers, callback = (3, Written()) if kind == "plain" else (2, None)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("together"))
            patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
            config = tiny(f"on-{workers}", **KINDS[kind], num_workers=workers)
            return train(config, callback=callback)

    return cache(trained)


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k != "plain")]
)
def test_workers_take_the_steps_of_one_process(kind, alone, together):
    expected, found = alone(kind), together(kind)
    assert history(found, "tuples") == history(expected, "tuples")
    assert min(history(found, "tuples")) > 50
    np.testing.assert_allclose(history(found, "loss"), history(expected, "loss"), rtol=1e-4)
    assert_close(kind, expected, found, "model", lambda key: kind != "online" or "running" in key)
    # Adam's steps hardly depend on the scale of a gradient, but its moments do.
    assert_close(kind, expected, found, "optimizer", lambda key: True)
    if kind == "plain":
        for name in ("validation/recall_at_1", "validation/auroc_miss"):
            np.testing.assert_allclose(history(found, name), history(expected, name), rtol=1e-3)


def assert_close(kind, expected, found, file, compared):
    """Tensors of the last checkpoints of two runs agree."""
    place = f"checkpoints/epoch-{KINDS[kind]['epochs']:04d}/{file}.safetensors"
    theirs, ours = (load_file(run.path / place) for run in (expected, found))
    assert ours.keys() == theirs.keys()
    keys = [key for key in theirs if compared(key)]
    assert len(keys) >= 7
    for key in keys:
        difference = (ours[key] - theirs[key]).double().norm()
        assert difference <= 1e-3 * theirs[key].double().norm() + 1e-9, (file, key)


@pytest.mark.slow
def test_members_of_an_ensemble_train_side_by_side(tiny):
    config = tiny(
        "ensemble", epochs=1, encoder=EncoderConfig("deep-ensemble", dim=8, options={"members": 2})
    )
    found = train(replace(config, name="together", num_workers=1))
    client = MlflowClient(found.tracking_uri)
    parent = client.get_run(found.mlflow_run).info
    children = client.search_runs(
        [parent.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.run_id}'"
    )
    (first, second) = (child.info for child in children)
    assert {first.status, second.status, parent.status} == {"FINISHED"}
    assert max(first.start_time, second.start_time) < min(first.end_time, second.end_time)
    expected = train(replace(config, name="in-turn")).encoder().state_dict()
    for name, values in found.encoder().state_dict().items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-3, atol=1e-4)


def test_a_callback_gets_what_the_workers_report(together, reported):
    recalls = history(together("plain"), "validation/recall_at_1")
    expected = [f"3 {epoch} {recall}" for epoch, recall in zip((1, 2), recalls, strict=True)]
    assert reported.read_text().splitlines() == expected


@pytest.mark.slow
def test_what_a_worker_raises_on_purpose_arrives_as_itself_and_is_not_tried_again(tiny, capsys):
    config = tiny(batch=1000, optimizer=OptimizerConfig(lr=1e30), num_workers=1)
    with pytest.raises(TrainingDiverged, match=r"lower optimizer\.lr"):
        train(config)
    assert "training continues" not in capsys.readouterr().out
