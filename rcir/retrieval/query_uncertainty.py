"""Uncertainties of queries: stated by the encoder, or computed from the search results.

To add one, write a function of a search and its results, and put it in `QUERY_UNCERTAINTIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rcir.data.relevance import WithinRadius
from rcir.errors import InvalidConfig, InvalidData
from rcir.index import lengths, one_minus_cosine
from rcir.metrics.labels import VOTERS, count_votes
from rcir.retrieval.search import Searcher
from rcir.risk import LabelledResults, SearchResults

Results = TypeVar("Results", SearchResults, LabelledResults)
COMPARED_CANDIDATES = 10  # first candidates that "spread" and "overlap" depend on


@dataclass(frozen=True)
class QueryUncertainty:
    """One kind of query uncertainty; larger is less certain.

    Attributes:
        title: description for reports.
        available: returns True if the uncertainty can be computed for a searcher.
        compute: computes the uncertainties (n,) of the n queries of search results.
        by_draws: True if it needs the complete embeddings of the queries, see `draw_columns`.
    """

    title: str
    available: Callable[[Searcher], bool]
    compute: Callable[[Searcher, SearchResults], NDArray[np.float64]]
    by_draws: bool = False


def stated_uncertainty(searcher: Searcher, results: SearchResults) -> NDArray[np.float64]:
    """Return the uncertainties (n,) from the encoder or passed with the vectors.

    Without any, return `cosine_uncertainty`.
    """
    stated: NDArray[np.float64] | None = results.require("queries").uncertainty
    return cosine_uncertainty(searcher, results) if stated is None else stated


def cosine_uncertainty(searcher: Searcher, results: SearchResults) -> NDArray[np.float64]:
    """Return one minus the cosine to the nearest item, (n,)."""
    vectors = results.require("vectors")
    if searcher.gallery.items is not None:  # after re-ranking, the nearest item may not be first
        keys = results.require("queries").keys
        return searcher.nearest(vectors, 1, results.left_out, keys)[2]
    nearest = searcher.gallery.norms[results.require("positions")[:, 0]]
    return one_minus_cosine(results.require("distances")[:, 0], lengths(vectors), nearest)


def gap_uncertainty(searcher: Searcher, results: SearchResults) -> NDArray[np.float64]:
    """Return the ratio (n,) of the distances to the nearest candidates of the first two labels.

    The ratio test of Lowe ("Distinctive image features from scale-invariant keypoints", IJCV 2004);
    the ratio is in [0, 1]. Without labels, it compares the first two candidates; without a second
    one, it is 0. If the encoder re-ranks, both are distances of the encoder.
    """
    distances = np.asarray(results.require("distances"), np.float64)
    others = np.arange(results.depth) > 0
    if results.labels is not None:
        others = others & (results.labels != results.labels[:, :1])
    second = np.where(others & results.is_candidate, distances, np.inf).min(axis=1)
    with np.errstate(invalid="ignore"):
        ratio = distances[:, 0] / second
    return np.where(second > 0, ratio, 1.0)  # both distances are 0: neither is nearer


def vote_uncertainty(searcher: Searcher, results: SearchResults) -> NDArray[np.float64]:
    """Return one minus the share of the first 30 candidates that match the first one, (n,)."""
    labels = results.labels
    votes = results.require("votes") if labels is None else count_votes(labels, labels[:, :1])
    share: NDArray[np.float64] = votes[:, 0] / min(VOTERS, results.depth)
    return 1 - share


def spread_uncertainty(searcher: Searcher, results: SearchResults) -> NDArray[np.float64]:
    """Return the root mean square distance of the first 10 locations from their mean, (n,).

    After Zaffar, Nan and Kooij, "On the estimation of image-matching uncertainty in visual place
    recognition" (CVPR 2024), without their weights.
    """
    assert isinstance(searcher.gallery.relevance, WithinRadius)
    positions = results.require("positions")[:, :COMPARED_CANDIDATES]
    is_candidate = positions >= 0
    places = searcher.gallery.relevance.places[positions]
    steps = places - places.mean(axis=1, keepdims=True, where=is_candidate[:, :, None])
    squared: NDArray[np.float64] = np.square(steps).sum(axis=2).mean(axis=1, where=is_candidate)
    return np.sqrt(squared)


def can_draw(searcher: Searcher) -> bool:
    """Return True if several draws of a query can rank its candidates, see `draw_columns`."""
    return searcher.encoder is not None and bool(searcher.encoder.draws)


def draw_columns(searcher: Searcher, results: SearchResults, nearest: int) -> NDArray[np.int64]:
    """Rank the first 30 candidates of each query by t draws of its embedding.

    Return (n, t, nearest) columns of the candidates in the results, nearest first, at most
    `nearest` for each draw. `can_draw` has to be True.
    """
    from rcir.encoders.rerank import nearest_of_draws  # imports torch

    def vectors(positions: NDArray[np.int64]) -> NDArray[np.float32]:
        if searcher.gallery.items is not None:
            return searcher.gallery.items.vectors.numpy()[positions]
        return searcher.index.vectors_at(positions)

    assert searcher.encoder is not None
    positions = results.require("positions")[:, :VOTERS]
    queries = results.require("queries").embedding
    if queries is None:
        raise InvalidData(
            "these queries were stored without the embeddings that draws need, because they "
            "calibrated with another uncertainty: search their images again"
        )
    nearest = min(nearest, positions.shape[1])
    return nearest_of_draws(searcher.encoder, queries, positions, vectors, nearest)


def agreement_uncertainty(searcher: Searcher, results: SearchResults) -> NDArray[np.float64]:
    """Return one minus the largest share of draws whose first candidates have one label, (n,).

    Draws are the members of a deep ensemble, or samples from the predicted variance; see
    `Encoder.draw_distances`.
    """
    assert results.labels is not None
    first = draw_columns(searcher, results, 1)[:, :, 0]
    labels = np.take_along_axis(results.labels, first, axis=1)
    counts = (labels[:, :, None] == labels[:, None, :]).sum(axis=2)
    share: NDArray[np.float64] = counts.max(axis=1) / labels.shape[1]
    return 1 - share


def overlap_uncertainty(searcher: Searcher, results: SearchResults) -> NDArray[np.float64]:
    """Return one minus the share of first 10 candidates that two draws have in common, (n,)."""
    columns = draw_columns(searcher, results, COMPARED_CANDIDATES)
    n, draws, k = columns.shape
    width = results.depth
    cells = columns.reshape(n, -1) + width * np.arange(n)[:, None]
    counts = np.bincount(cells.ravel(), minlength=n * width).reshape(n, width)
    shared: NDArray[np.float64] = (counts * (counts - 1)).sum(axis=1)
    share: NDArray[np.float64] = shared / (draws * (draws - 1) * k)
    return 1 - share


QUERY_UNCERTAINTIES: Mapping[str, QueryUncertainty] = {
    "encoder": QueryUncertainty(
        "the encoder's uncertainty, otherwise 1 - cosine", lambda _: True, stated_uncertainty
    ),
    "cosine": QueryUncertainty(
        "1 - cosine to the nearest item", lambda _: True, cosine_uncertainty
    ),
    "gap": QueryUncertainty(
        "the distance ratio of the nearest two labels", lambda _: True, gap_uncertainty
    ),
    "vote": QueryUncertainty(
        "the neighbours' vote",
        lambda searcher: searcher.gallery.relevance is not None,
        vote_uncertainty,
    ),
    "spread": QueryUncertainty(
        "the spread of the neighbours' locations",
        lambda searcher: isinstance(searcher.gallery.relevance, WithinRadius),
        spread_uncertainty,
    ),
    "agreement": QueryUncertainty(
        "the agreement of several draws on the first label",
        lambda searcher: can_draw(searcher) and searcher.gallery.labels is not None,
        agreement_uncertainty,
        by_draws=True,
    ),
    "overlap": QueryUncertainty(
        "the overlap between the neighbours of several draws",
        can_draw,
        overlap_uncertainty,
        by_draws=True,
    ),
}


def check_uncertainty(name: str) -> None:
    """Raise `InvalidConfig` unless the name is a kind of uncertainty or "auto"."""
    kinds = (*QUERY_UNCERTAINTIES, "auto")
    if name not in kinds:
        raise InvalidConfig(
            f"query_uncertainty {name!r} is unknown; choose one of {', '.join(kinds)}"
        )


def available_uncertainties(searcher: Searcher) -> tuple[str, ...]:
    """Return the names of the uncertainties that can be computed for queries of a searcher."""
    return tuple(name for name, kind in QUERY_UNCERTAINTIES.items() if kind.available(searcher))


def with_uncertainty(searcher: Searcher, results: Results, uncertainty: str) -> Results:
    """Return search results with another one of the `available_uncertainties` of the queries."""
    if uncertainty not in (available := available_uncertainties(searcher)):
        raise InvalidConfig(
            f"uncertainty {uncertainty!r} is not available for this gallery and encoder; choose "
            f"one of {', '.join(available)}"
        )
    searched = results.results if isinstance(results, LabelledResults) else results
    return results.with_uncertainty(QUERY_UNCERTAINTIES[uncertainty].compute(searcher, searched))
