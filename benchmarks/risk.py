"""Risk control: how fast it calibrates, how small its sets are, and whether its guarantees hold.

(a) On 100,000 calibration queries, compared with a loop over a grid of thresholds, query by query,
as in the code of Cai et al. (AAAI 2025); on 3,000, compared with MAPIE, which treats the problem as
recall with one relevant item. (b) On encoders trained here: mean set size, and the share of 2,000
calibrations whose risk exceeds alpha. Each uses 3,000 queries, drawn with replacement from the
calibration and test queries, so that the risk is known exactly. Every score function is fitted on
the tuning split. The fair baseline of `auto` has one size for all queries and takes the same items
in the same order: one of each label where `auto` does so. "constant" takes the nearest items,
several of one label too. The rule of Cai et al. and their baselines take the range of all queries
as that of the queries at hand. (c) The same for other risks. (d) Queries until a monitor detects a
higher risk. (e) The rule of Cai et al. and their baselines beside score functions with the same
bound, on simulated queries: the rank of the only match is 1 + floor(X), X exponential with a mean
proportional to the uncertainty. Risks are exact, given the uncertainties. `--sets` without a name
leaves out (b) and (c), the parts that need encoders. `--unlabelled` measures nothing but the sizes
of (b) without labels in the gallery.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
from cai_rule import calibrate_kappa, heuristic_sets, rule_sizes
from common import DIGITS, parser, report, sized
from mapie.risk_control import MultiLabelClassificationController
from numpy.typing import NDArray

from rcir.data import ImageSet, load_splits
from rcir.errors import RiskUnattainable
from rcir.retrieval.retriever import Retriever
from rcir.risk import (
    SCORE_FUNCTIONS,
    Bound,
    Certificate,
    Constant,
    MinMax,
    Quantile,
    RiskMonitor,
    ScoredResults,
    ScoreFunction,
    SearchResults,
    allowed_misses,
    certify,
    find_risk,
    fit_score_function,
    local_level,
    make_request,
    order_statistic,
    score,
    score_ranks,
)
from rcir.risk.results import widen
from rcir.runs import folder as runs

QUERIES, DEPTH, STEP = sized(100_000, 1000), 200, 0.2
MAPIE_QUERIES, MAPIE_DEPTH, MAPIE_GRID = sized(3_000, 1000), 50, sized(200, 20)
DRAWS, CALIBRATION, DELTA = sized(2_000, 5), sized(3_000, 1000), 0.1
ALPHAS = (0.05, 0.1, 0.2)
LEVELS: dict[str, tuple[float, ...]] = {
    "recall": (0.2, 0.3, 0.5),
    "false-discovery": (0.3, 0.5, 0.6),
}
FEW, JUMPS = sized((10, 500), (1, 5))
SETS = {"digits": "digits-btl", "fashion": "fashion-btl", "omniglot": "omniglot-btl"}
SETS = sized(SETS, dict.fromkeys(SETS, "digits-btl"))
SHORTER = sized((), ("--epochs", "1", "--data.options", json.dumps(DIGITS)))
FAIR = "one size, order of auto"
CAI, RANDOM, HEURISTIC = "Cai et al.", "Cai et al., random uncertainty", "Cai et al., heuristic"
# CUB-200-2011 has 5,924 test images, of which Cai et al. calibrate on half.
TRIALS, TUNING, HALF, CANDIDATES = sized((200, 300, 2_962, 50), (2, 300, 2_962, 50))
MANY = sized(20_000, 1_000)  # queries of which risks of score functions are measured
BOUNDS: dict[str, Bound] = {"Hoeffding": "hoeffding", "exact": "binomial", "betting": "betting"}
CONFIGS = Path(__file__).parents[1] / "configs"


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median duration of a call."""
    durations = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        durations.append(time.perf_counter() - started)
    return statistics.median(durations)


def population(n: int, depth: int) -> tuple[SearchResults, NDArray[np.float64]]:
    """Draw queries with skewed uncertainties, and ranks of first matches that depend on them."""
    rng = np.random.default_rng(0)
    uncertainty = rng.lognormal(size=n)
    ranks = 1 + np.floor(rng.exponential(2 * uncertainty))
    return SearchResults(uncertainty, depth), np.where(ranks > depth, np.inf, ranks)


