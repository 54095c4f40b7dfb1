"""Models of repositories of the Hugging Face hub, from a cache, and a hub out of reach."""

import json
import socket
from contextlib import ExitStack
from threading import Thread

import open_clip
import pytest
import timm
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import save_file
from torch.nn.functional import normalize

from rcir.encoders import EncoderConfig, build_encoder, hub, model_preprocessing
from rcir.errors import DataUnavailable, InvalidConfig
from tests.encoders.hub_configurations import TINY_CLIP, TINY_TOWER, check_saved, pretrained

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """The cache of the hub, empty, while the hub itself cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def repository(cache, name):
    """The folder of a repository in the cache, as huggingface_hub lays it out."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    return snapshot


def pictures(size):
    return torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))


def loaded(backbone, size, expected, crop, folder):
    """The encoder of a repository, whose vectors, also by the file of its weights, are expected."""
    encoder = pretrained(backbone, size, pretrained=True)
    vectors = encoder.embed(pictures(size)).vectors
    torch.testing.assert_close(vectors, expected)
    preprocessing = model_preprocessing(encoder.config)
    assert (preprocessing.mean, preprocessing.crop) == ((0.1, 0.2, 0.3), crop)
    (weights,) = folder.glob("*.safetensors")
    by_file = pretrained(backbone, size, checkpoint_path=str(weights))
    assert torch.equal(by_file.embed(pictures(size)).vectors, vectors)
    return encoder


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_repositories_of_timm_are_loaded_by_timm(name, hub_cache, tmp_path):
    folder = repository(hub_cache, "someone/birds")
    model = timm.create_model(name, num_classes=5).eval()
    data = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7), "crop_pct": 0.8}
    config = {"pretrained_cfg": data}
    timm.models.save_for_hf(model, folder, config, safe_serialization=True)
    with torch.inference_mode():
        features = model.forward_features(pictures((160, 160)))
        pooled = model.forward_head(features, pre_logits=True)
    encoder = loaded("timm:hf-hub:someone/birds", (160, 160), normalize(pooled), 0.8, folder)
    check_saved(encoder, (160, 160), [hub_cache], tmp_path)


def test_repositories_of_open_clip_are_loaded_by_open_clip(hub_cache, tmp_path):
    (tmp_path / "tiny-clip.json").write_text(json.dumps(TINY_CLIP))
    open_clip.add_model_config(tmp_path / "tiny-clip.json")
    clip = open_clip.create_model("tiny-clip").eval()
    folder = repository(hub_cache, "someone/clip")
    save_file(clip.state_dict(), folder / "open_clip_model.safetensors")
    data = {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7], "resize_mode": "squash"}
    settings = json.dumps({"model_cfg": TINY_CLIP, "preprocess_cfg": data})
    (folder / "open_clip_config.json").write_text(settings)
    with torch.inference_mode():
        expected = clip.encode_image(pictures((64, 64)), normalize=True)
    encoder = loaded("open_clip:hf-hub:someone/clip", (64, 64), expected, None, folder)
    check_saved(encoder, (64, 64), [hub_cache], tmp_path)


@pytest.fixture
def unreachable(tmp_path, monkeypatch):
    """A hub that closes every connection; returns the list of connections so far."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_failures", {})
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

        def close_all():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connections.append(connection)
                connection.close()

        Thread(target=close_all, daemon=True).start()
        yield connections
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("backbone", "remedy"),
    [
        ("timm:test_resnet", "--checkpoint, encoder.checkpoint_path"),
        ("open_clip:RN50/openai", "--checkpoint"),
        ("transformers:someone/nothing", "transformers:FOLDER"),
        ("timm:hf-hub:a/b", "connect"),
        ("open_clip:hf-hub:a/b", "connect"),
    ],
)
def test_a_hub_out_of_reach_is_tried_once(backbone, remedy, unreachable):
    with pytest.raises(DataUnavailable, match=remedy):
        pretrained(backbone, (160, 160), pretrained=True)
    assert len(unreachable) == 1
    assert constants.HF_HUB_OFFLINE is False


def test_a_hub_out_of_reach_is_tried_again_only_later(unreachable, monkeypatch):
    for ask in (model_preprocessing, lambda config: build_encoder(config, 3, (160, 160))):
        with pytest.raises(DataUnavailable):
            ask(EncoderConfig("pretrained", "timm:hf-hub:a/b", "avg", pretrained=True))
    assert len(unreachable) == 1
    monkeypatch.setattr(hub, "RETRY_AFTER_S", 0)
    with pytest.raises(DataUnavailable):
        pretrained("timm:hf-hub:a/b", (160, 160), pretrained=True)
    assert len(unreachable) == 2


def test_the_client_is_offline_until_the_last_thread_is_done(unreachable):
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(hub.one_attempt())
        second.enter_context(hub.one_attempt())
        first.close()
        assert constants.HF_HUB_OFFLINE is True
        second.close()
        assert constants.HF_HUB_OFFLINE is False
    assert len(unreachable) == 1


# The projection of CLIP


@pytest.fixture
def clip_folder(tmp_path):
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    settings = transformers.CLIPConfig(
        vision_config=TINY_TOWER | {"projection_dim": 8}, text_config=text, projection_dim=8
    )
    model = transformers.CLIPModel(settings).eval()
    model.save_pretrained(tmp_path / "clip")
    processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": 80}, crop_size={"height": 64, "width": 64}
    )
    processor.save_pretrained(tmp_path / "clip")
    return model, tmp_path / "clip"


def test_clip_of_transformers_gives_the_pooled_or_the_projected_vector(clip_folder, tmp_path):
    model, folder = clip_folder
    backbone = f"transformers:{folder}"
    images = pictures((64, 64))
    with torch.inference_mode():
        pooled = model.vision_model(pixel_values=images).pooler_output
        projected = model.visual_projection(pooled)
    plain = pretrained(backbone, (64, 64), pretrained=True)
    torch.testing.assert_close(plain.embed(images).vectors, normalize(pooled))
    assert not any("text" in name for name in plain.state_dict())
    prepared = model_preprocessing(plain.config)
    assert (prepared.size, prepared.crop, prepared.interpolation) == ((64, 64), 0.8, "bicubic")
    encoder = pretrained(backbone, (64, 64), pretrained=True, projected=True)
    torch.testing.assert_close(encoder.embed(images).vectors, normalize(projected))
    assert encoder.config.dim == 8
    assert encoder.fingerprint() != plain.fingerprint()
    check_saved(encoder, (64, 64), [folder], tmp_path)


def test_models_without_a_projection_are_refused(tmp_path):
    settings = transformers.SiglipVisionConfig(**TINY_TOWER)
    transformers.SiglipVisionModel(settings).save_pretrained(tmp_path / "siglip")
    for backbone in (f"transformers:{tmp_path / 'siglip'}", "timm:test_resnet", "mnist-cnn"):
        with pytest.raises(InvalidConfig, match="projected"):
            pretrained(backbone, (64, 64), projected=True)
