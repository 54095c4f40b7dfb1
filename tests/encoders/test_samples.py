"""Draws of an embedding."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rcir.data import Preprocessing
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.batches import BATCH, draw_samples

DRAWN = {
    "mc-dropout": {"passes": 40},
    "deep-ensemble": {"members": 3},
    "btl": {"passes": 40},
}


def encoder(method):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = EncoderConfig(method, dim=8, options=DRAWN.get(method, {}))
        return build_encoder(config, 1, (8, 16)).train()


def generator():
    return torch.Generator().manual_seed(3)


@pytest.fixture
def images():
    return torch.rand(5, 1, 8, 16, generator=torch.Generator().manual_seed(2))


def test_an_encoder_that_is_certain_has_none(images):
    assert encoder("deterministic").samples(images, generator()) is None


def test_passes_of_mc_dropout_make_its_embedding(images):
    built = encoder("mc-dropout")
    drawn = built.samples(images, generator())
    embedding = built.embed(images)
    assert drawn.shape == (40, 5, 8)
    torch.testing.assert_close(F.normalize(drawn.mean(0)), embedding.vectors)
    torch.testing.assert_close(drawn.var(0).mean(1), embedding.uncertainty)


def test_members_of_an_ensemble_are_what_each_embeds(images):
    built = encoder("deep-ensemble")
    drawn = built.samples(images, generator())
    for member, vectors in zip(built.members, drawn, strict=True):
        torch.testing.assert_close(member.embed(images).vectors, vectors)


def test_gaussians_are_drawn_with_their_mean_and_variance(images):
    built = encoder("btl")
    many = images[:1].repeat(500, 1, 1, 1)
    drawn = built.samples(many, generator()).double().flatten(0, 1)
    embedding = built.embed(images[:1])
    deviation = embedding.variance.item() ** 0.5
    error = deviation / len(drawn) ** 0.5
    torch.testing.assert_close(drawn.mean(0), embedding.vectors[0].double(), rtol=0, atol=5 * error)
    assert drawn.std(0).mean().item() == pytest.approx(deviation, rel=0.02)
    torch.testing.assert_close(
        built.samples(images, generator()), built.samples(images, generator())
    )


def test_batches_have_noise_of_their_own_and_the_mode_is_restored(images):
    built = encoder("btl")
    preprocessing = Preprocessing()
    same = np.repeat((images[:1, 0].numpy() * 255).astype(np.uint8), 2 * BATCH, axis=0)
    drawn = draw_samples(built, preprocessing, same)
    assert built.training
    assert drawn.shape == (40, 2 * BATCH, 8)
    first, second = drawn[:, :BATCH].flatten(), drawn[:, BATCH:].flatten()
    noise = (
        torch.stack([first, second])
        - built.embed(preprocessing(same[:1])).vectors.repeat(40, BATCH).flatten()
    )
    assert torch.corrcoef(noise)[0, 1].abs() < 0.02
    torch.testing.assert_close(draw_samples(built, preprocessing, same), drawn)
