"""Warnings of bursts: how often a guarantee fails, how often there is a warning, and without one.

Vectors of 20 labels in 16 dimensions. Frames of a burst are near-copies of one query. For each
calibration, the risk of the certified sets is measured on further independent queries. The last
rows of the table are populations of independent queries, in which every warning is a false alarm:
clumpy ones, ones with heavy tails or ties, and queries of another camera than the gallery's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from common import parser, report, sized
from numpy.typing import NDArray

from rcir import Retriever
from rcir.errors import RiskUnattainable
from rcir.risk import LabelledResults

Vectors: TypeAlias = NDArray[np.floating[Any]]
Generator: TypeAlias = np.random.Generator
LABELS, DIMENSIONS, NOISE, FRAME_NOISE = 20, 16, 1.2, 0.1
ITEMS, TUNING, IN_USE, DEPTH = sized((1000, 180, 10_000, 100), (200, 60, 200, 20))
ALPHA, DELTA = 0.2, 0.1
FIRST, ADDED, TIMES = 200, 100, 5  # queries before a calibration is extended, each time, and times
CENTRES = np.random.default_rng(0).standard_normal((LABELS, DIMENSIONS))


def drawn(rng: Generator, n: int, bursts: Sequence[int] = ()) -> tuple[Vectors, NDArray[np.int64]]:
    """Return n shuffled queries with labels, of which some come in bursts of these sizes."""
    counts = np.concatenate([np.ones(n - sum(bursts), int), np.array(bursts, int)])
    labels = rng.integers(LABELS, size=len(counts))
    vectors = CENTRES[labels] + NOISE * rng.standard_normal((len(counts), DIMENSIONS))
    rows = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    return vectors[rows] + FRAME_NOISE * rng.standard_normal((n, DIMENSIONS)), labels[rows]


def built(items: tuple[Vectors, NDArray[np.int64]], leave_one_out: bool = False) -> Retriever:
    return Retriever.from_embeddings(
        items[0], None, items[1], "euclidean", depth=DEPTH, leave_one_out=leave_one_out
    )


def searched(retriever: Retriever, queries: tuple[Vectors, NDArray[np.int64]]) -> LabelledResults:
    return retriever.search_labelled(retriever.labelled(*queries))


def exceeds(retriever: Retriever, in_use: LabelledResults, **options: Any) -> bool:
    """Return True if the sets of further queries miss more than alpha."""
    try:
        threshold = retriever.guarantee(ALPHA, DELTA, **options).threshold
    except RiskUnattainable:
        return False
    calibration = retriever.calibration
    assert calibration is not None
    sizes = calibration.main.score_function.sizes(in_use.results, threshold)
    return bool(np.mean(in_use.ranks > sizes) > ALPHA)


def calibrated(n: int, bursts: Sequence[int] = ()) -> Callable[[Generator], bool]:
    """A calibration with n queries."""

    def violated(rng: Generator) -> bool:
        retriever = built(drawn(rng, ITEMS))
        tuning, calibration = (
            searched(retriever, drawn(rng, *size)) for size in ((TUNING,), (n, bursts))
        )
        retriever.calibrate_splits(tuning, calibration, "minmax", alphas=(ALPHA,))
        return exceeds(retriever, searched(retriever, drawn(rng, IN_USE)))

    return violated


def extended(bursts: Sequence[int] = ()) -> Callable[[Generator], bool]:
    """A calibration that is extended; it is violated if it is at any moment."""

    def violated(rng: Generator) -> bool:
        retriever = built(drawn(rng, ITEMS))
        retriever.calibrate_splits(
            *(searched(retriever, drawn(rng, n)) for n in (TUNING, FIRST)),
            "minmax",
            alphas=(ALPHA,),
        )
        in_use, wrong = searched(retriever, drawn(rng, IN_USE)), False
        for _ in range(TIMES):
            retriever.extend_calibration(searched(retriever, drawn(rng, ADDED, bursts)))
            wrong |= exceeds(retriever, in_use, anytime=True)
        return wrong

    return violated


def left_out(bursts: Sequence[int] = ()) -> Callable[[Generator], bool]:
    """A calibration with the items of the gallery, and queries that are new images."""

    def violated(rng: Generator) -> bool:
        items = drawn(rng, ITEMS, bursts)
        retriever, half = built(items, leave_one_out=True), ITEMS // 3
        retriever.calibrate_splits(
            *(
                searched(retriever, (items[0][rows], items[1][rows]))
                for rows in (np.s_[:half], np.s_[half:])
            ),
            "minmax",
            alphas=(ALPHA,),
        )
        return exceeds(retriever, searched(retriever, drawn(rng, IN_USE)))

    return violated


Draw: TypeAlias = Callable[[Generator, int], Vectors]


def independent(draw: Draw, camera: float = 0.0) -> Callable[[Generator], bool]:
    """A calibration of one label with independent queries, in a space of their own."""

    def violated(rng: Generator) -> bool:
        items, *splits = (draw(rng, n) for n in (ITEMS // 2, TUNING, 300))
        retriever = built((items, np.zeros(len(items), np.int64)))
        retriever.calibrate_splits(
            *(
                searched(retriever, (split + camera, np.zeros(len(split), np.int64)))
                for split in splits
            ),
            "constant",
            alphas=(ALPHA,),
        )
        return False

    return violated


def gaussian(noise: float) -> Draw:
    return lambda rng, n: (
        CENTRES[rng.integers(LABELS, size=n)] + noise * rng.standard_normal((n, DIMENSIONS))
    )


def few(rng: Generator, n: int) -> Vectors:
    """Zipf's clumps: some hold a tenth of all, many one or two."""
    return (rng.zipf(1.5, size=(n, 1)) % 1e6) + 1e-3 * rng.uniform(size=(n, 2))


