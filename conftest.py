"""What every test and every example runs in: an empty folder, and a tracking store of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tracking_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One SQLite tracking store for all tests that do not bring their own."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, tracking_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written outside `tmp_path`, and no retriever is named from outside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
    monkeypatch.delenv("RCIR_RETRIEVER", raising=False)
