"""A second distance to the candidates of galleries without labels: that after half whitening."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from rcir.label_model.experts import BLOCK_VALUES, MIN_LENGTH, HalfWhitening, Items, Moments
from rcir.retrieval.query_uncertainty import Results
from rcir.retrieval.search import Searcher
from rcir.risk import LabelledResults
from rcir.store.codec import Array

COMPARED = 50  # first candidates of each query


@dataclass(frozen=True, eq=False)
class Whitening:
    """The half-whitened metric of a gallery, see `HalfWhitening`.

    Attributes:
        centre: (d,) mean of the gallery.
        metric: (d, d) products of centred vectors in this metric are x' metric y.
        lengths: (N,) of the items in this metric.
    """

    centre: Annotated[NDArray[np.float64], Array(1)]
    metric: Annotated[NDArray[np.float32], Array(2)]
    lengths: Annotated[NDArray[np.float64], Array(1)]

    def add_to(self, searcher: Searcher, results: Results) -> Results:
        """Return search results with `whitened_distances`, one minus cosines in this metric.

        Candidates beyond the first 50 get the mean of these.
        """
        if isinstance(results, LabelledResults):
            return replace(results, results=self.add_to(searcher, results.results))
        positions = results.require("positions")[:, :COMPARED]
        is_candidate = positions >= 0
        centred = (results.require("vectors") - self.centre).astype(np.float32)
        directions = centred @ self.metric
        lengths = np.sqrt(np.einsum("nd,nd->n", centred, directions, dtype=np.float64))
        products = np.empty(positions.shape)
        step = max(1, BLOCK_VALUES // (positions.shape[1] * centred.shape[1]))
        for start in range(0, len(centred), step):
            rows = slice(start, start + step)
            found = np.where(is_candidate, positions, 0)[rows].ravel()
            vectors = searcher.index.vectors_at(found)
            vectors = vectors.reshape(-1, positions.shape[1], vectors.shape[1])
            products[rows] = (vectors @ directions[rows, :, None])[:, :, 0]
        products -= (directions @ self.centre)[:, None]
        products /= np.maximum(self.lengths[positions] * lengths[:, None], MIN_LENGTH)
        mean = 1 - products.mean(axis=1, keepdims=True, where=is_candidate)
        distances = np.repeat(mean, results.depth, axis=1)
        distances[:, : positions.shape[1]] = np.where(is_candidate, 1 - products, mean)
        return replace(results, whitened_distances=distances)


def fit_whitening(searcher: Searcher) -> Whitening | None:
    """Fit the metric on the vectors of a gallery without labels; None if that is impossible.

    With leave_one_out the items are the queries, and may not shape what scores them.
    """
    reranks = searcher.gallery.items is not None
    if reranks or searcher.labels is not None or searcher.options.leave_one_out:
        return None
    one_label = np.zeros(len(searcher.gallery), np.int64)
    items = Items(one_label, one_label, searcher.index.vectors_at)
    half = HalfWhitening.fit(items, Moments.of(items))
    lengths = [np.linalg.norm(half.project(vectors), axis=1) for _, vectors in items.blocks()]
    metric = (half.transform @ half.transform.T).astype(np.float32)
    return Whitening(half.centre, metric, np.concatenate(lengths))
