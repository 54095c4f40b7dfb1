"""Helpers that write small data sets laid out like the published ones."""

import gzip
import hashlib

import numpy as np
from PIL import Image

from rcir.data import DATASETS


def read(name, root, **options):
    """Read a data set as published."""
    return DATASETS[name].read(root, **options)


def touch(folder, names):
    """Create empty files; readers of image files list them and decode nothing."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def write_pictures(folder, names):
    """Write small pictures, no two alike."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.full((7, 9, 3), (number % 256, number // 256, 99), np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def replace_in(path, old, new):
    """Replace `old` in a text file, or the whole text where `old` is None."""
    text = path.read_text()
    assert old is None or old in text
    path.write_text(new if old is None else text.replace(old, new, 1))


def cells(values):
    """Return a MATLAB cell array, 1 x n."""
    array = np.empty((1, len(values)), object)
    array[0] = values
    return array


def labels_of(part):
    return dict(zip(part.ids, part.labels.tolist(), strict=True))


MNIST_TRAIN = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
MNIST_TEST = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")


def idx(values):
    """Return a gzip-compressed IDX file of bytes."""
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    return gzip.compress(header + values.tobytes(), compresslevel=1, mtime=0)


def write_mnist(folder, n_train=60, n_test=40):
    """Write four small IDX files; return their contents, and (name, MD5) as torchvision has them.

    No pixel is black, and the ten digits are equally frequent.
    """
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    contents, resources = {}, []
    for (images_file, labels_file), n in ((MNIST_TRAIN, n_train), (MNIST_TEST, n_test)):
        contents[images_file] = rng.integers(1, 256, (n, 28, 28), np.uint8)
        contents[labels_file] = rng.permutation(np.arange(n) % 10).astype(np.uint8)
    for file, values in contents.items():
        (folder / file).write_bytes(idx(values))
        resources.append((file, hashlib.md5((folder / file).read_bytes()).hexdigest()))
    return contents, resources
