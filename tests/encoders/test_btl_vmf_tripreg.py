"""Encoders that predict a distribution in one pass (BTL, vMF, TripReg), and draws of embeddings."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rcir.data import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders import EmbeddedTuples, EncoderConfig, build_encoder
from rcir.encoders.batches import embed as embed_all
from rcir.encoders.features import floored_softplus
from rcir.encoders.vmf import draw_von_mises_fisher
from rcir.errors import InvalidConfig
from rcir.losses import PointLossOptions, bessel_ratio
from rcir.retrieval.retriever import Retriever


def pictures(n=5):
    return torch.rand(n, 1, 8, 16, generator=torch.Generator().manual_seed(0))


def build(method, spread=None, dim=8, **options):
    """An encoder; with `spread`, its second head depends on the image."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = build_encoder(EncoderConfig(method, dim=dim, options=options), 1, (8, 16))
        if spread is not None:
            head = encoder.variance_head if method == "btl" else encoder.dispersion_head
            torch.nn.init.normal_(head.layers[-1].weight, std=spread)
        return encoder


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_btl_variance_starts_at_a_thousandth_and_is_the_uncertainty():
    embedding = build("btl").embed(torch.cat([pictures(), torch.zeros(1, 1, 8, 16)]))
    torch.testing.assert_close(embedding.variance, torch.full((6, 1), 1e-3))
    assert torch.equal(embedding.uncertainty, embedding.variance[:, 0])


def test_the_scale_of_btl_means_is_trained_on_request():
    images = pictures(8)
    scaled = build("btl", scaled=True)
    np.testing.assert_allclose(scaled.embed(images).vectors.norm(dim=1), 1, atol=1e-5)
    with torch.no_grad():
        scaled.log_scale.fill_(np.log(2.5))
    np.testing.assert_allclose(scaled.embed(images).vectors.norm(dim=1), 2.5, atol=1e-4)
    assert "log_scale" not in build("btl").state_dict()
    valid = torch.ones(2, 1, dtype=torch.bool)
    scaled.loss(EmbeddedTuples(scaled(images)[:6], valid), scaled.LossOptions()).sum().backward()
    assert scaled.log_scale.grad.abs() > 0


@pytest.mark.parametrize("method", ["btl", "vmf"])
def test_candidates_are_ranked_by_the_expected_distance_on_request(method, splits, tmp_path):
    encoder = build(method, spread=2.0, distance="expected")
    retriever = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=300)
    images = splits.test.images[:20]
    results = Retriever.load(retriever.save(tmp_path / "retriever")).search(images)
    query, item = (
        embed_all(encoder, Preprocessing(), part) for part in (images, splits.gallery.images)
    )
    cosines = query.vectors.double() @ item.vectors.double().T
    if method == "btl":
        expected = (2 - 2 * cosines + 8 * (query.variance + item.variance.T)).sqrt()
    else:
        lengths = [bessel_ratio(each.extra["concentration"], 8) for each in (query, item)]
        expected = (2 - 2 * lengths[0] * lengths[1].T * cosines).sqrt()
    np.testing.assert_allclose(results.distances, expected.sort(dim=1).values, rtol=1e-4)
    chosen = expected.gather(1, torch.from_numpy(results.positions))
    np.testing.assert_allclose(results.distances, chosen, rtol=1e-4)
    plain = cosines.argsort(dim=1, descending=True).numpy()
    assert (results.positions != plain).mean() > 0.1  # the uncertainties decide


@pytest.mark.parametrize("dim", [2, 16, 2048])
def test_the_mean_resultant_length_of_vmf_starts_at_nine_tenths(dim):
    embedding = build("vmf", dim=dim).embed(torch.cat([pictures(), torch.zeros(1, 1, 8, 16)]))
    concentration = embedding.extra["concentration"]
    assert concentration.shape == (6, 1)
    np.testing.assert_allclose(bessel_ratio(concentration, dim), 0.9, atol=0.02)


def test_vmf_uncertainty_is_the_inverse_of_the_concentration_and_depends_on_the_image():
    embedding = build("vmf", spread=1.0).embed(pictures())
    assert embedding.variance is None
    inverse = 1 / embedding.extra["concentration"][:, 0]
    torch.testing.assert_close(embedding.uncertainty, inverse)
    assert len(embedding.uncertainty.unique()) == 5


