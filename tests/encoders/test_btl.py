from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from rcir.data import Preprocessing
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.batches import embed as embed_all
from rcir.retrieval.retriever import Retriever


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


def test_the_scale_of_the_mean_is_trained_where_it_is_asked_for():
    images = pictures(8)
    config = EncoderConfig("btl", options={"scaled": True})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        scaled = build_encoder(config, 1, (8, 16))
    np.testing.assert_allclose(scaled.embed(images).vectors.norm(dim=1), 1, atol=1e-6)
    with torch.no_grad():
        scaled.log_scale.fill_(np.log(2.5))
    np.testing.assert_allclose(scaled.embed(images).vectors.norm(dim=1), 2.5, atol=1e-5)
    assert "log_scale" not in build_encoder(EncoderConfig("btl"), 1, (8, 16)).state_dict()
    embedding = scaled(images)
    valid = torch.ones(2, 1, dtype=torch.bool)
    scaled.loss(embedding[:6], valid, scaled.LossOptions()).sum().backward()
    assert scaled.log_scale.grad.abs() > 0


def test_candidates_are_ranked_by_the_expected_distance_where_it_is_asked_for(splits):
    config = EncoderConfig("btl", dim=8, options={"distance": "expected"})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = build_encoder(config, 1, (8, 16))
        torch.nn.init.normal_(encoder.variance_head.layers[-1].weight, std=2.0)
    retriever = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=300)
    found = retriever.search(splits.test.images[:20])
    embed = partial(embed_all, encoder, Preprocessing())
    query, item = (embed(part) for part in (splits.test.images[:20], splits.gallery.images))
    squared = torch.cdist(query.vectors.double(), item.vectors.double()).square()
    expected = (squared + 8 * (query.variance + item.variance.T)).sqrt()
    best = expected.sort(dim=1).values
    np.testing.assert_allclose(found.distances, best, rtol=1e-5)
    near = expected.gather(1, torch.from_numpy(found.positions))
    np.testing.assert_allclose(found.distances, near, rtol=1e-5)
    plain = squared.argsort(dim=1).numpy()
    assert (found.positions != plain).mean() > 0.1  # the variances decide
