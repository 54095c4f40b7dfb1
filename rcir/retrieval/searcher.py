"""Encoder, preprocessing and index: finding the nearest images, without any guarantee."""

from __future__ import annotations

import hashlib
import json
import operator
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rcir.data.digests import digests
from rcir.data.images import ImageLike
from rcir.data.preprocessing import Preprocessing
from rcir.data.records import ImageSet
from rcir.data.relevance import Relevance, SameLabel, SharedLabel, relevance_of
from rcir.embedding import Embedding
from rcir.encoders.base import Encoder
from rcir.encoders.batches import Embed, embed, to_arrays
from rcir.encoders.rerank import reranked
from rcir.errors import InvalidConfig, InvalidData
from rcir.index import DEPTH, Index, IndexConfig, build_index
from rcir.retrieval.results import Candidates, Judged
from rcir.risk import Rankings


class Searcher:
    """Finds the nearest gallery images of a query.

    Attributes:
        encoder, preprocessing, index: how an image is searched.
        ids: names of the gallery images.
        relevance: which queries the gallery images match: those of equal labels where it was given
            as labels; None if that is not known.
        max_depth: number of candidates to search for each query, if the gallery has as many.
        item_uncertainty: (n,) of the gallery images; None for an encoder without one.
        digests: (n,) of the gallery images, see `rcir.data.digests`; None if they are not known.
        items: embeddings of the gallery images, of an encoder that re-ranks by them; else None.
    """

    def __init__(
        self,
        encoder: Encoder,
        preprocessing: Preprocessing,
        index: Index,
        ids: Sequence[str],
        labels: NDArray[np.int64] | Relevance | None = None,
        depth: int = DEPTH,
        item_uncertainty: NDArray[np.float64] | None = None,
        digests: NDArray[np.bytes_] | None = None,
        items: Embedding | None = None,
    ) -> None:
        require_encoder(encoder)
        if depth < 1:
            raise InvalidConfig(f"depth is {depth}; at least 1 candidate must be searched")
        self.encoder = encoder
        self.preprocessing = preprocessing
        self.index = index
        self.ids = _frozen(np.array(ids, dtype=object))
        if isinstance(labels, np.ndarray):
            labels = SameLabel(np.asarray(labels, np.int64))
        self.relevance = None if labels is None else _own(labels)
        self.item_uncertainty = (
            None if item_uncertainty is None else _frozen(np.array(item_uncertainty, np.float64))
        )
        self.digests = None if digests is None else _frozen(np.array(digests, np.bytes_))
        self.items = items
        self.max_depth = depth
        self._fingerprints: dict[str, str] = {}
        self._fingerprinted: tuple[list[object], list[object], list[Tensor]] = ([], [], [])
        lengths = {
            len(values)
            for values in (
                *(self.ids, self.relevance, self.item_uncertainty, self.digests, self.items),
            )
            if values is not None
        }
        if encoder.reranks and items is None:
            raise InvalidData("the encoder re-ranks: give the embeddings of the gallery as items")
        if lengths != {len(index)}:
            raise InvalidData(
                f"the index holds {len(index)} images; ids, labels, uncertainties and digests "
                f"number {sorted(lengths)}: give one each"
            )

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
        made = build_index(vectors, index)
        return cls(encoder, preprocessing, made, ids, relevance, depth, uncertainty, known, items)

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """(n,) labels of the gallery images, if images match by having the same."""
        return self.relevance.labels if isinstance(self.relevance, SameLabel) else None

    @property
    def depth(self) -> int:
        """Number of candidates searched for each query; no set is larger."""
        return min(self.max_depth, len(self.ids))

    def search(
        self, images: Sequence[ImageLike] | NDArray[np.uint8], embedder: Embed | None = None
    ) -> Candidates:
        """The nearest gallery images of each query, without any guarantee.

        Args:
            images: the queries.
            embedder: as in `build`.
        """
        embedding = (embedder or embed)(self.encoder, self.preprocessing, images)
        vectors, uncertainty = _arrays(embedding)
        distances, positions = self.index.search(vectors, self.depth)
        if self.items is not None:
            distances, positions = reranked(self.encoder, embedding, self.items, positions)
        if uncertainty is None:
            # Unit vectors: 1 - cos = |x - y|^2 / 2.
            uncertainty = distances[:, 0].astype(np.float64) ** 2 / 2
        items = self.item_uncertainty
        rankings = Rankings(
            uncertainty,
            self.depth,
            distances,
            None if self.labels is None else np.where(positions >= 0, self.labels[positions], -1),
            None if items is None else items[positions],
        )
        return Candidates(rankings, positions, vectors, self.fingerprints(), images)

    def judge(
        self,
        queries: ImageSet,
        group: str | None = None,
        embedder: Embed | None = None,
        cluster: str | None = None,
    ) -> Judged:
        """Search queries of which it is known which gallery images they match.

        Args:
            queries: images with labels, or with what else makes them match (`rcir.data.relevance`).
            group: which of their attributes says what group each belongs to.
            embedder: as in `build`.
            cluster: which of their attributes says in what cluster each came, such as a video, a
                patient or a place: queries that are not independent of each other. It warns where
                the images know of clusters and none are named.

        Raises:
            InvalidData: the gallery has no labels, or of another kind than the queries, or the
                queries have no such attribute.
        """
        if self.relevance is None:
            raise InvalidData("the gallery has no labels: what is a true match cannot be told")
        if type(queries.relevance) is not type(self.relevance):
            raise InvalidData(
                f"the gallery's images match as {type(self.relevance).__name__}, the queries as "
                f"{type(queries.relevance).__name__}: both must know the same of their images"
            )
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
        relevant = queries.relevance.of(self.relevance, found.positions)
        totals = queries.relevance.totals(self.relevance)
        groups, clusters = (
            None if name is None else queries.attributes[name].astype(str)
            for name in (group, cluster)
        )
        one_label = self.labels is not None
        return Judged(found, relevant, totals, groups, one_label, clusters, cluster)

    def fingerprints(self) -> dict[str, str]:
        """Digests of everything that calibration depends on; computed once per change.

        A change in memory is noticed where a part is replaced, the gallery grows, torch writes to a
        weight or replaces its memory (as a change of precision does), or a forward hook comes or
        goes; not where a weight is written to behind torch's back (`.data`, NumPy views).
        """
        parts = [self.encoder, self.preprocessing, self.index, self.ids]
        weights, hooks = self.encoder.parts()
        parts += [self.relevance, self.item_uncertainty, self.items, *hooks]
        # Torch counts its writes to a tensor.
        counts: list[object] = [self.index.version, len(parts)]
        counts += [number for values in weights for number in (values._version, values.data_ptr())]
        known, known_counts, _ = self._fingerprinted
        if known_counts != counts or not all(map(operator.is_, known, parts)):
            preprocessing = json.dumps(asdict(self.preprocessing), sort_keys=True)
            gallery = hashlib.sha256(json.dumps(self.ids.tolist()).encode())
            facts = {} if self.relevance is None else self.relevance.arrays()
            if self.item_uncertainty is not None:
                facts = facts | {"uncertainty": self.item_uncertainty}
            if self.items is not None:
                facts = facts | to_arrays(self.items)
            for name, values in facts.items():
                gallery.update(name.encode() + values.tobytes())
            self._fingerprints = {
                "encoder": self.encoder.fingerprint(),
                "preprocessing": hashlib.sha256(preprocessing.encode()).hexdigest(),
                "gallery": gallery.hexdigest(),
                "index": self.index.version,
            }
            # What is referred to keeps its address: no other memory can be taken for it.
            self._fingerprinted = (parts, counts, [values.data for values in weights])
        return self._fingerprints

    def add(
        self,
        images: Sequence[ImageLike] | NDArray[np.uint8],
        ids: Sequence[str],
        labels: Sequence[int] | Relevance | None = None,
    ) -> None:
        """Add images to the gallery. The calibration is stale from then on: calibrate again."""
        if len(ids) != len(images) or (labels is None) != (self.relevance is None):
            raise InvalidData(
                f"{len(images)} images, {len(ids)} ids: give one id per image, and labels if and "
                "only if the gallery has labels"
            )
        if labels is not None and len(labels) != len(images):
            raise InvalidData(f"{len(images)} images, {len(labels)} labels: give one each")
        embedding = embed(self.encoder, self.preprocessing, images)
        vectors, uncertainty = _arrays(embedding)
        longer = self.relevance
        if longer is not None:
            given: Any = labels
            plain = self.labels is not None and not isinstance(labels, SameLabel)
            given = SameLabel(np.asarray(given, np.int64)) if plain else given
            longer = _own(longer.joined(given))
        added = digests(images)
        self.index.add(vectors)
        self.ids = _frozen(np.concatenate([self.ids, np.array(ids, dtype=object)]))
        self.relevance = longer
        if self.item_uncertainty is not None and uncertainty is not None:
            self.item_uncertainty = _frozen(np.concatenate([self.item_uncertainty, uncertainty]))
        if self.items is not None:
            self.items = Embedding.concatenate([self.items, embedding.map(Tensor.cpu)])
        if self.digests is not None:
            self.digests = _frozen(np.concatenate([self.digests, added]))


