import io
import struct
import zlib

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageFile

from rcir.data import Preprocessing, jpeg, read_image
from rcir.errors import InvalidImage


def encoded(file_format, **options):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, file_format, **options)
    return content.getvalue()


def chunk(kind, data):
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum


def png(width, height, *more):
    """A well-formed PNG that declares a size and holds next to nothing."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rest = b"".join(more) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + rest


def refusal(source, channels=3):
    with pytest.raises(InvalidImage) as caught:
        read_image(source, channels)
    return str(caught.value)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.9])
def test_truncated_files_are_refused(file_format, share, tmp_path):
    content = encoded(file_format)
    path = tmp_path / "cut.img"
    path.write_bytes(content[: int(share * len(content))])
    message = refusal(path)
    assert str(path) in message
    assert "replace it" in message or "give a JPEG, PNG" in message


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "PPM", "BMP"])
def test_damaged_files_are_read_or_refused_but_never_raise_anything_else(file_format, tmp_path):
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a picture"
    content = encoded(file_format, **({"exif": exif} if file_format in ("JPEG", "WEBP") else {}))
    rng = np.random.default_rng(0)
    path, refused = tmp_path / "damaged.img", 0
    for _ in range(150):
        damaged = bytearray(content)
        for place in rng.integers(0, 120, 3):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            assert read_image(path, 3).dtype == np.uint8
        except InvalidImage:
            refused += 1
    assert refused > 0


def test_text_is_no_image_whatever_its_name(tmp_path):
    path = tmp_path / "picture.jpg"
    path.write_text("not a picture")
    assert "is not an image, whatever its name says, of a format that is read" in refusal(path)


OTHER_FORMATS = ("EPS", "PDF", "ICO", "ICNS", "TGA", "PCX", "SGI", "DDS", "JPEG2000")


@pytest.mark.parametrize("file_format", OTHER_FORMATS)
@pytest.mark.parametrize("ending", ["png", "jpg", "eps"])
def test_formats_that_are_not_named_are_refused_unread(tmp_path, file_format, ending, monkeypatch):
    """Whatever they are called: Pillow knows them by their content."""
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given, **_: started.append(given))
    path = tmp_path / f"picture.{ending}"
    Image.new("RGB", (16, 16), (200, 100, 50)).save(path, file_format)
    message = refusal(path)
    assert f"{path} is not an image" in message
    assert "give a JPEG, PNG, WEBP, TIFF, BMP, GIF, PPM" in message
    with pytest.raises(InvalidImage):
        Preprocessing().resized([path, path])
    assert started == []


def test_pillow_itself_would_start_ghostscript(tmp_path, monkeypatch):
    """What the test before would notice."""
    started = []

    def start(*given, **_):
        started.append(given)
        return Image.new("RGB", (16, 16)).im

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", start)
    Image.new("RGB", (16, 16)).save(tmp_path / "picture.png", "EPS")
    with Image.open(tmp_path / "picture.png") as image:
        image.load()
    assert len(started) == 1


@pytest.mark.parametrize("size", [(100_000, 100_000), (12_000, 10_000), (2**31 - 1, 1)])
def test_a_small_file_that_declares_a_huge_image_is_refused_before_decoding(tmp_path, size):
    path = tmp_path / "bomb.png"
    path.write_bytes(png(*size))
    assert path.stat().st_size < 200
    message = refusal(path)
    assert "too large" in message or "at most 100,000,000 pixels" in message


@pytest.mark.parametrize("size", [(65_500, 65_500), (12_000, 10_000)])
def test_a_jpeg_that_declares_a_huge_image_is_refused_before_decoding(tmp_path, size, monkeypatch):
    content = bytearray(encoded("JPEG"))
    start = content.index(b"\xff\xc0") + 5  # of the height in the frame's header
    content[start : start + 4] = struct.pack(">HH", *size[::-1])
    path = tmp_path / "bomb.jpg"
    path.write_bytes(content)

    def decode(*_):
        raise AssertionError

    monkeypatch.setattr(jpeg, "decode_jpeg", decode)
    monkeypatch.setattr(Image.Image, "load", decode)
    monkeypatch.setattr(ImageFile.ImageFile, "load", decode)
    for wanted in (None, (8, 16)):
        with pytest.raises(InvalidImage, match=r"too large|at most 100,000,000 pixels") as caught:
            read_image(path, 3, wanted)
        assert str(path) in str(caught.value)
    with pytest.raises(InvalidImage, match=r"too large|at most 100,000,000 pixels"):
        Preprocessing().resized([path] * 20)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("size", [(400, 500), (3, 4)])
def test_truncated_jpegs_are_refused_at_every_scale(tmp_path, share, size):
    content = encoded("JPEG")
    path = tmp_path / "cut.jpg"
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(InvalidImage, match="replace it"):
        read_image(path, 3, size)


def test_damaged_pixels_of_a_jpeg_are_judged_as_pillow_does(tmp_path):
    content = encoded("JPEG")
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.jpg"
    for _ in range(100):
        damaged = bytearray(content)
        for place in rng.integers(620, len(content), 5):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            expected = np.asarray(Image.open(path).convert("RGB"))
        except OSError:
            assert "replace it" in refusal(path)
        else:
            np.testing.assert_array_equal(read_image(path, 3), expected)


def test_a_small_file_with_a_huge_comment_is_refused(tmp_path):
    comment = b"Comment\0\0" + zlib.compress(b"a" * (8 << 20), 9)
    path = tmp_path / "bomb.png"
    path.write_bytes(png(4, 4, chunk(b"zTXt", comment)))
    assert "replace it" in refusal(path)


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_more_than_eight_bits_are_refused_rather_than_squeezed(mode, tmp_path):
    if mode == "I;16":
        Image.fromarray(np.full((4, 5), 40_000, np.uint16)).save(tmp_path / "deep.png")
        source = tmp_path / "deep.png"
    else:
        source = Image.new(mode, (5, 4))
    message = refusal(source)
    assert "deeper than 8 bits" in message
    assert "map the range that matters to 0..255" in message


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0, 3), (7,), (), (4, 5, 2), (4, 5, 4)])
@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_of_no_image_s_shape_are_refused(shape, channels):
    message = refusal(np.zeros(shape, np.uint8), channels)
    assert "give (height, width) or (height, width, 3)" in message


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint16, np.bool_, object])
def test_arrays_of_other_types_are_refused(dtype):
    assert "give uint8 values from 0 to 255" in refusal(np.zeros((4, 5), dtype))


def test_nan_is_named():
    pixels = np.full((4, 5), 0.5)
    pixels[2, 2] = np.nan
    assert "holds NaN" in refusal(pixels)


def test_an_array_of_too_many_pixels_is_refused_without_a_copy():
    wide = np.broadcast_to(np.uint8(1), (10_001, 10_000))
    assert "at most 100,000,000" in refusal(wide, 1)


def test_an_empty_pillow_image_is_refused():
    assert "is empty" in refusal(Image.new("RGB", (0, 5)))


@pytest.mark.parametrize("source", [None, 3, ["a.png"]])
def test_other_types_are_refused(source):
    assert "give a path, the bytes of a file, a PIL image or a uint8 array" in refusal(source)


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_path_without_a_file_is_refused(kind, tmp_path):
    source = tmp_path / "missing.png" if kind == "missing" else tmp_path
    assert "give the path of an image file" in refusal(source)
