"""The GPU path on a simulated device; `test_simulated_gpu.py` runs this in a process of its own.

Every check computes the same on the CPU and on the device. The results are equal bit by bit, as the
device computes on the CPU too.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args
from unittest import mock

import numpy as np
import torch
from torch.utils import _pytree as pytree

from rcir.data import Augmentation, ImageSet, Preprocessing
from rcir.data.relevance import SameLabel, WithinRadius
from rcir.embedding import as_numpy
from rcir.encoders import METHODS, EmbeddedTuples, build_encoder
from rcir.encoders.base import TrainingImages
from rcir.encoders.batches import embed
from rcir.encoders.deep_ensemble import Combination
from rcir.encoders.embedder import Embedder
from rcir.encoders.rerank import nearest_of_draws, rerank
from rcir.index import nearest_others
from rcir.losses import PointLossOptions, TupleRows, point_tuple_loss
from rcir.losses.tuples import PointForm
from rcir.mining import MiningConfig, mine
from rcir.retrieval.retriever import Retriever
from rcir.serving.served import Served
from rcir.store.codec import encode
from tests.methods import config_of
from tests.simulated_gpu import CPU, DEVICE, on_cpu, simulated, waits
from training import TrainingConfig
from training.checkpoint import CheckpointWriter, TrainState, restore
from training.trainer import Trainer
from training.validation import validate
from training.workers import Workers

torch.set_num_threads(1)  # of small tensors
N, SIZE, CHANNELS, DIM = 36, (8, 16), 3, 8
PREPROCESSING = Preprocessing(SIZE, CHANNELS)
rng = np.random.default_rng(0)
PIXELS = rng.integers(0, 256, (N, *SIZE, CHANNELS), np.uint8)
IMAGES = ImageSet(
    PIXELS, np.arange(N) % 6, [str(row) for row in range(N)], {"person": np.arange(N) % 12}
)
# Every method, and what is computed in another way with other options.
METHOD_OPTIONS = [
    *(("deterministic", {}), ("norm-softmax", {}), ("pretrained", {})),
    *(("btl", {}), ("btl", {"scaled": True, "distance": "expected"})),
    *(("hib", {"components": components}) for components in (0, 1, 2)),
    *(("vmf", {"distance": "expected"}), ("tripreg", {"unit": True})),
    *(("lam", {"online": True}), ("lam", {"hessian": "arccos", "variant": "full"})),
    *(("mc-dropout", options) for options in ({}, {"channels": True}, {"masks": "independent"})),
    *(("pfe", {"steps": 2}), ("pfe", {"base": "pretrained", "distance": "mls", "steps": 2})),
    *(("deep-ensemble", {"combination": name}) for name in get_args(Combination)),
]


def encoder_on(device, config):
    """A new encoder with the same weights each time."""
    torch.manual_seed(0)
    return build_encoder(config, CHANNELS, SIZE).to(device)


def loss_and_gradients(device, config):
    encoder = encoder_on(device, config).train()
    options = TrainingConfig("run", encoder=config).loss_options()
    n, count = 6, 3
    embedding = encoder(PREPROCESSING.normalise(PREPROCESSING.resized(PIXELS[:30]).to(device)))
    if encoder.by_label:
        losses = encoder.label_loss(embedding, torch.arange(30).to(device), options)
    else:
        valid = (torch.arange(n * count).view(n, count) % 4 != 1).to(device)
        losses = encoder.loss(EmbeddedTuples(embedding, valid), options)
    if losses.requires_grad:
        losses.sum().backward()
    encoder.after_step()
    gradients = [weights.grad for weights in encoder.parameters() if weights.grad is not None]
    return losses, gradients, encoder.state_dict()


def fitted(device, config):
    """An encoder that is fitted to training images on the device."""
    encoder = encoder_on(device, config).eval()
    options = TrainingConfig("run", encoder=config).loss_options()
    encoder.fit_posthoc(TrainingImages(IMAGES, PREPROCESSING, Embedder(batch=20), 0, options))
    return encoder


def fitted_state(device, config):
    return fitted(device, config).state_dict()


def embeddings(device, config):
    """Embeddings and distances, as a retriever asks for them."""
    encoder = fitted(CPU, config).to(device)
    embedding = embed(encoder, PREPROCESSING, PIXELS)
    results = [embedding.tensors]
    positions = np.add.outer(np.arange(5), np.arange(7)) % N
    queries, places = embedding[:5], torch.from_numpy(positions).to(device)
    if encoder.reranks:
        items = embedding.map(torch.Tensor.cpu)
        results.append(rerank(encoder, queries, items, positions))
        results.append(encoder.rerank(queries, embedding[places.flatten()]))
    if encoder.draws:
        vectors = embedding.vectors.cpu().numpy()
        results.append(nearest_of_draws(encoder, queries, positions, vectors.__getitem__, 3))
        results.append(encoder.draw_distances(queries, embedding.vectors[places]))
    return results


def retrieved(device, method, templates=None):
    """The candidates of some images."""
    encoder = encoder_on(device, config_of(method, dim=DIM)).eval()
    retriever = Retriever.build(encoder, PREPROCESSING, IMAGES, 5, templates=templates)
    searcher = retriever.searcher
    queries = searcher.prepare(PIXELS[:9])
    stored = queries.embedding.tensors if queries.embedding else {}
    assert all(each.device == CPU for each in stored.values())
    results = searcher.search(queries)
    return results.distances, results.positions, searcher.gallery.uncertainty


def served(device):
    """The vectors of two requests of two pictures each, which a server embeds together."""
    encoder = encoder_on(device, config_of("btl", dim=DIM)).eval()
    retriever = Retriever.build(encoder, PREPROCESSING, IMAGES, depth=5)
    requests = [
        (list(PIXELS[:2]), np.array([b"0", b"1"])),
        (list(PIXELS[2:4]), np.array([b"2", b"3"])),
    ]
    queries = Served(retriever, version="", manifest="").queries(requests)
    return [each.vectors for each in queries]


def neighbours(device):
    vectors = torch.randn(N, DIM, generator=torch.Generator().manual_seed(0)).to(device)
    return nearest_others(vectors, 5), as_numpy(vectors)


def point_losses(device):
    vectors = torch.randn(30, DIM, generator=torch.Generator().manual_seed(0))
    vectors = vectors.to(device).requires_grad_()
    valid = (torch.arange(18).view(6, 3) % 4 != 1).to(device)
    rows = TupleRows.split(vectors, valid)
    options = [PointLossOptions(form=form) for form in get_args(PointForm)]
    losses = [point_tuple_loss(rows, valid, each) for each in options]
    torch.stack(losses).sum().backward()
    return losses, vectors.grad


def mined(device, relevance):
    """Tuples of every kind; vectors are whole numbers, of which many are equally far apart."""
    n = len(relevance)
    cache = torch.randint(0, 3, (n, 4), generator=torch.Generator().manual_seed(0)).float()
    anchors = torch.arange(0, n, 29)  # on either device
    return [
        vars(
            mine(
                cache.to(device),
                relevance,
                anchors.to(device) if positive == "random" else anchors,
                MiningConfig(positive, negatives, margin=1.5),
                torch.Generator().manual_seed(0),
            )
        )
        for positive in ("nearest", "random", "farthest")
        for negatives in ("hardest", "margin-violating", "semi-hard", "top-random")
    ]


class Steps:
    """Stands in for the progress of an epoch, and notes the waits until each step is taken."""

    def __init__(self):
        self.totals = []

    def become(self, name, total):
        pass

    def advance(self, count=1, reused=False):
        if not reused:
            self.totals.append(waits.lines.copy())

    def require_at_most(self, budget):
        """Assert the number of waits per step, without those before the first step."""
        lines, n = self.totals[-1] - self.totals[0], len(self.totals) - 1
        assert n >= 2
        text = "\n".join(f"  {count / n:g} at {line}" for line, count in lines.items())
        assert lines.total() <= budget * n, f"more than {budget} waits per step:\n{text}"


class OneOfSeveral(Workers):
    """A worker alone, that adds up and sends only what several workers could."""

    def all_reduce(self, own):
        assert own.device == self.device
        return super().all_reduce(own)

    def broadcast(self, own):
        tensors = [each for each in pytree.tree_leaves(own) if isinstance(each, torch.Tensor)]
        assert all(each.device == CPU for each in tensors)
        return super().broadcast(own)


def trainer_on(device, config):
    encoder = encoder_on(CPU, config.encoder)
    encoder.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(encoder.parameters(), config.optimizer.lr, fused=True)
    return Trainer(config, encoder, encoder, optimizer, IMAGES, OneOfSeveral(0, 1, device))


def epoch(device, config, budget):
    """The weights after an epoch, its loss, and that of a collapsed encoder."""
    trainer, steps = trainer_on(device, config), Steps()
    trained = trainer.epoch(1, steps)
    steps.require_at_most(budget)
    return trained, trainer.encoder.state_dict(), trainer.collapsed_loss()


def continued(device):
    """An epoch on the CPU, its checkpoint, and an epoch on the device from there."""
    config = training("btl")
    first, second = trainer_on(CPU, config), trainer_on(device, config)
    first.epoch(1, Steps())
    embedding = embed(first.encoder.to(device), PREPROCESSING, PIXELS)
    validation = validate(embedding, IMAGES)
    first.encoder.to(CPU)
    with tempfile.TemporaryDirectory() as folder:
        state = TrainState(epoch=1, seed=0)
        with CheckpointWriter(Path(folder)) as writer:
            writer.save(state, first.encoder, first.optimizer, validation)
        restore(Path(folder), (1, 0), second.encoder, second.optimizer)
    second.epoch(2, Steps())
    return encode(validation), second.encoder.state_dict()


def without_tuples(device):
    """An epoch in which no negative is farther than the positive and nearer than it at once."""
    mining = MiningConfig("nearest", "semi-hard", margin=0.0, scope="batch")
    return trainer_on(device, training("btl", mining)).epoch(1, Steps())


def gathered(device):
    """What a worker of two gathers, as if the other one had the same rows."""

    def all_gather(rows, own):
        assert own.device == rows.device == device
        assert own.is_contiguous()
        for each in rows.split(len(own)):
            each.copy_(own)

    with mock.patch("torch.distributed.all_gather_into_tensor", all_gather):
        return Workers(0, 2, device).all_gather(torch.arange(6).view(3, 2))


def training(method, mining=None, augmentation=None, **options):
    return TrainingConfig(
        "run",
        batch=12,
        micro_batches=2,
        preprocessing=PREPROCESSING,
        encoder=config_of(method, dim=DIM, **options),
        mining=mining or MiningConfig("random", "hardest"),
        augmentation=augmentation or Augmentation(),
    )


COLOURS = Augmentation(rotation=10, crop=0.8, jitter=(0.2, 0.2, 0.2, 0.1), occlusion=0.3)
BATCH = MiningConfig("farthest", "hardest", scope="batch", samples_per_class=2)
SAMPLED = MiningConfig("nearest", "top-random", cache="sampled", sample=30, refresh=3)
# A training of each kind, and how often a step of two micro-batches may wait.
EPOCHS = {
    "tuples of an epoch": (training("btl", augmentation=Augmentation(flip=True)), 0),
    "tuples of a sample, in bfloat16": (
        replace(training("hib", SAMPLED), precision="bfloat16"),
        0,
    ),
    "tuples of a batch": (
        training("deterministic", BATCH, COLOURS, backbone="resnet10", pooling="gem"),
        14,
    ),
    "labels": (training("norm-softmax"), 0),
    "curvature": (training("lam", options={"online": True}), 0),
}


def checks():
    """Everything that is computed on both devices, by name: functions of the device."""
    assert {method for method, _ in METHOD_OPTIONS} == METHODS.keys()
    for method, options in METHOD_OPTIONS:
        config = config_of(method, dim=DIM, pooling="gem", options=options)
        name = " ".join([method, *map(str, options.values())])
        yield f"loss of {name}", partial(loss_and_gradients, config=config)
        yield f"embedding of {name}", partial(embeddings, config=config)
        if method in ("pfe", "deep-ensemble", "lam"):
            yield f"fit of {name}", partial(fitted_state, config=config)
    yield "point losses", point_losses
    labels = SameLabel(np.arange(1300) % 260)
    places = WithinRadius(rng.uniform(0, 30, (400, 2)), 4.0, 2.0, np.arange(400) % 2 == 0)
    yield "mining by label", partial(mined, relevance=labels)
    yield "mining by place", partial(mined, relevance=places)
    yield "queries of requests", served
    yield "neighbours", neighbours
    yield "candidates", partial(retrieved, method="hib")
    for method in ("btl", "deterministic"):
        name = f"candidates of templates by {method}"
        yield name, partial(retrieved, method=method, templates="person")
    yield "gathered rows", gathered
    yield "continued training", continued
    yield "training without tuples", without_tuples
    for name, (config, budget) in EPOCHS.items():
        yield f"epoch: {name}", partial(epoch, config=config, budget=budget)


def require_equal(work, expected):
    """Compute it on the device, and compare with what was computed on the CPU."""
    with simulated():
        actual = work(DEVICE)
        assert not waits.in_backward, f"waits within backward(): {waits.in_backward}"
    actual, expected = (pytree.tree_flatten(each) for each in (actual, expected))
    assert actual[1] == expected[1]
    for one, other in zip(actual[0], expected[0], strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(on_cpu(one), on_cpu(other), rtol=0, atol=0)
        else:
            np.testing.assert_array_equal(one, other)


def main():
    for name, work in checks():
        print(name, flush=True)
        require_equal(work, work(CPU))


if __name__ == "__main__":
    main()