def grid_search(scales: list[float], ranks: list[float], alpha: float) -> float | None:
    """Raise the threshold by a step until Hoeffding's bound of the miss rate is at most alpha.

    Query by query, as in the code of Cai et al., but with K = max(1, ceil(threshold u)), and None
    if no threshold reaches alpha. Their rule itself is in `cai_rule.py`.
    """
    margin = math.sqrt(math.log(1 / DELTA) / (2 * len(ranks)))
    threshold = 0.0
    while threshold < DEPTH * len(ranks):
        misses = 0
        for scale, rank in zip(scales, ranks, strict=True):
            misses += max(1, math.ceil(threshold * scale)) < rank
        if misses / len(ranks) + margin <= alpha:
            return threshold
        threshold += STEP
    return None


def grid_search_of_arrays(
    scale: NDArray[np.float64], ranks: NDArray[np.float64], alpha: float
) -> float | None:
    """Return the threshold of `grid_search`, with all queries of a step at once."""
    margin = math.sqrt(math.log(1 / DELTA) / (2 * len(ranks)))
    for threshold in np.arange(0, DEPTH * len(ranks), STEP):
        sizes = np.maximum(1, np.ceil(threshold * scale))
        if np.mean(sizes < ranks) + margin <= alpha:
            return float(threshold)
    return None


