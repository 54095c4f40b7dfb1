"""`rcir embed`: what it writes, and how it fails."""

import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from rcir.cli import main
from rcir.data.vector_shards import read_all_vectors
from rcir.encoders import embedder
from rcir.errors import InvalidData
from rcir.runs.folder import find_run

MODEL = "timm:test_resnet"


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), path)
    return str(path)


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("apple/1.png", "apple/2.png", "pear/1.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        coarse.resize((200, 180)).save(path)
    return tmp_path / "photos"


def embedded(source, output="x.parquet", *options):
    assert main(["embed", str(source), "--output", str(output), *options]) == 0
    return pyarrow.parquet.read_table(output)


def vectors_of(table):
    return np.stack(table["vector"].to_numpy(zero_copy_only=False))


def failed(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["embed", *map(str, arguments)])
    assert stop.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_vectors_are_those_of_timm_with_its_own_preprocessing(photos, checkpoint):
    table = embedded(photos, "x.parquet", "--model", MODEL, "--checkpoint", checkpoint)
    assert table["id"].to_pylist() == ["apple/1.png", "apple/2.png", "pear/1.png"]
    assert table["label"].to_pylist() == ["apple", "apple", "pear"]
    assert "uncertainty" not in table.schema.names

    cfg = {"file": checkpoint}
    model = timm.create_model("test_resnet", pretrained=True, pretrained_cfg_overlay=cfg).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    pictures = [Image.open(photos / name) for name in table["id"].to_pylist()]
    with torch.inference_mode():
        features = model.forward_features(torch.stack([transform(one) for one in pictures]))
    expected = torch.nn.functional.normalize(features.mean((2, 3))).numpy()
    own = vectors_of(table)
    np.testing.assert_allclose(np.linalg.norm(own, axis=1), 1, atol=1e-6)
    assert ((own * expected).sum(1) > 0.9999).all()
    others = [(expected[0] * expected[k]).sum() for k in (1, 2)]
    assert max(others) < 0.9999


def test_the_name_tells_models_apart_and_is_the_same_again(photos, checkpoint, tmp_path):
    def name(*options):
        table = embedded(photos, "x.parquet", *options)
        return table.schema.metadata[b"rcir.model"].decode()

    first = name("--model", MODEL, "--checkpoint", checkpoint)
    assert first.startswith(f"{MODEL}@")
    elsewhere = tmp_path / "elsewhere.safetensors"
    elsewhere.write_bytes((tmp_path / "weights.safetensors").read_bytes())
    assert name("--model", MODEL, "--checkpoint", str(elsewhere), "--batch", "2") == first
    other = tmp_path / "other.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), other)
    assert name("--model", MODEL, "--checkpoint", str(other)) != first


def test_a_trained_run_states_its_uncertainty(trained, splits, tmp_path):
    (tmp_path / "digits").mkdir()
    for number, pixels in enumerate(splits.test.images[:5]):
        Image.fromarray(pixels).save(tmp_path / "digits" / f"{number}.png")
    table = embedded(tmp_path / "digits", "x.parquet", "--model", str(trained.path))
    run = find_run(str(trained.path))
    expected = run.encoder().embed(run.preprocessing(splits.test.images[:5]))
    np.testing.assert_allclose(vectors_of(table), expected.vectors, atol=1e-6)
    np.testing.assert_allclose(table["uncertainty"], expected.uncertainty, rtol=1e-5)
    assert table.schema.names == ["id", "vector", "uncertainty"]
    assert table.schema.metadata[b"rcir.model"].decode().startswith(f"{trained.path.name}@")


def test_what_was_embedded_before_an_interruption_is_not_embedded_again(
    photos, checkpoint, monkeypatch, tmp_path, capsys
):
    options = ("--model", MODEL, "--checkpoint", checkpoint)
    whole = embedded(photos, "whole.parquet", *options)
    monkeypatch.setattr("rcir.encoders.batches.CHUNK", 1)
    broken = photos / "pear" / "1.png"
    content = broken.read_bytes()
    broken.write_bytes(content[:100])
    assert "1.png" in failed(capsys, photos, "--output", "x.parquet", *options)
    assert not (tmp_path / "x.parquet").exists()
    assert len(list((tmp_path / "x.parquet.parts").iterdir())) == 2

    broken.write_bytes(content)
    made = []
    embed_block = embedder.embed_block

    def counted(encoder, preprocessing, images, batch):
        made.extend(images)
        return embed_block(encoder, preprocessing, images, batch)

    monkeypatch.setattr(embedder, "embed_block", counted)
    table = embedded(photos, "x.parquet", *options)
    assert made == [broken]
    np.testing.assert_allclose(vectors_of(table), vectors_of(whole), atol=1e-6)
    assert not (tmp_path / "x.parquet.parts").exists()


def test_a_table_brings_its_columns(photos, checkpoint):
    rows = ["path,key,x,y,shop", "pear/1.png,p,1,2,north", "apple/1.png,a,3,4,"]
    (photos / "t.csv").write_text("\n".join(rows))
    options = ("--model", MODEL, "--checkpoint", checkpoint)
    table = embedded(photos / "t.csv", "x.parquet", *options)
    known = table.drop_columns(["vector"]).to_pydict()
    columns = {"x": [1.0, 3.0], "y": [2.0, 4.0], "shop": ["north", None]}
    assert known == {"id": ["p", "a"], **columns}
    whole = embedded(photos, "y.parquet", *options)
    np.testing.assert_allclose(vectors_of(table), vectors_of(whole)[[2, 0]], atol=1e-6)


def test_shards_are_the_vectors_of_one_file_and_are_kept(photos, checkpoint, monkeypatch, tmp_path):
    options = ("--model", MODEL, "--checkpoint", checkpoint)
    whole = embedded(photos, "whole.parquet", *options)
    arguments = ["embed", str(photos), "--output", "x", "--shards", "2", *options]
    assert main(arguments) == 0
    files = sorted((tmp_path / "x").iterdir())
    assert [file.name for file in files] == ["part-00000.parquet", "part-00001.parquet"]
    parts = [pyarrow.parquet.read_table(file) for file in files]
    assert [len(part) for part in parts] == [1, 2]
    for name in ("id", "label"):
        assert parts[0][name].to_pylist() + parts[1][name].to_pylist() == whole[name].to_pylist()
    both = np.concatenate([vectors_of(part) for part in parts])
    np.testing.assert_allclose(both, vectors_of(whole), atol=1e-6)
    files[1].unlink()
    before = files[0].stat().st_mtime_ns
    made = []
    embed_block = embedder.embed_block
    monkeypatch.setattr(
        *(embedder, "embed_block"),
        lambda *given: made.extend(given[2]) or embed_block(*given),
    )
    assert main(arguments) == 0
    assert [path.name for path in made] == ["2.png", "1.png"]
    assert files[0].stat().st_mtime_ns == before
    assert pyarrow.parquet.read_table(files[1]).equals(parts[1])


def test_shards_of_others_are_not_taken_for_ones_own(photos, checkpoint, capsys, tmp_path):
    options = ("--output", "x", "--model", MODEL, "--checkpoint", checkpoint, "--shards")
    assert main(["embed", str(photos), *options, "3"]) == 0
    assert "none of the 2 files" in failed(capsys, photos, *options, "2")
    assert "give fewer" in failed(capsys, photos, *options, "4")
    (photos / "apple" / "1.png").rename(photos / "apple" / "0.png")
    assert "of other pictures, or of another model" in failed(capsys, photos, *options, "3")
    assert "and a number from 1" in failed(capsys, photos, *options, "0")
    (tmp_path / "x" / "part-00000.parquet").write_bytes(b"PAR1")
    assert "is no shard of vectors" in failed(capsys, photos, *options, "3")


def test_what_changed_since_a_shard_was_written_is_embedded_anew(photos, checkpoint, tmp_path):
    table = tmp_path / "pictures.csv"
    files = sorted(path.relative_to(tmp_path) for path in photos.rglob("*.png"))
    options = ["--output", "x", "--model", MODEL, "--checkpoint", checkpoint, "--shards", "3"]

    def shards(labels):
        lines = [f"{path},{label}" for path, label in zip(files, labels, strict=True)]
        table.write_text("\n".join(["path,label", *lines]))
        assert main(["embed", str(table), *options]) == 0
        return [pyarrow.parquet.read_table(path) for path in sorted((tmp_path / "x").iterdir())]

    first = shards("abc")
    before = [path.stat().st_mtime_ns for path in sorted((tmp_path / "x").iterdir())]
    second = shards("abz")
    after = [path.stat().st_mtime_ns for path in sorted((tmp_path / "x").iterdir())]
    assert [part["label"].to_pylist() for part in second] == [["a"], ["b"], ["z"]]
    assert [new == old for new, old in zip(after, before, strict=True)] == [True, True, False]
    other = next(path for path in files[1:] if path != files[0])
    (tmp_path / files[0]).write_bytes((tmp_path / other).read_bytes())
    third = shards("abz")
    np.testing.assert_allclose(vectors_of(third[0]), vectors_of(first[1]), atol=1e-6)
    assert third[1].equals(second[1])


def test_a_small_change_in_a_long_list_is_a_change(photos, checkpoint, tmp_path):
    files = sorted(str(path.relative_to(tmp_path)) for path in photos.rglob("*.png"))
    options = ["--output", "x", "--model", MODEL, "--checkpoint", checkpoint, "--shards", "3"]
    for last in (0.0, 1e-10):
        numbers = [[0.5] * 1000 + [last] + [0.5] * 1000 for _ in files]
        table = pyarrow.table({"path": files, "numbers": numbers})
        pyarrow.parquet.write_table(table, tmp_path / "pictures.parquet")
        assert main(["embed", str(tmp_path / "pictures.parquet"), *options]) == 0
        shards = [pyarrow.parquet.read_table(path) for path in sorted((tmp_path / "x").iterdir())]
        assert [shard["numbers"][0].as_py()[1000] for shard in shards] == [last] * 3


@pytest.mark.slow
def test_a_killed_process_goes_on_where_it_was(photos, checkpoint, tmp_path):
    """SIGKILL after each change in the folder: what is complete is never embedded again."""
    command = [sys.executable, "-m", "rcir.cli", "embed", str(photos), "--output", "x"]
    command += ["--model", MODEL, "--checkpoint", checkpoint, "--shards", "3"]
    first = tmp_path / "x" / "part-00000.parquet"
    process = subprocess.Popen(command)
    while not first.exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "x").glob("part-*.parquet")}
    if len(kept) < 3:
        with pytest.raises(InvalidData, match="others are missing"):
            read_all_vectors(tmp_path / "x")
    assert subprocess.run(command, check=False).returncode == 0
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    whole = embedded(photos, "whole.parquet", *command[-6:-2])
    np.testing.assert_allclose(
        read_all_vectors(tmp_path / "x").vectors, vectors_of(whole), atol=1e-6
    )
    assert not list((tmp_path / "x").glob(".*"))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_replicas_write_the_same(photos, checkpoint, monkeypatch, ray_cluster):
    options = ("--model", MODEL, "--checkpoint", checkpoint)
    alone = embedded(photos, "alone.parquet", *options)
    monkeypatch.setattr("rcir.encoders.batches.CHUNK", 1)
    table = embedded(photos, "x.parquet", *options, "--num_workers", "2")
    assert table.schema == alone.schema
    np.testing.assert_allclose(vectors_of(table), vectors_of(alone), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["PHOTOS", "--model", MODEL, "--output", "x.csv"], "ends in .parquet"),
        (["PHOTOS", "--model", MODEL, "--output", "no/x.parquet"], "in a folder that is there"),
        (["PHOTOS", "--model", "resnet18", "--output", "x.parquet"], "resnet18 is no folder"),
        (["nowhere", "--model", MODEL, "--output", "x.parquet"], "nowhere is neither a folder"),
        (["PHOTOS", "--model", "timm:no", "--output", "x.parquet"], "timm:no is unknown"),
        (
            ["PHOTOS", "--model", MODEL, "--checkpoint", "a.pth", "--output", "x.parquet"],
            "safetensors files only",
        ),
        (
            ["PHOTOS", "--model", "run", "--checkpoint", "a.safetensors", "--output", "x.parquet"],
            "leave it out",
        ),
    ],
)
def test_what_cannot_be_is_one_line(photos, arguments, named, capsys, tmp_path):
    given = [str(photos) if value == "PHOTOS" else value for value in arguments]
    assert named in failed(capsys, *given)
    assert not list(tmp_path.glob("x.*"))
