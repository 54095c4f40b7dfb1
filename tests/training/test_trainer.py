"""Epochs of training: which images and tuples they use, and the gradients of their steps."""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rcir.data import DataConfig, ImageSet, load_splits
from rcir.data.relevance import SameLabel, SharedLabel
from rcir.encoders import EmbeddedTuples, EncoderConfig, build_encoder
from rcir.errors import InvalidConfig, InvalidData
from rcir.losses import norm_softmax_loss
from rcir.mining import MiningConfig
from tests.training.helpers import (
    LEARNABLE,
    assert_close,
    epochs,
    equal,
    logged,
    recall,
    trainer_of,
    untrained,
)
from training import OptimizerConfig, train
from training.checks import check_images

DATA = DataConfig("digits", options={"train": 113, "validation": 100, "gallery": 100})
HARDEST = MiningConfig("nearest", "hardest")
BATCH = MiningConfig("random", "hardest", num_negatives=8, scope="batch")
# No choice that depends on distances: what rounds otherwise chooses the same tuples.
ALL_NEGATIVES = MiningConfig("random", "hardest", num_negatives=34, pool=34, scope="batch")
SAMPLED = MiningConfig("nearest", "hardest", cache="sampled", sample=60, refresh=7)
PER_CLASS = MiningConfig("farthest", "hardest", num_negatives=1, scope="batch", samples_per_class=4)
# No negative is farther than the nearest positive and nearer than it at once.
NEVER = MiningConfig("nearest", "semi-hard", margin=0.0)
BY_LABEL = EncoderConfig("norm-softmax", dim=8)


def numbered(labels):
    """Images whose every pixel is their row."""
    pixels = np.repeat(np.arange(len(labels), dtype=np.uint8), 128).reshape(-1, 8, 16)
    return ImageSet(pixels, np.array(labels), [str(row) for row in range(len(labels))])


def noise(n, n_labels):
    """Random images."""
    pixels = np.random.default_rng(0).integers(0, 256, (n, 8, 16), dtype=np.uint8)
    return replace(numbered(np.arange(n) % n_labels), images=pixels)


def forward_passes(trainer):
    """Return a list that fills with (training mode, images) of every forward pass."""
    passes = []
    trainer.encoder.register_forward_pre_hook(
        lambda encoder, inputs: passes.append((encoder.training, inputs[0].clone()))
    )
    return passes


def rows_of(passes, training):
    """Rows of numbered images, for each forward pass in this mode."""
    return [
        (pixels[:, 0, 0, 0] * 255).round().int().tolist()
        for mode, pixels in passes
        if mode is training
    ]


def test_sgd_takes_clipped_steps_at_a_rate_that_rises(tiny):
    """Against the rule of momentum, written out: v <- m v + g, w <- w - r v."""
    optimizer = OptimizerConfig(
        "sgd", 0.02, reference_batch=10, warmup=1, clip_norm=0.05, schedule="constant", momentum=0.5
    )
    trainer = trainer_of(tiny(batch=20, mining=HARDEST, optimizer=optimizer), noise(80, 8))
    trainer.optimizer = optimizer.build(trainer.encoder.parameters())
    weights = list(trainer.encoder.parameters())
    expected = [weight.detach().clone() for weight in weights]
    speed = [torch.zeros_like(weight) for weight in weights]
    rates, norms = [], []

    def before(_, args, kwargs):
        gradients = [weight.grad for weight in weights]
        norms.append(math.sqrt(sum(gradient.square().sum().item() for gradient in gradients)))
        rate = 2 * 0.02 * (len(rates) + 1) / 4  # twice the batch it is for; four steps an epoch
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        assert rates[-1] == pytest.approx(rate)
        for value, velocity, gradient in zip(expected, speed, gradients, strict=True):
            velocity.mul_(0.5).add_(gradient)
            value.sub_(rate * velocity)

    trainer.optimizer.register_step_pre_hook(before)
    (metrics,) = epochs(trainer)
    assert metrics["lr"] == rates[-1] == pytest.approx(0.04)
    assert norms == pytest.approx([0.05] * 4)  # all are clipped
    for weight, value in zip(weights, expected, strict=True):
        assert_close(weight.detach(), value)


def n_steps(trainer):
    return trainer.optimizer.state[next(trainer.encoder.parameters())]["step"]


