"""Embedding many images: by several replicas, and again after an interruption."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rcir.data import Preprocessing
from rcir.encoders import METHODS, batches, build_encoder
from rcir.encoders.batches import embed
from rcir.encoders.embedder import Embedder
from rcir.errors import InvalidConfig, InvalidImage
from tests.methods import config_of

COUNT, BLOCK = 230, 50  # four blocks and a rest
BLOCKS = [50, 50, 50, 50, 30]
IMAGES = np.random.default_rng(0).integers(0, 256, (COUNT, 9, 17), np.uint8)

on_ray = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(batches, "CHUNK", BLOCK)


def build(method="btl", seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_encoder(config_of(method, dim=8), 1, (8, 16)).eval()


@pytest.fixture
def paths(tmp_path):
    """Pictures of several sizes and kinds of file."""
    rng = np.random.default_rng(1)
    folder = tmp_path / "pictures"
    folder.mkdir()
    files = []
    for number in range(COUNT):
        size = rng.integers(8, 40, 2)
        files.append(folder / f"{number}.{('png', 'jpg')[number % 2]}")
        Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(files[-1])
    return files


class Counting:
    """An embedder that remembers the blocks it embedded and those it found."""

    def __init__(self, folder, **options):
        self.embedded, self.found = [], []
        self.embedder = Embedder(folder=folder, progress=self.progress, **options)

    def progress(self, images, found):
        (self.found if found else self.embedded).append(images)

    def __call__(self, images, encoder=None, preprocessing=None):
        return self.embedder(encoder or build(), preprocessing or Preprocessing(), images)


def assert_equal(found, expected):
    for name in ("vectors", "variance", "uncertainty"):
        one, other = getattr(found, name), getattr(expected, name)
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_blocks_are_kept_and_make_the_same_embedding(method, tmp_path):
    encoder, preprocessing = build(method), Preprocessing()
    with torch.inference_mode():
        whole = encoder.embed(preprocessing(IMAGES))
    first, second = Counting(tmp_path / "parts"), Counting(tmp_path / "parts")
    assert_equal(first(IMAGES, encoder), whole)
    assert (first.embedded, first.found) == (BLOCKS, [])
    assert_equal(second(IMAGES, encoder), whole)
    assert (second.embedded, second.found) == ([], BLOCKS)
    assert_equal(Embedder()(encoder, preprocessing, IMAGES), whole)
    assert_equal(embed(encoder, preprocessing, IMAGES), whole)


SLOW = """
import sys, time
from pathlib import Path
import numpy as np
import torch
from rcir.data import Preprocessing
from rcir.encoders import METHODS, EncoderConfig, batches, build_encoder, embedder

