"""The labels of a gallery in the order of their probability, each by its nearest item.

A search finds the nearest items. A model of the gallery's labels, or probabilities that come with
the queries, then put the labels in another order; labels that none of these items has compete, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from rcir.label_model import Items, LabelModel, codes_of
from rcir.metrics.labels import NO_CANDIDATE, cells
from rcir.retrieval.query_uncertainty import Results
from rcir.retrieval.search import Searcher
from rcir.risk import LabelledResults, SearchResults
from rcir.risk.results import widen

Labelled = TypeVar("Labelled", bound=LabelledResults)
LISTED_TOGETHER, VECTORS_TOGETHER = 512, 1 << 15
HELD_OUT = 500  # items that the weights of a label model are fitted on


def fit_label_model(searcher: Searcher, held_out: LabelledResults | None) -> LabelModel:
    """Fit a model of the gallery's labels; see `Searcher.why_no_label_model`.

    `held_out` are the queries that tune with leave_one_out; else the items of `draw_items`, as
    they were searched, or None if they were not.
    """
    items = _items(searcher)
    if searcher.options.leave_one_out:
        assert held_out is not None
        rows = searcher.gallery.rows_of(held_out.results.require("queries").digests)
    else:
        rows = draw_items(searcher)
    if held_out is not None:
        positions = held_out.results.require("positions")[rows >= 0]
    elif len(rows):
        units, keys = searcher.gallery.units[rows], searcher.gallery.keys
        part = None if keys is None else keys[rows]
        positions = searcher.nearest(items.vectors_at(rows), left_out=units, keys=part)[1]
    else:
        positions = np.empty((0, searcher.depth), np.int64)
    return LabelModel.fit(items, rows[rows >= 0], positions)


def draw_items(searcher: Searcher) -> NDArray[np.int64]:
    """Return positions of items that can stand for queries: their label has other items.

    With keys these are of the same part.
    """
    kinds = searcher.gallery.kinds
    _, number, counts = np.unique(kinds, return_inverse=True, return_counts=True)
    return np.random.default_rng(0).permutation(np.flatnonzero(counts[number] > 1))[:HELD_OUT]


def rank_labels(
    searcher: Searcher, model: LabelModel | None, results: Results, up_to: float = np.inf
) -> Results:
    """Return search results with the nearest item of each label, the likeliest label first.

    There are as many labels as candidates were searched, or all labels. If none of the candidates
    has a label, the position of its nearest item is -1 until `nearest_of_labels` finds it, and its
    distance that of the farthest candidate.

    Without a model, the queries have the probabilities. Labels with a larger score (`LabelScore`)
    than `up_to` may be left out.
    """
    if isinstance(results, LabelledResults):
        return _label(results, rank_labels(searcher, model, results.results, up_to))
    if model is None:
        p = np.maximum(results.require("queries").probabilities, np.finfo(np.float32).tiny)
        labels, log_probabilities = searcher.gallery.classes, np.log(p, dtype=np.float64)
    else:
        labels = model.labels
        log_probabilities = model.log_probabilities(
            _items(searcher),
            results.require("vectors").astype(np.float64),
            results.require("positions"),
            results.left_out,
        )
    keys = results.require("queries").keys
    if keys is not None:  # labels of other parts cannot match
        possible = searcher.gallery.has_label(keys, results.left_out)
        log_probabilities = np.where(possible, log_probabilities, -np.inf)
        total = np.logaddexp.reduce(log_probabilities, axis=1, keepdims=True)
        log_probabilities -= np.where(total > -np.inf, total, 0)
    return order_labels(results, labels, log_probabilities, up_to)


def order_labels(
    results: SearchResults,
    labels: NDArray[np.int64],
    log_probabilities: NDArray[np.float64],
    up_to: float = np.inf,
) -> SearchResults:
    """Return what `rank_labels` does, from (n, L) log probabilities of (L,) ascending labels."""
    width = results.depth
    if up_to < np.inf:  # scores are at least the difference to the largest log probability
        least = log_probabilities.max(axis=1, keepdims=True) - widen(widen(up_to))
        width = min(width, int(np.count_nonzero(log_probabilities >= least, axis=1).max(initial=1)))
    elif width > len(labels):
        padding = (0, 0), (0, width - len(labels))
        log_probabilities = np.pad(log_probabilities, padding, constant_values=-np.inf)
    n, n_labels = log_probabilities.shape
    order = _largest(log_probabilities, width)
    log_p = np.take_along_axis(log_probabilities, order, axis=1)
    candidates, positions = results.require("labels"), results.require("positions")
    # The column of the nearest candidate of each label, which is written last. One-dimensional,
    # because NumPy may otherwise write in another order.
    columns = np.full(n * (n_labels + 1), -1, np.int32)
    codes = np.where(candidates == NO_CANDIDATE, n_labels, codes_of(labels, candidates))
    columns[cells(codes[:, ::-1], n_labels + 1).ravel()] = np.tile(
        np.arange(results.depth, dtype=np.int32)[::-1], n
    )
    column = columns.take(cells(order, n_labels + 1))
    found, is_label = column >= 0, log_p > -np.inf
    distances = results.require("distances")
    farthest = distances.max(axis=1, keepdims=True, where=distances < np.inf, initial=-np.inf)
    distances = np.where(found, np.take_along_axis(distances, column, axis=1), farthest)
    return replace(
        results,
        depth=width,
        one_per_label=True,
        labels=np.where(is_label, labels.take(order, mode="clip"), NO_CANDIDATE),
        positions=np.where(found, np.take_along_axis(positions, column, axis=1), -1),
        distances=np.where(is_label, distances, np.inf),
        log_probabilities=log_p,
        votes=None,
        candidate_uncertainty=None,
    )


def _largest(values: NDArray[np.float64], number: int) -> NDArray[np.int64]:
    """Return columns (n, number) of the largest values (n, m), in descending order."""
    if number == 1:
        return np.asarray(values.argmax(axis=1)[:, None])
    if values.shape[1] > 4 * number:  # several times as fast as sorting all
        columns = np.sort(np.argpartition(-values, number - 1, axis=1)[:, :number], axis=1)
        order = np.argsort(-np.take_along_axis(values, columns, axis=1), axis=1, kind="stable")
        return np.take_along_axis(columns, order, axis=1)
    return np.argsort(-values, axis=1, kind="stable")[:, :number]


def nearest_of_labels(
    searcher: Searcher, results: SearchResults, rows: NDArray[np.int64], labels: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the position and distance (m,) of the nearest item of a label (m,) for rows (m,)."""
    queries, left_out = results.require("queries"), results.left_out
    ascending, by_label = searcher.gallery.by_label
    positions, distances = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
    for label in np.unique(labels):
        chosen = np.flatnonzero(labels == label)
        first, last = np.searchsorted(ascending, [label, label + 1])
        items = by_label[first:last]
        around = np.tile(items, (len(chosen), 1))
        if left_out is not None:
            around[searcher.gallery.units[items] == left_out[rows[chosen], None]] = -1
        if queries.keys is not None and searcher.gallery.keys is not None:
            around[searcher.gallery.keys[items] != queries.keys[rows[chosen], None]] = -1
        if searcher.reranks(queries):
            far, around = searcher.rerank(queries[rows[chosen]], around)
        else:
            far = cdist(queries.vectors[rows[chosen]], searcher.index.vectors_at(items))
            far[around < 0] = np.inf
        nearest = np.arange(len(chosen)), far.argmin(axis=1)
        positions[chosen], distances[chosen] = around[nearest], far[nearest]
    return positions, distances


