"""MC dropout: passes with fixed masks, against thinned networks that run one after the other."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rcir.encoders import EncoderConfig
from tests.encoders import small
from tests.encoders.small import pictures

PASSES = 5


def build(backbone="mnist-cnn", n_channels=1, size=(8, 16), **options):
    options = {"passes": PASSES, "dropout": 0.3} | options
    config = EncoderConfig("mc-dropout", backbone, "gem", options=options)
    return small.build(config, channels=n_channels, size=size)


def record(module):
    outputs = []
    module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.clone()))
    return outputs


def thinned_network(encoder, seed):
    """The network of one pass: dropout by the masks of one generator."""
    network = copy.deepcopy(encoder.network)
    generator = torch.Generator().manual_seed(seed)
    dropout = encoder.options.dropout

    def thin(_layer, _inputs, output):
        shape = output.shape[1:]
        if encoder.options.channels:
            shape = (shape[0], 1, 1)
        mask = torch.rand(shape, generator=generator) < 1 - dropout
        return output * mask / (1 - dropout)

    for layer in [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]:
        layer.register_forward_hook(thin)
    return network.eval()


def assert_passes_one_by_one(encoder, images):
    """Compare mean direction, variance and uncertainty with passes that run one by one."""
    with torch.no_grad():
        vectors = [
            F.normalize(network.mean_head(network.backbone(images)))
            for network in (thinned_network(encoder, seed) for seed in range(encoder.passes))
        ]
    z = torch.stack(vectors).double()
    variance, embedding = z.var(dim=0), encoder.embed(images)
    close = {"check_dtype": False, "atol": 1e-5, "rtol": 1e-2}
    torch.testing.assert_close(embedding.vectors, F.normalize(z.mean(dim=0)), **close)
    torch.testing.assert_close(embedding.variance, variance, **close)
    torch.testing.assert_close(embedding.uncertainty, variance.mean(dim=1), **close)
    assert embedding.uncertainty.min() > 1e-4


@pytest.mark.parametrize(
    ("backbone", "channels", "size", "n"),
    [
        ("mnist-cnn", 1, (8, 16), 3),
        ("mnist-cnn", 1, (8, 16), 20),  # some passes at a time
        ("mnist-cnn", 1, (8, 16), 70),  # one pass at a time
        ("resnet10", 3, (32, 32), 3),
    ],
    ids=str,
)
def test_an_embedding_is_the_mean_and_spread_of_passes_one_by_one(backbone, channels, size, n):
    encoder = build(backbone, channels, size)
    for count in (n, 2):
        assert_passes_one_by_one(encoder, pictures(count, channels=channels, size=size))


def test_channels_are_kept_or_dropped_as_a_whole():
    encoder = build(channels=True)
    assert_passes_one_by_one(encoder, pictures(3))
    outputs = record(encoder.convolutions[1])
    encoder.train()(torch.rand(200, 1, 8, 16))
    dropped = (outputs[0] == 0).flatten(2).all(dim=2)
    assert (outputs[0] == 0).flatten(2).any(dim=2).equal(dropped)
    assert dropped.double().mean() == pytest.approx(0.3, abs=0.02)


def test_threads_with_images_of_several_shapes_do_not_mix_their_masks():
    encoder = build("cifar-cnn", 3, (20, 20))
    shapes = [pictures(2, channels=3, size=size) for size in ((20, 20), (24, 28), (20, 28))]
    expected = [build("cifar-cnn", 3, (20, 20)).embed(images) for images in shapes]
    with ThreadPoolExecutor(8) as threads:
        results = threads.map(encoder.embed, shapes * 20)
    for result, alone in zip(results, expected * 20, strict=True):
        torch.testing.assert_close(result.tensors, alone.tensors, atol=1e-6, rtol=1e-5)


def test_an_interruption_between_masks_does_not_change_later_embeddings():
    encoder, expected = build(), build().embed(pictures())

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = encoder.convolutions[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        encoder.embed(pictures())
    hook.remove()
    assert torch.equal(encoder.eval()(pictures()).vectors, build().eval()(pictures()).vectors)
    assert torch.equal(encoder.embed(pictures()).vectors, expected.vectors)


def test_without_passes_evaluation_drops_nothing_and_training_does():
    encoder = build()
    images = pictures()
    plain = encoder.eval()(images).vectors
    assert torch.equal(plain, encoder(images).vectors)
    assert encoder(images).variance is None
    encoder.train()
    assert not torch.equal(encoder(images).vectors, encoder(images).vectors)


def test_every_convolution_of_a_large_backbone_is_thinned_and_batch_statistics_stay():
    encoder = build("resnet50", 3, (32, 32), passes=2).train()
    assert len(encoder.convolutions) == 53  # 1 + 16 blocks of 3 + 4 shortcuts
    norms = [module for module in encoder.modules() if isinstance(module, nn.BatchNorm2d)]
    encoder.embed(pictures(3, channels=3, size=(32, 32)))
    assert {int(norm.num_batches_tracked) for norm in norms} == {0}


def test_independent_masks_belong_to_the_image_whatever_its_batch():
    encoder, images = build(masks="independent"), pictures(20)
    together, alone = encoder.embed(images), [encoder.embed(images[i : i + 1]) for i in range(20)]
    for number, one in enumerate(alone):
        row = together[number : number + 1]
        torch.testing.assert_close(row.tensors, one.tensors, atol=1e-6, rtol=1e-4)
    again = encoder.embed(images[[3, 3]])
    assert torch.equal(again.vectors[0], again.vectors[1])


def test_independent_masks_are_those_of_independent_draws():
    encoder = build(masks="independent")
    layer = encoder.convolutions[1]
    before, after = (record(each) for each in (layer.conv, layer))
    layer.conv.register_forward_hook(lambda _module, _inputs, output: output.fill_(1.0))
    encoder.embed(pictures(12))  # 12 images in 5 passes, all at a time
    assert torch.all((after[0] == 0) | ((after[0] - 1 / 0.7).abs() < 1e-5))
    kept = (after[0] > 0).flatten(1).double()  # (60, values)
    assert len(kept) == 60
    assert len(before) == 1
    # Of 0.7 each, within five standard errors; of two masks, uncorrelated values.
    n = kept.shape[1]
    assert abs(kept.mean().item() - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
    centred = (kept - 0.7) / 0.21**0.5
    products = (centred @ centred.T / n)[~torch.eye(60, dtype=torch.bool)]
    assert products.abs().max() < 5 / n**0.5
    assert (centred[:, 1:] * centred[:, :-1]).mean().abs() < 5 / kept.numel() ** 0.5


def test_a_mean_without_unit_length_is_shorter_by_the_variance():
    """|mean|^2 = 1 - sum of the biased variances, as the passes have unit length."""
    for masks in ("shared", "independent"):
        raw = build(masks=masks, unit=False).embed(pictures())
        unit = build(masks=masks).embed(pictures())
        expected = 1 - raw.variance.sum(1) * (PASSES - 1) / PASSES
        torch.testing.assert_close(raw.vectors.square().sum(1), expected)
        torch.testing.assert_close(F.normalize(raw.vectors), unit.vectors)
        torch.testing.assert_close(raw.variance, unit.variance)
        assert expected.max() < 0.999
