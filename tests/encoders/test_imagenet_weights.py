"""Published weights: features are those of timm, and find what is alike."""

import tarfile

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn.functional import normalize

from rcir.data.datasets.cub import read
from rcir.encoders import model_preprocessing
from rcir.encoders.batches import embed
from tests.encoders.models import pretrained


@pytest.fixture(scope="module")
def lite(data_root):
    path = data_root / "models" / "tf_efficientnet_lite0.safetensors"
    if not path.is_file():
        pytest.skip("there are no weights of tf_efficientnet_lite0")
    return path


@pytest.fixture(scope="module")
def birds(data_root, tmp_path_factory):
    """CUB, unpacked; pictures and labels of its kinds 26 to 50."""
    archive = data_root / "cub200-50" / "CUB_200_2011.tar"
    if not archive.is_file():
        pytest.skip("there is no CUB")
    folder = tmp_path_factory.mktemp("cub")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return read(folder).queries


@pytest.fixture
def oracle(lite):
    """timm itself: model and transforms."""
    model = timm.create_model("tf_efficientnet_lite0", num_classes=1000)
    model.load_state_dict(load_file(lite))
    settings = timm.data.resolve_model_data_config(model)
    return model.eval(), timm.data.create_transform(**settings)


@pytest.mark.data
def test_imagenet_features_are_bit_for_bit_those_of_timm(lite, birds, oracle):
    model, transform = oracle
    backbone = "timm:tf_efficientnet_lite0"
    encoder = pretrained(backbone, (224, 224), checkpoint_path=str(lite))
    opened = [Image.open(path).convert("RGB") for path in birds.images[:8]]
    images = torch.stack([transform(image) for image in opened])
    with torch.inference_mode():
        features = model.forward_features(images)
        assert torch.equal(encoder.backbone(images), features)
    assert features.shape == (8, 1280, 7, 7)
    # From files, rcir decodes and resizes by itself, up to the rounding of pixels.
    own = encoder.embed(model_preprocessing(encoder.config)(birds.images[:8])).vectors
    cosines = (own * normalize(features.mean((2, 3)))).sum(1)
    assert cosines.min() > 0.999


@pytest.mark.data
@pytest.mark.slow
def test_imagenet_features_find_birds_of_the_same_kind(lite, birds):
    """Measured elsewhere with the same weights: .72."""
    encoder = pretrained(
        "timm:tf_efficientnet_lite0", (224, 224), checkpoint_path=str(lite), pretrained=False
    )
    vectors = embed(encoder, model_preprocessing(encoder.config), birds.images).vectors.numpy()
    recalls = []
    for seed in range(15):
        order = np.random.default_rng(seed).permutation(len(birds))
        gallery, asked = np.array_split(order, 2)
        nearest = gallery[(vectors[asked] @ vectors[gallery].T).argmax(1)]
        recalls.append((birds.labels[nearest] == birds.labels[asked]).mean())
    assert len(birds) == 1487
    assert 0.68 < np.mean(recalls) < 0.75
