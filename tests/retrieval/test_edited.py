"""Folders that are consistent and wrong: whatever was edited, with checksums made anew."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rcir.data import ImageSet
from rcir.data.relevance import SharedLabel
from rcir.errors import CorruptRetriever, InvalidConfig, InvalidData, StaleCalibration
from rcir.retrieval.retriever import Retriever
from rcir.risk import SCORE_FUNCTIONS

WRONG = (None, True, -1, 0, 2.5, float("nan"), 10**9, "x", [], {}, ["x"], [None], {"x": 1})


def sign(folder):
    """Make the manifest vouch for the files as they are."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        manifest["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


def outcome(folder, images):
    """The answers of an edited folder; None where it is refused."""
    sign(folder)
    try:
        return [answer.to_dict() for answer in Retriever.load(folder).retrieve(images, 0.5, 0.1)]
    except (CorruptRetriever, StaleCalibration, InvalidConfig, InvalidData):
        return None


@pytest.fixture(scope="module")
def saved(retriever, splits, tmp_path_factory):
    """A folder, with the answers that it gives."""
    folder = retriever.save(tmp_path_factory.mktemp("saved") / "retriever")
    images = list(splits.test.images[:3])
    return folder, images, [answer.to_dict() for answer in retriever.retrieve(images, 0.5, 0.1)]


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "copy")


def places_of(values, path=()):
    """The paths of all values within plain values."""
    yield path
    items = values.items() if isinstance(values, dict) else enumerate(values[:2])
    for key, value in items:
        if isinstance(value, dict | list):
            yield from places_of(value, (*path, key))
        else:
            yield (*path, key)


def test_whatever_a_field_says_is_refused_or_changes_no_answer(copy, saved):
    _, images, expected = saved
    path = copy / "retriever.json"
    original = path.read_text()
    # What no answer depends on may say anything of its kind; fewer retrievers, another guarantee.
    free = {"origin", "chosen_among", "label_names"}
    places = [place for place in places_of(json.loads(original)) if place]
    assert len(places) > 40
    for number, (*parents, name) in enumerate(places):
        for wrong in WRONG[number % 6 :: 6]:
            description = json.loads(original)
            inner = description
            for parent in parents:
                inner = inner[parent]
            if type(wrong) is type(inner[name]) and (wrong == inner[name] or name in free):
                continue
            inner[name] = wrong
            path.write_text(json.dumps(description))
            assert outcome(copy, images) in (None, expected), (parents, name, wrong)
    for name in json.loads(original):
        description = json.loads(original)
        del description[name]
        path.write_text(json.dumps(description))
        assert outcome(copy, images) is None, name


@pytest.mark.parametrize(
    "content", ["", "[]", "3", "null", "[" * 100_000, '{"encoder": {}}', "\x00"]
)
def test_another_description_is_refused(copy, saved, content):
    (copy / "retriever.json").write_text(content)
    assert outcome(copy, saved[1]) is None


@pytest.mark.parametrize("content", ["", "{}", "3", "null", '["a"]', '"abc"', "[1, 2]"])
def test_other_ids_are_refused(copy, saved, content):
    (copy / "gallery.json").write_text(content)
    assert outcome(copy, saved[1]) is None


def harms(values):
    """An array that was made wrong in one way, each."""
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


@pytest.mark.parametrize(
    "name", ["uncertainty.npy", "digests.npy", "queries.npy", "index/vectors.npy"]
)
def test_another_array_is_refused(copy, saved, name):
    values = np.load(copy / name)
    for changed in harms(values):
        np.save(copy / name, changed)
        assert outcome(copy, saved[1]) is None, (changed.dtype, changed.shape)


@pytest.mark.parametrize(
    "name", ["encoder.safetensors", "relevance.safetensors", "queries.safetensors"]
)
def test_other_arrays_of_a_file_are_refused(copy, saved, name):
    arrays = load_file(copy / name)
    for key, values in arrays.items():
        for changed in harms(values):
            if changed.dtype.kind not in "fiu":
                continue
            save_file(arrays | {key: np.ascontiguousarray(changed)}, copy / name)
            assert outcome(copy, saved[1]) is None, (key, changed.dtype, changed.shape)
        if ".relevance." in key:
            continue  # which need not be known
        save_file({other: arrays[other] for other in arrays if other != key}, copy / name)
        assert outcome(copy, saved[1]) is None, key
    save_file(arrays | {"extra": np.zeros(2)}, copy / name)
    assert outcome(copy, saved[1]) is None


