"""Photographs of one moment in a gallery whose items calibrate: how often the promise is broken.

Vectors of 60 labels in 16 dimensions; a quarter of the photographs is hard. In each row, a share of
the photographs are pairs of one moment, at some of the usual distance from their label's centre.
Every calibration is measured on further independent photographs. Clusters are left out as they are
("declared"), as `rcir.data.bursts` finds them ("found"), or not at all ("apart", the broken
variant). "Mean loss" is the size that the betting bound on the mean loss of each declared cluster
needs, in place of the exact bound on one photograph of each.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
from common import parser, report, sized
from numpy.typing import NDArray

from rcir import Retriever
from rcir.data.bursts import find_moments
from rcir.errors import RiskUnattainable
from rcir.retrieval.tuning import CalibrationOptions, divide_queries
from rcir.risk import LabelledResults, fit_score_function, order_statistic, score
from rcir.risk.certification import mean_loss
from rcir.risk.losses import MISS
from rcir.risk.results import widened

Vectors: TypeAlias = NDArray[np.floating[Any]]
LABELS, DIMENSIONS, EASY, HARD = 60, 16, 0.7, 1.4
ITEMS, NEW, DEPTH = sized((1500, 2000, 60), (400, 200, 20))
ALPHAS, DELTA = (0.05, 0.1), 0.1
SHARES, DISTANCES = (0.09, 0.15, 0.3), (0.1, 0.3, 0.6)
VARIANTS = ("declared", "found", "apart")


def drawn(
    rng: np.random.Generator, n: int, centres: Vectors, share: float = 0.0, distance: float = 0.0
) -> tuple[Vectors, NDArray[np.int64], NDArray[np.int64]]:
    """Return n photographs with labels and moments, of which a share are pairs of one moment."""
    pairs = round(share * n / 2)
    moments = np.r_[np.arange(n - pairs), rng.permutation(n - pairs)[:pairs]]
    labels = rng.integers(LABELS, size=n - pairs)
    spread = np.where(rng.random(n - pairs) < 0.25, HARD, EASY)[:, None]
    scenes = centres[labels] + spread * rng.standard_normal((n - pairs, DIMENSIONS))
    vectors = scenes[moments]
    shots = rng.standard_normal((pairs, DIMENSIONS))
    vectors[n - pairs :] += distance * spread[moments[n - pairs :]] * shots
    return vectors, labels[moments], moments


def measured(seed: list[int], share: float, distance: float) -> dict[str, list[float] | float]:
    """Return risks and sizes of each variant, the sizes by mean losses, and the power."""
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((LABELS, DIMENSIONS))
    vectors, labels, moments = drawn(rng, ITEMS, centres, share, distance)
    new, new_labels, _ = drawn(rng, NEW, centres)
    values: dict[str, list[float] | float] = {}
    variants = ("found", "apart") if share == 0 else VARIANTS
    for variant in variants:
        clusters: Any = {"declared": moments.astype(str), "found": "auto", "apart": None}[variant]
        retriever = Retriever.from_embeddings(
            vectors, None, labels, "euclidean", depth=DEPTH, leave_one_out=True, clusters=clusters
        )
        searcher = retriever.searcher
        queries = searcher.labelled(vectors, labels)
        tuned, calibrated = divide_queries(searcher, queries, "queries", CalibrationOptions())
        assert tuned is not None
        tuning, calibration = searcher.search_labelled(tuned), searcher.search_labelled(calibrated)
        in_use = searcher.search_labelled(searcher.labelled(new, new_labels))
        function, _ = fit_score_function(
            "reranked", tuning.results, tuning.relevant, ALPHAS, DELTA, n_relevant=tuning.n_relevant
        )
        scored = score(function, calibration)
        thresholds = [order_statistic(alpha, DELTA, scored).threshold for alpha in ALPHAS]
        served = score(function, in_use)
        values[variant] = [
            *(float((served.match_score > widened(limit)).mean()) for limit in thresholds),
            *(float(served.sizes(limit).mean()) for limit in thresholds),
        ]
        if variant == "declared":
            units = searcher.units(tuned, queries)
            assert units is not None
            rest = queries[~np.isin(units[1], units[0])]  # all photographs of what calibrates
            values["mean loss"] = mean_loss_sizes(
                function,
                searcher.search_labelled(rest),
                searcher.gallery.units_of(rest.identities),
                tuning,
                searcher.gallery.units_of(tuned.identities),
                served,
            )
        if variant == "found" and share:
            found = find_moments(vectors.astype(np.float32), labels)
            first = ITEMS - round(share * ITEMS / 2)
            values["power"] = float(np.mean(found[first:] == found[moments[first:]]))
    return values


def mean_loss_sizes(
    function: Any,
    calibration: LabelledResults,
    clusters: NDArray[np.int64],
    tuning: LabelledResults,
    tuning_clusters: NDArray[np.int64],
    served: Any,
) -> list[float]:
    """Return the sizes at each alpha by the mean loss of each cluster."""
    parts = [
        score(function, replace(part, clusters=units, cluster="moment"))
        for part, units in ((calibration, clusters), (tuning, tuning_clusters))
    ]
    sizes = []
    for alpha in ALPHAS:
        try:
            limit = mean_loss(MISS, alpha, DELTA, parts[0], parts[1], "betting").threshold
            sizes.append(float(served.sizes(limit).mean()))
        except RiskUnattainable:
            sizes.append(np.nan)
    return sizes


def main() -> None:
    """Measure all rows."""
    command = parser(__doc__)
    command.add_argument("--seed", type=int, default=1, help="decides populations and draws")
    command.add_argument("--draws", type=int, default=sized(400, 1), help="of each row")
    command.add_argument("--distance", type=float, nargs="+", default=DISTANCES, help="of pairs")
    options = command.parse_args()
    limit = DELTA + 3 * np.sqrt(DELTA * (1 - DELTA) / options.draws)
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {"limit": limit}
    for share, distance in [(0.0, 0.0), *((s, d) for d in options.distance for s in SHARES)]:
        seeds = [[options.seed, draw] for draw in range(options.draws)]
        with ProcessPoolExecutor() as pool:
            draws = list(pool.map(measured, seeds, repeat(share), repeat(distance)))
        name = f"{100 * share:g}%" + f" at {distance:g}" * (share > 0)
        sizes = {}
        for variant in [each for each in VARIANTS if each in draws[0]]:
            values = np.array([draw[variant] for draw in draws])
            violated = (values[:, : len(ALPHAS)] > ALPHAS).mean(axis=0)
            sizes[variant] = values[:, len(ALPHAS) :].mean(axis=0)
            for alpha, rate in zip(ALPHAS, violated, strict=True):
                figures[f"violated_{variant}_{share:g}_{distance:g}_{alpha:g}"] = float(rate)
            power = "-"
            if variant == "found" and share:
                pairs_found = float(np.mean([draw["power"] for draw in draws]))
                figures[f"pairs_found_{share:g}_{distance:g}"] = pairs_found
                power = f"{pairs_found:.2f}"
            rows.append(
                (
                    name,
                    variant,
                    *(f"{rate:.3f}" for rate in violated),
                    *(f"{size:.3f}" for size in sizes[variant]),
                    power,
                )
            )
        if share == 0:
            figures["size_found_over_apart_without_bursts"] = float(
                (sizes["found"] / sizes["apart"]).max()
            )
        else:
            losses = np.array([draw["mean loss"] for draw in draws]).mean(axis=0)
            figures[f"mean_loss_over_one_of_each_{share:g}_{distance:g}"] = float(
                (losses / sizes["declared"]).min()
            )
            rows.append((name, "mean loss", "-", "-", *(f"{size:.3f}" for size in losses), "-"))
        print(*rows[-4:], sep="\n", flush=True)
    title = f"delta = {DELTA}, {options.draws} calibrations of each row; limit {limit:.3f}"
    levels = [f"{alpha:g}" for alpha in ALPHAS]
    columns = ["pairs", "clusters", *(f"violated at {level}" for level in levels)]
    columns += [*(f"size at {level}" for level in levels), "pairs found"]
    report(title, columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