batches.CHUNK = {block}
torch.manual_seed(0)
encoder = build_encoder(EncoderConfig("btl", dim=8), 1, (8, 16)).eval()
images = np.random.default_rng(0).integers(0, 256, ({count}, 9, 17), np.uint8)
wait = lambda *_: time.sleep(0.5)
embedder.Embedder(folder=Path(sys.argv[1]), progress=wait)(encoder, Preprocessing(), images)
"""


def test_a_process_that_was_killed_is_continued_by_the_next(tmp_path):
    folder = tmp_path / "parts"
    code = SLOW.format(block=BLOCK, count=COUNT)
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)])
    deadline = time.monotonic() + 120
    while len(list(folder.glob("part-*"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = len(list(folder.glob("part-*")))
    assert 2 <= kept < len(BLOCKS)
    again = Counting(folder)
    assert_equal(again(IMAGES), embed(build(), Preprocessing(), IMAGES))
    assert len(again.found) == kept
    assert again.embedded == BLOCKS[kept:]


def other_encoder(images):
    return images, build(seed=1), Preprocessing()


def other_method(images):
    return images, build("deterministic"), Preprocessing()


def other_preprocessing(images):
    return images, build(), Preprocessing(mean=(0.5,))


def other_order(images):
    return images[::-1], build(), Preprocessing()


@pytest.mark.parametrize("kind", ["arrays", "paths"])
@pytest.mark.parametrize("change", [other_encoder, other_method, other_preprocessing, other_order])
def test_blocks_of_something_else_are_not_taken(change, kind, paths, tmp_path):
    images = IMAGES if kind == "arrays" else paths
    Counting(tmp_path / "parts")(images)
    changed, encoder, preprocessing = change(images)
    again = Counting(tmp_path / "parts")
    assert_equal(again(changed, encoder, preprocessing), embed(encoder, preprocessing, changed))
    assert (again.embedded, again.found) == (BLOCKS, [])


@pytest.mark.parametrize("kind", ["arrays", "files", "times"])
def test_only_the_block_of_a_changed_image_is_embedded_again(kind, paths, tmp_path):
    images = IMAGES.copy() if kind == "arrays" else paths
    Counting(tmp_path / "parts")(images)
    if kind == "arrays":
        images[120, 4, 5] ^= 1
    elif kind == "files":
        Image.fromarray(np.zeros((50, 50), np.uint8)).save(paths[120])
    else:
        os.utime(paths[120], ns=(1, 1))
    again = Counting(tmp_path / "parts")
    assert_equal(again(images), embed(build(), Preprocessing(), images))
    assert (again.embedded, again.found) == ([50], [50, 50, 50, 30])


def test_arrays_and_pictures_in_lists_are_told_by_their_pixels(tmp_path):
    images = [Image.fromarray(image) for image in IMAGES[:60]] + list(IMAGES[60:100, :8])
    Counting(tmp_path / "parts")(images)
    images[70] = images[70][::-1]
    again = Counting(tmp_path / "parts")
    assert_equal(again(images), embed(build(), Preprocessing(), images))
    assert (again.embedded, again.found) == ([50], [50])


@pytest.mark.parametrize("damage", [lambda all: all[:-100], lambda all: all[:7], lambda _: b""])
def test_a_damaged_block_is_embedded_again(damage, tmp_path):
    folder = tmp_path / "parts"
    Counting(folder)(IMAGES)
    part = sorted(folder.glob("part-*"), key=lambda path: path.stat().st_size)[-1]
    part.write_bytes(damage(part.read_bytes()))
    again, third = Counting(folder), Counting(folder)
    assert_equal(again(IMAGES), embed(build(), Preprocessing(), IMAGES))
    assert (again.embedded, len(again.found)) == ([50], 4)
    third(IMAGES)
    assert third.embedded == []


def test_what_is_kept_is_cleared_and_nothing_else(tmp_path):
    folder = tmp_path / "parts"
    embedder = Counting(folder).embedder
    embedder.clear()
    embedder(build(), Preprocessing(), IMAGES)
    (folder / ".part-abc.safetensors-def").write_bytes(b"of a process that was killed")
    embedder.clear()
    assert not folder.exists()
    embedder(build(), Preprocessing(), IMAGES)
    (folder / "thesis.txt").write_text("mine")
    embedder.clear()
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("fault", ["damaged", "missing"])
def test_a_picture_that_cannot_be_read_is_named(fault, paths, tmp_path):
    paths[120].unlink()
    if fault == "damaged":
        paths[120].write_bytes(b"no picture")
    again = Counting(tmp_path / "parts")
    with pytest.raises(InvalidImage, match=r"120\.png"):
        again(paths)
    assert again.embedded == [50, 50]


def test_no_images_are_refused():
    with pytest.raises(InvalidImage, match="there are no images"):
        Embedder()(build(), Preprocessing(), [])


def test_what_cannot_be_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidConfig, match="no CUDA device"):
        Embedder(use_gpu=True)
    with pytest.raises(InvalidConfig, match="num_workers is -1"):
        Embedder(num_workers=-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpu_of_this_process_embeds_and_the_encoder_stays_where_it_is():
    encoder = build()
    found = Embedder(use_gpu=True)(encoder, Preprocessing(), IMAGES)
    expected = embed(encoder, Preprocessing(), IMAGES)
    torch.testing.assert_close(found.vectors, expected.vectors, atol=1e-4, rtol=1e-3)
    assert found.vectors.device.type == next(encoder.parameters()).device.type == "cpu"


def test_arrays_fill_a_bounded_part_of_the_object_store():
    from rcir.encoders.replicas import _windows

    blocks = dict(enumerate(batches.blocks_of(IMAGES)))
    size = blocks[0].nbytes
    assert list(_windows(blocks, 2.5 * size)) == [[0, 1], [2, 3], [4]]
    assert list(_windows(blocks, 0)) == [[0], [1], [2], [3], [4]]
    assert list(_windows({3: ["a"], 5: ["b"]}, 0)) == [[3, 5]]
    lists = {number: list(block) for number, block in blocks.items()}
    assert list(_windows(lists, 2.5 * size)) == [[0, 1], [2, 3], [4]]


class TestOnRay:
    pytestmark = on_ray

    def test_replicas_give_what_one_process_gives(self, paths, tmp_path, capfd):
        import ray.data

        encoder, folder = build("mc-dropout"), tmp_path / "parts"
        shown = ray.data.DataContext.get_current().enable_progress_bars
        levels = [logging.getLogger(name).level for name in ("ray", "ray.data")]
        together = Counting(folder, num_workers=2)
        paths = [path.relative_to(Path.cwd()) for path in paths]  # not where the replicas are
        capfd.readouterr()
        assert_equal(together(paths, encoder), embed(encoder, Preprocessing(), paths))
        printed = capfd.readouterr()
        assert printed.out == ""
        # Ray's own remark on how it makes actors cannot be turned off.
        assert [line for line in printed.err.splitlines() if "core_worker.cc" not in line] == []
        assert sorted(together.embedded) == sorted(BLOCKS)
        assert ray.data.DataContext.get_current().enable_progress_bars == shown
        assert [logging.getLogger(name).level for name in ("ray", "ray.data")] == levels
        alone = Counting(folder)
        alone(paths, encoder)
        assert (alone.embedded, alone.found) == ([], BLOCKS)

    def test_a_replica_that_dies_is_replaced(self, tmp_path):
        died = tmp_path / "died"

        class Deadly(Preprocessing):
            """Ends the process at the third block, once."""

            def resized(self, images):
                if np.array_equal(images, IMAGES[100:150]) and not died.exists():
                    died.touch()
                    os._exit(1)
                return super().resized(images)

        found = Embedder(num_workers=2)(build(), Deadly(), IMAGES)
        assert died.exists()
        assert_equal(found, embed(build(), Preprocessing(), IMAGES))

    def test_a_picture_that_a_replica_cannot_read_is_named(self, paths, tmp_path):
        paths[120].write_bytes(b"no picture")
        with pytest.raises(InvalidImage, match=r"120\.png is not an image"):
            Embedder(num_workers=1)(build(), Preprocessing(), paths)

    def test_a_cluster_without_a_gpu_is_refused(self):
        with pytest.raises(InvalidConfig, match="no GPU"):
            Embedder(num_workers=1, use_gpu=True)(build(), Preprocessing(), IMAGES)