@pytest.mark.parametrize(
    "score_function",
    [
        "learned",
        *(pytest.param(n, marks=pytest.mark.slow) for n in SCORE_FUNCTIONS if n != "learned"),
    ],
)
def test_other_numbers_of_a_calibration_are_refused(retriever, splits, tmp_path, score_function):
    own = Retriever.build(retriever.encoder, retriever.preprocessing, splits.gallery, depth=60)
    own.calibrate(
        own.search_labelled(splits.tuning, "occluded"),
        own.search_labelled(splits.calibration, "occluded"),
        score_function,
    )
    folder = own.save(tmp_path / "own")
    images = list(splits.test.images[:2])
    path = folder / "controller.safetensors"
    arrays = load_file(path)
    assert outcome(folder, images) is not None
    for number, (key, values) in enumerate(arrays.items()):
        few = len(arrays) > 30
        kinds = list(harms(values))[number % 4 :: 4] if few else harms(values)
        for changed in map(np.ascontiguousarray, kinds):
            same = changed.shape == values.shape and changed.dtype == values.dtype
            if changed.dtype.kind not in "fiu" or (same and np.array_equal(changed, values)):
                continue
            if key.endswith("candidate_scores") and same and np.isposinf(changed).any():
                continue  # of rank 1: infinite from there on
            whole = changed.dtype == values.dtype and changed.ndim == 1 and len(changed) > 0
            if key.endswith(".sample") and whole and np.isfinite(changed).all():
                continue  # the sample of other queries
            save_file(arrays | {key: changed}, path)
            assert outcome(folder, images) is None, (key, changed.dtype, changed.shape)


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
    ],
)
@pytest.mark.parametrize("part", ["None.main.calibration", "label.main.tuning"])
def test_results_that_cannot_be_are_refused(copy, saved, part, name, change):
    path = copy / "controller.safetensors"
    arrays = load_file(path)
    key = f"{part}.{name}"
    arrays[key] = np.ascontiguousarray(change(arrays[key]))
    save_file(arrays, path)
    assert outcome(copy, saved[1]) is None


@pytest.mark.parametrize("key", ["indptr", "indices", "shape"])
def test_labels_that_point_elsewhere_are_refused(retriever, splits, tmp_path, key):
    """What scipy takes on trust: positions outside of its memory."""
    relevance = SharedLabel.of_lists([[row % 3, 3] for row in range(300)], 4)
    gallery = ImageSet(splits.gallery.images, None, splits.gallery.ids, {}, relevance)
    own = Retriever.build(retriever.encoder, retriever.preprocessing, gallery)
    folder = own.save(tmp_path / "own")
    path = folder / "relevance.safetensors"
    arrays = load_file(path)
    for place in (0, 1, -1):
        for wrong in (-1, 10**6, -(2**31), 2**31 - 1):
            changed = arrays[key].copy()
            changed[place] = wrong
            if key == "shape" and place and wrong > 0:
                continue  # more labels than any image has
            save_file(arrays | {key: changed}, path)
            sign(folder)
            with pytest.raises(CorruptRetriever):
                Retriever.load(folder)


@pytest.mark.parametrize(
    "name",
    [
        *("retriever.json", "encoder.safetensors", "controller.safetensors", "index/vectors.npy"),
        *("gallery.json", "relevance.safetensors", "uncertainty.npy", "digests.npy", "queries.npy"),
    ],
)
def test_flipped_bits_end_in_a_refusal_or_in_an_answer(copy, saved, name):
    """Never in an exception of somebody else's, nor in the end of the process."""
    _, images, expected = saved
    path, rng = copy / name, np.random.default_rng(0)
    original = path.read_bytes()
    # The head of a file says how the rest is read.
    places = [*range(0, min(len(original), 120), 5), *rng.integers(len(original), size=12).tolist()]
    for place in places:
        changed = bytearray(original)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        answers = outcome(copy, images)
        if name not in ("controller.safetensors", "retriever.json"):
            assert answers in (None, expected), place
        for answer in answers or []:
            assert answer["size"] >= 1, place
            assert np.isfinite(answer["distances"]).all(), place


def test_signed_again_as_it_is_it_is_read(copy, saved):
    assert outcome(copy, saved[1]) == saved[2]
