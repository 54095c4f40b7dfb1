"""Preprocessing of hub models equals the transforms of timm, OpenCLIP and transformers."""

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image

from rcir.encoders import EncoderConfig, model_preprocessing
from rcir.encoders.hub_transforms import (
    Untranslatable,
    require_same_values,
    timm_preprocessing,
)
from rcir.errors import InvalidConfig
from tests.encoders.hub_configurations import (
    PROCESSORS,
    all_image_processors,
    compare,
    open_clip_configurations,
    saved,
    timm_configurations,
    transformers_configurations,
    write_images,
)

LIMIT = 0.02  # standard deviations
# The first of each class with such options.
KINDS = {
    (name, *sorted(options), expected): options for name, options, expected in PROCESSORS[::-1]
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configurations", "count", "reason"),
    [(timm_configurations, 100, "pads"), (open_clip_configurations, 20, "longest")],
    ids=["timm", "open_clip"],
)
def test_every_configuration_is_translated_or_pads(configurations, count, reason, files):
    differences, refused, models = compare(configurations(), files[::2])
    assert max(differences.values()) <= 1e-5  # the same values, but for float rounding
    assert len(differences) > count
    assert all(reason in message for message in refused.values())
    assert models["refused"] < 0.01 * models["translated"]


def test_one_configuration_of_timm_and_open_clip_of_each_kind(files):
    kinds = {}
    for label, count, translate in (*timm_configurations(), *open_clip_configurations()):
        try:
            preprocessing, _ = translate()
        except Untranslatable:
            continue
        square = preprocessing.size[0] == preprocessing.size[1]
        way = preprocessing.interpolation, preprocessing.crop, preprocessing.stretch, square
        kinds.setdefault((label.split()[0], *way[:1], way[1] is None, *way[2:]), []).append(
            (label, count, translate)
        )
    smallest = [min(each, key=lambda one: one[2]()[0].size) for each in kinds.values()]
    differences, refused, _ = compare(smallest, files[-2:])
    assert not refused
    assert len(differences) >= 9
    assert max(differences.values()) <= 1e-5


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_image_processors_of_transformers_are_translated_or_refused(kind, tmp_path):
    processor = getattr(transformers, f"{kind[0]}ImageProcessor")(**KINDS[kind])
    with nullcontext() if kind[-1] else pytest.raises(Untranslatable):
        require_same_values(*saved(processor, tmp_path))


@pytest.mark.slow
def test_no_image_processor_of_transformers_is_translated_wrongly(files, tmp_path):
    listed = transformers_configurations(tmp_path)
    differences, *_ = compare(itertools.chain(listed, all_image_processors()), files)
    assert max(differences.values()) <= LIMIT
    assert len(differences) > 100
    for name, options, expected in PROCESSORS:
        assert (f"transformers {name}ImageProcessor {options}" in differences) == expected


@pytest.mark.parametrize(
    ("size", "crop"), [((224, 160), 0.9), ((97, 224), 1.0), ((31, 31), 0.9)], ids=str
)
def test_positions_of_crops_are_those_of_timm(size, crop):
    settings = {
        **{"input_size": (3, *size), "crop_pct": crop, "crop_mode": "center"},
        **{"interpolation": "bilinear", "mean": (0.0,) * 3, "std": (1.0,) * 3},
    }
    preprocessing, transform = timm_preprocessing(settings)
    rng = np.random.default_rng(0)
    for height, width in rng.integers(20, 400, (20, 2)):
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        torch.testing.assert_close(preprocessing([image])[0], transform(image))


def test_timm_models_of_other_than_colour_images_are_refused():
    settings = timm.data.resolve_data_config(pretrained_cfg={"input_size": (1, 64, 64)})
    with pytest.raises(Untranslatable, match="channels"):
        timm_preprocessing(settings)


def test_a_transform_that_does_something_else_is_refused():
    settings = timm.data.resolve_data_config(pretrained_cfg={"input_size": (3, 64, 64)})
    preprocessing, transform = timm_preprocessing(settings)
    require_same_values(preprocessing, transform)
    others = (
        lambda image: transform(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
        lambda image: transform(image).flip(0),  # BGR
        lambda image: transform(image) + 0.03,
        lambda image: transform(image).roll(1, dims=2),
        lambda image: transform(image) if image.width < 180 else transform(image).flip(1),
        lambda image: transform(image)[:, 1:],
        lambda image: transform(image) * float("nan"),
        lambda image: transform(None),
    )
    for other in others:
        with pytest.raises(Untranslatable):
            require_same_values(preprocessing, other)


def test_a_model_that_is_prepared_otherwise_is_refused_with_the_reason(tmp_path):
    settings = transformers.ViTConfig(image_size=64, hidden_size=16, intermediate_size=16)
    settings.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"shortest_edge": 64}).save_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match="proportions"):
        model_preprocessing(EncoderConfig("pretrained", f"transformers:{tmp_path}"))
    pads = EncoderConfig("pretrained", "timm:deepseek_vit_412m.deepseek_v4_1_flash")
    with pytest.raises(InvalidConfig, match="border"):
        model_preprocessing(pads)
