"""Preprocessing that keeps proportions and cuts out the centre."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from PIL import Image, ImageOps
from torchvision import transforms

from rcir.data import Preprocessing
from rcir.errors import InvalidConfig


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop", [0.875, 0.95, 1.0])
@pytest.mark.parametrize(("height", "width"), [(90, 120), (121, 83), (64, 64), (300, 40), (30, 41)])
def test_a_centre_is_cut_out_as_torchvision_does(interpolation, crop, height, width, tmp_path):
    rng = np.random.default_rng(height)
    small = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    image.save(tmp_path / "a.png")
    mode = transforms.InterpolationMode(interpolation)
    scaled = transforms.Resize(int(64 / crop), mode)(image)
    expected = np.asarray(transforms.CenterCrop(64)(scaled)).astype(int)
    preprocessing = Preprocessing((64, 64), 3, interpolation=interpolation, crop=crop)
    for source in ([tmp_path / "a.png"], np.asarray(image)[None], [image], [np.asarray(image)]):
        own = preprocessing.resized(source)[0].permute(1, 2, 0).numpy().astype(int)
        # Pillow rounds after each of the two directions.
        assert np.abs(own - expected).max() <= 3
        assert np.abs(own - expected).mean() < 0.1


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_centre_of_a_jpeg_is_that_of_the_upright_picture(orientation, tmp_path):
    ramp = np.linspace(0, 255, 400)[None, :, None] * np.ones((200, 1, 3))
    image = Image.fromarray(ramp.astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a.jpg", quality=95, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(tmp_path / "a.jpg"))
    size = (48, 96) if upright.width > upright.height else (64, 32)  # each covers 48 x 32
    expected = np.asarray(transforms.CenterCrop((24, 16))(transforms.Resize(size)(upright)))
    preprocessing = Preprocessing((24, 16), 3, crop=0.5)
    own = preprocessing.resized([tmp_path / "a.jpg"])[0].permute(1, 2, 0).numpy()
    assert np.abs(own.astype(int) - expected.astype(int)).max() <= 4


def test_stored_values_of_earlier_versions_have_neither_interpolation_nor_crop():
    stored = {"size": [8, 16], "channels": 3, "mean": [0.5], "std": [0.2]}
    usual = Preprocessing((8, 16), 3, (0.5,), (0.2,))
    assert Preprocessing.from_dict(stored) == usual
    assert json.loads(json.dumps(usual.to_dict())) == stored
    given = Preprocessing((8, 16), 3, interpolation="bicubic", crop=0.9)
    for values in (asdict(given), given.to_dict()):
        assert Preprocessing.from_dict(json.loads(json.dumps(values))) == given


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"interpolation": "nearest"}, r"preprocessing\.interpolation 'nearest'.*bicubic"),
        ({"crop": 0.0}, r"preprocessing\.crop is 0\.0"),
        ({"crop": 1.1}, r"preprocessing\.crop is 1\.1"),
    ],
)
def test_no_such_interpolation_or_crop(options, named):
    with pytest.raises(InvalidConfig, match=named):
        Preprocessing(**options)