def speed() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Measure part (a)."""
    alpha = 0.1
    results, ranks = population(QUERIES, DEPTH)
    score_function = MinMax.fit(*population(3_000, DEPTH))
    scored = score_ranks(score_function, results, ranks)

    def exact() -> float:
        return order_statistic(alpha, DELTA, scored).threshold

    def hoeffding() -> float:
        return order_statistic(alpha, DELTA, scored, "hoeffding").threshold

    def calibrated(bound: Bound) -> Certificate:
        return order_statistic(alpha, DELTA, score_ranks(score_function, results, ranks), bound)

    fit = seconds(lambda: calibrated("binomial"), 20)
    exact()  # sorts the scores
    one_threshold = seconds(exact, 200)
    scale = score_function.scale(results.uncertainty)
    started = time.perf_counter()
    by_loop = grid_search(scale.tolist(), ranks.tolist(), alpha)
    loop = time.perf_counter() - started
    arrays = seconds(lambda: grid_search_of_arrays(scale, ranks, alpha), 3)
    rows: list[tuple[str, ...]] = [
        (f"rcir: fit and threshold, {QUERIES:,} queries", f"{fit:.4g}", ""),
        ("rcir: one threshold, exact bound", f"{one_threshold:.4g}", f"{exact():.2f}"),
        ("rcir: one threshold, Hoeffding", f"{seconds(hoeffding, 200):.4g}", f"{hoeffding():.2f}"),
        ("loop over queries and a grid, step 0.2", f"{loop:.4g}", f"{by_loop:.2f}"),
        (
            "the same, all queries of a step at once",
            f"{arrays:.4g}",
            f"{grid_search_of_arrays(scale, ranks, alpha):.2f}",
        ),
    ]
    results, ranks = population(MAPIE_QUERIES, MAPIE_DEPTH)
    matched = np.isfinite(ranks)
    results, ranks = results[matched], ranks[matched]  # MAPIE refuses queries without a match
    scored = score_ranks(score_function, results, ranks)
    scores = score_function.rank(results).scores
    grid = np.linspace(0, 2 * hoeffding(), MAPIE_GRID)
    y = (np.arange(1, MAPIE_DEPTH + 1) == ranks[:, None]).astype(int)
    peer = MultiLabelClassificationController(
        predict_function=lambda all_scores: 1 / (1 + all_scores),
        risk="recall",
        method="rcps",
        rcps_bound="hoeffding",
        target_level=1 - alpha,
        confidence_level=1 - DELTA,
        predict_params=np.sort(1 / (1 + grid)) - 1e-9,
    )
    started = time.perf_counter()
    peer.calibrate(scores, y)
    duration = time.perf_counter() - started
    theirs = 1 / float(np.ravel(peer.best_predict_param)[0]) - 1
    both = seconds(lambda: calibrated("hoeffding"), 20)
    rows += [
        (f"MAPIE: fit and threshold, {len(ranks):,} queries", f"{duration:.4g}", f"{theirs:.2f}"),
        (
            f"rcir: fit and threshold, {len(ranks):,}, Hoeffding",
            f"{both:.4g}",
            f"{hoeffding():.2f}",
        ),
        ("rcir: the same, exact bound", "", f"{exact():.2f}"),
    ]
    return rows, {
        "fit_seconds_100k": fit,
        "threshold_seconds": one_threshold,
        "speedup_over_grid": loop / one_threshold,
        "speedup_over_grid_of_arrays": arrays / one_threshold,
        "speedup_over_mapie": duration / both,
    }


def trained(name: str, folder: Path) -> runs.RunFolder:
    """Return the training run of a configuration; train it if it does not exist."""
    run = folder / sized(name, f"{name}-short")
    if not (run / "run.json").is_file():
        config = ["--config", str(CONFIGS / f"{name}.yaml"), *SHORTER]
        place = ["--storage", str(folder), "--name", run.name]
        subprocess.run([sys.executable, "-m", "training", *config, *place], check=True)
    return runs.find_run(str(run))


class Case:
    """The tuning split and the population of a data set, by images or by distinct labels."""

    def __init__(self, run: runs.RunFolder, distinct: bool, labels: bool = True) -> None:
        splits = load_splits(run.data)
        retriever = Retriever.build(run.encoder(), run.preprocessing, splits.gallery, DEPTH)
        parts = []
        for images in (splits.tuning, _together(splits.calibration, splits.test)):
            labelled = retriever.search_labelled(images)
            labelled = labelled.first_of_each_label() if distinct else labelled
            if not labels:
                labelled = replace(labelled, results=replace(labelled.results, labels=None))
            parts.append(labelled)
        self.split, self.queries = parts
        self._scored: tuple[ScoreFunction, ScoredResults] | None = None

    def fitted(self, name: str, risk: str = "miss") -> ScoreFunction:
        """Fit a score function on the tuning split."""
        split = self.split
        return fit_score_function(
            name,
            split.results,
            split.relevant,
            ALPHAS,
            DELTA,
            risk=risk,
            n_relevant=split.n_relevant,
        )[0]

    def scored(self, score_function: ScoreFunction) -> ScoredResults:
        """Return the scored population; that of the last score function is kept."""
        if self._scored is None or self._scored[0] is not score_function:
            self._scored = score_function, score(score_function, self.queries)
        return self._scored[1]

    def measured(
        self,
        score_function: ScoreFunction,
        bound: Bound,
        alpha: float,
        level: float = DELTA,
        constant: bool = False,
    ) -> tuple[float, float]:
        """Return the mean set size, and the share of calibrations whose risk exceeds alpha.

        With `constant`, all queries get the same size, in the order of the score function.
        """
        scored = self.scored(score_function)
        scored = scored.of_constant_size if constant else scored
        scores, n = scored.match_score, len(scored)
        all_scores, ascending = np.sort(scored.require("scores"), axis=None), np.sort(scores)
        place = CALIBRATION - 1 - allowed_misses(CALIBRATION, alpha, level, bound)
        rng = np.random.default_rng(1)
        thresholds = np.array(
            [
                np.partition(scores[rng.integers(0, n, CALIBRATION)], place)[place]
                for _ in range(DRAWS)
            ]
        )
        limits = widen(thresholds)  # those of the sets that are returned
        risks = (n - np.searchsorted(ascending, limits, side="right")) / n
        sizes = np.searchsorted(all_scores, limits, side="right") / n
        # A request that is unattainable violates nothing.
        return float(sizes[np.isfinite(thresholds)].mean()), float((risks > alpha).mean())

    def of_rule(self, alpha: float, random: bool = False) -> tuple[float, float]:
        """Return the same of the rule of Cai et al., with random uncertainties if `random`."""
        results, ranks = self.queries.results, self.queries.ranks
        n, rng, measured = len(ranks), np.random.default_rng(1), []
        uncertainty = results.uncertainty
        for _ in range(DRAWS):
            rows = rng.integers(0, n, CALIBRATION)
            calibration = rng.random(CALIBRATION) if random else uncertainty[rows]
            uncertainty = rng.random(n) if random else uncertainty
            kappa, _ = calibrate_kappa(calibration, ranks[rows], results.depth, alpha, DELTA)
            sizes = rule_sizes(uncertainty, kappa, results.depth)
            measured.append((sizes.mean(), np.mean(ranks > sizes) > alpha))
        size, violated = np.mean(measured, axis=0)
        return float(size), float(violated)

    def of_heuristic(self, alpha: float) -> tuple[float, float]:
        """Return the same of their heuristic, whose sets depend on no calibration."""
        results = self.queries.results
        candidates = results.require("candidate_uncertainty")
        both = np.concatenate([results.uncertainty, candidates[results.is_candidate]])
        within = heuristic_sets(results.uncertainty, candidates, (both.min(), both.max()), alpha)
        within &= results.is_candidate
        missed = ~(within & self.queries.relevant).any(axis=1)
        return float(within.sum(axis=1).mean()), float(missed.mean() > alpha)

    def of_all_matches(self, name: str, risk: str, alpha: float) -> tuple[float, float]:
        """Return the mean set size, and the mean number of true matches in a set."""
        score_function = self.fitted("auto", risk)
        tuning, scored = score(score_function, self.split), self.scored(score_function)
        if name == FAIR:
            tuning, scored = tuning.of_constant_size, scored.of_constant_size
        rng = np.random.default_rng(2)
        request, relevant = make_request(alpha, DELTA, risk=risk), scored.require("relevant")
        sizes, matches = [], []
        for _ in range(FEW):
            calibration = scored[rng.integers(0, len(scored), CALIBRATION)]
            size = scored.sizes(certify(request, calibration, tuning).threshold)
            within = np.arange(scored.depth) < size[:, None]
            sizes.append(size.mean())
            matches.append((relevant & within).sum(axis=1).mean())
        return float(np.mean(sizes)), float(np.mean(matches))


def _together(first: ImageSet, second: ImageSet) -> ImageSet:
    return ImageSet(
        np.concatenate([first.images, second.images]),
        np.concatenate([first.labels, second.labels]),
        [*first.ids, *second.ids],
    )


def unlabelled_sizes(
    folder: Path, sets: list[str]
) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Measure the mean sizes of part (b) where the gallery has no labels."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for name in sets:
        case = Case(trained(SETS[name], folder), distinct=False, labels=False)
        score_function = case.fitted("auto")
        for shown, fair in (("one_size", True), (f"auto ({score_function.name})", False)):
            cells = [
                case.measured(score_function, BOUNDS["exact"], alpha, constant=fair)
                for alpha in ALPHAS
            ]
            rows.append(
                (name, shown, *(f"{size:.2f} ({violated:.3f})" for size, violated in cells))
            )
            for alpha, (size, _) in zip(ALPHAS, cells, strict=True):
                figures[f"{name}/{alpha}/{shown.partition(' ')[0]}"] = size
    return rows, figures


def sizes(folder: Path, sets: list[str]) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Measure part (b)."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    excess = []
    for name in sets:
        run = trained(SETS[name], folder)
        cases = {
            "images": (Case(run, distinct=False), (*SCORE_FUNCTIONS, "auto", FAIR), BOUNDS),
            "labels": (Case(run, distinct=True), (*SCORE_FUNCTIONS, "auto", FAIR), BOUNDS),
            "images, no labels": (
                Case(run, distinct=False, labels=False),
                ("constant", "auto", FAIR),
                {"exact": BOUNDS["exact"]},
            ),
        }
        certified: dict[tuple[str, str, str, float], float] = {}
        for kind, (case, score_functions, bounds) in cases.items():
            for score_function_name in score_functions:
                fair = score_function_name == FAIR
                score_function = case.fitted("auto" if fair else score_function_name)
                shown = (
                    f"auto ({score_function.name})"
                    if score_function_name == "auto"
                    else score_function_name
                )
                for title, bound in bounds.items():
                    cells = [
                        case.measured(score_function, bound, alpha, constant=fair)
                        for alpha in ALPHAS
                    ]
                    texts = (f"{size:.2f} ({violated:.3f})" for size, violated in cells)
                    rows.append((name, kind, shown, title, *texts))
                    for alpha, (size, violated) in zip(ALPHAS, cells, strict=True):
                        certified[kind, score_function_name, bound, alpha] = size
                        excess.append(violated - DELTA)
        case = cases["images"][0]
        for title, shown, measure in (
            (CAI, "Hoeffding", case.of_rule),
            (RANDOM, "Hoeffding", partial(case.of_rule, random=True)),
            (HEURISTIC, "none", case.of_heuristic),
        ):
            cells = [measure(alpha) for alpha in ALPHAS]
            texts = (f"{size:.2f} ({violated:.3f})" for size, violated in cells)
            rows.append((name, "images", title, shown, *texts))
        unlabelled = "images, no labels"
        hoeffding = certified["images", "minmax", "hoeffding", 0.1]
        figures |= {
            f"{name}_auto_over_one_size": (
                certified["images", "auto", "binomial", 0.1]
                / certified["images", FAIR, "binomial", 0.1]
            ),
            f"{name}_auto_without_labels_over_one_size": (
                certified[unlabelled, "auto", "binomial", 0.1]
                / certified[unlabelled, FAIR, "binomial", 0.1]
            ),
            f"{name}_auto_without_labels_over_minmax_hoeffding": (
                certified[unlabelled, "auto", "binomial", 0.1] / hoeffding
            ),
            f"{name}_largest_auto_over_one_size": max(
                certified[kind, "auto", "binomial", alpha]
                / certified[kind, FAIR, "binomial", alpha]
                for kind in cases
                for alpha in ALPHAS
            ),
        }
        if name == "digits":
            score_function = case.fitted("auto")
            figures["simultaneous_over_pointwise"] = (
                case.measured(score_function, "binomial", 0.03, local_level(CALIBRATION, DELTA))[0]
                / case.measured(score_function, "binomial", 0.03)[0]
            )
    figures["worst_violation_excess"] = float(np.max(excess))
    return rows, figures


def of_all_matches(folder: Path, sets: list[str]) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Measure part (c)."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for name in sets:
        case = Case(trained(SETS[name], folder), distinct=False)
        for risk, levels in LEVELS.items():
            ratios = []
            for alpha in levels:
                pairs = []
                for score_function in (FAIR, "auto"):
                    try:
                        pairs.append(case.of_all_matches(score_function, risk, alpha))
                    except RiskUnattainable:  # for "auto" alone: worse than any size
                        worse = score_function == "auto" and not math.isnan(pairs[0][0])
                        pairs.append((math.inf, 0.0) if worse else (math.nan, math.nan))
                (alike, few), (size, many) = pairs
                texts = (f"{number:.2f}" for number in (alike, size, few, many))
                rows.append((name, risk, f"{alpha:g}", *texts))
                ratios.append(
                    size / alike if find_risk(risk).monotone else few / many if many else math.inf
                )
            key = risk.replace("-", "_")
            if risk == "recall" and not math.isnan(ratios[levels.index(0.3)]):
                figures[f"{name}_recall_auto_over_one_size"] = ratios[levels.index(0.3)]
            if not np.isnan(ratios).all():
                figures[f"{name}_largest_{key}_auto_over_one_size"] = float(np.nanmax(ratios))
    return rows, figures


class Simulation:
    """Queries whose only match has a random rank that depends on the uncertainty.

    Args:
        draw: draws n uncertainties, of queries and of gallery items alike.
        spread: mean of X over the uncertainty; the rank of the match is 1 + floor(X).
    """

    def __init__(
        self, draw: Callable[[np.random.Generator, int], NDArray[np.float64]], spread: float
    ) -> None:
        self.draw, self.spread = draw, spread

    def ranks(
        self, uncertainty: NDArray[np.float64], rng: np.random.Generator
    ) -> NDArray[np.float64]:
        """Draw the rank of each query's match; infinite beyond the candidates."""
        ranks = 1 + np.floor(rng.exponential(self.spread * uncertainty))
        return np.where(ranks > CANDIDATES, np.inf, ranks)

    def risk(self, uncertainty: NDArray[np.float64], sizes: NDArray[np.int64]) -> float:
        """Return the probability that a set of the first `sizes` candidates misses the match."""
        return float(np.exp(-sizes / (self.spread * uncertainty)).mean())

    def heuristic_risk(self, uncertainty: NDArray[np.float64], within: NDArray[np.bool_]) -> float:
        """Return the probability that a set of the candidates `within` misses the match."""
        beyond = np.exp(-np.arange(CANDIDATES + 1) / (self.spread * uncertainty[:, None]))
        return float(1 - ((beyond[:, :-1] - beyond[:, 1:]) * within).sum(axis=1).mean())


