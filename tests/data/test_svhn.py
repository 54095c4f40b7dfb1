import hashlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
from scipy.io import savemat
from torchvision.datasets import SVHN

from rcir.data.datasets import svhn
from rcir.data.datasets.svhn import read
from rcir.errors import DataUnavailable, InvalidData


@pytest.fixture
def address(tmp_path):
    """Of a server of the files in `tmp_path`, on this machine."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def files(tmp_path, monkeypatch, address):
    """Files laid out like the official ones, their checksums taken for the official ones."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "svhn"
    folder.mkdir()
    known, lists = {}, dict(SVHN.split_list)
    for name, n in (("train", 30), ("test", 20)):
        images = rng.integers(0, 256, (32, 32, 3, n), np.uint8)
        labels = rng.permutation(np.arange(n) % 10 + 1).astype(np.uint8)
        path = folder / f"{name}_32x32.mat"
        savemat(path, {"X": images, "y": labels[:, None]})
        checksum = hashlib.md5(path.read_bytes()).hexdigest()
        known[name] = (f"{address}/there/{path.name}", path.name, checksum)
        lists[name] = list(known[name])
    monkeypatch.setattr(svhn, "FILES", known)
    monkeypatch.setattr(SVHN, "split_list", lists)
    return tmp_path


def test_the_checksums_are_those_that_torchvision_knows():
    assert svhn.FILES["train"][1:] == ("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373")
    assert svhn.FILES["test"][1:] == ("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3")


def test_images_and_labels_are_torchvisions(files):
    source = read(files)
    assert source.gallery == "train"
    for part, split in ((source.train, "train"), (source.queries, "test")):
        expected = SVHN(str(files / "svhn"), split)
        np.testing.assert_array_equal(part.images, expected.data.transpose(0, 2, 3, 1))
        assert part.labels.tolist() == expected.labels.tolist()
        assert set(part.labels.tolist()) == set(range(10))
        assert part.images.dtype == np.uint8
        assert part.labels.dtype == np.int64
    assert source.train.images.shape == (30, 32, 32, 3)
    assert (source.train.ids[29], source.queries.ids[0]) == ("train-00029", "test-00000")


def test_a_damaged_file_is_refused(files):
    path = files / "svhn" / "test_32x32.mat"
    content = path.read_bytes()
    for harmed in (content[:-1], b"", content[:200] + b"?" + content[201:]):
        path.write_bytes(harmed)
        with pytest.raises(InvalidData, match=r"test_32x32\.mat is damaged.*fetch it again"):
            read(files, download=True)


def test_what_is_not_there_is_said_or_fetched(files):
    (files / "there").mkdir()
    with pytest.raises(DataUnavailable, match=r"train_32x32\.mat is not there: .*data\.download"):
        read(files / "no" / "where")
    path = files / "svhn" / "test_32x32.mat"
    before = read(files)
    moved = path.rename(files / "there" / path.name)
    with pytest.raises(DataUnavailable, match=r"test_32x32\.mat is not there"):
        read(files)
    np.testing.assert_array_equal(read(files, download=True).queries.images, before.queries.images)
    path.unlink()
    moved.unlink()
    with pytest.raises(DataUnavailable, match=r"test_32x32\.mat cannot be fetched"):
        read(files, download=True)
