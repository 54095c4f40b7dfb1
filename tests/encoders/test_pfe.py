"""Probabilistic face embeddings: variances fitted behind a base encoder."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.stats import hmean, norm, spearmanr

from rcir.data import ImageSet, Preprocessing
from rcir.data.relevance import SameLabel
from rcir.encoders import EncoderConfig
from rcir.encoders.base import TrainingImages
from rcir.encoders.batches import embed
from rcir.encoders.deterministic import Deterministic
from rcir.errors import InvalidConfig, InvalidData
from rcir.losses import PointLossOptions
from rcir.retrieval.retriever import Retriever
from tests.encoders import small
from tests.encoders.small import check_ranking


def build(method="pfe", seed=0, **options):
    return small.build(EncoderConfig(method, dim=8, options=options), seed=seed).eval()


def training(images, seed=0):
    return TrainingImages(images, Preprocessing(), embed, seed, PointLossOptions())


@pytest.fixture(scope="module")
def fitted(splits):
    encoder = build(steps=60, batch=64, distance="mls")
    encoder.fit_posthoc(training(splits.train))
    return encoder


def test_variances_start_as_published_and_the_vectors_are_those_of_the_base(splits):
    encoder = build()
    images = Preprocessing()(splits.test.images[:20])
    found = encoder.embed(images)
    assert torch.equal(found.vectors, encoder.of_base.base.embed(images).vectors)
    torch.testing.assert_close(
        found.variance, torch.full((20, 8), np.exp(-7) + 1e-6), rtol=2e-3, atol=0
    )


def test_the_uncertainty_is_the_harmonic_mean_of_the_variances(fitted, splits):
    found = embed(fitted, Preprocessing(), splits.test.images)
    np.testing.assert_allclose(found.uncertainty, hmean(found.variance.double(), axis=1), rtol=1e-4)
    assert found.uncertainty.max() > 1.001 * found.uncertainty.min()
    assert found.variance.min() >= 1e-6


def test_fitting_finds_the_variances_that_vectors_were_drawn_with():
    """By default, far from the variance of about 9e-4 that an image has before the fit."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(150), 8)
    level = rng.uniform(-6, -2, len(labels))  # log variance, which the features determine
    centres = rng.standard_normal((150, 8))
    centres = (centres / np.linalg.norm(centres, axis=1, keepdims=True))[labels]
    noise = np.exp(level / 2)[:, None] * rng.standard_normal((len(labels), 8))
    features = torch.from_numpy(np.stack([level, level**2], 1)).float()
    encoder = build()
    encoder.fit_variance(
        torch.from_numpy(centres + noise).float(), features, SameLabel(labels), seed=0
    )
    found = encoder.variance_branch(features).log().mean(dim=1).numpy()
    assert spearmanr(found, level).statistic > 0.9
    for third in np.array_split(level.argsort(), 3):
        assert 0.85 < np.exp((found - level)[third].mean()) < 1.15


def test_the_fit_is_decided_by_the_seed_and_leaves_the_base_alone(fitted, splits):
    base = {name: each.clone() for name, each in fitted.of_base.base.state_dict().items()}
    first = {name: each.clone() for name, each in fitted.variance_branch.state_dict().items()}
    again = build(seed=0, steps=60, batch=64)
    for draw in (1, 0):
        again.fit_posthoc(training(splits.train, draw))
        same = [
            torch.equal(each, first[name])
            for name, each in again.variance_branch.state_dict().items()
        ]
        assert all(same) == (draw == 0)
    assert all(torch.equal(each, base[n]) for n, each in again.of_base.base.state_dict().items())
    assert not any(weights.requires_grad for weights in again.parameters())
    assert not again.variance_branch.training


def test_a_fit_touches_no_random_numbers_and_no_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    features = torch.rand(16, 2, generator=torch.Generator().manual_seed(0))
    vectors = torch.nn.functional.normalize(torch.ones(16, 8))
    before, encoder = torch.get_rng_state(), build(steps=1, batch=8)
    encoder.fit_variance(vectors, features, SameLabel(np.arange(16) % 4), seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_candidates_are_ranked_by_the_mutual_likelihood_of_scipy(fitted, splits):
    """Less the largest possible one, of two vectors with the smallest variance."""

    def expected(query, item):
        total = (query.variance[:, None] + item.variance).numpy()
        gap = (query.vectors[:, None] - item.vectors).numpy()
        return (norm.logpdf(0, scale=1e-3) - norm.logpdf(gap, scale=np.sqrt(total))).mean(2) * 2

    check_ranking(fitted, splits, expected, rtol=1e-3)


@pytest.mark.parametrize("base", ["deterministic", "norm-softmax"])
def test_weights_of_a_base_are_loaded_once_and_not_needed_again(splits, tmp_path, base):
    file = tmp_path / "encoder.safetensors"
    trained = build(base, seed=7)
    save_file(trained.state_dict(), file)
    encoder = build(seed=1, base=base, base_weights=str(file), steps=5, batch=16)
    encoder.fit_posthoc(training(splits.train))
    images = splits.test.images[:20]
    expected = embed(trained, Preprocessing(), images).vectors
    retriever = Retriever.build(encoder, Preprocessing(), splits.gallery)
    folder = retriever.save(tmp_path / "retriever")
    file.unlink()
    loaded = Retriever.load(folder)
    assert torch.equal(embed(loaded.encoder, Preprocessing(), images).vectors, expected)
    assert loaded.searcher.fingerprints() == retriever.searcher.fingerprints()


def test_missing_weights_and_weights_of_another_encoder_are_refused(splits, tmp_path):
    file = tmp_path / "encoder.safetensors"
    encoder = build(base_weights=str(file))
    with pytest.raises(InvalidData, match="weights"):
        encoder.fit_posthoc(training(splits.train))
    save_file(build("btl").state_dict(), file)
    with pytest.raises(InvalidData, match="weights"):
        encoder.fit_posthoc(training(splits.train))


def test_a_pretrained_base_needs_no_training(splits):
    encoder = build(base="pretrained", steps=20, batch=32)
    length = encoder.of_base.base.config.dim
    assert EncoderConfig("pfe", options={"base": "pretrained"}).method_options().ready
    some = ImageSet(
        splits.train.images[:100], splits.train.labels[:100] // 10, splits.train.ids[:100]
    )
    encoder.fit_posthoc(training(some))
    found = embed(encoder, Preprocessing(), splits.test.images[:5])
    assert found.vectors.shape == found.variance.shape == (5, length)
    assert encoder.config.dim == length


class Doubled(Deterministic):
    """A base with another forward pass."""

    def forward(self, images):
        return super().forward(images).map(lambda values: 2 * values)


@pytest.mark.parametrize(
    "options",
    [{"base_options": {"unit": False}}, {"base": "tests.encoders.test_pfe:Doubled"}],
    ids=["lengths", "forward"],
)
def test_a_base_with_other_vectors_is_refused(options):
    with pytest.raises(InvalidConfig, match="deterministic"):
        build(**options)
