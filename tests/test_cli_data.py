"""`rcir data list` and `rcir data check`."""

import re
from dataclasses import replace

import pytest
from PIL import Image

from rcir.cli import main
from rcir.data import DATASETS


@pytest.fixture
def own(tmp_path):
    """Twelve pictures in four classes."""
    for kind in "abcd":
        (tmp_path / "own" / kind).mkdir(parents=True)
        for number in range(3):
            Image.new("L", (8, 6), 50 * number).save(tmp_path / "own" / kind / f"{number}.png")
    return tmp_path


def check(root, *arguments, name="folder"):
    return main(["data", "check", name, "--root", str(root), *arguments])


def failed(capsys, *arguments):
    """What is printed by a command that fails, and its last line."""
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    assert stop.value.code == 1
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("error: ")
    return shown.out.splitlines(), line


def failed_check(capsys, root, *arguments, name="folder"):
    return failed(capsys, "data", "check", name, "--root", str(root), *arguments)


def rows(text):
    """The words of each line that starts with the name of a data set."""
    lines = [line.split() for line in text.splitlines()]
    return {line[0]: line[1:] for line in lines if line and line[0] in DATASETS}


def test_all_sets_are_listed_with_what_is_on_disk(tmp_path, capsys):
    (tmp_path / "CUB_200_2011").mkdir()
    assert main(["data", "list", "--root", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.splitlines()[0] == f"in {tmp_path}:"
    listed = rows(shown.out)
    assert list(listed) == list(DATASETS)
    assert listed["cub200"][:2] == ["11,788", "yes"]
    assert listed["sop"][:2] == ["120,053", "no"]
    assert listed["msls"][0] == "no"
    assert listed["digits"][0] == "yes"
    # How to get it is said of what is not there.
    shown_text = " ".join(shown.out.split())
    assert DATASETS["sop"].get in shown_text
    assert DATASETS["cub200"].get not in shown_text


def test_the_root_is_that_of_the_environment(tmp_path, capsys, monkeypatch):
    (tmp_path / "lfw").mkdir()
    monkeypatch.setenv("RCIR_DATA", str(tmp_path))
    main(["data", "list"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"in {tmp_path}:")
    assert rows(shown)["lfw"][1] == "yes"


def test_a_whole_copy(own, capsys):
    assert check(own, "--option", "path=own") == 0
    shown = capsys.readouterr()
    lines = [line for line in shown.out.splitlines() if line.strip()]
    assert lines[0] == "folder: 12 images (train 6, queries 6)"
    assert lines[-1] == ("all pictures can be read; there is no published number to compare with")
    assert shown.err == ""


def test_a_set_that_needs_no_check_is_told_so(tmp_path, capsys):
    assert check(tmp_path, name="digits") == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("digits comes with scikit-learn: it needs no check\n", "")


@pytest.mark.data
def test_omniglot_is_checked(data_root, capsys):
    assert check(data_root, name="omniglot") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0].startswith("omniglot: 19,280 images (train ")
    assert lines[-1] == "all can be read"


@pytest.mark.data
def test_a_whole_copy_of_a_real_set(data_root, capsys):
    assert check(data_root, name="mnist") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines == ["mnist: 70,000 images (train 60,000, queries 10,000)", "all can be read"]


def test_options_have_values_of_yaml(own, capsys):
    check(own, "--option", "path=own", "--option", "open_set=false")
    assert "12 images (train 8, queries 4)" in capsys.readouterr().out
    check(own, "--option", "path=own", "--option", "train=[a, b, c]")
    assert "12 images (train 9, queries 3)" in capsys.readouterr().out


def test_a_wrong_number_of_images(own, capsys, monkeypatch):
    monkeypatch.setitem(DATASETS, "folder", replace(DATASETS["folder"], images=1300))
    shown, line = failed_check(capsys, own, "--option", "path=own")
    assert "folder: 12 images (train 6, queries 6)" in shown
    assert "all can be read" not in shown
    assert line == (
        "error: this copy of folder is not whole: 12 of 1,300 published images, 0 unreadable"
    )


# The last two are what a style and its end look like to the printer.
@pytest.mark.parametrize("name", ["1.png", "photo[bold].png", "x[/b].png"])
def test_a_picture_that_cannot_be_read_is_named(own, capsys, name):
    victim = own / "own" / "b" / name
    victim.parent.mkdir(parents=True, exist_ok=True)
    if name.startswith("x"):
        victim = own / "own" / "x[" / "b].png"
        victim.parent.mkdir()
    victim.write_bytes(b"no picture")
    shown, line = failed_check(capsys, own, "--option", "path=own")
    (fault,) = [each for each in shown if each.startswith("unreadable: ")]
    assert fault.startswith(f"unreadable: {victim} is not an image")
    assert line.endswith("1 unreadable")


def test_what_was_left_out_and_classes_of_one_image_are_shown(own, capsys):
    (own / "own" / "a" / "notes.txt").touch()
    (own / "own" / "e").mkdir()
    Image.new("L", (8, 6)).save(own / "own" / "e" / "1.png")
    assert check(own, "--option", "path=own", "--option", "train=[a, b, c]") == 0
    shown = capsys.readouterr().out
    assert "note: 1 files without the ending of a picture were left out\n" in shown
    assert "1 classes have one image only" in shown


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("cub", [], "data.name 'cub' is unknown"),
        ("folder", [], "options of folder: .*path"),
        ("folder", ["--option", "path"], "--option path: give NAME=VALUE"),
        ("folder", ["--option", "path=[a"], r"--option path=\[a: .* is not a value of YAML"),
        ("folder", ["--option", "path=nowhere"], "there is no folder .*nowhere"),
        ("folder", ["--option", "path=own", "--option", "size=3"], "options of folder: .*size"),
        ("cub200", [], "images.txt, image_class_labels.txt, classes.txt"),
        ("mnist", [], "put the four official .gz files there"),
    ],
)
def test_what_cannot_be_checked_ends_with_one_line(own, capsys, name, arguments, said):
    shown, line = failed_check(capsys, own, *arguments, name=name)
    assert shown == []
    assert re.search(said, line)


@pytest.mark.parametrize("arguments", [["data"], ["data", "check"], ["data", "fetch"]])
def test_a_command_that_is_not_complete_shows_its_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: rcir data" in capsys.readouterr().err
