"""Searching vectors: an index, and what is known of the images that it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rcir.data.digests import digests
from rcir.data.relevance_protocol import Relevance
from rcir.errors import InvalidData
from rcir.index import Index, check_depth, lengths, one_minus_cosine
from rcir.retrieval.gallery import Gallery
from rcir.retrieval.vector_options import VectorOptions

if TYPE_CHECKING:
    from rcir.embedding import Embedding


class VectorSearcher:
    """Finds the nearest gallery vectors of a vector.

    Attributes:
        index: how vectors are searched.
        gallery: what is known of the images, in the order of the index.
        max_depth: number of candidates to search for each query, if the gallery has as many.
        options: how vectors are searched that no encoder of rcir made.
        label_names: names of the gallery's labels, by label; empty where they have none. No search
            depends on them.
    """

    def __init__(
        self, index: Index, gallery: Gallery, depth: int, options: VectorOptions | None = None
    ) -> None:
        check_depth(depth)
        _require_one_each(index, gallery)
        self.index = index
        self.gallery = gallery
        self.max_depth = depth
        self.options = options or VectorOptions()
        if self.options.leave_one_out and gallery.digests is None:
            raise InvalidData("leave_one_out needs the digests of the gallery's vectors")
        if self.depth < 1:
            raise InvalidData(
                f"of {len(gallery)} gallery items nothing is left when an item is left out with "
                "its exact copies: give others as well"
            )
        self.label_names: dict[int, str] = {}

    def take(self, index: Index) -> None:
        """Search an index of the same images from now on.

        Raises:
            InvalidData: it holds more or fewer.
        """
        _require_one_each(index, self.gallery)
        self.index = index

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
        """Of the gallery images, all those of its templates, see `rcir.data.digests`; None if they
        are not known.
        """
        known = self.gallery.digests
        return None if known is None else known[known != b""]

    @property
    def items(self) -> Embedding | None:
        """The embeddings of the gallery images, if the encoder re-ranks by them."""
        return self.gallery.items

    @property
    def depth(self) -> int:
        """Number of candidates searched for each query; no set is larger."""
        return min(self.max_depth, len(self.gallery) - self._left_out)

    @property
    def _left_out(self) -> int:
        """How many gallery items are left out of a search, at most."""
        return self.gallery.copies if self.options.leave_one_out else 0

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
        self, vectors: NDArray[np.float32], depth: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float64]]:
        """The nearest gallery vectors of vectors (n, d), without `itself` where that is left out.

        Args:
            vectors: ready to be searched.
            depth: number of candidates; as many as are searched for each query unless given.

        Returns:
            L2 distances and positions, each (n, depth), nearest first; and (n,) one minus the
            cosine to the first of them.
        """
        depth = depth or self.depth
        distances, positions = self.index.search(vectors, depth + self._left_out)
        if self._left_out:
            own = (positions[:, :, None] == self.itself(vectors)[:, None, :]).any(axis=2)
            columns = np.argsort(own, axis=1, kind="stable")[:, :depth]
            distances = np.take_along_axis(distances, columns, axis=1)
            positions = np.take_along_axis(positions, columns, axis=1)
        norms = self.gallery.norms[positions[:, 0]]
        return distances, positions, one_minus_cosine(distances[:, 0], lengths(vectors), norms)

    def itself(self, vectors: NDArray[np.float32]) -> NDArray[np.int64]:
        """(n, c) positions of the gallery items of the very same vector, then -2."""
        known, order = self.gallery.by_digest
        asked = digests(vectors)
        first = np.searchsorted(known, asked, "left")
        count = np.searchsorted(known, asked, "right") - first
        steps = np.arange(self._left_out)
        places = np.minimum(first[:, None] + steps, len(known) - 1)
        return np.where(steps < count[:, None], order[places], -2)


def _require_one_each(index: Index, gallery: Gallery) -> None:
    if len(gallery) != len(index):
        raise InvalidData(
            f"the index holds {len(index)} images, and of {len(gallery)} there are ids: give one "
            "each"
        )
