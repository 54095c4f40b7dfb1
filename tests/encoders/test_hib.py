"""Hedged instance embeddings: samples, uncertainty, ranking and loss, against NumPy."""

import numpy as np
import pytest
import torch
from scipy.special import expit
from scipy.stats import kstest, norm

from rcir.data import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders import EmbeddedTuples, EncoderConfig
from rcir.encoders.batches import embed as embed_all
from rcir.losses import kl_to_prior
from rcir.losses.hedged import (
    HedgedOptions,
    match_logits,
    mixture_kl_to_normal,
    soft_contrastive_loss,
)
from rcir.retrieval.retriever import Retriever
from tests.encoders import small
from tests.encoders.small import as_tuples, check_ranking, generator, pictures

KINDS = [0, 1, 2]


def build(components=1, spread=1.0, dim=3, **options):
    """With variances that depend on the image."""
    options["components"] = components
    encoder = small.build(EncoderConfig("hib", dim=dim, options=options))
    if components:
        last = encoder.variance_head[-1]
        torch.nn.init.normal_(last.weight, std=spread, generator=generator())
    return encoder


def numpy_samples(embedding, noise):
    """(n, k, d) samples of images, component by component, one by one."""
    tensors = embedding.tensors
    means = tensors.get("component_means", embedding.vectors[:, None]).double()
    variances = tensors.get("component_variances", embedding.variance[:, None]).double()
    each = len(noise) // means.shape[1]
    return np.stack(
        [
            [
                (mean[k // each] + variance[k // each].sqrt() * noise[k].double()).numpy()
                for k in range(len(noise))
            ]
            for mean, variance in zip(means, variances, strict=True)
        ]
    )


def probability(encoder, first, second):
    """That two images match, (k, d) samples each."""
    distances = np.linalg.norm(first[:, None] - second[None], axis=2)
    return expit(encoder.shift.item() - encoder.scale.item() * distances).mean()


def test_an_embedding_is_a_point_a_gaussian_or_a_mixture():
    point, gaussian, mixture = (build(components).embed(pictures()) for components in KINDS)
    assert point.variance is point.uncertainty is None
    assert gaussian.variance.shape == gaussian.vectors.shape == (6, 3)
    assert (point.vectors.norm(dim=1) - 1).abs().min() > 1e-3  # of any length
    means, variances = (mixture.extra[f"component_{name}"] for name in ("means", "variances"))
    assert means.shape == (6, 2, 3)
    torch.testing.assert_close(mixture.vectors, means.mean(1))
    second_moment = (variances + means**2).mean(1)
    torch.testing.assert_close(mixture.variance, second_moment - means.mean(1) ** 2)


@pytest.mark.parametrize("components", [1, 2])
def test_uncertainty_is_that_of_two_independent_sets_of_samples(components):
    encoder = build(components)
    embedding = encoder.embed(pictures())
    first, second = (numpy_samples(embedding, noise) for noise in encoder.noise)
    expected = [1 - probability(encoder, *pair) for pair in zip(first, second, strict=True)]
    np.testing.assert_allclose(embedding.uncertainty, expected, rtol=1e-4)
    assert (encoder.noise[0] - encoder.noise[1]).abs().max() > 0.5


@pytest.mark.parametrize(("components", "samples"), [(1, 8), (2, 200), (1, 401)])
def test_noise_at_test_time_is_normal_with_unit_moments_in_every_dimension(components, samples):
    noise = build(components, samples=samples).noise.double()
    assert noise.shape == (2, samples, 3)
    for each in noise.unflatten(1, (components, -1)).flatten(0, 1):
        assert each.sum(0).abs().max() <= (1e-5 if len(each) % 2 == 0 else 4)
        np.testing.assert_allclose(each.square().mean(0), 1, atol=1e-6)
        correlations = np.corrcoef(each.T)[np.triu_indices(3, 1)]
        assert np.abs(correlations).max() < 0.3
    if samples >= 200:
        for axis in noise.flatten(0, 1).T:
            assert kstest(axis.numpy(), norm.cdf).pvalue > 0.1


@pytest.mark.parametrize("dim", [2, 4])
def test_a_variance_counts_alike_in_every_dimension(dim):
    """With the default number of samples, against draws of NumPy: .228 of two, .232 of four."""
    encoder = small.build(EncoderConfig("hib", dim=dim))
    with torch.no_grad():
        encoder.scale_parameter.fill_(np.log(np.expm1(4.0)))
        encoder.shift.fill_(4.0)
    rng = np.random.default_rng(0)
    for axis in range(dim):
        deviation = np.where(np.arange(dim) == axis, 0.5, 0.05)
        gaps = rng.standard_normal((200_000, dim)) * 2**0.5 * deviation
        exact = expit(4 * np.linalg.norm(gaps, axis=1) - 4).mean()
        image = Embedding(torch.zeros(1, dim), torch.from_numpy(deviation**2).float()[None])
        match = (-encoder.rerank(image, image)).exp().item()
        assert 1 - match == pytest.approx(exact, abs=0.01)


def test_a_gallery_image_finds_itself_first_among_equally_certain_images(splits):
    """The noise of queries and that of gallery items does not move them apart."""
    encoder = build(spread=0.0)
    retriever = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=50)
    results = retriever.search(splits.gallery.images[:100])
    vectors = embed_all(encoder, Preprocessing(), splits.gallery.images).vectors
    gaps = (vectors[results.positions[:, 0]] - vectors[:100]).norm(dim=1)
    assert gaps.max() < 0.02 * torch.cdist(vectors, vectors).median()


@pytest.mark.parametrize(("components", "dim"), [(1, 3), (2, 3), (1, 1), (2, 1)])
def test_candidates_are_ranked_by_the_probability_of_a_match(components, dim, splits):
    encoder = build(components, dim=dim)

    def expected(query, item):
        queries = numpy_samples(query, encoder.noise[0])
        items = numpy_samples(item, encoder.noise[1])
        return [
            [-np.log(probability(encoder, first, second)) for second in items] for first in queries
        ]

    check_ranking(encoder, splits, expected, queries=7, rtol=1e-3)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of queries that are near on a line
@pytest.mark.parametrize("components", KINDS)
def test_vectors_of_one_number_are_certified_and_stored(components, splits, tmp_path):
    encoder = build(components, dim=1)
    retriever = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=150)
    tuning, calibration = map(retriever.search_labelled, (splits.tuning, splits.calibration))
    report = retriever.calibrate_splits(tuning, calibration, "quantile")
    assert any(row.mean_size is not None for row in report.rows)
    stored = Retriever.load(retriever.save(tmp_path / "retriever"))
    results = stored.search(splits.test.images[:3])
    items = embed_all(encoder, Preprocessing(), splits.gallery.images).vectors[:, 0]
    if not components:  # ranked by their distance, which is that on a line
        queries = encoder.embed(Preprocessing()(splits.test.images[:3])).vectors
        gaps = (items - queries).abs().sort(dim=1).values[:, :150]
        np.testing.assert_allclose(results.distances, gaps, atol=1e-5)
    assert stored.retrieve(splits.test.images[0], alpha=0.5, delta=0.1).size >= 1


