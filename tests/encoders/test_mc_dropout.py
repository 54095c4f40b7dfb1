import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rcir.encoders import EncoderConfig, build_encoder, mc_dropout
from rcir.encoders.mc_dropout import DropoutConv

PASSES = 5


def build(backbone="mnist-cnn", channels=1, size=(8, 16), dropout=0.3, passes=PASSES, whole=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {"passes": passes, "dropout": dropout, "channels": whole}
        config = EncoderConfig("mc-dropout", backbone, "gem", options=options)
        return build_encoder(config, channels, size)


def pictures(n=6, channels=1, size=(8, 16)):
    return torch.rand(n, channels, *size, generator=torch.Generator().manual_seed(1))


def record(module):
    outputs = []
    module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.clone()))
    return outputs


def passes(outputs):
    (together,) = outputs
    return together.unflatten(0, (PASSES, -1))


def thinned_network(encoder, seed):
    """The network of one pass: dropout, and then what the masks of one generator keep."""
    network = copy.deepcopy(encoder.network)
    generator = torch.Generator().manual_seed(seed)
    dropout = encoder.options.dropout

    def thin(_layer, _inputs, output):
        shape = output.shape[1:]
        if encoder.options.channels:
            shape = (shape[0], 1, 1)
        kept = torch.rand(shape, generator=generator) < 1 - dropout
        return output * kept / (1 - dropout)

    for layer in [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]:
        layer.register_forward_hook(thin)
    return network.eval()


def one_by_one(encoder, images):
    """Mean, variance and uncertainty by running the passes one after the other."""
    with torch.no_grad():
        vectors = [
            F.normalize(network.mean_head(network.backbone(images)))
            for network in (thinned_network(encoder, seed) for seed in range(encoder.passes))
        ]
    z = torch.stack(vectors).double()
    variance = z.var(dim=0)
    return F.normalize(z.mean(dim=0)), variance, variance.mean(dim=1)


