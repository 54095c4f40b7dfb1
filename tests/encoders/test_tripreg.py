import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rcir.data import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders import EncoderConfig, build_encoder
from rcir.errors import InvalidConfig
from rcir.losses import PointLossOptions
from rcir.retrieval.retriever import Retriever


def pictures(n=6, seed=0):
    return torch.rand(n, 1, 8, 16, generator=torch.Generator().manual_seed(seed))


def build(method, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_encoder(EncoderConfig(method, dim=8, options=options), 1, (8, 16))


@pytest.mark.parametrize("method", ["tripreg", "deterministic"])
def test_vectors_keep_their_length_unless_they_are_asked_to_be_of_unit_length(method):
    free, unit = (build(method, unit=unit).embed(pictures()).vectors for unit in (False, True))
    assert (free.norm(dim=1) - 1).abs().min() > 1e-2
    np.testing.assert_allclose(unit.norm(dim=1), 1, atol=1e-6)
    torch.testing.assert_close(F.normalize(free), unit)


def test_defaults_are_those_of_the_papers():
    assert EncoderConfig("tripreg").method_options().unit is False
    assert EncoderConfig("deterministic").method_options().unit is True


def test_before_training_it_is_the_deterministic_encoder_with_the_soft_loss():
    ours, plain = build("tripreg"), build("deterministic", unit=False)
    plain.load_state_dict(ours.state_dict(), strict=False)
    embedding = ours(pictures())
    assert torch.equal(embedding.vectors, plain(pictures()).vectors)
    assert torch.equal(embedding.variance, torch.ones(6, 1))
    assert torch.equal(embedding.uncertainty, torch.ones(6))
    valid = torch.ones(2, 1, dtype=torch.bool)
    soft = plain.loss(plain(pictures()), valid, PointLossOptions(form="soft"))
    found = ours.loss(embedding, valid, ours.LossOptions())
    torch.testing.assert_close(found, 1.5 * soft)


def test_the_variance_is_bounded_whatever_the_head_says():
    encoder = build("tripreg")
    last = encoder.log_variance_head.layers[-1]
    for number, expected in ((1e6, np.exp(10)), (-1e6, np.exp(-10)), (0.5, np.exp(0.5))):
        torch.nn.init.constant_(last.bias, number)
        variance = encoder.embed(pictures()).variance
        np.testing.assert_allclose(variance, expected, rtol=1e-3)
    torch.nn.init.constant_(last.bias, -30.0)
    valid = torch.ones(2, 1, dtype=torch.bool)
    encoder.loss(encoder(pictures()), valid, encoder.LossOptions()).sum().backward()
    assert last.bias.grad.isfinite()
    assert last.bias.grad.abs() > 0


def test_embeddings_without_a_variance_are_refused():
    with pytest.raises(InvalidConfig, match="variance"):
        build("tripreg").loss(Embedding(torch.eye(3)), torch.ones(1, 1, dtype=torch.bool), None)


def test_retrieval_is_by_distances_and_the_cosine_by_angles_of_vectors_of_any_length(splits):
    encoder = build("tripreg")
    with torch.no_grad():
        encoder.mean_head[-1].weight.mul_(5)
    retriever = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=20)
    found = retriever.search(splits.test.images[:30])
    query, item = (
        encoder.embed(Preprocessing()(part)).vectors.double()
        for part in (splits.test.images[:30], splits.gallery.images)
    )
    expected = torch.cdist(query, item).sort(dim=1)
    np.testing.assert_allclose(found.distances, expected.values[:, :20], rtol=1e-4)
    nearest = item[expected.indices[:, 0]]
    cosine = F.cosine_similarity(query, nearest)
    by_angle = retriever.judged(found, "cosine").uncertainty
    np.testing.assert_allclose(by_angle, 1 - cosine, atol=1e-5)
    assert (expected.values[:, 0].square() / 2 - (1 - cosine)).abs().max() > 0.1


@pytest.mark.parametrize("method", ["mc-dropout", "deep-ensemble", "norm-softmax"])
def test_methods_made_of_the_deterministic_one_keep_unit_length(method):
    options = {"members": 2} if method == "deep-ensemble" else {}
    vectors = build(method, **options).embed(pictures()).vectors
    np.testing.assert_allclose(vectors.norm(dim=1), 1, atol=1e-6)
