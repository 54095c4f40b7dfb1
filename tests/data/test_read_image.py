import numpy as np
import pytest
from PIL import Image

from rcir.data import jpeg, read_image
from rcir.data.digests import digests
from rcir.errors import InvalidImage


@pytest.fixture(scope="module")
def colours():
    """(20, 30, 3) smooth enough to survive JPEG."""
    rows, columns = np.mgrid[0:20, 0:30]
    return np.stack([rows * 12, columns * 8, 255 - rows * 5 - columns * 4], 2).astype(np.uint8)


def grey(rgb):
    """ITU-R 601-2 luma, as Pillow documents it."""
    return rgb.astype(float) @ [0.299, 0.587, 0.114]


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.webp", "a.tiff", "a.PPM"])
@pytest.mark.parametrize("as_text", [True, False])
def test_lossless_files_give_their_pixels(colours, tmp_path, name, as_text):
    path = tmp_path / name
    Image.fromarray(colours).save(path, **({"lossless": True} if name == "a.webp" else {}))
    source = str(path) if as_text else path
    np.testing.assert_array_equal(read_image(source, 3), colours)
    np.testing.assert_allclose(read_image(source, 1), grey(colours), atol=1)


def test_a_jpeg_gives_its_pixels_nearly(colours, tmp_path):
    Image.fromarray(colours).save(tmp_path / "a.jpg", quality=95, subsampling=0)
    assert np.abs(read_image(tmp_path / "a.jpg", 3).astype(int) - colours).max() <= 12


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
@pytest.mark.parametrize("size", [None, (5, 6)])
def test_the_bytes_of_a_file_are_read_like_the_file(colours, tmp_path, name, size):
    Image.fromarray(colours).save(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    for channels in (1, 3):
        expected = read_image(tmp_path / name, channels, size)
        np.testing.assert_array_equal(read_image(content, channels, size), expected)
    assert digests([content])[0] == digests([tmp_path / name])[0]
    with pytest.raises(InvalidImage, match="the picture of 3 bytes is not an image"):
        read_image(b"GIF", 3)


def test_the_first_frame_of_an_animation_is_taken(tmp_path):
    frames = [Image.new("L", (5, 4), value) for value in (40, 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(read_image(tmp_path / "a.gif", 1), np.full((4, 5), 40))


@pytest.mark.parametrize("given", ["array", "pillow"])
def test_arrays_and_pillow_images_are_taken_as_they_are(colours, given):
    def source(pixels):
        return pixels if given == "array" else Image.fromarray(pixels)

    np.testing.assert_array_equal(read_image(source(colours), 3), colours)
    np.testing.assert_allclose(read_image(source(colours), 1), grey(colours), atol=1)
    plane = colours[:, :, 0]
    np.testing.assert_array_equal(read_image(source(plane), 1), plane)
    np.testing.assert_array_equal(read_image(source(plane), 3), np.stack([plane] * 3, 2))


def test_a_last_axis_of_one_is_grey(colours):
    np.testing.assert_array_equal(read_image(colours[:, :, :1], 1), colours[:, :, 0])


@pytest.mark.parametrize(
    ("mode", "value", "rgb"),
    [
        ("RGBA", (255, 0, 10, 128), (255, 0, 10)),
        ("LA", (90, 7), (90, 90, 90)),
        ("1", 1, (255, 255, 255)),
        ("CMYK", (0, 255, 245, 0), (255, 0, 10)),
        ("P", 3, (255, 0, 10)),
    ],
)
def test_other_modes_are_converted(mode, value, rgb):
    image = Image.new(mode, (6, 5), value)
    if mode == "P":
        image.putpalette([9] * 9 + [255, 0, 10])
    np.testing.assert_array_equal(read_image(image, 3), np.broadcast_to(rgb, (5, 6, 3)))
    expected = grey(np.array(rgb))
    np.testing.assert_allclose(read_image(image, 1), np.full((5, 6), expected), atol=1)


def test_a_palette_with_transparency_is_read_without_a_warning(colours, tmp_path):
    palette = Image.fromarray(colours).quantize(16)
    palette.save(tmp_path / "a.png", transparency=bytes(range(16)))
    expected = np.asarray(palette.convert("RGB"))
    np.testing.assert_array_equal(read_image(tmp_path / "a.png", 3), expected)


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
@pytest.mark.parametrize("size", [None, (10, 15), (6, 4), (2, 3)])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(colours, tmp_path, orientation, size, name):
    turned = {
        1: lambda x: x,
        2: lambda x: x[:, ::-1],
        3: lambda x: x[::-1, ::-1],
        4: lambda x: x[::-1],
        5: lambda x: x.swapaxes(0, 1),
        6: lambda x: np.rot90(x, -1),
        7: lambda x: np.rot90(x, 2).swapaxes(0, 1),
        8: lambda x: np.rot90(x),
    }[orientation](colours)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(colours).save(tmp_path / name, exif=exif, quality=95)
    if size is not None:
        upright = Image.fromarray(np.ascontiguousarray(turned))
        turned = np.asarray(upright.resize(size[::-1], Image.Resampling.BILINEAR))
    pixels = read_image(tmp_path / name, 3, size)
    assert pixels.shape == turned.shape
    difference = np.abs(pixels.astype(int) - turned)
    if name == "a.png":
        assert difference.max() <= (0 if size is None else 1)
    else:
        assert difference.mean() < 3


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("shape", "scale"),
    [((79, 400), 1), ((80, 120), 2), ((159, 400), 2), ((160, 300), 4), ((2000, 1000), 8)],
)
def test_a_jpeg_is_reduced_to_no_less_than_twice_the_size(
    tmp_path, shape, scale, turned, monkeypatch
):
    decoded, resized = [], jpeg.resize_one
    monkeypatch.setattr(
        jpeg, "resize_one", lambda pixels, *rest: decoded.append(pixels) or resized(pixels, *rest)
    )
    exif = Image.Exif()
    exif[0x0112] = 6 if turned else 1
    stored = shape[::-1] if turned else shape
    Image.new("RGB", stored[::-1], (200, 100, 50)).save(tmp_path / "a.jpg", exif=exif)
    pixels = read_image(tmp_path / "a.jpg", 3, size=(20, 25))
    reduced = (-(-shape[0] // scale), -(-shape[1] // scale))
    assert decoded[0].shape == (*(reduced[::-1] if turned else reduced), 3)
    assert pixels.shape == (20, 25, 3)
    assert np.abs(pixels.astype(int) - [200, 100, 50]).max() <= 2
    assert read_image(tmp_path / "a.jpg", 3).shape == (*shape, 3)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}], ids=str)
def test_a_jpeg_has_pillow_s_pixels(colours, tmp_path, channels, options):
    Image.fromarray(colours).save(tmp_path / "a.jpg", **options)
    expected = np.asarray(Image.open(tmp_path / "a.jpg").convert("L" if channels == 1 else "RGB"))
    pixels = read_image(tmp_path / "a.jpg", channels)
    assert np.abs(pixels.astype(int) - expected).max() <= (2 if channels == 1 else 1)


def test_the_first_picture_of_a_stereo_file_is_taken(colours, tmp_path):
    first, second = Image.fromarray(colours), Image.fromarray(255 - colours)
    first.save(tmp_path / "a.mpo", save_all=True, append_images=[second], quality=95)
    with Image.open(tmp_path / "a.mpo") as image:
        assert image.format == "MPO"
    pixels = read_image(tmp_path / "a.mpo", 3)
    assert np.abs(pixels.astype(int) - colours).mean() < 5


def test_files_too_large_for_memory_are_streamed(colours, tmp_path, monkeypatch):
    Image.fromarray(colours).save(tmp_path / "a.jpg")
    expected = read_image(tmp_path / "a.jpg", 3)
    monkeypatch.setattr(jpeg, "MAX_BYTES", 100)
    monkeypatch.setattr(jpeg, "decode_jpeg", None)
    np.testing.assert_array_equal(read_image(tmp_path / "a.jpg", 3), expected)
