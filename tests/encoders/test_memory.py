"""Batches by a memory budget, against sizes of activations that are counted by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from rcir.data import Preprocessing
from rcir.encoders import EncoderConfig, batches, build_encoder
from rcir.encoders.embedder import Embedder
from rcir.encoders.memory import OVERHEAD, batch_within, saved_bytes
from rcir.errors import InvalidConfig

GIB = 2**30


def encoder_of(backbone="resnet10", size=(64, 64)):
    config = EncoderConfig("deterministic", backbone, "avg", dim=8)
    return build_encoder(config, 3, size).eval()


def test_the_batch_shrinks_with_the_budget_and_the_size_of_images():
    encoder, image = encoder_of(), torch.zeros(1, 3, 64, 64)
    budgets = [0.5, 0.05, 0.005, 1e-9]
    sizes = [batch_within(encoder, image, 10**6, budget) for budget in budgets]
    assert sizes[0] == pytest.approx(10 * sizes[1], rel=0.01)
    assert sizes[1] == pytest.approx(10 * sizes[2], rel=0.2)
    assert sizes[3] == 1
    larger = batch_within(encoder, torch.zeros(1, 3, 128, 128), 10**6, 0.5)
    assert larger == pytest.approx(sizes[0] / 4, rel=0.2)
    assert batch_within(encoder, image, 7, 0.5) == 7


def test_the_budget_holds_the_activations_that_are_alive_together():
    """Of a chain of layers these are the input and the output of one layer."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(3, 50, 1), nn.ReLU(), nn.Conv2d(50, 2, 1), nn.ReLU()
            )

        def embed(self, images):
            return self.layers(images)

    numbers = 64 * 64 * (50 + 50)  # the output of the first convolution, and of the first ReLU
    expected = GIB / (OVERHEAD * 4 * numbers)
    assert batch_within(Chain(), torch.zeros(1, 3, 64, 64), 10**6, 1.0) == int(expected)


def test_saved_bytes_are_those_of_the_tensors_that_the_backward_pass_needs():
    weight = torch.ones(5, 5, requires_grad=True)
    values = torch.ones(100, 5)
    # The product needs its input, and the sigmoid its output.
    assert saved_bytes(lambda: (values @ weight).sigmoid()) == 4 * (100 * 5 + 100 * 5)
    meta = weight.detach().to("meta").requires_grad_()
    assert saved_bytes(lambda: (values.to("meta") @ meta).sigmoid()) == 4 * (100 * 5 + 100 * 5)


def test_vectors_do_not_depend_on_the_batch(monkeypatch):
    encoder, preprocessing = encoder_of(), Preprocessing((64, 64), 3)
    images = np.random.default_rng(0).integers(0, 256, (40, 64, 64, 3), dtype=np.uint8)
    expected = Embedder(batch=40)(encoder, preprocessing, images).vectors
    forwards, embed = [], encoder.embed

    def counted(batch, *precision):
        forwards.append(len(batch))
        return embed(batch, *precision)

    monkeypatch.setattr(encoder, "embed", counted)
    monkeypatch.setattr(batches, "BATCH", 16)
    vectors = Embedder()(encoder, preprocessing, images).vectors
    assert max(forwards) == 16
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_budgets_that_are_none_are_refused(value):
    from training.config import TrainingConfig

    with pytest.raises(InvalidConfig, match="memory_gib"):
        TrainingConfig("run", memory_gib=value)
