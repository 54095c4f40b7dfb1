"""The surroundings of every test and every documented example.

Each runs in an empty folder with a tracking store of its own. Tests that share an expensive
fixture run in one process, which sets it up once.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from rcir.risk import losses

# Modules whose examples use the retriever that the demo calibrates.
DEMO_EXAMPLES = ("api.py", "retriever.py")
# A module of the site's build, whose packages only the extra `docs` brings.
collect_ignore = ["docs/hooks.py"]
# Fixtures that one process sets up for all tests that use them, the slowest first.
SHARED_FIXTURES = ("ray_cluster", "demo")
# Files of long tests that share nothing: each goes to the process that is free, early.
LONG_TEST_FILES = ("test_benchmarks.py", "test_variance_head.py")
NUMBER_OF_SLOW = pytest.StashKey[int]()  # tests that were deselected

# Environment variables of the user that would change what tests do.
SETTINGS = ("RCIR_RETRIEVER", "RCIR_RUNS", "RCIR_TOKEN", "RAY_ADDRESS")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run slow tests")


def pytest_configure(config: pytest.Config) -> None:
    """Remove the user's settings, and let Hypothesis write to a temporary folder.

    Worker processes inherit both.
    """
    for name in SETTINGS:
        os.environ.pop(name, None)
    os.environ["RCIR_PROGRESS"] = "0"  # lines that depend on how fast a test is
    if "HYPOTHESIS_STORAGE_DIRECTORY" not in os.environ:
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder.name


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare what imports allocate, which stays, from being looked through for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@cache
def group_of(file: Path) -> str:
    """Return the shared fixture that a file uses, or else the path of the file.

    Read from the source, because the process that schedules the tests does not collect them.
    """
    if file.name in DEMO_EXAMPLES:
        return "demo"
    source = file.read_text() if file.suffix == ".py" else ""
    for name in SHARED_FIXTURES:
        if re.search(rf'\bdef \w+\([^)]*\b{name}\b|usefixtures\([^)]*"{name}"', source):
            return name
    return str(file)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests without `--full`; start with shared fixtures, then with long tests."""
    if not config.getoption("full"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        config.stash[NUMBER_OF_SLOW] = len(slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    order = {name: number for number, name in enumerate(SHARED_FIXTURES)}
    last = len(order) + 1
    items.sort(
        key=lambda item: order.get(group_of(item.path), last - (item.path.name in LONG_TEST_FILES))
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, give all files that use a shared fixture to one process."""
    from xdist.scheduler import LoadFileScheduling

    class SharedFixtureScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = config.rootpath / super()._split_scope(nodeid)
            return nodeid if file.name in LONG_TEST_FILES else group_of(file)

    return SharedFixtureScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report the number of slow tests to the process that started this worker."""
    gc.unfreeze()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["slow"] = session.config.stash.get(NUMBER_OF_SLOW, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Store the number of slow tests: every worker process collects all tests."""
    node.config.stash[NUMBER_OF_SLOW] = getattr(node, "workeroutput", {}).get("slow", 0)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """List the reasons for which tests were skipped, and count slow tests that were not run."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        if isinstance(report.longrepr, tuple):
            reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"skipped {number}: {reason}", yellow=True)
    if slow := config.stash.get(NUMBER_OF_SLOW, 0):
        terminalreporter.write_line(f"{slow} slow tests were not run: make test-all", yellow=True)


@pytest.fixture(autouse=True)
def _no_further_risks() -> Iterator[None]:
    """Remove the risks that a test or an example registered."""
    before = dict(losses._table)
    yield
    losses._table.clear()
    losses._table.update(before)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all test processes share."""
    base = tmp_path_factory.getbasetemp()
    # Under xdist, the base of a worker is a folder of its own inside the common one.
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def new_store(shared_folder: Path) -> Callable[[Path], str]:
    """Return a function that creates an empty SQLite tracking store and returns its address.

    MLflow takes seconds to create a store, so each one is a copy of the first.
    """
    template = shared_folder / "empty.db"
    with FileLock(shared_folder / "empty.lock"):
        if find_spec("mlflow") is None:  # in the environment of `make test-lowest`
            template.touch()
        if not template.is_file():
            from mlflow import MlflowClient

            unfinished = shared_folder / "unfinished.db"
            MlflowClient(f"sqlite:///{unfinished}").search_experiments()
            unfinished.rename(template)

    def new_store(file: Path) -> str:
        shutil.copy(template, file)
        return f"sqlite:///{file}"

    return new_store


@pytest.fixture(scope="session")
def tracking_uri(
    new_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Return the address of the chosen tracking store, for all tests without one of their own."""
    uri = new_store(tmp_path_factory.mktemp("mlflow") / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        yield uri


@pytest.fixture(scope="session")
def demo(
    shared_folder: Path, new_store: Callable[[Path], str], pytestconfig: pytest.Config
) -> Path:
    """Return a folder in which `rcir demo --output runs/demo` has run.

    It trains for all epochs with `--full` only. The demo runs once, in the first process that needs
    it. `screen.txt` holds its output.
    """
    folder = shared_folder / "demo"
    with FileLock(shared_folder / "demo.lock"):
        if not (folder / "screen.txt").is_file():
            folder.mkdir()
            rcir = Path(sys.executable).with_name("rcir")
            command = [rcir, "demo", "--output", "runs/demo"]
            if not pytestconfig.getoption("full"):
                command += ["--epochs", "1"]
            environment = os.environ | {"MLFLOW_TRACKING_URI": new_store(folder / "mlflow.db")}
            with (folder / "unfinished").open("w") as screen:
                subprocess.run(command, cwd=folder, env=environment, stdout=screen, check=True)
            (folder / "unfinished").rename(folder / "screen.txt")
    return folder


@pytest.fixture(autouse=True)
def _isolated(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tracking_uri: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run in an empty folder, or in the demo's, with the tracking store of the tests."""
    is_demo_example = request.node.path.name in DEMO_EXAMPLES
    monkeypatch.chdir(request.getfixturevalue("demo") if is_demo_example else tmp_path)
