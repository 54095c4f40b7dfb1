"""Memory of large tensors, as the system counts its pages."""

import platform
import subprocess
import sys

import pytest

BLOCK, TIMES, PAGE = 64 * 2**20, 20, 4096
PROGRAM = f"""
import resource, numpy as np
from rcir.memory import keep_freed_memory
{{}}
np.ones({BLOCK}, np.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({TIMES}):
    np.ones({BLOCK}, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def cleared(first):
    """How often the blocks were cleared anew, with huge pages or without."""
    command = [sys.executable, "-c", PROGRAM.format(first)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_a_block_that_was_freed_is_the_next_one():
    taken_anew = cleared("")
    assert taken_anew > TIMES
    assert cleared("keep_freed_memory()") < taken_anew / 10
