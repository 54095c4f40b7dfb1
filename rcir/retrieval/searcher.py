"""Encoder, preprocessing and index: finding the nearest images, without any guarantee."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rcir.data.digests import digests
from rcir.data.preprocessing import Preprocessing
from rcir.data.records import ImageSet
from rcir.data.relevance import SameLabel
from rcir.data.relevance_protocol import Relevance
from rcir.data.votes import count_matches
from rcir.embedding import Embedding
from rcir.encoders import Encoder, require_encoder
from rcir.encoders.batches import Embed, Images, embed
from rcir.encoders.rerank import reranked
from rcir.errors import InvalidConfig, InvalidData
from rcir.index import (
    DEPTH,
    Index,
    IndexConfig,
    build_index,
    check_vectors,
    lengths,
)
from rcir.retrieval.fingerprints import Fingerprints
from rcir.retrieval.gallery import Gallery
from rcir.retrieval.vector_searcher import VectorSearcher
from rcir.risk import LabelledResults, SearchResults
from rcir.risk.search_results import VOTERS


class Searcher(VectorSearcher):
    """Finds the nearest gallery images of a query.

    Two steps, each by itself as well: `embed` makes vectors of pictures, `search` finds the
    neighbours of vectors. Without an encoder there is the second one only, and queries are vectors.

    Attributes:
        encoder, preprocessing: how pictures are embedded; None where all is vectors already.
        index, gallery, max_depth, label_names: see `VectorSearcher`.

    Args:
        labels: of the gallery images, or their relevance: which queries they match.
        depth: `max_depth`.
        item_uncertainty, digests, items, norms: see `Gallery`; vectors are of unit length unless
            norms are given.
    """

    def __init__(
        self,
        encoder: Encoder | None,
        preprocessing: Preprocessing | None,
        index: Index,
        ids: Sequence[str],
        labels: NDArray[np.int64] | Relevance | None = None,
        depth: int = DEPTH,
        item_uncertainty: NDArray[np.float64] | None = None,
        digests: NDArray[np.bytes_] | None = None,
        items: Embedding | None = None,
        norms: NDArray[np.float32] | None = None,
    ) -> None:
        if encoder is not None:
            require_encoder(encoder)
        if (encoder is None) != (preprocessing is None):
            raise InvalidConfig("give an encoder and its preprocessing, or neither")
        if isinstance(labels, np.ndarray):
            labels = SameLabel(np.asarray(labels, np.int64))
        norms = np.ones(len(ids), np.float32) if norms is None else norms
        named = np.array(ids, dtype=object)
        gallery = Gallery(named, norms, labels, item_uncertainty, digests, items)
        super().__init__(index, gallery, depth)
        self.encoder = encoder
        self.preprocessing = preprocessing
        self._fingerprints = Fingerprints()
        if encoder is not None and encoder.reranks and items is None:
            raise InvalidData("the encoder re-ranks: give the embeddings of the gallery as items")

    @classmethod
    def build(
        cls,
        encoder: Encoder,
        preprocessing: Preprocessing,
        gallery: ImageSet,
        depth: int = DEPTH,
        embedder: Embed | None = None,
        index: IndexConfig | None = None,
    ) -> Self:
        """Embed and index a gallery; the result still has to be calibrated.

        Args:
            embedder: what embeds, see `rcir.encoders.embedder.Embedder`; `embed` unless given.
            index: which index; an exact one unless given.
        """
        if len(gallery) == 0:
            raise InvalidData("the gallery is empty: give at least one image")
        require_encoder(encoder)
        embedding = (embedder or embed)(encoder, preprocessing, gallery.images)
        vectors, uncertainty = _arrays(embedding)
        items = embedding.map(Tensor.cpu) if encoder.reranks else None
        ids, relevance, known = gallery.ids, gallery.relevance, digests(gallery.images)
        made, norms = build_index(vectors, index), lengths(vectors)
        built = cls(
            encoder, preprocessing, made, ids, relevance, depth, uncertainty, known, items, norms
        )
        built.label_names = gallery.label_names
        return built

    def embed(self, images: Images, embedder: Embed | None = None) -> Embedding:
        """The embeddings of pictures, with what the encoder knows of their uncertainty.

        Args:
            images: n of what `rcir.data.read_image` takes.
            embedder: as in `build`.

        Raises:
            InvalidConfig: there is no encoder.
            InvalidImage: of an image that cannot be read.
        """
        if self.encoder is None or self.preprocessing is None:
            raise InvalidConfig(
                "this retriever has no encoder, and takes vectors only: give an array (n, d) of "
                "floats, from what embedded the gallery"
            )
        return (embedder or embed)(self.encoder, self.preprocessing, images)

    def search(
        self, queries: Images | NDArray[np.floating[Any]] | Embedding, embedder: Embed | None = None
    ) -> SearchResults:
        """The nearest gallery images of each query, without any guarantee.

        Args:
            queries: what `embed` returns; or pictures, which are embedded first; or, where there is
                no encoder, vectors (n, d).
            embedder: as in `build`.

        Raises:
            InvalidConfig, InvalidImage: as `embed` does.
            InvalidData: of vectors of another length than those of the gallery, NaN or infinite.
        """
        return self._search(queries, embedder, self.fingerprints())

    def _search(
        self,
        queries: Images | NDArray[np.floating[Any]] | Embedding,
        embedder: Embed | None = None,
        fingerprints: Mapping[str, str] | None = None,
    ) -> SearchResults:
        embedding, images = self._embedded(queries, embedder)
        vectors, uncertainty = _arrays(embedding)
        distances, positions, cosine = self.nearest(vectors)
        if self.items is not None and self.encoder is not None:
            distances, positions = reranked(self.encoder, embedding, self.items, positions)
        items, votes = self.item_uncertainty, None
        if self.relevance is not None and self.labels is None:  # of labels, keys tell
            votes = count_matches(self.relevance, positions, VOTERS)
        return SearchResults(
            cosine if uncertainty is None else uncertainty,
            self.depth,
            distances,
            self.keys(positions),
            None if items is None else items.take(positions),
            votes,
            positions=positions,
            vectors=vectors,
            images=images,
            fingerprints=fingerprints,
        )

    def search_labelled(
        self,
        queries: ImageSet,
        group: str | None = None,
        embedder: Embed | None = None,
        cluster: str | None = None,
    ) -> LabelledResults:
        """Search queries of which it is known which gallery images they match.

        Args:
            queries: images with labels, or with what else makes them match, see
                `rcir.data.relevance_protocol`.
            group: which of their attributes says what group each belongs to.
            embedder: as in `build`.
            cluster: which of their attributes says in what cluster each came, such as a video, a
                patient or a place: queries that are not independent of each other. It warns where
                the images know of clusters and none are named.

        Raises:
            InvalidData: the gallery has no labels, or of another kind than the queries, or the
                queries have no such attribute.
        """
        relevance = self.gallery.relevance_for(queries)
        for name in (group, cluster):
            if name is not None and not (isinstance(name, str) and name in queries.attributes):
                known = ", ".join(queries.attributes) or "none"
                raise InvalidData(f"the queries have no attribute {name!r}; they have {known}")
        if cluster is None and queries.cluster is not None:
            warnings.warn(
                f"the queries come in clusters ({queries.cluster}), of which a guarantee for "
                f"independent queries says too much: name them with cluster={queries.cluster!r}",
                stacklevel=2,
            )
        found = self.search(queries.images, embedder)
        relevant = queries.relevance.of(relevance, found.known("positions"))
        totals = queries.relevance.totals(relevance)
        groups, clusters = (
            None if name is None else queries.attributes[name].astype(str)
            for name in (group, cluster)
        )
        return LabelledResults.of(
            found,
            relevant,
            totals,
            groups=groups,
            clusters=clusters,
            cluster=cluster,
            one_label=self.labels is not None,
        )

    def fingerprints(self) -> dict[str, str]:
        """Digests of everything that calibration depends on, see `Fingerprints`."""
        return self._fingerprints.of(self.encoder, self.preprocessing, self.index, self.gallery)

    def add(
        self,
        images: Images | NDArray[np.floating[Any]] | Embedding,
        ids: Sequence[str],
        labels: Sequence[int] | NDArray[np.integer[Any]] | Relevance | None = None,
    ) -> None:
        """Add images to the gallery. The calibration is stale from then on: calibrate again.

        Args:
            images: pictures, or as for `search`.
            ids: a name for each, other than those of the gallery images.
            labels: of each, if and only if the gallery has labels; or its `Relevance`.

        Raises:
            InvalidData: of ids and labels; nothing was added.
            InvalidConfig, InvalidImage: as `embed` does.
        """
        if isinstance(images, str | bytes | os.PathLike):
            raise InvalidData(f"images is {images!r}: give a list, of one image per id")
        named = self.gallery.new_ids(ids, len(images))
        relevance = self.gallery.new_relevance(labels, len(images))
        embedding, known_by = self._embedded(images)
        vectors, uncertainty = _arrays(embedding)
        longer = self.gallery.joined(
            Gallery(
                named,
                lengths(vectors),
                relevance,
                uncertainty,
                None if self.digests is None else digests(known_by),
                None if self.items is None else embedding.map(Tensor.cpu),
            )
        )
        self.index.add(vectors)
        self.gallery = longer

    def _embedded(
        self,
        queries: Images | NDArray[np.floating[Any]] | Embedding,
        embedder: Embed | None = None,
    ) -> tuple[Embedding, Images | NDArray[np.floating[Any]]]:
        """Embeddings, and by what the same query is known again: its picture or its vector."""
        if isinstance(queries, Embedding):
            return queries, queries.vectors.cpu().numpy()
        if self.encoder is None and isinstance(queries, np.ndarray) and queries.dtype.kind == "f":
            vectors = check_vectors(queries)
            return Embedding(torch.from_numpy(vectors)), vectors
        images: Any = queries
        return self.embed(images, embedder), images


def _arrays(embedding: Embedding) -> tuple[NDArray[np.float32], NDArray[np.float64] | None]:
    """Vectors, and uncertainties if there are any."""
    uncertainty = embedding.uncertainty
    return embedding.vectors.cpu().numpy(), (
        None if uncertainty is None else uncertainty.cpu().numpy().astype(np.float64)
    )
