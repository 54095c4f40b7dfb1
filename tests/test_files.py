"""Files and folders are written as a whole or not at all: kills at every file-system step."""

import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from rcir.files import is_dead, owner, remove_unfinished, write_folder, write_json
from tests.kills import DEAD, limited_file_size


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def fill(folder, text="new"):
    (folder / "a").write_text(text)
    (folder / "b").write_text(text)


def fill_old(folder):
    fill(folder, "old")


OLD, WHOLE = {"a": "old", "b": "old"}, {"a": "new", "b": "new"}


@pytest.mark.parametrize("before", [None, OLD])
def test_a_folder_survives_a_kill_at_every_step(tmp_path, kill, before):
    seen, died = [], True
    while died:
        target = tmp_path / str(len(seen)) / "it"
        target.parent.mkdir()
        if before:
            write_folder(target, fill_old)
        died = kill(len(seen), lambda target=target: write_folder(target, fill))
        remove_unfinished(target)
        seen.append(contents(target) if target.exists() else None)
        assert seen[-1] in (before, WHOLE)
        assert [path.name for path in target.parent.iterdir()] == ["it"] * target.exists()
        write_folder(target, fill)
        assert contents(target) == WHOLE
        assert [path.name for path in target.parent.iterdir()] == ["it"]
    # The folder, two files, the rename; of the old one another rename, two files, the folder.
    assert len(seen) > (8 if before else 4)
    assert (seen[0], seen[-1]) == (before, WHOLE)


def test_a_killed_recovery_is_repeated(tmp_path, kill):
    target = tmp_path / "it"
    for first in range(9):
        for second in range(6):
            write_folder(target, fill_old)
            kill(first, lambda: write_folder(target, fill))
            kill(second, lambda: remove_unfinished(target))
            remove_unfinished(target)
            assert contents(target) in (OLD, WHOLE), (first, second)
            assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_file_survives_a_kill_at_every_step(tmp_path, kill):
    target = tmp_path / "metrics.json"
    for steps in range(4):
        write_json(target, {"epoch": 1})
        kill(steps, lambda: write_json(target, {"epoch": 2}))
        assert target.read_text() in ('{\n "epoch": 1\n}', '{\n "epoch": 2\n}')
        write_json(target, {"epoch": 3})
        assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]


def test_files_of_living_processes_and_other_hosts_are_left_alone(tmp_path):
    target = tmp_path / "it"
    host, number, start = owner().split("-")
    other = f"{int(host, 16) ^ 1:08x}"
    names = [
        f".it-{owner()}-00000000",
        f".it-{owner()}-00000000-old",
        f".it-{host}-1-{_started(1)}-00000000",
        f".it-{other}-{number}-{start}-00000000",
        f".it-{other}-{2**22 - 1}-1-00000000",
        ".it-notes",
        ".it-0123456789abcdef0123456789abcdef",
        f".item-{DEAD}-00000000",
    ]
    for name in names:
        (tmp_path / name).mkdir()
    for end in ("", "-journal"):
        (tmp_path / f".it-{DEAD}-00000000{end}").touch()
    (tmp_path / f".it-{DEAD}-00000001").mkdir()
    write_folder(target, fill)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "it"])


def _started(number):
    stat = Path(f"/proc/{number}/stat").read_bytes()
    return stat.rpartition(b")")[2].split()[19].decode()


def test_start_time_distinguishes_processes_with_the_same_number_and_zombies_are_dead():
    host, number, start = owner().split("-")
    assert not is_dead(owner())
    assert is_dead(f"{host}-{number}-{int(start) + 1}")
    assert is_dead(DEAD)
    assert not is_dead(f"{int(host, 16) ^ 1:08x}-{2**22 - 1}-1")
    process = subprocess.Popen(["sleep", "60"])
    name = f"{host}-{process.pid}-{_started(process.pid)}"
    assert not is_dead(name)
    process.kill()
    while not is_dead(name):
        time.sleep(0.01)
    process.wait()
    assert is_dead(name)


def test_an_exception_leaves_what_was_there(tmp_path, monkeypatch):
    def truncated(folder):
        fill(folder)
        raise OSError("image file is truncated")  # as Pillow does, without a number

    write_json(tmp_path / "it.json", 1)
    with pytest.raises(OSError, match="image file is truncated"):
        write_folder(tmp_path / "it", truncated)
    with pytest.raises(TypeError):
        write_json(tmp_path / "it.json", object())
    assert contents(tmp_path) == {"it.json": "1"}
    write_folder(tmp_path / "it", fill_old)
    rename = os.rename

    def rename_old(source, place, **options):  # but not the new one
        if "-old" not in f"{source} {place}":
            raise PermissionError
        rename(source, place, **options)

    monkeypatch.setattr(os, "rename", rename_old)
    with pytest.raises(PermissionError):
        write_folder(tmp_path / "it", fill)
    assert contents(tmp_path / "it") == OLD


def test_the_later_of_two_concurrent_writers_replaces_the_folder(tmp_path, monkeypatch):
    rename, first = os.rename, []

    def slowly(folder):
        fill(folder)
        write_folder(tmp_path / "it", fill_old)

    def between(source, place, **options):
        rename(source, place, **options)
        if str(place).endswith("-old") and not first:
            first.append(place)
            write_folder(tmp_path / "it", fill_old)

    monkeypatch.setattr(os, "rename", between)
    write_folder(tmp_path / "it", slowly)
    assert first
    assert contents(tmp_path / "it") == WHOLE
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_a_full_disk_names_the_path(tmp_path):
    with limited_file_size() as limit:
        limit(1000)
        with pytest.raises(OSError, match="values"):
            write_json(tmp_path / "values.json", list(range(2000)))
        with pytest.raises(OSError, match="folder"):
            write_folder(
                tmp_path / "folder", lambda aside: np.save(aside / "array.npy", np.zeros(2000))
            )
    assert list(tmp_path.iterdir()) == []
