"""Every benchmark runs in its short form, and the simulated guarantees hold."""

import json
import math
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
# Modules that scripts share, and the table of what the scripts of the papers print.
HELPERS = {"cai_rule", "common", "loops", "recipes", "papers/tables", "papers/claims"}
NEEDS_DATA = {
    *("birds", "embed", "methods", "uncertainties"),
    *("papers/cai2025", "papers/cub50", "papers/fashion_mnist", "papers/lam", "papers/oh2019"),
    *("papers/taha2019", "papers/warburg2021"),
}
STARTS_SERVERS = {"embed", "training", "tuning"}
SCRIPTS = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.py")}


def script_parameter(name):
    marks = [pytest.mark.data] if name in NEEDS_DATA else []
    marks += [pytest.mark.distributed] if name in STARTS_SERVERS else []
    return pytest.param(name, marks=marks)


NAMES = [script_parameter(name) for name in sorted(SCRIPTS - HELPERS - {"validity"})]


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_reports_finite_figures_in_its_short_form(name, tmp_path, request, ray_settings):
    if name in NEEDS_DATA:
        request.getfixturevalue("data_root")
    path = tmp_path / "figures.json"
    command = [sys.executable, FOLDER / f"{name}.py", "--short", "--json", path]
    if name == "gpu" and not torch.cuda.is_available():
        command += ["--device", "cpu"]
    if name == "tuning":
        command.append("--gain-only")  # otherwise it starts a second cluster
    # Import the packages of this tree, also where another version is installed.
    environment = os.environ | ray_settings | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "SHORT FORM" in process.stdout
    results = json.loads(path.read_text())
    figures = results["figures"]
    assert figures
    assert all(map(math.isfinite, figures.values()))
    assert results["script"] == " ".join(
        ["python", f"benchmarks/{name}.py", "--short", *command[5:]]
    )
    date.fromisoformat(results["date"])
    assert results["commit"]
    assert results["hardware"]


def test_the_rule_of_cai_et_al_certifies_light_tails_of_the_uncertainty_only(tmp_path):
    """With heavy ones, one query sets the range, and the others get too few candidates."""
    path = tmp_path / "figures.json"
    command = [sys.executable, FOLDER / "risk.py", "--short", "--sets", "--json", path]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    figures = json.loads(path.read_text())["figures"]
    assert (figures["cai_beta_certified"], figures["cai_beta_violated"]) == (1, 0)
    assert (figures["cai_lognormal_certified"], figures["cai_lognormal_violated"]) == (0, 1)
    # Four standard deviations of the mean of two batches; see tests/risk/test_cai_rule.py.
    assert figures["cai_lognormal_risk"] == pytest.approx(0.344, abs=0.15)
    # With the same bound, and a range from other queries, sizes like theirs where theirs works.
    assert figures["minmax_lognormal_violated"] == 0
    assert figures["minmax_beta_size"] == pytest.approx(figures["cai_beta_size"], rel=0.1)


@pytest.mark.statistical
def test_simulated_guarantees_are_violated_no_more_often_than_delta(tmp_path):
    path, draws = tmp_path / "figures.json", 40
    command = [sys.executable, FOLDER / "validity.py", "--seed", "4", "--draws", str(draws)]
    subprocess.run([*command, "--json", path], check=True, capture_output=True)
    figures = json.loads(path.read_text())["figures"]
    excesses = {name: value for name, value in figures.items() if name.endswith("_excess")}
    assert {"worst_excess", "average_excess", "cluster_excess"} <= excesses.keys()
    assert figures["modes"] == 38
    assert figures["least_broken"] > 0.1  # tests/statistical tells each from chance
    assert all(value <= 1 / draws**0.5 for value in excesses.values())  # 3 standard errors
