"""Searching vectors: an index, and what is known of the images that it holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rcir.data.relevance_protocol import Relevance
from rcir.embedding import Embedding
from rcir.errors import InvalidData
from rcir.index import Index, check_depth, lengths, one_minus_cosine
from rcir.retrieval.gallery import Gallery


class VectorSearcher:
    """Finds the nearest gallery vectors of a vector.

    Attributes:
        index: how vectors are searched.
        gallery: what is known of the images, in the order of the index.
        max_depth: number of candidates to search for each query, if the gallery has as many.
        label_names: names of the gallery's labels, by label; empty where they have none. No search
            depends on them.
    """

    def __init__(self, index: Index, gallery: Gallery, depth: int) -> None:
        check_depth(depth)
        if len(gallery) != len(index):
            raise InvalidData(
                f"the index holds {len(index)} images, and of {len(gallery)} there are ids: give "
                "one each"
            )
        self.index = index
        self.gallery = gallery
        self.max_depth = depth
        self.label_names: dict[int, str] = {}

    @property
    def ids(self) -> NDArray[np.object_]:
        """(n,) names of the gallery images."""
        return self.gallery.ids

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """(n,) labels of the gallery images, if images match by having the same."""
        return self.gallery.labels

    @property
    def relevance(self) -> Relevance | None:
        """Which queries match the gallery images, if that is known."""
        return self.gallery.relevance

    @property
    def item_uncertainty(self) -> NDArray[np.float64] | None:
        """(n,) of the gallery images, if the encoder states it."""
        return self.gallery.uncertainty

    @property
    def digests(self) -> NDArray[np.bytes_] | None:
        """(n,) of the gallery images, see `rcir.data.digests`, if they are known."""
        return self.gallery.digests

    @property
    def items(self) -> Embedding | None:
        """The embeddings of the gallery images, if the encoder re-ranks by them."""
        return self.gallery.items

    @property
    def depth(self) -> int:
        """Number of candidates searched for each query; no set is larger."""
        return min(self.max_depth, len(self.gallery))

    def named_labels(
        self, positions: NDArray[np.int64]
    ) -> tuple[int, ...] | tuple[str, ...] | None:
        """Labels of some gallery images, by name where labels have names; None without labels."""
        if self.labels is None:
            return None
        labels = self.labels[positions].tolist()
        if not self.label_names:
            return tuple(labels)
        return tuple(self.label_names.get(label, str(label)) for label in labels)

    def keys(self, positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """(n, depth) labels at positions, -1 where there is no candidate; None without labels."""
        if self.labels is None:
            return None
        found = self.labels.take(positions)
        if len(positions) and positions[:, -1].min() < 0:  # those of no candidate come last
            found[positions < 0] = -1
        return found

    def nearest(
        self, vectors: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float64]]:
        """The nearest gallery vectors of vectors (n, d).

        Returns:
            L2 distances and positions, each (n, depth), nearest first; and (n,) one minus the
            cosine to the first of them.
        """
        distances, positions = self.index.search(vectors, self.depth)
        norms = self.gallery.norms[positions[:, 0]]
        return distances, positions, one_minus_cosine(distances[:, 0], lengths(vectors), norms)

    def remove(self, ids: Sequence[str]) -> None:
        """Remove images from the gallery. The calibration is stale from then on: calibrate again.

        Raises:
            InvalidData: some ids are of no gallery image, or none would be left; nothing was
                removed.
        """
        gone = self.gallery.positions(ids)
        if len(gone) == len(self.gallery):
            raise InvalidData("no image would be left in the gallery: build another one")
        self.index.remove(gone)
        self.gallery = self.gallery.subset(np.delete(np.arange(len(self.gallery)), gone))