@pytest.mark.parametrize("options", [{"distance": "mean"}, {"components": 0}], ids=str)
def test_points_rank_by_distance_and_gaussians_on_request(options, splits):
    def expected(query, item):
        return torch.cdist(query.vectors, item.vectors)

    check_ranking(build(**options), splits, expected, decides=False)


@pytest.mark.parametrize("components", KINDS)
def test_the_match_of_a_tuple_is_half_of_its_loss(components):
    """In evaluation mode, where all images have the same samples."""
    encoder = build(components).eval()
    valid = torch.tensor([[True, False, True]])
    with torch.no_grad():
        embedding = encoder(pictures(5))
        loss = encoder.loss(EmbeddedTuples(embedding, valid), HedgedOptions(0.02)).item()
    samples = embedding.vectors[:, None].double()
    if components:
        samples = torch.from_numpy(numpy_samples(embedding, encoder.noise[0]))

    def pair(other, match):
        logits = match_logits(samples[0], samples[other], encoder.scale, encoder.shift)
        return soft_contrastive_loss(logits, torch.tensor(match)).item()

    expected = (pair(1, True) + (pair(2, False) + pair(4, False)) / 2) / 2
    if components == 1:
        kl = kl_to_prior(embedding.vectors, embedding.variance, prior_variance=1.0)
    elif components == 2:
        parts = (embedding.extra[f"component_{name}"].double() for name in ("means", "variances"))
        kl = mixture_kl_to_normal(samples, *parts)
    if components:
        expected += 0.02 * (kl[0] + (kl[1] + (kl[2] + kl[4]) / 2) / 2).item()
    assert loss == pytest.approx(expected, rel=1e-4)


def test_samples_in_training_are_drawn_by_the_generator_of_torch():
    encoder = build().train()
    tuples = as_tuples(encoder(pictures(4)), negatives=2)
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        losses.append(encoder.loss(tuples, HedgedOptions()).item())
    assert losses[0] == losses[2] != losses[1]
