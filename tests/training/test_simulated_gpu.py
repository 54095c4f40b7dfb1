"""Encoders, losses, mining and training on a simulated GPU, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this version of PyTorch has no devices that are written in Python",
)
def test_all_that_a_gpu_computes_is_on_the_gpu_and_equal_to_the_cpu():
    # A device cannot be removed again, nor be added after a backward pass.
    process = subprocess.run(
        [sys.executable, "-m", "tests.training.on_simulated_gpu"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-200:] + process.stderr[-6000:]
