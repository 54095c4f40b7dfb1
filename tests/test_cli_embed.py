"""`rcir embed`: the vectors it writes, what it does after an interruption, and its errors."""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet
import pytest
import timm
import torch
from filelock import FileLock
from PIL import Image
from safetensors.torch import save_file

from rcir.cli import main
from rcir.data.images import to_pixels
from rcir.data.vector_files import read_all_vectors
from rcir.errors import DataUnavailable, InvalidData
from rcir.runs.folder import find_run

MODEL = "timm:test_resnet"


@pytest.fixture
def options(tmp_path):
    """Options that name a small network of timm and a file of random weights."""
    torch.manual_seed(0)
    path = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), path)
    return ("--model", MODEL, "--checkpoint", str(path))


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("apple/1.png", "apple/2.png", "pear/1.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        coarse.resize((200, 180)).save(path)
    return tmp_path / "photos"


def embed(source, output="x.parquet", *options):
    assert main(["embed", str(source), "--output", str(output), *options]) == 0
    return pyarrow.parquet.read_table(output)


def embed_shards(source, folder, *options):
    assert main(["embed", str(source), "--output", str(folder), *options]) == 0
    return [pyarrow.parquet.read_table(path) for path in sorted(folder.iterdir())]


def vectors_of(*tables):
    return np.concatenate(
        [np.stack(table["vector"].to_numpy(zero_copy_only=False)) for table in tables]
    )


def assert_same_vectors(vectors, expected):
    """Compare with a tolerance for batches of another size; different images are 100 times that."""
    np.testing.assert_allclose(vectors, expected, atol=2e-5)


def test_capture_times_come_from_exif_data(photos, options, tmp_path):
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9003] = "2026:11:26 09:47:00"
    with Image.open(photos / "apple/1.png") as image:
        image.convert("RGB").save(photos / "apple/3.jpg", exif=exif)
    exif.get_ifd(0x8769)[0x9003] = "    :  :     :  :  "
    with Image.open(photos / "apple/1.png") as image:
        image.convert("RGB").save(photos / "apple/4.jpg", exif=exif)
    assert embed(photos / "pear", tmp_path / "y.parquet", *options)["time"].to_pylist() == [None]
    table = embed(photos, tmp_path / "x.parquet", *options)
    times = dict(zip(table["id"].to_pylist(), table["time"].to_pylist(), strict=True))
    assert times.pop("apple/3.jpg") == "2026-11-26 09:47:00"
    assert set(times.values()) == {None}
    seconds = read_all_vectors(tmp_path / "x.parquet").seconds()
    assert np.nanmax(seconds) == 1795686420  # date -u -d "2026-11-26 09:47:00" +%s
    assert np.isnan(seconds).sum() == 4


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def error_of(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["embed", *map(str, arguments)])
    assert stop.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_vectors_are_those_of_timm_with_its_preprocessing(photos, options):
    table = embed(photos, "x.parquet", *options)
    assert table["id"].to_pylist() == ["apple/1.png", "apple/2.png", "pear/1.png"]
    assert table["label"].to_pylist() == ["apple", "apple", "pear"]
    assert "uncertainty" not in table.schema.names

    cfg = {"file": options[-1]}
    model = timm.create_model("test_resnet", pretrained=True, pretrained_cfg_overlay=cfg).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    images = [Image.open(photos / name) for name in table["id"].to_pylist()]
    with torch.inference_mode():
        features = model.forward_features(torch.stack([transform(image) for image in images]))
    expected = torch.nn.functional.normalize(features.mean((2, 3))).numpy()
    similarities = vectors_of(table) @ expected.T
    assert (1 - similarities.diagonal() < 1e-4).all()
    assert (1 - similarities[~np.eye(3, dtype=bool)] > 2e-4).all()


def test_model_name_depends_on_the_weights_only(photos, options, tmp_path):
    def name(checkpoint, *more):
        table = embed(photos, "x.parquet", "--model", MODEL, "--checkpoint", str(checkpoint), *more)
        return table.schema.metadata[b"rcir.model"].decode()

    weights, copy, other = (tmp_path / f"{word}.safetensors" for word in ("weights", "copy", "new"))
    copy.write_bytes(weights.read_bytes())
    save_file(timm.create_model("test_resnet").state_dict(), other)
    first = name(weights)
    assert first.startswith(f"{MODEL}@")
    assert name(copy, "--batch", "2") == first != name(other)


