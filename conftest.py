"""What every test and every example runs in: an empty folder, and a tracking store of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

LONGEST = "test_failures.py"
AFTER_DEMO = ("README.md", "api.py", "retriever.py")  # whose examples use what the demo made


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: two processes then end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("distributed")}
    items.sort(key=lambda item: (item.path.name != LONGEST, item.path not in slow))


@pytest.fixture(scope="session")
def tracking_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One SQLite tracking store for all tests that do not bring their own."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `rcir demo --output runs/demo` has run; `screen.txt` is what it showed.

    It is made by the first process that needs it, for all that test at the same time.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # the processes have folders of their own in it
    folder = shared / "demo"
    with FileLock(shared / "demo.lock"):
        if not (folder / "screen.txt").is_file():
            folder.mkdir()
            rcir = Path(sys.executable).with_name("rcir")
            command = [rcir, "demo", "--output", "runs/demo"]
            environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}"}
            with (folder / "screen").open("w") as screen:
                subprocess.run(command, cwd=folder, env=environment, stdout=screen, check=True)
            (folder / "screen").rename(folder / "screen.txt")  # it is complete
    return folder


@pytest.fixture(autouse=True)
def _isolated(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tracking_uri: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is written outside `tmp_path`, and no retriever is named from outside."""
    after_demo = request.node.path.name in AFTER_DEMO
    monkeypatch.chdir(request.getfixturevalue("demo") if after_demo else tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
    monkeypatch.delenv("RCIR_RETRIEVER", raising=False)
    monkeypatch.delenv("RCIR_RUNS", raising=False)
