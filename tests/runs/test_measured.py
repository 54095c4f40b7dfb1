"""What was measured of a run: written, read, refused where it is damaged."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rcir.errors import InvalidData
from rcir.risk import Certified
from rcir.runs.results import RunResults, names_digest


def part(n, m, depth, seed=0):
    rng = np.random.default_rng(seed)
    scores = rng.gamma(2, size=n).astype(np.float32)
    scores[0] = np.inf
    return Certified(scores, np.sort(rng.gamma(2, size=(m, depth)).astype(np.float32), axis=1))


@pytest.fixture
def measured():
    parts = [part(number + 3, number + 5, 4, number) for number in range(11)]
    metrics = {"recall_at_1": 0.75, "ece": 0.1, "alpha-0.1/recall/threshold": 3.0}
    return RunResults("validation", names_digest(["a", "b"]), parts, metrics, "minmax")


def assert_same(found, expected):
    for name in ("on", "queries", "metrics", "score_function"):
        assert getattr(found, name) == getattr(expected, name)
    for one, other in zip(found.parts, expected.parts, strict=True):
        for name in ("scores", "candidate_scores"):
            assert getattr(one, name).dtype == np.float32
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_it_survives_the_disk(measured, tmp_path):
    path = tmp_path / "validation.safetensors"
    measured.write(path)
    assert_same(RunResults.read(path), measured)
    assert [each.name for each in tmp_path.iterdir()] == ["validation.safetensors"]
    other = replace(
        measured, on="test", parts=[part(9, 8, 7)], metrics={}, score_function="learned"
    )
    other.write(path)
    assert_same(RunResults.read(path), other)
    without = replace(measured, parts=[])
    without.write(path)
    assert_same(RunResults.read(path), without)


def test_any_reader_of_safetensors_understands_it(measured, tmp_path):
    measured.write(tmp_path / "m")
    arrays = load_file(tmp_path / "m")
    assert set(arrays) == {
        f"{name}.{i}" for name in ("scores", "candidate_scores") for i in range(11)
    }
    np.testing.assert_array_equal(
        arrays["candidate_scores.10"], measured.parts[10].candidate_scores
    )


def test_arrays_in_another_order_of_memory_are_written_as_they_are_read(measured, tmp_path):
    whole = part(8, 6, 5)
    view = Certified(whole.scores[::2], whole.candidate_scores[::2])
    turned = Certified(whole.scores[::-1], np.asfortranarray(whole.candidate_scores))
    replace(measured, parts=[view, turned]).write(tmp_path / "m")
    found = RunResults.read(tmp_path / "m").parts
    np.testing.assert_array_equal(found[0].candidate_scores, whole.candidate_scores[[0, 2, 4]])
    np.testing.assert_array_equal(found[1].scores, whole.scores[::-1])
    np.testing.assert_array_equal(found[1].candidate_scores, whole.candidate_scores)


@pytest.mark.parametrize("kept", [0, 7, 40, -1])
def test_a_file_cut_short_is_damaged(measured, tmp_path, kept):
    path = tmp_path / "m"
    measured.write(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InvalidData, match=r"m is damaged.*train or calibrate again"):
        RunResults.read(path)


GOOD = {"scores.0": np.zeros(3, np.float32), "candidate_scores.0": np.zeros((2, 4), np.float32)}
FACTS = {"on": "test", "queries": "0", "metrics": {"ece": 0.5}, "score_function": "minmax"}


@pytest.mark.parametrize(
    ("arrays", "facts"),
    [
        ({"scores.0": GOOD["scores.0"]}, {}),
        ({"scores.1": GOOD["scores.0"], "candidate_scores.1": GOOD["candidate_scores.0"]}, {}),
        (GOOD | {"scores.0": np.zeros((3, 1), np.float32)}, {}),
        (GOOD | {"scores.0": np.zeros(0, np.float32)}, {}),
        (GOOD | {"candidate_scores.0": np.zeros((0, 4), np.float32)}, {}),
        (GOOD | {"candidate_scores.0": np.zeros(4, np.float32)}, {}),
        (GOOD | {"candidate_scores.0": np.zeros((2, 4), np.float64)}, {}),
        (GOOD, {"on": "train"}),
        (GOOD, {"queries": 3}),
        (GOOD, {"metrics": {"ece": "high"}}),
        (GOOD, {"metrics": [1]}),
        (GOOD, {"score_function": None}),
        (GOOD, {"unknown": 1}),
    ],
)
def test_what_was_never_written_is_damaged(tmp_path, arrays, facts):
    path = tmp_path / "m"
    save_file(GOOD, path, {name: json.dumps(value) for name, value in FACTS.items()})
    RunResults.read(path)
    save_file(arrays, path, {name: json.dumps(value) for name, value in (FACTS | facts).items()})
    with pytest.raises(InvalidData, match="is damaged"):
        RunResults.read(path)


@pytest.mark.parametrize("metadata", [None, {}, {"on": "test"}, {"on": "{"}])
def test_safetensors_of_something_else_are_refused(tmp_path, metadata):
    save_file(GOOD, tmp_path / "m", metadata)
    with pytest.raises(InvalidData, match="is damaged"):
        RunResults.read(tmp_path / "m")


def test_a_write_that_fails_leaves_what_was_there(measured, tmp_path):
    path = tmp_path / "m"
    measured.write(path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        replace(measured, metrics={"ece": object()}).write(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["m"]


def test_the_digest_is_of_the_names_in_order():
    assert names_digest(["a", 'b"']) == hashlib.sha256(rb'["a", "b\""]').hexdigest()
    assert len({names_digest(names) for names in (["a", "b"], ["b", "a"], ["ab"], ["a"])}) == 4
