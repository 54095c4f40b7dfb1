"""Photographs of birds: CUB-200-2011, the copy with 50 kinds, and a network that ImageNet trained.

The second half of the kinds is what nothing here was ever trained on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import sized
from numpy.typing import NDArray

from rcir.data.vector_files import VectorTable, read_vectors

MODEL = "timm:tf_efficientnet_lite0"
KINDS = sized(range(26, 51), range(26, 31))
Rows = NDArray[np.int64]


def weights() -> Path:
    """The weights of `MODEL`."""
    return Path(os.environ["RCIR_DATA"], "models", "tf_efficientnet_lite0.safetensors").absolute()


def class_folders(folder: Path, kinds: Container[int]) -> Path:
    """The photographs of some kinds, in class folders that are written into a folder."""
    archive = Path(os.environ["RCIR_DATA"], "cub200-50", "CUB_200_2011.tar")
    images = folder / "CUB_200_2011" / "images"
    if not images.exists():
        with tarfile.open(archive) as members:
            wanted = [
                member
                for member in members
                if member.name.endswith(".jpg") and int(member.name.split("/")[-2][:3]) in kinds
            ]
            members.extractall(folder / "begun", wanted, filter="data")
        (folder / "begun" / "CUB_200_2011").rename(images.parent)
    return images


def birds(kinds: Container[int] = KINDS) -> VectorTable:
    """The vectors of the photographs of some kinds, embedded by `rcir embed`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "birds.parquet"
        command = ["embed", str(class_folders(Path(folder), kinds)), "--output", str(output)]
        command += ["--model", MODEL, "--checkpoint", str(weights())]
        subprocess.run([sys.executable, "-m", "rcir.cli", *command], check=True)
        return read_vectors(output)


def some(table: VectorTable, rows: Rows) -> VectorTable:
    """The vectors of some rows, with their ids and labels."""
    assert table.ids is not None
    labels = np.asarray(table.labels)
    return replace(
        table,
        vectors=table.vectors[rows],
        ids=np.array(table.ids)[rows].tolist(),
        labels=labels[rows],
    )


def halves(labels: NDArray[np.generic], seed: int) -> tuple[Rows, Rows]:
    """Rows of half of the photographs of each kind, and of the others, in random order."""
    order = np.random.default_rng(seed).permutation(len(labels))
    drawn = labels[order]
    by_kind = np.argsort(drawn, kind="stable")
    place = np.empty(len(order), np.int64)
    starts = np.searchsorted(drawn[by_kind], drawn[by_kind])
    place[by_kind] = np.arange(len(order)) - starts
    counts = np.unique(drawn, return_inverse=True, return_counts=True)
    held = place < counts[2][counts[1]] / 2
    return order[held], order[~held]


def gallery_and_queries(table: VectorTable, seed: int) -> tuple[VectorTable, VectorTable]:
    """`halves` of the vectors."""
    first, second = halves(np.asarray(table.labels), seed)
    return some(table, first), some(table, second)
