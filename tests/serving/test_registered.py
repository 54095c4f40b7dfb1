"""A server of what an alias of MLflow's registry stands for."""

import re

import numpy as np
import pytest

from calibration import CertificationConfig, certify
from rcir.errors import InvalidConfig, NoRetriever
from rcir.registry.register import register
from rcir.runs.choose import choose
from rcir.serving.sources import source_of
from tests.serving.conftest import drawn
from tests.serving.test_swap import QUERY, until

pytestmark = pytest.mark.slow


@pytest.fixture
def certified(tmp_path, new_store, monkeypatch):
    """`certified(name)`: a tracked calibration of the same vectors, in a folder of that name."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_store(tmp_path / "registry.db"))
    for name, n, seed in (("gallery", 300, 1), ("queries", 900, 2)):
        vectors, labels = drawn(n, seed)
        ids = [f"{name} {row}" for row in range(n)]
        np.savez(tmp_path / f"{name}.npz", vector=vectors, label=labels, id=ids)

    def certified(name):
        files = (str(tmp_path / f"{part}.npz") for part in ("gallery", "queries"))
        config = CertificationConfig(*files, output=str(tmp_path / name), score_function="quantile")
        return certify(config).folder.parent

    return certified


def test_an_alias_that_moves_takes_the_server_along(certified, serving, monkeypatch):
    first, second = certified("first"), certified("second")
    register(str(first), "kinds", "champion")
    with serving("models:/kinds@champion", poll=0.1) as client:
        assert client.get("/ready").json()["version"].startswith("kinds/1-")
        register(str(second), "kinds", "champion", force=True)
        until(lambda: client.get("/ready").json()["version"].startswith("kinds/2-"))
        assert client.post("/retrieve", json=QUERY).json()["version"].startswith("kinds/2-")
        # The registry is away: what is served goes on, and says so.
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        until(lambda: client.get("/ready").json()["trouble"] is not None, seconds=60)
        trouble = client.get("/ready").json()["trouble"]
        assert re.search(r"kinds/2-\w+ goes on", trouble)
        assert "127.0.0.1:9" in trouble
        assert client.post("/retrieve", json=QUERY).status_code == 200


def test_what_the_registry_does_not_have_is_said(certified):
    certified("first")
    with pytest.raises(NoRetriever, match="rcir register"):
        source_of("models:/kinds@champion").version()
    with pytest.raises(InvalidConfig, match="NAME@ALIAS"):
        source_of("runs:/abc/retriever")


def test_a_retriever_that_is_marked_as_chosen_is_another_version(certified, serving):
    first, second = certified("first"), certified("second")
    register(str(first), "marked", "champion")
    with serving("models:/marked@champion", poll=0.1) as client:
        before = client.get("/ready").json()["version"]
        answer = client.post("/retrieve", json=QUERY).json()
        choice = choose([str(first), str(second)], [0.2], 0.1)
        assert choice.folder.parent == first  # alike, so the first
        until(lambda: client.get("/ready").json()["version"] != before)
        after = client.post("/retrieve", json=QUERY).json()
    assert (answer["guarantee"]["chosen_among"], after["guarantee"]["chosen_among"]) == (1, 2)
    assert after["version"].startswith("marked/1-")
