"""Freed memory of large tensors is used again, by the page faults that the system counts."""

import platform
import subprocess
import sys

import pytest

BLOCK, TIMES = 64 * 2**20, 20
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


def page_faults(first):
    command = [sys.executable, "-c", PROGRAM.format(first)]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(process.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_block_is_used_again():
    default = page_faults("")
    assert default > TIMES
    assert page_faults("keep_freed_memory()") < default / 10
