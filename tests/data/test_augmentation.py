"""Random changes of training images, against torchvision, Pillow and their distributions."""

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import maximum_filter
from scipy.stats import kstest
from sklearn.datasets import load_sample_images
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as reference

from rcir.data import Augmentation, TransformParameters
from rcir.data.augmentation import draw_warps, warp
from rcir.errors import InvalidConfig

RECIPE = {"flip": True, "rotation": 10.0, "crop": 0.4, "jitter": (0.2, 0.2, 0.2, 0.1)}
FURTHER = {"grey": 0.5, "blur": 2.0, "erase": 0.8}
EVERYTHING = Augmentation(occlusion=0.7, **RECIPE, **FURTHER)


def rng(seed=0):
    return np.random.default_rng(seed)


def noise(*shape, seed=0):
    return torch.from_numpy(rng(seed).integers(0, 256, shape, dtype=np.uint8))


@pytest.fixture(scope="module")
def pictures():
    """Two photographs, (2, 3, 96, 144)."""
    photographs = np.stack([image[::4, ::4] for image in load_sample_images().images])
    return torch.from_numpy(photographs[:, :96, :144].copy()).permute(0, 3, 1, 2)


def decomposed(matrix, size):
    """Angle in radians, scale and centre (x, y) of the crop, whether mirrored, of a warp."""
    half = np.array([size[1], size[0]]) / 2
    linear = half[:, None] * matrix[:, :2].astype(float) / half
    scale = np.linalg.norm(linear, axis=0)
    angle = np.arctan2(-linear[0, 1], linear[1, 1])
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    mirrored = np.linalg.det(linear) < 0
    np.testing.assert_allclose(
        rotation * scale * [-1 if mirrored else 1, 1], linear, atol=1e-6, err_msg="sheared"
    )
    return angle, scale, rotation.T @ (half * matrix[:, 2]) / half, mirrored


def test_without_changes_nothing_is_drawn_and_the_images_are_returned():
    generator, images = rng(), noise(4, 3, 8, 8)
    changes = Augmentation().draw(4, (8, 8), generator)
    assert changes(images) is images
    assert changes[1:3](images) is images
    assert generator.bit_generator.state == rng().bit_generator.state


def test_images_are_not_written_to():
    images = noise(5, 3, 16, 16)
    before = images.clone()
    for option in (
        {"occlusion": 1.0},
        {"flip": True},
        {"rotation": 9},
        {"jitter": (1, 1, 1, 0.5)},
        {"grey": 1.0},
        {"blur": 1.0},
        {"erase": 1.0},
    ):
        changed = Augmentation(**option).draw(5, (16, 16), rng())(images)
        assert changed.dtype == torch.uint8
        assert not torch.equal(changed, before)
        assert torch.equal(images, before)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        *[("occlusion", (-0.1, 1.1, np.nan)), ("rotation", (-1, 181, np.nan))],
        *[("crop", (0, 1.2, np.nan)), ("grey", (-0.1, 1.1)), ("blur", (-1, np.inf, np.nan))],
        ("erase", (-0.1, 1.1, np.nan)),
        ("jitter", ((0.2,), (1.1, 0, 0, 0), (0, 0, 0, 0.6), (0, -0.1, 0, 0))),
    ],
)
def test_values_out_of_range_are_refused_by_name(option, values):
    for value in values:
        with pytest.raises(InvalidConfig, match=option):
            Augmentation(**{option: value})


