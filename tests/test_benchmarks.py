"""Benchmarks that are simulations of claims, in short."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.statistical

FOLDER = Path(__file__).parents[1] / "benchmarks"
FIGURES = {"worst_excess", "average_excess", "worst_single_excess", "cluster_excess"}


def test_the_benchmark_of_validity_reports_every_figure(tmp_path, request):
    path = tmp_path / "figures.json"
    draws = 60 if request.config.getoption("full") else 15
    command = [sys.executable, FOLDER / "validity.py", "--seed", "4", "--draws", str(draws)]
    subprocess.run([*command, "--json", path], check=True, capture_output=True)
    figures = json.loads(path.read_text())["figures"]
    assert figures.keys() == FIGURES | {"choice_excess", "modes"}
    assert figures["modes"] == 17
    assert all(figures[name] <= 1 / draws**0.5 for name in FIGURES)  # 3 standard errors
