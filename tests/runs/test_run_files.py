"""The files of a run: its configuration, what was measured, and what it was trained on."""

import hashlib
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from rcir import tracking
from rcir.data import ImageSet, Splits
from rcir.data.relevance import SharedLabel
from rcir.errors import InvalidData
from rcir.risk import Certified
from rcir.runs.folder import FOLDER_TAG, RunFolder, TrainedOn, find_run, read_run
from rcir.runs.results import RunResults, digest_names

# The configuration


def test_a_run_is_read_as_it_was_written(tmp_path):
    assert read_run(tmp_path) is None
    assert read_run(tmp_path / "missing") is None
    run = RunFolder(tmp_path, {"data": {"name": "digits"}, "batch": 3}, "0123", "sqlite:///x.db")
    for one in (run, replace(run, finished=True)):
        one.write()
        assert read_run(tmp_path) == one
    for content in ("", "{", "[]", '{"config": {}}', '{"unknown": 1}'):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(InvalidData, match="damaged"):
            read_run(tmp_path)


def test_a_run_is_found_by_its_mlflow_run_and_where_its_folder_moved(trained, tmp_path):
    assert find_run(trained.mlflow_run).path == trained.path
    run = find_run(str(shutil.copytree(trained.path, tmp_path / "elsewhere")))
    assert (run.path, run.mlflow_run) == (tmp_path / "elsewhere", trained.mlflow_run)
    assert run.encoder().fingerprint() == trained.encoder().fingerprint()


def test_missing_runs_are_refused():
    for reference in ("no-such-run", ".", "0123456789abcdef0123456789abcdef"):
        with pytest.raises(InvalidData, match="not a folder"):
            find_run(reference)
    tracked = tracking.start_run("elsewhere", {FOLDER_TAG: "/not/on/this/machine"})
    with pytest.raises(InvalidData, match="/not/on/this/machine"):
        find_run(tracked.id)


def test_files_are_readable_by_others(trained, tmp_path):
    (tmp_path / "plain").touch()
    files = [file for file in trained.path.rglob("*") if file.is_file()]
    assert {file.stat().st_mode for file in files} == {(tmp_path / "plain").stat().st_mode}


# What was measured


@pytest.fixture
def measured():
    rng = np.random.default_rng(0)
    parts = [
        Certified(np.append(scores, np.float32(np.inf)), np.sort(candidate_scores))
        for scores, candidate_scores in (
            (rng.random(n, np.float32), rng.random((n + 2, 4), np.float32)) for n in range(2, 13)
        )
    ]
    metrics = {"recall_at_1": 0.75, "ece": 0.1}
    return RunResults("validation", digest_names(["a", "b"]), parts, metrics, "minmax")


def test_results_are_read_as_they_were_written(measured, tmp_path):
    path = tmp_path / "m"
    for results in (measured, replace(measured, on="test", parts=[], score_function="learned")):
        results.write(path)
        read = RunResults.read(path)
        for name in ("on", "queries", "metrics", "score_function"):
            assert getattr(read, name) == getattr(results, name)
        for same, expected in zip(read.parts, results.parts, strict=True):
            for name in ("scores", "candidate_scores"):
                np.testing.assert_array_equal(getattr(same, name), getattr(expected, name))
    replace(measured, metrics={"ece": np.nan, "recall_at_1": 0.5}).write(path)
    assert RunResults.read(path).metrics == {"recall_at_1": 0.5}


