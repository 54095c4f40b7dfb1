"""Backbones of model hubs: features equal those of the libraries, and faults are named."""

import json
import sys

import open_clip
import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from torch.nn.functional import normalize

from rcir.data import Preprocessing
from rcir.encoders import EncoderConfig, build_encoder, model_preprocessing
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, MissingPackage
from tests.encoders.hub_configurations import TINY_CLIP, TINY_TOWER, check_saved, pretrained

SIZE = (64, 64)


def pictures(n=3, size=SIZE):
    return torch.rand(n, 3, *size, generator=torch.Generator().manual_seed(1))


def published(name, folder, **options):
    """A timm model and the file of its weights."""
    model = timm.create_model(name, **options).eval()
    path = folder / f"{name}.safetensors"
    save_file(model.state_dict(), path)
    return model, str(path)


@pytest.fixture
def vit_folder(tmp_path):
    """A vision transformer, and the folder that it is saved in."""
    model = transformers.ViTModel(transformers.ViTConfig(**TINY_TOWER), add_pooling_layer=False)
    folder = tmp_path / "vit"
    model.save_pretrained(folder)
    processor = transformers.ViTImageProcessor(size={"height": 64, "width": 64})
    processor.save_pretrained(folder)
    return model.eval(), folder


@pytest.fixture
def tiny_clip(tmp_path):
    """The name of a small CLIP model that OpenCLIP knows."""
    (tmp_path / "tiny-clip.json").write_text(json.dumps(TINY_CLIP))
    open_clip.add_model_config(tmp_path / "tiny-clip.json")
    return "tiny-clip"


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_vit"])
def test_timm_features_equal_timm(name, tmp_path):
    model, path = published(name, tmp_path)
    size = (160, 160)
    encoder = pretrained(f"timm:{name}", size, checkpoint_path=path)
    with torch.inference_mode():
        features = model.forward_features(pictures(size=size))
        pooled = model.forward_head(features, pre_logits=True)
        maps = encoder.backbone(pictures(size=size))
    if name == "test_vit":
        torch.testing.assert_close(maps[:, :, 0, 0], pooled)
    else:
        torch.testing.assert_close(maps, features)
        pooled = features.mean((2, 3))
    vectors = encoder.embed(pictures(size=size)).vectors
    torch.testing.assert_close(vectors, normalize(pooled))
    assert encoder.config.dim == vectors.shape[1] == model.num_features
    check_saved(encoder, size, [path], tmp_path)


@pytest.mark.parametrize("size", [(160, 160), (96, 128)], ids=str)
def test_a_transformer_accepts_other_sizes_than_its_own(size, tmp_path):
    _, path = published("test_vit", tmp_path)
    encoder = pretrained("timm:test_vit", size, checkpoint_path=path)
    vectors = encoder.embed(pictures(size=size)).vectors
    overlay = {"pretrained_cfg_overlay": {"file": path}}
    other = timm.create_model("test_vit", img_size=size, pretrained=True, **overlay).eval()
    with torch.inference_mode():
        pooled = other.forward_head(other.forward_features(pictures(size=size)), pre_logits=True)
    torch.testing.assert_close(vectors, normalize(pooled))


def test_negative_features_reach_the_heads():
    config = EncoderConfig("btl", "timm:test_convnext", "avg", dim=4)
    encoder = build_encoder(config, 3, SIZE).eval()
    seen = []
    for module in encoder.modules():
        if isinstance(module, torch.nn.Linear) and module.out_features == 4:
            module.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    with torch.no_grad():
        encoder(pictures())
    assert min(features.min() for features in seen) < -0.01


@pytest.mark.parametrize("name", ["test_convnext", "test_vit", "test_efficientnet"])
def test_gem_is_refused_where_features_can_be_negative(name):
    with pytest.raises(InvalidConfig, match=r"encoder\.pooling"):
        build_encoder(EncoderConfig("btl", f"timm:{name}", "gem"), 3, (160, 160))


def test_timm_preprocessing_is_that_of_the_weights():
    config = EncoderConfig("pretrained", "timm:tf_efficientnet_lite0")
    half = (0.5, 0.5, 0.5)
    expected = Preprocessing((224, 224), 3, half, half, "pillow-bicubic", 0.875)
    assert model_preprocessing(config) == expected
    squashed = model_preprocessing(EncoderConfig("pretrained", "timm:coat_lite_medium_384"))
    assert (squashed.size, squashed.crop) == ((384, 384), None)


def test_transformers_features_equal_transformers(vit_folder, tmp_path):
    model, folder = vit_folder
    encoder = pretrained(f"transformers:{folder}", pretrained=True)
    with torch.inference_mode():
        token = model(pixel_values=pictures()).last_hidden_state[:, 0]
    torch.testing.assert_close(encoder.embed(pictures()).vectors, normalize(token))
    found = model_preprocessing(encoder.config)
    half = (0.5,) * 3
    assert found == Preprocessing((64, 64), 3, half, half, crop_rounding="down")
    other = pretrained(f"transformers:{folder}", (32, 96), pretrained=True)
    with torch.inference_mode():
        options = {"interpolate_pos_encoding": True}
        token = model(pixel_values=pictures(size=(32, 96)), **options).last_hidden_state[:, 0]
    torch.testing.assert_close(other.embed(pictures(size=(32, 96))).vectors, normalize(token))
    check_saved(encoder, SIZE, [folder], tmp_path)


