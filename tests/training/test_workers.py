"""Training on any number of Ray workers takes the steps of training in one process."""

from dataclasses import replace

import numpy as np
import pytest
import ray.train
from mlflow import MlflowClient
from safetensors.torch import load_file

from rcir.data import Augmentation, DataConfig, Preprocessing
from rcir.encoders import EncoderConfig, base, batches
from rcir.errors import TrainingDiverged
from rcir.mining import MiningConfig
from tests.methods import config_of
from tests.training.helpers import ON_RAY, assert_close, logged
from training import OptimizerConfig, train

pytestmark = [pytest.mark.usefixtures("ray_cluster"), *ON_RAY]

# Nothing divides by two workers: neither images, nor batches, nor the last batch.
PARTS = {"train": 313, "validation": 100, "gallery": 100, "tuning": 100, "test": 100}
DATA = DataConfig("digits", options={**PARTS, "calibration": 100})
# One epoch: it is mined with the first weights, which are the same however gradients are added.
PLAIN = {"epochs": 1, "batch": 35, "micro_batches": 3, "data": DATA}
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
# A loss that draws, and has parameters of its own. All negatives: no choice by distances, which
# after a step are no longer the same to the last digit.
DRAWING = {
    "epochs": 1,
    "batch": 79,
    "micro_batches": 3,
    "data": DATA,
    "encoder": EncoderConfig("hib", dim=4),
    "mining": MiningConfig("random", "hardest", num_negatives=78, pool=78, scope="batch"),
}
# A curvature that all workers share, and labels.
OTHERS = {"lam": {"online": True}, "norm-softmax": {"classes": 100}}
KINDS = {
    **{"plain": PLAIN, "online": ONLINE, "drawing": DRAWING},
    **{
        name: DRAWING | {"encoder": config_of(name, dim=4, options=options)}
        for name, options in OTHERS.items()
    },
}


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k != "plain")]
)
def test_workers_take_the_steps_of_one_process(kind, tiny, tmp_path, capsys):
    reports = tmp_path / "reports"

    class Written(ray.train.UserCallback):  # carried to Ray's controller by value
        def after_report(self, run_context, metrics, checkpoint):
            with reports.open("a") as file:
                first = metrics[0]
                file.write(f"{len(metrics)} {first['epoch']} {first['validation/recall_at_1']}\n")

    expected = train(tiny("alone", **KINDS[kind]))
    capsys.readouterr()
    together = train(tiny("together", **KINDS[kind], num_workers=2), callback=Written())
    assert capsys.readouterr().out.count("epoch 1/1") == 1  # of the first worker
    tuples = logged(expected, "tuples")
    assert logged(together, "tuples") == tuples
    assert min(tuples.values()) > 50
    assert logged(together)[1] == pytest.approx(logged(expected)[1], rel=1e-3)
    # Adam's steps hardly depend on the scale of a gradient, but its moments do.
    for file, only in (("model", "running" if kind == "online" else ""), ("optimizer", "")):
        theirs, ours = (
            load_file(run.path / f"checkpoints/epoch-0001/{file}.safetensors")
            for run in (expected, together)
        )
        assert ours.keys() == theirs.keys()
        names = [name for name in theirs if only in name]
        assert len(names) >= 7
        for name in names:
            assert_close(ours[name].double(), theirs[name].double(), rtol=2e-3)
    # The callback gets what the workers report.
    recall = logged(together, "validation/recall_at_1")[1]
    assert recall == pytest.approx(logged(expected, "validation/recall_at_1")[1], abs=0.02)
    assert reports.read_text().splitlines() == [f"2 1 {recall}"]


@pytest.mark.slow
def test_the_logged_loss_of_steps_is_the_mean_over_the_workers(tiny):
    # 313 anchors in batches of 6 are 53 steps, too small to tell weights apart.
    config = tiny("alone", **PLAIN | {"batch": 6}, optimizer=OptimizerConfig(lr=1e-7))
    expected = logged(train(config), "train/loss_step")
    assert [*expected] == [50]
    together = logged(train(replace(config, name="together", num_workers=2)), "train/loss_step")
    assert together == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_fit_after_training_embeds_on_workers_as_in_one_process(tiny, monkeypatch):
    monkeypatch.setattr(batches, "BLOCK_SIZE", 64)
    monkeypatch.setattr(base, "MAX_HELD", 256)  # the fit embeds twice
    config = tiny("alone", **PLAIN | {"encoder": config_of("lam", dim=4)})
    expected = train(config).encoder().state_dict()
    actual = train(replace(config, name="together", num_workers=2)).encoder().state_dict()
    for name, values in actual.items():
        np.testing.assert_allclose(values, expected[name], rtol=2e-2, atol=1e-3)


@pytest.mark.slow
def test_members_of_an_ensemble_train_side_by_side(tiny):
    encoder = EncoderConfig("deep-ensemble", dim=8, options={"members": 2})
    config = tiny("ensemble", epochs=1, encoder=encoder)
    together = train(replace(config, name="together", num_workers=1))
    client = MlflowClient(together.tracking_uri)
    parent = client.get_run(together.mlflow_run).info
    children = client.search_runs(
        [parent.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.run_id}'"
    )
    (first, second) = (child.info for child in children)
    assert {first.status, second.status, parent.status} == {"FINISHED"}
    assert max(first.start_time, second.start_time) < min(first.end_time, second.end_time)
    expected = train(replace(config, name="in-turn")).encoder().state_dict()
    for name, values in together.encoder().state_dict().items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_an_error_that_a_worker_raises_on_purpose_is_not_tried_again(tiny, capsys):
    config = tiny(batch=1000, optimizer=OptimizerConfig(lr=1e30), num_workers=1)
    with pytest.raises(TrainingDiverged, match=r"optimizer\.lr"):
        train(config)
    assert "training continues" not in capsys.readouterr().out
