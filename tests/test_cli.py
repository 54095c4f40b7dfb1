"""The `rcir` command, `rcir retrieve` and `rcir data`: what they print, and how they fail."""

import json
import re
import subprocess
import sys
from copy import copy
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
from PIL import Image

import rcir
from rcir import api, config
from rcir.cli import COMMANDS, JOBS, SUMMARIES, main, make_parser
from rcir.data import DATASETS
from rcir.errors import naming_flags
from rcir.options import EXAMPLES
from rcir.store.folder import current_version


@pytest.fixture(autouse=True)
def _no_default_retriever(monkeypatch):
    monkeypatch.setattr(api, "chosen", None)


@pytest.fixture
def image(splits, tmp_path):
    path = tmp_path / "query.png"
    Image.fromarray(splits.test.images[0]).save(path)
    return str(path)


def error_of(capsys, *arguments, output=""):
    """Run a command that fails; return the one line of its error."""
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    assert stop.value.code == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert output in captured.out if output else captured.out == ""
    return line


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {}),
        (["--risk", "false-discovery"], {"risk": "false-discovery"}),
        (["--abstain"], {"abstain": True}),
        (["--simultaneous"], {"simultaneous": True}),
        (["--anytime"], {"anytime": True}),
        (["--mix", "any"], {"mix": "any"}),
        (["--mix", "True=0.3", "False=0.7"], {"mix": {"True": 0.3, "False": 0.7}}),
        (["--delta", "none"], {"delta": None}),
        (["--alpha", "miss=.9", "recall=.95"], {"alpha": {"miss": 0.9, "recall": 0.95}}),
        (
            ["--distinct", "label", "--risk", "recall", "--group", "False"],
            {"distinct": "label", "risk": "recall", "group": "False"},
        ),
    ],
    ids=str,
)
def test_every_option_gives_the_answer_of_the_library(folder, image, capsys, words, options):
    options = {"alpha": 0.9, "delta": 0.2} | options
    answer = rcir.load(folder).retrieve(image, **options)
    command = ["retrieve", "--retriever", str(folder), "--alpha", ".9", "--delta", ".2"]
    assert main([*command, *words, image, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("query") == image
    assert printed == json.loads(json.dumps(answer.to_dict()))
    assert printed["ids"] == list(answer.ids)
    guarantee = printed["guarantee"]
    assert {name: guarantee[name] for name in options} == options
    main([*command, image, *words])
    assert capsys.readouterr().out == f"{answer}\n"


def test_several_images_are_answered_in_order(folder, splits, tmp_path, capsys, monkeypatch):
    images = [str(tmp_path / f"{row}.png") for row in range(3)]
    for row, path in enumerate(images):
        Image.fromarray(splits.test.images[row]).save(path)
    monkeypatch.setenv("RCIR_RETRIEVER", str(folder))
    command = ["retrieve", *images, "--alpha", "0.3"]
    main([*command, "--json"])
    printed = json.loads(capsys.readouterr().out)
    retriever = rcir.load(folder)
    answers = [retriever.retrieve(path, 0.3, 0.1) for path in images]
    assert [answer["ids"] for answer in printed] == [list(answer.ids) for answer in answers]
    main(command)
    text = capsys.readouterr().out
    tables = [
        f"{path}:\n{answer.table()}\n\n" for path, answer in zip(images, answers, strict=True)
    ]
    assert text == "".join(tables) + f"{answers[0].guarantee}\n"


def test_abstention_is_printed_as_no_answer(retriever, splits, tmp_path, capsys):
    abstaining = rcir.Retriever(retriever.searcher)
    abstaining.calibrate_splits(
        abstaining.search_labelled(splits.tuning),
        abstaining.search_labelled(splits.calibration),
        "learned",
    )
    answers = abstaining.retrieve(list(splits.test.images), 0.5, 0.1, abstain=True)
    row = next(row for row, answer in enumerate(answers) if answer.abstained)
    Image.fromarray(splits.test.images[row]).save(tmp_path / "doubtful.png")
    api.use(abstaining)
    main(["retrieve", str(tmp_path / "doubtful.png"), "--alpha", "0.5", "--abstain"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("no answer")
    assert "at most 0.5 of the answers" in second


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--alpha", "nan"], "alpha"),
        (["--alpha", "0.0001"], "certified"),
        (["--abstain", "--alpha", "0.001"], "answered"),
        (["--abstain", "--risk", "recall"], "abstain"),
        (["--group", "red"], "red"),
    ],
    ids=str,
)
def test_unattainable_or_invalid_request_is_one_line(folder, image, capsys, options, word):
    assert word in error_of(capsys, "retrieve", image, "--retriever", str(folder), *options)


def test_an_image_is_refused_by_a_retriever_of_vectors_which_names_its_model(tmp_path, capsys):
    vectors = np.random.default_rng(0).normal(size=(20, 4))
    retriever = rcir.Retriever.from_embeddings(vectors, model="timm:resnet18@1f")
    folder = str(retriever.save(tmp_path / "retriever"))
    for photos in (["1.jpg"], ["1.jpg", "2.HEIC"]):
        line = error_of(capsys, "retrieve", *photos, "--retriever", folder)
        assert "--model timm:resnet18" in line


def test_unreadable_image_or_retriever_is_one_line(folder, image, tmp_path, capsys):
    assert "RCIR_RETRIEVER" in error_of(capsys, "retrieve", image)
    (tmp_path / "text.jpg").write_text("not an image")
    for name in ("text.jpg", "missing.png"):
        options = ("--retriever", str(folder))
        assert name in error_of(capsys, "retrieve", str(tmp_path / name), *options)
    for source in ("nowhere", "runs:/nonsense/retriever"):
        assert source in error_of(capsys, "retrieve", image, "--retriever", source)
    run = str(Path(folder).parent)
    assert f"pass {folder}" in error_of(capsys, "retrieve", image, "--retriever", run)
    path = current_version(folder) / "retriever.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert path.name in error_of(capsys, "retrieve", image, "--retriever", str(folder))


def test_plan_prints_the_plan_of_the_library_and_needs_no_files(folder, capsys):
    main(["plan", "--alpha", ".05", "--delta", ".1"])
    assert " 45 labelled queries" in capsys.readouterr().out  # .95 ** 45 <= .1 < .95 ** 44
    command = ["plan", "--retriever", str(folder), "--alpha", ".3", "--queries", "50", "200"]
    for words, options in (
        ([], {}),
        (["--pilot", "tuning", "--distinct", "label"], {"pilot": "tuning", "distinct": "label"}),
    ):
        main([*command, *words])
        plan = rcir.load(folder).plan(0.3, 0.1, numbers=[50, 200], **options)
        with naming_flags():
            assert capsys.readouterr().out == f"{plan}\n"
        assert str(plan).count("\n    ") == len(plan.rows) == 2
    assert "abstain" in error_of(capsys, *command, "--abstain")


def test_a_plan_needs_queries_that_tuned_and_a_valid_calibration(retriever, splits):
    queries = retriever.search_labelled(splits.calibration)
    assert retriever.plan(0.3, 0.1).n_pilot == len(queries)
    planned = copy(retriever)
    planned.calibrate_splits(None, queries)
    for pilot in ("tuning", "validation"):
        with pytest.raises(rcir.InvalidConfig, match=pilot):
            planned.plan(0.3, 0.1, pilot=pilot)
    planned.remove(planned.ids[:1].tolist())
    with pytest.raises(rcir.StaleCalibration):
        planned.plan(0.3, 0.1)


@pytest.mark.slow
def test_installed_script_prints_the_answer_of_the_library(folder, image):
    script = Path(sys.executable).with_name("rcir")
    options = ["--retriever", folder, "--alpha", "0.3", "--delta", "0.1", "--json"]
    process = subprocess.run([script, "retrieve", image, *options], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    answer = rcir.load(folder).retrieve(image, 0.3, 0.1)
    expected = {"query": image, **answer.to_dict()}
    assert json.loads(process.stdout) == json.loads(json.dumps(expected))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "COMMAND"),
        (["advise"], "advise"),
        (["retrieve", "a.png", "--loud"], "--loud"),
        (["retrieve", "a.png", "--alpha", "much"], "--alpha"),
        (["retrieve", "a.png", "--risk", "hits"], "false-discovery"),
        (["retrieve", "a.png", "--alpha", "0.1", "recall=0.2"], "NAME=NUMBER"),
        (["retrieve", "a.png", "--mix", "a=much"], "give any, or NAME=NUMBER"),
        (["retrieve", "a.png", "--delta", "null"], "give a number, or none"),
        (["plan", "--alpha", "0.1", "a.png"], "unexpected words"),
        (["demo", "--output"], "--output"),
        (["data"], "data"),
        (["data", "check"], "name"),
        (["data", "fetch"], "fetch"),
    ],
    ids=str,
)
def test_invalid_command_line_has_status_2(capsys, arguments, word):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert word in error
    command = arguments[0] if arguments and arguments[0] != "advise" else ""
    assert error.startswith(f"usage: rcir {command}")


