"""Print the wall and CPU seconds of a command and of every process that it starts.

    python -m tests.cpu_seconds make test

Daemons count too: orphaned processes are adopted (Linux only). The CPU seconds are a lower bound:
processes are polled twice a second, so that each loses up to half a second at its end, and one that
is shorter than that may be missed.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

import psutil

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.5


def main() -> int:
    """Run the command of the command line; return its exit status."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    this_process = psutil.Process()
    seconds: dict[tuple[int, float], float] = {}  # by process
    start = time.monotonic()
    process = subprocess.Popen(sys.argv[1:])
    while process.poll() is None:
        for child in this_process.children(recursive=True):
            try:
                times = child.cpu_times()
                seconds[child.pid, child.create_time()] = times.user + times.system
                is_adopted = child.ppid() == os.getpid() and child.pid != process.pid
                if is_adopted and child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)
            except psutil.NoSuchProcess:
                continue
        time.sleep(POLL_S)
    wall = time.monotonic() - start
    print(f"wall seconds {wall:.0f}, CPU seconds {sum(seconds.values()):.0f}")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
