import numpy as np
import pytest
import torch
from PIL import Image

from rcir.data import Preprocessing
from rcir.errors import InvalidConfig, InvalidImage


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_values_are_scaled_and_normalised_per_channel():
    images = noise(3, 8, 9, 3)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    tensor = Preprocessing((8, 9), 3, mean, std)(images)
    expected = (images / 255 - np.array(mean)) / np.array(std)
    assert tensor.dtype == torch.float32
    np.testing.assert_allclose(tensor, expected.transpose(0, 3, 1, 2), atol=1e-5)


@pytest.mark.parametrize("size", [(8, 16), (20, 11), (64, 64)])
@pytest.mark.parametrize("channels", [1, 3])
def test_resizing_is_pillow_s_antialiased_bilinear(size, channels):
    image = noise(31, 45) if channels == 1 else noise(31, 45, 3)
    preprocessing = Preprocessing(size, channels, (0.0,) * channels, (1.0,) * channels)
    expected = np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR))
    resized = preprocessing.resized([image])[0].permute(1, 2, 0).numpy().astype(int)
    assert np.abs(resized - expected.reshape(resized.shape)).max() <= 1


def test_an_image_becomes_the_same_tensor_however_it_is_given(tmp_path):
    image = noise(12, 20)
    Image.fromarray(image).save(tmp_path / "a.png")
    preprocessing = Preprocessing((8, 16))
    forms = [image, image[:, :, None], Image.fromarray(image), tmp_path / "a.png"]
    one_by_one = [preprocessing([form]) for form in (*forms, np.stack([image] * 3, 2))]
    together = preprocessing(forms)
    batch = preprocessing(np.stack([image, image]))
    for tensor in (*one_by_one, together[:1], together[3:], batch[1:]):
        assert torch.equal(tensor, one_by_one[0])


def test_images_of_different_sizes_are_resized_one_by_one(tmp_path):
    sizes = [(12, 20), (8, 16), (5, 5)]
    for i, (height, width) in enumerate(sizes):
        Image.fromarray(noise(height, width, seed=i)).save(tmp_path / f"{i}.png")
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    preprocessing = Preprocessing((8, 16))
    together = preprocessing(paths)
    assert together.shape == (3, 1, 8, 16)
    for path, tensor in zip(paths, together, strict=True):
        assert torch.equal(preprocessing([path])[0], tensor)


@pytest.mark.parametrize("shape", [(2, 8, 16), (2, 12, 20)])
def test_images_that_may_not_be_written_are_read(shape):
    images = noise(*shape)
    expected = Preprocessing()(images.copy())
    images.flags.writeable = False
    assert torch.equal(Preprocessing()(images), expected)
    assert torch.equal(Preprocessing()([images[0], images[1]]), expected)
    assert torch.equal(Preprocessing()(images[:, ::-1, ::-1]), expected_of(images[:, ::-1, ::-1]))


def expected_of(images):
    return torch.cat([Preprocessing()([np.array(image)]) for image in images])


def test_a_changed_tensor_leaves_the_images_alone():
    images = noise(2, 8, 16)
    before = images.copy()
    Preprocessing()(images).fill_(7.0)
    np.testing.assert_array_equal(images, before)


@pytest.mark.parametrize("nothing", [[], (), np.zeros((0, 8, 16), np.uint8)])
def test_no_images_are_refused(nothing):
    with pytest.raises(InvalidImage, match="give at least one"):
        Preprocessing()(nothing)


@pytest.mark.parametrize(
    "wrong", [[noise(8, 16), noise(8, 16, 2)], noise(2, 8, 16, 4), np.zeros((2, 8, 16)), [None]]
)
def test_one_bad_image_refuses_the_batch(wrong):
    with pytest.raises(InvalidImage, match="give"):
        Preprocessing()(wrong)


@pytest.mark.parametrize(
    "options",
    [
        {"channels": 2},
        {"size": (0, 8)},
        {"size": (8,)},
        {"mean": (0.0, 0.0)},
        {"std": (0.0,)},
        {"std": (-1.0,)},
        {"channels": 3},
    ],
    ids=str,
)
def test_configurations_that_make_no_sense_are_refused(options):
    with pytest.raises(InvalidConfig, match=r"preprocessing\."):
        Preprocessing(**options)
