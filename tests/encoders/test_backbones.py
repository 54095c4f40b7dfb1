from urllib.error import URLError

import pytest
import torch
from torch import nn
from torchvision.models import ResNet, ResNet50_Weights
from torchvision.models.resnet import BasicBlock

from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.backbones import build_backbone, output_shape
from rcir.errors import DataUnavailable, InvalidConfig


@pytest.mark.parametrize(
    ("name", "channels", "size", "expected"),
    [
        ("mnist-cnn", 1, (28, 28), (64, 12, 12)),  # 9,216 features, as published
        ("mnist-cnn", 1, (8, 16), (64, 2, 6)),
        ("lenet", 1, (28, 56), (64, 4, 11)),  # two 5 x 5 convolutions, each halved
        ("lenet", 3, (16, 16), (64, 1, 1)),
        ("cifar-cnn", 3, (32, 32), (64, 4, 4)),  # 1,024 features, as published
        ("resnet10", 3, (64, 64), (256, 4, 4)),
        ("resnet10", 1, (28, 28), (256, 2, 2)),
        ("resnet50", 3, (64, 64), (2048, 2, 2)),
        ("densenet161", 3, (32, 32), (2208, 1, 1)),
    ],
)
def test_feature_maps_have_the_published_shapes_and_are_never_negative(
    name, channels, size, expected
):
    backbone = build_backbone(name, channels, pretrained=False).eval()
    assert output_shape(backbone, channels, size) == expected
    with torch.no_grad():
        maps = backbone(torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0)))
    assert maps.shape == (2, *expected)
    assert maps.min() >= 0
    assert maps.max() > 0
    encoder_names = {name for name, _ in backbone.named_parameters()}
    assert not any("fc" in name or "classifier" in name for name in encoder_names)


def test_the_smallest_residual_network_is_torchvisions_half_as_wide():
    """Of basic blocks 1, 1, 1, 1, with a stem for small pictures."""
    peer = ResNet(BasicBlock, [1, 1, 1, 1])
    peer.conv1 = nn.Conv2d(3, 64, 3, bias=False)
    halved = sum(
        weights.numel() / 2 ** (2 if weights.dim() == 4 and name != "conv1.weight" else 1)
        for name, weights in peer.named_parameters()
        if not name.startswith("fc")
    )
    ours = build_backbone("resnet10", 3, pretrained=False)
    assert sum(weights.numel() for weights in ours.parameters()) == halved


@pytest.mark.parametrize("name", ["resnet50", "densenet161"])
def test_large_backbones_embed_tiny_images_with_frozen_batch_statistics(name):
    encoder = build_encoder(EncoderConfig("btl", name, "gem", dim=8), 3, (32, 32)).train()
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    statistics = {n: v.clone() for n, v in encoder.named_buffers() if "running" in n}
    whole, alone = encoder.embed(images), encoder.embed(images[:1])
    assert whole.vectors.shape == (2, 8)
    torch.testing.assert_close(alone.vectors, whole.vectors[:1], atol=1e-5, rtol=1e-4)
    assert all(torch.equal(v, statistics[n]) for n, v in encoder.named_buffers() if "running" in n)


def test_weights_that_cannot_be_downloaded_are_unavailable(monkeypatch, tmp_path):
    def offline(*_arguments, **_options):
        raise URLError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(DataUnavailable, match=r"no route to host.*encoder\.pretrained=false"):
        build_backbone("resnet50", 3, pretrained=True)


@pytest.mark.parametrize("content", [b"", b"<html>log in</html>", b"PK\x03\x04cut short"])
def test_weights_that_are_damaged_in_the_cache_are_unavailable(monkeypatch, tmp_path, content):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    cached = tmp_path / "hub" / "checkpoints" / "resnet50-11ad3fa6.pth"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(content)
    with pytest.raises(DataUnavailable, match=r"damaged there.*encoder\.pretrained=false"):
        build_backbone("resnet50", 3, pretrained=True)


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [("mnist-cnn", 1, (5, 8)), ("cifar-cnn", 3, (15, 32)), ("densenet161", 3, (16, 16))],
)
def test_images_too_small_for_a_backbone_are_refused_with_what_to_do(name, channels, size):
    with pytest.raises(InvalidConfig, match=r"raise preprocessing\.size"):
        output_shape(build_backbone(name, channels, pretrained=False), channels, size)


@pytest.mark.parametrize(
    ("pretrained", "version"), [(True, "V2"), ("IMAGENET1K_V1", "V1"), ("IMAGENET1K_V2", "V2")]
)
def test_either_version_of_the_weights_is_asked_for(monkeypatch, tmp_path, pretrained, version):
    asked = []

    def offline(url, *_, **__):
        asked.append(url)
        raise OSError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(DataUnavailable):
        build_encoder(EncoderConfig("btl", "resnet50", "gem", pretrained=pretrained), 3, (32, 32))
    assert asked == [ResNet50_Weights[f"IMAGENET1K_{version}"].url]


def test_weights_that_do_not_exist_are_refused():
    config = EncoderConfig("btl", "densenet161", "gem", pretrained="IMAGENET1K_V2")
    with pytest.raises(InvalidConfig, match=r"to one of IMAGENET1K_V1, true or"):
        build_encoder(config, 3, (32, 32))
