import numpy as np
import pytest
import torch

from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.mc_dropout import DropoutConv

PASSES = 5


def build(backbone="mnist-cnn", channels=1, size=(8, 16), dropout=0.3, passes=PASSES):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = EncoderConfig("mc-dropout", backbone, "gem", passes=passes, dropout=dropout)
        return build_encoder(config, channels, size)


def pictures(n=6, channels=1, size=(8, 16)):
    return torch.rand(n, channels, *size, generator=torch.Generator().manual_seed(1))


def record(module):
    outputs = []
    module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.clone()))
    return outputs


def test_the_read_out_is_that_of_the_unit_vectors_of_the_passes():
    encoder = build()
    heads = record(encoder.network.mean_head)
    embedding = encoder.embed(pictures())
    assert len(heads) == PASSES
    z = np.stack([head.double().numpy() for head in heads])
    z /= np.linalg.norm(z, axis=2, keepdims=True)
    mean = z.mean(0)
    variance = ((z - mean) ** 2).sum(0) / (PASSES - 1)
    np.testing.assert_allclose(embedding.variance, variance, rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(embedding.uncertainty, variance.mean(1), rtol=1e-3)
    length = np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(embedding.mean, mean / length, atol=1e-5)
    # An identity of unit vectors: the spread is what the mean lacks in length.
    spread = embedding.variance.double().sum(1) * (PASSES - 1) / PASSES
    np.testing.assert_allclose(spread, 1 - length[:, 0] ** 2, rtol=1e-4)
    assert embedding.uncertainty.min() > 1e-5


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_a_pass_drops_the_same_features_of_every_image_and_scales_up_the_rest(dropout):
    encoder = build(dropout=dropout)
    layer = encoder.convolutions[1]
    before, after = record(layer.conv), record(layer)
    encoder.embed(pictures())
    kept = []
    for whole, thinned in zip(before, after, strict=True):
        factor = thinned / whole
        assert torch.allclose(factor, factor[:1].expand_as(factor), atol=1e-5)
        kept.append(factor[0].numpy())
        values = np.unique(kept[-1].round(4))
        np.testing.assert_allclose(values, [0, 1 / (1 - dropout)], atol=1e-3)
    share = np.mean([k == 0 for k in kept])
    count = np.prod(np.shape(kept))
    assert abs(share - dropout) < 5 * np.sqrt(dropout * (1 - dropout) / count)
    assert not np.array_equal(kept[0], kept[1])


def test_without_passes_evaluation_drops_nothing_and_training_does():
    encoder = build()
    images = pictures()
    plain = encoder.eval()(images).mean
    assert torch.equal(plain, encoder(images).mean)
    assert encoder(images).variance is None
    encoder.train()
    assert not torch.equal(encoder(images).mean, encoder(images).mean)


def test_every_convolution_of_a_large_backbone_is_thinned_in_evaluation_mode():
    encoder = build("resnet50", 3, (32, 32), passes=2).train()
    assert len(encoder.convolutions) == 53  # 1 + 16 blocks of 3 + 4 shortcuts
    thinned = [module for module in encoder.modules() if isinstance(module, DropoutConv)]
    assert thinned == encoder.convolutions
    norms = [m for m in encoder.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    counts = [int(norm.num_batches_tracked) for norm in norms]
    images = pictures(3, 3, (32, 32))
    whole = encoder.embed(images)
    assert [int(norm.num_batches_tracked) for norm in norms] == counts == [0] * 53
    alone = encoder.embed(images[1:2])
    torch.testing.assert_close(alone.mean, whole.mean[1:2], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(alone.uncertainty, whole.uncertainty[1:2], atol=1e-5, rtol=1e-3)
    assert torch.equal(encoder.embed(images).mean, whole.mean)
