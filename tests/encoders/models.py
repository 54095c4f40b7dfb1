"""Small models of hubs, with random weights."""

import timm
import torch
from safetensors.torch import save_file

from rcir.encoders import EncoderConfig, build_encoder

SIZE = (64, 64)
TINY_VIT = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 32, "image_size": 64, "patch_size": 16},
}


def pictures(n=3, size=SIZE):
    return torch.rand(n, 3, *size, generator=torch.Generator().manual_seed(1))


def pretrained(backbone, size=SIZE, **options):
    return build_encoder(EncoderConfig("pretrained", backbone, "avg", **options), 3, size).eval()


def published(name, folder, **options):
    """A timm model and the file of its weights."""
    model = timm.create_model(name, **options).eval()
    path = folder / f"{name}.safetensors"
    save_file(model.state_dict(), path)
    return model, str(path)