def test_maps_of_transformers_are_pooled_by_the_model(tmp_path):
    settings = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    model = transformers.ResNetModel(settings).eval()
    model.save_pretrained(tmp_path / "resnet")
    encoder = pretrained(f"transformers:{tmp_path / 'resnet'}", pretrained=True)
    with torch.inference_mode():
        pooled = model(pixel_values=pictures()).last_hidden_state.mean((2, 3))
    torch.testing.assert_close(encoder.embed(pictures()).vectors, normalize(pooled))


def test_open_clip_features_equal_its_image_tower(tiny_clip, tmp_path):
    clip = open_clip.create_model(tiny_clip, pretrained=None).eval()
    path = tmp_path / "clip.safetensors"
    save_file(clip.state_dict(), path)
    encoder = pretrained(f"open_clip:{tiny_clip}", checkpoint_path=str(path))
    with torch.inference_mode():
        embedded = clip.encode_image(pictures(), normalize=True)
    torch.testing.assert_close(encoder.embed(pictures()).vectors, embedded)
    assert not any("token_embedding" in name for name in encoder.state_dict())
    check_saved(encoder, SIZE, [path], tmp_path)


def test_open_clip_preprocessing_is_that_of_the_weights(tiny_clip):
    found = model_preprocessing(EncoderConfig("pretrained", f"open_clip:{tiny_clip}"))
    expected = open_clip.transform.PreprocessCfg()
    assert (found.mean, found.std) == (expected.mean, expected.std)
    assert (found.size, found.interpolation, found.crop) == ((64, 64), "pillow-bicubic", 1.0)
    siglip = model_preprocessing(EncoderConfig("pretrained", "open_clip:ViT-B-16-SigLIP/webli"))
    assert (siglip.mean, siglip.size, siglip.crop) == ((0.5,) * 3, (224, 224), None)


@pytest.mark.parametrize("package", ["timm", "open_clip", "transformers"])
def test_a_missing_package_is_named_with_its_extra(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=rf"\[{package}\]"):
        pretrained(f"{package}:any")


@pytest.mark.parametrize(
    ("backbone", "options", "word"),
    [
        ("timm:nothing", {}, r"timm\.list_models"),
        ("timm:resnet18.nothing", {}, "tag"),
        ("hub:resnet18", {}, "transformers:NAME"),
        ("open_clip:nothing", {}, r"open_clip\.list_models"),
        ("open_clip:RN50", {"pretrained": True}, "openai"),
        ("timm:test_resnet", {"pretrained": "IMAGENET1K_V1"}, "true or false"),
        ("timm:test_resnet", {"checkpoint_path": "a.pth"}, "safetensors"),
        ("mnist-cnn", {"checkpoint_path": "a.safetensors"}, "no pretrained"),
        ("resnet50", {"checkpoint_path": "a.pth"}, "programs"),
    ],
    ids=str,
)
def test_unknown_models_and_weights_are_refused(backbone, options, word):
    with pytest.raises(InvalidConfig, match=word):
        pretrained(backbone, **options)


@pytest.mark.parametrize("name", ["test_vit", "test_maxvit"])
def test_a_size_that_a_network_does_not_accept_is_refused(name):
    with pytest.raises(InvalidConfig, match="100 x 100"):
        pretrained(f"timm:{name}", (100, 100))


def test_grey_images_are_refused():
    with pytest.raises(InvalidConfig, match=r"preprocessing\.channels"):
        build_encoder(EncoderConfig("btl", "timm:test_resnet"), 1, SIZE)


@pytest.mark.parametrize("backbone", ["timm:test_convnext", "open_clip:tiny-clip"])
def test_weights_of_another_network_are_refused(backbone, tmp_path, tiny_clip):
    _, path = published("test_resnet", tmp_path)
    with pytest.raises(InvalidData, match="weights"):
        pretrained(backbone, checkpoint_path=path)


def test_a_damaged_or_missing_file_of_weights_is_named(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"cut")
    with pytest.raises(InvalidData, match="damaged"):
        pretrained("timm:test_resnet", checkpoint_path=str(tmp_path / "a.safetensors"))
    with pytest.raises(DataUnavailable, match=r"b\.safetensors"):
        pretrained("timm:test_resnet", checkpoint_path=str(tmp_path / "b.safetensors"))


def test_a_folder_without_a_model_is_unavailable(tmp_path):
    for name in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(DataUnavailable, match="transformers:FOLDER"):
            pretrained(f"transformers:{name}", pretrained=True)


def test_pickled_weights_of_transformers_are_not_read(vit_folder):
    model, folder = vit_folder
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(DataUnavailable, match="safetensors"):
        pretrained(f"transformers:{folder}", pretrained=True)


def test_incomplete_weights_of_transformers_are_refused(vit_folder):
    model, folder = vit_folder
    part = {name: values for name, values in model.state_dict().items() if "layernorm" not in name}
    save_file(part, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataUnavailable, match="layernorm"):
        pretrained(f"transformers:{folder}", pretrained=True)
