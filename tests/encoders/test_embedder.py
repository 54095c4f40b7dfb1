"""Embedding many images: on several workers, and resumed after an interruption."""

import os
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from rcir.data import Preprocessing
from rcir.encoders import batches
from rcir.encoders.batches import embed
from rcir.encoders.embedder import Embedder
from rcir.errors import InvalidConfig, InvalidImage, WorkersLost
from rcir.terminal import Work
from tests.encoders import small
from tests.methods import config_of

COUNT, BLOCK = 110, 25
BLOCKS = [25, 25, 25, 25, 10]
IMAGES = np.random.default_rng(0).integers(0, 256, (COUNT, 9, 17), np.uint8)

on_ray = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(batches, "BLOCK_SIZE", BLOCK)


def build(method="btl", seed=0):
    return small.build(config_of(method, dim=8), seed=seed).eval()


@pytest.fixture
def paths(tmp_path):
    """Images of several sizes and file formats."""
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
    """An embedder that records the blocks it embedded and those it reused."""

    def __init__(self, folder, **options):
        self.embedded, self.reused = [], []
        self.embedder = Embedder(folder=folder, **options)

    def advance(self, images, reused=False):
        (self.reused if reused else self.embedded).append(images)

    def __call__(self, images, encoder=None, preprocessing=None):
        with patch.object(
            Work, "advance", lambda _, images, **reused: self.advance(images, **reused)
        ):
            return self.embedder(encoder or build(), preprocessing or Preprocessing(), images)


