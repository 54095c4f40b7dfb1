"""Search for the nearest gallery items of queries, without a guarantee."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Sized
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.data.names import require_utf8
from rcir.data.records import ImageSet
from rcir.data.relevance import Relevance, count_matches, same_relevance
from rcir.data.repeats import digests
from rcir.embedding import Embedding, as_vectors
from rcir.errors import InvalidConfig, InvalidData, printable, warn
from rcir.index import (
    DEPTH,
    AttachedIndex,
    Index,
    Neighbours,
    build_index,
    check_depth,
    check_shape,
    lengths,
    no_neighbours,
    one_minus_cosine,
)
from rcir.metrics.labels import NO_CANDIDATE, VOTERS
from rcir.options import require_text
from rcir.retrieval.fingerprints import Fingerprints, model_digest
from rcir.retrieval.gallery import Gallery, check_ids
from rcir.retrieval.items import moments_of
from rcir.retrieval.queries import (
    Queries,
    VectorOptions,
    as_names,
    embedded_vectors,
    order_columns,
)
from rcir.risk import LabelledResults, Population, Request, SearchResults
from rcir.terminal import working

if TYPE_CHECKING:  # without an encoder, torch is not needed
    from rcir.data.preprocessing import Preprocessing
    from rcir.encoders.base import Encoder, Images
    from rcir.encoders.batches import Embed

NO_ENCODER = (
    "this retriever has no encoder and accepts only vectors: pass an array (n, d) of numbers from "
    "the model that embedded the gallery"
)
MAX_BATCH_POSITIONS = 2**22  # positions of items that are left out
SAME_IMAGE = 1e-4  # largest distance of two vectors of one image, over their length
NOT_SEARCHED = {"label_names", "_fingerprints", "_parts"}  # fields of a searcher
QueryInput: TypeAlias = "Images | NDArray[np.floating[Any]] | Embedding | Queries"


@dataclass(frozen=True, eq=False)
class Searcher:
    """Finds the nearest gallery items of queries; changes of the gallery give another searcher.

    Attributes:
        gallery: the items in the order of the index, with what defines their matches.
        index: the index of the gallery's vectors; nobody else adds to it or removes from it.
        encoder, preprocessing: how images are embedded; None for vectors whose model is not here.
        max_depth: number of candidates to search for each query; a small gallery has fewer.
        options: how vectors are searched that were embedded elsewhere.
        label_names: names of labels, by label: those of the gallery's labels, and of further ones
            that queries had; empty if labels have no names. They do not affect the search.

    Raises:
        InvalidConfig: only one of encoder and preprocessing is passed, or max_depth is below 1.
        InvalidData: the parts do not fit together.
    """

    gallery: Gallery
    index: Index
    encoder: Encoder | None = None
    preprocessing: Preprocessing | None = None
    max_depth: int = DEPTH
    options: VectorOptions = field(default_factory=VectorOptions)
    label_names: Mapping[int, str] = field(default_factory=dict)
    _fingerprints: Fingerprints = field(default_factory=Fingerprints, init=False, repr=False)
    _parts: dict[str, tuple[NDArray[np.int64], Index]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        if (self.encoder is None) != (self.preprocessing is None):
            raise InvalidConfig("pass an encoder and its preprocessing, or neither")
        if self.encoder is not None:
            from rcir.encoders import require_encoder

            require_encoder(self.encoder)
        object.__setattr__(self, "max_depth", check_depth(self.max_depth))
        if self.options.leave_one_out and self.gallery.digests is None:
            raise InvalidData("leave_one_out needs the digests of the gallery's vectors")
        if self.depth < 1:
            raise InvalidData(
                f"a gallery of {len(self.gallery)} items has no candidates, because an item is "
                f"left out with its exact copies and its {self.options.cluster}: add other items"
            )
        reranks = not self.takes_vectors and self.encoder is not None and self.encoder.reranks
        if reranks and self.gallery.items is None:
            raise InvalidData("the encoder re-ranks: pass the gallery's embeddings as `items`")
        if len(self.index) != len(self.gallery):
            raise InvalidData(
                f"the index has {len(self.index)} vectors and the gallery {len(self.gallery)} "
                "items: pass one vector per item"
            )

    @property
    def takes_vectors(self) -> bool:
        """True if the gallery consists of vectors, whether the encoder that made them is here."""
        return self.encoder is None or self.options.model is not None

    def with_encoder(self, encoder: Encoder, preprocessing: Preprocessing) -> Searcher:
        """Return the search of this gallery of vectors with the encoder that made them.

        See `Retriever.attach_encoder`.
        """
        model = self.options.model
        if not self.takes_vectors or model is None:
            raise InvalidConfig(
                "the gallery does not name the model that embedded it, so that no encoder can be "
                "compared with it: embed it with `rcir embed` or `rcir certify --model`"
            )
        if encoder.reranks or encoder.draws:
            raise InvalidConfig(
                f"method {encoder.config.method} compares more than vectors: train and calibrate "
                "it on the data set (rcir calibrate --run), or query with vectors"
            )
        digest = model_digest(encoder, preprocessing)
        if model.rpartition("@")[2] != digest:
            raise InvalidData(
                f"the gallery was embedded by {printable(model)}, and weights and preprocessing of "
                f"this encoder have the digest {digest}: use the model of the gallery"
            )
        return replace(self, encoder=encoder, preprocessing=preprocessing)

    def with_items(
        self,
        images: QueryInput,
        ids: Sequence[str],
        labels: object = None,
        uncertainty: NDArray[np.floating[Any]] | None = None,
        *,
        model: str | None = None,
        clusters: ArrayLike | None = None,
        keys: ArrayLike | None = None,
    ) -> Searcher:
        """Return the search of this gallery with further items, see `Retriever.add`.

        It has a copy of the index.
        """
        if not hasattr(images, "__len__") or isinstance(images, str | bytes | os.PathLike):
            raise InvalidData(f"images is {images!r}: pass a list with one image per id")
        if self.are_vectors(images):
            images = as_vectors(images)
            if len(images):
                check_shape(images)
        new_ids = check_ids(ids, len(images), self.gallery.ids.tolist())
        if not len(new_ids) and not (isinstance(labels, Sized) and len(labels)):
            return self
        numbered = not self.takes_vectors  # the data set assigned the numbers of the labels
        relevance, names = self.gallery.new_relevance(labels, new_ids, self.label_names, numbered)
        require_utf8(names.values(), "the labels")
        queries = self.prepare(images, None, uncertainty, model)
        if (clusters is None) == (self.options.clusters == "passed"):
            raise InvalidData(
                "pass the clusters of the items to add"
                if clusters is None
                else "the gallery was built without clusters: add the items without them, too"
            )
        if (keys is None) != (self.gallery.keys is None):
            raise InvalidData(
                f"pass the {self.options.key} of each item to add (keys)"
                if keys is None
                else "the gallery was built without keys: add the items without them, too"
            )
        item_clusters = None if clusters is None else as_names(clusters, "clusters")
        if self.options.clusters == "found":
            item_clusters = digests(queries.vectors).astype(str)  # until moments are found below
        gallery = self.gallery.joined(
            Gallery(
                ids=new_ids,
                norms=lengths(queries.vectors),
                relevance=relevance,
                uncertainty=queries.uncertainty,
                digests=None if self.gallery.digests is None else queries.digests,
                items=queries.embedding,
                clusters=item_clusters,
                keys=None if keys is None else as_names(keys, "keys"),
            )
        )
        if self.options.clusters == "found":
            gallery = replace(gallery, clusters=self._moments_with(queries.vectors, gallery))
        index = _changeable(self.index)
        index.add(queries.vectors)
        return replace(self, gallery=gallery, index=index, label_names=names)

    def without(self, ids: Sequence[str]) -> Searcher:
        """Return the search of this gallery without some items, see `Retriever.remove`.

        It has a copy of the index.
        """
        rows = self.gallery.positions(ids)
        if len(rows) == len(self.gallery):
            raise InvalidData("cannot remove all gallery items: keep at least one")
        remaining = self.gallery.subset(np.delete(np.arange(len(self.gallery)), rows))
        if self.options.leave_one_out and len(remaining) <= remaining.largest_unit:
            raise InvalidData("no candidate would remain when an item is left out: keep others")
        index = _changeable(self.index)
        index.remove(rows)
        return replace(self, gallery=remaining, index=index)

    @property
    def ids(self) -> NDArray[np.object_]:
        """The names (n,) of the gallery items."""
        return self.gallery.ids

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """The labels (n,) of the items; None unless items match by having the same label."""
        return self.gallery.labels

    @property
    def why_no_label_model(self) -> str | None:
        """Why the labels of the gallery cannot be modelled; None if they can."""
        return None if self.labels is not None else "the gallery's items have no single label each"

    @property
    def relevance(self) -> Relevance | None:
        """The relevance of the gallery items, which defines true matches; None if unknown."""
        return self.gallery.relevance

    @property
    def digests(self) -> NDArray[np.bytes_] | None:
        """Digests of all gallery images, including every image of a template; None if unknown.

        See `rcir.data.repeats`.
        """
        values = self.gallery.digests
        return None if values is None else values[values != b""]

    @property
    def foreign_digests(self) -> NDArray[np.bytes_] | None:
        """Digests that no query may have: those of the items, unless these are left out."""
        return None if self.options.leave_one_out else self.digests

    @property
    def depth(self) -> int:
        """The number of candidates searched for each query; no set is larger."""
        left_out = self.gallery.largest_unit if self.options.leave_one_out else 0
        return min(self.max_depth, len(self.gallery) - left_out)

    def named_labels(
        self, positions: NDArray[np.int64]
    ) -> tuple[int, ...] | tuple[str, ...] | None:
        """Return labels of gallery items, by name if labels have names; None without labels."""
        if self.labels is None:
            return None
        labels = self.labels[positions].tolist()
        names = self.label_names
        return tuple(names.get(label, str(label)) if names else label for label in labels)

    def keys(self, positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return labels at positions (n, depth), or `NO_CANDIDATE` at -1; None without labels."""
        if self.labels is None:
            return None
        labels = self.labels.take(positions)
        if len(positions) and positions[:, -1].min() < 0:  # missing candidates come last
            labels[positions < 0] = NO_CANDIDATE
        return labels

    def nearest(
        self,
        vectors: NDArray[np.float32],
        depth: int | None = None,
        left_out: NDArray[np.int64] | None = None,
        keys: NDArray[np.str_] | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float64]]:
        """Return the nearest gallery items of vectors.

        Args:
            vectors: (n, d) vectors ready to be searched.
            depth: number of candidates; by default `self.depth`.
            left_out: (n,) units of the gallery that are left out, -1 for none; by default that of
                the gallery item with exactly the same vector with leave_one_out, and else none.
            keys: (n,) parts of the gallery that are searched, see `Gallery.keys`; None for all.

        Returns:
            L2 distances and positions, each (n, depth), nearest first; and one minus the cosine to
            the first candidate, (n,).
        """
        depth = depth or self.depth
        if left_out is None and self.options.leave_one_out:
            left_out = self.gallery.units_of(digests(vectors))
        if left_out is None:
            distances, positions = self._neighbours(vectors, depth, keys)
        else:  # all queries search as deeply, so that an approximate index treats them alike
            deeper = depth + self.gallery.largest_unit
            distances, positions = self._neighbours(vectors, deeper, keys)
            is_left_out = self.gallery.units[positions] == left_out[:, None]
            is_left_out &= positions >= 0
            positions = np.where(is_left_out, -1, positions)
            columns = np.argsort(is_left_out, axis=1, kind="stable")[:, :depth]
            positions = np.take_along_axis(positions, columns, axis=1)
            distances = np.take_along_axis(
                np.where(is_left_out, np.inf, distances), columns, axis=1
            )
        norms = self.gallery.norms[positions[:, 0]]
        return distances, positions, one_minus_cosine(distances[:, 0], lengths(vectors), norms)

    def _neighbours(
        self, vectors: NDArray[np.float32], depth: int, keys: NDArray[np.str_] | None
    ) -> Neighbours:
        """Return distances and positions (n, depth) of the nearest items, in each part if keyed.

        Parts are searched exactly, each in an index of its own, which is built when it is needed;
        those of an attached collection by its engine.
        """
        if keys is None:
            return self.index.search(vectors, depth)
        distances, positions = no_neighbours(len(vectors), depth)
        for key in np.unique(keys).tolist():
            rows = keys == key
            if isinstance(self.index, AttachedIndex):
                distances[rows], positions[rows] = self.index.search_part(vectors[rows], depth, key)
                continue
            if key not in self._parts:
                items = self.gallery.part(key)
                self._parts[key] = items, build_index(self.index.vectors_at(items))
            items, index = self._parts[key]
            distances[rows], found = index.search(vectors[rows], depth)
            positions[rows] = np.where(found < 0, -1, items[found])
        return distances, positions

    def units(self, queries: Queries) -> NDArray[np.int64] | None:
        """Return the unit (n,) of queries; those of one unit are not independent.

        With leave_one_out these are the units of the gallery, and further ones for queries that
        belong to none of them; else the clusters of the queries. None if all are independent.
        """
        numbers = self._units(queries)
        return None if numbers is None else numbers[0]

    def share_units(self, queries: Queries, others: Sequence[Queries]) -> NDArray[np.bool_]:
        """(n,) True for queries that are not independent of others, see `units`."""
        numbers = self._units(queries, *others)
        if numbers is None:
            return np.zeros(len(queries), bool)
        return np.isin(numbers[0], np.concatenate(numbers[1:]))

    def _units(self, *parts: Queries) -> list[NDArray[np.int64]] | None:
        leave_one_out = self.options.leave_one_out
        if not leave_one_out and any(queries.population.clusters is None for queries in parts):
            return None
        names = [
            queries.digests.astype(str)
            if queries.population.clusters is None
            else queries.population.clusters
            for queries in parts
        ]
        number = np.unique(np.concatenate(names), return_inverse=True)[1] + len(self.gallery)
        numbers = np.split(number, np.cumsum([len(queries) for queries in parts])[:-1])
        if not leave_one_out:
            return numbers
        units = [self.gallery.units_of(part.digests, part.population.clusters) for part in parts]
        return [np.where(u < 0, other, u) for u, other in zip(units, numbers, strict=True)]

    def one_of_each_unit(self, queries: Queries) -> NDArray[np.int64]:
        """Return the rows of the queries that can calibrate, ascending.

        With leave_one_out these are one of each unit, that with the least digest; else all.
        """
        units = self.units(queries) if self.options.leave_one_out else None
        if units is None:
            return np.arange(len(queries))
        order = np.argsort(queries.digests, kind="stable")
        return np.sort(order[np.unique(units[order], return_index=True)[1]])

    def _moments_with(self, vectors: NDArray[np.float32], gallery: Gallery) -> NDArray[np.str_]:
        """Return the moments of a gallery to which vectors are being added."""
        before = self.index.vectors_at(np.arange(len(self.index)))
        assert gallery.labels is not None
        every_vector = np.concatenate([before, vectors])
        return moments_of(every_vector, gallery.labels, known=gallery.clusters)

    def are_vectors(self, queries: object) -> bool:
        """Return True for vectors; `InvalidConfig` for files of images if there is no encoder.

        With the encoder of the gallery's vectors, both are accepted, and 8-bit arrays are images.
        """
        if not self.takes_vectors or isinstance(queries, Embedding | Queries):
            return False
        first = queries[0] if isinstance(queries, list | tuple) and queries else queries
        are_files = isinstance(first, str | bytes | os.PathLike)
        if self.encoder is None and are_files:
            raise InvalidConfig(NO_ENCODER)
        is_image = hasattr(first, "getexif") or getattr(first, "dtype", None) == np.uint8
        return self.encoder is None or not (are_files or is_image)

    def embed(self, images: Images, embedder: Embed | None = None) -> Embedding:
        """Return the embeddings of images, see `Retriever.embed`."""
        if self.encoder is None or self.preprocessing is None:
            raise InvalidConfig(NO_ENCODER)
        from rcir.encoders.batches import embed

        return (embedder or embed)(self.encoder, self.preprocessing, images)

    def prepare(
        self,
        queries: QueryInput,
        embedder: Embed | None = None,
        uncertainty: NDArray[np.floating[Any]] | float | None = None,
        model: str | None = None,
        probabilities: ArrayLike | None = None,
    ) -> Queries:
        """Return queries ready to be searched, for `search` and `Retriever.retrieve`.

        Args:
            queries: see `search`.
            embedder: see `Retriever.build`.
            uncertainty, model, probabilities: of vectors, see `Retriever.retrieve`.

        Returns:
            The queries; digests of images are not computed yet.

        Raises:
            InvalidConfig, InvalidImage: see `Retriever.embed`; or probabilities cannot size sets.
            InvalidData: the vectors are unsuitable, or come from another model than the gallery's;
                or probabilities are none of the labels in `Retriever.classes`.
        """
        if probabilities is not None:
            if reason := self.why_no_label_model:
                raise InvalidConfig(f"probabilities cannot size sets: {reason}")
            if self.options.leave_one_out:
                raise InvalidConfig("probabilities of queries need leave_one_out=False")
            prepared = self.prepare(queries, embedder, uncertainty, model)
            if hasattr(probabilities, "to_frame") and hasattr(probabilities, "index"):
                probabilities = probabilities.to_frame().T  # a row of a table
            if hasattr(probabilities, "columns"):
                ascending, by_label = self.gallery.by_label
                first = by_label[np.searchsorted(ascending, self.gallery.classes)]
                probabilities = order_columns(probabilities, self.named_labels(first) or ())
            return prepared.with_probabilities(probabilities, self.gallery.classes)
        are_vectors = self.are_vectors(queries)
        if not are_vectors and not (uncertainty is None and model is None):
            raise InvalidConfig(
                "uncertainty and model describe vectors: leave them out for images, with an "
                "Embedding or with Queries"
            )
        if isinstance(queries, Queries):
            return queries
        images: Any = None
        if isinstance(queries, Embedding):
            embedding = queries
        elif are_vectors:
            self.options.require_model(model)
            uncertainties = self.options.uncertainties(uncertainty)
            return Queries(self.options.prepare(queries), uncertainties)
        else:
            images = queries
            embedding = self.embed(images, embedder)
        vectors, uncertainties = embedded_vectors(embedding)
        stored = None
        if self.takes_vectors:  # digests are those of vectors, like the gallery's
            vectors, images = self._stored_vectors(self.options.prepare(vectors)), None
        elif self.encoder is not None and (self.encoder.reranks or self.encoder.draws):
            stored = embedding.map(lambda values: values.cpu())
        return Queries(vectors, uncertainties, images, embedding=stored)

    def _stored_vectors(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return vectors of images, with the gallery's own in place of those that rounding changed.

        An image has another vector, by its last digits, in another batch; an item is recognised by
        its digits.
        """
        if self.encoder is None or not len(vectors):
            return vectors
        _, positions = self.index.search(vectors, 1)
        found = positions[:, 0] >= 0
        stored = self.index.vectors_at(np.where(found, positions[:, 0], 0))
        apart = np.linalg.norm(stored.astype(np.float64) - vectors, axis=1)
        same = found & (apart <= SAME_IMAGE * lengths(vectors))
        return np.where(same[:, None], stored, vectors)

    def together(self, queries: Queries, encounters: NDArray[np.str_]) -> Queries:
        """Return one query for all pictures of each encounter, in the order of their first ones.

        Vectors and uncertainties are averaged, those with a variance of the encoder weighted by it,
        as in templates of the gallery (`rcir.encoders.batches.fuse`).

        Args:
            queries: n pictures that are prepared.
            encounters: (n,) the name of the encounter of each.

        Raises:
            InvalidData: queries may be gallery items; or there is not one name for each; or
                pictures of one encounter have different keys.
        """
        if self.options.leave_one_out:
            raise InvalidData(
                "pictures of gallery items cannot be searched together, because each is left out "
                "of its own search: pass a gallery and other queries (leave_one_out=False)"
            )
        if len(encounters) != len(queries):
            raise InvalidData(f"got {len(encounters)} encounters for {len(queries)} pictures")
        _, first, number = np.unique(encounters, return_index=True, return_inverse=True)
        order = np.argsort(first)
        first, number = first[order], np.argsort(order)[number]
        keys = queries.keys
        if keys is not None and not np.array_equal(keys, keys[first][number]):
            raise InvalidData("the pictures of one encounter have different keys")
        vectors, uncertainty, embedding = queries.vectors, queries.uncertainty, queries.embedding
        if embedding is not None:
            import torch

            from rcir.encoders.batches import fuse

            if self.encoder is not None and not self.encoder.draws:
                embedding = replace(embedding, variance=None)
            embedding = fuse(embedding, torch.from_numpy(number), len(first))
            vectors, uncertainty = embedded_vectors(embedding)
        else:
            means = _means(vectors, number)
            uncertainty = None if uncertainty is None else _means(uncertainty, number)
            vectors = self.options.prepare(means)
            if not self.takes_vectors and np.all(lengths(queries.vectors) == 1):
                vectors = VectorOptions("cosine").prepare(means)
        return replace(
            queries[first],
            vectors=vectors,
            uncertainty=uncertainty,
            embedding=embedding,
            images=None,
            population=Population(len(first)),
            pictures=np.bincount(number),
        )

    def as_requested(self, queries: Queries, request: Request) -> Queries:
        """Return queries with the keys that a request states, and its encounters as one query each.

        Nothing is done twice.
        """
        names = request.together
        if queries.pictures is not None:
            return queries
        if request.key is not None:
            queries = queries.with_keys(request.key)
        if names is False:
            return queries
        return self.together(queries, np.array(["0"] * len(queries) if names is True else names))

    def search(self, queries: QueryInput, embedder: Embed | None = None) -> SearchResults:
        """Return the nearest gallery items of each query, without a guarantee.

        Args:
            queries: the result of `embed` or `prepare`; or images, which are embedded first; or,
                without an encoder, vectors (n, d).
            embedder: see `Retriever.build`.

        Raises:
            InvalidConfig, InvalidImage: see `Retriever.embed`.
            InvalidData: vectors have another dimension than the gallery's, or are NaN or infinite.
        """
        return self.candidates(self.prepare(queries, embedder), self.fingerprints())

    def reranks(self, queries: Queries) -> bool:
        """Return True if the encoder has distances of its own, and the embeddings they need."""
        return self.gallery.items is not None and queries.embedding is not None

    def rerank(
        self, queries: Queries, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return distances and positions (n, k) of items in the order of the encoder's distances.

        Positions of -1 stay last, infinitely far. See `reranks`.
        """
        from rcir.encoders.rerank import rerank

        assert self.encoder is not None
        assert queries.embedding is not None
        assert self.gallery.items is not None
        return rerank(self.encoder, queries.embedding, self.gallery.items, positions)

    def candidates(
        self,
        queries: Queries,
        fingerprints: Mapping[str, str] | None = None,
        left_out: NDArray[np.int64] | None = None,
    ) -> SearchResults:
        """Return the search results of prepared queries.

        Args:
            queries: the result of `prepare`.
            fingerprints: `self.fingerprints()`, stored in the results; calibration requires them.
            left_out: see `nearest`; by default `units_left_out`.
        """
        left_out = self.units_left_out(queries) if left_out is None else left_out
        self.require_keys(queries)
        distances, positions, cosine = self.nearest(
            queries.vectors, left_out=left_out, keys=queries.keys
        )
        if queries.keys is not None and (alone := np.count_nonzero(positions[:, 0] < 0)):
            raise InvalidData(
                f"{alone} of {len(queries)} queries have no candidate: all items of their "
                f"{self.options.key} are left out of their search. Leave out the {self.options.key}"
            )
        if self.reranks(queries):
            distances, positions = self.rerank(queries, positions)
        uncertainty, votes = self.gallery.uncertainty, None
        if self.relevance is not None and self.labels is None:  # labels are counted on demand
            votes = count_matches(self.relevance, positions, VOTERS)
        return SearchResults(
            uncertainty=cosine if queries.uncertainty is None else queries.uncertainty,
            depth=self.depth,
            distances=distances,
            labels=self.keys(positions),
            candidate_uncertainty=None if uncertainty is None else uncertainty.take(positions),
            votes=votes,
            positions=positions,
            vectors=queries.vectors,
            queries=queries,
            left_out=left_out,
            fingerprints=fingerprints,
        )

    def require_keys(self, queries: Queries) -> None:
        """Raise `InvalidData` unless queries have keys of the gallery, or neither has any."""
        key, parts = self.options.key, self.gallery.parts
        if (queries.keys is None) != (self.gallery.keys is None):
            raise InvalidData(
                f"the gallery is divided by {key}: pass the {key} of each query (key, or keys of "
                "labelled ones)"
                if queries.keys is None
                else "the gallery was built without keys: query it without them, too"
            )
        if queries.keys is not None and len(unknown := np.setdiff1d(queries.keys, parts)):
            names = ", ".join(map(repr, unknown[:3].tolist()))
            raise InvalidData(f"no gallery item has the {key} {names}: add items with it first")

    def search_labelled(
        self,
        queries: ImageSet | Queries,
        group: str | None = None,
        embedder: Embed | None = None,
        cluster: str | None = None,
        key: str | None = None,
    ) -> LabelledResults:
        """Search queries with known relevance.

        Args:
            queries: images with labels or another `Relevance`; or the result of `labelled`.
            group, cluster, key: names of the attributes that contain the groups of the images,
                their clusters, such as videos, and the parts of the gallery that they are searched
                in; queries of one cluster are not independent. Without `cluster`, a warning is
                issued if the images come with clusters. Keys are the groups without `group`.
            embedder: see `Retriever.build`.

        Raises:
            InvalidData: the gallery's labels are of another kind, or an attribute is missing.
        """
        if isinstance(queries, Queries):
            return self._search_labelled(queries)
        self.gallery.relevance_for(queries.relevance)
        groups, clusters, keys = (
            None if name is None else as_names(queries.attribute(name, "the queries"), name)
            for name in (key if group is None else group, cluster, key)
        )
        if cluster is None and queries.cluster is not None:
            warn(
                f"the queries come in clusters ({queries.cluster}), for which a guarantee for "
                f"independent queries does not hold: pass cluster={queries.cluster!r}"
            )
        embedded = replace(self.prepare(queries.images, embedder), keys=keys)
        return self._search_labelled(
            embedded.with_population(queries.relevance, groups, clusters, cluster)
        )

    def labelled(
        self,
        vectors: ArrayLike | ImageSet,
        labels: object = None,
        uncertainty: NDArray[np.floating[Any]] | None = None,
        *,
        model: str | None = None,
        groups: ArrayLike | None = None,
        clusters: ArrayLike | None = None,
        cluster: str = "cluster",
        probabilities: ArrayLike | None = None,
        keys: ArrayLike | None = None,
        encounters: ArrayLike | None = None,
    ) -> tuple[Queries, Searcher]:
        """Return labelled vectors as queries for `search_labelled`, see `Retriever.labelled`.

        Returns:
            The queries, and this searcher with the names of their labels, so that a label that no
            item has gets the same number in further queries.
        """
        if isinstance(vectors, LabelledResults):
            raise InvalidConfig("these queries were searched already: call `calibrate_splits`")
        cluster = require_text("cluster", cluster)
        queries: Any = vectors
        if isinstance(vectors, str | os.PathLike):
            raise InvalidData(
                f"the queries are {str(vectors)!r}: pass a list of images, or a set of labelled "
                "ones, such as rcir.data.read_class_folders(FOLDER)"
            )
        if isinstance(vectors, ImageSet):
            queries = vectors.images
            if labels is None:  # by name, because the numbers may be those of another set
                named = bool(vectors.label_names)
                if self.takes_vectors and named != bool(self.label_names):
                    raise InvalidData(
                        "only one of gallery and queries has names of labels, and numbers of "
                        "different sets cannot be compared: pass labels"
                    )
                both = named and self.label_names
                labels = vectors.attributes["class"] if both else vectors.relevance
            if clusters is None and vectors.cluster is not None:
                clusters, cluster = vectors.attributes[vectors.cluster], vectors.cluster
        embedded = self.prepare(queries, None, uncertainty, model, probabilities)
        _require_queries(embedded)
        relevance, names = self.gallery.query_relevance(labels, self.label_names)
        if keys is not None:
            embedded = replace(embedded, keys=as_names(keys, "keys"))
        labelled = embedded.with_population(
            relevance,
            embedded.keys if groups is None else as_names(groups, "groups"),
            None if clusters is None else as_names(clusters, "clusters"),
            None if clusters is None else cluster,
        )
        if encounters is not None:
            labelled = self._encounters(labelled, as_names(encounters, "encounters"))
        return labelled, self.with_label_names(names)

    def _encounters(self, pictures: Queries, encounters: NDArray[np.str_]) -> Queries:
        """Return one labelled query for each encounter, or raise `InvalidData`."""
        own, foreign = pictures.digests, self.foreign_digests
        shared = 0 if foreign is None else int(np.isin(own, foreign).sum())
        if shared or len(np.unique(own)) < len(own):
            what = f"{shared} are pictures of the gallery" if shared else "some come twice"
            raise InvalidData(
                f"of {len(own)} pictures of encounters {what}, so that they find themselves, or "
                "encounters depend on each other: leave these out"
            )
        fused = self.together(replace(pictures, relevance=None), encounters)
        _, rows, number = np.unique(encounters, return_index=True, return_inverse=True)
        first, relevance, population = rows[number], pictures.relevance, pictures.population
        for name in ("groups", "clusters"):
            values = getattr(population, name)
            if values is not None and not np.array_equal(values, values[first]):
                raise InvalidData(f"the pictures of one encounter have different {name}")
        assert relevance is not None
        if not same_relevance(relevance, relevance.subset(first)):
            raise InvalidData("the pictures of one encounter have different labels or matches")
        if pictures.probabilities is not None:
            raise InvalidData(
                "label probabilities cannot be combined: pass one query per encounter"
            )
        rows = np.sort(rows)
        some = population[rows]
        return fused.with_population(
            relevance.subset(rows), some.groups, some.clusters, some.cluster_word
        )

    def with_label_names(self, names: Mapping[int, str]) -> Searcher:
        """Return this searcher with the names of further labels, which queries had."""
        if len(names) == len(self.label_names):  # a label keeps its number
            return self
        named = replace(self, label_names=names)
        object.__setattr__(named, "_fingerprints", self._fingerprints)  # no answer depends on names
        return named

    def is_same_search(self, other: Searcher) -> bool:
        """Return True if another searcher has the same parts, but for the names of labels."""
        names = (each.name for each in fields(self) if each.name not in NOT_SEARCHED)
        return all(getattr(self, name) is getattr(other, name) for name in names)

    @working("searching")
    def _search_labelled(self, queries: Queries) -> LabelledResults:
        """Search prepared queries with known relevance."""
        _require_queries(queries)
        relevance = self.gallery.relevance_for(queries.relevance)
        assert queries.relevance is not None
        results = self.candidates(queries, self.fingerprints())
        n_relevant = self._totals(queries, relevance)
        if self.options.leave_one_out:
            n_relevant = n_relevant - self._matches_left_out(queries, relevance)
        return LabelledResults(
            results,
            relevant=queries.relevance.matches(relevance, results.require("positions")),
            n_relevant=n_relevant,
            one_label=self.labels is not None,
            population=self.options.as_evidence(queries.population),
        )

    def _totals(self, queries: Queries, relevance: Relevance) -> NDArray[np.int64]:
        """Return how many items match each query (n,), in the part that it is searched in."""
        assert queries.relevance is not None
        if queries.keys is None:
            return queries.relevance.totals(relevance)
        totals = np.zeros(len(queries), np.int64)
        for key in np.unique(queries.keys).tolist():
            rows, items = np.flatnonzero(queries.keys == key), self.gallery.part(key)
            totals[rows] = queries.relevance.subset(rows).totals(relevance.subset(items))
        return totals

    def units_left_out(self, queries: Queries) -> NDArray[np.int64] | None:
        """Return the unit (n,) that the search of each query leaves out, -1 for none."""
        if not self.options.leave_one_out:
            return None
        clusters, query_digests = queries.population.clusters, queries.digests
        units = self.gallery.units_of(query_digests)
        if clusters is None:
            return units
        if self.options.clusters != "passed":
            raise InvalidData(
                f"the queries come in clusters ({queries.population.cluster_word}), but the "
                "clusters of the gallery's items are not known: pass them, too (`clusters` of "
                "`from_embeddings`, a column of the gallery's file), or keep all apart (--cluster "
                "none)"
            )
        by_cluster = self.gallery.units_of(np.zeros_like(query_digests), clusters)
        wrong = np.flatnonzero((units >= 0) & (units != by_cluster))
        if len(wrong):
            raise InvalidData(
                f"{len(wrong)} of {len(queries)} queries are gallery items in another "
                f"{self.options.cluster} than there, first row {wrong[0]}: pass the same clusters"
            )
        return by_cluster

    def _matches_left_out(self, queries: Queries, relevance: Relevance) -> NDArray[np.int64]:
        """Return how many matches (n,) the search of each query leaves out."""
        units = self.units_left_out(queries)
        assert units is not None
        counts = np.zeros(len(queries), np.int64)
        step = max(1, MAX_BATCH_POSITIONS // self.gallery.largest_unit)
        for start in range(0, len(queries), step):
            rows = np.arange(start, min(start + step, len(queries)))
            labels = queries[rows].relevance
            assert labels is not None
            items = self.gallery.members(units[rows])
            is_match = labels.matches(relevance, items)
            if queries.keys is not None and self.gallery.keys is not None:
                is_match &= self.gallery.keys[items] == queries.keys[rows, None]
            counts[rows] = np.count_nonzero(is_match, axis=1)
        return counts

    def fingerprints(self) -> dict[str, str]:
        """Return digests of everything that a calibration depends on, see `Fingerprints`."""
        return self._fingerprints.compute(
            self.encoder, self.preprocessing, self.index, self.gallery, self.options
        )


def _means(values: NDArray[Any], number: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the mean of the rows (n, ...) with each number (n,), from 0."""
    order = np.argsort(number, kind="stable")
    starts = np.searchsorted(number[order], np.arange(number.max() + 1))
    sums = np.add.reduceat(values[order].astype(np.float64), starts)
    return sums / np.bincount(number).reshape(-1, *[1] * (values.ndim - 1))


def _require_queries(queries: Queries) -> None:
    if not len(queries):
        raise InvalidData("there are no queries: pass at least one labelled query")


def _changeable(index: Index) -> Index:
    """Return a copy of an index to change."""
    try:
        return deepcopy(index)
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidConfig(
            f"an index of class {type(index).__name__} cannot be copied ({error}), and a retriever "
            "adds items to a copy and removes them from a copy: implement its __deepcopy__, or "
            "__getstate__ and __setstate__; see rcir.index.Index"
        ) from error