# Independence of batches and threads


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("option", [None, "occlusion", "flip", "rotation", "jitter", *FURTHER])
def test_changes_do_not_depend_on_batches_or_threads(channels, option):
    value = {"occlusion": 0.7, **RECIPE, **FURTHER}
    augmentation = EVERYTHING if option is None else Augmentation(**{option: value[option]})
    images = noise(23, channels, 37, 74)  # not a multiple of the width of vector units
    changes = augmentation.draw(23, (37, 74), rng())
    whole = changes(images)
    order = rng(1).permutation(23)
    for rows in (slice(0, 11), slice(1, 23, 2), slice(5, 6), slice(3, 3), order, order[:1]):
        assert torch.equal(changes[rows](images[rows]), whole[rows])
        assert torch.equal(changes[rows][2:5](images[rows][2:5]), whole[rows][2:5])
    torch.set_num_threads(2)
    try:
        assert torch.equal(changes(images), whole)
    finally:
        torch.set_num_threads(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_changes_do_not_wait_for_a_gpu():
    images, changes = noise(4, 3, 20, 40).cuda(), EVERYTHING.draw(4, (20, 40), rng())
    changes(images)  # the first time, libraries are loaded
    try:
        torch.cuda.set_sync_debug_mode("error")
        changes(images)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_changes_images_like_the_cpu(pictures):
    changes = EVERYTHING.draw(2, (96, 144), rng())
    squares = np.array([[[5, 9, 30]], [[0, 0, 0]]])
    images = pictures[..., :96]
    changes = TransformParameters(**{**vars(changes), "squares": squares})
    there = changes(images.cuda())
    assert there.is_cuda
    assert (there.cpu().int() - changes(images).int()).abs().max() <= 1


# Warps


def test_flips_mirror_half_of_the_images_exactly():
    images = noise(2000, 1, 3, 4)
    changed = Augmentation(flip=True).draw(2000, (3, 4), rng())(images)
    mirrored = (changed == images.flip(-1)).all((1, 2, 3))
    assert ((changed == images).all((1, 2, 3)) | mirrored).all()
    assert abs(mirrored.float().mean() - 0.5) < 4 * 0.5 / np.sqrt(2000)


@pytest.mark.parametrize("option", [{"rotation": 30}, {"rotation": 180}])
def test_rotations_are_those_of_torchvision(pictures, option):
    size = pictures.shape[-2:]
    changes = Augmentation(**option).draw(2, size, rng())
    for image, matrix, changed in zip(pictures, changes.warps, changes(pictures), strict=True):
        angle, scale, centre, _ = decomposed(matrix, size)
        np.testing.assert_allclose([*scale, *centre], [1, 1, 0, 0], atol=1e-6)
        expected = reference.rotate(image, float(np.degrees(angle)), InterpolationMode.BILINEAR)
        difference = (changed.int() - expected.int()).abs()
        assert (difference <= 1).float().mean() > 0.999  # floating point at the black corners


def test_a_crop_is_torchvisions_resized_crop(pictures):
    top, left, height, width = 12, 30, 64, 90
    matrix = [
        [width / 144, 0, (2 * left + width) / 144 - 1],
        [0, height / 96, (2 * top + height) / 96 - 1],
    ]
    changed = warp(pictures.float(), torch.tensor([matrix, matrix]))
    expected = reference.resized_crop(pictures.float(), top, left, height, width, [96, 144])
    # The sampled places at the crop's border lie half a pixel outside, where torchvision repeats.
    inner = (..., slice(2, -2), slice(2, -2))
    torch.testing.assert_close(changed[inner], expected[inner], atol=0.05, rtol=0)


def test_all_in_one_warp_is_rotation_then_crop_then_mirroring():
    y, x = np.mgrid[:90, :120]
    image = (128 + 60 * np.sin(x / 17) + 60 * np.cos(y / 13 + x / 40)).astype(np.float32)
    matrices = Augmentation(**{**RECIPE, "jitter": (0, 0, 0, 0)}).draw(12, (90, 120), rng()).warps
    changed = warp(torch.from_numpy(image).expand(12, 1, -1, -1), torch.from_numpy(matrices))
    seen = set()
    for matrix, result in zip(matrices, changed[:, 0].numpy(), strict=True):
        angle, scale, centre, mirrored = decomposed(matrix, (90, 120))
        rotated = reference.rotate(
            torch.from_numpy(image)[None], np.degrees(angle), InterpolationMode.BILINEAR
        )[0]
        low, high = ((centre + 1) / 2 + sign * scale / 2 for sign in (-1, 1))
        box = (*(low * [120, 90]), *(high * [120, 90]))
        expected = np.asarray(
            Image.fromarray(rotated.numpy()).transform(
                (120, 90), Image.Transform.EXTENT, box, Image.Resampling.BILINEAR
            )
        )
        expected = expected[:, ::-1] if mirrored else expected
        # Not where black of outside is mixed in: once here, twice there.
        black = maximum_filter(np.minimum(expected, result) < 1, 9)
        inner = ~black & (np.pad(np.zeros((84, 114)), 3, constant_values=1) == 0)
        assert inner.mean() > 0.5
        assert np.abs(result - expected)[inner].max() < 1
        seen.add(bool(mirrored))
    assert seen == {True, False}


def test_warps_are_drawn_from_the_documented_distributions():
    n, size = 4000, (90, 120)
    matrices = draw_warps(n, size, 10.0, 0.4, np.arange(n) % 2 == 0, rng())
    parts = [decomposed(matrix, size) for matrix in matrices]
    angle, scale, centre, mirrored = (np.array(part) for part in zip(*parts, strict=True))
    np.testing.assert_array_equal(mirrored, np.arange(n) % 2 == 0)
    assert kstest(np.degrees(angle), "uniform", (-10, 20)).pvalue > 1e-3
    area, ratio = scale.prod(1), scale[:, 0] / scale[:, 1]
    assert kstest(area, "uniform", (0.4, 0.6)).pvalue > 1e-3
    # A crop never leaves the image: the larger it is, the fewer ratios fit.
    assert scale.max() <= 1 + 1e-6
    assert (np.abs(centre) <= 1 - scale + 1e-6).all()
    limit = np.minimum(np.log(4 / 3), -np.log(area) + 1e-6)
    assert kstest(np.log(ratio) / limit, "uniform", (-1, 2)).pvalue > 1e-3
    assert np.exp(np.abs(np.log(ratio))).max() == pytest.approx(4 / 3, abs=0.01)
    room = scale < 0.99
    place = (centre / np.maximum(1 - scale, 1e-9))[room]
    assert kstest(place, "uniform", (-1, 2)).pvalue > 1e-3


# Colours

ADJUST = {
    "brightness": (reference.adjust_brightness, (0.0, 0.4, 0.9, 1.0, 1.3, 2.0)),
    "contrast": (reference.adjust_contrast, (0.0, 0.4, 0.9, 1.0, 1.3, 2.0)),
    "saturation": (reference.adjust_saturation, (0.0, 0.4, 0.9, 1.0, 1.3, 2.0)),
    "hue": (reference.adjust_hue, (-0.5, -0.23, -0.1, 0.0, 0.1, 0.37, 0.5)),
}


def corners():
    """All 8 corners of the colour cube, greys and what lies next to them, as one image."""
    axis = np.array([0, 1, 2, 127, 128, 253, 254, 255], np.uint8)
    cube = np.stack(np.meshgrid(axis, axis, axis), -1).reshape(1, 16, 32, 3)
    return torch.from_numpy(cube).permute(0, 3, 1, 2)


@pytest.mark.parametrize("name", ADJUST)
@pytest.mark.parametrize("channels", [1, 3])
def test_each_colour_change_is_torchvisions(name, channels, pictures):
    adjust, values = ADJUST[name]
    for kind in (pictures, noise(2, 3, 16, 32), corners()):
        images = kind[:1, :channels].expand(len(values), -1, -1, -1)
        changed = TransformParameters(**{name: np.array(values, np.float32)})(images)
        for image, value, result in zip(images, values, changed, strict=True):
            expected = adjust(image, value).int()
            assert (result.int() - expected).abs().max() <= 2, value


def test_colours_change_in_order(pictures):
    values = {"brightness": 1.3, "contrast": 0.7, "saturation": 1.4, "hue": -0.1}
    expected = pictures.float() / 255
    for name, value in values.items():
        expected = ADJUST[name][0](expected, value)
    one = {name: np.full(2, value, np.float32) for name, value in values.items()}
    difference = (TransformParameters(**one)(pictures) - expected * 255).abs()
    assert difference.max() < 2.5  # one rounding, between brightness and contrast, grows
    assert difference.mean() < 0.5


def test_jitter_is_uniform_in_its_ranges():
    changes = Augmentation(jitter=(0.2, 0.3, 0.4, 0.1)).draw(4000, (8, 8), rng())
    for name, centre, spread in (
        *[("brightness", 1, 0.2), ("contrast", 1, 0.3), ("saturation", 1, 0.4), ("hue", 0, 0.1)],
    ):
        drawn = getattr(changes, name)
        assert kstest(drawn, "uniform", (centre - spread, 2 * spread)).pvalue > 1e-3
    drawn = np.stack([changes.brightness, changes.contrast, changes.saturation, changes.hue])
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 5 / np.sqrt(4000)


def test_squares_come_last_and_are_black():
    images = torch.full((300, 3, 16, 32), 90, dtype=torch.uint8)
    augmentation = Augmentation(occlusion=1.0, jitter=(0.2, 0.2, 0.2, 0.1))
    changes = augmentation.draw(300, (16, 32), rng())
    changed = changes(images)
    hidden = (changed == 0).all(1)
    # The sum over both tiles of the squares' areas, and nothing else is black.
    np.testing.assert_array_equal(hidden.sum((1, 2)), (changes.squares[..., 2] ** 2).sum(1))
    assert changed[(~hidden)[:, None].expand_as(changed)].min() >= 60


# Grey, blur, erasing


def test_grey_images_are_as_many_as_wanted_and_the_others_stay(pictures):
    images = pictures[:1, :, :8, :8].expand(2000, -1, -1, -1)
    changed = Augmentation(grey=0.3).draw(2000, (8, 8), rng())(images)
    expected = reference.rgb_to_grayscale(pictures[:1, :, :8, :8], num_output_channels=3)
    is_grey = (changed.int() - expected.int()).abs().amax((1, 2, 3)) <= 1
    assert (is_grey | (changed == images).all(1).all(1).all(1)).all()
    assert abs(is_grey.float().mean() - 0.3) < 4 * np.sqrt(0.21 / 2000)


def test_a_blur_is_torchvisions(pictures):
    deviations = np.array([0.0, 0.4, 1.0, 2.5], np.float32)
    images = pictures[:1].expand(4, -1, -1, -1)
    changed = TransformParameters(deviation=deviations)(images)
    assert torch.equal(changed[0], images[0])
    for image, deviation, result in zip(images[1:], deviations[1:], changed[1:], strict=True):
        radius = int(np.ceil(3 * deviation))
        expected = reference.gaussian_blur(image, [2 * radius + 1] * 2, [float(deviation)] * 2)
        inner = (..., slice(radius, -radius), slice(radius, -radius))  # it mirrors at the border
        assert (result.int() - expected.int())[inner].abs().max() <= 1
    drawn = Augmentation(blur=1.5).draw(4000, (8, 8), rng()).deviation
    assert kstest(drawn, "uniform", (0, 1.5)).pvalue > 1e-3


def test_erased_rectangles_have_the_documented_size_and_any_place():
    n, size = 4000, (100, 80)
    images = torch.full((n, 1, *size), 7, dtype=torch.uint8)
    changes = Augmentation(erase=0.6).draw(n, size, rng())
    erased = (changes(images) == 0)[:, 0]
    top, left, bottom, right = changes.boxes.T
    np.testing.assert_array_equal(erased.sum((1, 2)), (bottom - top) * (right - left))
    assert min(top.min(), left.min()) == 0
    assert (bottom.max(), right.max()) == size
    hit = bottom > top
    assert abs(hit.mean() - 0.6) < 4 * np.sqrt(0.24 / n)
    height, width = (bottom - top)[hit], (right - left)[hit]
    fits = (height < 95) & (width < 75)  # a ratio near its bounds may not
    assert fits.mean() > 0.8
    share = (height * width / 8000)[fits]
    assert 0.015 < share.min() < 0.03
    assert 0.35 < share.max() < 0.42
    ratio = np.log(height / width)[fits]
    assert -1.35 < ratio.min() < -1.0
    assert 1.0 < ratio.max() < 1.35
    place = (top / np.maximum(100 - (bottom - top), 1))[hit & (bottom - top < 60)]
    assert abs(place.mean() - 0.5) < 0.03