SIMULATIONS = {
    "beta": Simulation(lambda rng, n: rng.beta(2, 5, n), 6.0),
    "lognormal": Simulation(lambda rng, n: rng.lognormal(size=n), 2.0),
}
Outcome = tuple[float, float, bool]  # mean size, risk, and whether it was certified


def outcomes(
    world: Simulation, alpha: float, rng: np.random.Generator
) -> Iterator[tuple[tuple[str, str], Outcome]]:
    """Yield the outcome of one calibration by each rule and bound; None certified, no sets."""
    tuning, calibration, test, many = (world.draw(rng, n) for n in (TUNING, HALF, HALF, MANY))
    ranks = world.ranks(calibration, rng)
    for rule in (CAI, RANDOM):
        first, second = calibration, test
        if rule == RANDOM:
            first, second = rng.random(HALF), rng.random(HALF)
        kappa, certified = calibrate_kappa(first, ranks, CANDIDATES, alpha, DELTA)
        sizes = rule_sizes(second, kappa, CANDIDATES)
        yield (rule, "Hoeffding"), (float(sizes.mean()), world.risk(test, sizes), certified)
    candidates = world.draw(rng, HALF * CANDIDATES).reshape(HALF, CANDIDATES)
    gallery = np.append(calibration, candidates)
    within = heuristic_sets(test, candidates, (gallery.min(), gallery.max()), alpha)
    risk = world.heuristic_risk(test, within)
    yield (HEURISTIC, "none"), (float(within.sum(axis=1).mean()), risk, False)
    results, split = SearchResults(calibration, CANDIDATES), SearchResults(tuning, CANDIDATES)
    for kind in (Constant, MinMax, Quantile):
        score_function = kind.fit(split, world.ranks(tuning, rng))
        scored = score_ranks(score_function, results, ranks)
        for title in ("Hoeffding", "exact"):
            try:
                threshold = order_statistic(alpha, DELTA, scored, BOUNDS[title]).threshold
            except RiskUnattainable:
                yield (score_function.name, title), (math.nan, math.nan, False)
                continue
            sizes = score_function.sizes(SearchResults(many, CANDIDATES), threshold)
            outcome = float(sizes.mean()), world.risk(many, sizes), True
            yield (score_function.name, title), outcome


