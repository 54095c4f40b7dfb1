"""Models that are not trained: `rcir certify PICTURES --model`, and `rcir calibrate --model`."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import rcir
from rcir.cli import main
from rcir.runs.folder import find_run

pytestmark = pytest.mark.usefixtures("no_figures")
MODEL = "timm:test_resnet"
KINDS = "abcdef"


@pytest.fixture
def options(tmp_path):
    """Options that name a small network of timm and a file of random weights."""
    torch.manual_seed(0)
    path = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), path)
    return ["--model", MODEL, "--checkpoint", str(path)]


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Class folders of noisy patterns, in the working directory."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for kind in KINDS:
        pattern = rng.integers(0, 200, (20, 20, 3))
        for number in range(20):
            pixels = (pattern + rng.integers(0, 56, (20, 20, 3))).astype(np.uint8)
            path = Path("photos", kind, f"{number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return tmp_path / "photos"


def test_photographs_are_certified_and_answer_photographs(photos, options, capsys):
    new = Path("new.png")
    Path("photos/a/0.png").rename(new)
    assert main(["certify", "photos", *options, "--alpha", "0.3"]) == 0
    vectors = next(Path("runs/certified/vectors").glob("gallery-*/*.parquet"))
    written = vectors.stat().st_mtime_ns
    results = json.loads(Path("runs/certified/results.json").read_text())
    assert (results["dataset"], results["encoder"].partition("@")[0]) == ("photos", MODEL)
    retriever = rcir.load("runs/certified/retriever")
    assert len(retriever.ids) == 119
    assert retriever.origin["pictures"] == str(photos)
    assert retriever.retrieve(new, 0.3, 0.1).labels[0] == "a"

    capsys.readouterr()
    command = ["retrieve", str(new), "--retriever", "runs/certified/retriever", "--alpha", "0.3"]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["labels"][0] == "a"
    assert main(["certify", "photos", *options, "--alpha", "0.3", "0.4"]) == 0
    assert vectors.stat().st_mtime_ns == written
    Path("photos/b/1.png").unlink()  # other pictures get other vectors
    assert main(["certify", "photos", *options, "--alpha", "0.3"]) == 0
    retriever = rcir.load("runs/certified/retriever")
    assert len(retriever.ids) == 118
    item = "photos/c/3.png"  # recognised, although it is embedded alone now
    assert item.removeprefix("photos/") not in retriever.retrieve(item, 0.3, 0.1).ids


def test_a_table_of_gallery_and_one_of_queries(photos, options, capsys):
    for name, places in (("gallery", range(10)), ("queries", range(10, 20))):
        with Path(f"{name}.csv").open("w") as file:
            rows = csv.writer(file)
            rows.writerow(["path", "label", "key"])
            for kind in KINDS:
                rows.writerows([f"photos/{kind}/{n}.png", kind, f"{kind}{n}"] for n in places)
    split = ["--queries", "queries.csv", "--alpha", "0.4"]
    assert main(["certify", "gallery.csv", *split, *options]) == 0
    retriever = rcir.load("runs/certified/retriever")
    assert retriever.ids[0] == "a0"
    assert "pictures" not in retriever.origin  # no file has the name of an item
    assert retriever.retrieve("photos/b/11.png", 0.4, 0.1).labels[0] == "b"


def test_a_retriever_of_vectors_answers_photographs_with_the_model_of_its_gallery(
    photos, options, capsys
):
    assert main(["embed", "photos", *options, "--output", "photos.parquet"]) == 0
    assert main(["certify", "photos.parquet", "--alpha", "0.3", "--output", "out"]) == 0
    command = ["retrieve", "photos/c/1.png", "--retriever", "out/retriever", "--alpha", "0.3"]
    with pytest.raises(SystemExit):
        main(command)
    assert f"--model {MODEL}" in capsys.readouterr().err
    assert main([*command, *options]) == 0
    assert "photos" not in rcir.load("out/retriever").origin


def test_pictures_without_labels_are_refused_before_they_are_embedded(photos, options, capsys):
    Path("photos/a/0.png").rename("photos/alone.png")
    for place, part in (("photos", "alone.png"), ("photos/a", "class folders")):
        with pytest.raises(SystemExit):
            main(["certify", place, *options])
        assert part in capsys.readouterr().err
    assert not [*Path("runs").rglob("*.parquet")]


def test_pictures_without_a_model_and_a_checkpoint_without_one_are_refused(photos, capsys):
    for command in (["photos"], ["photos", "--checkpoint", "weights.safetensors"]):
        with pytest.raises(SystemExit):
            main(["certify", *command])
        assert "--model" in capsys.readouterr().err


def test_a_model_becomes_a_run_without_epochs(photos, options, tracking_uri, monkeypatch):
    data = ["--data.name", "folder", "--data.options.path", str(photos)]
    command = ["calibrate", *options, *data, "--data.options.open_set", "false", "--alpha", "0.4"]
    monkeypatch.setenv("RCIR_RUNS", "runs")
    assert main(command) == 0
    (folder,) = Path("runs").iterdir()
    run = find_run(str(folder))
    assert (run.finished, run.encoder().config.method) == (True, "pretrained")
    assert not (folder / "checkpoints").exists()
    assert main(command) == 0  # the same run
    assert [path.name for path in Path("runs").iterdir()] == [folder.name]
    retriever = rcir.load(folder / "retriever")
    assert (retriever.encoder is not None, retriever.origin["run"]) == (True, run.mlflow_run)
    for wrong in (["--run", str(folder), *options], ["--alpha", "0.4"]):
        with pytest.raises(SystemExit):
            main(["calibrate", *wrong])