def test_bfloat16_is_another_model_with_similar_vectors(photos, options, tmp_path, capsys):
    whole = embed(photos, "x.parquet", *options)
    rounded = embed(photos, "x.parquet", *options, "--precision", "bfloat16")
    names = [table.schema.metadata[b"rcir.model"].decode() for table in (whole, rounded)]
    assert names[1] == f"{names[0]}-bfloat16"
    similarities = (vectors_of(whole) * vectors_of(rounded)).sum(axis=1)
    assert ((similarities > 0.999) & (similarities < 1 - 1e-9)).all()
    arguments = (photos, "--output", "shards", *options)
    embed_shards(photos, tmp_path / "shards", *options)
    assert "another model" in error_of(capsys, *arguments, "--precision", "bfloat16")


def test_what_is_complete_is_not_embedded_again(photos, options, capsys, monkeypatch):
    embed(photos, "x.parquet", *options)
    capsys.readouterr()
    monkeypatch.setattr("rcir.data.images.to_pixels", None)
    embed(photos, "x.parquet", *options)
    assert "nothing is embedded" in capsys.readouterr().out


def test_trained_run_adds_its_uncertainty(trained, splits, tmp_path):
    (tmp_path / "digits").mkdir()
    for number, pixels in enumerate(splits.test.images[:5]):
        Image.fromarray(pixels).save(tmp_path / "digits" / f"{number}.png")
    table = embed(tmp_path / "digits", "x.parquet", "--model", str(trained.path))
    run = find_run(str(trained.path))
    expected = run.encoder().embed(run.preprocessing(splits.test.images[:5]))
    np.testing.assert_allclose(vectors_of(table), expected.vectors, atol=1e-4)
    np.testing.assert_allclose(table["uncertainty"], expected.uncertainty, rtol=1e-3)
    assert table.schema.names == ["id", "vector", "uncertainty", "time"]
    assert table.schema.metadata[b"rcir.model"].decode().startswith(f"{trained.path.name}@")


def test_interrupted_command_does_not_read_images_again(
    photos, options, monkeypatch, tmp_path, capsys
):
    whole = embed(photos, "whole.parquet", *options)
    monkeypatch.setattr("rcir.encoders.batches.BLOCK_SIZE", 1)
    broken = photos / "pear" / "1.png"
    content = broken.read_bytes()
    broken.write_bytes(content[:100])
    strict = ("--max-rejects", "0")
    assert "1.png" in error_of(capsys, photos, "--output", "x.parquet", *options, *strict)
    assert not (tmp_path / "x.parquet").exists()

    broken.write_bytes(content)
    reader = Mock(wraps=to_pixels)
    monkeypatch.setattr("rcir.data.images.to_pixels", reader)
    table = embed(photos, "x.parquet", *options)
    assert reader.call_count == 1
    assert_same_vectors(vectors_of(table), vectors_of(whole))
    assert sorted(path.name for path in tmp_path.glob("x.*")) == ["x.parquet"]


@pytest.fixture
def spoilt(photos):
    """The folder with ten more pictures, of which four cannot be read, and their names."""
    rng = np.random.default_rng(1)
    for number in range(10):
        image = Image.fromarray(rng.integers(0, 256, (60, 80, 3), dtype=np.uint8))
        image.save(photos / "pear" / f"{number + 2}.png")
    half = (photos / "pear" / "3.png").read_bytes()[:500]
    contents = {"pear/3.png": half, "pear/4.png": b"", "apple/3.jpg": b"<html>"}
    for name, content in contents.items():
        (photos / name).write_bytes(content)
    (photos / "pear" / "11.png").write_bytes(half)
    return photos, ["apple/3.jpg", "pear/11.png", "pear/3.png", "pear/4.png"]


def rejects_of(path):
    with path.open(newline="") as file:
        return {row["id"]: row["reason"] for row in csv.DictReader(file)}


def test_unreadable_pictures_are_all_listed_and_the_others_embedded(
    spoilt, options, monkeypatch, tmp_path, capsys
):
    photos, bad = spoilt
    # One block has no readable picture.
    monkeypatch.setattr("rcir.encoders.batches.BLOCK_SIZE", 3)
    arguments = ("--output", "x.parquet", *options)
    for few in ((), ("--max-rejects", "3"), ("--max-rejects", "0.28")):
        line = error_of(capsys, photos, *arguments, *few)
        assert "4 of 14" in line
        assert "--max-rejects" in line
        assert "x.rejects.csv" in line
        assert [name in line for name in bad] == [True, True, True, False]
        assert list(rejects_of(tmp_path / "x.rejects.csv")) == bad
        assert not (tmp_path / "x.parquet").exists()

    reader = Mock(wraps=to_pixels)
    with monkeypatch.context() as patch:
        patch.setattr("rcir.data.images.to_pixels", reader)
        table = embed(photos, "x.parquet", "--max-rejects", "0.29", *options)
    assert reader.call_count < 10  # the readable ones were embedded before
    assert "4 of 14" in capsys.readouterr().out
    assert list(rejects_of(tmp_path / "x.rejects.csv")) == bad
    for name in bad:
        (photos / name).unlink()
    whole = embed(photos, "whole.parquet", *options)
    assert table["id"].to_pylist() == whole["id"].to_pylist()
    assert table["label"].to_pylist() == whole["label"].to_pylist()
    assert_same_vectors(vectors_of(table), vectors_of(whole))
    assert sorted(path.name for path in tmp_path.glob("x.*")) == ["x.parquet", "x.rejects.csv"]
    embed(photos, "x.parquet", *options)
    assert not (tmp_path / "x.rejects.csv").exists()


