"""Trainings by the labels of images instead of by tuples."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rcir.data import DataConfig, load_splits
from rcir.data.relevance import SharedLabel
from rcir.encoders import EncoderConfig, build_encoder
from rcir.errors import InvalidConfig
from rcir.losses import NormSoftmaxOptions, norm_softmax_loss
from tests.training.test_learning import OPTIONS, recall
from tests.training.test_micro_batches import epochs, trainer_of
from training import train
from training.batches import numbered_labels
from training.run import check_images

ENCODER = EncoderConfig("norm-softmax", dim=8)


def test_recall_on_unseen_classes_rises(tiny):
    config = tiny(epochs=3, data=DataConfig("digits", options=OPTIONS), encoder=ENCODER)
    splits = load_splits(config.data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        untrained = recall(build_encoder(config.encoder, 1, (8, 16)), splits)
    assert recall(train(config).encoder(), splits) > untrained + 0.15


@pytest.mark.parametrize("micro_batches", [1, 7])
def test_the_gradient_is_that_of_the_mean_loss_of_all_images(tiny, micro_batches):
    config = tiny(batch=300, micro_batches=micro_batches, encoder=ENCODER)
    trainer, naive = trainer_of(config), trainer_of(config)
    images = naive.images
    places = {label: place for place, label in enumerate(sorted(set(images.labels.tolist())))}
    labels = torch.tensor([places[label] for label in images.labels.tolist()])
    encoder = naive.encoder.train()
    vectors = encoder(config.preprocessing(images.images)).vectors
    loss = norm_softmax_loss(vectors, encoder.proxies, labels, 0.1).mean()
    loss.backward()
    (found,) = epochs(trainer)
    assert found["tuples"] == 300
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-4)
    pairs = zip(trainer.encoder.parameters(), encoder.parameters(), strict=True)
    for ours, theirs in pairs:  # Adam's first moment after one step
        moment = trainer.optimizer.state[ours]["exp_avg"]
        torch.testing.assert_close(moment, 0.1 * theirs.grad, rtol=1e-3, atol=1e-6)


def test_the_loss_of_a_collapsed_encoder_is_the_log_of_the_number_of_labels(tiny):
    trainer = trainer_of(tiny(encoder=ENCODER))
    number = len(np.unique(trainer.images.labels))
    assert trainer.collapsed_loss() == pytest.approx(math.log(number))


def test_labels_are_numbered_in_their_order(splits):
    images = splits.train
    expected = [sorted(set(images.labels.tolist())).index(label) for label in images.labels]
    assert numbered_labels(images).tolist() == expected


def test_images_without_one_label_each_are_refused_before_training(tiny, splits):
    shared = SharedLabel.of_lists([[0, 1], [1], [2]] * 20, 3)
    images = replace(splits.train.subset(np.arange(60)), relevance=shared)
    config = tiny(encoder=ENCODER)
    with pytest.raises(InvalidConfig, match=r"not one label each.*such as btl"):
        check_images(config, images)
    check_images(replace(config, encoder=EncoderConfig("btl", dim=8), loss={}), images)


def test_more_labels_than_proxies_are_refused():
    encoder = build_encoder(replace(ENCODER, options={"classes": 3}), 1, (8, 16))
    embedding = encoder(torch.zeros(2, 1, 8, 16))
    assert encoder.label_loss(embedding, torch.tensor([0, 2]), NormSoftmaxOptions()).shape == (2,)
    with pytest.raises(InvalidConfig, match=r"encoder\.options\.classes is 3.*raise it"):
        encoder.label_loss(embedding, torch.tensor([0, 3]), NormSoftmaxOptions())


def test_fewer_than_two_classes_are_refused():
    with pytest.raises(InvalidConfig, match=r"encoder\.options\.classes is 1; at least 2"):
        EncoderConfig("norm-softmax", options={"classes": 1})


def test_methods_of_tuples_have_no_loss_by_label():
    encoder = build_encoder(EncoderConfig("btl", dim=8), 1, (8, 16))
    with pytest.raises(NotImplementedError, match="BayesianTriplet is trained by tuples"):
        encoder.label_loss(encoder(torch.zeros(1, 1, 8, 16)), torch.tensor([0]), None)
