"""Kills at a chosen step in the file system, and full disks, without an end of the process."""

import resource
import sys
from contextlib import contextmanager

import pytest

from rcir.files import owner

# Steps that change something, as Python's audit events call them.
STEPS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
DEAD = "{}-{}-1".format(owner().split("-")[0], 2**22 - 1)  # a process that never was
_plan = {"left": None, "under": ""}


class Killed(BaseException):
    """Stands for SIGKILL: from then on, no step is made, those of clean-up neither."""


def _step(event, arguments):
    if _plan["left"] is None:
        return
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    # What is removed within a folder is named relative to it.
    relative = event in ("os.remove", "os.rmdir") and arguments[1] != -1
    if not (event in STEPS or writes) or not (relative or _plan["under"] in str(arguments[0])):
        return
    if _plan["left"] == 0:
        raise Killed
    _plan["left"] -= 1


sys.addaudithook(_step)


@pytest.fixture
def kill(monkeypatch, tmp_path):
    """`kill(steps, work)`: do it in a process that dies after so many steps; whether it died."""

    def killed(steps, work):
        with monkeypatch.context() as patch:
            patch.setattr("rcir.files.owner", lambda: DEAD)
            _plan.update(left=steps, under=str(tmp_path))
            try:
                work()
            except Killed:
                return True
            finally:
                _plan["left"] = None
        return False

    return killed


@contextmanager
def limited_file_size():
    """Yield a function after which no file of this process may grow further than some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