def test_a_failed_write_leaves_the_previous_file(measured, tmp_path):
    path = tmp_path / "m"
    measured.write(path)
    before = path.read_bytes()
    with pytest.raises(InvalidData):
        replace(measured, queries=3).write(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["m"]
    for length in (0, 7, 40, -1):
        path.write_bytes(before[:length])
        with pytest.raises(InvalidData, match="damaged"):
            RunResults.read(path)


def test_other_contents_are_refused(tmp_path):
    for metadata in (None, {"results": "{}"}, {"results": '{"on": "train"}'}):
        save_file({"scores": np.zeros(3, np.float32)}, tmp_path / "m", metadata)
        with pytest.raises(InvalidData, match="damaged"):
            RunResults.read(tmp_path / "m")


# What it was trained on


def images(part, rows, classes=None):
    """A picture for each number; its label is the number of tens."""
    pixels = np.array(rows, np.uint8)[:, None, None] + np.zeros((2, 3), np.uint8)
    attributes = {} if classes is None else {"class": np.array(classes)}
    names = [f"{part}-{row}" for row in rows]
    return ImageSet(pixels, np.array(rows) // 10, names, attributes)


def splits(train=(0, 1), validation=(10,), gallery=(0,), queries=((20,), (21, 22), (23,))):
    rest = zip(("tuning", "calibration", "test"), queries, strict=True)
    return Splits(
        images("train", train),
        images("validation", validation),
        images("gallery", gallery),
        **{name: images(name, rows) for name, rows in rest},
    )


def digest(number):
    """BLAKE2 of the shape and the pixels."""
    return hashlib.blake2b(b"(2, 3)" + bytes([number] * 6), digest_size=16).hexdigest()


def test_pictures_and_classes_of_training_and_validation_are_kept(tmp_path):
    with pytest.raises(InvalidData, match="missing"):
        TrainedOn.read(tmp_path)
    record = TrainedOn.from_splits(splits(train=(0, 1, 0)))
    record.write(tmp_path)
    for one in (record, TrainedOn.read(tmp_path)):
        assert one.images.astype(str).tolist() == sorted(map(digest, (0, 1, 10)))
        assert (one.classes, one.zero_shot) == (["0", "1"], True)
    for content in ("", "[]", "{}", '{"images": 3, "classes": [], "zero_shot": 1}'):
        (tmp_path / "trained_on.json").write_text(content)
        with pytest.raises(InvalidData, match="damaged"):
            TrainedOn.read(tmp_path)


def test_class_names_come_before_labels_and_several_labels_are_not_kept():
    parts = [images(name, [number], [f"class {number}"]) for number, name in enumerate("abcdef")]
    record = TrainedOn.from_splits(Splits(*parts))
    assert (record.classes, record.zero_shot) == (["class 0", "class 1"], True)
    several = [
        ImageSet(part.images, None, part.ids, {}, SharedLabel.from_lists([[number]], 6))
        for number, part in enumerate(parts)
    ]
    record = TrainedOn.from_splits(Splits(*several))
    assert (record.classes, record.zero_shot) == ([], False)
    record.require_unseen(Splits(*several))


def test_queries_that_were_trained_on_are_refused_by_name():
    record = TrainedOn.from_splits(splits(gallery=(11,)))
    assert record.zero_shot
    record.require_unseen(splits())
    record.require_unseen(splits(train=(23,)))  # the training split of now does not matter
    other = TrainedOn.from_splits(splits(queries=((20,), (2,), (23,))))
    assert not other.zero_shot
    other.require_unseen(splits(queries=((20,), (11,), (23,))))
    with pytest.raises(InvalidData, match=r"on 2 of the queries \(tuning-0, test-10\)"):
        other.require_unseen(splits(queries=((20, 0), (11,), (23, 10))))
    with pytest.raises(InvalidData, match=r"6 .*(tuning-1, ){5}\.\.\."):
        other.require_unseen(splits(queries=((1,) * 6, (11,), (23,))))


def test_classes_that_were_trained_on_are_refused_if_the_split_was_zero_shot():
    record = TrainedOn.from_splits(splits())
    with pytest.raises(InvalidData, match=r"2 classes .*\(0, 1\)"):
        record.require_unseen(splits(queries=((20,), (11, 22), (5,))))
    with pytest.raises(InvalidData, match="classes"):
        record.require_unseen(splits(queries=((11,), (21,), (23,))))


def test_a_run_that_continues_with_other_images_is_trained_on_both():
    first, second = (
        TrainedOn.from_splits(splits()),
        TrainedOn.from_splits(splits((2, 0), (30,), queries=((2,),) * 3)),
    )
    for one, other in ((first, second), (second, first)):
        both = one.merge(other)
        assert both.images.astype(str).tolist() == sorted(map(digest, (0, 1, 2, 10, 30)))
        assert (both.classes, both.zero_shot) == (["0", "1", "3"], True)
    assert not second.merge(second).zero_shot
