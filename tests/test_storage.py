"""Objects in buckets, on a real S3 server."""

import json
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rcir import storage
from rcir.errors import DataUnavailable, InvalidConfig, SaveConflict
from rcir.storage import (
    NEW,
    delete_objects,
    download,
    is_folder,
    list_objects,
    open_file,
    read_object,
    stat_object,
    write_object,
)

pytestmark = pytest.mark.distributed
SPAWN = multiprocessing.get_context("spawn")


def test_objects_are_written_listed_and_read(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "IN_MEMORY", 10)
    names = ["a/1.jpg", "a/b/ä ?#%20.jpg", "a.b/3.jpg", "top"]
    contents = {name: os.urandom(size) for name, size in zip(names, (0, 5, 100, 9), strict=True)}
    for name, content in contents.items():
        write_object(Path(bucket) / name, content)
    big = tmp_path / "big"
    big.write_bytes(os.urandom(12 << 20))  # in several parts
    write_object(f"{bucket}/big", big)
    contents["big"] = big.read_bytes()

    infos = list_objects(bucket)
    assert {info.name: info.size for info in infos} == {n: len(c) for n, c in contents.items()}
    assert [info.name for info in list_objects(f"{bucket}/a")] == ["1.jpg", "b/ä ?#%20.jpg"]
    assert [info.name for info in list_objects(f"{bucket}/a/", deep=False)] == ["1.jpg"]
    assert is_folder(Path(bucket) / "a")
    assert not is_folder(Path(bucket) / "to")
    for info in infos:
        place = f"{bucket}/{info.name}"
        content, state = read_object(place)
        assert (content, json.loads(state)["e_tag"]) == (contents[info.name], info.etag)
        assert stat_object(place).etag == info.etag
        with open_file(place) as file:
            assert file.read() == contents[info.name]
        download(place, tmp_path / "copy" / info.name)
        assert (tmp_path / "copy" / info.name).read_bytes() == contents[info.name]
    delete_objects([f"{bucket}/top", f"{bucket}/missing"])
    assert "top" not in [info.name for info in list_objects(bucket)]


def test_a_missing_object_or_bucket_is_named(bucket, tmp_path):
    for place in (f"{bucket}/none", "s3://no-such-bucket/none"):
        for read in (stat_object, read_object, lambda place: download(place, tmp_path / "x")):
            with pytest.raises(FileNotFoundError, match=place):
                read(place)
    for call in (
        list_objects,
        lambda p: is_folder(Path(p)),
        lambda place: write_object(f"{place}/x", b""),
    ):
        with pytest.raises(DataUnavailable, match="NoSuchBucket"):
            call("s3://no-such-bucket")
    for wrong in ("s3:///x", f"{bucket}/a/../b", f"{bucket}/a//b"):
        with pytest.raises(InvalidConfig, match="s3:"):
            read_object(wrong)


def _replace(place, etag, content):
    try:
        write_object(place, content, etag)
    except SaveConflict:
        return False
    return True


def test_one_of_several_writers_wins(bucket):
    place, etag = f"{bucket}/it", NEW
    with ThreadPoolExecutor(4) as threads, SPAWN.Pool(2) as processes:
        for turn in range(10):
            contents = [f"{turn} {writer}".encode() for writer in range(6)]
            started = [threads.submit(_replace, place, etag, content) for content in contents[:4]]
            started += [
                processes.apply_async(_replace, (place, etag, content)) for content in contents[4:]
            ]
            won = [one.result() if hasattr(one, "result") else one.get() for one in started]
            content, etag = read_object(place)
            assert [written for written, wins in zip(contents, won, strict=True) if wins] == [
                content
            ]


def test_a_store_that_does_not_answer_is_asked_again_then_named(bucket, monkeypatch, tmp_path):
    from tests.s3_server import Server

    server = Server(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.environment["AWS_ENDPOINT_URL"])
    place = f"{server.bucket()}/it"
    write_object(place, b"it")
    server.stop()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(is_folder, Path(place))
        time.sleep(2)
        server.start()
        assert server.bucket()
        with pytest.raises(DataUnavailable, match="NoSuchBucket"):  # an answer: it is empty now
            reading.result()
    server.stop()
    monkeypatch.setattr(storage, "RETRY_S", 1)
    started = time.monotonic()
    with pytest.raises(DataUnavailable, match="no answer") as refused:
        read_object(place)
    assert time.monotonic() - started < 20
    assert "secret" not in str(refused.value)


def test_wrong_credentials_are_not_shown(bucket, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://user:password@127.0.0.1:9")
    monkeypatch.setattr(storage, "RETRY_S", 0)
    with pytest.raises(DataUnavailable) as refused:
        read_object(f"{bucket}/it")
    assert "password" not in str(refused.value)


def test_an_object_that_is_replaced_while_it_is_read_is_not_mixed(bucket):
    place = f"{bucket}/it"
    write_object(place, b"a" * 300_000)

    def read_both():
        with open_file(place, lazily=True) as file:
            yield file.read(3)
            file.seek(200_000)
            yield file.read(3)

    parts = read_both()
    assert next(parts) == b"aaa"
    write_object(place, b"b" * 300_000)
    with pytest.raises(DataUnavailable, match="replaced"):
        next(parts)


def test_a_conditional_write_states_the_generation_on_google_cloud(bucket, monkeypatch):
    """Its interface compares generations, and no ETags."""
    seen = []

    class Store(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(b"it")

        def do_PUT(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            seen.append(self.headers["x-goog-if-generation-match"])
            self.answer(b"")

        def answer(self, content):
            self.send_response(200)
            for name, value in [("ETag", '"e"'), ("x-goog-generation", "17")]:
                self.send_header(name, value)
            self.send_header("Last-Modified", "Sun, 29 Nov 2026 00:00:00 GMT")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Store) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever)
        key = {"gcs_base_url": f"http://127.0.0.1:{server.server_port}", "disable_oauth": True}
        key |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
        try:
            content, state = read_object("gs://a-bucket/it")
            write_object("gs://a-bucket/it", content, state)
        finally:
            server.shutdown()
    assert seen == ["17"]
