"""Built-in backbones, their weights, and what pools their feature maps."""

import time
from concurrent.futures import ThreadPoolExecutor
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import ResNet, ResNet50_Weights, resnet50
from torchvision.models.resnet import BasicBlock

from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.backbones import build_backbone, output_shape
from rcir.encoders.features import GeM, pooling
from rcir.errors import DataUnavailable, InvalidConfig


@pytest.mark.parametrize(
    ("name", "channels", "size", "expected"),
    [
        ("mnist-cnn", 1, (28, 28), (64, 12, 12)),  # 9,216 features, as published
        ("lenet", 1, (28, 56), (64, 4, 11)),  # two 5 x 5 convolutions, each halved
        ("lenet", 3, (16, 16), (64, 1, 1)),
        ("cifar-cnn", 3, (32, 32), (64, 4, 4)),  # 1,024 features, as published
        ("resnet10", 3, (64, 64), (256, 4, 4)),
        ("resnet10", 1, (28, 28), (256, 2, 2)),
        ("resnet50", 3, (32, 32), (2048, 1, 1)),
        ("densenet161", 3, (32, 32), (2208, 1, 1)),
    ],
    ids=str,
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


def test_resnet10_is_a_torchvision_resnet_of_half_the_width():
    """With one basic block per stage, and a stem for small pictures."""
    peer = ResNet(BasicBlock, [1, 1, 1, 1])
    peer.conv1 = nn.Conv2d(3, 64, 3, bias=False)
    halved = sum(
        weights.numel() / 2 ** (2 if weights.dim() == 4 and name != "conv1.weight" else 1)
        for name, weights in peer.named_parameters()
        if not name.startswith("fc")
    )
    ours = build_backbone("resnet10", 3, pretrained=False)
    assert sum(weights.numel() for weights in ours.parameters()) == halved


def test_batch_statistics_of_a_large_backbone_are_frozen():
    encoder = build_encoder(EncoderConfig("btl", "densenet161", "gem", dim=8), 3, (32, 32)).train()
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    statistics = {n: v.clone() for n, v in encoder.named_buffers() if "running" in n}
    whole, alone = encoder.embed(images), encoder.embed(images[:1])
    assert whole.vectors.shape == (2, 8)
    torch.testing.assert_close(alone.vectors, whole.vectors[:1], atol=1e-4, rtol=1e-3)
    assert all(torch.equal(v, statistics[n]) for n, v in encoder.named_buffers() if "running" in n)


def test_weights_are_downloaded_once_by_several_at_a_time(monkeypatch, tmp_path):
    weights, downloads = resnet50().state_dict(), []

    def slow(url, file, *_, **__):
        downloads.append(url)
        time.sleep(0.1)
        torch.save(weights, file)

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", slow)
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda _: build_backbone("resnet50", 3, pretrained=True), range(2)))
    assert len(downloads) == 1
    for backbone in built:
        assert torch.equal(next(backbone.parameters()), weights["conv1.weight"])


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04cut short"])
def test_damaged_weights_in_the_cache_are_unavailable(monkeypatch, tmp_path, content):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    cached = tmp_path / "hub" / "checkpoints" / "resnet50-11ad3fa6.pth"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(content)
    with pytest.raises(DataUnavailable, match="damaged"):
        build_backbone("resnet50", 3, pretrained=True)


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [("mnist-cnn", 1, (5, 8)), ("cifar-cnn", 3, (15, 32))],
    ids=str,
)
def test_images_too_small_for_a_backbone_are_refused(name, channels, size):
    with pytest.raises(InvalidConfig, match=r"preprocessing\.size"):
        output_shape(build_backbone(name, channels, pretrained=False), channels, size)


@pytest.mark.parametrize(("pretrained", "version"), [(True, "V2"), ("IMAGENET1K_V1", "V1")])
def test_either_version_of_the_weights_is_downloaded_or_unavailable(
    monkeypatch, tmp_path, pretrained, version
):
    requests = []

    def offline(url, *_, **__):
        requests.append(url)
        raise URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(DataUnavailable, match=r"encoder\.pretrained"):
        build_backbone("resnet50", 3, pretrained)
    assert requests == [ResNet50_Weights[f"IMAGENET1K_{version}"].url]


def test_weights_that_do_not_exist_are_refused():
    config = EncoderConfig("btl", "densenet161", "gem", pretrained="IMAGENET1K_V2")
    with pytest.raises(InvalidConfig, match="IMAGENET1K_V1"):
        build_encoder(config, 3, (32, 32))


def test_gem_follows_its_formula():
    maps = np.random.default_rng(0).uniform(0.1, 3, (4, 5, 2, 3))
    for p in (1.0, 2.5, 3.0):
        expected = np.array(
            [[(sum(v**p for v in plane.ravel()) / 6) ** (1 / p) for plane in m] for m in maps]
        )
        with torch.no_grad():
            pooled = GeM(p)(torch.from_numpy(maps))
        np.testing.assert_allclose(pooled, expected, rtol=1e-5)


def test_gem_of_a_dead_channel_has_a_finite_gradient():
    maps = torch.zeros(1, 2, 3, 3, requires_grad=True)
    gem = GeM()
    gem(maps).sum().backward()
    assert torch.isfinite(maps.grad).all()
    assert torch.isfinite(gem.p.grad)


def test_gem_ignores_positions_and_flatten_does_not():
    maps = torch.rand(1, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    for name, length, ignores in (("gem", 2, True), ("flatten", 18, False)):
        pool, width = pooling(name, torch.Size([2, 3, 3]))
        assert width == length
        assert torch.allclose(pool(maps), pool(maps.flip(-1))) == ignores
