"""Run a command in a pseudo terminal, and find where it was silent: `python tests/waits.py CMD`."""

import os
import pty
import select
import sys
import time
from dataclasses import dataclass, field


@dataclass
class Recording:
    """What a command wrote to its terminal: pieces with their times, in seconds since its start."""

    status: int = 0
    seconds: float = 0.0
    pieces: list[tuple[float, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)

    def gaps(self) -> list[tuple[float, float, str]]:
        """Return the silences, longest first: their length, their start, and what came before."""
        times = [0.0, *(at for at, _ in self.pieces), self.seconds]
        before = ["", *(text for _, text in self.pieces)]
        silences = zip(times[1:], times, before, strict=False)
        return sorted(((end - start, start, text[-200:]) for end, start, text in silences))[::-1]


def record(command: list[str], timeout: float = 600) -> Recording:
    """Run a command in a pseudo terminal of 100 columns until it ends."""
    recording, started = Recording(), time.monotonic()
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        os.execvp(command[0], command)
    while True:
        if select.select([terminal], [], [], timeout)[0]:
            try:
                piece = os.read(terminal, 1 << 16)
            except OSError:  # the command has closed its terminal
                break
            if not piece:
                break
            recording.pieces.append((time.monotonic() - started, piece.decode(errors="replace")))
        else:
            os.kill(process, 9)
    recording.status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    recording.seconds = time.monotonic() - started
    return recording


if __name__ == "__main__":
    result = record(sys.argv[1:])
    print(result.text)
    print(f"status {result.status}, {result.seconds:.1f} s; the longest silences:")
    for length, start, before in result.gaps()[:6]:
        print(f"  {length:.1f} s from {start:.1f} s, after {before!r}")
