"""The rules of a calibration as arrays and a description, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.retrieval.calibration import Calibration, coverage, needs_embeddings
from rcir.retrieval.gallery import Gallery
from rcir.retrieval.queries import Queries
from rcir.retrieval.search import Searcher
from rcir.retrieval.stored_parts import (
    CONTROLLER,
    load_queries,
    require,
    require_array,
    require_fields,
    require_texts,
)
from rcir.retrieval.tuning import CalibrationOptions, RuleSet
from rcir.risk import (
    ScoredResults,
    ScoreFunction,
    SearchResults,
    SetRule,
    score_function_class,
)
from rcir.risk.bounds import check_among
from rcir.risk.request import Distinct

Arrays = Mapping[str, NDArray[Any]]
TUNED_ON = ("queries", "gallery")


def describe_rules(
    calibration: Calibration,
) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """Describe the rules of a calibration by plain values, one dictionary each, and all arrays."""
    described: list[dict[str, Any]] = []
    arrays: dict[str, NDArray[Any]] = {}
    if calibration.on_gallery is not None:
        described, arrays = describe_rules(calibration.on_gallery)
    tuned_on = TUNED_ON[calibration.tuned_on_gallery]
    own: list[dict[str, Any]] = []
    for distinct, rules in calibration.rules.items():
        main = rules.main
        groups = main.calibration.groups
        by_risk = {"main": main, **rules.by_risk}
        own.append(
            {
                "tuned_on": tuned_on,
                "uncertainty": calibration.uncertainty,
                "distinct": distinct,
                "score_functions": {risk: one.score_function.name for risk, one in by_risk.items()},
                "bound": main.bound,
                "groups": None if groups is None else groups.tolist(),
                "cluster": main.calibration.cluster,
                "growing": calibration.sequential,
            }
        )
        for risk, rule in by_risk.items():
            if calibration.tuned_on_gallery:
                place = _place(tuned_on, distinct, risk, "tuning")
                arrays[f"{place}labels"] = rule.tuning.require("query_labels")
            for part, values in (
                ("score_function", rule.score_function.state()),
                ("tuning", rule.tuning.arrays()),
                ("calibration", rule.calibration.arrays()),
            ):
                place = _place(tuned_on, distinct, risk, part)
                arrays |= {f"{place}{name}": array for name, array in values.items()}
    return own + described, arrays


def _place(tuned_on: str, distinct: Distinct, risk: str, part: str) -> str:
    """Return the beginning of the names of the arrays of a rule."""
    return f"{'gallery.' * (tuned_on == 'gallery')}{distinct}.{risk}.{part}."


def load_calibration(
    description: Mapping[str, Any], arrays: Arrays, folder: Path, searcher: Searcher
) -> Calibration:
    """Return the calibration that was described, and whose queries are in a folder.

    Raises:
        ValueError, KeyError, RcirError, and other exceptions: a part is damaged.
    """
    described = description["controllers"]
    for one in described:
        require_fields(one, CONTROLLER, "a controller")
    *queries, earlier = load_queries(folder, description["earlier_queries"])
    left = dict(arrays)
    kinds = list(dict.fromkeys(one["tuned_on"] for one in described))
    require(kinds in (["queries"], ["gallery"], ["queries", "gallery"]), f"rules tuned on {kinds}")
    calibrations = []
    for kind in kinds:
        parts = [one for one in described if one["tuned_on"] == kind]
        alike = {(one["growing"], one["uncertainty"]) for one in parts}
        require(len(alike) == 1, "controllers that grow and others that do not")
        sequential, uncertainty = alike.pop()
        require(uncertainty in searcher.uncertainties, f"uncertainty {uncertainty}")
        tuned, calibrated = queries if kind == "queries" else (queries[0][:0], queries[1])
        calibrations.append(
            Calibration(
                rules=_rules_by_distinct(parts, left, searcher.gallery, tuned, calibrated),
                fingerprints=dict(description["calibrated_on"], uncertainty=uncertainty),
                options=CalibrationOptions(**description["calibrated_with"]),
                uncertainty=uncertainty,
                tuning_queries=tuned,
                calibration_queries=calibrated,
                chosen_among=check_among(description["chosen_among"]),
                sequential=sequential,
                coverage=coverage(searcher, calibrated),
                earlier_digests=earlier,
                attempts=check_among(description["attempts"]),
            )
        )
        complete = calibrated.embedding is not None and (tuned.embedding is not None or not tuned)
        require(
            complete or not needs_embeddings(searcher, uncertainty), "embeddings of the queries"
        )
    require(not left, f"there are further arrays: {', '.join(left)}")
    first, *others = calibrations
    require(len(first.tuning_queries) == len(queries[0]), "queries that tuned nothing")
    require(first.uncertainty == description["uncertainty"], "uncertainty")
    return replace(first, on_gallery=others[0]) if others else first


def _rules_by_distinct(
    described: list[Any],
    left: dict[str, NDArray[Any]],
    gallery: Gallery,
    tuned: Queries,
    calibrated: Queries,
) -> dict[Distinct, RuleSet]:
    """Return the rules that were tuned alike; their arrays are removed from `left`."""
    kinds = [one["distinct"] for one in described]
    expected = [None] if gallery.labels is None else [None, "label"]
    require(kinds == expected, f"controllers of {kinds}, expected those of {expected}")
    rules = {one["distinct"]: _rules(one, left, tuned, calibrated) for one in described}
    for distinct, of_kind in rules.items():
        for rule in (of_kind.main, *of_kind.by_risk.values()):
            _try(rule, gallery, distinct)
            require(len(rule.calibration) == len(calibrated), "controllers of other queries")
            require(len(rule.tuning) == len(tuned) or not tuned, "controllers of other queries")
    return rules


def _rules(
    described: dict[str, Any], left: dict[str, NDArray[Any]], tuned: Queries, calibrated: Queries
) -> RuleSet:
    """Return one set of rules; its arrays are removed from `left`."""
    score_functions, groups = described["score_functions"], described["groups"]
    require_texts(score_functions, "score_functions")
    if groups is not None:
        require_texts(groups, "groups")
        groups = np.array(groups, str)

    def part(risk: str, name: str) -> dict[str, NDArray[Any]]:
        prefix = _place(described["tuned_on"], described["distinct"], risk, name)
        names = [key for key in left if key.startswith(prefix)]
        return {key.removeprefix(prefix): left.pop(key) for key in names}

    def rule(risk: str) -> SetRule:
        tuning = part(risk, "tuning")
        labels = tuned.labels if tuned else tuning.pop("labels")
        return SetRule(
            _score_function(score_functions[risk], part(risk, "score_function")),
            _results(tuning, tuned.groups if tuned else None, described["cluster"], labels),
            _results(part(risk, "calibration"), groups, described["cluster"], calibrated.labels),
            described["bound"],
        )

    main = rule("main")
    return RuleSet(main, {risk: rule(risk) for risk in score_functions if risk != "main"})


def _score_function(name: str, state: Arrays) -> ScoreFunction:
    for key, values in state.items():
        dtype = np.int64 if key == "uses" else np.float64
        require_array(values, dtype, (None,) * values.ndim, key)
    if "sample" in state:
        sample = state["sample"]
        require(len(sample) > 0 and (np.diff(sample) >= 0).all(), "sample is not ascending")
    if "uses" in state:
        require(np.isin(state["uses"], (0, 1)).all(), "uses: others than 0 and 1")
    made = score_function_class(name).from_state(state)
    again = made.state()
    same = again.keys() == state.keys() and all(
        np.array_equal(values, again[key]) for key, values in state.items()
    )
    require(same, f"arrays of {name}")
    return made


def _results(
    arrays: Arrays,
    groups: NDArray[np.str_] | None,
    cluster: str | None,
    labels: NDArray[np.int64] | None,
) -> ScoredResults:
    n, depth = arrays["relevant"].shape
    require(set(np.unique(arrays["relevant"])) <= {0, 1}, "relevant: others than 0 and 1")
    scores = arrays["candidate_scores"]
    require_array(np.nan_to_num(scores, nan=np.nan, posinf=0), np.float32, (n, depth), "scores")
    falling = (scores[:, 1:] < scores[:, :-1]).any()
    require(
        (scores[:, 0] == 0).all() and not falling, "scores of candidates fall, or begin above 0"
    )
    for name, dtype in (
        *(("relevant", np.uint8), ("totals", np.int64)),
        *(("uncertainty", np.float64), ("selection_score", np.float64)),
    ):
        require_array(arrays[name], dtype, (n, depth) if name == "relevant" else (n,), name)
    if "clusters" in arrays:
        require_array(arrays["clusters"], np.int64, (n,), "clusters")
    if labels is not None:
        require_array(labels, np.int64, (n,), "labels")
    relevant = np.count_nonzero(arrays["relevant"], axis=1)
    require((arrays["totals"] >= relevant).all(), "totals below the relevant candidates")
    require(np.isfinite(arrays["uncertainty"]).all(), "uncertainties that are not finite")
    return ScoredResults.from_arrays(arrays, groups, cluster, labels)


def _try(rule: SetRule, gallery: Gallery, distinct: Distinct) -> None:
    """Score made-up queries: exceptions, scores that fall, and overflows show what shapes do not.

    Their uncertainties are some of the tuning split.
    """
    depth = rule.calibration.depth
    uncertainty = np.quantile(rule.tuning.require("uncertainty"), (0, 0.5, 1))
    shape = (len(uncertainty), depth)
    has_labels = gallery.labels is not None
    queries = SearchResults(
        uncertainty,
        depth,
        distances=np.broadcast_to(np.linspace(0.1, 1, depth, dtype=np.float32), shape),
        labels=np.broadcast_to(np.arange(depth) // 2, shape) if has_labels else None,
        candidate_uncertainty=None
        if gallery.uncertainty is None
        else np.full(shape, np.median(gallery.uncertainty)),
        votes=None if gallery.relevance is None or has_labels else np.ones(shape, int),
    )
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        if distinct is not None:
            queries = queries.first_of_each_label()
        ranking = rule.score_function.rank(queries)
    scores = ranking.scores
    exists = ranking.take(queries.is_candidate)
    falling = (scores[:, 1:] < scores[:, :-1]).any()
    require(
        np.isfinite(scores[exists]).all() and (scores[:, 0] == 0).all() and not falling,
        f"scores by {rule.score_function.name} are not finite, fall, or begin above 0",
    )
    require(np.isfinite(ranking.selection_score).all(), "selection scores that are not finite")
