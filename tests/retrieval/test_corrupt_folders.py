"""Folders of a retriever that were damaged, or edited with new checksums."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rcir.data.relevance import SharedLabel
from rcir.errors import (
    CorruptRetriever,
    InvalidConfig,
    InvalidData,
    NoRetriever,
    StaleCalibration,
)
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import current_version
from rcir.risk import SCORE_FUNCTIONS
from tests.retrieval.retrievers import build, calibrate, plain, retrieve
from tests.retrieval.whole_numbers import TEST

QUERIES = TEST[:3]


def files(folder, suffix=""):
    """The files of a folder besides its manifest."""
    paths = sorted(path for path in folder.rglob(f"*{suffix}") if path.is_file())
    return [path for path in paths if path.name != "manifest.json"]


@pytest.fixture(scope="module")
def saved(retriever, splits, tmp_path_factory):
    """Versions of a retriever of images and of one of vectors, with functions that query them."""
    folders, images = tmp_path_factory.mktemp("saved"), list(splits.test.images[:3])
    vectors = calibrate(build(depth=40))
    return {
        "images": (
            current_version(retriever.save(folders / "images")),
            lambda one: plain(one.retrieve(images, 0.5, 0.1)),
        ),
        "vectors": (
            current_version(vectors.save(folders / "vectors")),
            lambda one: plain(retrieve(one, 0.5, part=QUERIES)),
        ),
    }


@pytest.fixture(params=["vectors", "images"])
def edited(request, saved, tmp_path, sign):
    """A folder to edit, and a function that returns its answers; None where it is refused."""
    return _edited(saved[request.param], tmp_path, sign)


@pytest.fixture
def vectors(saved, tmp_path, sign):
    """The folder of vectors alone, which is read faster."""
    return _edited(saved["vectors"], tmp_path, sign)


def _edited(saved, tmp_path, sign):
    folder, query = saved

    def answers(folder):
        sign(folder)
        try:
            return query(Retriever.load(folder))
        except (CorruptRetriever, StaleCalibration, InvalidConfig, InvalidData):
            return None

    return shutil.copytree(folder, tmp_path / "copy"), answers


def change_byte(content, share, bit=1):
    place = int(share * (len(content) - 1))
    return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]


# Damage that checksums reveal


def test_a_changed_shortened_or_missing_file_is_refused(edited):
    folder, _ = edited
    for path in files(folder):
        content = path.read_bytes()
        for wrong in (content[:-1], *(change_byte(content, share) for share in (0, 0.1, 0.9, 1))):
            path.write_bytes(wrong)
            with pytest.raises(CorruptRetriever, match=path.name):
                Retriever.load(folder)
        path.unlink()
        with pytest.raises(CorruptRetriever, match=path.name):
            Retriever.load(folder)
        path.write_bytes(content)
    Retriever.load(folder)


def test_any_changed_byte_of_the_manifest_is_refused(vectors):
    folder, _ = vectors
    path = folder / "manifest.json"
    original = path.read_bytes()
    for place, byte in list(enumerate(original))[::8]:
        # The last bit; a capital; white space that JSON reads as the same.
        for other in {byte ^ 0x01, byte ^ 0x20, ord("\t") if byte in b" \n" else byte ^ 0x01}:
            path.write_bytes(original[:place] + bytes([other]) + original[place + 1 :])
            with pytest.raises(CorruptRetriever):
                Retriever.load(folder)


@pytest.mark.parametrize("kind", ["no folder", "empty folder", "no manifest", "a file"])
def test_a_place_without_a_manifest_holds_no_retriever(vectors, tmp_path, kind):
    place = vectors[0] if kind == "no manifest" else tmp_path / "elsewhere"
    if kind == "no manifest":
        (place / "manifest.json").unlink()
    elif kind == "empty folder":
        place.mkdir()
    elif kind == "a file":
        place.write_text("hello")
    with pytest.raises(NoRetriever, match="manifest"):
        Retriever.load(place)


def edit_manifest(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=1))


def test_an_invalid_pointer_is_refused_and_kept(tmp_path):
    retriever, name = build(), "20260101T000000Z-00000000"
    folder = retriever.save(tmp_path / "own")
    other = [{"format": 1, "version": "../own"}, {"format": 2, "version": name}]
    for content in ("", "[]", "[" * 100_000, *map(json.dumps, other)):
        (folder / "current.json").write_text(content)
        for use in (Retriever.load, retriever.save):
            with pytest.raises(CorruptRetriever):
                use(folder)
        assert (folder / "current.json").read_text() == content


@pytest.mark.parametrize("version", [7, 9, "8", None])
def test_another_format_is_refused(vectors, version):
    edit_manifest(vectors[0], format=version)
    with pytest.raises(CorruptRetriever, match="format"):
        Retriever.load(vectors[0])


@pytest.mark.parametrize("outside", ["../secret", "/etc/hostname", "sub/../gallery.json", ""])
def test_a_manifest_cannot_name_files_outside_the_folder(vectors, tmp_path, outside):
    (tmp_path / "secret").write_text("secret")
    listed = json.loads((vectors[0] / "manifest.json").read_text())["files"]
    edit_manifest(vectors[0], files=listed | {outside: "0" * 64})
    with pytest.raises(CorruptRetriever, match="missing"):
        Retriever.load(vectors[0])


# Edits with new checksums


def test_a_folder_signed_again_unchanged_is_read(edited):
    folder, answers = edited
    expected = answers(folder)
    for path in files(folder, ".safetensors"):
        save_file(load_file(path), path)
    assert answers(folder) == expected is not None


def test_a_folder_without_one_of_its_files_is_refused(edited):
    folder, answers = edited
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    for path in files(folder):
        content, name = path.read_bytes(), path.relative_to(folder).as_posix()
        path.unlink()
        edit_manifest(folder, files={key: value for key, value in listed.items() if key != name})
        # Digests of the gallery need not be known.
        assert name == "digests.npy" or answers(folder) is None, name
        path.write_bytes(content)
        edit_manifest(folder, files=listed)


WRONG = (None, True, -1, 0, 2.5, float("nan"), 10**9, "x", [], {}, ["x"], [None], {"x": 1})


def places_of(values, path=()):
    """The paths of all values within plain values."""
    yield path
    items = values.items() if isinstance(values, dict) else enumerate(values[:2])
    for key, value in items:
        if isinstance(value, dict | list):
            yield from places_of(value, (*path, key))
        else:
            yield (*path, key)


@pytest.mark.parametrize("kind", ["vectors", "images"])
def test_a_wrong_field_is_refused_or_changes_no_answer(saved, tmp_path, sign, kind):
    folder, answers = _edited(saved[kind], tmp_path, sign)
    expected, path = answers(folder), folder / "retriever.json"
    original = path.read_text()
    # No answer depends on these; a smaller number of retrievers is another guarantee.
    free = {"origin", "chosen_among", "attempts", "label_names"}
    places = [place for place in places_of(json.loads(original)) if place]
    if kind == "images":  # the folder of vectors has all other fields
        places = [place for place in places if place[0] in ("encoder", "preprocessing")]
    assert len(places) > 8
    for number, (*parents, name) in enumerate(places):
        step = 2 if "controllers" in parents else 8
        for wrong in WRONG[number % step :: step]:
            description = json.loads(original)
            inner = description
            for parent in parents:
                inner = inner[parent]
            if type(wrong) is type(inner[name]) and (wrong == inner[name] or name in free):
                continue
            if name == "seed" and isinstance(wrong, int):  # is stated by the guarantee
                continue
            inner[name] = wrong
            path.write_text(json.dumps(description))
            assert answers(folder) in (None, expected), (parents, name, wrong)
    for name in json.loads(original):
        description = json.loads(original)
        del description[name]
        path.write_text(json.dumps(description))
        assert answers(folder) is None, name


CONTENTS = ("", "[]", "{}", "3", "null", '["a"]', '"abc"', "[1, 2]", "[" * 100_000, "\x00")


def test_files_with_other_content_are_refused(vectors):
    folder, answers = vectors
    for path in [*files(folder, ".json"), folder / "controller.safetensors"]:
        original = path.read_bytes()
        for content in (*CONTENTS, "hello"):
            path.write_text(content)
            assert answers(folder) is None, (path.name, content[:9])
        path.write_bytes(original)


def harms(values):
    """An array that is wrong in one way each."""
    yield values[:-1]
    yield values[:0]
    yield values[None]
    yield values.reshape(-1)[0]
    yield np.concatenate([values, values[:1]])
    kinds = (np.float16, np.int32, np.uint16, np.complex64, "S4", "M8[s]")
    for kind in kinds if values.dtype.kind in "fiu" else ("S4", "S33", "U32", object):
        with np.errstate(all="ignore"):
            yield values.astype(kind)
    if values.dtype.kind == "f":
        for number in (np.nan, np.inf, -np.inf):
            changed = values.copy()
            changed[..., :1] = number
            yield changed


def test_an_array_of_another_shape_or_type_is_refused(vectors):
    folder, answers = vectors
    for path in files(folder, ".npy"):
        values = np.load(path)
        for changed in harms(values):
            np.save(path, changed)
            assert answers(folder) is None, (path.name, changed.dtype, changed.shape)
        np.save(path, values)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("images", "encoder"), ("vectors", "relevance"), ("vectors", "queries")],
)
def test_other_tensors_of_a_file_are_refused(saved, tmp_path, sign, kind, name):
    folder, answers = _edited(saved[kind], tmp_path, sign)
    path = folder / f"{name}.safetensors"
    arrays = load_file(path)
    for number, (key, values) in enumerate(arrays.items()):
        for changed in list(harms(values))[number % 2 :: 2]:
            if changed.dtype.kind in "fiu":
                save_file(arrays | {key: np.ascontiguousarray(changed)}, path)
                assert answers(folder) is None, (key, changed.dtype, changed.shape)
        if ".relevance." not in key:  # which need not be known
            save_file({other: arrays[other] for other in arrays if other != key}, path)
            assert answers(folder) is None, key
    save_file(arrays | {"extra": np.zeros(2)}, path)
    assert answers(folder) is None


@pytest.mark.parametrize(
    "score_function",
    [
        name if name == "learned" else pytest.param(name, marks=pytest.mark.slow)
        for name in SCORE_FUNCTIONS
    ],
)
def test_other_numbers_of_a_calibration_are_refused(tmp_path, sign, score_function):
    own = calibrate(build(depth=20), score_function)
    saved = (
        current_version(own.save(tmp_path / "own")),
        lambda one: plain(retrieve(one, 0.5, part=QUERIES)),
    )
    folder, answers = _edited(saved, tmp_path, sign)
    path = folder / "controller.safetensors"
    arrays = load_file(path)
    for number, (key, values) in enumerate(arrays.items()):
        save_file({other: arrays[other] for other in arrays if other != key}, path)
        assert key.endswith(".groups") or answers(folder) is None, key
        for changed in map(np.ascontiguousarray, list(harms(values))[number % 8 :: 8]):
            same = changed.shape == values.shape and changed.dtype == values.dtype
            if changed.dtype.kind not in "fiu" or (same and np.array_equal(changed, values)):
                continue
            if key.endswith("candidate_scores") and same and np.isposinf(changed).any():
                continue  # of rank 1: infinite from there on
            whole = changed.dtype == values.dtype and changed.ndim == 1 and len(changed) > 0
            if key.endswith(".sample") and whole and np.isfinite(changed).all():
                continue  # the sample of other queries
            save_file(arrays | {key: changed}, path)
            assert answers(folder) is None, (key, changed.dtype, changed.shape)
    save_file(arrays | {"extra": np.zeros(3)}, path)
    assert answers(folder) is None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("relevant", lambda values: values + 1),
        ("totals", lambda values: values * 0),
        ("totals", lambda values: values - 10**6),
        ("candidate_scores", lambda values: values[:, ::-1]),
        ("candidate_scores", lambda values: values + 1),
        ("candidate_scores", lambda values: -values),
        ("candidate_scores", lambda values: np.full_like(values, np.inf)),
        ("candidate_scores", lambda values: values[:, :9]),
        ("selection_score", lambda values: values[:3]),
    ],
)
@pytest.mark.parametrize("part", ["None.main.calibration", "label.main.tuning"])
def test_impossible_results_of_queries_are_refused(vectors, part, name, change):
    folder, answers = vectors
    path = folder / "controller.safetensors"
    arrays = load_file(path)
    key = f"{part}.{name}"
    arrays[key] = np.ascontiguousarray(change(arrays[key]))
    save_file(arrays, path)
    assert answers(folder) is None


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"labels": np.zeros(7, np.int64)},
        {"places": np.full((300, 2), np.nan), "radius": np.ones(1)},
        {"places": np.zeros((300, 2))},
        {"indices": np.zeros(300, np.int32), "indptr": np.arange(301, dtype=np.int32)},
    ],
    ids=lambda arrays: " and ".join(arrays) or "nothing",
)
def test_an_invalid_relevance_is_refused(vectors, arrays):
    folder, answers = vectors
    save_file(arrays, folder / "relevance.safetensors")
    assert answers(folder) is None


@pytest.mark.parametrize("key", ["indptr", "indices", "shape"])
def test_shared_labels_that_point_outside_their_memory_are_refused(tmp_path, sign, key):
    """SciPy does not check them."""
    relevance = SharedLabel.of_lists([[row % 3, 3] for row in range(300)], 4)
    folder = current_version(build(relevance, uncertainty=None).save(tmp_path / "own"))
    path = folder / "relevance.safetensors"
    arrays = load_file(path)
    for place in (0, 1, -1):
        for wrong in (-1, 10**6, -(2**31), 2**31 - 1):
            changed = arrays[key].copy()
            changed[place] = wrong
            if key == "shape" and place and wrong > 0:
                continue  # more labels than any item has
            save_file(arrays | {key: changed}, path)
            sign(folder)
            with pytest.raises(CorruptRetriever):
                Retriever.load(folder)


@pytest.mark.parametrize("kind", ["vectors", "images"])
def test_flipped_bits_end_in_a_refusal_or_in_an_answer(saved, tmp_path, sign, kind):
    """Never in a foreign exception, nor in the end of the process."""
    folder, answers = _edited(saved[kind], tmp_path, sign)
    expected, rng = answers(folder), np.random.default_rng(0)
    some = files(folder) if kind == "vectors" else [folder / "encoder.safetensors"]
    for path in some:
        original = path.read_bytes()
        # The head of a file says how the rest is read.
        places = [*range(0, min(len(original), 120), 16), *rng.integers(len(original), size=4)]
        for place in places:
            changed = bytearray(original)
            changed[place] ^= 1 << int(rng.integers(8))
            path.write_bytes(changed)
            found = answers(folder)
            stated = ("controller.safetensors", "retriever.json", "queries.safetensors")
            if path.name not in stated:
                assert found in (None, expected), (path.name, place)
            for answer in found or []:
                assert answer["size"] >= 1, (path.name, place)
                assert np.isfinite(answer["distances"]).all(), (path.name, place)
        path.write_bytes(original)
