"""Checks of queries before they calibrate: their search, their matches, and near-duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.labelling import example_labels
from rcir.data.repeats import (
    Digests,
    warn_of_bursts,
    warn_of_copies,
    warn_of_gallery_bursts,
    warn_of_twins,
)
from rcir.errors import InvalidData, StaleCalibration, warn
from rcir.index import AttachedIndex, build_index, lengths
from rcir.index.attached import LAST_DIGITS
from rcir.metrics.labels import UNMATCHED, earlier_of_same_label
from rcir.retrieval.queries import Queries, queries_of
from rcir.retrieval.search import Searcher
from rcir.risk import (
    LabelledResults,
    Population,
)

MIN_BURST_QUERIES = 20  # fewer are not tested for bursts
MIN_ADDED_TO_CHECK = 20  # fewer added queries are not checked for matches
# The test for bursts draws queries and others at random, and takes the nearest items.
MAX_BURST_QUERIES, MAX_BURST_REFERENCES, BURST_ITEMS = 1000, 300, 50


def check_searched(searcher: Searcher, queries: LabelledResults) -> None:
    """Raise an error unless the searcher, as it is now, searched the labelled queries."""
    if not isinstance(queries, LabelledResults):
        kind = type(queries).__name__
        raise InvalidData(f"queries are a {kind}: pass what `search_labelled` returns")
    if queries.results.fingerprints != searcher.fingerprints() or (
        queries.results.depth != searcher.depth
    ):
        raise StaleCalibration(
            "the queries were searched by another retriever, or this one has changed since: "
            "search them again"
        )


def digests_of(searcher: Searcher, queries: LabelledResults) -> Digests:
    """Return the digests of queries, (n,), as gallery items have them.

    An engine may change the last digits of vectors. Then a query that is an item is recognised by
    its distance.
    """
    own, results, gallery = queries_of(queries).digests, queries.results, searcher.gallery.digests
    if gallery is None or not isinstance(searcher.index, AttachedIndex):
        return own
    limits = LAST_DIGITS * lengths(results.require("vectors"))
    is_item = results.require("distances")[:, 0] <= limits
    return np.where(is_item, gallery[results.require("positions")[:, 0]], own)


def check_matches(searcher: Searcher, queries: LabelledResults, are_added: bool = False) -> None:
    """Raise `InvalidData` if no query has a match in the gallery; warn if most have none, or some
    have labels that the gallery lacks.

    Queries that are added to a calibration are not refused, because leaving out those without a
    match would bias it, and few of them cause no warning.
    """
    n, is_unmatched = len(queries), queries.n_relevant == 0
    unmatched = int(np.count_nonzero(is_unmatched))
    name = "queries to add" if are_added else "calibration queries"
    if are_added and n < MIN_ADDED_TO_CHECK:
        return
    if 2 * unmatched <= n:
        _warn_of_missing_labels(searcher, queries, name)
        return
    relevance, gallery = queries_of(queries).relevance, searcher.relevance
    reason = ""
    if relevance is not None and gallery is not None:
        theirs = example_labels(
            relevance.subset(np.flatnonzero(is_unmatched)), searcher.label_names
        )
        ours = example_labels(gallery, searcher.label_names)
        reason = (
            f": images match by {gallery.kind}; these queries have {theirs}; the gallery {ours}"
        )
    if left_out := searcher.options.left_out:
        reason += f"; each query is searched without its own {left_out}"
        if left_out != "item":
            reason += (
                f". If whole labels are one {left_out}, declare others (`clusters`, --cluster "
                "COLUMN), or keep all items apart (clusters=None, --cluster none)"
            )
    if unmatched == n and not are_added:
        raise InvalidData(
            f"none of the {n} calibration queries has a match in the gallery{reason}. Pass labels "
            "or places of both in the same form, or a gallery with items that match"
        )
    consequence = (
        f", so that no alpha below {unmatched / n:.2f} can be expected to be certified, unless a "
        "request has a beta or counts matchable queries alone"
    )
    warn(
        f"{unmatched} of {n} {name} have no match in the gallery{reason}. No set serves them"
        + ("" if are_added else consequence)
    )


def _warn_of_missing_labels(searcher: Searcher, queries: LabelledResults, name: str) -> None:
    """Warn if queries have labels that no gallery item has, where each has one label."""
    relevance, gallery = queries_of(queries).relevance, searcher.relevance
    if relevance is None or gallery is None or relevance.single is None or gallery.single is None:
        return
    labels = relevance.single
    rows = np.flatnonzero((labels != UNMATCHED) & ~np.isin(labels, gallery.single))
    if len(rows):
        examples = example_labels(relevance.subset(rows), searcher.label_names)
        warn(
            f"{len(rows)} of {len(queries)} {name} have labels that no gallery item has "
            f"({examples}); they count as misses, unless a request has a beta or counts "
            "matchable queries alone"
        )


def check_clusters(tuned: Population, calibrated: Population) -> None:
    """Raise `InvalidData` unless both have the same kind of clusters, and no cluster in common."""
    if tuned.cluster_word != calibrated.cluster_word:
        raise InvalidData(
            f"the tuning split is of clusters {tuned.cluster_word!r}, the calibration queries of "
            f"{calibrated.cluster_word!r}: search both with the same"
        )
    if tuned.clusters is None or calibrated.clusters is None:
        return
    if len(shared := np.intersect1d(tuned.clusters, calibrated.clusters)):
        names = ", ".join(map(str, shared[:3].tolist()))
        raise InvalidData(
            f"{len(shared)} clusters ({calibrated.cluster_word} {names}) are in the tuning split "
            "and among the calibration queries: divide the queries by clusters"
        )


def are_items(searcher: Searcher, queries: Queries) -> bool:
    """Return True if queries are gallery items, which their search leaves out; False if none is."""
    if not searcher.options.leave_one_out:
        return False
    n_items = int(np.count_nonzero(searcher.gallery.units_of(queries.digests) >= 0))
    if 0 < n_items < len(queries):
        raise InvalidData(
            f"{n_items} of {len(queries)} queries are items of the gallery, and others are not: "
            "a guarantee covers either; pass one kind"
        )
    return n_items > 0


def keep_independent(
    searcher: Searcher, queries: LabelledResults, others: Sequence[Queries]
) -> LabelledResults:
    """Return one query of each unit with leave_one_out, all without; `InvalidData` if a query
    shares its unit with one of `others`.
    """
    if not searcher.options.leave_one_out:
        return queries
    added = queries_of(queries)
    if others and len(shared := np.flatnonzero(searcher.share_units(added, others))):
        kind = searcher.options.left_out
        raise InvalidData(
            f"{len(shared)} of {len(added)} queries are of a {kind} that tuned or "
            f"calibrated before (first row {shared[0]}), so that they are not independent: "
            f"divide the queries by {kind}"
        )
    return queries[searcher.one_of_each_unit(added)]


def warn_of_gallery(
    searcher: Searcher, name: str, queries: LabelledResults, recurring: bool
) -> None:
    """Warn of queries that are nearly the same as gallery items."""
    distances = vector_distances(searcher, queries)
    if not searcher.options.leave_one_out:
        warn_of_copies(name, distances, searcher.digests is not None)
    elif not recurring:
        remedy = (
            "pass the clusters of the gallery's items (`clusters` of `from_embeddings`, `--cluster`"
            ' of rcir certify), or "auto", which finds moments'
            if searcher.options.clusters == "none"
            else f"declare larger clusters than the {searcher.options.cluster}s in use"
        )
        # The nearest item of each cluster: the others do not belong to the burst of the query.
        units = searcher.gallery.units[queries.results.require("positions")]
        first = earlier_of_same_label(units) == 0
        warn_of_gallery_bursts(name, distances, queries.relevant & first, remedy)


def warn_of_likeness(
    searcher: Searcher, name: str, queries: LabelledResults, others: Sequence[NDArray[np.float32]]
) -> None:
    """Warn of queries that are nearly the same as each other, or as vectors of others."""
    vectors = queries_of(queries).vectors
    everything = np.concatenate([vectors, *others])
    nearest, positions = build_index(everything).search(vectors, 2)
    itself = positions[:, 0] == np.arange(len(vectors))
    nearest_other = np.where(itself, nearest[:, 1], nearest[:, 0])
    warn_of_twins(name, nearest_other, vector_distances(searcher, queries))
    if queries.population.clusters is None and len(vectors) >= MIN_BURST_QUERIES:
        rng = np.random.default_rng(0)
        rows = rng.permutation(len(vectors))[: min(MAX_BURST_QUERIES, len(vectors) // 2)]
        rest = np.delete(np.arange(len(everything)), rows)
        rest = rng.permutation(rest)[:MAX_BURST_REFERENCES]
        among = build_index(everything[rest]).search(vectors[rows], len(rest))
        items = searcher.nearest(vectors[rows], min(BURST_ITEMS, len(searcher.gallery)))
        warn_of_bursts(name, among, items[:2], len(everything), len(searcher.gallery))


def vector_distances(searcher: Searcher, results: LabelledResults) -> NDArray[np.floating[Any]]:
    """Return (n, k) ascending distances of queries to the nearest vectors of gallery items.

    Distances that an encoder re-ranks by are not comparable with those among queries.
    """
    if searcher.gallery.items is not None:
        return searcher.nearest(queries_of(results).vectors, min(2, searcher.depth))[0]
    return results.results.require("distances")
