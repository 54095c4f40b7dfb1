"""The `rcir` command: what it prints, and how it fails."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import rcir
from rcir import api
from rcir.cli import main
from rcir.demo import _clear


@pytest.fixture(autouse=True)
def _none_named(monkeypatch):
    monkeypatch.setattr(api, "_default", None)


@pytest.fixture
def image(splits, tmp_path):
    path = tmp_path / "query.png"
    Image.fromarray(splits.test.images[0]).save(path)
    return str(path)


def failed(capsys, *arguments):
    """The one line that a command ends with."""
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    assert stop.value.code == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_json_is_the_answer_of_the_library(folder, image, capsys):
    options = ["--retriever", str(folder), "--alpha", ".3", "--delta", ".2", "--json"]
    assert main(["retrieve", image, *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    answer = rcir.load(folder).retrieve(image, 0.3, 0.2)
    assert printed == json.loads(json.dumps(answer.to_dict()))
    assert printed["ids"] == list(answer.ids)
    assert printed["size"] == answer.size
    assert printed["guarantee"]["alpha"] == 0.3
    np.testing.assert_allclose(printed["distances"], answer.distances, atol=1e-6)


def test_text_lists_the_set_and_states_the_guarantee(folder, image, capsys):
    main(["retrieve", image, "--retriever", str(folder), "--alpha", "0.3"])
    lines = capsys.readouterr().out.splitlines()
    answer = rcir.load(folder).retrieve(image, 0.3, 0.1)
    assert [line.split()[-1] for line in lines[2:-1]] == list(answer.ids)
    assert lines[-1] == str(answer.guarantee)


def test_several_pictures_are_answered_as_one_by_one(folder, splits, tmp_path, capsys):
    images = [str(tmp_path / f"{row}.png") for row in range(3)]
    for row, path in enumerate(images):
        Image.fromarray(splits.test.images[row]).save(path)
    command = ["retrieve", *images, "--retriever", str(folder), "--alpha", "0.3"]
    main([*command, "--json"])
    printed = json.loads(capsys.readouterr().out)
    retriever = rcir.load(folder)
    alone = [retriever.retrieve(path, 0.3, 0.1) for path in images]
    assert [each["ids"] for each in printed] == [list(answer.ids) for answer in alone]
    main(command)
    shown = capsys.readouterr().out
    places = [
        shown.index(f"{path}:\n{answer.size} image")
        for path, answer in zip(images, alone, strict=True)
    ]
    assert places == sorted(places)


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'version = "{capsys.readouterr().out.split()[1]}"' in text


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (["--distinct", "label"], {"distinct": "label"}),
        (["--risk", "recall"], {"risk": "recall"}),
        (["--risk", "false-discovery"], {"risk": "false-discovery"}),
        (["--abstain"], {"abstain": True}),
        (["--group", "True"], {"group": "True"}),
        (["--simultaneous"], {"simultaneous": True}),
        (["--anytime"], {"anytime": True}),
        (["--mix", "any"], {"mix": "any"}),
        (
            ["--distinct", "label", "--risk", "recall", "--group", "False"],
            {"distinct": "label", "risk": "recall", "group": "False"},
        ),
    ],
    ids=str,
)
def test_every_option_reaches_the_retriever(folder, image, capsys, options, asked):
    answer = rcir.load(folder).retrieve(image, 0.9, 0.1, **asked)
    command = ["retrieve", image, "--retriever", str(folder), "--alpha", "0.9", *options]
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(answer.to_dict()))
    assert {name: printed["guarantee"][name] for name in asked} == asked
    main(command)
    assert capsys.readouterr().out == f"{answer}\n"


def test_no_answer_is_printed_as_such(retriever, splits, tmp_path, capsys):
    built = rcir.Retriever(
        *(retriever.encoder, retriever.preprocessing, retriever.index, splits.gallery.ids),
        labels=splits.gallery.labels,
    )
    built.calibrate(
        built.search_labelled(splits.tuning), built.search_labelled(splits.calibration), "learned"
    )
    answers = built.retrieve(list(splits.test.images), 0.5, 0.1, abstain=True)
    row = next(row for row, answer in enumerate(answers) if answer.abstained)
    Image.fromarray(splits.test.images[row]).save(tmp_path / "doubtful.png")
    api.use(built)
    main(["retrieve", str(tmp_path / "doubtful.png"), "--alpha", "0.5", "--abstain"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("no answer: too uncertain, uncertainty ")
    assert "at most 0.5 of the answers" in second


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--group", "red"], "group 'red' has no calibration queries; there are 'False', 'True'"),
        (["--abstain", "--risk", "recall"], "abstain=True bounds the miss risk among answers"),
        (["--risk", "recall", "--alpha", "0.001"], "alpha = 0.001 at delta = 0.1 cannot be"),
        (["--risk", "false-discovery", "--alpha", "0.1"], "false-discovery 0.1 at delta = 0.1"),
        (["--abstain", "--alpha", "0.001"], "cannot be certified among answered queries"),
    ],
)
def test_what_cannot_be_answered_is_one_line(folder, image, capsys, options, named):
    assert named in failed(capsys, "retrieve", image, "--retriever", str(folder), *options)


def test_the_environment_names_the_retriever(folder, image, capsys, monkeypatch):
    monkeypatch.setenv("RCIR_RETRIEVER", str(folder))
    assert main(["retrieve", image, "--alpha", "0.3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ids"]


@pytest.mark.slow
def test_a_process_of_its_own_answers_the_same(folder, image):
    command = [sys.executable, "-m", "rcir.cli", "retrieve", image, "--retriever", str(folder)]
    script = Path(sys.executable).with_name("rcir")
    if script.exists():
        command[:3] = [str(script)]
    options = ["--alpha", "0.3", "--delta", "0.1", "--json"]
    process = subprocess.run([*command, *options], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    assert json.loads(process.stdout) == json.loads(
        json.dumps(rcir.load(folder).retrieve(image, 0.3, 0.1).to_dict())
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--alpha", "0"], "alpha is 0.0"),
        (["--alpha", "nan"], "alpha is nan"),
        (["--delta", "1"], "delta is 1.0"),
        (["--alpha", "0.0001"], "alpha = 0.0001 at delta = 0.1 cannot be certified"),
    ],
)
def test_a_level_that_cannot_be_is_one_line(folder, image, capsys, options, named):
    assert named in failed(capsys, "retrieve", image, "--retriever", str(folder), *options)


def test_an_image_that_is_none_is_one_line(folder, tmp_path, capsys):
    (tmp_path / "text.jpg").write_text("not a picture")
    for name, said in (("text.jpg", "not an image"), ("missing.png", "there is no file")):
        line = failed(capsys, "retrieve", str(tmp_path / name), "--retriever", str(folder))
        assert said in line
        assert name in line


def test_a_retriever_that_is_none_is_one_line(image, capsys):
    for source in ("nowhere", "runs:/nonsense/retriever"):
        assert source in failed(capsys, "retrieve", image, "--retriever", source)
    assert "RCIR_RETRIEVER" in failed(capsys, "retrieve", image)


@pytest.mark.parametrize(
    "name", ["encoder.safetensors", "gallery.json", "index/vectors.npy", "controller.safetensors"]
)
def test_one_changed_byte_is_one_line(folder, image, capsys, name):
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 1
    (folder / name).write_bytes(content)
    line = failed(capsys, "retrieve", image, "--retriever", str(folder))
    assert f"{name} was changed" in line


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "COMMAND"),
        (["advise"], "advise"),
        (["retrieve"], "image"),
        (["retrieve", "a.png", "--loud"], "--loud"),
        (["retrieve", "a.png", "--alpha", "much"], "--alpha"),
        (["retrieve", "a.png", "--risk", "hits"], "--risk"),
        (["retrieve", "a.png", "--distinct", "id"], "--distinct"),
        (["demo", "--output"], "--output"),
    ],
)
def test_what_cannot_be_parsed_is_named_with_status_2(capsys, arguments, named):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", [[], ["retrieve"], ["demo"]])
def test_help_is_there(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert "usage: rcir" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["file", "folder", "half"])
def test_a_demo_over_anything_else_is_refused_and_leaves_it_alone(tmp_path, capsys, kind):
    target = tmp_path / "target"
    if kind == "file":
        target.write_text("mine")
    else:
        (target / "training").mkdir(parents=True)
        kept = "notes.txt" if kind == "folder" else "report.html"
        (target / kept).write_text("mine")
    assert "is left alone" in failed(capsys, "demo", "--output", str(target))
    if kind == "file":
        assert target.read_text() == "mine"
    else:
        assert {path.name for path in target.iterdir()} == {"training", kept}
        assert (target / kept).read_text() == "mine"


@pytest.mark.parametrize("name", ["made", "empty", "missing", "."])
def test_what_an_earlier_demo_left_is_cleared(tmp_path, name):
    target = Path(name)
    if name in ("made", "."):
        (target / "training").mkdir(parents=True)
        (target / "training" / "run.json").write_text("{}")
        (target / "report.html").write_text("old")
    elif name == "empty":
        target.mkdir()
    _clear(target)
    assert [path.name for path in target.iterdir()] == [".rcir-demo"], "it says whose it is"
