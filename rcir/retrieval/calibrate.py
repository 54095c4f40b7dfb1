"""Calibrate: from labelled queries to a calibration, and from a calibration to the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from rcir.data.repeats import (
    digests,
    require_new,
    require_no_repeats,
    warn_of_copies,
)
from rcir.errors import InvalidConfig, InvalidData, as_option
from rcir.label_model import LabelModel
from rcir.retrieval.acceptance import Likeness, fit_acceptance
from rcir.retrieval.calibration import (
    Calibration,
    CalibrationReport,
    coverage,
    needs_embeddings,
)
from rcir.retrieval.label_ranking import fit_label_model, list_items, rank_labels
from rcir.retrieval.queries import Queries, queries_of, require_alike
from rcir.retrieval.query_checks import (
    are_items,
    check_clusters,
    check_matches,
    check_searched,
    digests_of,
    keep_independent,
    vector_distances,
    warn_of_gallery,
    warn_of_likeness,
)
from rcir.retrieval.query_uncertainty import with_uncertainty
from rcir.retrieval.rules import RankedLabels, RuleKind, Rules, RuleSource, TunedOn
from rcir.retrieval.search import Searcher
from rcir.retrieval.shift import Shift
from rcir.retrieval.tuning import (
    CalibrationOptions,
    ChosenUncertainty,
    choose_uncertainty,
    models_labels,
    search_items,
    why_gallery_cannot_tune,
)
from rcir.retrieval.whitening import fit_whitening
from rcir.risk import (
    Exchangeability,
    LabelledResults,
    LabelListScore,
    LabelScore,
    check_exchangeability,
    make_request,
    score,
)
from rcir.risk.losses import MISS
from rcir.risk.selection import Fits


def calibrate(
    searcher: Searcher,
    tuning: LabelledResults | None,
    calibration: LabelledResults,
    options: CalibrationOptions,
    after: Calibration | None = None,
    like: Calibration | None = None,
    *,
    shift: Shift | None = None,
) -> tuple[Calibration, CalibrationReport]:
    """Calibrate on two searched splits.

    Args:
        searcher: that searched both, as it is now.
        tuning, calibration: the two splits; None for tuning on the gallery's items.
        options: how to calibrate.
        after: the calibration that this one replaces, see `Calibration.after`.
        like: an earlier calibration with the same queries. Its uncertainty and its kinds of score
            functions are kept, and so is the correction for a choice among several retrievers.
        shift: how the calibration queries were drawn for a target population.

    Raises:
        StaleCalibration: the searcher has changed since it searched.
        InvalidConfig: the gallery's items cannot tune.
        InvalidData: the queries are unsuitable, see `Retriever.calibrate_splits`, or none has a
            match.
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
        check_clusters(tuning.population, calibration.population)
    tuned_digests = digests([]) if tuning is None else digests_of(searcher, tuning)
    own_digests = digests_of(searcher, calibration)
    require_no_repeats(searcher.foreign_digests, tuned_digests, own_digests, options.recurring)
    calibration = keep_independent(searcher, calibration, [] if tuned is None else [tuned])
    if tuning is not None:
        tuning = keep_independent(searcher, tuning, [])
        if not searcher.options.leave_one_out:
            distances = vector_distances(searcher, tuning)
            warn_of_copies("queries of the tuning split", distances, searcher.digests is not None)
    warn_of_gallery(searcher, "calibration queries", calibration, options.recurring)
    if like is None and not options.recurring:
        others = [] if tuning is None else [queries_of(tuning).vectors]
        warn_of_likeness(searcher, "calibration queries", calibration, others)
    reason = why_gallery_cannot_tune(searcher, queries_of(calibration), options)
    given = queries.probabilities is not None
    if given and options.score_function != "auto":
        raise InvalidConfig("probabilities size sets by themselves: leave out score_function")
    if tuning is None and reason is not None and not given:
        raise InvalidConfig(
            f"the gallery's items cannot tune: {reason}. Divide the queries instead, which is "
            f"{as_option('tuning', 'queries')}, or {as_option('tuning', 'labels')} for queries of "
            "new labels"
        )
    splits: dict[TunedOn, LabelledResults | None] = {} if tuning is None else {"queries": tuning}
    by_gallery = reason is None and calibration.population.clusters is None
    if tuning is None or (by_gallery and not (like is not None and like.sequential)):
        found = search_items(searcher, calibration) if reason is None else None
        if tuning is None or found is not None:
            splits["gallery"] = found
    model = None
    if models_labels(searcher, options) and not given:
        held_out = tuning if searcher.options.leave_one_out else splits.get("gallery")
        model = fit_label_model(searcher, held_out)
    result, chosen = _calibration_of(searcher, splits, calibration, options, model, like)
    _ = result.miss_rule  # raises if the tuning split is unsuitable
    result = replace(result, shift=shift)
    if after is not None:
        result = result.after(after)
    return result, CalibrationReport(result, chosen)


