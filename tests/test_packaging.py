import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"rcir", "training", "calibration", "tuning"}


@pytest.fixture(scope="module")
def wheel(wheel_file):
    with zipfile.ZipFile(wheel_file) as archive:
        yield archive


def test_the_wheel_carries_the_four_packages_and_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_the_wheel_carries_every_module_and_what_they_read(wheel):
    modules = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*.py")
    }
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rcir/serving/page").iterdir()}
    assert "rcir/serving/page/index.html" in page
    read = {"rcir/py.typed", "calibration/report.html"} | page
    assert modules | read <= set(wheel.namelist())


def test_the_wheel_installs_the_command(wheel):
    (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "rcir = rcir.cli:main" in wheel.read(entry_points).decode()
