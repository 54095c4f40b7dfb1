"""Folders of immutable versions."""

import errno
import multiprocessing
import shutil

import pytest

from rcir.errors import CorruptRetriever, SaveConflict
from rcir.store.folder import (
    checksums,
    current_version,
    read_current,
    save_version,
    verified,
    write_manifest,
)

FORK = multiprocessing.get_context("fork")


def save(folder, content, loaded=None):
    def fill(version):
        (version / "inner").mkdir()
        for name in ("one", "inner/two"):
            (version / name).write_text(content)
        write_manifest(version, checksums(version))

    return save_version(folder, fill, loaded)


def load(folder):
    def read(version):
        with verified(version, {"one"}) as files:
            (content,) = {(version / name).read_text() for name in files}
            return content

    return read_current(folder, read)


def contents(folder):
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("before", ["first", None])
def test_a_save_that_is_killed_at_any_step_leaves_the_old_or_the_new_version(
    tmp_path, kill, before
):
    folder, steps, seen, killed = tmp_path / "it", 0, [], True
    while killed:
        shutil.rmtree(folder, ignore_errors=True)
        if before:
            save(folder, before)
        killed = kill(steps, lambda: save(folder, "second"))
        seen.append(load(folder) if (folder / "current.json").exists() else None)
        save(folder, "third")
        assert load(folder) == "third"
        assert {path.name for path in folder.iterdir()} == {"current.json", "lock", "versions"}
        assert len(list((folder / "versions").iterdir())) <= 2
        steps += 1
    changes = [content for number, content in enumerate(seen) if content not in seen[:number]]
    assert changes == [before, "second"]
    assert steps > 10


def test_of_processes_that_change_one_version_one_saves_and_the_others_are_told(tmp_path):
    save(tmp_path / "it", "first")
    version, outcomes = current_version(tmp_path / "it").resolve(), FORK.SimpleQueue()

    def write(content):
        try:
            save(tmp_path / "it", content, version)
        except SaveConflict:
            content = None
        outcomes.put(content)

    processes = [FORK.Process(target=write, args=(str(number),)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    saved = {outcomes.get() for _ in processes}
    assert saved == {None, load(tmp_path / "it")}


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json", "current.json", "versions/one/a"])
def test_a_folder_with_other_content_is_left_alone(tmp_path, name):
    target = tmp_path / "mine"
    (target / name).parent.mkdir(parents=True)
    (target / name).write_text('{"name": "a web page"}')
    before = contents(target)
    for place in (target, target / name):
        with pytest.raises(CorruptRetriever, match="left alone"):
            save(place, "new")
    assert contents(target) == before
    assert list(tmp_path.iterdir()) == [target]


def test_a_version_is_complete_by_itself_and_never_replaced(tmp_path):
    version = save(tmp_path / "it", "first")
    copy = shutil.copytree(version, tmp_path / "copy")
    assert load(copy) == load(version) == "first"
    for folder, word in ((version, "never changes"), (copy, "left alone")):
        before = contents(folder)
        with pytest.raises(CorruptRetriever, match=word):
            save(folder, "second")
        assert contents(folder) == before


def test_a_save_that_fails_changes_nothing(tmp_path):
    save(tmp_path / "it", "first")
    before = contents(tmp_path / "it")

    def fill(version):
        (version / "one").write_text("second")
        raise OSError(errno.ENOSPC, "no space left on device", "a file")

    for target in (tmp_path / "it", tmp_path / "new"):
        with pytest.raises(OSError, match="no space left"):
            save_version(target, fill)
    assert contents(tmp_path / "it") == before
    assert list(contents(tmp_path / "new")) == ["lock"]