def test_shards_leave_out_unreadable_pictures_also_when_continued(
    spoilt, options, tmp_path, capsys
):
    photos, bad = spoilt
    folder = tmp_path / "x"
    arguments = (photos, "--output", "x", *options, "--shards", "2")
    assert "4 of 14" in error_of(capsys, *arguments)
    with pytest.raises(DataUnavailable):  # nothing reads what is not whole
        read_all_vectors(folder)
    tolerant = ("--shards", "2", "--max-rejects", "4")
    first = embed_shards(photos, folder, *options, *tolerant)
    before = times(folder)
    assert [len(part) for part in first] == [5, 5]
    again = embed_shards(photos, folder, *options, *tolerant)
    assert times(folder) == before
    assert list(rejects_of(tmp_path / "x.rejects.csv")) == bad
    assert [part["id"].to_pylist() for part in again] == [part["id"].to_pylist() for part in first]

    # Repaired, a picture is embedded, in its own shard.
    Image.new("RGB", (60, 80), (9, 99, 199)).save(photos / "pear" / "4.png")
    repaired = embed_shards(photos, folder, *options, *tolerant)
    assert "pear/4.png" in repaired[1]["id"].to_pylist()
    assert times(folder)["part-00000.parquet"] == before["part-00000.parquet"]
    assert list(rejects_of(tmp_path / "x.rejects.csv")) == bad[:3]
    assert read_all_vectors(folder).ids == [
        id for part in repaired for id in part["id"].to_pylist()
    ]


@pytest.mark.parametrize("shards", [(), ("--shards", "2")])
def test_rejected_pictures_are_read_again(photos, options, shards, monkeypatch, tmp_path, capsys):
    for name in ("apple/1.png", "apple/3.png", "pear/2.png"):
        with Image.open(photos / "pear" / "1.png") as image:
            image.rotate(len(name)).resize((300, 240)).save(photos / name)
    output = "x" if shards else "x.parquet"
    arguments = (photos, "--output", output, *options, *shards)
    assert "3 of 5" in error_of(capsys, *arguments, "--max-pixels", "40000")
    if shards:
        few = ("--max-pixels", "40000", "--max-rejects", "3")
        assert sum(map(len, embed_shards(photos, tmp_path / "x", *options, *shards, *few))) == 2
    reader = Mock(wraps=to_pixels)
    with monkeypatch.context() as patch:
        patch.setattr("rcir.data.images.to_pixels", reader)
        assert main(["embed", *map(str, arguments)]) == 0
    assert reader.call_count <= 3 + 5  # the rejects, and then their part
    again, whole = read_all_vectors(tmp_path / output), embed(photos, "whole.parquet", *options)
    assert again.ids == whole["id"].to_pylist()
    assert_same_vectors(again.vectors, vectors_of(whole))


def test_a_shard_without_any_readable_picture_is_refused(photos, options, capsys):
    (photos / "apple" / "1.png").write_bytes(b"")
    line = error_of(
        *(capsys, photos, "--output", "x", *options, "--shards", "3", "--max-rejects", "2")
    )
    assert "part-00000" in line
    assert "apple/1.png" in line


def test_table_of_paths_adds_its_columns(photos, options):
    rows = ["path,key,x,y,shop", "pear/1.png,p,1,2,north", "apple/1.png,a,3,4,"]
    (photos / "t.csv").write_text("\n".join(rows))
    table = embed(photos / "t.csv", "x.parquet", *options)
    columns = {"x": [1.0, 3.0], "y": [2.0, 4.0], "shop": ["north", None], "time": [None, None]}
    assert table.drop_columns(["vector"]).to_pydict() == {"id": ["p", "a"], **columns}
    whole = embed(photos, "y.parquet", *options)
    assert_same_vectors(vectors_of(table), vectors_of(whole)[[2, 0]])


