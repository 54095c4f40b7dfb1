"""Folders of immutable versions in a bucket, on a real S3 server."""

import json
import multiprocessing
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rcir.errors import CorruptRetriever, NoRetriever, SaveConflict
from rcir.storage import list_objects, read_object, write_object
from rcir.store import folder as store
from rcir.store.folder import check_place, current_version, read_manifest
from tests.store.test_folder import load, save

pytestmark = pytest.mark.distributed
SPAWN = multiprocessing.get_context("spawn")


def names(folder):
    return {info.name for info in list_objects(folder)}


def versions(folder):
    return {name.split("/")[1] for name in names(folder) if name.startswith("versions/")}


def test_versions_replace_each_other_and_are_downloaded_once(bucket, s3_server, monkeypatch):
    folder = Path(bucket) / "it"
    with pytest.raises(NoRetriever, match=f"{bucket}/it"):
        load(folder)
    first = save(folder, "first")
    assert load(folder) == "first"
    second = save(folder, "second", first)
    assert load(folder) == "second"
    save(folder, "third", second)
    assert load(folder) == "third"
    assert len(versions(folder)) == 2  # the present and the previous one
    with pytest.raises(SaveConflict, match=f"{bucket}/it"):
        save(folder, "lost", second)
    assert load(folder) == "third"

    monkeypatch.setenv("RCIR_CACHE", os.environ["RCIR_CACHE"] + "-2")
    seen = len(s3_server.requests())
    assert load(folder) == "third"
    downloaded = s3_server.requests()[seen:]
    assert sum("/versions/" in line for line in downloaded) == 3  # two files and their manifest
    seen = len(s3_server.requests())
    assert load(folder) == "third"
    manifest = read_manifest(folder)
    pointer = f"GET /{bucket.removeprefix('s3://')}/it/current.json"
    assert s3_server.requests()[seen:] == [pointer] * 2
    place = folder / "versions" / current_version(folder).name / "manifest.json"
    assert manifest == read_object(place)[0]


def test_what_is_no_retriever_is_left_alone(bucket):
    folder = Path(bucket) / "it"
    version = save(folder, "first")
    with pytest.raises(CorruptRetriever, match="a version of a retriever"):
        check_place(folder / "versions" / version.name)
    write_object(folder / "notes.txt", b"mine")
    with pytest.raises(CorruptRetriever, match="left alone"):
        save(folder, "second")
    assert load(folder) == "first"


def test_a_changed_object_is_refused_until_it_is_mended(bucket, monkeypatch):
    folder = Path(bucket) / "it"
    version = save(folder, "first")
    place = folder / "versions" / version.name / "one"
    for wrong in (b"other", b""):
        monkeypatch.setenv("RCIR_CACHE", os.environ["RCIR_CACHE"] + "-")
        write_object(place, wrong)
        with pytest.raises(CorruptRetriever, match=f"{bucket}/it/versions/.*/one"):
            load(folder)
        write_object(place, b"first")
        assert load(folder) == "first"
    (current_version(folder) / "one").write_text("damaged in the cache")
    with pytest.raises(CorruptRetriever):
        load(folder)
    assert load(folder) == "first"
    for content in (b"{", b'{"format": 1}', b"\xff", b'{"format": 4, "version": "x"}'):
        write_object(folder / "current.json", content)
        with pytest.raises(CorruptRetriever, match=r"damaged|format"):
            load(folder)


@pytest.mark.parametrize("name", ["../../../escaped", "/tmp/rcir-escaped"])
def test_a_version_names_no_file_outside_of_it(bucket, name):
    folder, number = Path(bucket) / "it", store.FORMAT
    pointer = {"format": number, "version": "20260101T000000Z-00000000", "previous": None}
    write_object(folder / "current.json", json.dumps(pointer).encode())
    manifest = json.dumps({"format": number, "files": {name: "0"}}).encode()
    write_object(folder / "versions" / pointer["version"] / "manifest.json", manifest)
    with pytest.raises(CorruptRetriever, match="escaped"):
        load(folder)
    assert not Path("/tmp/rcir-escaped").exists()


def _save(folder, content, loaded):
    try:
        return save(folder, content, loaded)
    except SaveConflict:
        return None


def test_one_of_several_writers_wins_and_nothing_is_lost(bucket):
    folder = Path(bucket) / "it"
    present, history = save(folder, "0"), ["0"]
    with ThreadPoolExecutor(3) as threads, SPAWN.Pool(2) as processes:
        for turn in range(5):
            contents = [f"{turn} {writer}" for writer in range(5)]
            started = [threads.submit(_save, folder, text, present).result for text in contents[:3]]
            started += [
                processes.apply_async(_save, (folder, text, present)).get for text in contents[3:]
            ]
            won = {text: one() for text, one in zip(contents, started, strict=True)}
            (winner,) = [text for text, version in won.items() if version is not None]
            assert load(folder) == winner
            assert len(versions(folder)) == 2
            present = won[winner]
            history.append(winner)
    assert len(history) == 6


def _save_again_and_again(folder, started):
    started.set()
    for number in range(1000):
        save(folder, f"{number}")


@pytest.mark.slow
def test_a_killed_writer_leaves_a_loadable_retriever(bucket, monkeypatch):
    folder, rng = Path(bucket) / "it", random.Random(0)
    save(folder, "first")
    for _ in range(8):
        started = SPAWN.Event()
        writer = SPAWN.Process(target=_save_again_and_again, args=(folder, started))
        writer.start()
        started.wait()
        time.sleep(rng.uniform(0, 0.5))
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert load(folder).isalnum()
        save(folder, "mine")
        assert load(folder) == "mine"
    _, abandoned = save(folder, "last"), versions(folder)
    # The next writer deletes what killed ones left, once it is old.
    monkeypatch.setattr(store, "ABANDONED_AFTER", store.ABANDONED_AFTER * -1)
    save(folder, "after a day")
    assert len(abandoned) >= len(versions(folder)) == 2
    assert load(folder) == "after a day"
