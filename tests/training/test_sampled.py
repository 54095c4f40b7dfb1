"""Epochs that see a part of the training images: samples of a large set, batches of some labels."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rcir.data import DataConfig, ImageSet, load_splits
from rcir.data.relevance import SameLabel
from rcir.encoders import EncoderConfig, build_encoder
from rcir.errors import InvalidConfig, InvalidData
from rcir.mining import MiningConfig
from tests.training.test_learning import OPTIONS, recall
from tests.training.test_micro_batches import epochs, forward_passes, trainer_of
from training import TrainingConfig, train

SAMPLED = MiningConfig("nearest", "hardest", cache="sampled", sample=60, refresh=7)
SAMPLES_PER_CLASS = MiningConfig(
    "farthest", "hardest", num_negatives=1, scope="batch", samples_per_class=4
)


def numbered(labels):
    """Images whose every pixel is their row."""
    pixels = np.repeat(np.arange(len(labels), dtype=np.uint8), 128).reshape(-1, 8, 16)
    return ImageSet(pixels, np.array(labels), [str(row) for row in range(len(labels))])


def rows_seen(seen, training):
    """Rows of numbered images that an encoder saw, pass by pass."""
    return [
        (pixels[:, 0, 0, 0] * 255).round().int().tolist()
        for trained, pixels in seen
        if trained is training
    ]


def steps(trainer):
    return trainer.optimizer.state[next(trainer.encoder.parameters())]["step"]


def test_an_epoch_embeds_the_sample_alone_and_takes_its_steps(tiny):
    labels = np.arange(240) % 24
    trainer = trainer_of(tiny(batch=32, mining=SAMPLED), numbered(labels))
    seen = forward_passes(trainer)
    samples = []
    for number in (1, 2):
        seen.clear()
        (found,) = epochs(trainer, number, number)
        assert steps(trainer) == 7 * number
        assert found["tuples"] == 7 * 32
        embedded = np.concatenate(rows_seen(seen, training=False))
        assert len(embedded) == len(set(embedded)) == 60
        trained = rows_seen(seen, training=True)
        assert [len(rows) for rows in trained] == [32 * 4] * 7
        assert set(np.concatenate(trained)) <= set(embedded)
        # Anchors come in rounds: each image of the sample once, then each once more.
        anchors = np.concatenate([rows[:32] for rows in trained])
        for start in range(0, 180, 60):
            assert set(anchors[start : start + 60]) == set(embedded)
        samples.append(set(embedded))
    # 60 of 240 have 15 images in common with other 60 on average, 3 of them standard deviation.
    assert len(samples[0] & samples[1]) < 30


def test_an_anchor_without_a_tuple_is_not_made_up_for(tiny):
    # Of pairs, an odd sample leaves one image alone: 7 rounds of 4 tuples are 5 batches of 5 and 3.
    mining = replace(SAMPLED, sample=5)
    trainer = trainer_of(tiny(batch=5, mining=mining), numbered(np.arange(40) // 2))
    (found,) = epochs(trainer)
    assert found["tuples"] == 28
    assert steps(trainer) == 6


def test_a_sample_larger_than_the_set_is_all_of_it(tiny):
    trainer = trainer_of(tiny(batch=32, mining=SAMPLED), numbered(np.arange(45) % 9))
    seen = forward_passes(trainer)
    epochs(trainer)
    assert rows_seen(seen, training=False) == [list(range(45))]
    assert steps(trainer) == 7


@pytest.mark.parametrize(
    "mining",
    [replace(SAMPLED, sample=300, refresh=25), replace(SAMPLES_PER_CLASS, positive="nearest")],
    ids=["sampled", "per-label"],
)
def test_recall_on_unseen_classes_rises(tiny, mining):
    config = tiny(epochs=3, mining=mining, data=DataConfig("digits", options=OPTIONS))
    splits = load_splits(config.data)
    trainer = trainer_of(config, splits.train)
    untrained = recall(build_again(config), splits)
    epochs(trainer, last=3)
    assert recall(trainer.encoder, splits) > untrained + 0.1


def build_again(config):
    """The encoder that training starts with."""
    torch.manual_seed(config.seed)
    return build_encoder(config.encoder, 1, (8, 16))


def test_batches_hold_some_images_of_each_of_some_labels(tiny):
    labels = np.repeat(np.arange(24), np.arange(24) % 3 + 8)  # 8, 9 or 10 of each
    config = tiny(batch=32, mining=SAMPLES_PER_CLASS, encoder=EncoderConfig("deterministic", dim=8))
    trainer = trainer_of(config, numbered(labels))
    seen = forward_passes(trainer)
    (found,) = epochs(trainer)
    batches = rows_seen(seen, training=True)
    assert rows_seen(seen, training=False) == []  # one forward pass serves mining and training
    for rows in batches:
        _, counts = np.unique(labels[rows], return_counts=True)
        assert counts.tolist() == [4] * 8
    # Each label has two groups of four images: 48 groups, 8 of them a batch.
    assert 4 <= len(batches) <= 6
    assert found["tuples"] == 32 * len(batches)
    used = np.concatenate(batches)
    assert len(set(used)) == len(used)


def test_labels_are_needed_for_batches_of_labels(tiny):
    images = numbered(np.arange(96) % 12)
    unlabelled = replace(images, labels=None, relevance=SameLabel(images.labels))
    trainer = trainer_of(tiny(batch=32, mining=SAMPLES_PER_CLASS), unlabelled)
    with pytest.raises(
        InvalidConfig, match=r"mining\.samples_per_class is 4, but.*not one label each"
    ):
        epochs(trainer)


def test_a_batch_needs_enough_labels(tiny):
    trainer = trainer_of(tiny(batch=32, mining=SAMPLES_PER_CLASS), numbered(np.arange(70) % 7))
    with pytest.raises(InvalidData, match=r"images of 7 labels, but .* needs 8"):
        epochs(trainer)


@pytest.mark.parametrize("batch", [30, 6, 4])
def test_a_batch_of_labels_that_does_not_fit_is_refused_before_anything_is_trained(batch):
    with pytest.raises(InvalidConfig, match=rf"batch is {batch} and mining\.samples_per_class 4"):
        TrainingConfig("run", batch=batch, mining=SAMPLES_PER_CLASS)


def test_a_run_of_samples_is_a_run_like_any_other(tiny):
    run = train(tiny(epochs=1, mining=SAMPLED))
    assert run.finished
    assert run.config["mining"]["refresh"] == 7