def assert_close(embedding, expected):
    torch.testing.assert_close(embedding.tensors, expected.tensors, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("method", ["deterministic", "btl", "hib"])
def test_blocks_are_stored_and_reused(method, tmp_path):
    encoder, preprocessing = build(method), Preprocessing()
    with torch.inference_mode():
        whole = encoder.embed(preprocessing(IMAGES))
    first, second = Counting(tmp_path / "parts"), Counting(tmp_path / "parts")
    assert_close(first(IMAGES, encoder), whole)
    assert (first.embedded, first.reused) == (BLOCKS, [])
    assert_close(second(IMAGES, encoder), whole)
    assert (second.embedded, second.reused) == ([], BLOCKS)
    assert_close(Embedder()(encoder, preprocessing, IMAGES), whole)
    assert_close(embed(encoder, preprocessing, IMAGES), whole)


def test_work_of_a_process_killed_at_any_step_is_resumed(kill, tmp_path):
    expected = embed(build(), Preprocessing(), IMAGES)
    n_reused = []
    for steps in range(100):
        folder = tmp_path / f"parts{steps}"
        if not kill(steps, lambda folder=folder: Counting(folder)(IMAGES)):
            break
        again = Counting(folder)
        assert_close(again(IMAGES), expected)
        assert again.reused + again.embedded == BLOCKS
        n_reused.append(len(again.reused))
    assert n_reused == sorted(n_reused)
    assert {0, 1, 2, 3, 4} <= set(n_reused)


CHANGES = {
    "encoder": {"encoder": partial(build, seed=1)},
    "method": {"encoder": partial(build, "deterministic")},
    "preprocessing": {"preprocessing": partial(Preprocessing, mean=(0.5,))},
    "order": {},
}


@pytest.mark.parametrize(
    ("change", "kind"), [*((change, "arrays") for change in CHANGES), ("order", "paths")]
)
def test_blocks_of_something_else_are_not_reused(change, kind, request, tmp_path):
    images = IMAGES if kind == "arrays" else request.getfixturevalue("paths")
    Counting(tmp_path / "parts")(images)
    made = {"encoder": build, "preprocessing": Preprocessing} | CHANGES[change]
    encoder, preprocessing = made["encoder"](), made["preprocessing"]()
    images = images[::-1] if change == "order" else images
    again = Counting(tmp_path / "parts")
    assert_close(again(images, encoder, preprocessing), embed(encoder, preprocessing, images))
    assert (again.embedded, again.reused) == (BLOCKS, [])


@pytest.mark.parametrize("kind", ["arrays", "lists", "files", "times"])
def test_only_the_block_of_a_changed_image_is_embedded_again(kind, paths, tmp_path):
    images = paths
    if kind == "arrays":
        images = IMAGES.copy()
    elif kind == "lists":
        images = [*map(Image.fromarray, IMAGES[:60]), *IMAGES[60:, :8]]
    Counting(tmp_path / "parts")(images)
    if kind == "files":
        Image.fromarray(np.zeros((50, 50), np.uint8)).save(paths[60])
    elif kind == "times":
        os.utime(paths[60], ns=(1, 1))
    else:
        images[60] = images[60][::-1]
    again = Counting(tmp_path / "parts")
    assert_close(again(images), embed(build(), Preprocessing(), images))
    assert (again.embedded, again.reused) == ([25], [25, 25, 25, 10])


@pytest.mark.parametrize("length", [-100, 0])
def test_a_truncated_block_is_embedded_again(length, tmp_path):
    folder = tmp_path / "parts"
    Counting(folder)(IMAGES)
    part = sorted(folder.glob("part-*"), key=lambda path: path.stat().st_size)[-1]
    part.write_bytes(part.read_bytes()[:length])
    again, third = Counting(folder), Counting(folder)
    assert_close(again(IMAGES), embed(build(), Preprocessing(), IMAGES))
    assert (again.embedded, len(again.reused)) == ([25], 4)
    third(IMAGES)
    assert third.embedded == []


def test_clearing_removes_stored_blocks_and_nothing_else(tmp_path):
    folder = tmp_path / "parts"
    embedder = Counting(folder).embedder
    embedder.clear()
    embedder(build(), Preprocessing(), IMAGES)
    (folder / ".part-abc.safetensors-def").write_bytes(b"of a killed process")
    embedder.clear()
    assert not folder.exists()
    embedder(build(), Preprocessing(), IMAGES)
    (folder / "thesis.txt").write_text("mine")
    embedder.clear()
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("fault", ["damaged", "missing"])
def test_an_unreadable_image_is_named(fault, paths, tmp_path):
    paths[60].unlink()
    if fault == "damaged":
        paths[60].write_bytes(b"not an image")
    again = Counting(tmp_path / "parts")
    with pytest.raises(InvalidImage, match=r"60\.png"):
        again(paths)
    assert again.embedded == [25, 25]


def test_invalid_options_and_no_images_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidImage, match="no images"):
        Embedder()(build(), Preprocessing(), [])
    with pytest.raises(InvalidConfig, match="CUDA"):
        Embedder(use_gpu=True)
    with pytest.raises(InvalidConfig, match="num_workers"):
        Embedder(num_workers=-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_embedding_on_the_gpu_leaves_the_encoder_on_the_cpu():
    encoder = build()
    found = Embedder(use_gpu=True)(encoder, Preprocessing(), IMAGES)
    expected = embed(encoder, Preprocessing(), IMAGES)
    torch.testing.assert_close(found.vectors, expected.vectors, atol=1e-4, rtol=1e-3)
    assert found.vectors.device.type == next(encoder.parameters()).device.type == "cpu"


class TestOnRay:
    pytestmark = on_ray

    def test_workers_give_what_one_process_gives(self, paths, tmp_path, capfd):
        encoder, folder = build("mc-dropout"), tmp_path / "parts"
        workers = Counting(folder, num_workers=2)
        paths = [path.relative_to(Path.cwd()) for path in paths]  # workers run elsewhere
        capfd.readouterr()
        assert_close(workers(paths, encoder), embed(encoder, Preprocessing(), paths))
        assert capfd.readouterr().out == ""
        assert sorted(workers.embedded) == sorted(BLOCKS)
        alone = Counting(folder)
        alone(paths, encoder)
        assert (alone.embedded, alone.reused) == ([], BLOCKS)

    def test_another_encoder_and_an_unreadable_image(self, tmp_path):
        embedder = Embedder(num_workers=2)
        encoder = build("deterministic", seed=1)
        assert_close(
            embedder(encoder, Preprocessing(), IMAGES), embed(encoder, Preprocessing(), IMAGES)
        )
        with pytest.raises(InvalidImage, match="missing"):
            embedder(encoder, Preprocessing(), [*IMAGES, tmp_path / "missing.png"])

    def test_a_worker_that_dies_is_replaced(self, tmp_path):
        died = tmp_path / "died"

        class Deadly(Preprocessing):
            """Ends the process at the third block, once."""

            def resized(self, images):
                if np.array_equal(images, IMAGES[50:75]) and not died.exists():
                    died.touch()
                    os._exit(1)
                return super().resized(images)

        embedding = Embedder(num_workers=2)(build(), Deadly(), IMAGES)
        assert died.exists()
        assert_close(embedding, embed(build(), Preprocessing(), IMAGES))

    def test_a_block_that_ends_every_worker_is_named(self, paths, tmp_path):
        class Deadly(Preprocessing):
            """Ends each process that gets the last block."""

            def resized(self, images):
                if len(images) == BLOCKS[-1]:
                    (tmp_path / f"died-{os.getpid()}").touch()
                    os._exit(1)
                return super().resized(images)

        counting = Counting(tmp_path / "parts", num_workers=2)
        with pytest.raises(WorkersLost, match=r"10 images, .*100\.png to .*109\.jpg"):
            counting(paths, preprocessing=Deadly())
        assert len(list(tmp_path.glob("died-*"))) == 4  # MAX_DEATHS
        assert set(counting.embedded) == {25}

    def test_a_cluster_without_a_gpu_is_refused(self):
        with pytest.raises(InvalidConfig, match="GPU"):
            Embedder(num_workers=1, use_gpu=True)(build(), Preprocessing(), IMAGES)