def test_shards_together_equal_one_file_and_only_a_missing_one_is_written(
    photos, options, tmp_path
):
    whole = embed(photos, "whole.parquet", *options)
    folder = tmp_path / "x"
    parts = embed_shards(photos, folder, "--shards", "2", *options)
    assert [len(part) for part in parts] == [1, 2]
    joined = pyarrow.concat_tables(parts).drop_columns(["vector"])
    assert joined.to_pydict() == whole.drop_columns(["vector"]).to_pydict()
    assert_same_vectors(vectors_of(*parts), vectors_of(whole))
    before = times(folder)
    (folder / "part-00001.parquet").unlink()
    again = embed_shards(photos, folder, "--shards", "2", *options)
    after = times(folder)
    assert {name for name in after if after[name] == before[name]} == {"part-00000.parquet"}
    assert again[1].drop_columns(["vector"]) == parts[1].drop_columns(["vector"])
    assert_same_vectors(vectors_of(*again), vectors_of(whole))


def test_folder_with_other_shards_is_refused(photos, options, capsys, tmp_path):
    arguments = (photos, "--output", "x", *options, "--shards")
    embed_shards(photos, tmp_path / "x", *options, "--shards", "3")
    assert "2 files" in error_of(capsys, *arguments, "2")
    assert "fewer" in error_of(capsys, *arguments, "4")
    assert "number" in error_of(capsys, *arguments, "0")
    (photos / "apple" / "1.png").rename(photos / "apple" / "0.png")
    assert "other pictures" in error_of(capsys, *arguments, "3")
    (tmp_path / "x" / "part-00000.parquet").write_bytes(b"PAR1")
    assert "shard" in error_of(capsys, *arguments, "3")


def test_shard_is_embedded_again_after_its_table_or_image_changed(photos, options, tmp_path):
    table, folder = tmp_path / "pictures.csv", tmp_path / "x"
    files = sorted(path.relative_to(tmp_path) for path in photos.rglob("*.png"))

    def shards(labels):
        lines = [f"{path},{label}" for path, label in zip(files, labels, strict=True)]
        table.write_text("\n".join(["path,label", *lines]))
        return embed_shards(table, folder, *options, "--shards", "3")

    first = shards("abc")
    before = times(folder)
    second = shards("abz")
    after = times(folder)
    assert [part["label"].to_pylist() for part in second] == [["a"], ["b"], ["z"]]
    assert [after[name] == before[name] for name in sorted(after)] == [True, True, False]
    (tmp_path / files[0]).write_bytes((tmp_path / files[1]).read_bytes())
    third = shards("abz")
    assert_same_vectors(vectors_of(third[0]), vectors_of(first[1]))
    assert third[1].equals(second[1])


def test_small_change_in_a_long_list_is_a_change(photos, options, tmp_path):
    for last in (0.0, 1e-10):
        numbers = [[0.5] * 1000 + [last] + [0.5] * 1000]
        table = pyarrow.table({"path": ["photos/pear/1.png"], "numbers": numbers})
        pyarrow.parquet.write_table(table, tmp_path / "pictures.parquet")
        arguments = (tmp_path / "pictures.parquet", tmp_path / "x", *options, "--shards", "1")
        (shard,) = embed_shards(*arguments)
        assert shard["numbers"][0].as_py()[1000] == last


@pytest.mark.slow
def test_killed_command_keeps_its_complete_shards(photos, options, tmp_path):
    command = [sys.executable, "-m", "rcir.cli", "embed", str(photos), "--output", "x"]
    command += [*options, "--shards", "3"]
    first = tmp_path / "x" / "part-00000.parquet"
    process = subprocess.Popen(command)
    while not first.exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.wait()
    complete = {path: path.stat().st_mtime_ns for path in (tmp_path / "x").glob("part-*.parquet")}
    if len(complete) < 3:
        with pytest.raises(InvalidData, match="missing"):
            read_all_vectors(tmp_path / "x")
    assert subprocess.run(command, check=False).returncode == 0
    assert all(path.stat().st_mtime_ns == when for path, when in complete.items())
    whole = embed(photos, "whole.parquet", *options)
    assert_same_vectors(read_all_vectors(tmp_path / "x").vectors, vectors_of(whole))
    assert not list((tmp_path / "x").glob(".*"))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_replicas_write_the_same_vectors(photos, options, monkeypatch, ray_cluster):
    alone = embed(photos, "alone.parquet", *options)
    monkeypatch.setattr("rcir.encoders.batches.BLOCK_SIZE", 1)
    table = embed(photos, "x.parquet", *options, "--num_workers", "2")
    assert table.schema == alone.schema
    assert_same_vectors(vectors_of(table), vectors_of(alone))

    (photos / "apple" / "3.png").write_bytes(b"no picture")
    tolerant = ("--num_workers", "2", "--max-rejects", "1")
    table = embed(photos, "y.parquet", *options, *tolerant)
    assert table["id"].to_pylist() == alone["id"].to_pylist()
    assert_same_vectors(vectors_of(table), vectors_of(alone))
    assert list(rejects_of(Path("y.rejects.csv"))) == ["apple/3.png"]


