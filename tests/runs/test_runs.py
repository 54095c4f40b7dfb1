"""The folder of a training run: written, read, found."""

import json
import shutil
from dataclasses import replace

import pytest

from rcir import tracking
from rcir.errors import InvalidData
from rcir.files import write_json
from rcir.runs.folder import FOLDER_TAG, RunFolder, find_run, read_run


def test_a_run_survives_the_disk(tmp_path):
    run = RunFolder(tmp_path, {"data": {"name": "digits"}, "batch": 3}, "0123", "sqlite:///x.db")
    run.write()
    assert read_run(tmp_path) == run
    finished = replace(run, finished=True)
    finished.write()
    assert read_run(tmp_path) == finished
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_folder_that_moved_is_read_where_it_is(trained, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(trained.path, moved)
    run = find_run(str(moved))
    assert run.path == moved
    assert run.encoder().fingerprint() == trained.encoder().fingerprint()


def test_a_folder_without_a_run_has_none(tmp_path):
    assert read_run(tmp_path) is None
    assert read_run(tmp_path / "missing") is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"config": {}}', '{"unknown": 1}'])
def test_a_damaged_run_says_so(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(InvalidData, match=r"run\.json is damaged"):
        read_run(tmp_path)


def test_a_run_is_found_by_its_mlflow_id(trained):
    found = find_run(trained.mlflow_run)
    assert (found.path, found.mlflow_run) == (trained.path, trained.mlflow_run)


@pytest.mark.parametrize("reference", ["no-such-run", ".", "0123456789abcdef0123456789abcdef"])
def test_what_is_no_run_is_not_found(reference):
    with pytest.raises(InvalidData, match="is no folder of a training run"):
        find_run(reference)


def test_a_run_of_another_machine_names_the_missing_folder():
    tracked = tracking.start_run("elsewhere", {FOLDER_TAG: "/not/on/this/machine"})
    with pytest.raises(InvalidData, match="/not/on/this/machine is not on this machine"):
        find_run(tracked.id)


def test_json_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "values.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": [2, None]})
    assert json.loads(path.read_text()) == {"a": [2, None]}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": [2, None]}


def test_every_file_has_the_permissions_of_any_other_file(trained, tmp_path):
    """A run is for colleagues too, not for the one who trained it alone."""
    (tmp_path / "plain").touch()
    files = [path for path in trained.path.rglob("*") if path.is_file()]
    modes = {path.stat().st_mode for path in files}
    assert modes == {(tmp_path / "plain").stat().st_mode}