def require_encoder(encoder: object) -> None:
    """Raise `InvalidConfig` unless it is an `Encoder`."""
    if not isinstance(encoder, Encoder):
        raise InvalidConfig(
            f"the encoder is a {type(encoder).__name__}; a retriever takes an rcir.encoders."
            "Encoder: make a subclass whose forward returns an Embedding, in a module, and build "
            'it with EncoderConfig("package.module:Class") (docs/encoders.md shows one)'
        )


def _arrays(embedding: Embedding) -> tuple[NDArray[np.float32], NDArray[np.float64] | None]:
    """Vectors, and uncertainties if there are any."""
    uncertainty = embedding.uncertainty
    return embedding.vectors.cpu().numpy(), (
        None if uncertainty is None else uncertainty.cpu().numpy().astype(np.float64)
    )


def _own(relevance: Relevance) -> Relevance:
    """A copy that nobody else can write to."""
    own = relevance_of(
        {name: _frozen(values.copy()) for name, values in relevance.arrays().items()}
    )
    if isinstance(own, SharedLabel):  # its matrix has arrays of its own
        for values in (own.labels.data, own.labels.indices, own.labels.indptr):
            _frozen(values)
    return own


def _frozen(values: NDArray[Any]) -> NDArray[Any]:
    """Read-only: calibration depends on it."""
    values.setflags(write=False)
    return values
