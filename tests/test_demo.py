"""`rcir demo`: its results, what it writes, and what it refuses to overwrite."""

import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import rcir
from rcir.cli import main
from rcir.data import DataConfig, load_splits
from rcir.demo import clear_output, find_photographs, run, run_on_photographs
from rcir.errors import InvalidConfig


@pytest.fixture(scope="module")
def output(demo):
    return demo / "runs" / "demo"


@pytest.fixture(scope="module")
def results(output):
    return json.loads((output / "results.json").read_text())


@pytest.fixture(scope="module")
def test_labels_and_answers(output):
    """The labels of the test queries, and the retriever's answers to them."""
    test = load_splits(DataConfig("digits", seed=1)).test
    return test.labels, rcir.load(output / "retriever").retrieve(list(test.images), 0.1, 0.1)


def test_certified_risk_holds_on_test_queries(results):
    certified = [row for row in results["rows"] if row["threshold"] is not None]
    assert [row["alpha"] for row in certified] == [0.05, 0.1, 0.2]
    for row in certified:
        error = math.sqrt(row["alpha"] * (1 - row["alpha"]) / results["n_test"])
        assert row["test_risk"] <= row["alpha"] + 3 * error


def test_photographs_at_hand_are_certified_and_new_ones_queried(tmp_path, monkeypatch, capsys):
    """A small network stands for EfficientNet, and noisy patterns for birds."""
    monkeypatch.setenv("RCIR_DATA", str(tmp_path))
    monkeypatch.setattr("rcir.demo.MODEL", "timm:test_resnet")
    assert find_photographs() is None
    torch.manual_seed(0)
    (tmp_path / "models").mkdir()
    save_file(
        timm.create_model("test_resnet").state_dict(),
        tmp_path / "models" / "test_resnet.safetensors",
    )
    rng = np.random.default_rng(0)
    for number in range(8):
        pattern = rng.integers(0, 200, (20, 20, 3))
        folder = tmp_path / "CUB_200_2011" / "images" / f"kind {number}"
        folder.mkdir(parents=True)
        for image in range(26):
            pixels = (pattern + rng.integers(0, 56, (20, 20, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{image:02d}.jpg")
    output = tmp_path / "demo"
    run_on_photographs(output, *find_photographs())
    assert "(wrong)" not in (shown := capsys.readouterr().out)
    retriever = rcir.load(output / "retriever")
    assert len(retriever.ids) == 8 * 25
    answer = retriever.retrieve(output / "queries" / "hard.png", 0.1, 0.1)
    assert f"hard: {answer.labels[0]}" in shown


@pytest.mark.slow
def test_uncertainty_saves_a_quarter_of_the_images(results):
    """Margins are wide, because another CPU trains other weights."""
    quality = results["quality"]
    assert quality["auroc_miss"] >= 0.80
    assert quality["auroc_occlusion"] >= 0.65
    (row,) = (row for row in results["rows"] if row["alpha"] == 0.1)
    # The baseline takes one image of each number too.
    assert row["constant_size"] <= 5
    assert row["mean_size"] <= 0.75 * row["constant_size"]


def test_saved_retriever_reproduces_the_measured_risk_and_size(results, test_labels_and_answers):
    labels, answers = test_labels_and_answers
    misses = [label not in answer.labels for answer, label in zip(answers, labels, strict=True)]
    (row,) = (row for row in results["rows"] if row["alpha"] == 0.1)
    # Scores that equal the threshold up to rounding may fall on either side of it.
    assert sum(misses) == pytest.approx(row["test_risk"] * len(labels), abs=3)
    assert np.mean([answer.size for answer in answers]) == pytest.approx(row["mean_size"], abs=0.01)
    assert answers[0].guarantee.threshold == pytest.approx(row["threshold"])


def test_uncertain_queries_get_more_images(test_labels_and_answers):
    _, answers = test_labels_and_answers
    order = np.argsort([answer.uncertainty for answer in answers])
    sizes = np.array([answer.size for answer in answers])[order]
    easy, _, hard = (third.mean() for third in np.array_split(sizes, 3))
    assert hard > 1.3 * easy


def test_output_contains_queries_and_a_report_with_embedded_figures(output):
    for name in ("easy", "medium", "hard"):
        with Image.open(output / "queries" / f"{name}.png") as query:
            assert query.size == (16, 8)
    sources = re.findall(r'<img[^>]* src="([^"]*)"', (output / "report.html").read_text())
    assert sources
    kinds = {source.partition(",")[0] for source in sources}
    assert kinds == {"data:image/svg+xml;base64", "data:image/jpeg;base64"}


def test_retriever_answers_any_level_without_another_calibration(output):
    retriever = rcir.load(output / "retriever")
    sizes = {}
    for alpha, delta in ((0.07, 0.05), (0.07, 0.2), (0.15, 0.05), (0.333, 0.001)):
        answer = retriever.retrieve(output / "queries" / "hard.png", alpha, delta)
        assert answer.guarantee.risk_bound <= alpha
        assert answer.guarantee.n_calibration == 3000
        sizes[alpha, delta] = answer.size
    assert sizes[0.07, 0.05] >= sizes[0.07, 0.2] >= 1
    assert sizes[0.07, 0.05] >= sizes[0.15, 0.05]


def test_screen_shows_the_results_and_a_command_that_works(demo, results, monkeypatch, capsys):
    screen = (demo / "screen.txt").read_text()
    for row in results["rows"]:
        assert f"{row['test_risk']:.4f}" in screen
        assert f"{row['mean_size']:.2f}" in screen
    line = next(line for line in screen.splitlines() if "rcir retrieve" in line)
    monkeypatch.chdir(demo)
    assert main(line.split()[1:]) == 0
    assert "With probability at least 0.9" in capsys.readouterr().out


# Contents of the output folder when a demo is killed, from its start to its end.
PARTIAL = [
    [],
    [".rcir-demo", "training/lock"],
    [".rcir-demo", "training/.run.json-0"],
    [".rcir-demo", "training/run.json", "embeddings/part-0", "retriever/lock", ".report.html-0"],
    [".rcir-demo", "queries/easy.png", "results.json"],  # while it removes an earlier output
]


def create(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.mark.parametrize("names", PARTIAL, ids=str)
def test_output_of_a_killed_demo_is_cleared_unless_a_foreign_file_is_there(tmp_path, names):
    create(tmp_path / "demo", names)
    clear_output(tmp_path / "demo")
    assert [path.name for path in (tmp_path / "demo").iterdir()] == [".rcir-demo"]
    for foreign in ("notes.txt", ".training", "training.zip"):
        folder = tmp_path / foreign
        create(folder, [*names, foreign])
        before = sorted(folder.rglob("*"))
        with pytest.raises(InvalidConfig, match="left alone"):
            run(folder)
        assert sorted(folder.rglob("*")) == before


def test_clearing_that_is_killed_can_be_repeated(tmp_path, kill):
    steps, died = 0, True
    while died:
        output = tmp_path / str(steps)
        create(output, ["training/run.json", "queries/easy.png", "results.json", ".rcir-demo"])
        died = kill(steps, lambda output=output: clear_output(output))
        clear_output(output)
        assert [path.name for path in output.iterdir()] == [".rcir-demo"]
        steps += 1
    assert steps > 5


def test_demo_leaves_a_file_and_a_folder_without_its_marker_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    create(tmp_path / "folder", ["report.html"])
    for target in (tmp_path / "file", tmp_path / "folder"):
        with pytest.raises(InvalidConfig, match="left alone"):
            run(target)
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "folder", "report.html"}


@pytest.mark.slow
def test_a_demo_after_killed_ones_ends_as_an_undisturbed_one(tmp_path, new_store):
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": new_store(tmp_path / "mlflow.db"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "tests.random_kills", "demos"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    folders = tmp_path / "whole", tmp_path / "killed"
    whole, killed = (json.loads((folder / "results.json").read_text()) for folder in folders)
    assert killed | {"seconds": 0} == whole | {"seconds": 0}
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
