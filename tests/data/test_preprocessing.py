import threading

import numpy as np
import pytest
import torch
from PIL import Image

from rcir.data import Preprocessing, images
from rcir.data.pixels import resize
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


RGB = Preprocessing((40, 60), 3, (0.0,) * 3, (1.0,) * 3)


def picture(height, width, seed=0):
    """Edges and gradients of all sizes, as a photograph has."""
    coarse = Image.fromarray(noise(height // 25, width // 25, 3, seed=seed))
    fine = noise(height, width, 3, seed=seed + 1).astype(float)
    upscaled = np.asarray(coarse.resize((width, height), Image.Resampling.NEAREST))
    return Image.fromarray((0.9 * upscaled + 0.1 * fine).astype(np.uint8))


def by_pillow(path, channels, size, orientation=1):
    """A full decode and Pillow's resize."""
    turn = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_270}[orientation]
    image = Image.open(path).convert("L" if channels == 1 else "RGB")
    image = image if turn is None else image.transpose(turn)
    resized = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR))
    return resized.reshape(*size, channels).transpose(2, 0, 1).astype(int)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize(
    ("shape", "mean"),
    [((30, 45), 0.2), ((150, 200), 0.2), ((400, 300), 1.0), ((900, 1203), 1.5)],
    ids=str,
)
def test_jpeg_files_have_the_values_of_a_full_decode(tmp_path, shape, mean, orientation, channels):
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture(*shape).save(tmp_path / "a.jpg", quality=90, exif=exif)
    preprocessing = Preprocessing(RGB.size, channels, (0.0,) * channels, (1.0,) * channels)
    resized = preprocessing.resized([tmp_path / "a.jpg"])[0].numpy()
    expected = by_pillow(tmp_path / "a.jpg", channels, RGB.size, orientation)
    assert np.abs(resized - expected).mean() < mean


def test_an_extent_is_stretched_to_any_size():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        size, factor = rng.integers(1, 60, 2), rng.integers(2, 9)
        whole = rng.integers(2 * size * factor, 4 * size * factor + 9)
        reduced = -(-whole // factor)
        shape = tuple(whole.tolist())
        extent = (shape[0] / factor, shape[1] / factor)
        ramp = np.minimum(np.arange(reduced[1]) / extent[1], 1) * 255
        pixels = np.broadcast_to(ramp.astype(np.uint8), (1, *reduced))
        resized = resize(pixels, tuple(size.tolist()), extent)
        assert resized.shape == (1, 1, *size)
        expected = (np.arange(size[1]) + 0.5) / size[1] * 255
        inner = np.abs(resized[0, 0].numpy() - expected)[:, 1:-1]
        assert inner.max(initial=0) < 255 / reduced[1] + 1.5


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("shape", [(50, 70), (400, 600)])
@pytest.mark.parametrize("channels", [1, 3])
def test_grey_and_print_jpegs_are_converted(tmp_path, mode, shape, channels):
    picture(*shape).convert(mode).save(tmp_path / "a.jpg", quality=90)
    preprocessing = Preprocessing(RGB.size, channels, (0.0,) * channels, (1.0,) * channels)
    resized = preprocessing.resized([tmp_path / "a.jpg"])[0].numpy()
    assert np.abs(resized - by_pillow(tmp_path / "a.jpg", channels, RGB.size)).mean() < 1.0


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def files(tmp_path):
    """50 files of several formats and sizes."""
    paths = []
    for i in range(50):
        paths.append(tmp_path / f"{i}.{('jpg', 'png', 'webp')[i % 3]}")
        picture(50 + 30 * (i % 5), 75 + 60 * (i % 4), seed=i).save(paths[-1])
    return paths


def test_many_files_keep_their_order_in_any_number_of_threads(files, threads):
    together = RGB.resized([str(path) for path in files])
    assert together.shape == (50, 3, 40, 60)
    for path, tensor in zip(files, together, strict=True):
        assert torch.equal(RGB.resized([path])[0], tensor)
        assert torch.equal(RGB.resized([path, noise(9, 9)])[0], tensor)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.95])
def test_the_first_bad_file_of_many_is_named(files, threads, share):
    for number in (21, 23, 42, 48):
        content = files[number].read_bytes()
        files[number].write_bytes(content[: int(share * len(content))])
    with pytest.raises(InvalidImage, match=f"{files[21].name} is ") as caught:
        RGB.resized(files)
    assert str(files[21]) in str(caught.value)


def test_a_missing_file_of_many_is_named(files, threads):
    files[30].unlink()
    with pytest.raises(InvalidImage, match=rf"no file .*{files[30].name}"):
        RGB.resized(files)


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_no_more_images_than_threads_are_in_memory(files, threads, monkeypatch):
    lock, now, most = threading.Lock(), 0, 0
    read = images._read

    def counting_read(*arguments):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        pixels = read(*arguments)
        with lock:
            now -= 1
        assert pixels.shape == (40, 60, 3)
        return pixels

    monkeypatch.setattr(images, "_read", counting_read)
    RGB.resized(files)
    assert now == 0
    assert 1 <= most <= 3


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
        {"channels": 3, "mean": (0.5, 0.5)},
    ],
    ids=str,
)
def test_configurations_that_make_no_sense_are_refused(options):
    with pytest.raises(InvalidConfig, match=r"preprocessing\."):
        Preprocessing(**options)


def test_one_mean_and_deviation_serve_all_channels():
    image = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    one = Preprocessing((4, 4), 3, (0.25,), (0.5,))([image])
    three = Preprocessing((4, 4), 3, (0.25,) * 3, (0.5,) * 3)([image])
    assert torch.equal(one, three)
    assert one[0, 2, 1, 3].item() == pytest.approx((image[1, 3, 2] / 255 - 0.25) / 0.5, rel=1e-6)
