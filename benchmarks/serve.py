"""A served retriever under load: CPU per request, latencies, a swap, memory.

The retriever of two-digit numbers, served by `rcir serve` in a process of its own; 16 clients in
another one, each asks again as soon as it is answered, a PNG file as multipart, answers kept for
feedback. CPU seconds are those that the server's process took, all of its threads; beside them
those of `Retriever.retrieve` on batches of 16 in this process. A swap replaces the folder under
load: requests without an answer, and the longest time in which none was answered. At last, small
files that are slow to decode are uploaded, while other clients ask as before: the longest time that
one of them waits for its answer; and likewise JSON bodies that are slow to parse.
"""

from __future__ import annotations

import http.client
import io
import json
import multiprocessing
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from common import DIGITS, parser, report, sized
from PIL import Image

import rcir
from rcir.data import DataConfig, load_splits

CLIENTS, SECONDS, PICTURES = sized((16, 30.0, 200), (2, 1.0, 4))
FEW, MANY = sized((2_000, 20_000), (10, 40))  # requests between which memory must not grow
BOMB_BYTES = sized(4 << 20, 1 << 16)  # of a file that is slow to decode
BATCH, DIRECT = 16, sized(2_000, 32)
ALPHA, DELTA = sized(0.1, 0.5), 0.1
BOUNDARY = "rcir"
MULTIPART = f"multipart/form-data; boundary={BOUNDARY}"


def trained(folder: Path) -> Path:
    """A calibrated retriever, made by other processes."""
    train = ["training", "--name", "run", "--storage", str(folder), "--epochs", "2"]
    train += ["--data.options", json.dumps(DIGITS)]
    for job in (train, ["calibration", "--run", str(folder / "run")]):
        subprocess.run([sys.executable, "-m", *job], check=True, stdout=subprocess.DEVNULL)
    return folder / "run" / "retriever"


def file_of(picture: np.ndarray, kind: str = "PNG", **options: bool) -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, kind, **options)
    return file.getvalue()


