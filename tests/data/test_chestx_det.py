import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from rcir.data.datasets.chestx_det import FINDINGS, read, read_index
from rcir.data.division import divide
from rcir.data.images import read_image
from rcir.errors import DataUnavailable, InvalidData

FILES = ("ChestX_Det_train.json", "ChestX_Det_test.json")
TRAINING = {"Atelectasis", "Calcification", "Cardiomegaly", "Consolidation", "Fibrosis", "Fracture"}
TRAIN = {
    "1.png": ["Effusion", "Fibrosis", "Effusion"],
    "2.png": [],
    "3.png": ["Mass"],
    "4.png": ["Effusion", "Nodule"],
}
TEST = {"7.png": ["Consolidation"], "8.png": ["Nodule", "Mass"], "9.png": []}


@pytest.fixture(scope="module")
def folder(data_root):
    return data_root / "annotations" / "chestx-det"


@pytest.fixture(scope="module")
def published(folder):
    """Findings of each image of both official files, by hand."""
    halves = [json.loads((folder / name).read_text()) for name in FILES]
    return [{entry["file_name"]: set(entry["syms"]) for entry in half} for half in halves]


def write(root, places=("train_data", "test_data"), images=True, contents=(TRAIN, TEST)):
    """A small set laid out like the published one."""
    folder = root / "ChestX-Det"
    folder.mkdir(parents=True)
    for name, place, files in zip(FILES, places, contents, strict=True):
        entries = [
            {"file_name": file, "syms": shown, "boxes": [[0, 0, 1, 1]] * len(shown)}
            for file, shown in files.items()
        ]
        (folder / name).write_text(json.dumps(entries))
        (folder / place).mkdir()
        for file in files if images else ():
            Image.new("L", (int(file[0]), 4)).save(folder / place / file)
    return folder


@pytest.mark.data
def test_the_official_findings_are_read(folder, published):
    index = read_index(folder)
    assert [len(half.names) for half in index] == [3025, 553]
    for half, expected in zip(index, published, strict=True):
        shown = [{FINDINGS[number] for number in numbers} for numbers in half.findings]
        assert dict(zip(half.names, shown, strict=True)) == expected
    counts = Counter(name for half in published for shown in half.values() for name in shown)
    assert sorted(counts) == list(FINDINGS)
    numbers = Counter(n for half in index for findings in half.findings for n in findings)
    assert [numbers[n] for n in range(13)] == [counts[name] for name in FINDINGS]


@pytest.mark.data
def test_the_official_images_are_divided_by_finding(folder, published, tmp_path, monkeypatch):
    (tmp_path / "ChestX-Det").symlink_to(folder)
    missing = "rcir.data.datasets.chestx_det.require_images"
    monkeypatch.setattr(missing, lambda *_: None)  # there are no images
    source = read(tmp_path)
    places = ("train_data/", "test_data/")
    shown = {
        place + name: findings
        for place, half in zip(places, published, strict=True)
        for name, findings in half.items()
        if findings
    }
    assert len(shown) == 3025 + 553 - 547 - 64
    assert set(source.train.ids) == {name for name, found in shown.items() if found & TRAINING}
    assert set(source.queries.ids) == {name for name in shown if not shown[name] & TRAINING}
    assert len(source.train) + len(source.queries) == len(shown)
    assert source.notes == ("611 images without a finding were left out",)
    rows = np.random.default_rng(0).choice(len(source.queries), 50, replace=False)
    indptr, columns = source.queries.relevance.pairs(rows)
    for row, matched in zip(rows, np.split(columns, indptr[1:-1]), strict=True):
        own = shown[source.queries.ids[row]]
        shares = [not own.isdisjoint(shown[name]) for name in source.queries.ids]
        assert matched.tolist() == np.flatnonzero(shares).tolist()
    splits = divide(source)
    assert len(splits.gallery) + len(splits.test) < len(source.queries)


@pytest.mark.data
def test_annotations_without_images_say_what_is_missing(folder, tmp_path):
    (tmp_path / "ChestX-Det").symlink_to(folder)
    with pytest.raises(DataUnavailable, match=r"2967 of 2967 images listed in ChestX_Det_train\.j"):
        read(tmp_path)


@pytest.mark.parametrize("places", [("train_data", "test_data"), ("train", "test")])
def test_images_with_a_training_finding_train(tmp_path, places):
    folder = write(tmp_path, places)
    source = read(tmp_path)
    first, second = places
    assert list(source.train.ids) == [f"{first}/1.png", f"{second}/7.png"]
    assert list(source.queries.ids) == [f"{first}/3.png", f"{first}/4.png", f"{second}/8.png"]
    assert source.queries.images == [folder / name for name in source.queries.ids]
    assert [read_image(path, 1).shape[1] for path in source.queries.images] == [3, 4, 8]
    assert source.queries.labels is None
    indptr, columns = source.queries.relevance.pairs(np.arange(3))
    assert indptr.tolist() == [0, 2, 4, 7]
    assert columns.tolist() == [0, 2, 1, 2, 0, 1, 2]
    assert source.gallery == "queries"
    assert source.notes == ("2 images without a finding were left out",)


def test_the_archives_folders_come_first(tmp_path):
    (write(tmp_path) / "train").mkdir()
    assert read(tmp_path).train.ids[0] == "train_data/1.png"


def test_images_without_a_finding_need_not_be_there(tmp_path):
    (write(tmp_path) / "train_data" / "2.png").unlink()
    assert len(read(tmp_path).train) == 2
    everything = write(tmp_path / "b", contents=({"1.png": ["Mass"]}, {"2.png": ["Fracture"]}))
    assert everything.is_dir()
    assert read(tmp_path / "b").notes == ()


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataUnavailable, match=r"ChestX_Det_train\.json, ChestX_Det_test\.json; ge"):
        read(tmp_path)
    (write(tmp_path) / "test_data" / "8.png").unlink()
    with pytest.raises(DataUnavailable, match=r"1 of 5 images .* instance test_data/8\.png"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[", "cannot be read"),
        ("", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("{}", "must hold a list of images"),
        ("[]", "must hold a list of images"),
        ("[3]", "entry 1: needed are a file_name and the list syms"),
        ('[{"file_name": "1.png"}]', "entry 1: needed are"),
        ('[{"file_name": 1, "syms": []}]', "entry 1: needed are"),
        ('[{"file_name": "1.png", "syms": "Mass"}]', "entry 1: needed are"),
        ('[{"file_name": "1.png", "syms": ["mass"]}]', r"entry 1 \(1\.png\): 'mass' is none of"),
        ('[{"file_name": "1.png", "syms": [["Mass"]]}]', r"\['Mass'\] is none of"),
        ('[{"file_name": "1.png", "syms": []}, {"file_name": "1.png", "syms": []}]', "1.png twice"),
    ],
    ids=range(12),
)
def test_annotations_of_the_wrong_form_are_refused(tmp_path, content, said):
    (write(tmp_path, images=False) / FILES[0]).write_text(content)
    with pytest.raises(InvalidData, match=said):
        read(tmp_path)


@pytest.mark.parametrize("finding", ["Mass", "Fracture"])
def test_a_set_of_one_half_is_refused(tmp_path, finding):
    write(tmp_path, contents=({"1.png": [finding]}, {"2.png": [finding]}))
    with pytest.raises(InvalidData, match=r"[02] of 2 images with findings show one that trains"):
        read(tmp_path)


def test_a_set_without_findings_is_refused(tmp_path):
    write(tmp_path, contents=({"1.png": []}, {"2.png": []}))
    with pytest.raises(InvalidData, match="0 of 0 images with findings"):
        read(tmp_path)
