"""Files and folders are written as a whole or not at all: kills at every file-system step."""

import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from rcir.files import is_dead, owner, settle, write_folder, write_json
from tests.kills import DEAD, limited_file_size


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def fill(text):
    def into(folder):
        (folder / "a").write_text(text)
        (folder / "b").write_text(text)

    return into


OLD, NEW = {"a": "old", "b": "old"}, {"a": "new", "b": "new"}


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("by", ["settle", "write"])
def test_folder_survives_a_kill_at_every_step(tmp_path, kill, there, by):
    seen, steps = [], 0
    while True:
        target = tmp_path / str(steps) / "it"
        target.parent.mkdir()
        if there:
            write_folder(target, fill("old"))
        died = kill(steps, lambda target=target: write_folder(target, fill("new")))
        if by == "settle":
            settle(target)
            seen.append(contents(target) if target.exists() else None)
            assert seen[-1] in (OLD if there else None, NEW), steps
            assert [path.name for path in target.parent.iterdir()] == ["it"] * target.exists()
        write_folder(target, fill("after"))
        assert contents(target) == {"a": "after", "b": "after"}
        assert [path.name for path in target.parent.iterdir()] == ["it"]
        if not died:
            break
        steps += 1
    # mkdir, two files, two renames, and what was there: its rename, two files, the folder.
    assert steps >= (8 if there else 4)
    if by == "settle":
        assert seen[0] == (OLD if there else None)
        assert seen[-1] == NEW


def test_killed_recovery_can_be_repeated(tmp_path, kill):
    target = tmp_path / "it"
    for first in range(9):
        for second in range(6):
            write_folder(target, fill("old"))
            kill(first, lambda: write_folder(target, fill("new")))
            kill(second, lambda: settle(target))
            settle(target)
            assert contents(target) in (OLD, NEW), (first, second)
            assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_file_survives_a_kill_at_every_step(tmp_path, kill):
    target = tmp_path / "metrics.json"
    for steps in range(4):
        write_json(target, {"epoch": 1})
        kill(steps, lambda: write_json(target, {"epoch": 2}))
        assert target.read_text() in ('{\n "epoch": 1\n}', '{\n "epoch": 2\n}')
        write_json(target, {"epoch": 3})
        assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    assert steps == 3


def test_files_of_living_processes_and_other_hosts_are_left_alone(tmp_path):
    target = tmp_path / "it"
    host, number, start = owner().split("-")
    other = f"{int(host, 16) ^ 1:08x}"
    names = [
        f".it-{owner()}-00000000",
        f".it-{owner()}-00000000-old",
        f".it-{host}-1-{_started(1)}-00000000",
        f".it-{other}-{number}-{start}-00000000",
        f".it-{other}-{2**22 - 1}-1-00000000-old",
        ".it-notes",
        ".it-0123456789abcdef0123456789abcdef",
        f".item-{DEAD}-00000000",
    ]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / f".it-{DEAD}-00000000").mkdir()
    settle(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    write_folder(target, fill("new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "it"])


def _started(number):
    stat = Path(f"/proc/{number}/stat").read_bytes()
    return stat.rpartition(b")")[2].split()[19].decode()


def test_start_time_distinguishes_processes_with_the_same_number():
    host, number, start = owner().split("-")
    assert not is_dead(owner())
    assert is_dead(f"{host}-{number}-{int(start) + 1}")
    assert is_dead(DEAD)
    assert not is_dead(f"{int(host, 16) ^ 1:08x}-{2**22 - 1}-1")


def test_zombie_process_is_dead():
    process = subprocess.Popen(["sleep", "60"])
    name = f"{owner().split('-')[0]}-{process.pid}-{_started(process.pid)}"
    assert not is_dead(name)
    process.kill()
    while not is_dead(name):
        time.sleep(0.01)
    process.wait()
    assert is_dead(name)


def test_exception_leaves_the_old_content(tmp_path):
    target = tmp_path / "it"
    write_folder(target, fill("old"))

    def truncated(folder):
        fill("new")(folder)
        raise OSError("image file is truncated")  # as Pillow does, without a number

    with pytest.raises(OSError, match="image file is truncated"):
        write_folder(target, truncated)
    assert contents(target) == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    with pytest.raises(TypeError):
        write_json(tmp_path / "it.json", object())
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_later_of_two_concurrent_writes_wins(tmp_path, monkeypatch):
    target = tmp_path / "it"
    write_folder(target, fill("old"))

    def slowly(folder):
        fill("new")(folder)
        write_folder(target, fill("meanwhile"))

    write_folder(target, slowly)
    assert contents(target) == NEW
    rename, first = os.rename, []

    def between(source, place, **options):
        rename(source, place, **options)
        if str(place).endswith("-old") and not first:
            first.append(place)
            write_folder(target, fill("meanwhile"))

    monkeypatch.setattr(os, "rename", between)
    write_folder(target, fill("old"))
    assert first
    assert contents(target) == OLD
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