@pytest.mark.parametrize(
    "changes",
    [
        {"mining": HARDEST},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {"mining": replace(BATCH, negatives="semi-hard", margin=0.3), "batch": 128},
                {"mining": replace(SAMPLED, sample=300, refresh=12)},
                {"mining": replace(PER_CLASS, positive="nearest")},
                {"encoder": BY_LABEL},
            )
        ),
    ],
    ids=["epoch", "batch", "sampled", "per-class", "by-label"],
)
def test_training_raises_recall_on_unseen_classes(tiny, changes):
    config = tiny(**{"epochs": 3, "data": LEARNABLE, **changes})
    splits = load_splits(config.data)
    trainer = trainer_of(config, splits.train)
    epochs(trainer, last=config.epochs)
    assert recall(trainer.encoder, splits) > recall(untrained(config), splits) + 0.07


@pytest.mark.parametrize(
    ("method", "scope"), [("btl", "epoch"), ("btl", "batch"), ("hib", "batch")]
)
def test_steps_do_not_depend_on_the_number_of_micro_batches(tiny, method, scope):
    """The loss of hib draws samples, once for the whole batch."""
    mining = HARDEST if scope == "epoch" else ALL_NEGATIVES
    options = {"batch": 35, "mining": mining, "encoder": EncoderConfig(method, dim=8)}
    one, six = (
        trainer_of(tiny(micro_batches=count, **options), noise(113, 12)) for count in (1, 6)
    )
    (expected,), (metrics,) = epochs(one), epochs(six)
    assert metrics["tuples"] == expected["tuples"] > 90
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    for name, values in one.encoder.state_dict().items():
        assert_close(six.encoder.state_dict()[name], values)
    pairs = zip(one.encoder.parameters(), six.encoder.parameters(), strict=True)
    for theirs, ours in pairs:
        expected_state, state = one.optimizer.state[theirs], six.optimizer.state[ours]
        assert state["step"] == expected_state["step"] >= 3
        assert_close(state["exp_avg"], expected_state["exp_avg"])


def hardest_tuples(vectors, labels):
    """By brute force, rows of the nearest positive and of the two nearest negatives; and by how
    much each choice is nearer than the next."""
    distances = torch.cdist(vectors, vectors).numpy()
    same, far = labels[:, None] == labels, 1e9
    positives = np.where(same & ~np.eye(len(labels), dtype=bool), distances, far)
    negatives = np.where(same, far, distances)
    order = negatives.argsort(1)
    gaps = np.c_[
        np.diff(np.sort(positives)[:, :2]), np.diff(np.take_along_axis(negatives, order[:, :3], 1))
    ]
    return positives.argmin(1), order[:, :2], gaps.min(1)


def clear_images(config, n=150):
    """Training images whose nearest positives and negatives rounding cannot change."""
    encoder, images = untrained(config).eval(), load_splits(config.data).train
    images = images.subset(np.arange(n))
    while True:
        with torch.no_grad():
            vectors = encoder(config.preprocessing(images.images)).vectors.double()
        _, counts = np.unique(images.labels, return_counts=True)
        positive, negatives, gaps = hardest_tuples(vectors, images.labels)
        clear = (gaps > 1e-5) & np.isin(images.labels, np.unique(images.labels)[counts > 1])
        if clear.all():
            return images, np.concatenate([np.arange(len(images)), positive, negatives.ravel()])
        images = images.subset(np.flatnonzero(clear))


@pytest.mark.parametrize("scope", ["epoch", "batch"])
def test_the_gradient_is_that_of_the_mean_loss_of_all_tuples(tiny, scope):
    mining = replace(HARDEST, scope=scope)
    images, rows = clear_images(tiny(mining=mining, data=LEARNABLE))
    n = len(images)
    assert n > 60
    config = tiny(batch=n, micro_batches=7, mining=mining, data=LEARNABLE)
    trainer, encoder = trainer_of(config, images), untrained(config).train()
    embedding = encoder(config.preprocessing(images.images)[rows])
    valid = torch.ones(n, 2, dtype=torch.bool)
    loss = encoder.loss(EmbeddedTuples(embedding, valid), config.loss_options()).mean()
    assert_gradient(trainer, encoder, loss, n)


def test_the_gradient_by_label_is_that_of_the_mean_loss_of_all_images(tiny):
    config = tiny(batch=300, micro_batches=7, encoder=BY_LABEL)
    trainer, encoder = trainer_of(config), untrained(config).train()
    images = trainer.images
    places = {label: place for place, label in enumerate(sorted(set(images.labels.tolist())))}
    labels = torch.tensor([places[label] for label in images.labels.tolist()])
    vectors = encoder(config.preprocessing(images.images)).vectors
    loss = norm_softmax_loss(vectors, encoder.proxies, labels, 0.1).mean()
    assert_gradient(trainer, encoder, loss, 300)


