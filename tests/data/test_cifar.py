import io
import pickle
import tarfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.error import URLError

import numpy as np
import pytest
from torchvision.datasets import CIFAR10

from rcir.data.datasets import cifar
from rcir.data.datasets.cifar import read
from rcir.errors import DataUnavailable, InvalidData

FILES = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]


@pytest.fixture
def address(tmp_path):
    """Of a server of the files in `tmp_path`, on this machine."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def write(folder, n=20):
    """Six files laid out like the official ones, and what is in them: (n, 3, 32, 32), (n,)."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    contents = []
    for file in FILES:
        images = rng.integers(0, 256, (n, 3, 32, 32), np.uint8)
        labels = rng.integers(0, 10, n)
        with (folder / file).open("wb") as opened:
            for image, label in zip(images, labels, strict=True):
                opened.write(bytes([label]) + image.tobytes())
        contents.append((images, labels))
    return contents


def test_images_are_as_torchvision_reads_the_same_pixels(tmp_path, monkeypatch):
    contents = write(tmp_path / "cifar-10-batches-bin")
    source = read(tmp_path)
    # The Python version of the same records, read by torchvision, which transposes on its own.
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [file for file, _ in [*CIFAR10.train_list, *CIFAR10.test_list]]
    for name, (images, labels) in zip(names, contents, strict=True):
        batch = {"data": images.reshape(len(images), -1), "labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    for part, train in ((source.train, True), (source.queries, False)):
        expected = CIFAR10(str(tmp_path), train)
        np.testing.assert_array_equal(part.images, expected.data)
        assert part.labels.tolist() == expected.targets
        assert part.images.dtype == np.uint8
        assert part.labels.dtype == np.int64


def test_red_green_and_blue_are_the_last_axis(tmp_path):
    contents = write(tmp_path / "cifar-10-batches-bin")
    source = read(tmp_path)
    assert source.gallery == "train"
    assert source.train.images.shape == (100, 32, 32, 3)
    assert len(set(source.train.ids)) == 100
    assert (source.train.ids[21], source.queries.ids[3]) == ("train-00021", "test-00003")
    for channel in range(3):
        assert source.train.images[21, 4, 9, channel] == contents[1][0][1, channel, 4, 9]


@pytest.mark.parametrize("file", ["data_batch_3.bin", "test_batch.bin"])
def test_a_missing_file_says_where_it_belongs(tmp_path, file, monkeypatch):
    with pytest.raises(DataUnavailable, match=r"data_batch_1\.bin is not there: .*data\.download"):
        read(tmp_path)
    write(tmp_path / "cifar-10-batches-bin")
    (tmp_path / "cifar-10-batches-bin" / file).unlink()
    with pytest.raises(DataUnavailable, match=f"{file} is not there"):
        read(tmp_path)
    asked = []

    def fail(url, root, **options):
        asked.append(url)
        raise URLError("no network")

    monkeypatch.setattr(cifar, "download_and_extract_archive", fail)
    with pytest.raises(DataUnavailable, match=r"cannot be fetched .*no network"):
        read(tmp_path, download=True)
    assert asked == [cifar.URL]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (bytes(3073 * 2 - 1), "has 6145 bytes, not a multiple of 3073"),
        (b"", "has 0 bytes"),
        (bytes([10]) + bytes(3072), "has a label 10"),
    ],
    ids=["cut short", "empty", "another label"],
)
def test_a_damaged_file_is_refused(tmp_path, content, said):
    write(tmp_path / "cifar-10-batches-bin")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(InvalidData, match=rf"data_batch_2\.bin {said}.*fetch it again"):
        read(tmp_path)


def test_the_archive_is_fetched_and_unpacked(tmp_path, monkeypatch, address):
    contents = write(tmp_path / "made" / "cifar-10-batches-bin")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(tmp_path / "made" / "cifar-10-batches-bin", "cifar-10-batches-bin")
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(packed.getvalue())
    monkeypatch.setattr(cifar, "URL", f"{address}/cifar-10-binary.tar.gz")
    with pytest.raises(DataUnavailable, match="cannot be fetched"):
        read(tmp_path / "there", download=True)  # another MD5 than the official one
    assert not (tmp_path / "there" / "cifar-10-batches-bin").exists()
    monkeypatch.setattr(cifar, "MD5", None)
    source = read(tmp_path / "there", download=True)
    assert source.queries.labels.tolist() == contents[5][1].tolist()
    monkeypatch.setattr(cifar, "URL", f"{address}/nothing")
    assert len(read(tmp_path / "there", download=True).train) == 100  # nothing is fetched again
    with pytest.raises(DataUnavailable, match="cannot be fetched"):
        read(tmp_path / "elsewhere", download=True)
