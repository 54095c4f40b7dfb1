"""Search: the nearest gallery items of a query, without any guarantee."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.data.digests import digests
from rcir.data.labelling import gallery_relevance
from rcir.data.records import ImageSet
from rcir.data.relevance import SameLabel
from rcir.data.relevance_protocol import Relevance
from rcir.data.votes import count_matches
from rcir.embedding import Embedding
from rcir.errors import InvalidConfig, InvalidData
from rcir.index import (
    DEPTH,
    Index,
    IndexConfig,
    UnbuiltIndex,
    build_index,
    check_depth,
    lengths,
    one_minus_cosine,
)
from rcir.inputs import as_numpy, as_vectors
from rcir.metrics.labels import VOTERS
from rcir.retrieval.fingerprints import Fingerprints
from rcir.retrieval.gallery import Gallery, template_digests, templates_of
from rcir.retrieval.queries import Metric, Queries, VectorOptions
from rcir.retrieval.query_uncertainty import QUERY_UNCERTAINTIES
from rcir.risk import LabelledResults, SearchResults

if TYPE_CHECKING:  # what needs no encoder needs no torch
    from rcir.data.preprocessing import Preprocessing
    from rcir.encoders.base import Encoder
    from rcir.encoders.batches import Embed, Images

Found = TypeVar("Found", SearchResults, LabelledResults)
Asked: TypeAlias = "Images | NDArray[np.floating[Any]] | Embedding | Queries"


class Searcher:
    """Finds the nearest gallery items of a query.

    `embed` turns images into vectors, and `search` finds the neighbours of vectors. Without an
    encoder, queries are vectors.

    Attributes:
        encoder, preprocessing: how images are embedded; None if the gallery was given as vectors.
        index: how vectors are searched.
        gallery: the items in the order of the index, with their labels.
        max_depth: number of candidates to search for each query, if the gallery has as many.
        options: how given vectors are searched.
        label_names: names of the gallery's labels, by label; empty if they have none. No search
            depends on them.

    Args:
        labels: of the gallery images, or their relevance: which queries they match.
        depth: `max_depth`.
        item_uncertainty, digests, items, norms: see `Gallery`; vectors have unit length unless
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
        check_depth(depth)
        _require_one_each(index, gallery)
        self.encoder = encoder
        self.preprocessing = preprocessing
        self.index = index
        self.gallery = gallery
        self.max_depth = depth
        self.options = options or VectorOptions()
        self.label_names: dict[int, str] = {}
        self._fingerprints = Fingerprints()
        if self.options.leave_one_out and gallery.digests is None:
            raise InvalidData("leave_one_out needs the digests of the gallery's vectors")
        if self.depth < 1:
            raise InvalidData(
                f"of {len(gallery)} gallery items nothing is left when an item is left out with "
                "its exact copies: give others as well"
            )
        if encoder is not None and encoder.reranks and items is None:
            raise InvalidData("the encoder re-ranks: give the embeddings of the gallery as items")

    def __copy__(self) -> Self:
        """Return a searcher of the same parts, each of which can be replaced on its own."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _fingerprints=Fingerprints())
        return other

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

    @classmethod
    def from_embeddings(
        cls,
        vectors: ArrayLike,
        ids: Sequence[str] | None = None,
        labels: object = None,
        metric: Metric = "cosine",
        uncertainty: NDArray[np.floating[Any]] | None = None,
        depth: int = DEPTH,
        index: IndexConfig | None = None,
        model: str | None = None,
        leave_one_out: bool = False,
    ) -> Self:
        """Index vectors that something else embedded; the result still has to be calibrated.

        Args:
            vectors: (n, d) of the gallery items; like all columns here a NumPy array, a list, a
                tensor of PyTorch, or a column or frame of pandas or Arrow.
            ids: a name for each; by default "0", "1", ...
            labels: of each, whole numbers or texts; lists of texts, where items match that share
                one; or a `Relevance`, such as places (`rcir.data.WithinRadius`). None: the labels
                of queries are lists of the ids of their true matches.
            metric, model, leave_one_out: see `VectorOptions`.
            uncertainty: (n,) of the items, larger is less certain.
            depth: candidates searched for each query; no set is larger.
            index: which index; an exact one by default.

        Raises:
            InvalidData: vectors, ids, labels or uncertainties are unsuitable.

        Example:
            >>> import rcir
            >>> vectors = np.random.default_rng(0).standard_normal((100, 8))
            >>> retriever = rcir.Retriever.from_embeddings(vectors, labels=np.arange(100) % 5)
            >>> retriever.search(vectors[:2]).positions[:, 0]
            array([0, 1])
        """
        options = VectorOptions(metric, model, leave_one_out)
        checked = options.checked(vectors)
        if not len(checked):
            raise InvalidData("the gallery is empty: give at least one vector")
        names = [str(row) for row in range(len(checked))] if ids is None else ids
        empty = Gallery(np.empty(0, object), np.empty(0, np.float32))
        new_ids = empty.new_ids(names, len(checked)).tolist()
        relevance, label_names = gallery_relevance(labels, new_ids)
        unbuilt: Any = UnbuiltIndex(*checked.shape)
        built = cls(
            encoder=None,
            preprocessing=None,
            index=unbuilt,
            ids=new_ids,
            labels=relevance,
            depth=depth,
            item_uncertainty=options.uncertainties(uncertainty),
            digests=digests(checked),
            norms=lengths(checked),
            options=options,
        )
        built.label_names = label_names
        built.take(build_index(checked, index))  # last: it may be a table on a server
        return built

    def take(self, index: Index) -> None:
        """Search an index of the same images from now on.

        Raises:
            InvalidData: it holds more or fewer.
        """
        _require_one_each(index, self.gallery)
        self.index = index

    def add(
        self,
        images: Asked,
        ids: Sequence[str],
        labels: object = None,
        uncertainty: NDArray[np.floating[Any]] | None = None,
        model: str | None = None,
    ) -> None:
        """Add items to the gallery. A calibration is stale from then on: `Retriever.recalibrate`.

        Args:
            images: images, or as for `search`.
            ids: a name for each, other than those of the gallery items.
            labels: of each, if and only if the gallery has labels, of the same kind; or its
                `Relevance`.
            uncertainty: (n,) of vectors, if and only if those of the gallery have any.
            model: what embedded the vectors, see `VectorOptions`.

        Raises:
            InvalidData: ids, labels, vectors or uncertainties are unsuitable; nothing was added.
            InvalidConfig, InvalidImage: as `embed` does.
        """
        if isinstance(images, str | bytes | os.PathLike):
            raise InvalidData(f"images is {images!r}: give a list, of one image per id")
        new_ids = self.gallery.new_ids(ids, len(images))
        numbered = self.encoder is not None  # then its data set gave the labels their numbers
        relevance, names = self.gallery.new_relevance(labels, new_ids, self.label_names, numbered)
        queries = self.prepared(images, None, uncertainty, model)
        longer = self.gallery.joined(
            Gallery(
                new_ids,
                lengths(queries.vectors),
                relevance,
                queries.uncertainty,
                None if self.digests is None else queries.identified().digests,
                queries.embedding,
            )
        )
        self.index.add(queries.vectors)
        self.gallery, self.label_names = longer, names

    def remove(self, ids: Sequence[str]) -> None:
        """Remove items from the gallery. A calibration is stale from then on.

        Raises:
            InvalidData: some ids are not in the gallery, or no item would be left; nothing was
                removed.
        """
        rows = self.gallery.positions(ids)
        if len(rows) == len(self.gallery):
            raise InvalidData("no image would be left in the gallery: build another one")
        self.index.remove(rows)
        self.gallery = self.gallery.subset(np.delete(np.arange(len(self.gallery)), rows))

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
        return self.candidates(self.prepared(queries, embedder), self.fingerprints())

    def candidates(
        self, queries: Queries, fingerprints: Mapping[str, str] | None = None
    ) -> SearchResults:
        """Return the search results of prepared queries.

        Args:
            queries: what `prepared` returns.
            fingerprints: to be noted in the results, so that they can calibrate.
        """
        distances, positions, cosine = self.nearest(queries.vectors)
        if self.items is not None and self.encoder is not None and queries.embedding is not None:
            from rcir.encoders.rerank import reranked

            distances, positions = reranked(self.encoder, queries.embedding, self.items, positions)
        items, votes = self.item_uncertainty, None
        if self.relevance is not None and self.labels is None:  # of labels, keys tell
            votes = count_matches(self.relevance, positions, VOTERS)
        return SearchResults(
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

    def search_labelled(
        self,
        queries: ImageSet | Queries,
        group: str | None = None,
        embedder: Embed | None = None,
        cluster: str | None = None,
    ) -> LabelledResults:
        """Search queries of which it is known which gallery images they match.

        Args:
            queries: images with labels, or with what else makes them match, see
                `rcir.data.relevance_protocol`; or what `labelled` returns.
            group: which of their attributes says what group each belongs to.
            embedder: as in `build`.
            cluster: which of their attributes says in what cluster each came, such as a video, a
                patient or a place: queries that are not independent of each other. It warns where
                the images know of clusters and none are named.

        Raises:
            InvalidData: the gallery has no labels, or of another kind than the queries, or the
                queries have no such attribute.
        """
        if isinstance(queries, Queries):
            return self._labelled(queries)
        self.gallery.relevance_for(queries.relevance)
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
        groups, clusters = (
            None if name is None else queries.attributes[name].astype(str)
            for name in (group, cluster)
        )
        embedded = self.prepared(queries.images, embedder)
        return self._labelled(
            replace(
                embedded,
                relevance=queries.relevance,
                groups=groups,
                clusters=clusters,
                cluster=cluster,
            )
        )

    def labelled(
        self,
        vectors: ArrayLike,
        labels: object,
        uncertainty: NDArray[np.floating[Any]] | None = None,
        model: str | None = None,
        groups: Sequence[str] | NDArray[Any] | None = None,
        clusters: Sequence[str] | NDArray[Any] | None = None,
        cluster: str = "cluster",
    ) -> Queries:
        """Vectors with their labels, to be searched by `search_labelled`.

        Args:
            vectors: (n, d) of queries.
            labels: of each, of the kind that the gallery has.
            uncertainty: (n,) of their own, larger is less certain; then every query needs it.
            model: what embedded them, see `VectorOptions`.
            groups: (n,) of each, such as a camera; the retriever then answers per group.
            clusters: (n,) of each, such as a video; queries of one cluster depend on each other.
            cluster: what the clusters are.

        Raises:
            InvalidData: they are no such vectors or labels, or not as many of each.
        """
        relevance, names = self.gallery.query_relevance(labels, self.label_names)
        given: Any = vectors
        embedded = self.prepared(given, None, uncertainty, model)
        self.label_names = names
        return replace(
            embedded,
            relevance=relevance,
            groups=None if groups is None else np.asarray(as_numpy(groups)).astype(str),
            clusters=None if clusters is None else np.asarray(as_numpy(clusters)).astype(str),
            cluster=None if clusters is None else cluster,
        )

    def _labelled(self, queries: Queries) -> LabelledResults:
        """Search queries with their relevance."""
        if self.options.leave_one_out and queries.clusters is not None:
            raise InvalidData(
                f"queries come in clusters ({queries.cluster}) and are gallery items, so that each "
                "finds the others of its cluster, as queries of further clusters would not: keep "
                f"one of each {queries.cluster} in the gallery, or keep queries apart from it"
            )
        relevance = self.gallery.relevance_for(queries.relevance)
        assert queries.relevance is not None
        totals = queries.relevance.totals(relevance)
        found = self.candidates(queries, self.fingerprints())
        if self._left_out:
            own = queries.relevance.of(relevance, np.maximum(self.itself(queries.vectors), -1))
            totals = totals - np.count_nonzero(own, axis=1)
        return LabelledResults(
            found,
            queries.relevance.of(relevance, found.require("positions")),
            totals,
            groups=queries.groups,
            clusters=queries.clusters,
            cluster=queries.cluster,
            one_label=self.labels is not None,
        )

    @property
    def uncertainties(self) -> tuple[str, ...]:
        """What the uncertainty of queries can be, see `judged`."""
        return tuple(name for name, kind in QUERY_UNCERTAINTIES.items() if kind.known(self))

    def judged(self, results: Found, uncertainty: str = "encoder") -> Found:
        """Return search results with another uncertainty of the queries.

        Args:
            results: of a search of this searcher.
            uncertainty: one of `uncertainties`, see `rcir.retrieval.query_uncertainty`.

        Raises:
            InvalidConfig: there is no such uncertainty here.
        """
        if uncertainty not in self.uncertainties:
            raise InvalidConfig(
                f"uncertainty {uncertainty!r} is not available for this gallery and encoder; "
                f"choose one of {', '.join(self.uncertainties)}"
            )
        searched = results.results if isinstance(results, LabelledResults) else results
        return results.with_uncertainty(QUERY_UNCERTAINTIES[uncertainty].of(self, searched))

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


def _require_one_each(index: Index, gallery: Gallery) -> None:
    if len(gallery) != len(index):
        raise InvalidData(
            f"the index holds {len(index)} images, and of {len(gallery)} there are ids: give one "
            "each"
        )
