"""Data sets by name: their options, where they are looked for, their splits, and verification."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rcir.data import DATASETS, DataConfig, data_root, load_splits, with_cluster
from rcir.data.catalogue import DataSet, Findings, find_dataset, verify
from rcir.data.records import ImageSet, Source
from rcir.data.relevance import WithinRadius
from rcir.errors import DataUnavailable, InvalidConfig
from tests.data.small_sets import write_pictures

FOLDER = {"path": "p"}


def write_classes(folder, counts):
    """Write small pictures in class folders."""
    names = [f"kind-{kind}/{n}.png" for kind, count in enumerate(counts) for n in range(count)]
    write_pictures(folder, names)


@pytest.fixture
def calls(monkeypatch):
    """The arguments of a reader that replaces those of all sets."""
    calls = []

    def read(root, **options):
        calls.append((root, options))
        part = ImageSet(np.zeros((40, 2, 2), np.uint8), np.repeat(np.arange(20), 2), ["x"] * 40)
        return Source(part, part, "queries")

    monkeypatch.setattr(DataSet, "function", lambda self: read)
    return calls


# Names and options


def test_an_unknown_set_is_refused_with_the_known_names(tmp_path):
    for refuse in (
        find_dataset,
        lambda name: load_splits(DataConfig(name)),
        lambda name: verify(name, tmp_path, {}),
    ):
        with pytest.raises(InvalidConfig, match=r"digits, .*cub200, .*table"):
            refuse("cub")


@pytest.mark.parametrize("name", ["digits", "folder", "cub200"])
@pytest.mark.parametrize("option", ["colour", "seed", "root"])
def test_an_unknown_option_is_refused(name, option, tmp_path):
    options = {"path": "p"} if name == "folder" else {}
    with pytest.raises(InvalidConfig, match=option):
        load_splits(DataConfig(name, root=str(tmp_path), options=options | {option: 3}))


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *[("folder", "path", None), ("folder", "open_set", 1), ("folder", "train", [3])],
        *[("folder", "gallery", "half"), ("folder", "validation", True), ("digits", "train", 9.5)],
        *[("table", "cluster", 3), ("folder", "queries", "new")],
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name, option, value, tmp_path):
    options = {"path": "p"} if name in ("folder", "table") else {}
    with pytest.raises(InvalidConfig, match=f"of {name}: {option} is"):
        load_splits(DataConfig(name, root=str(tmp_path), options=options | {option: value}))


def test_an_error_inside_a_reader_is_not_reported_as_a_wrong_option(monkeypatch, tmp_path):
    def read(root, size=3):
        return len(size)

    monkeypatch.setattr(DataSet, "function", lambda self: read)
    with pytest.raises(TypeError, match="has no len"):
        load_splits(DataConfig("sop", root=str(tmp_path)))


def test_a_missing_required_option_and_a_negative_seed_are_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="path"):
        load_splits(DataConfig("folder", root=str(tmp_path)))
    with pytest.raises(InvalidConfig, match="seed"):
        DataConfig(seed=-1)


# Where files are


@pytest.mark.parametrize(
    ("root", "variable", "expected"),
    [
        *[("here/below", "elsewhere", "here/below"), (None, "elsewhere", "elsewhere")],
        *[(None, "", "data"), (None, None, "data")],
    ],
)
def test_the_root_is_the_option_or_the_variable_or_data(root, variable, expected, monkeypatch):
    monkeypatch.delenv("RCIR_DATA", raising=False)
    if variable is not None:
        monkeypatch.setenv("RCIR_DATA", variable)
    assert data_root(DataConfig(root=root)) == Path.cwd() / expected


@pytest.mark.parametrize("name", [name for name, each in DATASETS.items() if each.places])
def test_a_missing_set_names_its_place_its_source_and_the_variable(name, tmp_path, monkeypatch):
    monkeypatch.setenv("RCIR_DATA", str(tmp_path))
    data = DATASETS[name]
    for root in (None, str(tmp_path / "no" / "where")):
        config = DataConfig(name, root=root, download="data.download" not in data.get)
        with pytest.raises(DataUnavailable, match="RCIR_DATA") as error:
            load_splits(config)
        assert str(data_root(config) / data.places[0]) in str(error.value)
        assert data.get in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_only_readers_that_can_download_are_told_to(calls, tmp_path):
    sizes = {"validation": 4, "gallery": 24, "tuning": 3, "calibration": 3}
    load_splits(DataConfig("mnist", root=str(tmp_path), download=True, options=sizes))
    load_splits(DataConfig("mnist", root=str(tmp_path), options=sizes))
    (tmp_path / "CUB_200_2011").mkdir()
    load_splits(DataConfig("cub200", root=str(tmp_path), download=True))
    assert [options for _, options in calls] == [{"download": True}, {}, {}]


# Splits


def test_options_of_a_set_are_defaults_of_its_reader(calls, tmp_path):
    for options in ({}, {"version": "30k"}):
        load_splits(DataConfig("pitts250k", root=str(tmp_path), options=options))
    assert calls == [(tmp_path, {"version": "250k"}), (tmp_path, {"version": "30k"})]


def test_sizes_and_cluster_go_to_the_division_and_other_options_to_the_reader(calls, tmp_path):
    options = {"validation": np.int64(3), "gallery": np.float32(0.5), "tuning": 4}
    options |= {"calibration": 5, "size": 8}
    config = DataConfig("sop", root=str(tmp_path), options=options)
    splits = load_splits(config)
    assert [len(part) for part in vars(splits).values()] == [34, 6, 20, 4, 5, 11]
    assert len(options) == 5  # not changed
    assert with_cluster(config, None) == config
    with pytest.raises(InvalidConfig, match="camera"):
        load_splits(with_cluster(config, "camera"))
    assert calls == [(tmp_path, {"size": 8})] * 2


def test_omitted_files_are_reported_in_one_line(tmp_path):
    write_classes(tmp_path / "p", [4] * 6)
    for name in ("kind-0/a.cr2", "kind-1/b.txt", "top.png"):
        (tmp_path / "p" / name).touch()
    lines = []
    load_splits(DataConfig("folder", root=str(tmp_path), options={"path": "p"}), lines.append)
    assert len(lines) == 1
    assert "pictures (2: .cr2, .txt)" in lines[0]
    assert "class folders (1)" in lines[0]


# Verification of a copy


@pytest.fixture
def set_published(monkeypatch):
    """Sets the published number of images of a data set."""
    return lambda name, n: monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], images=n))


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "options", "n"),
    [
        ("fashion-mnist", {}, 60_000 + 10_000),
        pytest.param("omniglot", {}, 964 * 20, marks=pytest.mark.slow),
    ],
)
def test_official_copies_are_complete(data_root, name, options, n):
    findings = verify(name, data_root, options)
    assert (sum(findings.parts.values()), findings.alone, findings.complete) == (n, 0, True)
    assert findings.published in (None, n)


def test_a_copy_is_complete_with_the_published_number(tmp_path, set_published):
    write_classes(tmp_path / "p", (3, 3, 4, 2))
    options = FOLDER | {"train": ["kind-0", "kind-1"]}
    findings = verify("folder", tmp_path, options)
    assert findings == Findings({"train": 6, "queries": 6}, None, (), 0, ())
    assert findings.complete  # no number is published
    for n in (11, 12, 13):
        set_published("folder", n)
        assert verify("folder", tmp_path, options).complete is (n == 12)


def test_every_unreadable_picture_of_all_parts_is_named(tmp_path, set_published):
    parts = ("train", "query", "gallery", "val")
    names = [f"{part}/kind/{n}.png" for part in parts for n in range(9)]
    write_pictures(tmp_path / "p", names)
    set_published("folder", 36)
    victims = [tmp_path / "p" / names[row] for row in (8, 12, 20, 31)]
    for victim in victims:
        victim.write_bytes(victim.read_bytes()[:45])
    findings = verify("folder", tmp_path, FOLDER)
    assert not findings.complete
    assert findings.parts == {"train": 9, "queries": 9, "gallery": 9, "validation": 9}
    for victim, fault in zip(victims, findings.unreadable, strict=True):
        assert str(victim) in fault


def test_classes_of_one_image_are_counted_where_the_gallery_is_drawn_from_them(tmp_path):
    write_classes(tmp_path / "p", (1, 3, 1, 1))
    for options, n in (
        ({"train": ["kind-0", "kind-1"]}, 2),
        ({"train": ["kind-0", "kind-1", "kind-2"]}, 1),
        ({"open_set": False}, 0),
    ):
        assert verify("folder", tmp_path, FOLDER | options).alone == n


def test_places_are_not_counted_as_classes(tmp_path, monkeypatch):
    images, relevance = np.zeros((3, 4, 4), np.uint8), WithinRadius(np.eye(3), 1.0)
    part = ImageSet(images, None, ["a", "b", "c"], {}, relevance)
    source = Source(part, part, "queries")
    monkeypatch.setattr(DataSet, "function", lambda self: lambda root: source)
    findings = verify("folder", tmp_path, {})
    assert (findings.alone, findings.parts) == (0, {"train": 3, "queries": 3})


def test_a_set_of_a_library_needs_no_verification(tmp_path):
    with pytest.raises(InvalidConfig, match="digits"):
        verify("digits", tmp_path, {})
