"""What every test and every example runs in: an empty folder, and a tracking store of its own."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from mlflow import MlflowClient

AFTER_DEMO = (
    "README.md",
    "api.py",
    "calibrated.py",
    "maintained.py",
    "retriever.py",
)  # whose examples use what the demo made
# Files that one process tests one after the other: they use the same cluster or the same demo.
TOGETHER = {
    "one CPU": (
        *("tests/tuning/test_killed.py", "tests/tuning/test_schedulers.py"),
        *("tests/tuning/test_split.py", "tests/tuning/test_command.py"),
    ),
    "three CPUs": (
        *("tests/training/test_workers.py", "tests/tuning/test_sweep.py"),
        "tests/tuning/test_every_method.py",
        *("tests/tuning/test_own_method.py", "tests/encoders/test_replicas.py"),
        *("tests/training/test_frozen.py", "tests/test_cli_embed.py"),
    ),
    "demo": ("tests/test_demo.py", "tests/test_documents.py"),
}
UNITS = {file: unit for unit, files in TOGETHER.items() for file in files}
# What takes longest comes first: processes then end at about the same time.
FIRST = ("one CPU", "tests/training/test_job.py", "tests/training/test_failures.py", "three CPUs")


def unit_of(file: str) -> str:
    """What is tested by one process, one test after the other: a file, or several together."""
    return "demo" if Path(file).name in AFTER_DEMO else UNITS.get(file, file)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="slow tests too, and simulations of full size"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests wait for `--full`; units are kept together, the long ones first."""
    if not config.getoption("full"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    found: dict[str, list[pytest.Item]] = {name: [] for name in (*FIRST, *TOGETHER)}
    for item in items:
        found.setdefault(unit_of(item.nodeid.partition("::")[0]), []).append(item)
    for unit, files in TOGETHER.items():
        order = {file: number for number, file in enumerate(files)}
        found[unit].sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))
    items[:] = [item for unit in found.values() for item in unit]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, a unit goes to one process."""
    from xdist.scheduler import LoadFileScheduling

    class Units(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(super()._split_scope(nodeid))

    return Units(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes that test at the same time."""
    base = tmp_path_factory.getbasetemp()
    # The processes have folders of their own in it.
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def new_store(shared_folder: Path) -> Callable[[Path], str]:
    """`new_store(file)`: the address of an empty SQLite tracking store.

    It is copied: MLflow takes seconds to create one.
    """
    empty = shared_folder / "empty.db"
    with FileLock(shared_folder / "empty.lock"):
        if not empty.is_file():
            making = shared_folder / "making.db"
            MlflowClient(f"sqlite:///{making}").search_experiments()
            making.rename(empty)

    def new_store(file: Path) -> str:
        shutil.copy(empty, file)
        return f"sqlite:///{file}"

    return new_store


@pytest.fixture(scope="session")
def tracking_uri(new_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """One SQLite tracking store for all tests that do not bring their own."""
    return new_store(tmp_path_factory.mktemp("mlflow") / "mlflow.db")


@pytest.fixture(scope="session")
def demo(shared_folder: Path, new_store: Callable[[Path], str]) -> Path:
    """A folder in which `rcir demo --output runs/demo` has run; `screen.txt` is what it showed, and
    `processor-seconds` what it took of a core, however busy the others were.

    It is made by the first process that needs it, for all that test at the same time.
    """
    folder = shared_folder / "demo"
    with FileLock(shared_folder / "demo.lock"):
        if not (folder / "screen.txt").is_file():
            folder.mkdir()
            rcir = Path(sys.executable).with_name("rcir")
            command = [rcir, "demo", "--output", "runs/demo"]
            environment = os.environ | {"MLFLOW_TRACKING_URI": new_store(folder / "mlflow.db")}
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            with (folder / "screen").open("w") as screen:
                subprocess.run(command, cwd=folder, env=environment, stdout=screen, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            (folder / "processor-seconds").write_text(str(taken))
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
