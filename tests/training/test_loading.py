"""Batches of images for the device: the right images, in order, each read once."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image

from rcir.data import ImageSet, Preprocessing
from rcir.errors import InvalidImage
from training.images import load_batches

CPU = torch.device("cpu")
SIZE = Preprocessing(size=(6, 5))
BATCHES = [np.array(rows) for rows in ([3, 0, 3, 8], [1], [9, 8, 7, 6, 5, 5, 5], [2, 2], [0, 4])]


def pictures(n=10):
    """n different images of one size."""
    return np.random.default_rng(2).integers(0, 256, (n, 12, 9), dtype=np.uint8)


class Recorded(Sequence):
    """Images that record which thread reads which row."""

    def __init__(self, images):
        self.images, self.read = images, []

    def __len__(self):
        return len(self.images)

    def __getitem__(self, row):
        self.read.append((row, threading.current_thread()))
        return self.images[row]


def image_set(images):
    return ImageSet(images, np.zeros(len(images), np.int64), [str(i) for i in range(len(images))])


def files(folder, images):
    """Paths of PNG files."""
    paths = [folder / f"{i}.png" for i in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image).save(path)
    return paths


def test_every_row_is_the_preprocessed_image(tmp_path):
    for images in (pictures(), list(pictures()), files(tmp_path, pictures())):
        expected = [SIZE.resized([image])[0] for image in images]
        batches = list(load_batches(image_set(images), SIZE, iter(BATCHES), CPU))
        for batch, rows in zip(batches, BATCHES, strict=True):
            assert (batch.dtype, batch.device) == (torch.uint8, CPU)
            assert torch.equal(batch, torch.stack([expected[row] for row in rows]))
    assert list(load_batches(image_set(images), SIZE, [], CPU)) == []


def test_an_image_that_a_batch_names_twice_is_read_once_in_another_thread():
    images = Recorded(list(pictures()))
    list(load_batches(image_set(images), SIZE, BATCHES, CPU))
    rows = [row for row, _ in images.read]
    assert rows == [row for batch in BATCHES for row in sorted(set(batch.tolist()))]
    assert threading.current_thread() not in {thread for _, thread in images.read}


def test_an_image_that_cannot_be_read_is_refused_when_its_batch_comes(tmp_path):
    paths = files(tmp_path, pictures())
    paths[6].write_bytes(paths[6].read_bytes()[:60])
    batches = load_batches(image_set(paths), SIZE, BATCHES, CPU)
    assert [len(next(batches)) for _ in range(2)] == [4, 1]
    with pytest.raises(InvalidImage, match=r"6\.png"):
        next(batches)
    assert list(batches) == []


def test_stopping_early_reads_a_few_batches_ahead_and_leaves_no_thread():
    before, images = set(threading.enumerate()), Recorded(list(pictures(100)))
    batches = load_batches(image_set(images), SIZE, np.arange(100).reshape(50, 2), CPU)
    next(batches)
    assert set(threading.enumerate()) > before
    batches.close()
    assert 2 <= len(images.read) <= 10
    assert set(threading.enumerate()) == before
