import torch
from torch.nn import functional as F

from rcir.encoders import EncoderConfig, build_encoder


def pictures(n=5, seed=0):
    return torch.rand(n, 1, 8, 16, generator=torch.Generator().manual_seed(seed))


def build():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_encoder(EncoderConfig("btl"), 1, (8, 16))


def raw(encoder, images):
    with torch.no_grad():
        return encoder.mean_head(encoder.backbone(images))


def test_variance_starts_at_a_thousandth_and_is_the_uncertainty():
    embedding = build().embed(torch.cat([pictures(), torch.zeros(1, 1, 8, 16)]))
    torch.testing.assert_close(embedding.variance, torch.full((6, 1), 1e-3))
    assert torch.equal(embedding.uncertainty, embedding.variance[:, 0])


def test_variance_depends_on_the_image_once_the_head_has_weights():
    encoder = build()
    torch.nn.init.normal_(encoder.variance_head.layers[-1].weight, std=1.0)
    variance = encoder.embed(pictures()).variance
    assert (variance > 0).all()
    assert len(variance.unique()) == 5


def test_means_are_the_directions_of_the_mean_head():
    encoder = build()
    torch.testing.assert_close(
        encoder.embed(pictures()).vectors, F.normalize(raw(encoder, pictures()))
    )
