"""Untrusted folders: what they name runs no code and receives no credentials."""

import json
import os
import socket
import stat
import sys
import threading
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

import rcir
from calibration import CertificationConfig, certify
from rcir import cluster, tracking, trust
from rcir.cli import main
from rcir.errors import InvalidConfig, UntrustedFolder
from rcir.index import IndexConfig, find_index
from rcir.retrieval.storage import earlier_calibration
from rcir.runs.folder import RunFolder
from rcir.store.folder import checksums, current_version, write_manifest
from training import TrainingConfig
from training.run import find_existing_run


@pytest.fixture(autouse=True)
def no_permissions(monkeypatch):
    for name in ("RCIR_TRUST_CODE", "RCIR_TRUST_SERVERS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(trust, "named_classes", set())


@pytest.fixture
def place(tmp_path):
    """A retriever of vectors."""
    vectors = np.random.default_rng(0).standard_normal((40, 4), np.float32)
    made = rcir.Retriever.from_embeddings(vectors, labels=np.arange(40) % 4)
    return made.save(tmp_path / "retriever")


def named(place, index):
    """The retriever, with another index in its description and the right checksums."""
    version = current_version(place)
    description = version / "retriever.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"index": index}))
    write_manifest(version, checksums(version))
    return place


@pytest.mark.parametrize("path", ["unittest.__main__:X", "rcir.cli.__main__:X", "antigravity:X"])
def test_a_module_that_a_folder_names_is_not_imported(place, path):
    named(place, {"kind": path, "options": {}})
    with pytest.raises(UntrustedFolder, match="trust_code"):
        rcir.load(place)
    assert path.partition(":")[0] not in sys.modules


def test_an_allowed_module_that_ends_the_process_is_an_error(place, monkeypatch):
    named(place, {"kind": "rcir.cli.__main__:X", "options": {}})
    with pytest.raises(InvalidConfig, match="SystemExit"):
        rcir.load(place, trust_code=True)
    monkeypatch.setenv("RCIR_TRUST_CODE", "1")
    with pytest.raises(InvalidConfig, match="SystemExit"):
        rcir.load(place)


def test_an_own_class_needs_a_permission_unless_the_program_names_it(tmp_path, capsys, monkeypatch):
    vectors = np.random.default_rng(0).standard_normal((40, 4), np.float32)
    config = IndexConfig("tests.index.brute:BruteIndex")
    made = rcir.Retriever.from_embeddings(vectors, labels=np.arange(40) % 4, index=config)
    queries = np.random.default_rng(1).standard_normal((60, 4), np.float32)
    made.calibrate(queries, np.arange(60) % 4)
    place = made.save(tmp_path / "retriever")
    assert rcir.load(place).index.options == made.index.options
    assert earlier_calibration(place) is not None
    monkeypatch.setattr(trust, "named_classes", set())  # as in another program
    with pytest.raises(UntrustedFolder, match="BruteIndex"):
        rcir.load(place)
    assert rcir.load(place, trust_code=True).index.options == made.index.options
    command = ["recalibrate", str(place)]
    with pytest.raises(SystemExit):
        main(command)
    assert "--trust-code" in capsys.readouterr().err
    assert main([*command, "--trust-code"]) == 0


def test_the_retriever_that_a_calibration_replaces_is_checked_before_the_work(place):
    named(place, {"kind": "antigravity:X", "options": {}})
    with pytest.raises(UntrustedFolder, match="antigravity"):
        certify(CertificationConfig("missing.npz", output=str(place.parent)))


def test_training_into_a_folder_does_not_import_the_method_of_its_run(tmp_path):
    config = TrainingConfig("run", storage=str(tmp_path))
    stored = asdict(config)
    stored["encoder"]["method"] = "antigravity:X"
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run", stored, "0" * 32, "sqlite:///mlflow.db").write()
    with pytest.raises(InvalidConfig, match=r"encoder\.method"):
        find_existing_run(config)
    assert "antigravity" not in sys.modules


def test_servers_of_a_command_line_are_added_to_those_of_the_environment(monkeypatch):
    monkeypatch.setenv("RCIR_TRUST_SERVERS", "")
    for servers in ("a", "a,b"):
        trust.apply_arguments(SimpleNamespace(trust_code=False, trust_server=[servers[-1]]))
        assert os.environ["RCIR_TRUST_SERVERS"] == servers


def test_a_model_of_mlflow_connects_to_the_server_of_its_retriever(place, monkeypatch):
    pytest.importorskip("psycopg")
    from rcir.registry.model_code import RetrieverModel

    index = rcir.load(place).index
    named(place, {"kind": "pgvector", "options": {"place": "host=db.example#t"}})
    monkeypatch.setattr(find_index("pgvector"), "load", lambda *_: index)
    model = RetrieverModel()
    model.load_context(SimpleNamespace(artifacts={"retriever": str(place)}))
    assert len(model.retriever.ids) == 40


def test_a_server_that_a_folder_names_receives_nothing(place, monkeypatch):
    pytest.importorskip("psycopg")
    monkeypatch.setattr(trust, "built_on", set())  # other tests build indexes on servers
    monkeypatch.setenv("PGPASSWORD", "secret")
    monkeypatch.setenv("RCIR_TRUST_SERVERS", "db.example, elsewhere.example")
    assert not trust.allows_server("")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        options = {"place": f"host=db.example hostaddr=127.0.0.1 port={port}#t", "timeout": 1}
        named(place, {"kind": "pgvector", "options": options})
        with pytest.raises(UntrustedFolder, match="127"):
            rcir.load(place)
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody connected
            stranger.accept()


@pytest.mark.parametrize(
    ("dsn", "hosts"),
    [
        ("", ()),
        ("dbname=images", ()),
        ("host=a,b hostaddr=10.0.0.1", ("a", "b", "10.0.0.1")),
        ("postgresql://user@db.example:1/images?hostaddr=10.0.0.2", ("db.example", "10.0.0.2")),
        ("host=/tmp", ("/tmp",)),
    ],
)
def test_every_host_of_a_connection_string_is_named(dsn, hosts):
    pytest.importorskip("psycopg")
    assert find_index("pgvector").Options(f"{dsn}#t").hosts == hosts


def test_the_store_of_a_run_is_used_only_if_it_is_the_chosen_one_or_allowed(tmp_path, monkeypatch):
    stores = [  # of a run, the chosen one, and whether the former is used
        ("http://tracking.example", "http://tracking.example/", True),
        ("postgresql:///db?host=db.example", "sqlite:///mlflow.db", False),
        ("databricks", "sqlite:///mlflow.db", False),
        ("sqlite:////here/mlflow.db", "sqlite:////here/mlflow.db", True),
        # It may name a server for artifacts.
        ("sqlite:////theirs/mlflow.db", "sqlite:////here/mlflow.db", False),
        ("file:///theirs/mlruns", "sqlite:////here/mlflow.db", False),
        ("http://elsewhere.example", "http://tracking.example", False),
    ]
    for uri, chosen, allowed in stores:
        monkeypatch.setattr(tracking.runs, "store_uri", lambda chosen=chosen: chosen)
        run = RunFolder(tmp_path, {}, "0" * 32, uri, finished=True)
        if allowed:
            assert run.tracked.uri == uri
        else:
            with pytest.raises(UntrustedFolder, match="MLFLOW_TRACKING_URI"):
                _ = run.tracked
    monkeypatch.setenv("RCIR_TRUST_SERVERS", "elsewhere.example")
    assert run.tracked.uri == "http://elsewhere.example"
    monkeypatch.setenv("RCIR_TRUST_SERVERS", "sqlite:////old/mlflow.db")
    assert RunFolder(tmp_path, {}, "0" * 32, "sqlite:////old/mlflow.db").tracked


def test_the_token_of_a_ray_cluster_of_this_machine_is_for_its_user_only(tmp_path, monkeypatch):
    token = tmp_path / ".ray" / "auth_token"

    def init(*_, **__):
        token.parent.mkdir()
        token.write_text("secret")
        token.chmod(0o644)

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", init)
    cluster.join_cluster()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


def test_a_permission_is_that_of_the_thread_that_reads():
    reads, outcomes = threading.Barrier(2), []

    def read(allowed):
        with trust.reading(allowed):
            reads.wait(60)
            try:
                trust.require_code("index.kind", "rcir_of_nobody:X")
            except UntrustedFolder:
                outcomes.append((allowed, "refused"))
            reads.wait(60)

    threads = [threading.Thread(target=read, args=(allowed,)) for allowed in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [(False, "refused")]
