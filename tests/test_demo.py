"""`rcir demo`: what it promises, measured once."""

import json
import math
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

import rcir


@pytest.fixture(scope="module")
def output(demo):
    return demo / "runs" / "demo"


@pytest.fixture(scope="module")
def results(output):
    return json.loads((output / "results.json").read_text())


def test_every_certified_risk_is_kept_on_unseen_queries(results):
    certified = [row for row in results["rows"] if row["threshold"] is not None]
    assert [row["alpha"] for row in certified] == [0.05, 0.1, 0.2]
    for row in certified:
        error = math.sqrt(row["alpha"] * (1 - row["alpha"]) / results["n_test"])
        assert row["test_risk"] <= row["alpha"] + 3 * error


def test_the_encoder_is_worth_calibrating(results):
    quality = results["quality"]
    assert quality["recall_at_1"] >= 0.70
    assert quality["auroc_miss"] >= 0.80
    assert quality["auroc_occlusion"] >= 0.70


def test_uncertainty_saves_a_quarter_of_the_images_at_least(results):
    (row,) = (row for row in results["rows"] if row["alpha"] == 0.1)
    assert row["mean_size"] <= 0.75 * row["constant_size"]


def test_two_minutes_of_one_core_suffice(demo):
    assert float((demo / "processor-seconds").read_text()) <= 120


def test_what_was_measured_is_what_the_retriever_answers(output, results):
    """Ask for all test queries again, and count misses by hand."""
    from rcir.data import DataConfig, load_splits

    test = load_splits(DataConfig("digits", seed=1)).test
    retriever = rcir.load(output / "retriever")
    answers = retriever.retrieve(list(test.images), alpha=0.1, delta=0.1)
    missed = [
        label not in answer.labels for answer, label in zip(answers, test.labels, strict=True)
    ]
    (row,) = (row for row in results["rows"] if row["alpha"] == 0.1)
    assert np.mean(missed) == pytest.approx(row["test_risk"])
    assert np.mean([answer.size for answer in answers]) == pytest.approx(row["mean_size"])
    assert answers[0].guarantee.threshold == pytest.approx(row["threshold"])


def test_the_files_are_there(output):
    assert {path.name for path in output.iterdir()} == {
        *("training", "queries", "retriever"),
        *("report.html", "results.json", "test.safetensors", ".rcir-demo"),
    }
    for name in ("easy", "medium", "hard"):
        with Image.open(output / "queries" / f"{name}.png") as query:
            assert query.size == (16, 8)


def test_the_report_shows_its_figures(output):
    pictures = []

    class Page(HTMLParser):
        def handle_starttag(self, tag, attributes):
            if tag == "img":
                pictures.append(dict(attributes)["src"])

    Page().feed((output / "report.html").read_text())
    assert len(pictures) == 11
    assert all(source.startswith("data:image/svg+xml;base64,") for source in pictures)


def test_any_level_is_answered_without_calibrating_again(output):
    retriever = rcir.load(output / "retriever")
    sizes = {}
    for alpha, delta in ((0.07, 0.05), (0.07, 0.2), (0.15, 0.05), (0.333, 0.001)):
        answer = retriever.retrieve(output / "queries" / "hard.png", alpha, delta)
        assert answer.guarantee.risk_bound <= alpha
        assert answer.guarantee.n_calibration == 3000
        sizes[alpha, delta] = answer.size
    assert sizes[0.07, 0.05] >= sizes[0.07, 0.2] >= 1
    assert sizes[0.07, 0.05] >= sizes[0.15, 0.05]


def test_hard_queries_get_more_images_than_easy_ones(output):
    from rcir.data import DataConfig, load_splits

    retriever = rcir.load(output / "retriever")
    # Of two queries alone, learned sizes may be the other way round.
    test = load_splits(DataConfig("digits", seed=1)).test
    answers = retriever.retrieve(list(test.images), 0.1, 0.1)
    order = np.argsort([answer.uncertainty for answer in answers])
    thirds = np.array_split(np.array([answer.size for answer in answers])[order], 3)
    easy, medium, hard = (sizes.mean() for sizes in thirds)
    assert easy < medium < hard


def test_the_screen_shows_the_measured_numbers_and_a_command_that_works(demo, results):
    screen = (demo / "screen.txt").read_text()
    for row in results["rows"]:
        assert f"{row['test_risk']:.4f}" in screen
        assert f"{row['mean_size']:.2f}" in screen
    command = next(line for line in screen.splitlines() if "rcir retrieve" in line).split()
    process = subprocess.run(command, cwd=demo, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "With probability at least 0.9" in process.stdout


def test_a_folder_with_a_foreign_file_is_left_alone(output, capsys):
    from rcir.cli import main

    foreign = output / "notes.txt"
    foreign.write_text("mine")
    try:
        before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
        with pytest.raises(SystemExit) as stop:
            main(["demo", "--output", str(output)])
        assert stop.value.code == 1
        assert "is left alone" in capsys.readouterr().err
        assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    finally:
        foreign.unlink()


KILLED = [  # what lies there when a demo is killed, from its start to its end
    [],
    [".rcir-demo"],
    [".rcir-demo", "training/lock"],
    [".rcir-demo", "training/.run.json-0"],
    [".rcir-demo", "training/run.json", "embeddings/part-0", ".retriever-0/index/vectors.npy"],
    [".rcir-demo", "training/run.json", ".retriever-0-old/manifest.json", ".report.html-0"],
    [".rcir-demo", "queries/easy.png", "results.json"],  # while it removed what was there
    ["training/run.json", "results.json"],  # of a version without the file that marks it
]


@pytest.mark.parametrize("there", KILLED, ids=str)
@pytest.mark.parametrize("foreign", [None, "notes.txt", ".training", "training.zip"])
def test_a_killed_demo_knows_its_folder(tmp_path, there, foreign):
    from rcir.demo import _clear
    from rcir.errors import InvalidConfig

    output = tmp_path / "demo"
    for name in [*there, *([foreign] if foreign else [])]:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).touch()
    before = sorted(output.rglob("*"))
    if foreign:
        with pytest.raises(InvalidConfig, match="is left alone"):
            _clear(output)
        assert sorted(output.rglob("*")) == before
    else:
        _clear(output)
        assert [path.name for path in output.iterdir()] == [".rcir-demo"]


def test_a_demo_killed_while_it_clears_clears_the_rest(tmp_path, kill):
    from rcir.demo import _clear

    steps, died = 0, True
    while died:
        output = tmp_path / str(steps)
        for name in ("training/run.json", "queries/easy.png", "results.json", ".rcir-demo"):
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (output / name).touch()
        died = kill(steps, lambda output=output: _clear(output))
        _clear(output)
        assert [path.name for path in output.iterdir()] == [".rcir-demo"]
        steps += 1
    assert steps > 5