@pytest.mark.parametrize("kl_scale", [1e-4, 0.0])
@pytest.mark.parametrize(
    ("method", "options"), [("btl", {}), ("vmf", {}), ("hib", {}), ("hib", {"components": 2})]
)
def test_an_almost_certain_image_stays_finite_and_has_a_gradient(method, options, kl_scale):
    """Softplus of -104 is 0 in float32, and so is its derivative. One of two tuples is wrong."""
    images, valid = pictures(3)[[0, 0, 1, 2, 2, 1]], torch.ones(2, 1, dtype=torch.bool)
    for number in (-52.0, -104.0, -1e4):
        encoder = build(method, **options)
        head = encoder.dispersion_head if method == "vmf" else encoder.variance_head
        last = head[-1] if method == "hib" else head.layers[-1]
        torch.nn.init.constant_(last.bias, number)
        losses = encoder.loss(
            EmbeddedTuples(encoder(images), valid), encoder.LossOptions(kl_scale=kl_scale)
        )
        assert losses.isfinite().all()
        losses.sum().backward()
        assert all(p.grad.isfinite().all() for p in encoder.parameters())
        assert last.bias.grad.abs().min() > 0


def test_variances_are_those_of_softplus_down_to_a_floor():
    raw = torch.tensor([-1e9, -104.0, -12.0001, -12.0, -11.0, -7.0, 0.0, 5.0])
    values = floored_softplus(raw)
    assert torch.equal(values[3:], F.softplus(raw[3:]))
    assert (values.diff() > 0).all()
    assert 1e-8 < values[0] < values[1] < 2e-8


def test_an_almost_certain_vmf_draws_its_mean():
    mean = torch.eye(4)[:1]
    sure = draw_von_mises_fisher(mean, torch.tensor([[1e30]]), 3, torch.Generator())
    torch.testing.assert_close(sure[:, 0], mean.expand(3, 4), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("dim", "concentration"), [(2, 0.1), (2, 30.0), (3, 5.0), (16, 1.0), (16, 200.0), (512, 300.0)]
)
def test_von_mises_fisher_draws_have_the_direction_and_length_of_their_distribution(
    dim, concentration
):
    rng = generator()
    mean = F.normalize(torch.randn(1, dim, generator=rng, dtype=torch.float64))
    kappa = torch.tensor([[concentration]], dtype=torch.float64)
    count = 40_000 if dim < 100 else 4_000
    drawn = draw_von_mises_fisher(mean, kappa, count, rng)[:, 0]
    np.testing.assert_allclose(drawn.norm(dim=1), 1, atol=1e-9)
    along = drawn @ mean[0]
    length = bessel_ratio(kappa, dim).item()
    assert along.mean().item() == pytest.approx(length, abs=5 * along.std().item() / count**0.5)
    # The second moment along the mean is 1 - (d - 1) A / kappa.
    square = along.square()
    expected = 1 - (dim - 1) * length / concentration
    assert square.mean().item() == pytest.approx(expected, abs=5 * square.std().item() / count**0.5)
    # Across, no direction is preferred.
    across = drawn.mean(0) - along.mean() * mean[0]
    assert across.norm() < 3 * (1 / count) ** 0.5


def test_draws_of_vmf_follow_its_distributions_and_the_generator():
    encoder = build("vmf", spread=1.0, passes=2000)
    drawn, again, other = (encoder.samples(pictures(), generator(seed)) for seed in (1, 1, 2))
    embedding = encoder.embed(pictures())
    assert drawn.shape == (2000, 5, 8)
    assert drawn.dtype == torch.float32
    expected = bessel_ratio(embedding.extra["concentration"], 8) * embedding.vectors
    torch.testing.assert_close(drawn.mean(0).double(), expected, atol=0.06, rtol=0)
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn, other)


def test_draws_of_btl_have_its_mean_and_variance():
    encoder = build("btl", passes=40)
    drawn = encoder.samples(pictures(1).repeat(500, 1, 1, 1), generator()).double().flatten(0, 1)
    embedding = encoder.embed(pictures(1))
    deviation = embedding.variance.item() ** 0.5
    error = deviation / len(drawn) ** 0.5
    torch.testing.assert_close(drawn.mean(0), embedding.vectors[0].double(), rtol=0, atol=5 * error)
    assert drawn.std(0).mean().item() == pytest.approx(deviation, rel=0.02)


def test_draws_of_batches_are_independent_and_the_mode_is_restored():
    encoder, same = build("btl", passes=40).train(), pictures(1).repeat(100, 1, 1, 1)
    noise = generator()
    first, second = (encoder.samples(same, noise) for _ in range(2))
    assert encoder.training
    assert first.shape == (40, 100, 8)
    mean = encoder.embed(same[:1]).vectors
    apart = torch.stack([(drawn - mean).flatten() for drawn in (first, second)])
    assert torch.corrcoef(apart)[0, 1].abs() < 0.03
    assert torch.equal(encoder.samples(same, generator()), first)


