"""Reading of one image from a file, bytes, a Pillow image or an array, and what is refused."""

import io
import math
import struct
import sys
import threading
import time
import warnings
import zlib
from types import SimpleNamespace

import numpy as np
import pillow_heif
import pytest
import torch
from PIL import EpsImagePlugin, Image, ImageFile, ImageOps

from rcir.data import Preprocessing, images, read_image
from rcir.data.images import Resizing, UntrustedImage, image_size, read_capture_times, to_pixels
from rcir.errors import ImageTooLarge, InvalidImage

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM")


@pytest.fixture(scope="module")
def colours():
    """(20, 30, 3) smooth enough to survive JPEG."""
    rows, columns = np.mgrid[0:20, 0:30]
    return np.stack([rows * 12, columns * 8, 255 - rows * 5 - columns * 4], 2).astype(np.uint8)


def grey(rgb):
    """ITU-R 601-2 luma, as Pillow documents it."""
    return rgb.astype(float) @ [0.299, 0.587, 0.114]


def difference(pixels, expected):
    assert pixels.shape == np.shape(expected)
    return np.abs(pixels.astype(int) - np.asarray(expected, int))


def saved(image, name, **options):
    """The content of a file with these pixels, in the format of the name's ending."""
    file, kind = io.BytesIO(), name.rpartition(".")[2].upper()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(file, {"JPG": "JPEG", "PGM": "PPM"}.get(kind, kind), **options)
    return file.getvalue()


def encoded(file_format, **options):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    return saved(pixels, file_format, **options)


def doors_of(content, path):
    """The same picture as a path, as bytes, as a PIL image, and as an upload, if it may be one."""
    path.write_bytes(content)
    yield from (path, str(path), content)
    yield Image.open(io.BytesIO(content))
    if path.suffix != ".tiff":
        yield UntrustedImage(content, math.inf)
    loaded = Image.open(io.BytesIO(content))
    loaded.load()
    yield loaded


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.webp", "a.tiff", "a.PPM"])
def test_lossless_files_arrays_and_pillow_images_keep_their_pixels(colours, tmp_path, name):
    options = {"lossless": True} if name == "a.webp" else {}
    doors = doors_of(saved(colours, name, **options), tmp_path / name)
    for source in (*doors, colours, Image.fromarray(colours)):
        np.testing.assert_array_equal(read_image(source, 3), colours)
        np.testing.assert_allclose(read_image(source, 1), grey(colours), atol=1)


def test_grey_arrays_and_pillow_images_keep_their_pixels(colours):
    plane = np.ascontiguousarray(colours[:, :, 0])
    for source in (plane, plane[:, :, None], Image.fromarray(plane)):
        np.testing.assert_array_equal(read_image(source, 1), plane)
        np.testing.assert_array_equal(read_image(source, 3), np.stack([plane] * 3, 2))


def test_large_jpeg_files_are_streamed(colours, tmp_path, monkeypatch):
    Image.fromarray(colours).save(tmp_path / "a.jpg")
    expected = read_image(tmp_path / "a.jpg", 3)
    monkeypatch.setattr(images, "MAX_BYTES", 100)
    monkeypatch.setattr(images, "LARGE_PIXELS", 100)  # one such image is decoded at a time
    monkeypatch.setattr(images, "decode_jpeg", None)
    assert difference(read_image(tmp_path / "a.jpg", 3), expected).max() <= 2


