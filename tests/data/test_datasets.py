from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rcir.data import DATASETS, DataConfig, data_root, load_splits, with_cluster
from rcir.data.division import PARTS, Source, divide
from rcir.data.records import ImageSet
from rcir.data.registry import DIVISION, DataSet, find_dataset
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData

SMALL = {"validation": 4, "gallery": 24, "tuning": 3, "calibration": 3}


def pictures(root, classes=6, each=4):
    """Small pictures in class folders below `root / "own"`; returns their names."""
    names = []
    for kind in range(classes):
        (root / "own" / f"kind-{kind}").mkdir(parents=True)
        for number in range(each):
            names.append(f"kind-{kind}/{number}.png")
            Image.new("L", (9, 7), 40 * kind + number).save(root / "own" / names[-1])
    return names


@pytest.fixture
def reader(monkeypatch):
    """Replaces a set's reader by one that keeps what it was called with."""
    calls = []

    def read(root, **options):
        calls.append((root, options))
        part = ImageSet(np.zeros((40, 2, 2), np.uint8), np.repeat(np.arange(20), 2), ["x"] * 40)
        return Source(part, part, "queries")

    monkeypatch.setattr(DataSet, "function", lambda self: read)
    return calls


@pytest.mark.parametrize("name", DATASETS)
def test_every_set_has_a_reader_that_takes_what_it_is_given(name):
    found = DATASETS[name]
    module, function = found.reader.split(":")
    reader = getattr(import_module(f"rcir.data.datasets.{module}"), function)
    parameters = signature(reader).parameters
    assert next(iter(parameters)) == "root"
    assert set(found.options) <= set(parameters)
    assert ("download" in parameters) == found.downloads
    assert ("seed" in parameters) == (found.composed or name in ("folder", "table"))
    if not found.composed:
        # What `divide` takes never reaches the reader.
        assert not set(DIVISION) & set(parameters)
    assert found.title
    assert found.get
    assert set(found.parts) <= set(PARTS)


def test_parts_are_the_sizes_that_a_division_takes():
    parameters = signature(divide).parameters
    assert set(PARTS) == set(parameters) - {"source", "seed", "cluster"}
    assert set(DIVISION) == set(parameters) - {"source", "seed"}


def test_published_numbers_are_those_of_the_papers():
    assert {name: found.images for name, found in DATASETS.items() if found.images} == {
        **{"mnist": 60_000 + 10_000, "fashion-mnist": 60_000 + 10_000, "cifar10": 60_000},
        **{"svhn": 73_257 + 26_032, "omniglot": 964 * 20, "cub200": 5_864 + 5_924},
        **{"cars196": 8_054 + 8_131, "sop": 59_551 + 60_502, "lfw": 9_525 + 3_708},
        "market1501": 12_936 + 19_732 - 3_819 + 3_368,
        "duke": 16_522 + 2_228 + 17_661,
        "pitts30k": 10_000 + 7_416 + 10_000 + 6_816,
        "pitts250k": 91_464 + 7_824 + 83_952 + 8_280,
    }


def test_an_unknown_name_is_refused_with_all_that_there_are():
    for ask in (find_dataset, lambda name: load_splits(DataConfig(name))):
        with pytest.raises(InvalidConfig, match=r"'cub' is unknown; .*digits, .*cub200, .*table"):
            ask("cub")


@pytest.mark.parametrize("name", ["digits", "folder", "cub200", "pitts250k"])
def test_an_unknown_option_is_refused(name, tmp_path):
    with pytest.raises(InvalidConfig, match=rf"data\.options of {name}: .*colour"):
        load_splits(DataConfig(name, root=str(tmp_path), options={"colour": 3}))


