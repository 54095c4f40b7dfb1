"""Laplacian metric learner: posterior, draws, and the curvature it is fitted by."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.autograd.functional import hessian
from torch.nn import functional as F

from rcir.data import Preprocessing
from rcir.data.records import ImageSet
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.base import EmbeddedTuples, TrainingImages
from rcir.encoders.batches import embed
from rcir.encoders.lam import (
    LaplacianMetricOptions,
    PairCurvature,
    inverse_concentration,
    marginal_prior_precision,
)
from rcir.errors import InvalidConfig, InvalidData

MARGIN = 0.15  # of an untrained network: some pairs are closer, some are not

# A posterior so narrow that all draws are the same.
CERTAIN = {"online": True, "initial": 1e12, "memory": 1e-9, "negatives_weight": 0.5}


def pictures(n=5, seed=0):
    return torch.rand(n, 1, 8, 16, generator=torch.Generator().manual_seed(seed))


def build(**options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_encoder(EncoderConfig("lam", dim=3, options=options), 1, (8, 16))


def training_images(n=90, **options):
    rng = np.random.default_rng(0)
    labels = np.arange(n) % 6
    pixels = rng.integers(0, 60, (n, 8, 16)) + 30 * labels[:, None, None]
    images = ImageSet(pixels.astype(np.uint8), labels, [str(i) for i in range(n)])
    loss = build().LossOptions(**options)
    return TrainingImages(images, Preprocessing(), embed, 0, loss)


@pytest.fixture(scope="module")
def fitted():
    """A fitted encoder, to be read only."""
    encoder = build(passes=200)
    encoder.fit_posthoc(training_images())
    return encoder


def test_concentration_golden_values():
    """Also where draws differ by less than one minus the square of their length in float32."""
    for squared, dim, expected in ((0.81, 16, 71.9526315789), (1 - 1e-10, 3, 2e10)):
        apart = (1 - squared) ** 0.5
        samples = torch.tensor([[squared**0.5, apart], [squared**0.5, -apart]]).float()
        samples = F.pad(samples, (0, dim - 2))[:, None]
        assert 1 / inverse_concentration(samples).item() == pytest.approx(expected, rel=1e-3)


def test_prior_precision_maximises_the_marginal_likelihood():
    rng = np.random.default_rng(0)
    curvature, weights = rng.exponential(5.0, 40) ** 2, rng.normal(0, 0.3, 40)
    curvature[:7] = 0
    squared = (weights**2).sum()

    def log_evidence(delta):
        return len(weights) * np.log(delta) - np.log(curvature + delta).sum() - delta * squared

    precision = marginal_prior_precision(torch.tensor(curvature), float(squared))
    assert log_evidence(precision) >= max(map(log_evidence, np.exp(np.linspace(-12, 12, 2401))))
    assert len(weights) / precision == pytest.approx(
        (1 / (curvature + precision)).sum() + squared, rel=1e-5
    )


@pytest.mark.parametrize("variant", ["full", "fixed", "positive"])
def test_curvature_is_the_hessian_of_the_mean_contrastive_loss(variant):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(24, 4, generator=generator, dtype=torch.float64)
    layer = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    labels, margin = torch.arange(24) % 3, 1.2
    pairs = torch.triu_indices(24, 24, 1).T
    match = labels[pairs[:, 0]] == labels[pairs[:, 1]]
    (left, right), extended = pairs.T, F.pad(features, (0, 1), value=1.0)
    constant = F.normalize(extended @ layer.T)

    def loss(layer):
        """Means over all pairs of a kind; "fixed": against constants; "positive": matches only."""
        units = F.normalize(extended @ layer.T)
        if variant != "fixed":
            squared = (units[left] - units[right]).square().sum(1)
        else:
            squared = (units[left] - constant[right]).square().sum(1)
            squared = squared + (constant[left] - units[right]).square().sum(1)
        if variant == "positive":
            return squared[match].mean() / 2
        near = (constant[left] - constant[right]).square().sum(1) < margin**2
        assert 0 < (near & ~match).sum() < (~match).sum()
        return (squared[match].mean() - (squared * near)[~match].mean()) / 2

    exact = hessian(loss, layer).reshape(15, 15).diagonal().view(3, 5)
    curvature = PairCurvature("arccos", variant, margin)
    for some in torch.arange(len(pairs)).split(100):
        curvature.add(features, extended @ layer.T, pairs[some], match[some])
        curvature.add_unmined(extended @ layer.T, pairs[some][~match[some]])
    torch.testing.assert_close(curvature.mean(None), exact, rtol=1e-8, atol=1e-11)
    same = curvature.mean(float(curvature.counts[1] / (~match).sum()))
    torch.testing.assert_close(same, exact, rtol=1e-8, atol=1e-11)


def test_an_encoder_has_no_uncertainty_before_it_is_fitted(fitted):
    encoder = build()
    embedding = encoder.embed(pictures())
    assert embedding.uncertainty is None
    assert encoder.samples(pictures(), torch.Generator()) is None
    outputs = encoder.layer(encoder.pooling(encoder.backbone(pictures())))
    torch.testing.assert_close(embedding.vectors, F.normalize(outputs).detach())
    assert (fitted.embed(pictures()).uncertainty > 0).all()


def test_a_posthoc_fit_uses_the_pairs_within_random_batches_of_256():
    encoder = build(prior_precision=2.0, scale=7.0).eval()
    encoder.fit_posthoc(training := training_images(300, margin=0.4))
    assert encoder.prior_precision == 2
    assert not any(module.training for module in encoder.modules())
    images, curvature = training.images, PairCurvature("euclidean", "fixed", 0.4)
    order = np.random.default_rng([0]).permutation(300)
    with torch.no_grad():
        for rows in (order[:256], order[256:]):
            features = encoder.pooling(encoder.backbone(Preprocessing()(images.images[rows])))
            pairs = torch.triu_indices(len(rows), len(rows), 1).T
            labels = torch.from_numpy(images.labels[rows])
            match = labels[pairs[:, 0]] == labels[pairs[:, 1]]
            curvature.add(features, encoder.layer(features), pairs, match)
            curvature.add_unmined(encoder.layer(features), pairs[~match])
    expected = (7 * curvature.mean(None)).clamp(min=0)
    torch.testing.assert_close(encoder.hessian.double(), expected, rtol=1e-2, atol=1e-3)


def test_a_posthoc_fit_does_not_depend_on_the_default_device(fitted):
    encoder = build(passes=200)
    with torch.device("meta"):
        encoder.fit_posthoc(training_images())
    assert torch.equal(encoder.hessian, fitted.hessian)
    assert torch.equal(encoder.prior_precision, fitted.prior_precision)


def test_draws_have_the_variance_of_the_posterior(fitted):
    """The layer is linear: the variance of an output sums variances times squared features."""
    images = pictures(4)
    with torch.inference_mode():
        features = F.pad(fitted.pooling(fitted.backbone(images)), (0, 1), value=1.0).double()
    drawn = fitted.samples(images, torch.Generator())
    assert drawn.shape == (200, 4, 3)
    precision = fitted.hessian.double().clamp(min=0) + fitted.prior_precision.double()
    mean = torch.cat([fitted.layer.weight, fitted.layer.bias[:, None]], 1).detach().double()
    outputs, variance = features @ mean.T, features.square() @ (1 / precision).T
    independent = torch.randn(
        20_000, 4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    expected = F.normalize(outputs + variance.sqrt() * independent, dim=2)
    error = expected.std(0) / 200**0.5
    assert ((drawn.double().mean(0) - expected.mean(0)).abs() < 5 * error).all()
    ratio = drawn.double().std(0) / expected.std(0)
    assert ((ratio - 1).abs() < 5 / 400**0.5).all()


def test_an_embedding_is_the_mean_direction_and_the_spread_of_its_draws(fitted):
    drawn, embedding = fitted.samples(pictures(), torch.Generator()), fitted.embed(pictures())
    torch.testing.assert_close(embedding.vectors, F.normalize(drawn.mean(0)))
    torch.testing.assert_close(embedding.variance, drawn.var(0))
    torch.testing.assert_close(embedding.uncertainty, inverse_concentration(drawn))


def test_an_embedding_does_not_depend_on_its_batch_and_is_the_same_in_copies(fitted):
    whole = fitted.embed(pictures(12))
    loaded = build(passes=200)
    loaded.load_state_dict(fitted.state_dict())
    copies = copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted)), loaded
    for encoder in (fitted, *copies):
        alone = encoder.embed(pictures(12)[7:8])
        torch.testing.assert_close(alone.vectors, whole.vectors[7:8], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(alone.uncertainty, whole.uncertainty[7:8], rtol=1e-2, atol=0)


def steps(encoder, seed=0, micro_batches=1):
    """The loss and one step of an encoder in training, of four tuples; in micro-batches or not."""
    valid = torch.ones(4, 2, dtype=torch.bool)
    images, total = pictures(16), 0.0
    for part in range(micro_batches):
        own = np.arange(4)[part::micro_batches]
        rows = [*own, *(own + 4), *(8 + 2 * own[:, None] + np.arange(2)).ravel()]
        torch.manual_seed(seed)
        embedding = encoder(images[rows])
        total += encoder.loss(
            EmbeddedTuples(embedding, valid[own]), encoder.LossOptions(MARGIN)
        ).sum()
    encoder.after_step()
    return total


def test_online_training_draws_its_weights_and_follows_their_curvature():
    with torch.random.fork_rng(devices=[]):
        encoder = build(online=True, memory=0.9, initial=50.0, scale=100.0, prior_precision=3.0)
        encoder.train()
        torch.manual_seed(4)
        noise = torch.randn(3, encoder.hessian.shape[1])
        weights = torch.cat([encoder.layer.weight, encoder.layer.bias[:, None]], 1)
        features = F.pad(encoder.pooling(encoder.backbone(pictures(16))), (0, 1), value=1.0)
        outputs = features @ (weights + noise / 53**0.5).T
        torch.manual_seed(4)
        torch.testing.assert_close(encoder(pictures(16)).vectors, F.normalize(outputs))
        steps(encoder, seed=4)
    curvature = PairCurvature("euclidean", "fixed", MARGIN)
    pairs = torch.tensor(
        [[i, 4 + i] for i in range(4)] + [[i, 8 + 2 * i + j] for i in range(4) for j in range(2)]
    )
    curvature.add(features[:, :-1].detach(), outputs.detach(), pairs, torch.arange(12) < 4)
    anchors = F.normalize(outputs[:4].detach())
    apart = torch.cdist(anchors, anchors)[*torch.triu_indices(4, 4, 1)]
    share = (apart < MARGIN).float().mean().item()
    assert 0 < share < 1
    expected = 45 + 100 * curvature.mean(share).float()
    torch.testing.assert_close(encoder.hessian, expected, rtol=1e-4, atol=1e-4)


def test_micro_batches_of_a_step_make_one_curvature():
    with torch.random.fork_rng(devices=[]):
        whole, parts = (build(**CERTAIN).train() for _ in range(2))
        steps(whole)
        steps(parts, micro_batches=2)
    torch.testing.assert_close(parts.hessian, whole.hessian, rtol=1e-3, atol=1e-2)


def test_workers_that_share_a_step_compute_the_curvature_of_all_its_pairs(monkeypatch):
    """`all_reduce` adds the sums of the other worker."""
    valid = torch.ones(4, 2, dtype=torch.bool)
    with torch.random.fork_rng(devices=[]):
        whole, *workers = (build(**CERTAIN).train() for _ in range(3))
        steps(whole)
        for number, encoder in enumerate(workers):
            own = np.arange(4)[:1] if number == 0 else np.arange(4)[1:]  # shares differ in size
            rows = [*own, *(own + 4), *(8 + 2 * own[:, None] + np.arange(2)).ravel()]
            torch.manual_seed(0)  # one draw for all
            encoder.loss(
                EmbeddedTuples(encoder(pictures(16)[rows]), valid[own]), encoder.LossOptions(MARGIN)
            )
    first, second = (each._step for each in workers)
    names = ("sums", "counts", "unmined")
    others = {id(getattr(first, name)): getattr(second, name) for name in names}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.add_(others[id(x)]))
    workers[0].after_step()
    assert first.unmined[0] == 3  # of one anchor, and of three
    torch.testing.assert_close(workers[0].hessian, whole.hessian, rtol=1e-3, atol=1e-2)


def test_gradients_reach_layer_and_backbone_and_evaluation_keeps_the_curvature():
    with torch.random.fork_rng(devices=[]):
        encoder = build(online=True, initial=100.0).train()
        steps(encoder).backward()
    assert all(weights.grad.abs().sum() > 0 for weights in encoder.parameters())
    encoder = build(online=True).eval()
    with torch.no_grad():
        steps(encoder)
    assert (encoder.hessian == 1e6).all()


def test_a_loss_of_another_curvature_is_refused():
    for form in ("squared", "contrastive-hadsell"):
        with pytest.raises(InvalidConfig, match="contrastive-linear"):
            build().LossOptions(form=form)
    assert build().LossOptions().margin == 0.7


def test_a_misspelled_weight_of_negatives_is_refused():
    with pytest.raises(InvalidConfig, match="negatives_weight 'Auto'"):
        LaplacianMetricOptions(negatives_weight="Auto")


def test_images_without_any_match_are_refused():
    training = training_images(30)
    alone = ImageSet(training.images.images, np.arange(30), training.images.ids)
    with pytest.raises(InvalidData, match="curvature"):
        build().fit_posthoc(replace(training, images=alone))
