"""Record what calibrated retrievers answer, to compare the code before and after a restructuring.

    python -m tests.behaviour_record write record.json
    python -m tests.behaviour_record compare record.json

Both run on one machine: distances depend on the CPU in their last digits. For every kind of
relevance, score function and division of queries, each request of a grid is recorded as its
guarantee, the ids and sizes of the sets of some queries, or the class of its error. Guarantees and
answers are those of `to_dict`; everything goes through the public interface.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import rcir
from rcir.data import WithinRadius
from rcir.errors import RcirError
from rcir.index import IndexConfig

CLASSES, GALLERY, QUERIES, TEST, DIMENSIONS = 12, 240, 420, 8, 16
SCORE_FUNCTIONS = ("constant", "minmax", "quantile", "learned", "reranked", "auto")
EACH_ALPHA = (0.02, 0.05, 0.1, 0.2, 0.4)

REQUESTS: list[dict[str, Any]] = [
    {"delta": None},
    {"risk": "recall"},
    {"risk": "false-discovery"},
    {"distinct": "label"},
    {"distinct": "label", "risk": "recall"},
    {"abstain": True},
    {"simultaneous": True},
    {"anytime": True},
    {"max_size": 3},
    {"max_size": 10, "simultaneous": True},
    {"group": "day"},
    {"group": "night"},
    {"group": "unknown"},
    {"mix": "any"},
    {"mix": {"day": 0.25, "night": 0.75}},
    {"mix": {"day": 0.25}},
    {"query_labels": "new"},
    {"query_labels": "any"},
    {"query_labels": "any", "risk": "recall"},
    {"alpha": {"miss": 0.1, "recall": 0.3}},
    {"alpha": {"miss": 0.1, "false-discovery": 0.6}},
    {"alpha": 0},
    {"alpha": 1.5},
    {"delta": 0.0},
    {"risk": "unknown"},
    {"abstain": True, "risk": "recall"},
    {"anytime": True, "mix": "any"},
    {"simultaneous": True, "delta": None},
]


def population(seed: int, n: int, groups: bool = True) -> dict[str, Any]:
    """Draw `n` vectors of the same classes; those of the group "night" are noisier."""
    centres = np.random.default_rng(0).standard_normal((CLASSES, DIMENSIONS))
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=n)
    night = rng.random(n) < 0.3
    noise = np.where(night, 1.4, 0.7)[:, None]
    vectors = (centres[labels] + noise * rng.standard_normal((n, DIMENSIONS))).astype(np.float32)
    return {
        "vectors": vectors,
        "labels": np.array([f"class {label:02d}" for label in labels]),
        "uncertainty": (noise[:, 0] * np.exp(0.2 * rng.standard_normal(n))).astype(np.float32),
        "groups": np.where(night, "night", "day"),
        "clusters": np.array([f"cluster {cluster}" for cluster in rng.integers(n // 2, size=n)]),
        "places": centres[labels, :2] * 10 + rng.standard_normal((n, 2)),
    }


def shared(labels: Any) -> list[list[str]]:
    """Give each label a second name that it shares with another one."""
    return [[str(label), f"family {int(str(label)[-2:]) // 2}"] for label in labels]


Case = tuple[rcir.Retriever, dict[str, Any]]  # not calibrated; arguments of `calibrate`


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield each case: its name, and what builds it."""
    gallery, queries = population(1, GALLERY), population(2, QUERIES)
    ids = [f"item {row:03d}" for row in range(GALLERY)]
    build = rcir.Retriever.from_embeddings

    def of_labels(**options: Any) -> rcir.Retriever:
        return build(gallery["vectors"], ids, gallery["labels"], **options)

    asked = {"queries": queries["vectors"], "labels": queries["labels"], "query_uncertainty": "gap"}
    grouped = asked | {"groups": queries["groups"]}
    for name in SCORE_FUNCTIONS:
        yield f"labels, {name}", lambda name=name: (of_labels(), grouped | {"score_function": name})
    for name in ("cosine", "vote", "agreement", "overlap", "auto"):
        yield (
            f"labels, uncertainty {name}",
            lambda name=name: (
                of_labels(),
                grouped | {"score_function": "quantile", "query_uncertainty": name},
            ),
        )
    yield (
        "labels, encoder's uncertainty",
        lambda: (
            of_labels(uncertainty=gallery["uncertainty"]),
            grouped
            | {
                "score_function": "quantile",
                "uncertainty": queries["uncertainty"],
                "query_uncertainty": "encoder",
            },
        ),
    )
    yield (
        "labels, euclidean, shallow",
        lambda: (of_labels(metric="euclidean", depth=20), grouped | {"score_function": "minmax"}),
    )
    for bound in ("hoeffding-bentkus", "betting"):
        yield (
            f"labels, bound {bound}",
            lambda bound=bound: (
                of_labels(),
                asked | {"score_function": "quantile", "bound": bound},
            ),
        )
    yield (
        "labels, clusters",
        lambda: (
            of_labels(),
            asked | {"score_function": "quantile", "clusters": queries["clusters"]},
        ),
    )
    yield (
        "labels, clusters and groups",
        lambda: (
            of_labels(),
            grouped | {"score_function": "quantile", "clusters": queries["clusters"]},
        ),
    )
    for tuning in ("labels", "gallery"):
        yield (
            f"labels, tuned on {tuning}",
            lambda tuning=tuning: (
                of_labels(),
                grouped | {"score_function": "quantile", "tuning": tuning},
            ),
        )
    yield (
        "labels, few queries",
        lambda: (
            of_labels(),
            {name: value[:90] if len(value) == QUERIES else value for name, value in asked.items()},
        ),
    )
    yield (
        "labels, FAISS inverted lists",
        lambda: (
            of_labels(index=IndexConfig("ivf")),
            asked | {"score_function": "quantile"},
        ),
    )
    for clusters in ("auto", None, gallery["clusters"]):
        kind = clusters if isinstance(clusters, str | None) else "passed"
        yield (
            f"leave one out, clusters {kind}",
            lambda clusters=clusters: (
                of_labels(leave_one_out=True, clusters=clusters),
                {
                    "queries": gallery["vectors"],
                    "labels": gallery["labels"],
                    "score_function": "quantile",
                },
            ),
        )
    yield (
        "shared labels",
        lambda: (
            build(gallery["vectors"], ids, shared(gallery["labels"])),
            grouped | {"labels": shared(queries["labels"]), "score_function": "quantile"},
        ),
    )
    yield (
        "places",
        lambda: (
            build(gallery["vectors"], ids, WithinRadius(gallery["places"], 3.0)),
            grouped
            | {"labels": WithinRadius(queries["places"], 3.0), "score_function": "quantile"},
        ),
    )
    table = [
        [ids[row] for row in np.flatnonzero(gallery["labels"] == label)[:5]]
        for label in queries["labels"]
    ]
    yield (
        "table of matches",
        lambda: (
            build(gallery["vectors"], ids),
            grouped | {"labels": table, "score_function": "quantile"},
        ),
    )
    yield "no matches at all", lambda: (of_labels(), asked | {"labels": ["other"] * QUERIES})
    yield "wrong dimension", lambda: (of_labels(), asked | {"queries": queries["vectors"][:, :5]})
    yield "unknown score function", lambda: (of_labels(), asked | {"score_function": "unknown"})


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the class of the error of this package."""
    try:
        return call()
    except RcirError as error:
        return type(error).__name__


def record() -> dict[str, Any]:
    """Return the answers of all cases by their names."""
    return {name: outcome(lambda build=build: _case(*build())) for name, build in cases()}


def _case(retriever: rcir.Retriever, arguments: dict[str, Any]) -> dict[str, Any]:
    retriever.calibrate(arguments.pop("queries"), arguments.pop("labels"), **arguments)
    answers = _answers(retriever, "uncertainty" in arguments)
    with tempfile.TemporaryDirectory() as folder:
        loaded = rcir.load(retriever.save(Path(folder) / "saved"))
        assert _answers(loaded, "uncertainty" in arguments) == answers
    return answers


def _answers(retriever: rcir.Retriever, with_uncertainty: bool) -> dict[str, Any]:
    test = population(3, TEST)
    given = {"uncertainty": test["uncertainty"]} if with_uncertainty else {}
    grid = [{"alpha": alpha} for alpha in EACH_ALPHA] + REQUESTS
    answers = {}
    for options in grid:
        request = {"alpha": 0.1, "delta": 0.1} | options
        answers[json.dumps(options)] = {
            "guarantee": outcome(lambda r=request: retriever.guarantee(**r).to_dict()),
            "sentence": outcome(lambda r=request: bool(str(retriever.guarantee(**r)))),
            "answers": outcome(
                lambda r=request: [
                    answer.own_values()
                    for answer in retriever.retrieve(test["vectors"], **r, **given)
                ]
            ),
        }
    plain: dict[str, Any] = json.loads(json.dumps(answers))
    return plain


def main() -> int:
    """Write or compare a record; return 1 if something differs."""
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "compare"):
        print(__doc__)
        return 2
    file = Path(sys.argv[2])
    warnings.simplefilter("ignore")
    actual = record()
    if sys.argv[1] == "write":
        file.write_text(json.dumps(actual, indent=0, sort_keys=True))
        print(f"{len(actual)} cases with {sum(map(len, actual.values()))} requests")
        return 0
    expected = json.loads(file.read_text())
    different = [
        f"{name}: {request}"
        for name in expected | actual
        for request in _different(expected.get(name), actual.get(name))
    ]
    print("\n".join(different) or f"{len(actual)} cases are equal")
    return 1 if different else 0


def _different(expected: Any, actual: Any) -> list[str]:
    if isinstance(expected, dict) and isinstance(actual, dict):
        return [key for key in expected | actual if expected.get(key) != actual.get(key)]
    return [] if expected == actual else [f"{expected} is now {actual}"]


if __name__ == "__main__":
    sys.exit(main())