def bombs() -> list[bytes]:
    """Files that are slow to decode: of many segments, scans, chunks, or letters of a comment."""
    grey = np.random.default_rng(0).integers(0, 256, (256, 256), np.uint8)
    plain, progressive = file_of(grey, "JPEG"), file_of(grey, "JPEG", progressive=True)
    exif, comment = b"\xff\xe1\0\x08Exif\0\0", b"\xff\xfe\0\2"
    scan = progressive[progressive.rindex(b"\xff\xda") : -2]
    png, chunk = file_of(grey), struct.pack(">I4sI", 0, b"teXt", zlib.crc32(b"teXt"))
    return [
        *(plain[:2] + part * (BOMB_BYTES // len(part)) + plain[2:] for part in (exif, comment)),
        progressive[:-2] + scan * (2 * BOMB_BYTES // len(scan)) + progressive[-2:],
        plain[:2] + bytes(BOMB_BYTES) + plain[2:],
        png[:33] + chunk * (BOMB_BYTES // len(chunk)) + png[33:],
        b"P5 #" + b"x" * BOMB_BYTES + b"\n256 256 255 " + grey.tobytes(),
    ]


def long_json() -> list[bytes]:
    """JSON bodies that are slow to parse: of many numbers, wrong numbers, or lists."""
    parts = (b"0.123456789,", b"null,", b"[],")
    return [b'{"vector": [' + part * (BOMB_BYTES // len(part)) + b"0]}" for part in parts]


def body_of(file: bytes) -> bytes:
    """A request's body: the file of a picture, alpha and delta."""
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in (("alpha", ALPHA), ("delta", DELTA))
    ]
    head = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="picture"; filename="q.png"\r\n'
        "Content-Type: image/png\r\n\r\n"
    )
    return b"".join([*parts, head.encode(), file, f"\r\n--{BOUNDARY}--\r\n".encode()])


@contextmanager
def serving(retriever: Path, folder: Path) -> Iterator[tuple[int, int]]:
    """The process and the port of a server."""
    command = [sys.executable, "-m", "rcir.cli", "serve", str(retriever), "--port", "0"]
    command += ["--feedback", str(folder / "feedback.db"), "--poll", "0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        port = int(process.stdout.readline().rpartition(":")[2])
        try:
            yield process.pid, port
        finally:
            process.terminate()


def clients(
    port: int, bodies: list[bytes], seconds: float, requests: int, kind: str = MULTIPART
) -> list[tuple]:
    """(began, ended, status) of each request of all clients, for a time or up to a number."""
    answers: list[tuple[float, float, int]] = []
    end = time.monotonic() + seconds
    headers = {"Content-Type": kind}

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        turn = number
        while time.monotonic() < end and len(answers) < requests:
            began, status = time.monotonic(), 0
            try:
                connection.request("POST", "/retrieve", bodies[turn % len(bodies)], headers)
                response = connection.getresponse()
                response.read()
                status = response.status
            except (OSError, http.client.HTTPException):
                connection.close()
            answers.append((began, time.monotonic(), status))
            turn += CLIENTS

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def cpu_seconds(process: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(process: int) -> int:
    """Bytes of a process in memory."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Serve, ask, swap, measure, print."""
    asked = parser(__doc__).parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        multiprocessing.get_context("spawn").Pool(1) as pool,
    ):
        folder = Path(name)
        place = trained(folder)
        retriever = rcir.load(place)
        pictures = load_splits(DataConfig("digits", options=DIGITS)).test.images[:PICTURES]
        files = [file_of(picture) for picture in pictures]
        bodies = [body_of(file) for file in files]

        def load(port: int, seconds: float, requests: int = sys.maxsize) -> np.ndarray:
            return np.array(pool.apply(clients, (port, bodies, seconds, requests)))

        files = [files[number % len(files)] for number in range(DIRECT)]
        retriever.retrieve(files[:BATCH], ALPHA, DELTA)
        before = time.process_time()
        for start in range(0, DIRECT, BATCH):
            retriever.retrieve(files[start : start + BATCH], ALPHA, DELTA)
        direct = 1e3 * (time.process_time() - before) / DIRECT

        with serving(place, folder) as (process, port):
            grown = []
            for requests in (FEW, MANY - FEW):
                load(port, 3600.0, requests)
                grown.append(resident(process))
            before = cpu_seconds(process)
            load_figures = load(port, SECONDS)
            cpu = 1e3 * (cpu_seconds(process) - before) / len(load_figures)
            retriever.remove([str(retriever.ids[-1])])
            retriever.recalibrate()
            swapping = pool.apply_async(clients, (port, bodies, SECONDS / 3, sys.maxsize))
            time.sleep(SECONDS / 12)
            retriever.save(place)
            swapped = np.array(swapping.get())
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/ready")
            ready = json.loads(connection.getresponse().read())
            slow = (
                ([body_of(file) for file in bombs()], MULTIPART),
                (long_json(), "application/json"),
            )
            stalled = []
            for attack, kind in slow:
                asking = pool.apply_async(clients, (port, bodies, SECONDS / 3, sys.maxsize))
                clients(port, attack, SECONDS / 3, sys.maxsize, kind)
                stalled.append(np.array(asking.get()))
    milliseconds = 1e3 * (load_figures[:, 1] - load_figures[:, 0])
    p50, p99 = np.percentile(milliseconds, [50, 99])
    errors = int(np.count_nonzero(np.concatenate([load_figures, *stalled])[:, 2] != 200))
    by_bombs, by_json = (float((each[:, 1] - each[:, 0]).max()) for each in stalled)
    stall = float(np.diff(np.sort(swapped[:, 1])).max())
    lost = int(np.count_nonzero(swapped[:, 2] != 200))
    figures = {
        "cpu_ms_per_request": cpu,
        "direct_cpu_ms": direct,
        "p99_over_p50": p99 / p50,
        "errors": errors,
        "lost_in_swap": lost,
        "swap_stall_seconds": stall,
        "stall_under_bombs_seconds": by_bombs,
        "stall_under_json_seconds": by_json,
        "memory_growth": grown[1] / grown[0] - 1,
    }
    rows = [
        ["direct, batches of 16", f"{direct:.2f}", "-", "-", "-", "-"],
        [
            *(f"HTTP, {CLIENTS} clients", f"{cpu:.2f}", f"{p50:.1f}", f"{p99:.1f}"),
            *(f"{len(load_figures) / SECONDS:.0f}", str(errors)),
        ],
    ]
    columns = ("way", "CPU ms per request", "p50 ms", "p99 ms", "requests/s", "errors")
    report(f"Served, version {ready['version']} after the swap", columns, rows, figures, asked.json)


if __name__ == "__main__":
    main()
