"""Encoders that predict a distribution in one pass: BTL, vMF, TripReg."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rcir.data import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders import EmbeddedTuples, EncoderConfig
from rcir.encoders.batches import embed
from rcir.encoders.features import ScalarHead, floored_softplus
from rcir.errors import InvalidConfig
from rcir.losses import PointLossOptions, bessel_ratio
from rcir.retrieval.query_uncertainty import with_uncertainty
from rcir.retrieval.retriever import Retriever
from tests.encoders import small
from tests.encoders.small import as_tuples, check_ranking, pictures


def build(method, spread=None, dim=8, **options):
    """An encoder; with `spread`, its second head depends on the image."""
    encoder = small.build(EncoderConfig(method, dim=dim, options=options))
    if spread is not None:
        head = encoder.variance_head if method == "btl" else encoder.dispersion_head
        torch.nn.init.normal_(head.layers[-1].weight, std=spread, generator=small.generator())
    return encoder


def test_btl_variance_starts_at_a_thousandth_and_is_the_uncertainty():
    embedding = build("btl").embed(torch.cat([pictures(), torch.zeros(1, 1, 8, 16)]))
    torch.testing.assert_close(embedding.variance, torch.full((7, 1), 1e-3))
    assert torch.equal(embedding.uncertainty, embedding.variance[:, 0])


def test_the_scale_of_btl_means_is_trained_on_request():
    scaled = build("btl", scaled=True)
    np.testing.assert_allclose(scaled.embed(pictures()).vectors.norm(dim=1), 1, atol=1e-5)
    with torch.no_grad():
        scaled.log_scale.fill_(np.log(2.5))
    np.testing.assert_allclose(scaled.embed(pictures()).vectors.norm(dim=1), 2.5, atol=1e-4)
    assert "log_scale" not in build("btl").state_dict()
    scaled.loss(as_tuples(scaled(pictures())), scaled.LossOptions()).sum().backward()
    assert scaled.log_scale.grad.abs() > 0


@pytest.mark.parametrize("method", ["btl", "vmf"])
def test_candidates_are_ranked_by_the_expected_distance_on_request(method, splits):
    def expected(query, item):
        cosines = query.vectors @ item.vectors.T
        if method == "btl":
            return (2 - 2 * cosines + 8 * (query.variance + item.variance.T)).sqrt()
        lengths = [bessel_ratio(part.extra["concentration"], 8) for part in (query, item)]
        return (2 - 2 * lengths[0] * lengths[1].T * cosines).sqrt()

    check_ranking(build(method, spread=2.0, distance="expected"), splits, expected)


@pytest.mark.parametrize("dim", [2, 16, 2048])
def test_the_mean_resultant_length_of_vmf_starts_at_nine_tenths(dim):
    embedding = build("vmf", dim=dim).embed(torch.cat([pictures(), torch.zeros(1, 1, 8, 16)]))
    concentration = embedding.extra["concentration"]
    assert concentration.shape == (7, 1)
    np.testing.assert_allclose(bessel_ratio(concentration, dim), 0.9, atol=0.02)


def test_vmf_uncertainty_is_the_inverse_of_the_concentration_and_depends_on_the_image():
    embedding = build("vmf", spread=1.0).embed(pictures())
    assert embedding.variance is None
    inverse = 1 / embedding.extra["concentration"][:, 0]
    torch.testing.assert_close(embedding.uncertainty, inverse)
    assert len(embedding.uncertainty.unique()) == 6


@pytest.mark.parametrize("kl_scale", [1e-4, 0.0])
@pytest.mark.parametrize(
    ("method", "options"),
    [("btl", {}), ("vmf", {}), ("hib", {}), ("hib", {"components": 2})],
    ids=["btl", "vmf", "hib", "hib-mixture"],
)
def test_an_almost_certain_image_stays_finite_and_has_a_gradient(method, options, kl_scale):
    """Softplus of -104 is 0 in float32, and so is its derivative. One of two tuples is wrong."""
    images = pictures(3)[[0, 0, 1, 2, 2, 1]]
    for number in (-52.0, -104.0, -1e4):
        encoder = build(method, **options)
        head = encoder.dispersion_head if method == "vmf" else encoder.variance_head
        last = head[-1] if method == "hib" else head.layers[-1]
        torch.nn.init.constant_(last.bias, number)
        losses = encoder.loss(as_tuples(encoder(images)), encoder.LossOptions(kl_scale=kl_scale))
        assert losses.isfinite().all()
        losses.sum().backward()
        assert all(p.grad.isfinite().all() for p in encoder.parameters())
        assert last.bias.grad.abs().min() > 0


@pytest.mark.parametrize(("activation", "slope"), [("leaky-relu", 0.1), ("relu", 0.0)])
def test_a_leaky_hidden_unit_has_a_gradient_where_a_relu_has_none(activation, slope):
    """Features after a ReLU are never negative, so these units are, for every image."""
    head = ScalarHead("flatten", torch.Size((12, 1, 1)), hidden=5, activation=activation)
    features = torch.rand(7, 12, 1, 1, generator=small.generator())
    with torch.no_grad():
        head.layers[1].weight.fill_(-1.0)
        head.layers[1].bias.fill_(-1.0)
        head.layers[-1].weight.fill_(2.0)
    head(features).sum().backward()
    expected = 2 * slope * features.sum(dim=0).flatten()
    torch.testing.assert_close(head.layers[1].weight.grad, expected.expand(5, 12))


def test_variances_are_those_of_softplus_down_to_a_floor():
    raw = torch.tensor([-1e9, -104.0, -12.0001, -12.0, -11.0, -7.0, 0.0, 5.0])
    values = floored_softplus(raw)
    assert torch.equal(values[3:], F.softplus(raw[3:]))
    assert (values.diff() > 0).all()
    assert 1e-8 < values[0] < values[1] < 2e-8


@pytest.mark.parametrize("method", ["tripreg", "deterministic"])
def test_vectors_keep_their_length_unless_unit_length_is_requested(method):
    free, unit = (build(method, unit=unit).embed(pictures()).vectors for unit in (False, True))
    assert (free.norm(dim=1) - 1).abs().min() > 1e-2
    torch.testing.assert_close(unit, F.normalize(free))
    assert EncoderConfig(method).method_options().unit == (method == "deterministic")


def test_untrained_tripreg_is_the_deterministic_encoder_with_the_soft_loss():
    encoder, plain = build("tripreg"), build("deterministic", unit=False)
    plain.load_state_dict(encoder.state_dict(), strict=False)
    embedding = encoder(pictures())
    torch.testing.assert_close(embedding.vectors, plain(pictures()).vectors)
    assert torch.equal(embedding.variance, torch.ones(6, 1))
    assert torch.equal(embedding.uncertainty, torch.ones(6))
    soft = plain.loss(as_tuples(plain(pictures())), PointLossOptions(form="soft"))
    losses = encoder.loss(as_tuples(embedding), encoder.LossOptions())
    torch.testing.assert_close(losses, 1.5 * soft)


def test_tripreg_variance_is_bounded():
    encoder = build("tripreg")
    last = encoder.log_variance_head.layers[-1]
    for number, expected in ((1e6, np.exp(10)), (-1e6, np.exp(-10)), (0.3, np.exp(0.3))):
        torch.nn.init.constant_(last.bias, number)
        variance = encoder.embed(pictures()).variance
        np.testing.assert_allclose(variance, expected, rtol=1e-3)
    torch.nn.init.constant_(last.bias, -300.0)
    encoder.loss(as_tuples(encoder(pictures())), encoder.LossOptions()).sum().backward()
    assert last.bias.grad.isfinite()
    assert last.bias.grad.abs() > 0


def test_vectors_of_any_length_are_searched_by_distance_and_judged_by_angle(splits):
    encoder = build("tripreg")
    with torch.no_grad():
        encoder.mean_head[-1].weight.mul_(5)
    retriever = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=20)
    results = retriever.search(splits.test.images[:30])
    query, item = (
        embed(encoder, Preprocessing(), images).vectors.double()
        for images in (splits.test.images[:30], splits.gallery.images)
    )
    distances = torch.cdist(query, item)
    np.testing.assert_allclose(results.distances, distances.sort(dim=1).values[:, :20], rtol=1e-4)
    nearest = results.positions[:, 0]
    cosine = F.cosine_similarity(query, item[nearest])
    by_angle = with_uncertainty(retriever.searcher, results, "cosine").uncertainty
    np.testing.assert_allclose(by_angle, 1 - cosine, atol=1e-5)
    squared = distances[np.arange(30), nearest].square()
    assert (squared / 2 - (1 - cosine)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("method", "word"),
    [("vmf", "concentration"), *((name, "variance") for name in ("btl", "hib", "tripreg"))],
)
def test_a_loss_of_embeddings_without_uncertainty_is_refused(method, word):
    tuples = EmbeddedTuples(Embedding(torch.eye(3)), torch.ones(1, 1, dtype=torch.bool))
    with pytest.raises(InvalidConfig, match=word):
        build(method).loss(tuples, None)
