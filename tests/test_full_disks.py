"""Full disks, folders that cannot be written to, and no home: real file systems, one line each."""

import errno
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from fastapi.testclient import TestClient
from PIL import Image
from safetensors.torch import save_file

import rcir
from rcir import tracking
from rcir.cli import main
from rcir.data.vector_files import read_all_vectors
from rcir.errors import TrackingUnavailable, reporting_errors
from rcir.runs.folder import read_run
from rcir.serving import Settings, create_app
from rcir.serving.errors import StoreUnavailable
from rcir.serving.sources import source_of
from tests.kills import limited_file_size
from tests.serving.conftest import drawn
from tests.training.helpers import same_weights
from training.checkpoint import last_epoch

SMALL = """
name: run
epochs: 2
batch: 32
data: {options: {train: 300, validation: 100, gallery: 100, tuning: 100, calibration: 100}}
encoder: {dim: 8}
"""


@pytest.fixture
def mount(tmp_path):
    """Mount a file system below `tmp_path`, or mount it with other options; needs the right to."""
    mounted = []

    def mounted_at(*options):
        folder = tmp_path / "disk"
        folder.mkdir(exist_ok=True)
        command = ["mount", *options, folder]
        if subprocess.run(command, capture_output=True).returncode:
            assert not mounted, "it was mounted before"
            pytest.skip("this process may not mount a file system")
        mounted.append(folder)
        return folder

    yield mounted_at
    for folder in dict.fromkeys(mounted):
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def refused(capsys):
    """The one line in which a command ends."""

    def ends(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(list(map(str, arguments)))
        line = capsys.readouterr().err
        assert stop.value.code == 1
        assert re.fullmatch(r"(warning: .*\n)*error: .*\n", line)
        return line

    return ends


def contents(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("number", "files", "words"),
    [
        (errno.ENOSPC, ("from", None, "to.json"), r"to\.json.*room"),
        (errno.EROFS, ("from", None, "to.json"), r"to\.json.*another place"),
    ],
)
def test_an_error_of_the_system_names_the_file_and_what_to_do(capsys, number, files, words):
    with pytest.raises(SystemExit), reporting_errors():
        raise OSError(number, os.strerror(number), *files)
    line = capsys.readouterr().err
    assert os.strerror(number) in line
    assert re.search(words, line)


def test_an_error_that_names_no_file_keeps_its_traceback(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError) as failure, reporting_errors():
        Path.cwd()
    assert failure.value.filename is None
    os.chdir(tmp_path)


def test_a_tracking_store_is_made_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    with limited_file_size() as limit:
        limit(300_000)  # its tables take 900 kB
        with pytest.raises(TrackingUnavailable, match=r"mlflow\.db"):
            tracking.start_run("full", {})
    assert contents(tmp_path) == [".mlflow.db.lock"]


def test_a_store_that_cannot_be_made_is_reported_at_once(mount, monkeypatch):
    disk = mount("-t", "tmpfs", "-o", "ro", "tmpfs")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{disk / 'mlflow.db'}")
    with pytest.raises(TrackingUnavailable, match="permissions"):
        tracking.start_run("read-only", {})


def vectors_in(file, n, seed):
    """Write vectors of 20 classes and return its name."""
    vectors, labels = drawn(n, seed)
    np.savez(file, vector=vectors, label=labels, id=[f"{seed}-{row}" for row in range(n)])
    return file


def kilobytes(path):
    """The size of a file, or of all files in a folder: on a disk, they take at least that."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file()) // 1024


def remove(folder):
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
class TestFullDisk:
    """A command that finds too little room is repeated with more."""

    def test_training(self, tmp_path, mount, refused, monkeypatch):
        (tmp_path / "config.yaml").write_text(SMALL)
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        command = ["train", "--config", str(tmp_path / "config.yaml"), "--storage", "runs"]
        monkeypatch.chdir(tmp_path)
        main(command)
        store, whole = kilobytes(tmp_path / "mlflow.db"), kilobytes(tmp_path)
        checkpoint = kilobytes(tmp_path / "runs" / "run" / "checkpoints")
        disk = mount("-t", "tmpfs", "-o", "size=4k", "tmpfs")
        monkeypatch.chdir(disk)
        epochs = []
        # Too little for the store, which MLflow keeps open until the process ends, then for
        # checkpoints, then for their copy in MLflow.
        for size in (store // 8, *range(2 * store, whole, checkpoint // 2)):
            mount("-o", f"remount,size={size}k")
            line = refused(*command)
            assert str(disk) in line
            assert "room" in line
            epochs.append(last_epoch(disk / "runs" / "run"))
        assert epochs == sorted(epochs)
        assert (epochs[0], epochs[-1] > 0) == (0, True)
        mount("-o", f"remount,size={2 * whole}k")
        assert main(command) == 0
        assert same_weights(*(read_run(place / "runs" / "run") for place in (disk, tmp_path)))

    def test_calibration_and_recalibration(self, tmp_path, mount, refused):
        gallery = vectors_in(tmp_path / "gallery.npz", 1200, 1)
        disk = mount("-t", "tmpfs", "-o", "size=8k", "tmpfs")
        certify = ["certify", str(gallery), "--output", str(disk / "output")]
        for size in (8, 100, 1500):
            mount("-o", f"remount,size={size}k")
            line = refused(*certify)
            assert str(disk / "output" / "retriever") in line
            assert "room" in line
            assert contents(disk / "output" / "retriever" / "versions") == []
        mount("-o", "remount,size=40m")
        assert main(certify) == 0
        folder = disk / "output" / "retriever"
        more = str(vectors_in(tmp_path / "more.npz", 200, 2))
        used = int(subprocess.check_output(["du", "-sk", disk]).split()[0])
        recalibrate = ["recalibrate", str(folder), "--add", more]
        for room in (16, 1500):
            mount("-o", f"remount,size={used + room}k")
            assert "room" in refused(*recalibrate)
            assert len(rcir.load(folder).ids) == 1200
            assert len(contents(folder / "versions")) == 1
        mount("-o", "remount,size=40m")
        assert main(recalibrate) == 0
        assert len(rcir.load(folder).ids) == 1400

    def test_vectors_of_pictures(self, tmp_path, mount, refused):
        torch.manual_seed(0)
        save_file(timm.create_model("test_resnet").state_dict(), tmp_path / "weights.safetensors")
        (tmp_path / "pictures").mkdir()
        for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (60, 8, 8))):
            picture = Image.fromarray(pixels.astype(np.uint8))
            picture.save(tmp_path / "pictures" / f"{number}.png")
        model = ["--model", "timm:test_resnet", "--checkpoint", f"{tmp_path}/weights.safetensors"]
        disk = mount("-t", "tmpfs", "-o", "size=4k", "tmpfs")
        vectors = []
        shards = ["--shards", "5"]
        for name, sizes, options in (("v.parquet", (8, 36), []), ("shards", (8, 24), shards)):
            output = disk / name
            command = ["embed", str(tmp_path / "pictures"), "--output", str(output)]
            for size in sizes:
                mount("-o", f"remount,size={size}k")
                line = refused(*command, *model, *options)
                assert str(disk) in line
                assert "room" in line
            mount("-o", "remount,size=1m")
            assert main([*command, *model, *options]) == 0
            assert [name for name in contents(disk) if name.startswith(".")] == []
            vectors.append(read_all_vectors(output).vectors)
            remove(disk)
        np.testing.assert_allclose(*vectors, atol=1e-6)

    def test_feedback(self, tmp_path, mount):
        retriever = rcir.Retriever.from_embeddings(drawn(300, 1)[0], labels=drawn(300, 1)[1])
        retriever.calibrate(*drawn(300, 2), score_function="constant")
        place = retriever.save(tmp_path / "retriever")
        disk = mount("-t", "tmpfs", "-o", "size=8k", "tmpfs")
        settings = Settings(poll=0, store=disk / "feedback.db")
        with pytest.raises(StoreUnavailable, match=r"feedback\.db.*space"):
            create_app(source_of(place), settings)
        mount("-o", "remount,size=160k")
        bodies = [{"vector": vector.tolist(), "alpha": 0.2} for vector in drawn(200, 3)[0]]
        with TestClient(
            create_app(source_of(place), settings), base_url="http://localhost"
        ) as client:
            answers = [client.post("/retrieve", json=body).json().get("answer") for body in bodies]
            assert answers[0] is not None
            assert answers[-1] is None  # it is answered all the same
            mount("-o", "remount,size=1m")
            assert client.post("/retrieve", json=bodies[0]).json()["answer"] is not None
            feedback = {"answer": answers[0], "match": True}
            assert client.post("/feedback", json=feedback).status_code == 200