def _calibration_of(
    searcher: Searcher,
    splits: dict[TunedOn, LabelledResults | None],
    calibration: LabelledResults,
    options: CalibrationOptions,
    model: LabelModel | None,
    like: Calibration | None,
) -> tuple[Calibration, ChosenUncertainty]:
    """Return a calibration tuned on each of `splits`, and the choice of its uncertainty.

    A split is None if the gallery tunes and no item can be left out. The rules are fitted when they
    are needed.
    """
    before: Mapping[RuleKind, Rules] = {} if like is None else like.rules
    chosen = {
        tuned_on: ChosenUncertainty(before[RuleKind(tuned_on=tuned_on)][MISS.name].uncertainty)
        if RuleKind(tuned_on=tuned_on) in before
        else ChosenUncertainty("encoder")
        if split is None
        else choose_uncertainty(searcher, split, options)
        for tuned_on, split in splits.items()
    }
    choice = next(iter(chosen.values()))
    calibration_queries = queries_to_store(searcher, calibration, choice.name)
    tuning_queries = calibration_queries[:0]
    tuning = splits.get("queries")
    if tuning is not None:
        tuning_queries = queries_to_store(searcher, tuning, choice.name)
        splits = splits | {"queries": _as_evidence(searcher, tuning, tuning_queries)}
    calibration = _as_evidence(searcher, calibration, calibration_queries)
    given = calibration_queries.probabilities is not None
    learned = options.score_function in ("auto", "learned")
    whitening = fit_whitening(searcher) if learned else None
    left_out = searcher.options.left_out if are_items(searcher, calibration_queries) else None
    acceptance = None
    hidden = searcher.options.leave_one_out or options.unlabelled_misses
    if not hidden and (calibration.n_relevant == 0).any():
        searched = [split for split in splits.values() if split is not None]
        acceptance = fit_acceptance(searcher, searched, model)
        calibration = acceptance.add_to(searcher, calibration)
        splits = {
            tuned_on: None if split is None else acceptance.add_to(searcher, split)
            for tuned_on, split in splits.items()
        }
    sources: dict[RuleKind, RuleSource] = {}
    for tuned_on, split in splits.items():
        uncertainty = chosen[tuned_on].name
        items, labels = RuleKind(None, tuned_on), RuleKind("label", tuned_on)
        names = {
            kind: {risk: rule.score_function.name for risk, rule in before[kind].fit_all().items()}
            for kind in (items, labels)
            if kind in before
        }
        calibrated = with_uncertainty(searcher, calibration, uncertainty)
        split = None if split is None else with_uncertainty(searcher, split, uncertainty)
        if whitening is not None:
            calibrated = whitening.add_to(searcher, calibrated)
            split = None if split is None else whitening.add_to(searcher, split)
        ranked = None
        if model is not None or given:
            tunes = None if given and tuned_on == "gallery" else split
            ranked = _rank(searcher, model, tunes, calibrated)
        sources[items] = RuleSource(
            None if split is None else Fits(split),
            ranked,
            calibrated,
            tuned_on,
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
        likeness=Likeness.fit(calibration),
        coverage=coverage(searcher, calibration_queries),
        probability_labels=searcher.gallery.classes if given else None,
        label_model=model,
        whitening=whitening,
        acceptance=acceptance,
        left_out=left_out,
        key=None if searcher.gallery.keys is None else searcher.options.key,
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


def _rank(
    searcher: Searcher,
    model: LabelModel | None,
    tuning: LabelledResults | None,
    calibration: LabelledResults,
) -> RankedLabels:
    """Return two splits by the probabilities of labels."""
    tuned = None if tuning is None else rank_labels(searcher, model, tuning)
    ranked = RankedLabels(LabelScore(), tuned, rank_labels(searcher, model, calibration))
    return replace(ranked, listed=partial(_list_items, searcher, ranked, tuning, calibration))


def _list_items(
    searcher: Searcher, ranked: RankedLabels, tuning: LabelledResults | None, rest: LabelledResults
) -> RankedLabels:
    """Return two splits with all items of each label, see `_rank`."""
    tuned = None
    if tuning is not None and ranked.tuning is not None:
        tuned = list_items(searcher, tuning, ranked.tuning)
    return RankedLabels(LabelListScore(), tuned, list_items(searcher, rest, ranked.calibration))


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
    labels = earlier.probability_labels
    if labels is not None and not np.array_equal(searcher.gallery.classes, labels):
        raise InvalidData(
            "the gallery's labels are not those that the queries have probabilities of: call "
            "`calibrate` with probabilities of the present ones"
        )
    if (earlier.tuned_on_gallery and labels is None) and (
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
        earlier.options_to_repeat,
        like=earlier,
        shift=earlier.shift,
    )


def extend(
    searcher: Searcher, calibration: Calibration, queries: LabelledResults, recurring: bool
) -> Calibration:
    """Return a calibration with further queries, see `Retriever.extend_calibration`."""
    if calibration.shift is not None:
        raise InvalidData(
            "the calibration queries were drawn for a target population, and it is not known "
            "whether the queries to add are of it: calibrate anew, with all labelled queries"
        )
    check_searched(searcher, queries)
    check_matches(searcher, queries, are_added=True)
    before = [calibration.tuning_queries, calibration.calibration_queries]
    require_alike(queries_of(queries), calibration.calibration_queries)
    queries = keep_independent(searcher, queries, [] if recurring else before)
    if are_items(searcher, queries_of(queries)) != (calibration.left_out is not None):
        raise InvalidData(
            "the retriever was calibrated on items of its gallery, or the queries to add are "
            "such, but not both: a guarantee covers either; calibrate anew"
        )
    added = queries_to_store(searcher, queries, calibration.uncertainty)
    queries = _as_evidence(searcher, queries, added)
    own_digests = digests_of(searcher, queries)
    require_new(searcher.foreign_digests, calibration.query_digests, own_digests, recurring)
    warn_of_gallery(searcher, "queries to add", queries, recurring)
    if not recurring:
        others = [queries.vectors for queries in before]
        warn_of_likeness(searcher, "queries to add", queries, others)
    return calibration.with_queries(searcher, queries, added, recurring)


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
    recent = keep_independent(searcher, recent, [])
    require_alike(queries_of(recent), calibration.calibration_queries)
    cluster = rule.evidence.population.cluster_word or recent.population.cluster_word
    if cluster is not None:
        raise InvalidData(
            f"queries come in clusters ({cluster}), and are compared as independent ones: "
            "calibrate and check with one query of each"
        )
    request = make_request(alpha, delta, anytime=calibration.sequential)
    threshold = calibration.guarantee(request).threshold
    scored = score(rule.score_function, calibration.arrange(searcher, recent, rule))
    return check_exchangeability(rule.evidence, scored, certified=(threshold, alpha))


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
