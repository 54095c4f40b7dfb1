"""Calibrate: from labelled queries to a calibration, with the checks of the queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.labelling import example_labels
from rcir.data.repeats import (
    digests,
    require_new,
    require_no_repeats,
    warn_of_bursts,
    warn_of_copies,
    warn_of_gallery_bursts,
    warn_of_twins,
)
from rcir.errors import InvalidConfig, InvalidData, StaleCalibration, as_option, warn
from rcir.index import build_index
from rcir.metrics.labels import UNMATCHED, earlier_of_same_label
from rcir.retrieval.calibration import (
    Calibration,
    CalibrationReport,
    coverage,
    needs_embeddings,
)
from rcir.retrieval.queries import Queries, queries_of, require_alike
from rcir.retrieval.query_uncertainty import with_uncertainty
from rcir.retrieval.rules import RuleKind, Rules, RuleSource, TunedOn
from rcir.retrieval.search import Searcher
from rcir.retrieval.tuning import (
    CalibrationOptions,
    ChosenUncertainty,
    choose_uncertainty,
    search_items,
    why_gallery_cannot_tune,
)
from rcir.risk import (
    Exchangeability,
    LabelledResults,
    Population,
    check_exchangeability,
    make_request,
    score,
)
from rcir.risk.losses import MISS
from rcir.risk.selection import Fits

MIN_TESTED = 20  # queries that are tested for bursts
MAX_COMPARED, MAX_OTHERS, ITEMS = 1000, 300, 50  # in this test: drawn at random; nearest items


def calibrate(
    searcher: Searcher,
    tuning: LabelledResults | None,
    calibration: LabelledResults,
    options: CalibrationOptions,
    after: Calibration | None = None,
    like: Calibration | None = None,
) -> tuple[Calibration, CalibrationReport]:
    """Calibrate on two searched splits.

    Args:
        searcher: that searched both, as it is now.
        tuning, calibration: the two splits; None for tuning on the gallery's items.
        options: how to calibrate.
        after: the calibration that this one replaces, see `Calibration.after`.
        like: an earlier calibration with the same queries. Its uncertainty and its kinds of score
            functions are kept, and the new one holds although it was chosen among several.

    Raises:
        StaleCalibration: the searcher has changed since it searched.
        InvalidConfig: the gallery's items cannot tune.
        InvalidData: the queries are unsuitable, see `Retriever.calibrate`, or none has a match.
    """
    check_searched(searcher, calibration)
    check_matches(searcher, calibration)
    queries = queries_of(calibration)
    tuned: Queries | None = None
    if tuning is not None:
        check_searched(searcher, tuning)
        tuned = queries_of(tuning)
        if tuning is calibration or tuned.vectors is queries.vectors:
            raise InvalidData(
                "tuning split and calibration queries are the same: the guarantee needs others"
            )
        require_alike(queries, tuned)
        _check_clusters(tuning.population, calibration.population)
    tuned_digests = digests([]) if tuned is None else tuned.digests
    require_no_repeats(searcher.foreign_digests, tuned_digests, queries.digests, options.recurring)
    calibration = _one_of_each_unit(searcher, calibration, [] if tuned is None else [tuned])
    if tuning is not None:
        tuning = _one_of_each_unit(searcher, tuning, [])
        if not searcher.options.leave_one_out:
            distances = vector_distances(searcher, tuning)
            warn_of_copies("queries of the tuning split", distances, searcher.digests is not None)
    _warn_of_gallery(searcher, "calibration queries", calibration, options.recurring)
    if like is None and not options.recurring:
        others = [] if tuning is None else [queries_of(tuning).vectors]
        _warn_of_likeness(searcher, "calibration queries", calibration, others)
    reason = why_gallery_cannot_tune(searcher, queries_of(calibration), options)
    if tuning is None and reason is not None:
        raise InvalidConfig(
            f"the gallery's items cannot tune: {reason}. Divide the queries instead, which is "
            f"{as_option('tuning', 'queries')}, or {as_option('tuning', 'labels')} for queries of "
            "new labels"
        )
    splits: dict[TunedOn, LabelledResults] = {} if tuning is None else {"queries": tuning}
    by_gallery = reason is None and calibration.population.clusters is None
    if tuning is None or (by_gallery and not (like is not None and like.sequential)):
        splits["gallery"] = search_items(searcher, calibration)
    result, chosen = _calibration_of(searcher, splits, calibration, options, like)
    _ = result.miss_rule  # raises if the tuning split is unsuitable
    if after is not None:
        result = result.after(after)
    return result, CalibrationReport(result, chosen)


def _calibration_of(
    searcher: Searcher,
    splits: dict[TunedOn, LabelledResults],
    calibration: LabelledResults,
    options: CalibrationOptions,
    like: Calibration | None,
) -> tuple[Calibration, ChosenUncertainty]:
    """Return a calibration tuned on each of `splits`, and the choice of its uncertainty.

    Its rules are fitted when they are needed.
    """
    before: Mapping[RuleKind, Rules] = {} if like is None else like.rules
    chosen = {
        tuned_on: ChosenUncertainty(before[RuleKind(tuned_on=tuned_on)][MISS.name].uncertainty)
        if RuleKind(tuned_on=tuned_on) in before
        else choose_uncertainty(searcher, split, options)
        for tuned_on, split in splits.items()
    }
    choice = next(iter(chosen.values()))
    calibration_queries = queries_to_store(searcher, calibration, choice.name)
    tuning_queries = calibration_queries[:0]
    if "queries" in splits:
        tuning_queries = queries_to_store(searcher, splits["queries"], choice.name)
        splits = splits | {"queries": _as_evidence(searcher, splits["queries"], tuning_queries)}
    calibration = _as_evidence(searcher, calibration, calibration_queries)
    sources: dict[RuleKind, RuleSource] = {}
    for tuned_on, split in splits.items():
        uncertainty = chosen[tuned_on].name
        items, labels = RuleKind(None, tuned_on), RuleKind("label", tuned_on)
        names = {
            kind: {risk: rule.score_function.name for risk, rule in before[kind].fit_all().items()}
            for kind in (items, labels)
            if kind in before
        }
        sources[items] = RuleSource(
            Fits(with_uncertainty(searcher, split, uncertainty)),
            with_uncertainty(searcher, calibration, uncertainty),
            options,
            uncertainty,
            names.get(items, {}),
        )
        if searcher.labels is not None:
            sources[labels] = sources[items].first_of_each_label(names.get(labels, {}))
    result = Calibration(
        rules={kind: Rules(source=source) for kind, source in sources.items()},
        fingerprints=searcher.fingerprints(),
        options=options,
        tuning_queries=tuning_queries,
        calibration_queries=calibration_queries,
        coverage=coverage(searcher, calibration_queries),
        left_out=searcher.options.left_out if _are_items(searcher, calibration_queries) else None,
    )
    if like is not None:
        result = replace(
            result,
            chosen_among=like.chosen_among,
            sequential=like.sequential,
            past=like.past,
            attempts=like.attempts,
        )
    return result, choice


def recalibrate(searcher: Searcher, earlier: Calibration) -> tuple[Calibration, CalibrationReport]:
    """Calibrate anew with the queries of a calibration, see `Retriever.recalibrate`."""
    tuning, calibration = earlier.queries_to_search(searcher)
    if earlier.left_out is not None:  # items that were removed would find their own clusters
        tuning, calibration = (
            part[searcher.gallery.units_of(part.digests) >= 0] for part in (tuning, calibration)
        )
        if not (len(tuning) and len(calibration)):
            raise InvalidData(
                "the items that calibrated were removed from the gallery: calibrate anew"
            )
    if searcher.options.leave_one_out:  # added items may join clusters of both
        calibration = calibration[~searcher.share_units(calibration, [tuning])]
    if earlier.tuned_on_gallery and (
        reason := why_gallery_cannot_tune(searcher, calibration, earlier.options)
    ):
        raise InvalidData(
            f"the gallery's items cannot tune the sizes any more: {reason}. Call `calibrate` with "
            "labelled queries"
        )
    earlier.warn_of_new_labels(searcher)
    return calibrate(
        searcher,
        None if earlier.tuned_on_gallery else searcher.search_labelled(tuning),
        searcher.search_labelled(calibration),
        earlier.options,
        like=earlier,
    )


def extend(
    searcher: Searcher, calibration: Calibration, queries: LabelledResults, recurring: bool
) -> Calibration:
    """Return a calibration with further queries, see `Retriever.extend_calibration`."""
    check_searched(searcher, queries)
    check_matches(searcher, queries, are_added=True)
    before = [calibration.tuning_queries, calibration.calibration_queries]
    require_alike(queries_of(queries), calibration.calibration_queries)
    queries = _one_of_each_unit(searcher, queries, [] if recurring else before)
    if _are_items(searcher, queries_of(queries)) != (calibration.left_out is not None):
        raise InvalidData(
            "the retriever was calibrated on items of its gallery, or the queries to add are "
            "such, but not both: a guarantee covers either; calibrate anew"
        )
    queries = with_uncertainty(searcher, queries, calibration.uncertainty)
    added = queries_to_store(searcher, queries, calibration.uncertainty)
    queries = _as_evidence(searcher, queries, added)
    require_new(searcher.foreign_digests, calibration.query_digests, added.digests, recurring)
    _warn_of_gallery(searcher, "queries to add", queries, recurring)
    if not recurring:
        others = [queries.vectors for queries in before]
        _warn_of_likeness(searcher, "queries to add", queries, others)
    return calibration.with_queries(queries, added, recurring)


def check_recent(
    searcher: Searcher,
    calibration: Calibration,
    recent: LabelledResults,
    alpha: float,
    delta: float,
) -> Exchangeability:
    """Compare recent queries with those of a calibration, see `Retriever.check`."""
    rule = calibration.miss_rule
    check_searched(searcher, recent)
    recent = _one_of_each_unit(searcher, recent, [])
    require_alike(queries_of(recent), calibration.calibration_queries)
    cluster = rule.calibration.population.cluster_word or recent.population.cluster_word
    if cluster is not None:
        raise InvalidData(
            f"queries come in clusters ({cluster}), and are compared as independent ones: "
            "calibrate and check with one query of each"
        )
    request = make_request(alpha, delta, anytime=calibration.sequential)
    threshold = calibration.guarantee(request).threshold
    scored = score(rule.score_function, with_uncertainty(searcher, recent, calibration.uncertainty))
    return check_exchangeability(rule.calibration, scored, certified=(threshold, alpha))


def _are_items(searcher: Searcher, queries: Queries) -> bool:
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


def _one_of_each_unit(
    searcher: Searcher, queries: LabelledResults, others: Sequence[Queries]
) -> LabelledResults:
    """Return one query of each unit that a search leaves out, or raise if others are of one."""
    if not searcher.options.leave_one_out:
        return queries
    added = queries_of(queries)
    if others and len(shared := np.flatnonzero(searcher.share_units(added, others))):
        kind = searcher.options.left_out
        raise InvalidData(
            f"{len(shared)} of {len(added)} calibration queries are of a {kind} that tuned or "
            f"calibrated before (first row {shared[0]}), so that they are not independent: "
            f"divide the queries by {kind}"
        )
    return queries[searcher.one_of_each_unit(added)]


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


def check_matches(searcher: Searcher, queries: LabelledResults, are_added: bool = False) -> None:
    """Raise `InvalidData` if no query has a match in the gallery; warn if most have none, or some
    have labels that the gallery lacks.

    Labels that are spelled differently, or are those of another split, are the usual reason.
    Queries that are added to a calibration are not refused, because leaving out those without a
    match would bias it, and few of them cause no warning.
    """
    n, is_unmatched = len(queries), queries.n_relevant == 0
    unmatched = int(np.count_nonzero(is_unmatched))
    if are_added and n < MIN_TESTED:
        return
    if 2 * unmatched <= n:
        _warn_of_missing_labels(searcher, queries)
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
    warn(
        f"{unmatched} of {n} calibration queries have no match in the gallery{reason}. No set "
        f"serves them, so that no alpha below {unmatched / n:.2f} can be expected to be certified"
    )


def _warn_of_missing_labels(searcher: Searcher, queries: LabelledResults) -> None:
    """Warn if queries have labels that no gallery item has, where each has one label."""
    relevance, gallery = queries_of(queries).relevance, searcher.relevance
    if relevance is None or gallery is None or relevance.single is None or gallery.single is None:
        return
    labels = relevance.single
    rows = np.flatnonzero((labels != UNMATCHED) & ~np.isin(labels, gallery.single))
    if len(rows):
        examples = example_labels(relevance.subset(rows), searcher.label_names)
        warn(
            f"{len(rows)} of {len(queries)} calibration queries have labels that no gallery item "
            f"has ({examples}); they count as misses"
        )


def queries_to_store(searcher: Searcher, results: LabelledResults, uncertainty: str) -> Queries:
    """Return the queries of search results as they are stored, to be searched again.

    Their relevance is stored if the relevance of the results follows from it.
    """
    queries = queries_of(results)
    relevance, population = queries.relevance, results.population
    if relevance is not None and searcher.relevance is not None:
        relevant = relevance.matches(searcher.relevance, results.results.require("positions"))
        if not np.array_equal(relevant, results.relevant):
            relevance = None
    # With leave_one_out, results of clusters come without them.
    own = queries.population if searcher.options.leave_one_out else population
    clusters = None if own.clusters is None else own.clusters.astype(str)
    queries = queries.with_population(relevance, population.groups, clusters, own.cluster_word)
    if needs_embeddings(searcher, uncertainty):
        return queries
    return replace(queries, embedding=None)


def _as_evidence(searcher: Searcher, results: LabelledResults, stored: Queries) -> LabelledResults:
    """Return search results with the population that their stored queries calibrate as."""
    return replace(results, population=searcher.options.as_evidence(stored.population))


def _check_clusters(tuned: Population, calibrated: Population) -> None:
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


def _warn_of_gallery(
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
        # Of each cluster the nearest: those that were left in are no bursts of the query.
        units = searcher.gallery.units[queries.results.require("positions")]
        first = earlier_of_same_label(units) == 0
        warn_of_gallery_bursts(name, distances, queries.relevant & first, remedy)


def _warn_of_likeness(
    searcher: Searcher, name: str, queries: LabelledResults, others: Sequence[NDArray[np.float32]]
) -> None:
    """Warn of queries that are nearly the same as each other, or as vectors of others."""
    vectors = queries_of(queries).vectors
    everything = np.concatenate([vectors, *others])
    nearest, positions = build_index(everything).search(vectors, 2)
    itself = positions[:, 0] == np.arange(len(vectors))
    nearest_other = np.where(itself, nearest[:, 1], nearest[:, 0])
    warn_of_twins(name, nearest_other, vector_distances(searcher, queries))
    if queries.population.clusters is None and len(vectors) >= MIN_TESTED:
        rng = np.random.default_rng(0)
        rows = rng.permutation(len(vectors))[: min(MAX_COMPARED, len(vectors) // 2)]
        rest = np.delete(np.arange(len(everything)), rows)
        rest = rng.permutation(rest)[:MAX_OTHERS]
        among = build_index(everything[rest]).search(vectors[rows], len(rest))
        items = searcher.nearest(vectors[rows], min(ITEMS, len(searcher.gallery)))
        warn_of_bursts(name, among, items[:2], len(everything), len(searcher.gallery))


def vector_distances(searcher: Searcher, results: LabelledResults) -> NDArray[np.floating[Any]]:
    """(n, k) ascending distances of queries to the nearest vectors of gallery items, k >= 2.

    Distances that an encoder re-ranks by are not comparable with those among queries.
    """
    if searcher.gallery.items is not None:
        return searcher.nearest(queries_of(results).vectors, min(2, searcher.depth))[0]
    return results.results.require("distances")