def assert_gradient(trainer, encoder, loss, n):
    """An epoch of one step uses the gradient of this loss of another, equal encoder."""
    loss.backward()
    (metrics,) = epochs(trainer)
    assert metrics["tuples"] == n
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-3)
    pairs = zip(trainer.encoder.parameters(), encoder.parameters(), strict=True)
    for ours, theirs in pairs:  # Adam's first moment after one step
        assert_close(trainer.optimizer.state[ours]["exp_avg"], 0.1 * theirs.grad)


def test_a_last_batch_of_fewer_tuples_than_parts_is_left_out(tiny):
    # 113 tuples are 2 batches of 55 and 3 tuples.
    for micro_batches, tuples, steps in ((3, 113, 3), (4, 110, 2)):
        trainer = trainer_of(tiny(batch=55, micro_batches=micro_batches), noise(113, 20))
        (metrics,) = epochs(trainer)
        assert (metrics["tuples"], n_steps(trainer)) == (tuples, steps)


def test_dropout_is_drawn_for_each_part_of_each_step(tiny):
    """The images are all the same, and the weights hardly change."""
    options = {
        **{"batch": 32, "micro_batches": 2, "mining": replace(HARDEST, scope="batch")},
        "encoder": EncoderConfig("mc-dropout", dim=8, options={"passes": 2}),
        "optimizer": OptimizerConfig(lr=1e-12),
    }
    same = ImageSet(np.full((96, 8, 16), 200, np.uint8), np.arange(96) % 4, list(range(96)))
    outputs = []
    for seed in (5, 6):
        trainer = trainer_of(tiny(**options), same)
        trainer.encoder.register_forward_hook(
            lambda encoder, inputs, output: outputs.append(output.vectors.detach().flatten())
        )
        torch.manual_seed(seed)  # of the process, which is to change nothing
        epochs(trainer)
    first, again = torch.stack(outputs[:6]), torch.stack(outputs[6:])
    assert torch.equal(first, again)
    assert (torch.pdist(first) > 1e-3).all()


def test_within_batches_every_image_is_embedded_once_and_is_an_anchor(tiny):
    labels = np.arange(240) % 60
    trainer = trainer_of(tiny(batch=50, mining=BATCH), numbered(labels))
    passes = forward_passes(trainer)
    (metrics,) = epochs(trainer)
    batches = rows_of(passes, training=True)
    assert rows_of(passes, training=False) == []  # one forward pass serves mining and training
    assert [len(rows) for rows in batches] == [50] * 4  # a smaller last batch is left out
    assert len(set(np.concatenate(batches))) == 200
    anchors = sum(np.sum(labels[row] == labels[rows]) > 1 for rows in batches for row in rows)
    assert metrics["tuples"] == anchors


@pytest.mark.parametrize("scope", ["epoch", "batch"])
def test_without_a_tuple_the_weights_stay(tiny, scope):
    config = tiny(mining=replace(NEVER, scope=scope), data=DATA)
    trainer = trainer_of(config)
    (metrics,) = epochs(trainer)
    assert (metrics["loss"], metrics["tuples"]) == (0.0, 0.0)
    assert equal(trainer.encoder.state_dict(), untrained(config).state_dict())


def test_an_epoch_embeds_only_its_sample_and_takes_its_number_of_steps(tiny):
    trainer = trainer_of(tiny(batch=32, mining=SAMPLED), numbered(np.arange(240) % 24))
    passes = forward_passes(trainer)
    samples = []
    for number in (1, 2):
        passes.clear()
        (metrics,) = epochs(trainer, number, number)
        assert n_steps(trainer) == 7 * number
        assert metrics["tuples"] == 7 * 32
        embedded = np.concatenate(rows_of(passes, training=False))
        assert len(set(embedded)) == 60
        assert len(embedded) <= 61  # one image measures the memory of a forward pass
        trained = rows_of(passes, training=True)
        assert [len(rows) for rows in trained] == [32 * 4] * 7
        assert set(np.concatenate(trained)) <= set(embedded)
        # Anchors come in rounds: each image of the sample once, then each once more.
        anchors = np.concatenate([rows[:32] for rows in trained])
        for start in range(0, 180, 60):
            assert set(anchors[start : start + 60]) == set(embedded)
        samples.append(set(embedded))
    # Two samples of 60 of 240 share 15 images on average, with a standard deviation of 3.
    assert len(samples[0] & samples[1]) < 30


