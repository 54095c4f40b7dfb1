import pytest
import torch
from torch.nn import functional as F

from rcir.encoders import EncoderConfig, build_encoder


def pictures(n=5, seed=0):
    return torch.rand(n, 1, 8, 16, generator=torch.Generator().manual_seed(seed))


def build(mean_norm):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_encoder(EncoderConfig("btl", mean_norm=mean_norm), 1, (8, 16))


def raw(encoder, images):
    with torch.no_grad():
        return encoder.mean_head(encoder.backbone(images))


def test_variance_starts_at_a_thousandth_and_is_the_uncertainty():
    embedding = build("unit").embed(torch.cat([pictures(), torch.zeros(1, 1, 8, 16)]))
    torch.testing.assert_close(embedding.variance, torch.full((6, 1), 1e-3))
    assert torch.equal(embedding.uncertainty, embedding.variance[:, 0])


def test_variance_depends_on_the_image_once_the_head_has_weights():
    encoder = build("unit")
    torch.nn.init.normal_(encoder.variance_head.layers[-1].weight, std=1.0)
    variance = encoder.embed(pictures()).variance
    assert (variance > 0).all()
    assert len(variance.unique()) == 5


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_scaled_unit_means_have_the_length_of_the_factor(factor):
    encoder = build("scaled_unit").train()
    encoder(pictures())  # must not set the factor
    assert encoder.log_scale.item() == 0.0
    with torch.no_grad():
        encoder.log_scale.fill_(factor).log_()
    mean = encoder.embed(pictures()).mean
    torch.testing.assert_close(mean, factor * F.normalize(raw(encoder, pictures())))


def test_scaled_raw_means_start_at_unit_length_on_average_over_the_first_training_batch():
    encoder = build("scaled_raw")
    torch.testing.assert_close(encoder.embed(pictures()).mean, raw(encoder, pictures()))
    encoder.train()
    first = encoder(pictures()).mean
    assert first.norm(dim=1).mean().item() == pytest.approx(1.0, rel=1e-5)
    direction = F.normalize(raw(encoder, pictures()))
    torch.testing.assert_close(F.normalize(first.detach()), direction)
    scale = encoder.log_scale.item()
    encoder(3 * pictures(seed=9))  # later batches must not set it again
    assert encoder.log_scale.item() == scale
