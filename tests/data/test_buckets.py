"""Images, tables and vectors in a bucket are those of the same files in a local folder."""

from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from rcir import storage
from rcir.data.datasets.user_images import (
    list_pictures,
    read_class_folders,
    read_folder,
    read_table,
)
from rcir.data.images import read_capture_times, read_image
from rcir.data.repeats import digests
from rcir.data.vector_files import read_all_vectors, read_vectors, shard_name
from rcir.errors import DataUnavailable, InvalidData, InvalidImage
from rcir.storage import write_object
from tests.vectors import write_vectors

pytestmark = pytest.mark.distributed


def upload(folder, place):
    for path in folder.rglob("*"):
        if path.is_file():
            write_object(f"{place}/{path.relative_to(folder).as_posix()}", path)


@pytest.fixture
def photos(tmp_path):
    """Class folders with some files that are no pictures, and photographs with times."""
    rng, folder = np.random.default_rng(0), tmp_path / "photos"
    for number, ending in enumerate(("jpg", "png", "webp", "tif") * 3):
        path = folder / ("äpple" if number % 2 else "pear/conference") / f"{number} ?#.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif.get_ifd(0x8769)[0x9003] = f"2026:11:26 09:47:{number:02}"
        pixels = rng.integers(0, 256, (20 + number, 30, 3), np.uint8)
        Image.fromarray(pixels).save(path, exif=exif)
    for name in (".hidden/1.jpg", "@eaDir/1.jpg", "pear/notes.txt", "pear/.2.jpg"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    return folder


def test_class_folders(bucket, photos):
    place = Path(bucket) / "photos"
    upload(photos, place)
    here, there = list_pictures(photos), list_pictures(place)
    assert (there.ids, there.columns) == (here.ids, here.columns)
    assert [storage.as_text(path) for path in there.paths] == [
        f"{bucket}/photos/{i}" for i in here.ids
    ]
    for one, other in zip(here.paths, there.paths, strict=True):
        assert np.array_equal(read_image(one, 3), read_image(other, 3))
        assert np.array_equal(read_image(one, 3), read_image(storage.as_text(other), 3))
    assert (digests(here.paths) == digests(there.paths)).all()
    times = read_capture_times(here.paths)
    assert read_capture_times(there.paths) == times
    assert "2026-11-26 09:47:00" in times
    sources = [read_folder(Path("/data"), where) for where in (photos, storage.as_text(place))]
    assert sources[0].train.ids == sources[1].train.ids
    assert (
        read_class_folders(storage.as_text(place)).labels.tolist()
        == read_class_folders(photos).labels.tolist()
    )
    for missing in (list_pictures, read_class_folders):
        with pytest.raises(DataUnavailable, match=f"{bucket}/none"):
            missing(Path(bucket) / "none")


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_tables(bucket, photos, tmp_path, ending, absolute):
    place = Path(bucket) / "photos"
    upload(photos, place)
    ids = list_pictures(photos).ids
    names = [f"{bucket}/photos/{name}" if absolute else name for name in ids]
    labels = [name.split("/")[0] for name in ids]
    table = pyarrow.table({"path": names, "label": labels})
    file = tmp_path / f"table.{ending}"
    if ending == "parquet":
        parquet.write_table(table, file)
    else:
        file.write_text(
            "path,label\n"
            + "".join(f"{n},{label}\n" for n, label in zip(names, labels, strict=True))
        )
    there = place / file.name
    write_object(there, file)
    for where in {there, file if absolute else there}:  # a local table may name objects
        assert [storage.as_text(p) for p in list_pictures(where).paths] == [
            f"{bucket}/photos/{i}" for i in ids
        ]
        source = read_table(Path("/data"), where)
        assert sorted(source.train.ids + source.queries.ids) == sorted(names)
    write_object(there.with_name("wrong.csv"), b"path,label\nnone.jpg,x\n")
    with pytest.raises(DataUnavailable, match=r"none\.jpg"):
        list_pictures(there.with_name("wrong.csv"))


def test_a_prefix_is_not_listed_for_each_chunk_of_a_table(bucket, s3_server, tmp_path, monkeypatch):
    names = [f"{number}.jpg" for number in range(7)]
    for name in names:
        write_object(f"{bucket}/{name}", b"x")
    parquet.write_table(pyarrow.table({"path": names}), tmp_path / "table.parquet")
    write_object(f"{bucket}/table.parquet", tmp_path / "table.parquet")
    listing, counts = f"GET /{bucket.removeprefix('s3://')}", [0]
    for chunk in (100, 2):
        monkeypatch.setattr("rcir.data.manifest.CHUNK", chunk)
        assert list_pictures(Path(bucket) / "table.parquet").ids == names
        counts.append(s3_server.requests().count(listing) - counts[-1])
    assert counts[1] == counts[2]


def test_sources_that_are_read_from_local_folders_only_are_named(bucket):
    write_object(f"{bucket}/shards/0.tar", b"x")
    write_object(f"{bucket}/hub/dataset_dict.json", b"{}")
    for name in ("shards", "shards/0.tar", "hub"):
        with pytest.raises(InvalidData, match=f"{bucket}/{name} .*local folders"):
            list_pictures(Path(bucket) / name)


def test_unreadable_images_are_refused_and_an_absent_store_is_no_fault_of_theirs(
    bucket, photos, monkeypatch, tmp_path
):
    place = Path(bucket) / "1.jpg"
    with pytest.raises(InvalidImage, match=f"{bucket}/1.jpg"):
        read_image(place, 3)
    write_object(place, b"\xff\xd8\xff damaged")
    with pytest.raises(InvalidImage, match=f"{bucket}/1.jpg"):
        read_image(place, 3)
    monkeypatch.setattr(storage, "RETRY_S", 0.5)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(DataUnavailable, match="no answer"):
        read_image(place, 3)
    with pytest.raises(DataUnavailable, match="no answer"):
        read_capture_times([place])


def test_vectors(bucket, tmp_path):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(40, 8)).astype(np.float32)
    ids = [str(row) for row in range(40)]
    for folder in (tmp_path, Path(bucket) / "v"):
        write_vectors(folder / "all.parquet", vectors, ids, {"label": ids}, model="m")
        if folder is tmp_path:
            (folder / "shards").mkdir()
        for number in range(4):
            rows = slice(10 * number, 10 * number + 10)
            columns = {"label": ids[rows]}
            file = folder / "shards" / shard_name(number)
            write_vectors(file, vectors[rows], ids[rows], columns, model="m", shards=4)
        assert (read_vectors(folder / "all.parquet").vectors == vectors).all()
        table = read_all_vectors(folder / "shards")
        assert (table.vectors == vectors).all()
        assert (table.ids, table.model, table.columns) == (ids, "m", ("id", "vector", "label"))
    storage.delete_objects([Path(bucket) / "v/shards" / shard_name(3)])
    with pytest.raises(InvalidData, match="3 shards of 4"):
        read_all_vectors(Path(bucket) / "v/shards")
    with pytest.raises(DataUnavailable, match=f"{bucket}/none"):
        read_all_vectors(Path(bucket) / "none")
    write_object(f"{bucket}/it.npy", b"x")
    with pytest.raises(InvalidData, match="Parquet"):
        read_vectors(Path(bucket) / "it.npy")
    write_object(f"{bucket}/it.parquet", b"x")
    with pytest.raises(InvalidData, match=f"{bucket}/it"):
        read_vectors(Path(bucket) / "it.parquet")
