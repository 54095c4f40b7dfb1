"""Backbones of model hubs: their features are those of the libraries themselves."""

import numpy as np
import open_clip
import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from torch.nn.functional import normalize

from rcir.data import DataConfig, Preprocessing, load_splits
from rcir.encoders import EncoderConfig, build_encoder, model_preprocessing
from rcir.errors import InvalidConfig
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import load, save
from tests.encoders.models import SIZE, TINY_VIT, pictures, pretrained, published
from tests.methods import TRAINED


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_vit"])
def test_timm_features_are_those_of_timm(name, tmp_path):
    model, path = published(name, tmp_path)
    size = (160, 160)
    encoder = pretrained(f"timm:{name}", size, checkpoint_path=path)
    with torch.inference_mode():
        features = model.forward_features(pictures(size=size))
        pooled = model.forward_head(features, pre_logits=True)
        own = encoder.backbone(pictures(size=size))
    if name == "test_vit":
        assert torch.equal(own[:, :, 0, 0], pooled)
    else:
        assert torch.equal(own, features)
        pooled = features.mean((2, 3))
    vectors = encoder.embed(pictures(size=size)).vectors
    torch.testing.assert_close(vectors, normalize(pooled))
    assert encoder.config.dim == vectors.shape[1] == model.num_features


@pytest.mark.parametrize("size", [(160, 160), (96, 128)])
def test_a_transformer_takes_other_sizes_than_it_was_made_for(size, tmp_path):
    _, path = published("test_vit", tmp_path)
    encoder = pretrained("timm:test_vit", size, checkpoint_path=path)
    vectors = encoder.embed(pictures(size=size)).vectors
    other = timm.create_model(
        "test_vit",
        img_size=size,
        pretrained=True,
        pretrained_cfg_overlay={"file": path},
    ).eval()
    with torch.inference_mode():
        pooled = other.forward_head(other.forward_features(pictures(size=size)), pre_logits=True)
    torch.testing.assert_close(vectors, normalize(pooled))


@pytest.mark.parametrize("method", TRAINED)
def test_negative_features_reach_the_heads(method):
    config = EncoderConfig(method, "timm:test_convnext", "avg", dim=4)
    encoder = build_encoder(config, 3, SIZE).eval()
    seen = []
    for module in encoder.modules():
        if isinstance(module, torch.nn.Linear) and module.out_features == 4:
            module.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    with torch.no_grad():
        encoder(pictures())
    assert min(features.min() for features in seen) < -0.01


@pytest.mark.parametrize("name", ["test_convnext", "test_vit", "test_efficientnet"])
def test_gem_is_refused_where_features_can_be_negative(name):
    with pytest.raises(InvalidConfig, match=r"set encoder\.pooling=avg"):
        build_encoder(EncoderConfig("btl", f"timm:{name}", "gem"), 3, (160, 160))


def test_gem_pools_the_maps_of_a_network_that_ends_in_a_relu():
    encoder = build_encoder(EncoderConfig("deterministic", "timm:test_resnet", "gem"), 3, SIZE)
    with torch.no_grad():
        maps = encoder.eval().backbone(pictures())
        cubes = maps.clamp(min=1e-6).double().pow(3).mean((2, 3)).pow(1 / 3)
        torch.testing.assert_close(encoder.mean_head[0](maps).double(), cubes)


def test_what_no_feature_depends_on_does_not_wait_for_gradients():
    encoder = build_encoder(
        EncoderConfig("deterministic", "timm:mobilenetv3_small_050", "avg"), 3, SIZE
    )
    names = {name for name, weights in encoder.named_parameters() if not weights.requires_grad}
    assert names == {"backbone.model.conv_head.weight", "backbone.model.conv_head.bias"}


def test_timm_preprocessing_is_its_own():
    config = EncoderConfig("pretrained", "timm:tf_efficientnet_lite0")
    half = (0.5, 0.5, 0.5)
    expected = Preprocessing((224, 224), 3, half, half, "bicubic", 0.875)
    assert model_preprocessing(config) == expected
    squashed = model_preprocessing(EncoderConfig("pretrained", "timm:coat_lite_medium_384"))
    assert (squashed.size, squashed.crop) == ((384, 384), None)


def test_transformers_features_are_those_of_transformers(vit_folder):
    model, folder = vit_folder
    encoder = pretrained(f"transformers:{folder}", pretrained=True)
    with torch.inference_mode():
        token = model(pixel_values=pictures()).last_hidden_state[:, 0]
    torch.testing.assert_close(encoder.embed(pictures()).vectors, normalize(token))
    found = model_preprocessing(encoder.config)
    assert found == Preprocessing((64, 64), 3, (0.5,) * 3, (0.5,) * 3)
    other = pretrained(f"transformers:{folder}", (32, 96), pretrained=True)
    with torch.inference_mode():
        options = {"interpolate_pos_encoding": True}
        token = model(pixel_values=pictures(size=(32, 96)), **options).last_hidden_state[:, 0]
    torch.testing.assert_close(other.embed(pictures(size=(32, 96))).vectors, normalize(token))


