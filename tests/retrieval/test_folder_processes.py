"""Processes that save, change, load and are killed: nobody sees a mixture, no change is lost."""

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from rcir.retrieval.retriever import Retriever

ROOT = Path(__file__).parents[2]
slow = pytest.mark.slow


@pytest.fixture
def pair(tmp_path):
    """A folder with two small retrievers of which nothing is the same."""
    for seed, name in enumerate(("first", "second")):
        rng = np.random.default_rng(seed)
        labels = rng.integers(4, size=360)
        vectors = (2 * np.eye(4)[labels] + rng.standard_normal((360, 4))).astype(np.float32)
        ids = [f"{name}-{row}" for row in range(60)]
        own = Retriever.from_embeddings(vectors[:60], ids, labels[:60], depth=20)
        own.calibrate(vectors[60:], labels[60:], "minmax", query_uncertainty="encoder")
        own.save(tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    "works",
    [
        {"load": 100, "pairs": 1, "kill_holder": 1},
        *(
            pytest.param({work: count}, marks=slow)
            for work, count in {
                **{"load": 500, "kill_recalibration": 60, "pairs": 6, "kill_holder": 3},
                **{"hold_version": 20, "save_together": 15},
            }.items()
        ),
    ],
    ids=",".join,
)
def test_processes_see_whole_versions_and_lose_no_change(pair, works):
    script = ROOT / "tests" / "retrieval" / "folder_processes.py"
    command = [sys.executable, script, pair, *chain.from_iterable(works.items())]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        map(str, command), env=environment, capture_output=True, text=True, check=False
    )
    print(process.stdout)
    assert process.returncode == 0, process.stderr
