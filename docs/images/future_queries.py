"""Make `future_queries.png` for the page on future queries, and print its numbers.

Run `.venv/bin/python docs/images/future_queries.py`; it takes about ten seconds.

A query is missed at threshold t with probability exp(-t / difficulty), so that the true risk of a
threshold is known. Each case draws calibration queries, certifies alpha = 0.1 at delta = 0.1, and
computes the risk for the queries that come later.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from rcir.figures import BLUE, RED
from rcir.risk import Population, Request, ScoredResults, certify, make_request

OUTPUT = Path(__file__).with_suffix(".png")
ALPHA, DELTA, DRAWS = 0.1, 0.1, 2000
UNITS, PER_UNIT = 50, 20  # labels or videos that calibrate, and queries of each
SITES = {"a": 0.6, "b": 0.3, "c": 0.1}  # shares of the calibration queries
LATER = {"a": 0.2, "b": 0.3, "c": 0.5}  # of future queries
HARD = {"a": 0.6, "b": 1.0, "c": 1.6}  # difficulty
COLOURS = 32  # of the palette

Difficulties = NDArray[np.float64]
Outcome = tuple[ScoredResults, Request, Difficulties]

PLAIN = make_request(ALPHA, DELTA)
rng = np.random.default_rng(0)


def queries_at(match_scores: NDArray[np.float64]) -> ScoredResults:
    """Return queries that are missed below these scores."""
    scores = np.stack([np.zeros(len(match_scores)), match_scores], axis=1)
    return ScoredResults.from_scores(
        scores.astype(np.float32), np.tile([False, True], (len(scores), 1))
    )


def queries_of(difficulty: Difficulties) -> ScoredResults:
    """Return independent queries, one of each difficulty."""
    return queries_at(difficulty * rng.exponential(size=len(difficulty)))


def difficulties(n: int) -> Difficulties:
    """Return the difficulties of n labels."""
    return rng.lognormal(sigma=0.7, size=n)


NUMBER = np.repeat(np.arange(UNITS), PER_UNIT)  # of the unit of each query


def by_unit(queries: ScoredResults) -> ScoredResults:
    """Return the queries with the unit of each as its cluster."""
    population = Population(len(queries), clusters=NUMBER, cluster_word="unit")
    return replace(queries, population=population)


NEW_LABELS = difficulties(5_000)  # a sample of the labels that come later


def same_labels() -> Iterable[Outcome]:
    """Future queries have the labels of the calibration queries."""
    labels = difficulties(UNITS)
    yield queries_of(rng.choice(labels, UNITS * PER_UNIT)), PLAIN, labels


def new_labels() -> Iterable[Outcome]:
    """Future queries have new labels: by queries, then by labels."""
    queries = queries_of(difficulties(UNITS)[NUMBER])
    yield queries, PLAIN, NEW_LABELS
    yield by_unit(queries), PLAIN, NEW_LABELS


def new_videos() -> Iterable[Outcome]:
    """Future queries are of new videos, whose frames are nearly alike: the same."""
    videos = rng.exponential(size=UNITS)[NUMBER] * rng.uniform(0.95, 1.05, size=len(NUMBER))
    yield queries_at(videos), PLAIN, np.ones(1)
    yield by_unit(queries_at(videos)), PLAIN, np.ones(1)


def other_shares() -> Iterable[Outcome]:
    """Hard sites send more queries than before: without and with the option `mix`."""
    site = rng.choice(list(SITES), UNITS * PER_UNIT, p=list(SITES.values()))
    queries = queries_of(np.array([HARD[name] for name in site]))
    queries = replace(queries, population=Population(len(site), groups=site))
    later = np.repeat(list(HARD.values()), [round(100 * share) for share in LATER.values()])
    yield queries, PLAIN, later
    yield queries, make_request(ALPHA, DELTA, mix="any"), later


def other_population() -> Iterable[Outcome]:
    """Queries become harder: the old calibration, then one with queries of the new kind."""
    for difficulty in (1.0, 1.5):
        yield queries_of(np.full(UNITS * PER_UNIT, difficulty)), PLAIN, np.array([1.5])


CASES: list[tuple[str, Callable[[], Iterable[Outcome]], tuple[str, ...]]] = [
    ("1 same labels", same_labels, ("default",)),
    ("2 new labels", new_labels, ("default", "by label")),
    ("3 other shares of sites", other_shares, ("default", 'mix="any"')),
    ("4 new videos", new_videos, ("default", "by cluster")),
    ("5 another population", other_population, ("default", "calibrated again")),
]


def share_of_failures(case: Callable[[], Iterable[Outcome]]) -> list[float]:
    """Return the share of calibrations whose true risk is above alpha, by option."""
    failures = []
    for _ in range(DRAWS):
        risks = []
        for queries, request, later in case():
            threshold = certify(request, queries).threshold
            risks.append(np.exp(-threshold / later).mean())
        failures.append(np.array(risks) > ALPHA)
    shares: list[float] = np.mean(failures, axis=0).tolist()
    return shares


def main() -> None:
    """Simulate all cases, print the shares, and draw them as bars."""
    figure = Figure(figsize=(7.4, 3.2), layout="constrained", dpi=130)
    axes = figure.subplots()
    for number, (name, case, options) in enumerate(CASES):
        shares = share_of_failures(case)
        print(f"{name}:", *(f"{o} {s:.3f}" for o, s in zip(options, shares, strict=True)))
        for row, (option, share) in enumerate(zip(options, shares, strict=True)):
            place = number + 0.36 * (row - (len(options) - 1) / 2)
            axes.barh(place, share, 0.32, color=RED if share > 2 * DELTA else BLUE)
            axes.text(
                max(share, DELTA) + 0.01, place, f"{option}: {share:.2f}", va="center", fontsize=8
            )
    axes.axvline(DELTA, color="black", linestyle="--", linewidth=0.8)
    axes.set_yticks(range(len(CASES)), [name for name, *_ in CASES])
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.2), xlabel="share of calibrations that break the promise (dashed: delta)")
    axes.spines[["top", "right"]].set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    Image.open(file).convert("RGB").quantize(COLOURS).save(OUTPUT, optimize=True)
    print(f"{OUTPUT}: {OUTPUT.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
