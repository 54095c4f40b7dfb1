from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rcir.data import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.batches import embed as embed_all
from rcir.encoders.wood import draw_von_mises_fisher
from rcir.errors import InvalidConfig
from rcir.losses import bessel_ratio
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import load, save


def pictures(n=5, seed=0):
    return torch.rand(n, 1, 8, 16, generator=torch.Generator().manual_seed(seed))


def build(spread=0.0, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = build_encoder(EncoderConfig("vmf", dim=8, options=options), 1, (8, 16))
        torch.nn.init.normal_(encoder.dispersion_head.layers[-1].weight, std=spread)
        return encoder


@pytest.mark.parametrize("dim", [2, 16, 2048])
def test_the_mean_resultant_length_starts_at_nine_tenths(dim):
    encoder = build_encoder(EncoderConfig("vmf", dim=dim), 1, (8, 16))
    embedding = encoder.embed(torch.cat([pictures(), torch.zeros(1, 1, 8, 16)]))
    concentration = embedding.extra["concentration"]
    assert concentration.shape == (6, 1)
    lengths = bessel_ratio(concentration, dim)
    np.testing.assert_allclose(lengths, 0.9, atol=0.02)


def test_the_uncertainty_is_the_inverse_of_the_concentration_and_depends_on_the_image():
    embedding = build(spread=1.0).embed(pictures())
    assert embedding.variance is None
    inverse = 1 / embedding.extra["concentration"][:, 0]
    torch.testing.assert_close(embedding.uncertainty, inverse)
    assert len(embedding.uncertainty.unique()) == 5
    np.testing.assert_allclose(embedding.vectors.norm(dim=1), 1, atol=1e-6)


def test_the_loss_reaches_both_heads():
    encoder = build(spread=0.1)
    valid = torch.ones(2, 1, dtype=torch.bool)
    encoder.loss(encoder(pictures(6)), valid, encoder.LossOptions()).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())


def test_embeddings_without_a_concentration_are_refused():
    encoder = build()
    with pytest.raises(InvalidConfig, match="concentration"):
        encoder.loss(Embedding(torch.eye(3)), torch.ones(1, 1, dtype=torch.bool), None)


def test_candidates_are_ranked_by_the_expected_distance_where_it_is_asked_for(splits, tmp_path):
    encoder = build(spread=2.0, distance="expected")
    retriever = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=300)
    found = retriever.search(splits.test.images[:20])
    embed = partial(embed_all, encoder, Preprocessing())
    query, item = (embed(part) for part in (splits.test.images[:20], splits.gallery.images))
    lengths = [bessel_ratio(each.extra["concentration"], 8) for each in (query, item)]
    cosines = query.vectors.double() @ item.vectors.double().T
    expected = (2 - 2 * lengths[0] * lengths[1].T * cosines).sqrt()
    np.testing.assert_allclose(found.distances, expected.sort(dim=1).values, rtol=1e-5)
    near = expected.gather(1, torch.from_numpy(found.positions))
    np.testing.assert_allclose(found.distances, near, rtol=1e-5)
    plain = cosines.argsort(dim=1, descending=True).numpy()
    assert (found.positions != plain).mean() > 0.1  # the concentrations decide
    loaded = load(save(retriever, tmp_path / "retriever"))
    np.testing.assert_array_equal(loaded.search(splits.test.images[:20]).distances, found.distances)


@pytest.mark.parametrize(
    ("dim", "concentration"), [(2, 0.1), (2, 30.0), (3, 5.0), (16, 1.0), (16, 200.0), (512, 300.0)]
)
def test_draws_have_the_direction_and_the_length_of_their_distribution(dim, concentration):
    generator = torch.Generator().manual_seed(0)
    mean = F.normalize(torch.randn(1, dim, generator=generator, dtype=torch.float64))
    kappa = torch.tensor([[concentration]], dtype=torch.float64)
    count = 40_000 if dim < 100 else 4_000
    drawn = draw_von_mises_fisher(mean, kappa, count, generator)[:, 0]
    np.testing.assert_allclose(drawn.norm(dim=1), 1, atol=1e-9)
    along = drawn @ mean[0]
    length = bessel_ratio(kappa, dim).item()
    assert along.mean().item() == pytest.approx(length, abs=5 * along.std().item() / count**0.5)
    # Of the second moment along the mean, 1 - (d - 1) A / kappa, too.
    square = along.square()
    expected = 1 - (dim - 1) * length / concentration
    assert square.mean().item() == pytest.approx(expected, abs=5 * square.std().item() / count**0.5)
    # Across, no direction is preferred.
    across = drawn.mean(0) - along.mean() * mean[0]
    assert across.norm() < 3 * (1 / count) ** 0.5


def test_draws_of_an_encoder_are_of_its_distributions_and_of_the_generator():
    encoder = build(spread=1.0, passes=2000)
    images = pictures()
    drawn = encoder.samples(images, torch.Generator().manual_seed(1))
    embedding = encoder.embed(images)
    assert drawn.shape == (2000, 5, 8)
    assert drawn.dtype == torch.float32
    lengths = bessel_ratio(embedding.extra["concentration"], 8)
    torch.testing.assert_close(
        drawn.mean(0).double(), lengths * embedding.vectors, atol=0.06, rtol=0
    )
    again = encoder.samples(images, torch.Generator().manual_seed(1))
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn, encoder.samples(images, torch.Generator().manual_seed(2)))


def test_what_is_almost_certain_stays_finite():
    """Softplus of -110 is 0 in float32."""
    encoder = build()
    torch.nn.init.constant_(encoder.dispersion_head.layers[-1].bias, -110.0)
    images = torch.rand(5, 1, 8, 16)
    embedding = encoder(images)
    assert embedding.uncertainty.tolist() == pytest.approx([1e-8] * 5)
    losses = encoder.loss(embedding, torch.ones(1, 3, dtype=torch.bool), encoder.LossOptions())
    losses.sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())
    drawn = encoder.samples(images, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn[0], embedding.vectors.detach(), atol=2e-3, rtol=0)
    mean = torch.eye(4)[:1]
    sure = draw_von_mises_fisher(mean, torch.tensor([[1e30]]), 3, torch.Generator())
    torch.testing.assert_close(sure[:, 0], mean.expand(3, 4), atol=1e-4, rtol=0)
