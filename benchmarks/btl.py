"""Effects of changes to the Bayesian triplet loss, on small networks and a part of each set.

Each change is compared with the encoder whose variance starts at 1e-3, as in the code of Cai et
al. (AAAI 2025), trained as in `methods.py`:

- trained otherwise: another variance at the start, or another weight of the KL divergence, also the
  one with the smallest certified sets of the validation images, which a sweep would choose;
- the same training, searched otherwise: by the expected distance, or with all variances multiplied
  by the number that makes the order of the nearest match and the nearest other image of the tuning
  queries likeliest.

Queries are divided and sizes certified as in `uncertainties.py`. Ratios are paired: each training
has the mean logarithm over its divisions, and intervals are Student's t over trainings. Trained
runs, embeddings and sizes in `--runs` are used again.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from common import parser, report, sized
from methods import EPOCHS, base
from numpy.typing import NDArray
from scipy import optimize, stats
from uncertainties import (
    ALPHA,
    NEIGHBOURHOOD,
    STATED,
    WITHOUT_LABELS,
    Rows,
    all_queries,
    certified_size,
    divisions,
    sizes,
    unlabelled,
)

from rcir.data import Preprocessing, Splits, load_splits, without_repeats
from rcir.embedding import Embedding
from rcir.encoders import Encoder, EncoderConfig
from rcir.encoders.base import Images
from rcir.encoders.btl import BayesianTriplet, BayesianTripletEncoderOptions
from rcir.encoders.embedder import Embedder
from rcir.files import write_json
from rcir.losses.bayesian_triplet import triplet_nll
from rcir.mining import MiningConfig
from rcir.retrieval.retriever import Retriever
from rcir.risk import LabelledResults, Learned, Reranked
from rcir.runs.folder import RunFolder
from rcir.torch_settings import keep_freed_memory
from training import train

BEFORE = "as it is"
KL = {f"kl_scale {scale:g}": (1e-3, scale) for scale in (1e-6, 1e-4)}
# The variance at the start of the training, and `loss.kl_scale`.
TRAINED = {
    BEFORE: (1e-3, 1e-5),
    **KL,
    "starts at 0.2 / dim": (0.2 / 16, 1e-5),
    "starts at 1 / dim": (1 / 16, 1e-5),
}
CHOSEN = "kl_scale by validation"
SEARCHED = ("expected distance", "temperature", "expected distance, temperature")
SEEDS = {"digits": 3, "fashion": 3, "omniglot": 1}
COLUMNS = ("encoder", "neighbourhood", "both", "no labels", "ratio", "ratio, no labels")
QueriesByKind = tuple[dict[str, LabelledResults], dict[str, LabelledResults]]


@dataclass(frozen=True)
class StartingOptions(BayesianTripletEncoderOptions):
    """Options of `btl`, and the variance at the start of its training."""

    initial_variance: float = 1e-3


class Starting(BayesianTriplet):
    """The encoder `btl` with another variance at the start."""

    Options = StartingOptions

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config, channels, size)
        bias = math.log(math.expm1(self.options.initial_variance))
        torch.nn.init.constant_(self.variance_head.layers[-1].bias, bias)


def run_of(name: str, change: str, seed: int, runs: Path) -> RunFolder:
    """A trained run."""
    config, (start, kl_scale) = base(name, runs), TRAINED[change]
    other = {"method": "btl:Starting", "options": {"initial_variance": start}}
    method = {"method": "btl", "options": {}} if start == 1e-3 else other
    return train(
        replace(
            config,
            name=f"{name}-btl-{start:g}-{kl_scale:g}-{seed}",
            storage=str(runs),
            seed=seed,
            epochs=EPOCHS[name],
            encoder=replace(config.encoder, **method),
            loss={"kl_scale": kl_scale},
            mining=MiningConfig(),
        )
    )


def validated(run: RunFolder) -> tuple[float, float]:
    """The certified size of the validation images after the best epoch, and minus the precision."""
    epochs = json.loads((run.path / "metrics.json").read_text()).values()
    size, precision = "validation/certified_size_0.05", "validation/mean_average_precision"
    return min((each.get(size, math.inf), -each[precision]) for each in epochs)


def temperature(run: RunFolder, splits: Splits, stored: Embedder) -> float:
    """The factor of all variances that makes the nearest match likeliest to be nearer.

    It is compared with the nearest other image of each tuning query.
    """
    queries, gallery = (
        stored(run.encoder(), run.preprocessing, part.images)
        for part in (splits.tuning, splits.gallery)
    )
    names = (np.asarray(part.labels) for part in (splits.tuning, splits.gallery))
    match = torch.from_numpy(np.equal.outer(*names))
    distances = torch.cdist(queries.vectors, gallery.vectors)
    nearest = (distances.where(each, torch.inf).argmin(dim=1) for each in (match, ~match))
    triplet = (queries, *(gallery[rows] for rows in nearest))
    means = tuple(each.vectors.double() for each in triplet)
    variances = [torch.as_tensor(each.variance).double() for each in triplet]
    optimum = optimize.minimize_scalar(
        lambda power: float(
            triplet_nll(means, tuple(math.exp(power) * each for each in variances)).mean()
        ),
        bounds=(-7, 7),
        method="bounded",
    )
    return math.exp(optimum.x)


def searched(run: RunFolder, search: str) -> QueriesByKind:
    """Results of all queries by uncertainty: with labels, one candidate of each, and without."""
    stored = Embedder(folder=run.path / "embeddings")
    encoder, trained, factor = run.encoder(), run.encoder(), 1.0
    encoder.options = replace(
        encoder.options, distance="expected" if "expected" in search else "mean"
    )
    splits, _ = without_repeats(load_splits(run.data))
    if "temperature" in search:
        factor = temperature(run, splits, stored)
        print(f"{run.path.name}: variances times {factor:.3g}")

    def embed(_: Encoder, preprocessing: Preprocessing, images: Images) -> Embedding:
        embedding = stored(trained, preprocessing, images)
        variance = factor * torch.as_tensor(embedding.variance)
        return replace(embedding, variance=variance, uncertainty=variance.squeeze(1))

    searcher = Retriever.build(encoder, run.preprocessing, splits.gallery, embedder=embed).searcher
    results = searcher.search_labelled(all_queries(splits), embedder=embed)
    kinds = (*STATED, *NEIGHBOURHOOD)
    return (
        {kind: searcher.judged(results, kind).first_of_each_label() for kind in kinds},
        {kind: unlabelled(searcher, results, kind) for kind in WITHOUT_LABELS},
    )


def measured(run: RunFolder, search: str) -> NDArray[np.float64]:
    """Sizes and their ratios of each division, by column."""
    path = run.path / f"sizes {search}.json"
    if not path.exists():
        queries = searched(run, search)
        write_json(path, [sizes_of(queries, rows) for rows in divisions(len(queries[0]["cosine"]))])
    return np.array(json.loads(path.read_text()))


def sizes_of(queries: QueriesByKind, rows: Rows) -> list[float]:
    """Sizes and their ratios of one division, by column."""
    labels, without = (
        sizes(kinds, learned, rows, certified_size)
        for kinds, learned in zip(queries, (Reranked, Learned), strict=True)
    )
    near, both = "neighbourhood", "with variance"
    certified = [labels["encoder"], labels[near], labels[both], without[both]]
    return [*certified, labels[both] / labels[near], without[both] / without[near]]


def over(ratios: list[NDArray[np.float64]]) -> list[str]:
    """The mean ratio over trainings and its 95% interval, by column."""
    means = np.array([np.nanmean(np.log(each), axis=0) for each in ratios])
    n, center = len(means), means.mean(axis=0)
    if n == 1:
        return [f"{value:.3f}" for value in np.exp(center)]
    margin = stats.t.ppf(0.975, n - 1) * stats.sem(means)
    bounds = np.exp([center, center - margin, center + margin]).T
    return [f"{value:.3f} ({low:.3f} to {high:.3f})" for value, low, high in bounds]


def main() -> None:
    """Train, search, measure and print."""
    command = parser(__doc__)
    runs = Path("runs", sized("methods", "methods-short"))
    command.add_argument("--runs", type=Path, default=runs, help="trained runs")
    sets, changes = sized((tuple(SEEDS), tuple(TRAINED)), (("digits",), (BEFORE,)))
    command.add_argument("--sets", nargs="+", choices=SEEDS, default=sets)
    command.add_argument("--changes", nargs="+", choices=TRAINED, default=changes)
    command.add_argument("--seeds", type=int, default=sized(3, 1), help="at most; one on Omniglot")
    options = command.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    changes = tuple(dict.fromkeys((BEFORE, *options.changes)))  # all are compared with the first
    values: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
    trainings = [
        (name, seed) for name in options.sets for seed in range(min(SEEDS[name], options.seeds))
    ]
    for name, seed in trainings:
        trained = {change: run_of(name, change, seed, options.runs) for change in changes}
        for change, run in trained.items():
            values[change].append(measured(run, BEFORE))
        weights = [change for change in trained if change in (BEFORE, *KL)]
        best = min(weights, key=lambda change: validated(trained[change]))
        values[CHOSEN].append(values[best][-1])
        for search in SEARCHED:
            values[search].append(measured(trained[BEFORE], search))
    rows = []
    for change, each in values.items():
        paired = [new / old for new, old in zip(each, values[BEFORE], strict=True)]
        print(f"over {BEFORE}: | {change} | {' | '.join(over(paired))} |")
        for name in options.sets:
            of_set = [
                size for size, (other, _) in zip(each, trainings, strict=True) if other == name
            ]
            means = np.nanmean(np.concatenate(of_set), axis=0)
            rows.append([name, change, *(f"{value:.3f}" for value in means)])
    figures = {f"{name}, {change}": float(both) for name, change, _, _, both, *_ in rows}
    title = f"Certified sizes at alpha {ALPHA}"
    report(title, ("set", "change", *COLUMNS), rows, figures, options.json)


if __name__ == "__main__":
    main()