HOLDS = {
    "420 independent": calibrated(420),
    "five times 100 added, independent": extended(),
    "leave-one-out, independent": left_out(),
}
BURSTS = {
    "420, two bursts of 40": calibrated(420, [40] * 2),
    "420, one of 80": calibrated(420, [80]),
    "420, four of 19": calibrated(420, [19] * 4),
    "420, ten of 5": calibrated(420, [5] * 10),
    "420, all in bursts of 6": calibrated(420, [6] * 70),
    "1400, one of 266": calibrated(1400, [266]),
    "five times 100 added, in bursts of 20": extended([20] * 5),
    "five times 100 added, two bursts of 10": extended([10] * 2),
    "leave-one-out, all in bursts of 5": left_out([5] * (ITEMS // 5)),
    "leave-one-out, a third in bursts of 5": left_out([5] * (ITEMS // 15)),
}
INDEPENDENT = {
    "gaussian": independent(gaussian(NOISE)),
    "tight labels": independent(gaussian(0.05)),
    "points": independent(gaussian(1e-4)),
    "line": independent(lambda rng, n: rng.uniform(size=(n, 1))),
    "plane": independent(lambda rng, n: rng.uniform(size=(n, 2))),
    "heavy tails": independent(lambda rng, n: rng.standard_cauchy((n, 3))),
    "few clumps and many": independent(few),
    "another camera": independent(gaussian(NOISE), camera=1.0),
}


def outcomes(mode: Callable[[Generator], bool], seed: int, draws: int) -> NDArray[np.bool_]:
    """(draws, 2) whether a calibration was violated, and whether there was a warning of bursts."""
    rows = []
    for draw in range(draws):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            violated = mode(np.random.default_rng([seed, draw]))
        rows.append((violated, any("photographs of one burst" in str(w.message) for w in caught)))
    return np.array(rows)


def main() -> None:
    """Measure all modes."""
    command = parser(__doc__)
    command.add_argument("--seed", type=int, default=1, help="decides populations and draws")
    command.add_argument("--draws", type=int, default=sized(200, 1), help="of each row")
    options = command.parse_args()
    rows, figures = [], {"worst_unwarned_excess": -1.0, "least_power": 1.0, "false_alarms": 0.0}
    for name, mode in {**HOLDS, **BURSTS, **INDEPENDENT}.items():
        violated, warned = outcomes(mode, options.seed, options.draws).T
        unwarned = np.mean(violated & ~warned)
        violations = "" if name in INDEPENDENT else f"{violated.mean():.3f}"
        missed = "" if name in INDEPENDENT else f"{unwarned:.3f}"
        rows.append((name, violations, f"{warned.mean():.3f}", missed))
        figures["worst_unwarned_excess"] = max(figures["worst_unwarned_excess"], unwarned - DELTA)
        if name in BURSTS:
            figures["least_power"] = min(figures["least_power"], warned.mean())
        else:
            figures["false_alarms"] = max(figures["false_alarms"], warned.mean())
    title = f"calibrations at alpha = {ALPHA}, delta = {DELTA}, {options.draws} of each row"
    columns = ["queries", "violated", "warned", "violated without a warning"]
    report(title, columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
