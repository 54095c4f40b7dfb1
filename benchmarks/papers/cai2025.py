"""The figures of Cai et al., "Risk Controlled Image Retrieval" (AAAI 2025), on data at hand.

Their rule and heuristic, as their code computes them (`cai_rule.py`), beside score functions of
this library with Hoeffding's bound, which is theirs, and with the exact one. The encoders are those
of `methods.py` (digits, clothes, characters) and `cub50.py` (birds, each photograph left out of its
own search). All queries are searched once, to depth 50, birds to 70; ten random halves calibrate,
and the others measure. Ours fit the score function on the first fifth of the half that calibrates.
If nothing is certified, ours have no sets; theirs takes the last kappa. Encoders without an
uncertainty have one minus the cosine to the nearest image. Galleries have no labels but in "auto
with labels".

- Reliability: recall at 1 by ten bins of confidence, whose range is that of the half that
  calibrates; the calibration error by their middles, and by upper edges, as in the authors' code.
- Figure 13: mean size K, and risk, over alpha and delta. "above" is the share of trials whose risk
  on the half that measures is above alpha, which a guarantee for the population does not exclude: a
  half may be harder than the population. "broken" is the share of calibrations, drawn with
  replacement from all queries that did not tune, whose risk on all of these is above alpha, "broken
  certified" the share that also has a certificate; the range that their rule takes from the batch
  at hand is that of another draw. "worst" is the largest share of one set, encoder and alpha.
- Figure 14: quantiles of K. Figure 12: the heuristic (of one minus the cosine of query and
  candidate for encoders without an uncertainty), their rule, also with random uncertainties, and
  one K for all, certified ("constant") or not.

`--part mining` trains on half of the digits, for half as long, with other choices of tuples: recall
at 1, AUROC of a wrong first image by the uncertainty, certified size at alpha 0.1 by `auto`.
`--figures` names a folder for drawings. Trained runs in `--runs` are used again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from tables import markdown, search, sized, spread

# isort: split
from cai_rule import calibrate_kappa, heuristic_sets, rule_sizes
from common import DIGITS, parser, titled, write_figures
from cub50 import configuration, features_of, runs_of
from methods import RECIPES, base, numbers_of, run_of
from uncertainties import all_queries

from rcir.data import ImageSet, load_splits, without_repeats
from rcir.data.datasets.user_images import read_folder
from rcir.encoders.embedder import Embedder
from rcir.index import lengths, nearest_others, one_minus_cosine
from rcir.metrics import confidence, reliability
from rcir.mining import MiningConfig, Negatives, Positive
from rcir.retrieval.retriever import Retriever
from rcir.risk import (
    Bound,
    LabelledResults,
    ScoredResults,
    SearchResults,
    allowed_misses,
    fit_score_function,
    score,
)
from rcir.risk.results import widen
from rcir.torch_settings import keep_freed_memory
from training import train
from training.images import FeaturePreprocessing

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
SETS = ("digits", "cub50-frozen", "fashion", "omniglot", "cub50-tuned")
ENCODERS = ("deterministic", "btl", "mc-dropout", "deep-ensemble")[: sized(4, 2)]
DEPTH, BIRDS_DEPTH = 50, 70
HALVES, REDRAWS = sized((10, 20), (2, 2))
ALPHAS = (*(round(0.025 * step, 3) for step in range(2, 13)), 0.4, 0.5)
DELTAS = (0.001, 0.01, 0.1)
PLACES = [(delta, alpha) for delta in DELTAS for alpha in ALPHAS]
MAIN, SHOWN = (0.1, 0.1), ((0.001, 0.1), (0.01, 0.1), (0.1, 0.05), (0.1, 0.2))  # of the file
TUNED = 0.2  # of the half that calibrates
BINS, QUANTILES, FIXED = 10, (0.05, 0.25, 0.5, 0.75, 0.95), (1, 2, 5, 10, 20, 50)
BOUNDS: dict[str, Bound] = {"Hoeffding": "hoeffding", "exact": "binomial"}
OURS = ("constant", "minmax", "quantile", "auto", "auto with labels")
CAI, RANDOM, HEURISTIC = (f"Cai et al.{kind}" for kind in ("", " (random)", " (heuristic)"))
DRAWN = (CAI, "minmax (Hoeffding)", "auto (Hoeffding)", "auto (exact)")
# Tuples: of the paper's text and code, and our defaults of `btl` and of `deterministic`.
CHOICES: tuple[tuple[Positive, Negatives], ...] = (
    *(("farthest", "hardest"), ("nearest", "margin-violating")),
    *(("random", "semi-hard"), ("nearest", "top-random")),
)[: sized(4, 1)]
MINED, MINED_EPOCHS, SEEDS = sized((("btl", "deterministic"), 4, 3), (("btl",), 1, 1))
MINED_DATA = sized({"train": 5_000}, DIGITS)  # half of the digits


def searched(name: str, method: str, runs: Path) -> tuple[LabelledResults, Floats]:
    """Train and search; return all queries, and one minus their cosines to the candidates."""
    if name.startswith("cub50"):
        return of_birds(name == "cub50-frozen", method, runs / sized("papers", "papers-short"))
    run = run_of(name, method, runs / sized("methods", "methods-short"))
    stored = Embedder(folder=run.path / "embeddings")
    splits, _ = without_repeats(load_splits(run.data))
    gallery = splits.gallery
    retriever = Retriever.build(run.encoder(), run.preprocessing, gallery, DEPTH, embedder=stored)
    queries = retriever.search_labelled(all_queries(splits), embedder=stored)
    results = queries.results
    norms = retriever.searcher.gallery.norms[results.require("positions")]
    asked = lengths(results.require("vectors"))[:, None]
    return queries, one_minus_cosine(results.require("distances"), asked, norms)


@lru_cache(1)
def images_of_birds(frozen: bool, runs: Path) -> ImageSet:
    """Return the photographs, or the features that frozen backbones make of them."""
    data = configuration("btl", True, 0, runs).data.options
    images = read_folder(Path(), data["path"], data["train"]).queries
    return features_of(images)[1] if frozen else images


def of_birds(frozen: bool, method: str, runs: Path) -> tuple[LabelledResults, Floats]:
    """Return the same of the birds of `cub50.py`, searched among themselves."""
    run, images = runs_of(method, frozen, 1, runs)[0], images_of_birds(frozen, runs)
    preprocessing = FeaturePreprocessing() if frozen else run.preprocessing
    embedded = search(preprocessing, run.encoder(), images)
    uncertainty, depth = embedded.uncertainty, min(BIRDS_DEPTH, len(images) - 1)
    distances, positions = nearest_others(embedded.vectors, depth)
    _, labels = np.unique(np.asarray(images.labels), return_inverse=True)
    results = SearchResults(uncertainty, depth, distances, labels[positions])
    if embedded.stated:
        results = replace(results, candidate_uncertainty=uncertainty[positions])
    relevant, totals = labels[positions] == labels[:, None], np.bincount(labels)[labels] - 1
    norms = lengths(embedded.vectors.numpy())
    cosines = one_minus_cosine(distances, norms[:, None], norms[positions])
    return LabelledResults(results, relevant, totals, one_label=True), cosines


def halves(n: int, seed: int) -> tuple[Rows, Rows]:
    """Return the rows of the half that calibrates, and of the one that measures."""
    order = np.random.default_rng(seed).permutation(n)
    return order[: n // 2], order[n // 2 :]


SHARES = ("certified", "above", "broken", "broken certified")
MEASURED = (*SHARES, "K", "risk", *(f"q{100 * q:g}" for q in QUANTILES))


def record(
    alpha: float, sizes: Rows, ranks: Floats, certified: bool, broken: Sequence[float]
) -> list[float]:
    """Return the columns `MEASURED` of one trial, from sizes of the half that measures."""
    risk = float(np.mean(ranks > sizes))
    quantiles = np.quantile(sizes, QUANTILES)
    return [float(certified), float(risk > alpha), *broken, float(sizes.mean()), risk, *quantiles]


def theirs(uncertainty: Floats, ranks: Floats, depth: int, seed: int) -> list[list[float]]:
    """Return one trial of the rule of Cai et al., a record for each of `PLACES`."""
    first, second = halves(len(ranks), seed)
    shape = (2, REDRAWS, len(first))
    draws, batches = np.random.default_rng([seed, REDRAWS]).integers(0, len(ranks), shape)
    records = []
    for delta, alpha in PLACES:
        kappa_of = partial(calibrate_kappa, depth=depth, alpha=alpha, delta=delta)
        broken = []
        for rows, batch in zip(draws, batches, strict=True):
            low, high = uncertainty[batch].min(), uncertainty[batch].max()
            kappa, certified = kappa_of(uncertainty[rows], ranks[rows])
            sizes = rule_sizes(np.clip(uncertainty, low, high), kappa, depth)
            above = np.mean(ranks > sizes) > alpha
            broken.append((above, above and certified))
        kappa, certified = kappa_of(uncertainty[first], ranks[first])
        sizes = rule_sizes(uncertainty[second], kappa, depth)
        records.append(record(alpha, sizes, ranks[second], certified, np.mean(broken, axis=0)))
    return records


def limits(match_scores: NDArray[np.float32], bound: Bound) -> NDArray[np.float32]:
    """Return (..., places) certified scores of (..., n) queries; infinite if nothing is."""
    n = match_scores.shape[-1]
    allowed = np.array([allowed_misses(n, alpha, delta, bound) for delta, alpha in PLACES])
    ascending = np.sort(match_scores)
    ascending = np.append(ascending, np.full_like(ascending[..., :1], np.inf), axis=-1)
    return widen(ascending[..., n - 1 - allowed]).astype(np.float32)


def ours(scored: ScoredResults, tuning: Rows, bound: Bound, seed: int) -> list[list[float]]:
    """Return one trial of a score function that was fitted on the rows `tuning`."""
    first, second = halves(len(scored), seed)
    calibration, population = first[len(tuning) :], np.delete(np.arange(len(scored)), tuning)
    draws = np.random.default_rng([seed, REDRAWS]).choice(population, (REDRAWS, len(calibration)))
    redrawn, every = limits(scored.match_score[draws], bound), scored.match_score[population]
    served = np.searchsorted(np.sort(every), redrawn, side="right") / len(every)
    # Where nothing is certified there are no sets, and no promise is broken.
    broken = (np.isfinite(redrawn) & (1 - served > [alpha for _, alpha in PLACES])).mean(axis=0)
    scores, ranks = scored.require("scores")[second], scored.require("match_rank")[second]
    certified = limits(scored.match_score[calibration], bound)
    return [
        record(alpha, np.count_nonzero(scores <= limit, axis=1), ranks, True, (share, share))
        if np.isfinite(limit)
        else [0.0, 0.0, share, share] + [np.nan] * (len(MEASURED) - len(SHARES))
        for (_, alpha), limit, share in zip(PLACES, certified, broken, strict=True)
    ]


def heuristic(queries: LabelledResults, cosines: Floats, seed: int) -> list[list[float]]:
    """Return one trial of the heuristic, whose range is that of the half that calibrates."""
    first, second = halves(len(queries), seed)
    query, others = queries.results.uncertainty, queries.results.candidate_uncertainty
    if others is None:  # that of the pair in place of the mean of two
        query, others, values = np.zeros(len(query)), 2 * cosines, cosines[first]
    else:
        values = np.append(query[first], others[first])
    ends, records = (float(values.min()), float(values.max())), []
    for alpha in ALPHAS:
        kept = heuristic_sets(query[second], others[second], ends, alpha)
        # Sets are no prefixes of the candidates: a rank above all sizes stands for a miss.
        ranks = np.where((kept & queries.relevant[second]).any(axis=1), 0, np.inf)
        records.append(record(alpha, kept.sum(axis=1), ranks, False, (np.nan, np.nan)))
    return records


def trials_of(labelled: LabelledResults, cosines: Floats) -> pd.DataFrame:
    """Return what every rule did with one encoder: a row per rule, half, delta and alpha."""
    parts, ranks, uncertainty = {}, labelled.ranks, labelled.results.uncertainty
    unlabelled = replace(labelled, results=replace(labelled.results, labels=None))
    for seed in range(HALVES):
        first, second = halves(len(ranks), seed)
        random = np.random.default_rng([seed, len(ranks)]).random(len(ranks))
        parts[CAI, seed] = theirs(uncertainty, ranks, labelled.results.depth, seed)
        parts[RANDOM, seed] = theirs(random, ranks, labelled.results.depth, seed)
        parts[HEURISTIC, seed] = heuristic(labelled, cosines, seed)
        for size in FIXED:
            same = np.full(len(second), size), ranks[second]
            parts[f"K = {size}", seed] = [
                record(alpha, *same, False, (np.nan, np.nan)) for alpha in ALPHAS
            ]
        tuning = first[: round(TUNED * len(first))]
        for rule in OURS:
            known = labelled if rule.endswith("labels") else unlabelled
            split, name = known[tuning], rule.partition(" ")[0]
            fitted, _ = fit_score_function(
                name, split.results, split.relevant, n_relevant=split.n_relevant
            )
            scored = score(fitted, known)
            for title, bound in BOUNDS.items():
                parts[f"{rule} ({title})", seed] = ours(scored, tuning, bound, seed)
    index = pd.MultiIndex.from_tuples(PLACES, names=("delta", "alpha"))
    # Rules without a calibration do not depend on delta.
    frames = {key: pd.DataFrame(rows, index[-len(rows) :], MEASURED) for key, rows in parts.items()}
    return pd.concat(frames, names=("rule", "half"))


def diagram_of(queries: LabelledResults) -> tuple[float, pd.DataFrame, Floats]:
    """Return recall at 1, the bins of all halves, and (halves, 2) calibration errors."""
    uncertainty, correct = queries.results.uncertainty, queries.ranks == 1
    bins, errors = [], []
    for seed in range(HALVES):
        first, second = halves(len(correct), seed)
        ends = uncertainty[first].min(), uncertainty[first].max()
        one = reliability(confidence(uncertainty[second], *ends), correct[second], BINS)
        edges = np.abs(np.nan_to_num(one.accuracy) - one.confidence - 0.5 / BINS)
        errors.append((one.error, float((edges * one.count).sum() / len(second))))
        bins.append(pd.DataFrame({"hits": np.nan_to_num(one.accuracy) * one.count, "n": one.count}))
    return float(correct.mean()), sum(bins[1:], bins[0]), np.array(errors)


def printed(title: str, frame: pd.DataFrame) -> None:
    """Print a table of texts as Markdown, with its index as the first columns."""
    rows = [
        [*(key if isinstance(key, tuple) else (key,)), *cells]
        for key, cells in zip(frame.index, frame.to_numpy().tolist(), strict=True)
    ]
    columns = [*frame.index.names, *(f"{column}" for column in frame.columns)]
    print(f"\n{title}:\n\n{markdown(columns, [[f'{cell}' for cell in row] for row in rows])}")


def show(trials: pd.DataFrame) -> None:
    """Print figures 12 to 14 of one set, a row per encoder and rule."""
    grouped = trials.groupby(["encoder", "rule", "delta", "alpha"], sort=False)
    means, deviations = grouped[list(MEASURED)].mean(), grouped[["K", "risk"]].std()
    text = means.K.map("{:.2f}±".format) + deviations.K.map("{:.2f}; ".format)
    text += means.risk.map("{:.3f}±".format) + deviations.risk.map("{:.3f}".format)
    printed("Figures 12 and 13: K; risk", text[means.K.notna()].unstack(sort=False).fillna("-"))
    quantiles = means.xs(DELTAS[-1], level="delta").loc[
        (slice(None), list(DRAWN)), MEASURED[len(SHARES) + 2 :]
    ]
    text = quantiles.dropna().map("{:.1f}".format).agg(" ".join, axis=1)
    printed("Figure 14: quantiles of K at delta 0.1", text.unstack(sort=False).fillna("-"))


def totals(trials: pd.DataFrame) -> pd.DataFrame:
    """Return shares over all sets, encoders, halves and alphas, by rule and delta."""
    by_rule = trials.groupby(["rule", "delta"], sort=False)
    shares = by_rule[list(SHARES)].mean()
    cells = trials.groupby(["rule", "delta", "set", "encoder", "alpha"])["broken"].mean()
    shares["worst"] = cells.groupby(["rule", "delta"]).max()
    # Sizes over theirs, where both are certified.
    logs = np.log(trials.K.where(trials.certified == 1)).unstack("rule")
    logs = logs.sub(logs[CAI], axis=0).groupby("delta").mean()
    shares["K over theirs"] = np.exp(logs).unstack()
    # Where the least delta has sets: with the delta, K never grows, and the risk never falls.
    for name, sign in (("K", -1), ("risk", 1)):
        by_delta = sign * trials[name].unstack("delta").dropna()
        ordered = (by_delta.diff(axis=1).iloc[:, 1:] >= 0).all(axis=1).groupby("rule").mean()
        shares[f"{name} in order"] = shares.index.get_level_values("rule").map(ordered)
    return shares


def draw(trials: pd.DataFrame, bins: dict[str, pd.DataFrame], file: Path) -> None:
    """Draw reliability, figure 13 and figure 14 of a set, at delta 0.1, a column per encoder."""
    means = trials.groupby(["encoder", "rule", "delta", "alpha"])[list(MEASURED)].mean()
    means = means.xs(DELTAS[-1], level="delta")
    figure = Figure((2.5 * len(bins), 8.5), layout="constrained", dpi=80)
    panels = figure.subplots(4, len(bins), sharey="row", squeeze=False)
    for (encoder, diagram), column in zip(bins.items(), panels.T, strict=True):
        first, risk, size, quantiles = column
        first.bar((np.arange(BINS) + 0.5) / BINS, diagram.hits / diagram.n.clip(1), 0.9 / BINS)
        first.plot((0, 1), (0, 1), "k--", linewidth=0.8)
        first.set(title=encoder, xlabel="confidence")
        risk.plot(ALPHAS, ALPHAS, "k--", linewidth=0.8)
        for rule, color in zip(DRAWN, ("C3", "C1", "C2", "C0"), strict=True):
            of_rule = means.loc[encoder, rule]
            risk.plot(of_rule.risk, color=color)
            size.plot(of_rule.K, color=color, label=rule)
            if rule in (DRAWN[0], DRAWN[-1]):
                quantiles.fill_between(ALPHAS, of_rule.q5, of_rule.q95, color=color, alpha=0.3)
                quantiles.plot(of_rule.q50, color=color)
        for axes in column[2:]:
            axes.set(yscale="log", xlabel="alpha")
    panels[2, 0].legend(frameon=False, fontsize=8)
    labels = ("recall at 1", "risk", "mean K", "K: 5, 50 and 95%")
    for axes, label in zip(panels[:, 0], labels, strict=True):
        axes.set_ylabel(label)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    Image.open(file).convert("RGB").quantize(32).save(file, optimize=True)


def figures_of_the_paper(
    sets: Mapping[str, Sequence[str]], runs: Path, folder: Path | None
) -> dict[str, float]:
    """Train the encoders of each set, search, print and draw; return the figures."""
    every, figures = {}, {}
    header = [
        "R@1",
        "ECE by middles",
        "ECE by edges",
        *(f"to {k / BINS:g}" for k in range(1, BINS + 1)),
    ]
    for name, encoders in sets.items():
        print(f"\n### {titled(name)}")
        bins, rows = {}, {}
        for encoder in encoders:
            queries, cosines = searched(name, encoder, runs)
            every[name, encoder] = trials_of(queries, cosines)
            recall, bins[encoder], errors = diagram_of(queries)
            hits, n = bins[encoder].hits, bins[encoder].n
            cells = (f"{one:.2f} ({k})" for one, k in zip(hits / n.clip(1), n, strict=True))
            rows[encoder] = [f"{recall:.3f}", *map(spread, errors.T), *cells]
            for key, value in zip(header, (recall, *errors.mean(axis=0)), strict=False):
                figures[f"{name}/{encoder}/{key}"] = value
        table = pd.DataFrame.from_dict(rows, "index", columns=header).rename_axis("encoder")
        printed("Recall at 1 (queries) by confidence", table)
        trials = pd.concat({encoder: every[name, encoder] for encoder in rows}, names=["encoder"])
        show(trials)
        if folder is not None:
            draw(trials, bins, folder / f"cai2025_{name}.png")
    trials = pd.concat(every, names=["set", "encoder"])
    shares = totals(trials)
    print(f"\n### {titled('All sets')}")
    printed("Shares, and sizes over those of Cai et al.", shares.map("{:.4f}".format))
    for (rule, delta), row in shares.iterrows():
        figures |= {f"{rule}/{delta:g}/{key}": value for key, value in row.dropna().items()}
    means = trials.groupby(["set", "encoder", "rule", "delta", "alpha"], sort=False)[["K", "risk"]]
    for (*key, rule, delta, alpha), row in means.mean().dropna().iterrows():
        if (delta, alpha) == MAIN or (rule in DRAWN and (delta, alpha) in SHOWN):
            place = "/".join((*key, rule, f"{delta:g}", f"{alpha:g}"))
            figures |= {f"{place}/{column}": value for column, value in row.items()}
    return figures


def mined(method: str, choice: tuple[Positive, Negatives], seed: int, runs: Path) -> list[float]:
    """Train on the digits with a choice of tuples; return recall, AUROC of misses and size."""
    config = base("digits", runs)
    config = replace(
        config,
        name=f"digits-{method}-{'-'.join(choice)}-seed{seed}",
        storage=str(runs),
        seed=seed,
        epochs=MINED_EPOCHS,
        data=replace(config.data, options=MINED_DATA),
        encoder=replace(config.encoder, method=method, options={}),
        loss=RECIPES[method].get("loss", {}),
        mining=MiningConfig(*choice),
    )
    numbers, _ = numbers_of("digits", train(config))
    auroc = numbers["AUROC" if numbers["encoder"] is None else "encoder"]
    sizes = [value for name, value in numbers.items() if name.startswith("size")]
    return [np.nan if value is None else value for value in (numbers["R@1"], auroc, sizes[-1])]


def choices_of_tuples(runs: Path) -> dict[str, float]:
    """Train with each choice of tuples and print the table; return the figures."""
    columns, index = (
        ("R@1", "AUROC of misses", "certified size"),
        ("encoder", "positive", "negatives"),
    )
    values = {
        (method, *choice): np.array([mined(method, choice, seed, runs) for seed in range(SEEDS)])
        for choice, method in product(CHOICES, MINED)
    }
    rows = {key: [spread(column) for column in one.T] for key, one in values.items()}
    table = pd.DataFrame.from_dict(rows, "index", columns=columns)
    table.index = pd.MultiIndex.from_tuples(table.index, names=index)
    printed(titled("Choices of tuples, means and deviations over seeds"), table)
    return {
        "/".join((*key, name)): value
        for key, one in values.items()
        for name, value in zip(columns, one.mean(axis=0), strict=True)
        if np.isfinite(value)
    }


def main() -> None:
    """Measure one part, print and write."""
    command = parser(__doc__)
    command.add_argument("--runs", type=Path, default=Path("runs"), help="folder of trained runs")
    command.add_argument("--part", choices=("figures", "mining"), default="figures")
    command.add_argument("--sets", nargs="+", choices=SETS, default=SETS[: sized(len(SETS), 2)])
    slow = ["cub50-tuned/mc-dropout"]  # see `cub50.py`
    command.add_argument("--without", nargs="*", default=slow, help="sets/encoders to leave out")
    command.add_argument("--figures", type=Path, help="draw into this folder")
    asked = command.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if asked.part == "mining":
        figures = choices_of_tuples(asked.runs / sized("mining", "mining-short"))
    else:
        sets = {
            name: [each for each in ENCODERS if f"{name}/{each}" not in asked.without]
            for name in asked.sets
        }
        figures = figures_of_the_paper(sets, asked.runs, asked.figures)
    if asked.json:
        write_figures({name: round(float(value), 4) for name, value in figures.items()}, asked.json)


if __name__ == "__main__":
    main()