def test_passes_and_members_are_the_draws_of_mc_dropout_and_ensembles():
    assert build("deterministic").samples(pictures(), generator()) is None
    encoder = build("mc-dropout", passes=40)
    drawn, embedding = encoder.samples(pictures(), generator()), encoder.embed(pictures())
    assert drawn.shape == (40, 5, 8)
    torch.testing.assert_close(F.normalize(drawn.mean(0)), embedding.vectors)
    torch.testing.assert_close(drawn.var(0).mean(1), embedding.uncertainty)
    ensemble = build("deep-ensemble", members=3)
    for member, vectors in zip(
        ensemble.members, ensemble.samples(pictures(), generator()), strict=True
    ):
        torch.testing.assert_close(member.embed(pictures()).vectors, vectors)


@pytest.mark.parametrize("method", ["tripreg", "deterministic"])
def test_vectors_keep_their_length_unless_unit_length_is_requested(method):
    free, unit = (build(method, unit=unit).embed(pictures()).vectors for unit in (False, True))
    assert (free.norm(dim=1) - 1).abs().min() > 1e-2
    torch.testing.assert_close(unit, F.normalize(free))
    assert EncoderConfig(method).method_options().unit == (method == "deterministic")


def test_untrained_tripreg_is_the_deterministic_encoder_with_the_soft_loss():
    encoder, plain = build("tripreg"), build("deterministic", unit=False)
    plain.load_state_dict(encoder.state_dict(), strict=False)
    embedding = encoder(pictures(6))
    torch.testing.assert_close(embedding.vectors, plain(pictures(6)).vectors)
    assert torch.equal(embedding.variance, torch.ones(6, 1))
    assert torch.equal(embedding.uncertainty, torch.ones(6))
    valid = torch.ones(2, 1, dtype=torch.bool)
    soft = plain.loss(EmbeddedTuples(plain(pictures(6)), valid), PointLossOptions(form="soft"))
    torch.testing.assert_close(
        encoder.loss(EmbeddedTuples(embedding, valid), encoder.LossOptions()), 1.5 * soft
    )


def test_tripreg_variance_is_bounded():
    encoder = build("tripreg")
    last = encoder.log_variance_head.layers[-1]
    for number, expected in ((1e6, np.exp(10)), (-1e6, np.exp(-10)), (0.3, np.exp(0.3))):
        torch.nn.init.constant_(last.bias, number)
        variance = encoder.embed(pictures()).variance
        np.testing.assert_allclose(variance, expected, rtol=1e-3)
    torch.nn.init.constant_(last.bias, -300.0)
    valid = torch.ones(2, 1, dtype=torch.bool)
    encoder.loss(
        EmbeddedTuples(encoder(pictures(6)), valid), encoder.LossOptions()
    ).sum().backward()
    assert last.bias.grad.isfinite()
    assert last.bias.grad.abs() > 0


def test_vectors_of_any_length_are_searched_by_distance_and_judged_by_angle(splits):
    encoder = build("tripreg")
    with torch.no_grad():
        encoder.mean_head[-1].weight.mul_(5)
    retriever = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=20)
    results = retriever.search(splits.test.images[:30])
    embed = partial(embed_all, encoder, Preprocessing())
    query, item = (
        embed(part).vectors.double() for part in (splits.test.images[:30], splits.gallery.images)
    )
    distances = torch.cdist(query, item)
    np.testing.assert_allclose(results.distances, distances.sort(dim=1).values[:, :20], rtol=1e-4)
    nearest = results.positions[:, 0]
    cosine = F.cosine_similarity(query, item[nearest])
    by_angle = retriever.searcher.judged(results, "cosine").uncertainty
    np.testing.assert_allclose(by_angle, 1 - cosine, atol=1e-5)
    squared = distances[np.arange(30), nearest].square()
    assert (squared / 2 - (1 - cosine)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("method", "word"),
    [("vmf", "concentration"), *((name, "variance") for name in ("btl", "hib", "tripreg"))],
)
def test_a_loss_of_embeddings_without_uncertainty_is_refused(method, word):
    with pytest.raises(InvalidConfig, match=word):
        build(method).loss(
            EmbeddedTuples(Embedding(torch.eye(3)), torch.ones(1, 1, dtype=torch.bool)), None
        )
