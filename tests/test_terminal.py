"""Progress of long work: on a terminal, in logs, from other processes."""

import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest

from rcir import terminal
from rcir.terminal import Work, working
from tests.waits import record

ROOT = Path(__file__).parents[1]
SCRIPT = """
import time
from threading import Thread
from rcir.terminal import console, working
def hidden():
    with working("hidden"):
        time.sleep(1.5)
with working("outer", logged={logged}):
    thread = Thread(target=hidden)
    thread.start()
    time.sleep({first})
    with working("inner [bold]", total=4000) as work:
        work.advance(1000)
        time.sleep(1)
        console.print("a line")
        print("another")
    thread.join()
print("the end")
"""


def run(logged=True, first=1.0, **environment):
    """Run the script in a pseudo terminal; return the recording."""
    settings = [f"{name}={value}" for name, value in ({"RCIR_PROGRESS": "1"} | environment).items()]
    script = SCRIPT.format(logged=logged, first=first)
    return record(["env", *settings, sys.executable, "-c", script])


def test_the_innermost_work_of_the_main_thread_is_redrawn_until_it_ends():
    shown = run()
    assert shown.status == 0
    for part in ("outer: 1 s", "inner [bold]: 1,000 of 4,000, 3 s left", "a line", "another"):
        assert part in shown.text
    assert shown.text.index("outer: ") < shown.text.index("inner") < shown.text.index("a line")
    assert "hidden" not in shown.text
    assert shown.text.endswith("\x1b[2Kthe end\r\n")  # its own line is erased
    assert shown.gaps()[0][0] < 1


def test_short_calls_from_python_and_switched_off_progress_show_nothing():
    for shown in (run(logged=False, first=0.0), run(RCIR_PROGRESS="0")):
        assert shown.text.split() == ["a", "line", "another", "the", "end"]


def test_commands_print_lines_in_logs_and_calls_from_python_do_not(capsys, monkeypatch):
    monkeypatch.setenv("RCIR_PROGRESS", "1")
    monkeypatch.setattr(terminal, "COMMAND_DELAY_S", 0.0)
    monkeypatch.setattr(terminal, "LOG_INTERVAL_S", 0.05)
    for logged in (False, True):
        with working("embedding", total=10, logged=logged) as work:
            work.advance(4, reused=True)
            time.sleep(0.3)
        lines = capsys.readouterr().out.splitlines()
        assert set(lines) == ({"embedding: 4 of 10"} if logged else set())


def test_work_that_another_process_forwards_is_followed(tmp_path, monkeypatch):
    path = tmp_path / "progress.json"
    followed = Work("waiting")
    followed.follow(path)
    assert followed.name == "waiting"
    monkeypatch.setattr(terminal, "forwarded", [path])

    def train():  # in a thread, as Ray's workers do
        with working("epoch 1/2", total=8) as work:
            monkeypatch.setattr(terminal, "FORWARD_INTERVAL_S", 0.0)
            work.advance(3)

    thread = Thread(target=train)
    thread.start()
    thread.join()
    followed.follow(path)
    assert (followed.name, followed.done, followed.total) == ("epoch 1/2", 3, 8)


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="there is no bash")
def test_bash_completes_commands_and_their_options(tmp_path):
    command = [sys.executable, "-m", "rcir.cli", "completion", "bash"]
    script = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def complete(*words):
        number = len(words) - 1
        line = f'COMP_WORDS=({" ".join(words)}); COMP_CWORD={number}; _rcir rcir "{words[-1]}"'
        shell = ["bash", "-c", f"{script}\n{line}\necho ${{COMPREPLY[@]}}"]
        return subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split()

    assert complete("rcir", "ca") == ["calibrate"]
    assert complete("rcir", "certify", "--ga", "--que") == ["--queries"]
    assert complete("rcir", "train", "--optimizer.clip") == ["--optimizer.clip-norm"]