def test_the_image_tower_of_a_model_of_pictures_and_texts_is_taken(tmp_path):
    vision = {**TINY_VIT, "projection_dim": 8}
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    settings = transformers.CLIPConfig(vision_config=vision, text_config=text)
    model = transformers.CLIPModel(settings).eval()
    model.save_pretrained(tmp_path / "clip")
    processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": 80}, crop_size={"height": 64, "width": 64}
    )
    processor.save_pretrained(tmp_path / "clip")
    encoder = pretrained(f"transformers:{tmp_path / 'clip'}", pretrained=True)
    with torch.inference_mode():
        pooled = model.vision_model(pixel_values=pictures()).pooler_output
    torch.testing.assert_close(encoder.embed(pictures()).vectors, normalize(pooled))
    assert not any("text" in name for name in encoder.state_dict())
    found = model_preprocessing(encoder.config)
    assert (found.size, found.crop, found.interpolation) == ((64, 64), 0.8, "bicubic")


def test_maps_of_transformers_are_pooled_by_the_model(tmp_path):
    settings = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    model = transformers.ResNetModel(settings).eval()
    model.save_pretrained(tmp_path / "resnet")
    encoder = pretrained(f"transformers:{tmp_path / 'resnet'}", pretrained=True)
    with torch.inference_mode():
        pooled = model(pixel_values=pictures()).last_hidden_state.mean((2, 3))
    torch.testing.assert_close(encoder.embed(pictures()).vectors, normalize(pooled))


def test_open_clip_features_are_those_of_its_image_tower(tiny_clip, tmp_path):
    clip = open_clip.create_model(tiny_clip, pretrained=None).eval()
    path = tmp_path / "clip.safetensors"
    save_file(clip.state_dict(), path)
    encoder = pretrained(f"open_clip:{tiny_clip}", checkpoint_path=str(path))
    with torch.inference_mode():
        embedded = clip.encode_image(pictures(), normalize=True)
    torch.testing.assert_close(encoder.embed(pictures()).vectors, embedded)
    assert not any("token_embedding" in name for name in encoder.state_dict())


def test_open_clip_preprocessing_is_that_of_the_weights(tiny_clip):
    found = model_preprocessing(EncoderConfig("pretrained", f"open_clip:{tiny_clip}"))
    expected = open_clip.transform.PreprocessCfg()
    assert (found.mean, found.std) == (expected.mean, expected.std)
    assert (found.size, found.interpolation, found.crop) == ((64, 64), "bicubic", 1.0)
    siglip = model_preprocessing(EncoderConfig("pretrained", "open_clip:ViT-B-16-SigLIP/webli"))
    assert (siglip.mean, siglip.size, siglip.crop) == ((0.5,) * 3, (224, 224), None)


@pytest.mark.parametrize("hub", ["timm", "open_clip", "transformers"])
def test_a_retriever_needs_neither_file_nor_hub(hub, tiny_clip, vit_folder, tmp_path, caplog):
    (path := tmp_path / "weights").mkdir()
    if hub == "timm":
        options = {"checkpoint_path": published("test_resnet", path)[1]}
        backbone = "timm:test_resnet"
    elif hub == "open_clip":
        save_file(open_clip.create_model(tiny_clip).state_dict(), path / "clip.safetensors")
        options = {"checkpoint_path": str(path / "clip.safetensors")}
        backbone = f"open_clip:{tiny_clip}"
    else:
        options, backbone = {"pretrained": True}, f"transformers:{vit_folder[1]}"
    encoder = pretrained(backbone, **options)
    gallery = load_splits(DataConfig("digits")).gallery.subset(np.arange(30))
    preprocessing = Preprocessing(SIZE, 3)
    retriever = Retriever.build(encoder, preprocessing, gallery, depth=5)
    folder = save(retriever, tmp_path / "retriever")
    for file in (*path.iterdir(), *vit_folder[1].iterdir()):
        file.unlink()
    caplog.clear()
    again = load(folder)
    assert again.encoder.fingerprint() == encoder.fingerprint()
    assert not caplog.records
    queries = gallery.images[:3]
    assert torch.equal(again.embed(queries).vectors, retriever.embed(queries).vectors)
    assert again.search(queries).positions[:, 0].tolist() == [0, 1, 2]
