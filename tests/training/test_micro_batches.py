"""A batch computed in several parts gives the step that the whole of it gives."""

import math

import numpy as np
import pytest
import torch

from rcir.data import DataConfig, ImageSet, load_splits
from rcir.encoders import EncoderConfig, build_encoder
from rcir.mining import MiningConfig
from training import OptimizerConfig
from training.progress import EpochBar
from training.trainer import Trainer
from training.workers import Workers

DATA = DataConfig("digits", options={"train": 313, "validation": 100, "gallery": 100})
ALONE = Workers(0, 1, torch.device("cpu"))
MINING = {
    "epoch": MiningConfig("nearest", "hardest"),
    "batch": MiningConfig("nearest", "hardest", scope="batch"),
}


def trainer_of(config, images=None):
    """What trains in this process, without a run around it."""
    torch.manual_seed(config.seed)
    encoder = build_encoder(
        config.encoder, config.preprocessing.channels, config.preprocessing.size
    ).to(memory_format=torch.channels_last)
    # Adam divides gradients that are all rounding by themselves: an eps above these.
    optimizer = torch.optim.Adam(encoder.parameters(), config.optimizer.lr, eps=1e-5, fused=True)
    images = load_splits(config.data).train if images is None else images
    return Trainer(config, encoder, encoder, optimizer, images, ALONE)


def epochs(trainer, first=1, last=1):
    """The metrics of some epochs."""
    return [
        trainer.epoch(number, EpochBar(number, last, shown=False))
        for number in range(first, last + 1)
    ]


def forward_passes(trainer):
    """Fills with (whether for training, images) of every forward pass."""
    seen = []
    trainer.encoder.register_forward_pre_hook(
        lambda encoder, given: seen.append((encoder.training, given[0].clone()))
    )
    return seen


def assert_close(found, expected, rtol=1e-4):
    """By their norms: single numbers may be all rounding."""
    assert (found - expected).norm() <= rtol * expected.norm() + 1e-12


@pytest.mark.parametrize(
    ("method", "scope"), [("btl", "epoch"), ("btl", "batch"), ("hib", "batch")]
)
def test_one_part_and_six_train_alike(tiny, method, scope):
    """Also where the loss draws, which it does for all of a batch."""
    encoder = EncoderConfig(method, dim=8)
    options = {"batch": 35, "data": DATA, "mining": MINING[scope], "encoder": encoder}
    one, six = (
        trainer_of(tiny(micro_batches=micro_batches, **options)) for micro_batches in (1, 6)
    )
    seen = forward_passes(six)
    expected, found = epochs(one, last=2), epochs(six, last=2)
    assert [each["tuples"] for each in found] == [each["tuples"] for each in expected]
    assert min(each["tuples"] for each in found) > 50
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-4)
    for name, values in one.encoder.state_dict().items():
        assert_close(six.encoder.state_dict()[name], values)
    pairs = zip(one.encoder.parameters(), six.encoder.parameters(), strict=True)
    for theirs, ours in pairs:
        expected_state, state = one.optimizer.state[theirs], six.optimizer.state[ours]
        assert state["step"] == expected_state["step"] > 10
        assert_close(state["exp_avg"], expected_state["exp_avg"])
        assert_close(state["exp_avg_sq"], expected_state["exp_avg_sq"])
    # Each part is a forward pass of its own.
    passes = [len(images) for training, images in seen if training]
    assert len(passes) == 6 * state["step"]
    members = 4 if scope == "epoch" else 1  # anchor, positive, two negatives
    assert set(passes[:6]) == {5 * members, 6 * members}
    assert sum(passes[:6]) == 35 * members


def naive_tuples(encoder, pixels, labels):
    """Embeddings of the members of all tuples, which are found by brute force, and their mask."""
    with torch.no_grad():
        vectors = encoder.eval()(pixels).vectors.double()
    distances = torch.cdist(vectors, vectors).numpy()
    same = labels[:, None] == labels
    positive = np.where(same & ~np.eye(len(labels), dtype=bool), distances, np.inf).argmin(1)
    negatives = np.where(same, np.inf, distances).argsort(1)[:, :2]
    rows = np.concatenate([np.arange(len(labels)), positive, negatives.reshape(-1)])
    embedding = encoder.train()(pixels[rows])
    return embedding, torch.ones(len(labels), 2, dtype=torch.bool)


@pytest.mark.parametrize("scope", ["epoch", "batch"])
@pytest.mark.parametrize("micro_batches", [1, 7])
def test_the_gradient_is_that_of_the_mean_loss_of_all_tuples(tiny, scope, micro_batches):
    config = tiny(batch=313, micro_batches=micro_batches, data=DATA, mining=MINING[scope])
    trainer, naive = trainer_of(config), trainer_of(config)
    labels = naive.images.labels
    pixels = config.preprocessing(naive.images.images)
    tuples = naive_tuples(naive.encoder, pixels, labels)
    loss = naive.encoder.loss(*tuples, config.loss_options()).mean()
    loss.backward()
    (found,) = epochs(trainer)
    assert found["tuples"] == 313
    np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-4)
    pairs = zip(trainer.encoder.parameters(), naive.encoder.parameters(), strict=True)
    for ours, theirs in pairs:  # Adam's first moment after one step
        assert_close(trainer.optimizer.state[ours]["exp_avg"], 0.1 * theirs.grad, rtol=1e-3)


@pytest.mark.parametrize(("micro_batches", "left_out"), [(4, 0), (5, 4), (1, 0)])
def test_a_last_batch_of_fewer_tuples_than_parts_is_left_out(tiny, micro_batches, left_out):
    # 313 tuples are 3 batches of 103 and 4 tuples.
    config = tiny(batch=103, micro_batches=micro_batches, data=DATA)
    trainer = trainer_of(config)
    (found,) = epochs(trainer)
    assert found["tuples"] == 313 - left_out
    state = trainer.optimizer.state[next(trainer.encoder.parameters())]
    assert state["step"] == math.ceil((313 - left_out) / 103)


def test_dropout_is_drawn_for_each_part_of_each_step(tiny):
    """Of pictures that are all the same, by weights that stay as they are."""
    options = {
        **{"batch": 32, "micro_batches": 2, "mining": MINING["batch"]},
        "encoder": EncoderConfig("mc-dropout", dim=8, options={"passes": 2}),
        "optimizer": OptimizerConfig(lr=1e-12),
    }
    same = ImageSet(np.full((96, 8, 16), 200, np.uint8), np.arange(96) % 4, list(range(96)))
    drawn = []
    for seed in (5, 6):
        trainer = trainer_of(tiny(**options), same)
        trainer.encoder.register_forward_hook(
            lambda encoder, given, output: drawn.append(output.vectors.detach().flatten())
        )
        torch.manual_seed(seed)  # of the process, which is to change nothing
        epochs(trainer)
    first, again = torch.stack(drawn[:6]), torch.stack(drawn[6:])
    assert torch.equal(first, again)
    assert (torch.pdist(first) > 1e-3).all()