@pytest.mark.parametrize(
    ("backbone", "channels", "size"), [("mnist-cnn", 1, (8, 16)), ("resnet50", 3, (64, 64))]
)
@pytest.mark.parametrize("together", [1, 6, 15, 30], ids="{} vectors at a time".format)
def test_passes_side_by_side_are_those_one_by_one(monkeypatch, backbone, channels, size, together):
    """Of 3 images 1, 2 or all 5 passes at a time."""
    monkeypatch.setattr(mc_dropout, "SIDE_BY_SIDE", together)
    encoder = build(backbone, channels, size)
    images = pictures(3, channels, size)
    first, second = encoder.embed(images), encoder.embed(images[:2])
    mean, variance, uncertainty = one_by_one(encoder, images)
    torch.testing.assert_close(first.vectors.double(), mean, atol=1e-5, rtol=0)
    torch.testing.assert_close(first.variance.double(), variance, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(first.uncertainty.double(), uncertainty, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(second.vectors.double(), mean[:2], atol=1e-5, rtol=0)


def test_channels_are_kept_or_dropped_as_a_whole():
    encoder, images = build(whole=True), pictures(3)
    mean, variance, uncertainty = one_by_one(encoder, images)
    embedded = encoder.embed(images)
    torch.testing.assert_close(embedded.vectors.double(), mean, atol=1e-5, rtol=0)
    torch.testing.assert_close(embedded.variance.double(), variance, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(embedded.uncertainty.double(), uncertainty, atol=1e-5, rtol=1e-3)
    outputs = record(encoder.convolutions[1])
    encoder.train()(torch.rand(200, 1, 8, 16))
    dropped = (outputs[0] == 0).flatten(2).all(dim=2)
    assert (outputs[0] == 0).flatten(2).any(dim=2).equal(dropped)
    assert dropped.double().mean() == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("together", [1, 6, 100])
def test_below_the_first_mask_everything_runs_once(monkeypatch, together):
    monkeypatch.setattr(mc_dropout, "SIDE_BY_SIDE", together)
    encoder = build()
    first, second = (record(layer.conv) for layer in encoder.convolutions)
    for runs in (1, 2):
        encoder.embed(pictures(3))
        assert len(first) == runs
    assert len(second) == {1: 10, 6: 6, 100: 2}[together]
    assert {len(output) for output in first} == {3}


def test_no_more_images_than_that_are_side_by_side(monkeypatch):
    monkeypatch.setattr(mc_dropout, "SIDE_BY_SIDE", 10)
    encoder = build()
    heads = record(encoder.network.mean_head)
    encoder.embed(pictures(4))
    assert [len(head) for head in heads] == [8, 8, 4]
    encoder.embed(pictures(30))
    assert [len(head) for head in heads[3:]] == [30] * PASSES


def test_masks_are_drawn_once_for_a_shape_and_are_no_part_of_the_weights(monkeypatch):
    encoder = build()
    fingerprint, names = encoder.fingerprint(), set(encoder.state_dict())
    drawn = []
    draw = mc_dropout.DropoutMasks._draw

    def counted(self, *arguments):
        drawn.append(arguments)
        return draw(self, *arguments)

    monkeypatch.setattr(mc_dropout.DropoutMasks, "_draw", counted)
    for images in (pictures(), pictures(2)):
        encoder.embed(images)
    assert [tuple(shape) for shape, _ in drawn] == [(32, 6, 14), (64, 4, 12)]
    assert encoder.fingerprint() == fingerprint
    assert set(encoder.state_dict()) == names
    (kept,) = {masks.dtype for masks in encoder._kept[1].masks.values()}
    assert kept == torch.bool


def test_images_of_another_shape_have_masks_of_their_own():
    encoder, other = build("cifar-cnn", 3, (20, 20)), build("cifar-cnn", 3, (20, 20))
    small, large = pictures(2, 3, (20, 20)), pictures(2, 3, (24, 28))
    expected = encoder.embed(small).vectors, encoder.embed(large).vectors
    assert torch.equal(other.embed(large).vectors, expected[1])
    assert torch.equal(other.embed(small).vectors, expected[0])


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda encoder: pickle.loads(pickle.dumps(encoder)), lambda e: e.to("cpu")],
    ids=["deepcopy", "pickle", "to"],
)
def test_a_copy_of_an_encoder_that_embedded_embeds_the_same(copied):
    encoder = build()
    images = pictures()
    expected = encoder.embed(images)
    other = copied(encoder)
    assert torch.equal(other.embed(images).vectors, expected.vectors)
    assert torch.equal(other.embed(images).uncertainty, expected.uncertainty)


def test_an_interrupted_drawing_of_masks_is_begun_anew(monkeypatch):
    encoder = build()
    expected = build().embed(pictures())
    draw = mc_dropout.DropoutMasks._draw
    count = []

    def interrupted(self, *arguments):
        if count:
            raise KeyboardInterrupt
        count.append(1)
        return draw(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(mc_dropout.DropoutMasks, "_draw", interrupted)
        with pytest.raises(KeyboardInterrupt):
            encoder.embed(pictures())
    assert torch.equal(encoder.eval()(pictures()).vectors, build().eval()(pictures()).vectors)
    assert torch.equal(encoder.embed(pictures()).vectors, expected.vectors)


def test_the_read_out_is_that_of_the_unit_vectors_of_the_passes():
    encoder = build()
    heads = record(encoder.network.mean_head)
    embedding = encoder.embed(pictures())
    (head,) = heads
    z = head.double().numpy().reshape(PASSES, 6, -1)
    z /= np.linalg.norm(z, axis=2, keepdims=True)
    mean = z.mean(0)
    variance = ((z - mean) ** 2).sum(0) / (PASSES - 1)
    np.testing.assert_allclose(embedding.variance, variance, rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(embedding.uncertainty, variance.mean(1), rtol=1e-3)
    length = np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(embedding.vectors, mean / length, atol=1e-5)
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
    for whole, thinned in zip(passes(before), passes(after), strict=True):
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
    plain = encoder.eval()(images).vectors
    assert torch.equal(plain, encoder(images).vectors)
    assert encoder(images).variance is None
    encoder.train()
    assert not torch.equal(encoder(images).vectors, encoder(images).vectors)


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
    torch.testing.assert_close(alone.vectors, whole.vectors[1:2], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(alone.uncertainty, whole.uncertainty[1:2], atol=1e-5, rtol=1e-3)
    assert torch.equal(encoder.embed(images).vectors, whole.vectors)
