"""A searcher of queries of which it is known which gallery images they match."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.records import ImageSet
from rcir.errors import InvalidData
from rcir.inputs import as_numpy
from rcir.retrieval.queries import Queries
from rcir.retrieval.searcher import Searcher
from rcir.risk import LabelledResults

if TYPE_CHECKING:  # what needs no encoder needs no torch
    from rcir.encoders.batches import Embed


class LabelledSearcher(Searcher):
    """Finds neighbours, and of queries with labels which of these are true matches."""

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
        vectors: NDArray[np.floating[Any]],
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
        embedded = self.prepared(vectors, None, uncertainty, model)
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
        found = self._search(queries, self.fingerprints())
        if self._left_out:
            own = queries.relevance.of(relevance, np.maximum(self.itself(queries.vectors), -1))
            totals = totals - np.count_nonzero(own, axis=1)
        return LabelledResults.of(
            found,
            queries.relevance.of(relevance, found.known("positions")),
            totals,
            groups=queries.groups,
            clusters=queries.clusters,
            cluster=queries.cluster,
            one_label=self.labels is not None,
        )
