"""Trainings and calibrations in a bucket end as local ones, on a real S3 server."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from threading import Timer

import pytest
import ray.train
import yaml
from fastapi.testclient import TestClient

from calibration import CalibrationConfig, calibrate
from rcir import storage
from rcir.data import load_splits
from rcir.errors import CheckpointFailed, InvalidConfig
from rcir.files import owner
from rcir.runs import bucket as runs
from rcir.runs.bucket import claimed, fetch, place_of, push
from rcir.runs.folder import find_run
from rcir.serving import Settings, create_app
from rcir.serving.sources import source_of
from rcir.storage import delete_objects, list_objects, read_object, write_object
from tests.serving.conftest import png
from tests.training.helpers import same_weights, steps
from training import train

pytestmark = pytest.mark.distributed


def names(place):
    return {info.name for info in list_objects(place)}


def on_another_machine(monkeypatch):
    monkeypatch.setenv("RCIR_CACHE", os.environ["RCIR_CACHE"] + "-2")


class At(ray.train.UserCallback):
    def __init__(self, functions):
        self.functions = functions

    def after_report(self, run_context, metrics, checkpoint):
        self.functions.get(metrics[0]["epoch"], lambda: None)()


def test_copies_are_equal_to_the_bucket_and_show_no_incomplete_checkpoint(bucket, s3_server):
    place = Path(bucket) / "runs" / "x"
    here = fetch(place, training=True)
    assert place_of(here) == place
    first = here / "checkpoints" / "epoch-0001"
    first.mkdir(parents=True)
    for file in (here / "run.json", first / "model.safetensors", first / "state.json"):
        file.write_bytes(b"1")
    (here / "training.log").touch()
    push(here)
    complete = {f"checkpoints/epoch-0001/{name}" for name in ("model.safetensors", "state.json")}
    assert names(place) == {"run.json"} | complete
    requested = s3_server.log.read_text()
    fetch(place, training=True)
    push(here)
    again = s3_server.log.read_text().removeprefix(requested)
    assert "GET" in again  # lists
    assert "PUT" not in again
    assert "run.json" not in again

    # An upload that was killed, on another machine; and one that replaces.
    write_object(place / "checkpoints/epoch-0002/model.safetensors", b"half")
    write_object(place / "run.json", b"2")
    (here / "unknown.csv").write_bytes(b"")
    assert fetch(place, training=True) == here
    assert (here / "run.json").read_bytes() == b"2"
    assert not (here / "unknown.csv").exists()
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["epoch-0001"]
    reading = fetch(place)
    assert {path.name for path in reading.glob("[!.]*")} == {"run.json"}
    shutil.rmtree(first)
    push(here)
    assert names(place) == {"run.json"}
    with pytest.raises(InvalidConfig, match=r"\.\."):
        fetch(Path(f"{bucket}/../x"))


def test_one_process_trains_and_a_lost_one_is_replaced(bucket, monkeypatch):
    place, lock = Path(bucket) / "x", Path(bucket) / "x" / "lock"
    monkeypatch.setattr(runs, "LEASE_S", 3)
    with claimed(place):
        time.sleep(1)
        first = read_object(lock)
        with pytest.raises(InvalidConfig, match="another process"), claimed(place):
            pass
        on_another_machine(monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(runs, "is_dead", lambda other: False)
            with pytest.raises(InvalidConfig, match="another process"), claimed(place):
                pass
        assert read_object(lock) != first  # it was renewed
    assert not names(place)
    for content, seconds in ((b"0000abcd-1-1 5.0", 3), (owner()[:9].encode() + b"1-1 5.0", 0)):
        write_object(lock, content)
        started = time.monotonic()
        with claimed(place):
            assert seconds <= time.monotonic() - started < seconds + 2
            assert read_object(lock)[0].startswith(owner().encode())
        assert not names(place)


def test_a_process_whose_lock_was_replaced_uploads_nothing_and_keeps_the_other_lock(
    bucket, monkeypatch
):
    place, lock = Path(bucket) / "x", Path(bucket) / "x" / "lock"
    monkeypatch.setattr(runs, "LEASE_S", 1.2)
    with claimed(place):
        here = fetch(place, training=True)
        (here / "run.json").write_bytes(b"1")
        push(here)
        write_object(lock, b"0000abcd-1-1 5.0")
        (here / "run.json").write_bytes(b"22")
        with pytest.raises(InvalidConfig, match="another process"):
            push(here)
        time.sleep(0.5)  # in which the lock would be renewed
    assert read_object(lock)[0] == b"0000abcd-1-1 5.0"
    assert read_object(place / "run.json")[0] == b"1"


def test_a_lock_that_is_deleted_while_another_process_waits_is_free(bucket, monkeypatch):
    place, lock = Path(bucket) / "x", Path(bucket) / "x" / "lock"
    write_object(lock, b"0000abcd-1-1 5.0")
    deleting = Timer(0.5, lambda: delete_objects([lock]))
    deleting.start()
    with claimed(place):
        deleting.join()
        assert read_object(lock)[0].startswith(owner().encode())


def test_local_runs_in_the_cache_are_no_copies(tmp_path, monkeypatch):
    monkeypatch.setenv("RCIR_CACHE", str(tmp_path))
    for folder in (tmp_path / "runs" / "x", tmp_path / "trainings" / "runs" / "x"):
        assert place_of(folder) == folder


@pytest.fixture(scope="module")
def whole(tiny, train_apart):
    """A run in a local folder."""
    return train_apart(tiny("whole"))


@pytest.mark.slow
def test_a_training_that_is_killed_continues_on_another_machine_to_the_bit(
    bucket, tiny, whole, tmp_path, monkeypatch
):
    config = tiny("run", storage=f"{bucket}/runs", checkpoint_steps=4)
    place = Path(bucket) / "runs" / "run"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(asdict(config)))
    command = [sys.executable, "-m", "training", "--config", str(tmp_path / "run.yaml")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment) as process:
        while "checkpoints/epoch-0001/state.json" not in names(place):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert not json.loads(read_object(place / "run.json")[0])["finished"]
    assert "lock" in names(place)

    on_another_machine(monkeypatch)
    run = train(config)
    assert run.place == place
    last = "checkpoints/epoch-0004/optimizer.safetensors"
    assert same_weights(run, whole)
    assert same_weights(run, whole, last)
    assert steps(run) == [1, 2, 3, 4]
    assert {name for name in names(place) if name.endswith("optimizer.safetensors")} >= {last}

    # What is read on a third machine is what was trained.
    on_another_machine(monkeypatch)
    assert same_weights(find_run(run.mlflow_run), whole)
    here = calibrate(CalibrationConfig(run=str(whole.path), output=str(tmp_path / "here")))
    away = calibrate(CalibrationConfig(run=storage.as_text(place)))
    texts = (
        (tmp_path / "here" / "results.json").read_bytes(),
        read_object(place / "results.json")[0],
    )
    results = [json.loads(text) | {"seconds": 0} for text in texts]
    assert results[0] == results[1]
    assert away.report == place / "report.html"
    assert {"report.html", "test.safetensors", "retriever/current.json"} <= names(place)

    on_another_machine(monkeypatch)
    pictures = [("pictures", png(image)) for image in load_splits(config.data).test.images[:20]]
    answers = []
    for outcome in (here, away):
        app = create_app(source_of(storage.as_text(outcome.folder)), Settings(poll=0))
        with TestClient(app, "http://localhost") as client:
            response = client.post("/retrieve/batch", data={"alpha": 0.7}, files=pictures)
            answers.append([answer["ids"] for answer in response.json()["answers"]])
    assert answers[0] == answers[1]
    assert any(answers[0])
    assert train(config).mlflow_run == run.mlflow_run  # which was not trained again


@pytest.mark.slow
def test_a_training_goes_on_while_the_store_is_away(
    bucket, s3_server, tiny, whole, monkeypatch, capsys
):
    monkeypatch.setattr(storage, "RETRY_S", 0.2)
    monkeypatch.setattr(runs, "LEASE_S", 3)
    config = tiny("run", storage=f"{bucket}/runs")
    place = Path(bucket) / "runs" / "run"

    def away_at_the_end():
        while "checkpoints/epoch-0004/state.json" not in names(place):
            time.sleep(0.05)
        s3_server.pause()

    calls = {1: s3_server.pause, 3: s3_server.resume, 4: away_at_the_end}
    try:
        with pytest.raises(CheckpointFailed, match="same command"):
            train(config, callback=At(calls))
    finally:
        s3_server.resume()
    assert capsys.readouterr().out.count("not uploaded") in (1, 2)
    on_another_machine(monkeypatch)
    run = train(config)
    assert same_weights(run, whole)
    assert steps(run) == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray's own processes
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_a_worker_without_the_folder_of_the_driver(
    bucket, tiny, whole, tmp_path, new_cluster, monkeypatch, capsys
):
    config = tiny("run", storage=f"{bucket}/runs", num_workers=1)
    with new_cluster(1, RCIR_CACHE=str(tmp_path / "worker")):
        monkeypatch.setenv("RCIR_CACHE", str(tmp_path / "driver"))
        run = train(config)
    assert run.path.is_relative_to(tmp_path / "driver")
    assert list((tmp_path / "worker").rglob("epoch-0004"))
    assert same_weights(run, whole)
    output = capsys.readouterr().out
    assert all(f"epoch {number}/4  loss" in output for number in (1, 2, 3, 4))