def simulated() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Measure part (e)."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for name, world in SIMULATIONS.items():
        cells: dict[tuple[str, str], list[str]] = {}
        for alpha in ALPHAS:
            rng, by_rule = np.random.default_rng(0), dict[tuple[str, str], list[Outcome]]()
            for _ in range(TRIALS):
                for rule, outcome in outcomes(world, alpha, rng):
                    by_rule.setdefault(rule, []).append(outcome)
            for rule, trials in by_rule.items():
                size, risk, certified = np.nanmean(trials, axis=0)
                violated = np.mean([each[1] > alpha for each in trials])
                text = f"{size:.2f} ({risk:.3f}, {violated:.2f}, {certified:.2f})"
                cells.setdefault(rule, []).append(text)
                if alpha == 0.1 and rule in ((CAI, "Hoeffding"), ("minmax", "Hoeffding")):
                    key = f"{'cai' if rule[0] == CAI else rule[0]}_{name}"
                    figures[f"{key}_size"], figures[f"{key}_risk"] = float(size), float(risk)
                    figures[f"{key}_violated"] = float(violated)
                    figures[f"{key}_certified"] = float(certified)
        rows += [(name, *rule, *texts) for rule, texts in cells.items()]
    return rows, figures


def alarms() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Measure part (d): a risk that jumps from 0.05 to 0.3 after 10,000 queries, at alpha 0.1."""
    rng = np.random.default_rng(0)
    late, fresh = [], []
    for _ in range(JUMPS):
        monitor = RiskMonitor(0.1, 0.01)
        monitor.update(rng.uniform(size=10_000) < 0.05)
        jump = rng.uniform(size=400) < 0.3
        late.append(_delay(monitor, jump))
        fresh.append(_delay(RiskMonitor(0.1, 0.01), jump))
    rows = [
        (title, *(f"{np.quantile(delays, q):.0f}" for q in (0.1, 0.5, 0.9)))
        for title, delays in (("after 10,000 good queries", late), ("started at the jump", fresh))
    ]
    return rows, {"alarm_delay_over_restart": float(np.median(late) / np.median(fresh))}


def _delay(monitor: RiskMonitor, losses: NDArray[np.bool_]) -> int:
    """Return the number of losses until the alarm, or of all losses if there is none."""
    state = asdict(monitor)
    low, high = 0, len(losses)
    while high - low > 1:
        middle = (low + high) // 2
        if RiskMonitor(**state).update(losses[:middle]):
            high = middle
        else:
            low = middle
    return high


def main() -> None:
    """Measure all parts."""
    command = parser(__doc__)
    command.add_argument("--runs", type=Path, help="where training runs are, or go to")
    command.add_argument("--sets", nargs="*", choices=SETS, default=list(SETS))
    command.add_argument("--unlabelled", action="store_true", help="sizes without labels alone")
    options = command.parse_args()
    levels = [f"alpha {alpha}" for alpha in ALPHAS]
    if options.unlabelled:
        with tempfile.TemporaryDirectory() as temporary:
            os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{temporary}/mlflow.db")
            rows, figures = unlabelled_sizes(options.runs or Path(temporary), options.sets)
        title = f"mean size without labels (share of calibrations above alpha; delta {DELTA})"
        report(title, ["data", "sizes", *levels], rows, figures, options.json)
        return
    fast, figures = speed()
    report("(a) calibration", ["what", "seconds", "threshold"], fast, {}, None)
    if options.sets:
        with tempfile.TemporaryDirectory() as temporary:
            os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{temporary}/mlflow.db")
            folder = options.runs or Path(temporary)
            rows, more = sizes(folder, options.sets)
            whole, of_matches = of_all_matches(folder, options.sets)
        columns = ["data", "sets of", "sizes", "bound", *levels]
        title = f"(b) mean size (share of calibrations whose risk exceeds alpha; delta {DELTA})"
        report(title, columns, rows, {}, None)
        columns = ["data", "risk", "alpha", "one size", "size, auto", "matches", "matches, auto"]
        report("(c) mean size, and true matches in it, delta 0.1", columns, whole, {}, None)
        figures |= more | of_matches
    delays, watching = alarms()
    columns = ["queries until the alarm", "10%", "median", "90%"]
    title = "(d) a jump of the risk from 0.05 to 0.3, watched at 0.1, level 0.01"
    report(title, columns, delays, {}, None)
    rows, compared = simulated()
    title = f"(e) mean size (risk, share above alpha, share certified), delta {DELTA}"
    columns = ["uncertainty", "sizes", "bound", *levels]
    report(title, columns, rows, figures | watching | compared, options.json)


if __name__ == "__main__":
    main()
