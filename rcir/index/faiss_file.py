"""FAISS's own files: mapped into memory, only after a child process survived reading them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import faiss

from rcir.errors import InvalidData
from rcir.index import faiss_child
from rcir.stored_vectors import WatchedFile


def faiss_content(index: Any) -> tuple[str, int]:
    """SHA-256 and number of bytes of the file that FAISS writes of an index; none is written.

    Example:
        >>> faiss_content(faiss.IndexFlatL2(3))[1] > 0
        True
    """
    digest, size = hashlib.sha256(), 0

    def take(part: bytes) -> None:
        nonlocal size
        digest.update(part)
        size += len(part)

    writer = faiss.PyCallbackIOWriter(take, 1 << 20)
    faiss.write_index(index, writer)
    return digest.hexdigest(), size


def read_faiss(path: Path, digest: str) -> tuple[Any, WatchedFile]:
    """The index that FAISS wrote to a file, mapped into memory, and that file.

    Args:
        path: of the file.
        digest: SHA-256 that it must have.

    Raises:
        InvalidData: it has another one, or whatever holds it cannot be read or searched.
    """
    watched = WatchedFile(path)
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise InvalidData(
                f"{path.name} was changed since it was written (its checksum differs): copy it "
                "again, or build the index again"
            )
    # Reading what somebody made up can end the process: FAISS checks little of what it reads.
    command = [sys.executable, "-I", faiss_child.__file__, str(path)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise InvalidData(
            f"{path.name} is no index that FAISS {faiss.__version__} can read and search: build "
            "the index again"
        )
    return faiss.read_index(str(path), faiss_child.FLAGS), watched


def unmapped(index: Any) -> Any:
    """The same index in memory of its own: FAISS ends the process that adds to a mapped one."""
    with tempfile.NamedTemporaryFile(prefix="rcir-index-") as file:
        faiss.write_index(index, file.name)
        return faiss.read_index(file.name, faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE)
