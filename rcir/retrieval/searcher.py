"""Encoder, preprocessing and index: finding the nearest images, without any guarantee."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rcir.data.digests import digests
from rcir.data.records import ImageSet
from rcir.data.relevance import SameLabel
from rcir.data.relevance_protocol import Relevance
from rcir.data.votes import count_matches
from rcir.embedding import Embedding
from rcir.errors import InvalidConfig, InvalidData
from rcir.index import DEPTH, Index, IndexConfig, UnbuiltIndex, build_index, lengths
from rcir.inputs import as_vectors
from rcir.retrieval.fingerprints import Fingerprints
from rcir.retrieval.gallery import Gallery
from rcir.retrieval.queries import Queries
from rcir.retrieval.query_uncertainty import QUERY_UNCERTAINTIES
from rcir.retrieval.templates import template_digests, templates_of
from rcir.retrieval.vector_options import VectorOptions
from rcir.retrieval.vector_searcher import VectorSearcher
from rcir.risk import SearchResults
from rcir.risk.keys import VOTERS

if TYPE_CHECKING:  # what needs no encoder needs no torch
    from rcir.data.preprocessing import Preprocessing
    from rcir.encoders.base import Encoder
    from rcir.encoders.batches import Embed, Images

Found = TypeVar("Found", bound=SearchResults)
Asked: TypeAlias = "Images | NDArray[np.floating[Any]] | Embedding | Queries"


class Searcher(VectorSearcher):
    """Finds the nearest gallery images of a query.

    Two steps, each by itself as well: `embed` makes vectors of pictures, `search` finds the
    neighbours of vectors. Without an encoder there is the second one only, and queries are vectors.

    Attributes:
        encoder, preprocessing: how pictures are embedded; None where all is vectors already.
        index, gallery, max_depth, label_names: see `VectorSearcher`.
        uncertainty: of the queries, see `judged`.

    Args:
        labels: of the gallery images, or their relevance: which queries they match.
        depth: `max_depth`.
        item_uncertainty, digests, items, norms: see `Gallery`; vectors are of unit length unless
            norms are given.
        options: see `VectorSearcher`; where there is no encoder.
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
        options: VectorOptions | None = None,
    ) -> None:
        if encoder is not None:
            from rcir.encoders import require_encoder

            require_encoder(encoder)
        if (encoder is None) != (preprocessing is None):
            raise InvalidConfig("give an encoder and its preprocessing, or neither")
        if isinstance(labels, np.ndarray):
            labels = SameLabel(np.asarray(labels, np.int64))
        norms = np.ones(len(ids), np.float32) if norms is None else norms
        named = np.array(ids, dtype=object)
        gallery = Gallery(named, norms, labels, item_uncertainty, digests, items)
        super().__init__(index, gallery, depth, options)
        self.encoder = encoder
        self.preprocessing = preprocessing
        self.uncertainty = "own"
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
        templates: str | None = None,
    ) -> Self:
        """Embed and index a gallery; the result still has to be calibrated.

        Args:
            embedder: what embeds, see `rcir.encoders.embedder.Embedder`; `embed` unless given.
            index: which index; an exact one unless given.
            templates: the attribute of the gallery that names the template of each image, such as
                a person. The images of a template become one item, under its name, whose embedding
                is fused of theirs (`rcir.encoders.fusion.fuse`). None for an item of each image.

        Raises:
            InvalidData: the gallery is empty, or has no such attribute; or images of one template
                match different things, or their embeddings cannot be fused.
            InvalidImage: of an image that cannot be read.

        Example:
            >>> from rcir.data import Preprocessing
            >>> from rcir.encoders import EncoderConfig, build_encoder
            >>> encoder = build_encoder(EncoderConfig("btl"), channels=1, size=(8, 16))
            >>> images = np.arange(4 * 8 * 16, dtype=np.uint8).reshape(4, 8, 16)
            >>> names = {"person": np.array(["Ann", "Ann", "Bo", "Bo"])}
            >>> gallery = ImageSet(images, np.array([0, 0, 1, 1]), ["a", "b", "c", "d"], names)
            >>> Searcher.build(encoder, Preprocessing(), gallery, templates="person").ids
            array(['Ann', 'Bo'], dtype=object)
        """
        if len(gallery) == 0:
            raise InvalidData("the gallery is empty: give at least one image")
        from rcir.encoders import require_encoder
        from rcir.encoders.batches import embed

        require_encoder(encoder)
        entries, template = (
            (gallery, None) if templates is None else templates_of(gallery, templates)
        )
        embedding = (embedder or embed)(encoder, preprocessing, gallery.images)
        known = digests(gallery.images)
        if template is not None:
            import torch

            from rcir.encoders.fusion import fuse

            of = torch.from_numpy(template).to(embedding.vectors.device)
            if not encoder.draws:  # what it calls a variance is of no vector
                embedding = replace(embedding, variance=None)
            embedding = fuse(embedding, of, len(entries))
            known = template_digests(known, template)
        vectors, uncertainty = _arrays(embedding)
        items = embedding.map(lambda values: values.cpu()) if encoder.reranks else None
        unbuilt: Any = UnbuiltIndex(*vectors.shape)
        built = cls(
            *(encoder, preprocessing, unbuilt, entries.ids, entries.relevance, depth),
            *(uncertainty, known, items, lengths(vectors)),
        )
        built.label_names = gallery.label_names
        built.take(build_index(vectors, index))  # last: it may be a table on a server
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
        from rcir.encoders.batches import embed

        return (embedder or embed)(self.encoder, self.preprocessing, images)

    def prepared(
        self,
        queries: Asked,
        embedder: Embed | None = None,
        uncertainty: NDArray[np.floating[Any]] | float | None = None,
        model: str | None = None,
    ) -> Queries:
        """Queries ready to be searched, which `search` and `Retriever.retrieve` take.

        Args:
            queries: as for `search`.
            embedder: as in `build`.
            uncertainty, model: of vectors, see `Retriever.retrieve`.

        Returns:
            The queries; of pictures their digests are left out.

        Raises:
            InvalidConfig, InvalidImage: as `embed` does.
            InvalidData: they are no such vectors, or of another model than the gallery's.
        """
        if isinstance(queries, Queries):
            return queries
        if self.encoder is not None and not (uncertainty is None and model is None):
            raise InvalidConfig(
                "uncertainty and model are told of vectors; of pictures the encoder knows them"
            )
        given = queries
        if not isinstance(given, Embedding):
            found = as_vectors(given) if self.encoder is None else None
            if found is not None:
                self.options.require_model(model)
                stated = self.options.uncertainties(uncertainty)
                return Queries(self.options.checked(found), stated)
            pictures: Any = given
            given = self.embed(pictures, embedder)
        vectors, stated = _arrays(given)
        if self.encoder is None:
            vectors = self.options.checked(vectors)
        held = None
        if self.encoder is not None and (self.encoder.reranks or self.encoder.draws):
            held = given.map(lambda values: values.cpu())
        return Queries(vectors, stated, None if given is queries else queries, embedding=held)

    def search(self, queries: Asked, embedder: Embed | None = None) -> SearchResults:
        """The nearest gallery images of each query, without any guarantee.

        Args:
            queries: what `embed` returns; or pictures, which are embedded first; or, where there is
                no encoder, vectors (n, d).
            embedder: as in `build`.

        Raises:
            InvalidConfig, InvalidImage: as `embed` does.
            InvalidData: of vectors of another length than those of the gallery, NaN or infinite.
        """
        return self._search(self.prepared(queries, embedder), self.fingerprints())

    def _search(
        self, queries: Queries, fingerprints: Mapping[str, str] | None = None
    ) -> SearchResults:
        distances, positions, cosine = self.nearest(queries.vectors)
        if self.items is not None and self.encoder is not None and queries.embedding is not None:
            from rcir.encoders.rerank import reranked

            distances, positions = reranked(self.encoder, queries.embedding, self.items, positions)
        items, votes = self.item_uncertainty, None
        if self.relevance is not None and self.labels is None:  # of labels, keys tell
            votes = count_matches(self.relevance, positions, VOTERS)
        found = SearchResults(
            cosine if queries.uncertainty is None else queries.uncertainty,
            self.depth,
            distances,
            self.keys(positions),
            None if items is None else items.take(positions),
            votes,
            positions=positions,
            vectors=queries.vectors,
            queries=queries,
            fingerprints=fingerprints,
        )
        return self.judged(found)

    @property
    def uncertainties(self) -> tuple[str, ...]:
        """What the uncertainty of queries can be, see `judged`."""
        return tuple(name for name, kind in QUERY_UNCERTAINTIES.items() if kind.known(self))

    def judged(self, results: Found, uncertainty: str | None = None) -> Found:
        """The same search results, by another uncertainty of the queries.

        Args:
            results: of a search of this retriever.
            uncertainty: one of `uncertainties`, see `rcir.retrieval.query_uncertainty`. The one
                that was calibrated with unless given.

        Raises:
            InvalidConfig: there is no such uncertainty here.
        """
        kind = uncertainty or self.uncertainty
        if kind not in self.uncertainties:
            raise InvalidConfig(
                f"uncertainty {kind!r} cannot be had of this gallery and encoder; choose one of "
                f"{', '.join(self.uncertainties)}"
            )
        return replace(results, uncertainty=QUERY_UNCERTAINTIES[kind].of(self, results))

    def fingerprints(self) -> dict[str, str]:
        """Digests of everything that calibration depends on, see `Fingerprints`."""
        return self._fingerprints.of(
            self.encoder, self.preprocessing, self.index, self.gallery, self.options
        )


def _arrays(embedding: Embedding) -> tuple[NDArray[np.float32], NDArray[np.float64] | None]:
    """Vectors, and uncertainties if there are any."""
    uncertainty = embedding.uncertainty
    return embedding.vectors.cpu().numpy(), (
        None if uncertainty is None else uncertainty.cpu().numpy().astype(np.float64)
    )
