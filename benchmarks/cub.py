"""Vectors of photographs of birds: CUB-200-2011, by a network that ImageNet trained.

Of the copy with 50 kinds; the second half of the kinds, which nothing here was ever trained on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import sized

from rcir.data.vector_files import VectorTable, read_vectors

MODEL = "timm:tf_efficientnet_lite0"
KINDS = sized(range(26, 51), range(26, 31))


def birds() -> VectorTable:
    """The vectors of the photographs of `KINDS`, embedded by `rcir embed`."""
    data = Path(os.environ["RCIR_DATA"])
    with tempfile.TemporaryDirectory() as folder, tarfile.open(_archive(data)) as archive:
        starts = tuple(f"CUB_200_2011/images/{kind:03d}." for kind in KINDS)
        pictures = [member for member in archive if member.name.startswith(starts)]
        archive.extractall(folder, pictures, filter="data")
        output = Path(folder) / "birds.parquet"
        weights = data / "models" / "tf_efficientnet_lite0.safetensors"
        command = ["embed", f"{folder}/CUB_200_2011/images", "--output", str(output)]
        command += ["--model", MODEL, "--checkpoint", str(weights)]
        subprocess.run([sys.executable, "-m", "rcir.cli", *command], check=True)
        return read_vectors(output)


def some(table: VectorTable, rows: np.ndarray) -> VectorTable:
    """The vectors of some rows, with their ids and labels."""
    assert table.ids is not None
    labels = np.asarray(table.labels)
    return replace(
        table,
        vectors=table.vectors[rows],
        ids=np.array(table.ids)[rows].tolist(),
        labels=labels[rows],
    )


def gallery_and_queries(table: VectorTable, seed: int) -> tuple[VectorTable, VectorTable]:
    """Half of the photographs of each kind, and the others, in random order."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(table))
    labels = np.asarray(table.labels)[order]
    by_kind = np.argsort(labels, kind="stable")
    place = np.empty(len(order), np.int64)
    starts = np.searchsorted(labels[by_kind], labels[by_kind])
    place[by_kind] = np.arange(len(order)) - starts
    counts = np.unique(labels, return_inverse=True, return_counts=True)
    held = place < counts[2][counts[1]] / 2
    return some(table, order[held]), some(table, order[~held])


def _archive(data: Path) -> Path:
    return data / "cub200-50" / "CUB_200_2011.tar"
