"""Mining within batches, and a backbone in bfloat16."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from mlflow import MlflowClient

from rcir.data import DataConfig, load_splits
from rcir.encoders import EncoderConfig, build_encoder
from rcir.errors import InvalidConfig
from rcir.mining import MiningConfig, mine
from tests.training.test_learning import OPTIONS, recall
from training import TrainingConfig, train, trainer

BATCH = MiningConfig("random", "hardest", num_negatives=8, scope="batch")


def test_every_image_is_embedded_once_an_epoch_and_is_an_anchor_of_its_batch(tiny, monkeypatch):
    seen = []

    def recorded(cache, relevance, anchors, config, generator):
        tuples = mine(cache, relevance, anchors, config, generator)
        seen.append((cache, relevance.labels, tuples))
        return tuples

    monkeypatch.setattr(trainer, "mine", recorded)
    config = tiny(epochs=1, batch=50, mining=BATCH)
    run = train(config)
    labels = np.concatenate([labels for _, labels, _ in seen])
    assert [len(labels) for _, labels, _ in seen] == [50] * 6
    np.testing.assert_array_equal(np.sort(labels), np.sort(load_splits(config.data).train.labels))
    expected = 0
    for vectors, labels, tuples in seen:
        assert vectors.shape == (50, 8)
        assert not vectors.requires_grad
        anchors = [row for row, label in enumerate(labels) if np.sum(labels == label) > 1]
        assert tuples.anchor.tolist() == anchors
        expected += len(anchors)
    history = MlflowClient(run.tracking_uri).get_metric_history(run.mlflow_run, "tuples")
    assert [metric.value for metric in history] == [expected]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_encoder_learns_within_batches(tiny, precision):
    config = tiny(
        epochs=3,
        batch=128,
        precision=precision,
        encoder=EncoderConfig(dim=8),
        mining=replace(BATCH, negatives="semi-hard", margin=0.3),
        data=DataConfig("digits", options=OPTIONS),
    )
    splits = load_splits(config.data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        untrained = recall(build_encoder(config.encoder, 1, (8, 16)), splits)
    assert recall(train(config).encoder(), splits) > untrained + 0.1


def test_only_the_backbone_is_in_bfloat16():
    encoder = build_encoder(EncoderConfig("btl", dim=8), 1, (8, 16))
    images = torch.rand(4, 1, 8, 16)
    kinds = {}
    for name in ("backbone", "mean_head", "variance_head"):
        part = getattr(encoder, name)
        part.register_forward_hook(
            lambda module, given, output, name=name: kinds.update({name: output.dtype})
        )
    exact = encoder(images)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = encoder(images)
    assert kinds == {
        "backbone": torch.bfloat16,
        "mean_head": torch.float32,
        "variance_head": torch.float32,
    }
    assert rounded.vectors.dtype == rounded.variance.dtype == torch.float32
    torch.testing.assert_close(rounded.vectors, exact.vectors, rtol=0, atol=0.02)
    assert not torch.equal(rounded.vectors, exact.vectors)


def test_a_batch_without_a_tuple_leaves_the_weights_alone(tiny):
    # No negative is farther than the positive and nearer than it at once.
    never = MiningConfig("nearest", "semi-hard", margin=0.0, scope="batch")
    run = train(tiny(epochs=1, mining=never))
    config = TrainingConfig(**(tiny(epochs=1, mining=never).__dict__))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        untouched = build_encoder(config.encoder, 1, (8, 16)).state_dict()
    for name, values in run.encoder().state_dict().items():
        assert torch.equal(values, untouched[name]), name


def test_a_scope_that_does_not_exist_is_named():
    with pytest.raises(InvalidConfig, match=r"mining\.scope 'all' is unknown; choose one of epoch"):
        MiningConfig(scope="all")
