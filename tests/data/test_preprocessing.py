"""Preprocessing of images to a tensor, against Pillow and torchvision."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from rcir.data import Preprocessing
from rcir.data.images import MAX_PIXELS
from rcir.errors import InvalidConfig, InvalidImage
from tests.operations import WAITING, Operations


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_values_are_scaled_and_normalised_per_channel():
    images = noise(3, 8, 9, 3)
    mean, std = [0.485, 0.456, 0.406], (0.229, 0.224, 0.225)  # lists may be given, too
    tensor = Preprocessing((8, 9), 3, mean, std)(images)
    expected = (images / 255 - np.array(mean)) / np.array(std)
    assert tensor.dtype == torch.float32
    np.testing.assert_allclose(tensor, expected.transpose(0, 3, 1, 2), atol=1e-5)


def test_mean_and_std_are_copied_to_a_device_once():
    preprocessing = Preprocessing((8, 16), 3, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    images = torch.from_numpy(noise(2, 3, 8, 16))
    first = preprocessing.normalise(images)
    with Operations() as operations:
        again = preprocessing.normalise(images)
    assert operations.names
    assert not WAITING & set(operations.names)
    assert torch.equal(again, first)
    assert preprocessing.normalise(images.to("meta")).device.type == "meta"


RGB = Preprocessing((40, 60), 3, (0.0,) * 3, (1.0,) * 3)


def picture(height, width, seed=0):
    """Edges and gradients of all sizes, as a photograph has."""
    coarse = Image.fromarray(noise(height // 25, width // 25, 3, seed=seed))
    fine = noise(height, width, 3, seed=seed + 1).astype(float)
    upscaled = np.asarray(coarse.resize((width, height), Image.Resampling.NEAREST))
    return Image.fromarray((0.9 * upscaled + 0.1 * fine).astype(np.uint8))


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def files(tmp_path):
    """30 files of several formats and sizes."""
    paths = []
    for i in range(30):
        paths.append(tmp_path / f"{i}.{('jpg', 'png', 'webp')[i % 3]}")
        picture(50 + 30 * (i % 5), 75 + 60 * (i % 4), seed=i).save(paths[-1])
    return paths


def test_many_files_keep_their_order_in_any_number_of_threads(files, threads):
    together = RGB.resized([str(path) for path in files])
    assert together.shape == (30, 3, 40, 60)
    for path, tensor in zip(files, together, strict=True):
        assert torch.equal(RGB.resized([path])[0], tensor)
        assert torch.equal(RGB.resized([path, noise(9, 9)])[0], tensor)
    sizes = [noise(9, 9), noise(5, 7, 3)]
    assert torch.equal(RGB.resized(sizes), torch.cat([RGB.resized([each]) for each in sizes]))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_the_first_bad_file_of_many_is_named(files, threads, share):
    for number in (11, 13, 22):
        content = files[number].read_bytes()
        files[number].write_bytes(content[: int(share * len(content))])
    with pytest.raises(InvalidImage, match=str(files[11])):
        RGB.resized(files)
    files[11].unlink()
    with pytest.raises(InvalidImage, match=str(files[11])):
        RGB.resized(files)


def test_read_only_and_reversed_arrays_are_not_written_to():
    for shape in ((2, 8, 16), (2, 12, 20)):
        images = noise(*shape)
        before = images.copy()
        expected = Preprocessing()(before.copy())
        images.flags.writeable = False
        assert torch.equal(Preprocessing()(images), expected)
        assert torch.equal(Preprocessing()([images[0], images[1]]), expected)
        reverse = Preprocessing()(images[:, ::-1, ::-1])
        assert torch.equal(reverse, Preprocessing()(before[:, ::-1, ::-1].copy()))
        writable = before.copy()
        Preprocessing()(writable).fill_(7.0)
        np.testing.assert_array_equal(writable, before)


@pytest.mark.parametrize(
    "images",
    [
        *([], (), np.zeros((0, 8, 16), np.uint8), [noise(8, 16), noise(8, 16, 2)]),
        *(noise(2, 8, 16, 4), np.zeros((2, 8, 16)), [None]),
    ],
)
def test_batches_without_images_or_with_a_bad_one_are_refused(images):
    with pytest.raises(InvalidImage):
        Preprocessing()(images)


@pytest.mark.parametrize(
    "options",
    [
        *({"channels": 2}, {"size": (0, 8)}, {"size": (8,)}, {"mean": (0.0, 0.0)}),
        *({"std": (0.0,)}, {"std": (-1.0,)}, {"channels": 3, "mean": (0.5, 0.5)}),
        *(
            {"interpolation": "lanczos"},
            {"max_pixels": 0},
            {"crop": 0.0},
            {"crop": 1.1},
            {"crop_rounding": "up"},
        ),
    ],
)
def test_invalid_configurations_are_refused(options):
    with pytest.raises(InvalidConfig, match=list(options)[-1]):
        Preprocessing(**options)


def test_a_configuration_is_restored_from_its_dictionary():
    cropped = Preprocessing((8, 16), 3, interpolation="bicubic", crop=0.9)
    stretched = Preprocessing((8, 16), crop=0.9, stretch=True, crop_rounding="down")
    limited = Preprocessing((8, 16), 3, (0.5,), (0.2,), max_pixels=5000)
    for preprocessing in (cropped, stretched, limited, replace(limited, max_pixels=MAX_PIXELS)):
        stored = json.loads(json.dumps(preprocessing.to_dict()))
        assert Preprocessing.from_dict(stored) == preprocessing
        assert Preprocessing.from_dict(stored).max_pixels == preprocessing.max_pixels
    assert limited.identity() == replace(limited, max_pixels=MAX_PIXELS).identity()


# Centre crops


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop", [0.875, 1.0])
@pytest.mark.parametrize(("height", "width"), [(90, 120), (121, 83), (64, 64), (300, 40), (30, 41)])
def test_centre_crops_are_those_of_torchvision(interpolation, crop, height, width, tmp_path):
    rng = np.random.default_rng(height)
    small = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    image.save(tmp_path / "a.png")
    mode = transforms.InterpolationMode(interpolation)
    scaled = transforms.Resize(int(64 / crop), mode)(image)
    expected = np.asarray(transforms.CenterCrop(64)(scaled)).astype(int)
    preprocessing = Preprocessing((64, 64), 3, interpolation=interpolation, crop=crop)
    for source in ([tmp_path / "a.png"], np.asarray(image)[None], [image], [np.asarray(image)]):
        cropped = preprocessing.resized(source)[0].permute(1, 2, 0).numpy().astype(int)
        # Pillow rounds after each of the two directions.
        assert np.abs(cropped - expected).max() <= 3
        assert np.abs(cropped - expected).mean() < 0.1


@pytest.mark.parametrize("margin", range(8))
def test_odd_margins_are_divided_as_torchvision_and_transformers_do(margin):
    image = noise(20 + margin, 20, 3)
    tall = torch.from_numpy(image).permute(2, 0, 1)
    cut = Preprocessing((20, 20), 3, crop=1.0).resized([image])[0]
    assert torch.equal(cut, transforms.functional.center_crop(tall, [20, 20]))
    cut = Preprocessing((20, 20), 3, crop=1.0, crop_rounding="down").resized([image])[0]
    top = (20 + margin - 20) // 2  # as transformers.image_transforms.center_crop has it
    assert torch.equal(cut, tall[:, top : top + 20])


def test_stretching_ignores_proportions():
    image = noise(90, 33, 3)
    scaled = transforms.Resize((40, 50))(Image.fromarray(image))
    expected = np.asarray(transforms.CenterCrop((32, 40))(scaled)).astype(int)
    stretched = Preprocessing((32, 40), 3, crop=0.8, stretch=True).resized([image])[0]
    assert np.abs(stretched.permute(1, 2, 0).numpy() - expected).max() <= 1