def test_a_failure_leaves_an_empty_folder_of_the_user(photos, capsys, tmp_path):
    for output in ("mine", "mine/x.parquet", "new"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        assert "timm:no" in error_of(capsys, photos, "--model", "timm:no", "--output", output)
        assert [*tmp_path.glob("mine/*"), *tmp_path.glob("new")] == []
        assert (tmp_path / "mine").is_dir()


def test_labels_of_some_pictures_only_are_refused(photos, options, capsys, tmp_path):
    (photos / "1.png").write_bytes((photos / "pear/1.png").read_bytes())
    assert "1 of 4" in error_of(capsys, photos, *options, "--output", "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("output", ["x.parquet", "x"])
def test_two_commands_do_not_write_one_output(photos, options, output, capsys, tmp_path):
    folder = tmp_path / (".x.parquet.parts" if output == "x.parquet" else "x/.parts")
    folder.mkdir(parents=True)
    (folder / "plan.parquet").write_bytes(b"of the other command")
    with FileLock(folder / "lock"):
        assert "another command" in error_of(capsys, photos, *options, "--output", output)
    assert (folder / "plan.parquet").read_bytes() == b"of the other command"
    assert main(["embed", str(photos), *options, "--output", output]) == 0
    assert not folder.exists()


def test_the_end_of_a_command_leaves_the_plan_of_the_next_one(
    photos, options, monkeypatch, tmp_path
):
    folder, following = tmp_path / ".x.parquet.parts", []

    class Watched(FileLock):
        def release(self, force=False):
            super().release(force)
            if not following:
                following.append(FileLock(folder / "lock", timeout=0))
                folder.mkdir(exist_ok=True)
                following[0].acquire()
                (folder / "plan.parquet").touch()

    monkeypatch.setattr("rcir.runs.embedding.FileLock", Watched)
    embed(photos, "x.parquet", *options)
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "plan.parquet"]
    following[0].release()


@pytest.mark.parametrize(
    ("source", "model", "output", "word"),
    [
        ("photos", MODEL, "x.csv", ".parquet"),
        ("photos", MODEL, "s3://bucket/vectors", "s3://bucket/vectors"),
        ("photos", MODEL, "no/x.parquet", "folder"),
        ("photos", "resnet18", "x.parquet", "timm:resnet18"),
        ("photos", "resnet34 --checkpoint a.safetensors", "x.parquet", "timm:resnet34"),
        ("photos/apple/1.png", MODEL, "x.parquet", "folder"),
        ("windows.csv", MODEL, "x.parquet", "relative"),
        ("capitals.csv", MODEL, "x.parquet", "rename Path to path"),
        ("nowhere", MODEL, "x.parquet", "nowhere"),
        ("photos", "timm:no", "x.parquet", "timm:no"),
        ("photos", f"{MODEL} --checkpoint a.pth", "x.parquet", "safetensors"),
        ("photos", "run --checkpoint a.safetensors", "x.parquet", "checkpoint"),
    ],
)
def test_invalid_arguments_are_one_line_and_write_nothing(
    photos, source, model, output, word, capsys, tmp_path
):
    (tmp_path / "windows.csv").write_text("path\nC:\\Users\\Eva\\1.jpg\n")
    (tmp_path / "capitals.csv").write_text("Path,Label\nphotos/apple/1.png,apple\n")
    assert word in error_of(capsys, source, "--model", *model.split(), "--output", output)
    assert not list(tmp_path.glob("x.*"))


def test_a_name_that_is_not_utf8_is_refused_before_anything_is_embedded(tmp_path, capsys):
    folder = tmp_path / os.fsdecode(b"pictures/caf\xe9")
    folder.mkdir(parents=True)
    (folder / "1.png").touch()
    (tmp_path / "pictures" / "2.png").touch()
    arguments = (tmp_path / "pictures", "--model", MODEL, "--output", tmp_path / "out.parquet")
    assert r"caf\udce9" in error_of(capsys, *arguments)
