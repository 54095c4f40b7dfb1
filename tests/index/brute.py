"""A user's own index: NumPy, with its own options, files and version."""

import zlib
from dataclasses import dataclass

import numpy as np

from rcir.errors import InvalidConfig
from rcir.index import check_vectors


@dataclass(frozen=True)
class BruteOptions:
    block: int = 64

    def __post_init__(self):
        if self.block < 1:
            raise InvalidConfig(f"block is {self.block}; at least 1")


class BruteIndex:
    Options = BruteOptions

    def __init__(self, vectors, options):
        self.vectors, self.options = check_vectors(vectors), options

    @classmethod
    def build(cls, vectors, options):
        return cls(vectors, options)

    def __len__(self):
        return len(self.vectors)

    def add(self, vectors):
        added = check_vectors(vectors, self.vectors.shape[1])
        self.vectors = np.concatenate([self.vectors, added])

    def remove(self, positions):
        self.vectors = np.delete(self.vectors, positions, axis=0)

    def search(self, vectors, k):
        queries = check_vectors(vectors, self.vectors.shape[1])
        distances = np.full((len(queries), k), np.inf, np.float32)
        positions = np.full((len(queries), k), -1, np.int64)
        apart = np.linalg.norm(queries[:, None] - self.vectors[None], axis=2)
        order = np.argsort(apart, axis=1, kind="stable")[:, :k]
        positions[:, : order.shape[1]] = order
        distances[:, : order.shape[1]] = np.take_along_axis(apart, order, axis=1)
        return distances, positions

    def vectors_at(self, positions):
        return self.vectors[positions]

    @property
    def version(self):
        return f"{self.vectors.shape} {zlib.crc32(self.vectors)}"

    def save(self, folder):
        (folder / "parts").mkdir()
        for name, part in (("first", self.vectors[:5]), ("rest", self.vectors[5:])):
            np.save(folder / "parts" / f"{name}.npy", part, allow_pickle=False)

    @classmethod
    def load(cls, folder, options):
        parts = [np.load(folder / "parts" / f"{name}.npy") for name in ("first", "rest")]
        return cls(np.concatenate(parts), options)
