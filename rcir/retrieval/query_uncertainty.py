"""The uncertainties of queries: stated by the encoder, or seen in what was retrieved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rcir.data.within_radius import WithinRadius
from rcir.errors import InvalidConfig, InvalidData
from rcir.index import HoldsVectors, Index, lengths, one_minus_cosine
from rcir.metrics.labels import VOTERS
from rcir.retrieval.gallery import Gallery
from rcir.risk import SearchResults

if TYPE_CHECKING:
    from rcir.encoders.base import Encoder

NEAREST = 10  # candidates whose places, or whose ranks by several draws, are compared


class Search(Protocol):
    """What an uncertainty may depend on besides search results; a `Searcher` is one."""

    encoder: Encoder | None
    index: Index
    gallery: Gallery

    def nearest(
        self, vectors: NDArray[np.float32], depth: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float64]]: ...


@dataclass(frozen=True)
class QueryUncertainty:
    """One kind of uncertainty, larger is less certain.

    Attributes:
        title: for reports.
        known: whether a searcher can tell it.
        of: (n,) of the queries of search results.
        by_draws: whether it takes all that the encoder says of the queries, see `draw_columns`.
    """

    title: str
    known: Callable[[Search], bool]
    of: Callable[[Search, SearchResults], NDArray[np.float64]]
    by_draws: bool = False


def stated_uncertainty(searcher: Search, results: SearchResults) -> NDArray[np.float64]:
    """(n,) of the encoder, or that vectors came with; without one, `cosine_uncertainty`."""
    own: NDArray[np.float64] | None = results.require("queries").uncertainty
    return cosine_uncertainty(searcher, results) if own is None else own


def cosine_uncertainty(searcher: Search, results: SearchResults) -> NDArray[np.float64]:
    """(n,) one minus the cosine to the nearest item."""
    vectors = results.require("vectors")
    if searcher.gallery.items is not None:  # ranked anew
        return searcher.nearest(vectors, 1)[2]
    nearest = searcher.gallery.norms[results.require("positions")[:, 0]]
    return one_minus_cosine(results.require("distances")[:, 0], lengths(vectors), nearest)


def gap_uncertainty(searcher: Search, results: SearchResults) -> NDArray[np.float64]:
    """(n,) distance of the first candidate over that of the first with another label, in [0, 1].

    The ratio test of Lowe ("Distinctive image features from scale-invariant keypoints", IJCV 2004).
    Without labels, over that of the second candidate; 0 where there is no other. Of candidates that
    the encoder re-ranked, both are its own distances.
    """
    distances = np.asarray(results.require("distances"), np.float64)
    others = np.arange(results.depth) > 0
    if results.labels is not None:
        others = others & (results.labels != results.labels[:, :1])
    second = np.where(others & results.is_candidate, distances, np.inf).min(axis=1)
    with np.errstate(invalid="ignore"):
        ratio = distances[:, 0] / second
    return np.where(second > 0, ratio, 1.0)  # 0 / 0: neither is nearer


def vote_uncertainty(searcher: Search, results: SearchResults) -> NDArray[np.float64]:
    """(n,) one minus the share of the first 30 candidates that match the first one."""
    return results.vote_uncertainty()


def spread_uncertainty(searcher: Search, results: SearchResults) -> NDArray[np.float64]:
    """(n,) root mean square distance of the places of the first 10 candidates from their mean.

    After Zaffar, Nan and Kooij, "On the estimation of image-matching uncertainty in visual place
    recognition" (CVPR 2024), without their weights.
    """
    assert isinstance(searcher.gallery.relevance, WithinRadius)
    near = results.require("positions")[:, :NEAREST]
    there = (near >= 0)[:, :, None]
    places = searcher.gallery.relevance.places[near]
    steps = places - places.mean(axis=1, keepdims=True, where=there)
    squared: NDArray[np.float64] = np.square(steps).sum(axis=2).mean(axis=1, where=there[:, :, 0])
    return np.sqrt(squared)


def can_draw(searcher: Search) -> bool:
    """Whether several draws of a query can rank its candidates, see `draw_columns`."""
    if searcher.encoder is None or not searcher.encoder.draws:
        return False
    return searcher.gallery.items is not None or isinstance(searcher.index, HoldsVectors)


def draw_columns(searcher: Search, results: SearchResults, nearest: int) -> NDArray[np.int64]:
    """(n, t, nearest) which of the first 30 candidates t draws of each query find nearest.

    Args:
        searcher: that `can_draw`.
        results: of n queries of it.
        nearest: number of candidates, at most, of each draw.

    Raises:
        InvalidData: the queries were kept without what draws need.
    """
    from rcir.encoders.draws import nearest_of_draws  # what needs no encoder needs no torch

    def vectors(positions: NDArray[np.int64]) -> NDArray[np.float32]:
        if searcher.gallery.items is not None:
            return searcher.gallery.items.vectors.numpy()[positions]
        held: Any = searcher.index
        return np.asarray(held.vectors_at(positions))

    assert searcher.encoder is not None
    positions = results.require("positions")[:, :VOTERS]
    queries = results.require("queries").embedding
    if queries is None:
        raise InvalidData(
            "these queries were kept without what draws of them need, for they calibrated by "
            "another uncertainty: search their pictures again"
        )
    nearest = min(nearest, positions.shape[1])
    return nearest_of_draws(searcher.encoder, queries, positions, vectors, nearest)


def agreement_uncertainty(searcher: Search, results: SearchResults) -> NDArray[np.float64]:
    """(n,) one minus the largest share of draws whose first candidates have one label.

    Draws are the members of a deep ensemble, or of the variance; see `Encoder.draw_distances`.
    """
    assert results.labels is not None
    first = draw_columns(searcher, results, 1)[:, :, 0]
    labels = np.take_along_axis(results.labels, first, axis=1)
    counts = (labels[:, :, None] == labels[:, None, :]).sum(axis=2)
    share: NDArray[np.float64] = counts.max(axis=1) / labels.shape[1]
    return 1 - share


def overlap_uncertainty(searcher: Search, results: SearchResults) -> NDArray[np.float64]:
    """(n,) one minus the share that two draws have in common of their first 10 candidates."""
    columns = draw_columns(searcher, results, NEAREST)
    n, draws, k = columns.shape
    width = results.depth
    cells = columns.reshape(n, -1) + width * np.arange(n)[:, None]
    counts = np.bincount(cells.ravel(), minlength=n * width).reshape(n, width)
    shared: NDArray[np.float64] = (counts * (counts - 1)).sum(axis=1)
    share: NDArray[np.float64] = shared / (draws * (draws - 1) * k)
    return 1 - share


QUERY_UNCERTAINTIES: Mapping[str, QueryUncertainty] = {
    "encoder": QueryUncertainty(
        "the encoder's uncertainty, or else 1 - cosine", lambda _: True, stated_uncertainty
    ),
    "cosine": QueryUncertainty(
        "1 - cosine to the nearest item", lambda _: True, cosine_uncertainty
    ),
    "gap": QueryUncertainty(
        "the first distance over that of another label", lambda _: True, gap_uncertainty
    ),
    "vote": QueryUncertainty(
        "the neighbours' vote", lambda one: one.gallery.relevance is not None, vote_uncertainty
    ),
    "spread": QueryUncertainty(
        "the spread of the neighbours' places",
        lambda one: isinstance(one.gallery.relevance, WithinRadius),
        spread_uncertainty,
    ),
    "agreement": QueryUncertainty(
        "the labels that several draws find first",
        lambda one: can_draw(one) and one.gallery.labels is not None,
        agreement_uncertainty,
        by_draws=True,
    ),
    "overlap": QueryUncertainty(
        "what several draws have in common of their neighbours",
        can_draw,
        overlap_uncertainty,
        by_draws=True,
    ),
}


def check_uncertainty(name: str) -> None:
    """Raise `InvalidConfig` unless it is a kind of uncertainty, or "auto"."""
    kinds = (*QUERY_UNCERTAINTIES, "auto")
    if name not in kinds:
        raise InvalidConfig(
            f"query_uncertainty {name!r} is unknown; choose one of {', '.join(kinds)}"
        )