def list_items(searcher: Searcher, results: Results, ranked: Results) -> Results:
    """Return search results with all items of each label, nearest first, the likeliest label first.

    There are as many items as candidates were searched, whether they are candidates or not.
    `ranked` is what `rank_labels` made of the results.
    """
    if isinstance(results, LabelledResults):
        assert isinstance(ranked, LabelledResults)
        return _label(results, list_items(searcher, results.results, ranked.results))
    assert isinstance(ranked, SearchResults)
    arrays: dict[str, Any] = {
        name: np.full((len(results), results.depth), filler, np.asarray(filler).dtype)
        for name, filler in SearchResults.FILLERS.items()
        if name in ("positions", "distances", "labels", "log_probabilities")
    }
    for start in range(0, len(results), LISTED_TOGETHER):
        block = slice(start, start + LISTED_TOGETHER)
        row, place, position, distance = _listed(searcher, results[block], ranked[block])
        column = np.arange(len(row)) - np.searchsorted(row, row)
        within = column < results.depth
        row, place, column = row[within] + start, place[within], column[within]
        arrays["positions"][row, column] = position[within]
        arrays["distances"][row, column] = distance[within]
        for name in ("labels", "log_probabilities"):
            arrays[name][row, column] = getattr(ranked, name)[row, place]
    return replace(ranked, depth=results.depth, one_per_label=False, **arrays)