def test_help_and_version_have_status_0(capsys):
    for arguments in (["--help"], ["retrieve", "--help"], ["demo", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    output = capsys.readouterr().out
    assert output.count("usage: rcir") == 3
    assert f'version = "{output.split()[-1]}"' in text


# `rcir data`


@pytest.fixture
def photos(tmp_path):
    """A root with twelve pictures of four classes in the folder `photos`."""
    for name in "abcd":
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("L", (8, 6), 50 * number).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path


def check(root, *options, name="folder"):
    """The arguments of `rcir data check`; each option is NAME=VALUE."""
    options = [word for option in options for word in ("--option", option)]
    return ["data", "check", name, "--root", str(root), *options]


def rows(text):
    """The words of each line that starts with the name of a data set."""
    lines = [line.split() for line in text.splitlines()]
    return {line[0]: line[1:] for line in lines if line and line[0] in DATASETS}


def test_data_list_shows_which_sets_are_on_disk(tmp_path, capsys, monkeypatch):
    (tmp_path / "CUB_200_2011").mkdir()
    assert main(["data", "list", "--root", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    table = rows(output)
    assert list(table) == list(DATASETS)
    assert table["cub200"][:2] == ["11,788", "yes"]
    assert table["sop"][:2] == ["120,053", "no"]
    assert table["digits"][0] == "yes"
    # Instructions for download are printed for missing sets only.
    words = " ".join(output.split())
    assert DATASETS["sop"].get in words
    assert DATASETS["cub200"].get not in words
    monkeypatch.setenv("RCIR_DATA", str(tmp_path))
    main(["data", "list"])
    assert rows(capsys.readouterr().out) == table


@pytest.mark.slow
@pytest.mark.data
def test_data_check_counts_the_images_of_published_sets(data_root, tmp_path, capsys):
    assert main(check(data_root, name="mnist")) == 0
    assert "mnist: 70,000 images (train 60,000, queries 10,000)" in capsys.readouterr().out
    assert main(check(data_root, name="omniglot")) == 0
    assert "omniglot: 19,280 images (train " in capsys.readouterr().out
    assert main(check(tmp_path, name="digits")) == 0
    assert "needs no check" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "counts"),
    [
        ("open_set=true", "train 6, queries 6"),
        ("open_set=false", "train 8, queries 4"),
        ("train=[a, b, c]", "train 9, queries 3"),
    ],
)
def test_data_check_reads_options_as_yaml(photos, capsys, option, counts):
    assert main(check(photos, "path=photos", option)) == 0
    captured = capsys.readouterr()
    assert f"folder: 12 images ({counts})\n" in captured.out
    assert "all pictures can be read" in captured.out
    assert captured.err == ""


def test_data_check_reports_skipped_files_and_singleton_classes(photos, capsys):
    (photos / "photos" / "a" / "notes.txt").touch()
    (photos / "photos" / "e").mkdir()
    Image.new("L", (8, 6)).save(photos / "photos" / "e" / "1.png")
    assert main(check(photos, "path=photos", "train=[a, b, c]")) == 0
    output = capsys.readouterr().out
    assert "not pictures (1:" in output
    assert "1 classes have one image" in output


def test_data_check_fails_for_an_incomplete_copy(photos, capsys, monkeypatch):
    monkeypatch.setitem(DATASETS, "folder", replace(DATASETS["folder"], images=1300))
    output = "folder: 12 images (train 6, queries 6)"
    assert "12 of 1,300" in error_of(capsys, *check(photos, "path=photos"), output=output)


# The last two look like markup to the library that prints.
@pytest.mark.parametrize("name", ["b/1.png", "b/photo[bold].png", "x[/b].png"])
def test_data_check_names_an_unreadable_picture(photos, capsys, name):
    path = photos / "photos" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"not an image")
    line = error_of(capsys, *check(photos, "path=photos"), output=f"unreadable: {path} ")
    assert "1 image " in line
    assert "--max-rejects" in line


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("cub", [], "cub.*unknown"),
        ("folder", [], "path"),
        ("folder", ["path"], "NAME=VALUE"),
        ("folder", ["path=[a"], "YAML"),
        ("folder", ["path=nowhere"], "nowhere"),
        ("folder", ["path=photos", "size=3"], "size"),
        ("cub200", [], "images.txt"),
        ("mnist", [], r"\.gz"),
    ],
)
def test_data_check_of_something_else_is_one_line(photos, capsys, name, options, words):
    assert re.search(words, error_of(capsys, *check(photos, *options, name=name)))


def test_every_example_of_a_help_text_can_be_parsed(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])  # of the configurations that they name
    explained = set()
    for line in filter(None, EXAMPLES.splitlines()):
        _, name, *words = line.partition(" > ")[0].split()
        explained.add(name)
        if name in JOBS:
            kind = resolve_name(JOBS[name][0])
            assert config.parse(kind, words, name)
        else:
            make_parser(name).parse_args(words)
    assert explained == {*COMMANDS, *JOBS} == {*SUMMARIES}


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["certfy"], "certify"),
        (["retrieve", "a.png", "--alhpa", "0.1"], "--alpha"),
        (["data", "chek"], "check"),
        (["train", "--name", "x", "--encoder.dims", "4"], "--encoder.dim"),
        (["calibrate", "--run", "x", "--query-uncertanty", "gap"], "--query-uncertainty"),
    ],
    ids=str,
)
def test_what_was_probably_meant_is_suggested(capsys, arguments, meant):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err