def test_the_first_frame_of_an_animation_or_a_stereo_file_is_read(colours, tmp_path):
    frames = [Image.new("L", (5, 4), value) for value in (40, 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(read_image(tmp_path / "a.gif", 1), np.full((4, 5), 40))
    first, second = Image.fromarray(colours), Image.fromarray(255 - colours)
    first.save(tmp_path / "a.mpo", save_all=True, append_images=[second], quality=95)
    assert difference(read_image(tmp_path / "a.mpo", 3), colours).mean() < 5


def on_white(colours, opacity):
    """Values (..., 3) over white, by the share of them that is not transparent."""
    share = np.asarray(opacity)[..., None] / 255
    return 255 + share * (np.asarray(colours, float) - 255)


def transparent_files(rgb):
    """Name, content and pixels over white of files with every kind of transparency."""
    rows, columns = np.mgrid[0 : rgb.shape[0], 0 : rgb.shape[1]]
    alpha = np.where(rows < 4, 0, np.where(columns < 8, 255, rows * 12)).astype(np.uint8)
    plane, rgba = np.ascontiguousarray(rgb[:, :, 0]), np.dstack([rgb, alpha])
    three, la = np.dstack([plane] * 3), Image.fromarray(np.dstack([plane, alpha]), "LA")
    palette = Image.fromarray(rgb).quantize(16)
    opacity, entries = np.arange(0, 256, 17, dtype=np.uint8), np.asarray(palette)
    looked_up, key = np.asarray(palette.convert("RGB")), tuple(map(int, rgb[5, 5]))
    files = {  # with the colours and opacity of their pixels
        "RGBA.png": (rgba, {}, rgb, alpha),
        "RGBA.tiff": (rgba, {}, rgb, alpha),
        "RGBA.webp": (rgba, {"lossless": True, "exact": True}, rgb, alpha),
        "LA.png": (la, {}, three, alpha),
        "palette.png": (palette, {"transparency": opacity.tobytes()}, looked_up, opacity[entries]),
        "palette.gif": (palette, {"transparency": 3}, looked_up, 255 * (entries != 3)),
        "key.png": (rgb, {"transparency": key}, rgb, 255 * (rgb != key).any(axis=2)),
        "grey key.png": (plane, {"transparency": key[0]}, three, 255 * (plane != key[0])),
    }
    for name, (image, options, shown, share) in files.items():
        yield name, saved(image, name, **options), on_white(shown, share)


def test_transparent_pictures_are_composited_on_white_through_every_door(colours, tmp_path):
    for name, content, expected in transparent_files(colours):
        for source in doors_of(content, tmp_path / name):
            assert difference(read_image(source, 3), np.rint(expected)).max() <= 1, name
            assert difference(read_image(source, 1), np.rint(grey(expected))).max() <= 1, name


@pytest.mark.parametrize(
    ("mode", "value", "rgb"),
    [
        ("RGBa", (128, 0, 5, 128), (255, 127, 132)),
        ("La", (7, 7), (255, 255, 255)),
        ("PA", (3, 128), (255, 127, 132)),
    ],
)
def test_modes_of_pillow_without_a_file_format_are_composited_on_white(mode, value, rgb):
    image = Image.new(mode, (6, 5), value)
    if mode == "PA":
        image.putpalette([9] * 9 + [255, 0, 10])
    assert difference(read_image(image, 3), np.broadcast_to(rgb, (5, 6, 3))).max() <= 1


def test_an_opaque_alpha_channel_changes_nothing(colours):
    opaque = np.dstack([colours, np.full(colours.shape[:2], 255, np.uint8)])
    np.testing.assert_array_equal(read_image(Image.fromarray(opaque), 3), colours)


def test_threads_that_read_at_once_silence_pillow_but_nobody_else(colours, tmp_path, monkeypatch):
    Image.fromarray(colours).save(tmp_path / "a.png")
    both, first_has_ended, pixels = threading.Barrier(2), threading.Event(), []

    def overlapping(image, channels):
        if both.wait(60):
            first_has_ended.wait(60)
        warnings.warn("a warning of Pillow", stacklevel=1)
        return to_pixels(image, channels)

    def read():
        pixels.append(read_image(tmp_path / "a.png", 3))
        first_has_ended.set()

    monkeypatch.setattr(images, "to_pixels", overlapping)
    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(pixels, [colours, colours])
    with pytest.raises(UserWarning, match="another"):
        warnings.warn("a warning of another thread", stacklevel=1)


def exif(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tif", "avif", "heic", "bmp", "gif"])
def test_capture_times_are_read_without_decoding(ending, colours, tmp_path):
    states_times = ending not in ("bmp", "gif")
    photograph = Image.Exif()
    photograph[0x010F] = "a camera"  # Pillow does not write a time alone
    photograph.get_ifd(0x8769)[0x9003] = "2026:11:26 09:47:00"
    pillow_heif.register_heif_opener()
    Image.init()  # allocates an image, too
    paths = [tmp_path / f"{name}.{ending}" for name in ("plain", "dated")]
    Image.fromarray(colours).save(paths[0])
    Image.fromarray(colours).save(
        paths[1], **({"exif": photograph.tobytes()} if states_times else {})
    )
    allocated = Image.core.get_stats()["new_count"]
    times = read_capture_times(paths)
    assert Image.core.get_stats()["new_count"] == allocated
    assert times == [None, "2026-11-26 09:47:00" if states_times else None]


# Refusals


def chunk(kind, data):
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum


def png(width, height, *more, bits=8, colour=2, data=bytes(100)):
    """A well-formed PNG that declares a size and, by default, has next to no data."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    rest = b"".join(more) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + rest


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.9])
def test_truncated_files_are_refused(file_format, share, tmp_path):
    content = encoded(file_format)
    path = tmp_path / "cut.img"
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(InvalidImage, match=str(path)):
        read_image(path, 3)


@pytest.mark.parametrize("file_format", FORMATS)
def test_damaged_headers_raise_nothing_but_invalid_image(file_format):
    options = {"exif": exif(6)} if file_format in ("JPEG", "WEBP") else {}
    content, rng = encoded(file_format, **options), np.random.default_rng(0)
    n_refused = 0
    for _ in range(100):
        damaged = np.frombuffer(content, np.uint8).copy()
        damaged[rng.integers(0, 120, 3)] = rng.integers(0, 256, 3)
        try:
            assert read_image(damaged.tobytes(), 3).dtype == np.uint8
        except InvalidImage:
            n_refused += 1
    assert n_refused > 0


def test_damaged_pixels_of_a_jpeg_are_refused_where_pillow_refuses_them():
    content, rng = encoded("JPEG"), np.random.default_rng(0)
    for _ in range(60):
        damaged = np.frombuffer(content, np.uint8).copy()
        damaged[rng.integers(620, len(content), 5)] = rng.integers(0, 256, 5)
        damaged = damaged.tobytes()
        try:
            expected = np.asarray(Image.open(io.BytesIO(damaged)).convert("RGB"))
        except OSError:
            with pytest.raises(InvalidImage):
                read_image(damaged, 3)
        else:
            assert read_image(damaged, 3).shape == expected.shape


@pytest.fixture
def ghostscript(monkeypatch):
    """The calls that would start Ghostscript."""
    calls = []

    def start(*arguments, **_):
        calls.append(arguments)
        return Image.new("RGB", (16, 16)).im

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", start)
    return calls


@pytest.mark.parametrize(
    "file_format", ["EPS", "PDF", "ICO", "ICNS", "TGA", "PCX", "SGI", "DDS", "JPEG2000"]
)
def test_other_formats_are_refused_undecoded_whatever_the_ending(
    tmp_path, file_format, ghostscript
):
    for path in (tmp_path / "picture.png", tmp_path / "picture.eps"):
        Image.new("RGB", (16, 16), (200, 100, 50)).save(path, file_format)
        with pytest.raises(InvalidImage, match=f"{path} is not an image"):
            read_image(path, 3)
    assert ghostscript == []
    if file_format == "EPS":  # Pillow itself would start it
        with Image.open(path) as image:
            image.load()
        assert len(ghostscript) == 1


def jpeg_that_declares(width, height):
    content = bytearray(encoded("JPEG"))
    start = content.index(b"\xff\xc0") + 5  # of the height in the frame's header
    content[start : start + 4] = struct.pack(">HH", height, width)
    return bytes(content)


@pytest.mark.parametrize("make", [png, jpeg_that_declares])
@pytest.mark.parametrize("size", [(60_000, 60_000), (20_000, 10_001)])
def test_a_file_that_declares_a_huge_image_is_refused_undecoded(make, size, tmp_path, monkeypatch):
    def decode(*_):
        raise AssertionError

    content, path = make(*size), tmp_path / "bomb"
    path.write_bytes(content)
    monkeypatch.setattr(images, "decode_jpeg", decode)
    monkeypatch.setattr(Image.Image, "load", decode)
    monkeypatch.setattr(ImageFile.ImageFile, "load", decode)
    for source in (path, content, UntrustedImage(content, math.inf)):
        with pytest.raises(ImageTooLarge, match="200,000,000"):
            read_image(source, 3)
        with pytest.raises(ImageTooLarge, match="50,000,000"):
            image_size(source, 50_000_000)
        with pytest.raises(ImageTooLarge, match="200,000,000"):
            Preprocessing().resized([source] * 20)
    assert next(images.find_faults([path])).startswith(str(path))


def test_the_limit_of_pixels_is_an_option(colours):
    content = encoded("PNG")  # of 40 x 50 pixels
    for source in (content, Image.open(io.BytesIO(content)), read_image(content, 3)):
        assert read_image(source, 3, max_pixels=2000).shape == (40, 50, 3)
        with pytest.raises(ImageTooLarge, match="1,999"):
            read_image(source, 3, max_pixels=1999)
        with pytest.raises(ImageTooLarge, match="1,999"):
            Preprocessing(max_pixels=1999).resized([source])
    # Pillow itself refuses to open more than 179 million pixels.
    large = jpeg_that_declares(15_000, 15_000)
    assert image_size(large, 225_000_000) == (15_000, 15_000)
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(large))


def test_a_small_file_with_a_huge_comment_is_refused():
    comment = b"Comment\0\0" + zlib.compress(b"a" * (8 << 20), 9)
    with pytest.raises(InvalidImage):
        read_image(png(4, 4, chunk(b"zTXt", comment)), 3)


def deep_png(colour, channels, bits=16):
    """A PNG file of 4 x 2 pixels, all of one value."""
    rows = 2 * (b"\0" + 4 * channels * b"\x12\x34"[: bits // 8])
    return png(4, 2, bits=bits, colour=colour, data=rows)


def deep_tiff(bits=16):
    """An uncompressed TIFF file of 4 x 2 pixels in RGB."""
    data = bytes(4 * 2 * 3 * bits // 8)
    depths = struct.pack("<3H", bits, bits, bits)
    tags = [(256, 3, 1, 4), (257, 3, 1, 2), (258, 3, 3, 8), (259, 3, 1, 1), (262, 3, 1, 2)]
    tags += [(273, 4, 1, 14), (277, 3, 1, 3), (278, 3, 1, 2), (279, 4, 1, len(data))]
    directory = struct.pack("<H", len(tags))
    directory += b"".join(struct.pack("<HHII", *tag) for tag in tags) + struct.pack("<I", 0)
    start = 14 + len(data)
    return b"II*\0" + struct.pack("<I", start) + depths + data + directory


def deep_files():
    files = {
        "grey.png": deep_png(0, 1),
        "grey with alpha.png": deep_png(4, 2),
        "colour.png": deep_png(2, 3),
        "colour with alpha.png": deep_png(6, 4),
        "colour.tiff": deep_tiff(),
        "colour.ppm": b"P6 4 2 4095 " + bytes(48),
        "grey.pgm": b"P5 4 2 4095 " + bytes(16),
        "plain.ppm": b"P3 1 1 65535 9 9 9 ",
    }
    return files | {f"{m}.tiff": saved(Image.new(m, (5, 4)), "tiff") for m in ("I;16", "I", "F")}


@pytest.mark.parametrize("name", deep_files())
def test_depth_is_what_the_file_states(name, tmp_path):
    *doors, _ = doors_of(deep_files()[name], tmp_path / name)  # once loaded, an image may say less
    for source in doors:
        with pytest.raises(InvalidImage, match="deeper"):
            read_image(source, 3)
        if not isinstance(source, Image.Image):
            with pytest.raises(InvalidImage, match="deeper"):
                image_size(source)
    (fault,) = images.find_faults([tmp_path / name])
    assert "deeper" in fault


def test_depth_of_heic_is_what_the_file_states():
    file = io.BytesIO()
    pillow_heif.from_bytes("RGB;16", (64, 64), bytes(64 * 64 * 6)).save(file)
    for read in (lambda image: read_image(image, 3), image_size):
        with pytest.raises(InvalidImage, match="deeper"):
            read(file.getvalue())


def test_files_of_8_bits_or_fewer_are_read():
    for content in (deep_png(2, 3, 8), deep_tiff(8), b"P6 4 2 15 " + bytes(24), b"P4 8 2 ab"):
        assert read_image(content, 3).shape in ((2, 4, 3), (2, 8, 3))


SHAPES = [(0, 5), (5, 0), (0, 0, 3), (7,), (), (4, 5, 2), (4, 5, 4)]
TYPES = [np.float32, np.int64, np.uint16, np.bool_, object]


@pytest.mark.parametrize(
    ("source", "word"),
    [
        *[(np.zeros(shape, np.uint8), "height") for shape in SHAPES],
        *[(np.zeros((4, 5), dtype), "uint8") for dtype in TYPES],
        *[(Image.new(mode, (5, 4)), "deeper") for mode in ("I;16", "I", "F")],
        (np.full((4, 5), np.nan), "NaN"),
        (np.broadcast_to(np.uint8(1), (20_001, 10_000)), "200,000,000"),
        *[(each, None) for each in (None, 3, ["a.png"], b"GIF", b"not a picture")],
        *[(each, None) for each in ("missing.png", ".", Image.new("RGB", (0, 5)))],
    ],
)
def test_arrays_of_another_form_and_other_sources_are_refused(source, word):
    for channels in (1, 3):
        with pytest.raises(InvalidImage, match=word):
            read_image(source, channels)


# Untrusted files


def slow_files():
    """Small files that take long to decode."""
    file, progressive = encoded("JPEG"), encoded("JPEG", progressive=True)
    scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    exif = b"\xff\xe1" + struct.pack(">H", 8) + b"Exif\0\0"
    return {
        "Exif segments": file[:2] + 2000 * exif + file[2:],
        "comments between fill bytes": file[:2] + 2000 * b"\xff\xff\xfe\0\2" + file[2:],
        "scans": progressive[:-2] + 200 * scan + progressive[-2:],
    }


def test_jpeg_files_of_too_many_parts_are_refused():
    for content in slow_files().values():
        with pytest.raises(InvalidImage, match="scans"):
            UntrustedImage(content, math.inf)


def test_untrusted_jpeg_files_have_the_pixels_of_trusted_ones():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50), dtype=np.uint8)
    icc, comment = bytes(range(256)) * 2000, b"\xff\xda" * 5000  # which is no scan
    for options in ({}, {"progressive": True, "icc_profile": icc}, {"comment": comment}):
        whole = saved(pixels, "JPEG", **options)
        for file in (whole, whole + encoded("JPEG", progressive=True) * 200):
            image = UntrustedImage(file, math.inf)
            assert image_size(image) == (50, 40)
            np.testing.assert_array_equal(read_image(image, 3), read_image(file, 3))


def test_the_deadline_is_checked_while_a_jpeg_is_decoded_at_full_scale(monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (150, 150), dtype=np.uint8)
    file = saved(pixels, "JPEG", quality=98)
    assert len(file) < 1 << 16  # Pillow reads 64 KiB at once by itself
    image, half = UntrustedImage(file, 0.5), len(file) // 2
    # The time is over once the decoder has read half of the file.
    clock = SimpleNamespace(monotonic=lambda: float(image.tell() >= half))
    monkeypatch.setattr(images, "time", clock)
    with pytest.raises(InvalidImage, match="too long"):
        read_image(image, 1)


def test_decoding_ends_at_the_deadline_and_after_so_many_parts(monkeypatch):
    comment = b"P5 #" + b"x" * 10_000 + b"\n2 2 255 abcd"  # read letter by letter
    np.testing.assert_array_equal(
        read_image(UntrustedImage(comment, math.inf), 1), [[97, 98], [99, 100]]
    )
    with pytest.raises(InvalidImage, match="too long"):
        read_image(UntrustedImage(comment, time.monotonic() - 1), 1)
    monkeypatch.setattr(images, "MAX_READS", 5_000)
    with pytest.raises(InvalidImage, match="parts"):
        read_image(UntrustedImage(comment, math.inf), 1)


# HEIC and AVIF


def turned_pictures():
    """The same picture in each format that no upload may have, and upright."""
    pillow_heif.register_heif_opener()
    rows, columns = np.mgrid[0:96, 0:64]
    picture = Image.fromarray(np.dstack([rows * 2, columns * 3, 255 - rows]).astype(np.uint8))
    upright = np.asarray(picture.transpose(Image.Transpose.ROTATE_270))
    for ending in ("heif", "avif", "tiff"):
        yield ending, saved(picture, ending, quality=95, exif=exif(6).tobytes()), upright


def test_heic_avif_and_tiff_are_read_upright_but_not_as_uploads(tmp_path):
    for ending, content, expected in turned_pictures():
        path = tmp_path / f"picture.{ending}"
        path.write_bytes(content)
        for source in (path, content):
            assert difference(read_image(source, 3), expected).mean() < 3
        for read in (lambda image: read_image(image, 3), image_size):
            with pytest.raises(InvalidImage, match="JPEG, PNG, WEBP, BMP"):
                read(UntrustedImage(content, math.inf))


def test_heic_without_its_extra_names_the_extra(tmp_path, monkeypatch):
    _, content, _ = next(turned_pictures())
    (tmp_path / "a.heic").write_bytes(content)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    for source in (tmp_path / "a.heic", content):
        with pytest.raises(InvalidImage, match="heif"):
            read_image(source, 3)
    assert {".heic", ".heif", ".avif"} <= set(images.IMAGE_ENDINGS)


# One reader


def ordinary_files():
    """Name and content of pictures in the formats and modes that people have."""
    rows, columns = np.mgrid[0:90, 0:130]
    edges = 40 * ((rows // 7 + columns // 5) % 2)
    picture = Image.fromarray(
        np.dstack([rows * 2 + edges, 255 - columns - edges, (rows + columns) % 200]).astype(
            np.uint8
        )
    )
    large = picture.resize((1040, 720), Image.Resampling.BICUBIC)
    files = {f"orientation {turn}.jpg": (picture, {"exif": exif(turn)}) for turn in range(1, 9)}
    files |= {"orientation 3.png": (picture, {"exif": exif(3)})}
    files |= {"large.jpg": (large, {"exif": exif(6)})}
    modes = {"CMYK": "jpg", "L": "jpg", "P": "png", "1": "png", "RGB": "bmp", "YCbCr": "tiff"}
    files |= {f"{mode}.{ending}": (picture.convert(mode), {}) for mode, ending in modes.items()}
    files |= {
        "no subsampling.jpg": (picture, {"subsampling": 0}),
        "orientation 8.webp": (picture, {"exif": exif(8), "lossless": True}),
        "orientation 5.tiff": (picture, {"exif": exif(5)}),
        "progressive.jpg": (picture, {"progressive": True}),
        **{"grey.pgm": (picture.convert("L"), {}), "palette.gif": (picture, {})},
        "lossy.webp": (picture, {}),
    }
    for name, (image, options) in files.items():
        yield name, saved(image, name, **options)


@pytest.mark.parametrize("channels", [1, 3])
def test_every_door_gives_the_pixels_that_pillow_decodes_turns_and_resizes(tmp_path, channels):
    preprocessing = Preprocessing((40, 60), channels, crop=0.8)
    for name, content in ordinary_files():
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        upright = upright.convert("RGB").convert("L" if channels == 1 else "RGB")
        scaled = Resizing((40, 60), crop=0.8).scaled(upright.height, upright.width)
        resized = upright.resize(scaled[::-1], Image.Resampling.BILINEAR)
        top, left = round((scaled[0] - 40) / 2), round((scaled[1] - 60) / 2)
        cut = np.asarray(resized.crop((left, top, left + 60, top + 40)))
        whole = np.asarray(upright.resize((60, 40), Image.Resampling.BILINEAR))
        doors = list(doors_of(content, tmp_path / name))
        first = preprocessing.resized([doors[0]])
        for source in (*doors, np.asarray(upright)):
            assert difference(read_image(source, channels), np.asarray(upright)).max() <= 1, name
            assert difference(read_image(source, channels, (40, 60)), whole).max() <= 1, name
            pixels = preprocessing.resized([source])
            cut_out = pixels[0].permute(1, 2, 0).numpy().reshape(cut.shape)
            assert difference(cut_out, cut).max() <= 1, name
            assert torch.equal(pixels, first), name
