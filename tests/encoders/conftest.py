"""Small models as the libraries of hubs know them."""

import json

import open_clip
import pytest
import transformers

from tests.encoders.models import TINY_VIT


@pytest.fixture
def vit_folder(tmp_path):
    """A vision transformer as a folder, as the hub has them."""
    model = transformers.ViTModel(transformers.ViTConfig(**TINY_VIT), add_pooling_layer=False)
    folder = tmp_path / "vit"
    model.save_pretrained(folder)
    processor = transformers.ViTImageProcessor(size={"height": 64, "width": 64})
    processor.save_pretrained(folder)
    return model.eval(), folder


@pytest.fixture
def tiny_clip(tmp_path):
    """The name of a small CLIP model that OpenCLIP knows."""
    settings = {
        "embed_dim": 12,
        "vision_cfg": {"image_size": 64, "layers": 2, "width": 64, "patch_size": 32},
        "text_cfg": {"context_length": 8, "vocab_size": 50, "width": 64, "heads": 1, "layers": 1},
    }
    (tmp_path / "tiny-clip.json").write_text(json.dumps(settings))
    open_clip.add_model_config(tmp_path / "tiny-clip.json")
    return "tiny-clip"