@pytest.mark.parametrize(
    ("name", "option", "value", "allowed"),
    [
        ("folder", "path", 5, "a text or a path"),
        ("folder", "path", None, "a text or a path"),
        ("folder", "train", "apple", "a list, each a text or null"),
        ("folder", "train", [3], "a list, each a text or null"),
        ("folder", "open_set", 1, "true or false"),
        ("n-digit-mnist", "digits", True, "a whole number"),
        ("folder", "validation", True, "a number"),
        ("folder", "gallery", "half", "a number"),
        ("n-digit-mnist", "digits", 2.5, "a whole number"),
        ("n-digit-mnist", "corrupt", "0.5", "a number"),
        ("n-digit-mnist", "gap", "class", "one of 'number', 'instance'"),
        ("pitts30k", "version", 30, "one of '30k', '250k'"),
        ("digits", "train", 100.0, "a whole number"),
        ("omniglot", "gallery", None, "a whole number"),
        ("table", "radius", True, "a number"),
        ("table", "cluster", 3, "a text or null"),
        ("omniglot", "cluster", ["drawer"], "a text or null"),
        ("msls", "cities", [1], "a text or a list, each a text or null"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name, option, value, allowed, tmp_path):
    options = {"path": "own"} if name in ("folder", "table") else {}
    with pytest.raises(InvalidConfig) as said:
        load_splits(DataConfig(name, root=str(tmp_path), options=options | {option: value}))
    assert str(said.value) == f"data.options of {name}: {option} is {value!r}; it must be {allowed}"


def test_whole_numbers_are_numbers_and_numpys_are_too(reader, tmp_path):
    options = {"validation": np.int64(3), "gallery": np.float32(0.5), "tuning": 4, "radius": 3}
    load_splits(DataConfig("table", root=str(tmp_path), options=options))
    assert reader == [(tmp_path, {"radius": 3, "seed": 0})]


def test_a_fault_of_a_reader_is_not_taken_for_a_wrong_option(monkeypatch, tmp_path):
    def read(root, size=3):
        return len(size)

    monkeypatch.setattr(DataSet, "function", lambda self: read)
    with pytest.raises(TypeError, match="has no len"):
        load_splits(DataConfig("sop", root=str(tmp_path)))


@pytest.mark.parametrize("name", ["seed", "root"])
def test_what_is_not_an_option_of_the_set_is_refused_as_one(name, tmp_path):
    with pytest.raises(InvalidConfig, match=rf"there is no option {name}; there are open_set, "):
        load_splits(DataConfig("digits", options={name: 1}))


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("MNIST/raw", "mnist"),
        ("MNIST/raw", "n-digit-mnist"),
        ("FashionMNIST/raw", "fashion-mnist"),
        ("lfw-py", "lfw"),
        ("pittsburgh/datasets/pitts30k_train.mat", "pitts30k"),
        ("pittsburgh/datasets/pitts250k_train.mat", "pitts250k"),
    ],
)
def test_a_set_is_there_where_its_reader_looks_for_it(place, name, tmp_path):
    nothing = {each for each, found in DATASETS.items() if not found.places}
    assert {each for each, found in DATASETS.items() if found.there(tmp_path)} == nothing
    (tmp_path / place).mkdir(parents=True)
    there = {each for each, found in DATASETS.items() if found.there(tmp_path)} - nothing
    assert there == {name} | ({"mnist", "n-digit-mnist"} if place == "MNIST/raw" else set())


def test_a_needed_option_that_is_not_given_is_named(tmp_path):
    with pytest.raises(InvalidConfig, match=r"data\.options of folder: .*path"):
        load_splits(DataConfig("folder", root=str(tmp_path)))


def test_a_seed_below_0_is_refused():
    with pytest.raises(InvalidConfig, match=r"data\.seed is -1; at least 0"):
        DataConfig(seed=-1)


@pytest.mark.parametrize(
    ("given", "variable", "expected"),
    [
        ("here/below", "elsewhere", "here/below"),
        (None, "elsewhere", "elsewhere"),
        (None, "", "data"),
        (None, None, "data"),
    ],
)
def test_the_root_is_given_or_named_or_data(given, variable, expected, monkeypatch):
    monkeypatch.delenv("RCIR_DATA", raising=False)
    if variable is not None:
        monkeypatch.setenv("RCIR_DATA", variable)
    assert data_root(DataConfig(root=given)) == Path.cwd() / expected


def test_the_options_of_a_set_reach_its_reader_and_can_be_changed(reader, tmp_path):
    for options in ({}, {"version": "30k"}):
        load_splits(DataConfig("pitts250k", root=str(tmp_path), options=options))
    load_splits(DataConfig("pitts30k", root=str(tmp_path)))
    assert reader == [
        (tmp_path, {"version": "250k"}),
        (tmp_path, {"version": "30k"}),
        (tmp_path, {}),
    ]
    DATASETS["pitts250k"].read(tmp_path)
    assert reader[-1] == (tmp_path, {"version": "250k"})


def test_sizes_go_to_the_division_and_all_else_to_the_reader(reader, tmp_path):
    options = {"validation": 3, "gallery": 0.5, "tuning": 4, "calibration": 5, "size": 8}
    splits = load_splits(DataConfig("sop", root=str(tmp_path), options=options))
    assert reader == [(tmp_path, {"size": 8})]
    assert len(options) == 5  # not changed
    sizes = [len(part) for part in vars(splits).values()]
    assert sizes == [34, 6, 20, 4, 5, 11]


def test_a_cluster_goes_to_the_division(reader, tmp_path):
    config = DataConfig("sop", root=str(tmp_path), options={"validation": 3, "size": 8})
    assert with_cluster(config, None) == config
    named = with_cluster(config, "camera")
    assert named.options == {"validation": 3, "size": 8, "cluster": "camera"}
    assert replace(named, options=config.options) == config
    with pytest.raises(InvalidConfig, match=r"'camera', but .* no such attribute; they have none"):
        load_splits(named)
    assert reader == [(tmp_path, {"size": 8})]


