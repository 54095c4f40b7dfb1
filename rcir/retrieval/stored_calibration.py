"""Risk controllers as arrays and a description, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.retrieval.gallery import Gallery
from rcir.retrieval.stored_parts import (
    CONTROLLER,
    require,
    require_array,
    require_fields,
    require_texts,
)
from rcir.risk import (
    LabelledResults,
    RiskController,
    ScoreFunction,
    SearchResults,
    score_function_class,
)
from rcir.risk.request import Distinct

Arrays = Mapping[str, NDArray[Any]]
INTEGERS = ("uses", "feature")  # of the arrays of score functions; the others are floats


def describe_controllers(
    controllers: Mapping[Distinct, RiskController],
) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """Describe controllers by plain values, one dictionary each, and all their arrays."""
    described = []
    arrays: dict[str, NDArray[Any]] = {}
    for distinct, controller in controllers.items():
        groups = None if controller.groups is None else controller.groups.tolist()
        stored = {"main": controller} | {str(risk): own for risk, own in controller.own.items()}
        described.append(
            {
                "distinct": distinct,
                "score_functions": {risk: one.score_function.name for risk, one in stored.items()},
                "bound": controller.bound,
                "groups": groups,
                "cluster": controller.cluster,
                "growing": controller.growing,
            }
        )
        for risk, one in stored.items():
            for part, values in (
                ("score_function", one.score_function.state()),
                ("tuning", one.tuning.arrays()),
                ("calibration", one.calibration.arrays()),
            ):
                place = f"{distinct}.{risk}.{part}"
                arrays |= {f"{place}.{name}": array for name, array in values.items()}
    return described, arrays


def controllers_of(
    described: list[Any], arrays: Arrays, gallery: Gallery
) -> dict[Distinct, RiskController]:
    """The controllers that were described.

    Raises:
        ValueError, KeyError, RcirError, and other exceptions: they are none.
    """
    for kind in described:
        require_fields(kind, CONTROLLER, "a controller")
    kinds = [kind["distinct"] for kind in described]
    known = [None] if gallery.labels is None else [None, "label"]
    require(kinds == known, f"controllers of {kinds}, needed are those of {known}")
    left = dict(arrays)
    controllers = {kind["distinct"]: _controller(kind, left) for kind in described}
    require(not left, f"there are further arrays: {', '.join(left)}")
    for distinct, controller in controllers.items():
        for one in (controller, *controller.own.values()):
            _try(one, gallery, distinct)
    sizes = {(len(one.tuning), len(one.calibration)) for one in controllers.values()}
    require(len(sizes) == 1, "controllers of different queries")
    return controllers


def _controller(kind: dict[str, Any], left: dict[str, NDArray[Any]]) -> RiskController:
    """One controller, with those of risks of their own; its arrays are taken out of those left."""
    require_texts(kind["score_functions"], "score_functions")
    groups = kind["groups"]
    if groups is not None:
        require_texts(groups, "groups")
        groups = np.array(groups, str)

    def part(risk: str, name: str) -> dict[str, NDArray[Any]]:
        prefix = f"{kind['distinct']}.{risk}.{name}."
        names = [key for key in left if key.startswith(prefix)]
        return {key.removeprefix(prefix): left.pop(key) for key in names}

    def stored(risk: str, own: dict[str, RiskController]) -> RiskController:
        return RiskController(
            _score_function(kind["score_functions"][risk], part(risk, "score_function")),
            _results(part(risk, "tuning"), None, kind["cluster"]),
            _results(part(risk, "calibration"), groups, kind["cluster"]),
            kind["bound"],
            own,
            kind["growing"],
        )

    return stored(
        "main", {risk: stored(risk, {}) for risk in kind["score_functions"] if risk != "main"}
    )


def _score_function(name: str, state: Arrays) -> ScoreFunction:
    for key, values in state.items():
        dtype = np.int64 if key in INTEGERS else np.float64
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
    arrays: Arrays, groups: NDArray[np.str_] | None, cluster: str | None
) -> LabelledResults:
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
    return LabelledResults.from_arrays(arrays, groups, cluster)


def _try(controller: RiskController, gallery: Gallery, distinct: Distinct) -> None:
    """Score queries that there might be, with numbers from the tuning split: exceptions, scores
    that fall and overflows say what shapes alone do not.
    """
    depth = controller.depth
    known = np.quantile(controller.tuning.uncertainty, (0, 0.5, 1))
    shape = (len(known), depth)
    queries = SearchResults(
        known,
        depth,
        np.broadcast_to(np.linspace(0.1, 1, depth, dtype=np.float32), shape),
        None if gallery.labels is None else np.broadcast_to(np.arange(depth) // 2, shape),
        None if gallery.uncertainty is None else np.full(shape, np.median(gallery.uncertainty)),
        # Of labels, keys tell.
        None if gallery.relevance is None or gallery.labels is not None else np.ones(shape, int),
    )
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        if distinct is not None:
            queries = queries.distinct()
        ordered, _ = controller.score_function.ordered(queries)
        scores = controller.score_function.candidate_scores(ordered)
        selection = controller.score_function.selection_score(ordered, size=1)
    there = ordered.there
    falling = (scores[:, 1:] < scores[:, :-1]).any()
    require(
        np.isfinite(scores[there]).all() and (scores[:, 0] == 0).all() and not falling,
        f"scores by {controller.score_function.name} are not finite, fall, or begin above 0",
    )
    require(np.isfinite(selection).all(), "selection scores that are not finite")