def test_anchors_without_a_tuple_are_not_replaced(tiny):
    # Of pairs, an odd sample leaves one image alone: 7 rounds of 4 tuples.
    config = tiny(batch=5, mining=replace(SAMPLED, sample=5))
    trainer = trainer_of(config, numbered(np.arange(40) // 2))
    assert epochs(trainer)[0]["tuples"] == 28
    assert n_steps(trainer) == 6


def test_batches_hold_some_images_of_each_of_some_labels(tiny):
    labels = np.repeat(np.arange(24), np.arange(24) % 3 + 8)  # 8, 9 or 10 of each
    config = tiny(batch=32, mining=PER_CLASS, encoder=EncoderConfig("deterministic", dim=8))
    trainer = trainer_of(config, numbered(labels))
    passes = forward_passes(trainer)
    (metrics,) = epochs(trainer)
    batches = rows_of(passes, training=True)
    for rows in batches:
        _, counts = np.unique(labels[rows], return_counts=True)
        assert counts.tolist() == [4] * 8
    # Each label has two groups of four images: 48 groups, 8 of them a batch.
    assert 4 <= len(batches) <= 6
    assert metrics["tuples"] == 32 * len(batches)
    rows = np.concatenate(batches)
    assert len(set(rows)) == len(rows)


def test_images_without_one_label_each_are_refused_where_labels_are_needed(tiny):
    images = numbered(np.arange(96) % 12)
    unlabelled = replace(images, labels=None, relevance=SameLabel(images.labels))
    with pytest.raises(InvalidConfig, match="samples_per_class"):
        check_images(tiny(batch=32, mining=PER_CLASS), unlabelled)
    with pytest.raises(InvalidData, match="7 labels"):
        check_images(tiny(batch=32, mining=PER_CLASS), numbered(np.arange(70) % 7))
    shared = SharedLabel.from_lists([[0, 1], [1], [2]] * 32, 3)
    config = tiny(encoder=BY_LABEL)
    with pytest.raises(InvalidConfig, match="label"):
        check_images(config, replace(images, labels=None, relevance=shared))
    by_tuples = replace(config, encoder=EncoderConfig("btl", dim=8), loss={})
    check_images(by_tuples, replace(images, labels=None, relevance=shared))


def test_the_number_of_classes_bounds_the_labels(tiny):
    images = numbered(np.arange(96) % 12)
    check_images(tiny(encoder=replace(BY_LABEL, options={"classes": 12})), images)
    with pytest.raises(InvalidConfig, match="classes"):
        check_images(tiny(encoder=replace(BY_LABEL, options={"classes": 11})), images)
    with pytest.raises(InvalidConfig, match="classes"):
        replace(BY_LABEL, options={"classes": 1})


@pytest.mark.parametrize(
    ("method", "loss", "expected"),
    [
        ("deterministic", {"margin": 0.25}, 0.25),
        ("deterministic", {"form": "unsquared"}, 0.1),
        ("deterministic", {"form": "soft"}, math.log(2)),
        ("btl", {"kl_scale": 0.0}, math.log(2)),
        ("norm-softmax", {}, math.log(60)),
    ],
)
def test_the_loss_of_a_collapsed_encoder(method, loss, expected, tiny):
    trainer = trainer_of(tiny(encoder=EncoderConfig(method, dim=8), loss=loss))
    assert len(np.unique(trainer.images.labels)) == 60
    assert trainer.collapsed_loss() == pytest.approx(expected, rel=1e-4)


def test_only_the_backbone_is_in_bfloat16():
    encoder = build_encoder(EncoderConfig("btl", dim=8), 1, (8, 16))
    images = torch.rand(4, 1, 8, 16)
    kinds = {}
    for name in ("backbone", "mean_head", "variance_head"):
        part = getattr(encoder, name)
        part.register_forward_hook(
            lambda module, inputs, output, name=name: kinds.update({name: output.dtype})
        )
    exact = encoder(images)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = encoder(images)
    heads = {"mean_head": torch.float32, "variance_head": torch.float32}
    assert kinds == {"backbone": torch.bfloat16} | heads
    assert rounded.vectors.dtype == rounded.variance.dtype == torch.float32
    torch.testing.assert_close(rounded.vectors, exact.vectors, rtol=0, atol=0.02)
    assert not torch.equal(rounded.vectors, exact.vectors)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile needs a C++ compiler",
)
def test_compiling_does_not_change_the_losses(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    # Pickling looks for names in all imported modules; some of jsonargparse's are deprecated.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    options = {
        **{"epochs": 2, "batch": 35, "micro_batches": 2, "mining": ALL_NEGATIVES},
        "encoder": EncoderConfig("deterministic", dim=8),
    }
    runs = [train(tiny(f"compile-{on}", compile=on, **options)) for on in (False, True)]
    assert list(tmp_path.glob("compiled/**/*.so"))
    eager, compiled = ([*logged(run).values()] for run in runs)
    np.testing.assert_allclose(compiled, eager, rtol=1e-2)
    # The names are the same, without those of torch.compile's wrapper.
    theirs, ours = (load_file(run.path / "encoder.safetensors") for run in runs)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values, rtol=0.05, atol=1e-3)