def test_a_download_is_asked_only_of_a_reader_that_can(reader, tmp_path):
    load_splits(DataConfig("mnist", root=str(tmp_path), download=True, options=SMALL))
    load_splits(DataConfig("mnist", root=str(tmp_path), options=SMALL))
    (tmp_path / "lfw").mkdir()
    load_splits(DataConfig("lfw", root=str(tmp_path), download=True))
    assert [options for _, options in reader] == [{"download": True}, {}, {}]


@pytest.mark.parametrize(
    "name", [name for name, found in DATASETS.items() if found.places and not found.downloads]
)
def test_a_set_that_cannot_be_fetched_says_where_it_comes_from(name, tmp_path):
    with pytest.raises(DataUnavailable) as said:
        load_splits(DataConfig(name, root=str(tmp_path), download=True))
    for part in (str(tmp_path / DATASETS[name].places[0]), "cannot be fetched", DATASETS[name].get):
        assert part in str(said.value)
    assert "RCIR_DATA" in str(said.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_pictures_is_divided(tmp_path):
    names = pictures(tmp_path)
    options = {"path": "own", "validation": 1, "gallery": 0.5, "tuning": 2, "calibration": 2}
    config = DataConfig("folder", root=str(tmp_path), seed=3, options=options)
    splits = load_splits(config)
    ids = [name for part in vars(splits).values() for name in part.ids]
    assert sorted(ids) == sorted(names)
    assert [len(part) for part in vars(splits).values()] == [8, 4, 6, 2, 2, 2]
    for part in vars(splits).values():
        for path, name in zip(part.images, part.ids, strict=True):
            assert Path(path) == tmp_path / "own" / name
    kinds = [{name.split("/")[0] for name in part.ids} for part in vars(splits).values()]
    assert len(kinds[0] | kinds[1]) == len(kinds[2]) == 3
    assert not (kinds[0] | kinds[1]) & kinds[2]
    again, other = (load_splits(replace(config, seed=seed)) for seed in (3, 4))
    assert again.test.ids == splits.test.ids
    assert [part.ids for part in vars(other).values()] != [
        part.ids for part in vars(splits).values()
    ]


def test_the_options_of_a_folder_reach_its_reader(tmp_path):
    pictures(tmp_path)
    options = {"path": str(tmp_path / "own"), "train": ["kind-0", "kind-5"], "validation": 1}
    splits = load_splits(DataConfig("folder", options=options))
    assert {*splits.train.attributes["class"], *splits.validation.attributes["class"]} == {
        *("kind-0", "kind-5")
    }
    options = {"path": str(tmp_path / "own"), "open_set": False, "validation": 2, "gallery": 5}
    splits = load_splits(DataConfig("folder", options=options))
    assert [len(part) for part in vars(splits).values()] == [5, 2, 5, 4, 4, 4]
    assert {*splits.test.labels} <= set(range(6))


@pytest.mark.parametrize("name", ["folder", "table"])
def test_the_seed_decides_which_classes_train_alike_in_a_folder_and_a_table(tmp_path, name):
    rows = [f"own/{file},{file.split('/')[0]}" for file in pictures(tmp_path)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *rows]))
    options = {"path": {"folder": "own", "table": "table.csv"}[name]}
    trained = []
    for seed in range(40):
        splits = load_splits(DataConfig(name, root=str(tmp_path), seed=seed, options=options))
        kinds = {*splits.train.attributes["class"], *splits.validation.attributes["class"]}
        assert len(kinds) == 3
        trained.append(kinds)
    # Each of 6 classes trains with a probability of one half.
    for number in range(6):
        assert 8 <= sum(f"kind-{number}" in kinds for kinds in trained) <= 32
    assert len(set(map(frozenset, trained))) > 10  # of 20 halves


def test_what_is_left_out_is_told_in_one_line(tmp_path):
    pictures(tmp_path)
    for name in ("own/kind-0/a.heic", "own/kind-1/b.txt", "own/top.png"):
        (tmp_path / name).touch()
    told = []
    load_splits(DataConfig("folder", root=str(tmp_path), options={"path": "own"}), told.append)
    assert told == [
        "note: 2 files without the ending of a picture were left out; "
        "1 pictures outside of class folders were left out"
    ]


def test_a_folder_that_is_too_small_is_refused(tmp_path):
    pictures(tmp_path, classes=2, each=1)
    with pytest.raises(InvalidData, match=r"each of the 1 classes .* has one image"):
        load_splits(DataConfig("folder", root=str(tmp_path), options={"path": "own"}))


def test_a_composed_set_draws_its_own_splits():
    parts = ("train", "validation", "gallery", "tuning", "calibration", "test")
    sizes = {name: 100 + number for number, name in enumerate(parts)}
    first, again, other = (
        load_splits(DataConfig("digits", seed=seed, options=sizes)) for seed in (1, 1, 2)
    )
    assert {name: len(part) for name, part in vars(first).items()} == sizes
    np.testing.assert_array_equal(first.test.images, again.test.images)
    assert (first.test.images != other.test.images).any()
    assert {name for name, found in DATASETS.items() if found.composed} == {"digits", "omniglot"}
