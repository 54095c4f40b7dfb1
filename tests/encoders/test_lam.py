"""Laplacian metric learner: posterior, draws, and the curvature it is fitted by."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rcir.data import Preprocessing
from rcir.data.records import ImageSet
from rcir.encoders import EncoderConfig
from rcir.encoders.base import TrainingImages
from rcir.encoders.batches import embed
from rcir.encoders.lam import inverse_concentration, marginal_prior_precision
from rcir.errors import InvalidConfig, InvalidData
from rcir.losses.curvature import PairCurvature
from tests.encoders import small
from tests.encoders.small import as_tuples, pictures
from training import TrainingConfig

MARGIN = 0.15  # of an untrained network: some pairs are closer, some are not

# A posterior so narrow that all draws are the same.
CERTAIN = {"online": True, "initial": 1e12, "memory": 1e-9, "negatives_weight": 0.5}


def build(**options):
    return small.build(EncoderConfig("lam", dim=3, options=options))


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


def test_an_encoder_has_no_uncertainty_before_it_is_fitted(fitted):
    encoder = build()
    embedding = encoder.embed(pictures())
    assert embedding.uncertainty is None
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
        drawn = fitted.pass_vectors(images)
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
    with torch.inference_mode():
        drawn = fitted.pass_vectors(pictures())
    embedding = fitted.embed(pictures())
    torch.testing.assert_close(embedding.vectors, F.normalize(drawn.mean(0)))
    torch.testing.assert_close(embedding.variance, drawn.var(0))
    torch.testing.assert_close(embedding.uncertainty, inverse_concentration(drawn))


def loss(encoder, tuples=range(4), seed=0):
    """The loss of some of four tuples with two negatives each, under a draw of the layer."""
    chosen = np.asarray(tuples)
    rows = [*chosen, *(chosen + 4), *(8 + 2 * chosen[:, None] + np.arange(2)).ravel()]
    torch.manual_seed(seed)
    embedding = encoder(pictures(16)[rows])
    return encoder.loss(as_tuples(embedding, negatives=2), encoder.LossOptions(MARGIN)).sum()


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
        loss(encoder, seed=4)
    encoder.after_step()
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


@pytest.mark.parametrize("clamp", ["use", "step"])
def test_negative_curvature_counts_as_0_in_the_sum_or_in_each_step(clamp):
    """By hand: one weight gains 1, -4 and 3 times the scale of 10, and keeps half at each step."""
    encoder = build(online=True, memory=0.5, initial=8.0, scale=10.0, clamp=clamp)
    encoder.prior_precision.fill_(1.0)
    expected = {"use": [(14, 15), (-33, 1), (13.5, 14.5)], "step": [(14, 15), (7, 8), (33.5, 34.5)]}
    for gain, (curvature, precision) in zip((1, -4, 3), expected[clamp], strict=True):
        sums = torch.full((2, *encoder.hessian.shape), float(gain), dtype=torch.float64)
        sums[1] = 0
        step = PairCurvature("euclidean", "fixed", MARGIN, sums, torch.ones(2), torch.ones(2))
        encoder._step = step
        encoder.after_step()
        assert (encoder.hessian == curvature).all()
        torch.testing.assert_close(encoder._deviation()[0, 0], torch.tensor(precision**-0.5))


@pytest.mark.parametrize("parts", [[[0, 2], [1, 3]], [[0], [1, 2, 3]]], ids=["equal", "unequal"])
def test_micro_batches_and_workers_of_a_step_make_one_curvature(parts, monkeypatch):
    """`all_reduce` adds the sums of the other worker."""
    with torch.random.fork_rng(devices=[]):
        whole, micro_batches, *workers = (build(**CERTAIN).train() for _ in range(4))
        for encoder, steps in (
            (whole, [range(4)]),
            (micro_batches, parts),
            *((worker, [part]) for worker, part in zip(workers, parts, strict=True)),
        ):
            for tuples in steps:
                loss(encoder, tuples)
    sums = []
    whole.after_step()
    micro_batches.after_step()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: sums.append(x.clone()))
    workers[1].after_step()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.add_(sums.pop(0)))
    workers[0].after_step()
    assert sums == []
    for encoder in (micro_batches, workers[0]):
        torch.testing.assert_close(encoder.hessian, whole.hessian, rtol=1e-3, atol=1e-2)


def test_gradients_reach_layer_and_backbone_and_evaluation_keeps_the_curvature():
    with torch.random.fork_rng(devices=[]):
        encoder = build(online=True, initial=100.0).train()
        loss(encoder).backward()
    assert all(weights.grad.abs().sum() > 0 for weights in encoder.parameters())
    encoder = build(online=True).eval()
    with torch.no_grad():
        loss(encoder)
    encoder.after_step()
    assert (encoder.hessian == 1e6).all()


@pytest.mark.parametrize("form", ["squared", "contrastive-hadsell"])
def test_a_loss_of_another_curvature_is_refused(form):
    with pytest.raises(InvalidConfig, match="contrastive-linear"):
        TrainingConfig("run", encoder=EncoderConfig("lam"), loss={"form": form})
    assert build().LossOptions().margin == 0.7


def test_images_without_any_match_are_refused():
    training = training_images(30)
    alone = ImageSet(training.images.images, np.arange(30), training.images.ids)
    with pytest.raises(InvalidData, match="curvature"):
        build().fit_posthoc(replace(training, images=alone))