def _listed(
    searcher: Searcher, results: SearchResults, ranked: SearchResults
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return row, place of the label, position and distance of items, in order.

    Of labels with more items than there is room for, the candidates are listed, and some others.
    """
    by_label, keys = searcher.gallery.by_label[1], results.require("queries").keys
    classes, labels = searcher.gallery.classes, ranked.require("labels")
    left_out = results.left_out
    first, counts = searcher.gallery.of_labels(labels, keys)
    counts = np.where(ranked.is_candidate, counts, 0)
    room = results.depth + (searcher.gallery.largest_unit if left_out is not None else 0)
    taken = np.clip(room - np.cumsum(counts, axis=1) + counts, 0, counts).ravel()
    cells = np.repeat(np.arange(labels.size), taken)
    steps = np.arange(len(cells)) - np.repeat(np.cumsum(taken) - taken, taken)
    row, place = np.divmod(cells, labels.shape[1])
    position = by_label[first.ravel()[cells] + steps]
    place_of = np.full((len(results), len(classes)), -1)
    place_of[row, np.searchsorted(classes, labels.ravel()[cells])] = place
    candidates = np.nonzero(results.is_candidate)
    found = results.require("positions")[candidates]
    of_found = np.searchsorted(classes, results.require("labels")[candidates])
    row, place, position = (
        np.concatenate(parts)
        for parts in (
            (candidates[0], row),
            (place_of[candidates[0], of_found], place),
            (found, position),
        )
    )
    distance = np.concatenate([results.require("distances")[candidates], np.empty(len(cells))])
    keep = place >= 0
    if left_out is not None:
        keep &= searcher.gallery.units[position] != left_out[row]
    kept = np.flatnonzero(keep)
    kept = kept[np.unique(row[kept] * len(by_label) + position[kept], return_index=True)[1]]
    further = kept[kept >= len(found)]
    queries = results.require("queries")
    for start in range(0, len(further), VECTORS_TOGETHER):
        part = further[start : start + VECTORS_TOGETHER]
        if searcher.reranks(queries):
            distance[part] = searcher.rerank(queries[row[part]], position[part, None])[0][:, 0]
        else:
            apart = searcher.index.vectors_at(position[part]) - queries.vectors[row[part]]
            distance[part] = np.linalg.norm(apart, axis=1)
    kept = kept[np.lexsort((distance[kept], place[kept], row[kept]))]
    return row[kept], place[kept], position[kept], distance[kept]


def _label(results: Labelled, ranked: SearchResults) -> Labelled:
    """Return the labelled results of queries with other candidates, which match by their label."""
    labels, of_queries = ranked.require("labels"), results.population.labels
    assert of_queries is not None
    matches = (labels == of_queries[:, None]) & (labels != NO_CANDIDATE)
    return replace(results, results=ranked, relevant=matches)


def _items(searcher: Searcher) -> Items:
    """Return what a label model sees of a gallery; see `Searcher.why_no_label_model`."""
    assert searcher.labels is not None
    return Items(searcher.labels, searcher.gallery.units, searcher.index.vectors_at)
