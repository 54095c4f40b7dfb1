"""What an encoder's own uncertainty is worth for the size of its sets.

Every method but `tripreg`, whose variance is that of no embedding, is trained on every set, as in
`methods.py`, with several seeds. All queries are searched once; random divisions into tuning,
calibration and test queries then certify sizes, at one alpha and delta:

- by each uncertainty of a query alone (`Quantile` sizes): that of the encoder, those of the
  neighbourhood (cosine, gap, vote), and those of draws from the encoder's variance;
- by all that is known of the neighbourhood (`Learned`);
- by the same, with the variances of query and candidates that the encoder states.

The last two are compared as a ratio of sizes. There is a table for sets of one image per label, one
for sets without the use of labels, one for queries of other labels than those that tuned (the mean
size that misses alpha of them; few labels certify nothing), one for corrupted queries (noise, blur
or occlusion of three severities, drawn for each), and one of the AUROC of detecting images of
MNIST. Divisions in which nothing can be certified do not count. Trained runs and embeddings in
`--runs` are used again.

`--activation` compares those of the head behind the variance instead, by geometric means with 95%
intervals over trainings: sizes by the encoder's uncertainty alone, and what it saves beside the
neighbourhood. Ratios are of divisions in which both are certified.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from common import parser, report, sized
from methods import RECIPES, SETS, run_of
from numpy.typing import NDArray
from scipy.stats import t as student
from sklearn.metrics import roc_auc_score
from torchvision.transforms.v2.functional import gaussian_blur

from rcir.data import (
    ImageSet,
    Preprocessing,
    Splits,
    data_root,
    load_splits,
    without_repeats,
)
from rcir.data.datasets.small_images import read_mnist
from rcir.embedding import Embedding
from rcir.encoders import Encoder
from rcir.encoders.base import Images
from rcir.encoders.embedder import Embedder
from rcir.errors import RiskUnattainable
from rcir.retrieval.query_uncertainty import (
    QUERY_UNCERTAINTIES,
    available_uncertainties,
    with_uncertainty,
)
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.search import Searcher
from rcir.risk import (
    LabelledResults,
    Learned,
    Quantile,
    ScoreFunction,
    SetRule,
    make_request,
    score,
    smallest_uncertainty,
)
from rcir.torch_settings import keep_freed_memory

ACTIVATIONS = ("relu", "leaky-relu")
WITH_ACTIVATION = ("btl", "vmf", "tripreg")
METHODS = tuple(method for method in RECIPES if method != "tripreg")
SEEDS = {"digits": 3, "fashion": 3, "omniglot": 1, "cub50": 3}
DIVISIONS = sized(5, 1)
ALPHA, DELTA = sized(0.1, 0.5), 0.1
SHARES = (0.3, 0.65)  # the ends of the tuning and the calibration queries
NEIGHBOURHOOD = ("cosine", "gap", "vote")
STATED = ("encoder", "agreement", "overlap")
WITHOUT_LABELS = ("encoder", "overlap", "cosine", "gap")
COLUMNS = (*STATED, *NEIGHBOURHOOD, "neighbourhood", "with variance")
TITLES = {
    "labels": f"One image per label: certified size at alpha {ALPHA}",
    "no labels": f"Without labels: certified size at alpha {ALPHA}",
    "new labels": f"Labels that did not tune: mean size that misses {ALPHA} of the queries",
    "corrupted": f"Corrupted queries, one image per label: certified size at alpha {ALPHA}",
    "outside": "Images of MNIST: AUROC of detecting them",
}
NOISE, BLUR, HIDDEN = (0.05, 0.1, 0.2), (0.02, 0.04, 0.08), (0.1, 0.2, 0.4)
Rows = list[NDArray[np.int64]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Trained:
    """The queries of one trained encoder, searched.

    Attributes:
        clean: results of the queries with labels, by the kind of uncertainty.
        unlabelled: the same without labels.
        corrupt: results of the corrupted queries, with labels.
        outside: uncertainties of images of another data set by kind; None without one.
    """

    clean: Mapping[str, LabelledResults]
    unlabelled: Mapping[str, LabelledResults]
    corrupt: Mapping[str, LabelledResults]
    outside: Mapping[str, NDArray[np.float64]] | None


def corrupted(images: ImageSet, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """Images of the encoder's size, each with one corruption of one severity, drawn at random.

    Noise has a standard deviation in units of the largest value, blur one in units of the image's
    height, and a black rectangle hides a share of the area.
    """
    pixels = preprocessing.resized(images.images).numpy().copy()  # of arrays it may be a view
    rng = np.random.default_rng(0)
    n, _, height, width = pixels.shape
    kind, severity = rng.integers(3, size=(2, n))
    top, left = rng.uniform(size=(2, n, 1))
    for level in range(3):
        noisy, blurred, hidden = (
            np.flatnonzero((kind == number) & (severity == level)) for number in range(3)
        )
        noise = rng.normal(scale=255 * NOISE[level], size=pixels[noisy].shape)
        pixels[noisy] = (pixels[noisy] + noise).round().clip(0, 255)
        deviation = BLUR[level] * height
        radius = max(1, min(round(3 * deviation), (min(height, width) - 1) // 2))
        soft = gaussian_blur(
            torch.from_numpy(pixels[blurred]), [2 * radius + 1] * 2, [deviation] * 2
        )
        pixels[blurred] = soft.numpy()
        rows, columns = (round(HIDDEN[level] ** 0.5 * side) for side in (height, width))
        above = (top[hidden] * (height - rows + 1)).astype(int) + np.arange(rows)
        before = (left[hidden] * (width - columns + 1)).astype(int) + np.arange(columns)
        pixels[hidden[:, None, None], :, above[:, :, None], before[:, None, :]] = 0
    array = pixels.transpose(0, 2, 3, 1)
    return np.ascontiguousarray(array[..., 0] if preprocessing.channels == 1 else array)


def all_queries(splits: Splits) -> ImageSet:
    """The queries of all three splits, which are divided anew."""
    parts = (splits.tuning, splits.calibration, splits.test)
    images = [part.images for part in parts]
    if isinstance(images[0], np.ndarray):
        pictures = np.concatenate(images)
    else:
        pictures = [image for part in images for image in part]
    labels = np.concatenate([np.asarray(part.labels) for part in parts])
    return ImageSet(pictures, labels, [name for part in parts for name in part.ids])


def searched(
    name: str, method: str, seed: int, runs: Path, options: Mapping[str, str] | None = None
) -> Trained:
    """Train, embed and search; finished runs and stored embeddings are used again."""
    run = run_of(name, method, runs, seed, options)
    stored = Embedder(folder=run.path / "embeddings")

    def embed_whole(encoder: Encoder, preprocessing: Preprocessing, images: Images) -> Embedding:
        return stored(encoder, replace(preprocessing, crop=None), images)

    splits, _ = without_repeats(load_splits(run.data))
    searcher = Retriever.build(
        run.encoder(), run.preprocessing, splits.gallery, embedder=stored
    ).searcher
    kinds = [
        kind for kind in (*STATED, *NEIGHBOURHOOD) if kind in available_uncertainties(searcher)
    ]
    if searcher.gallery.uncertainty is None:
        kinds.remove("encoder")
    queries = all_queries(splits)
    corrupt = replace(queries, images=corrupted(queries, run.preprocessing))
    results = searcher.search_labelled(queries, embedder=stored)
    others = searcher.search_labelled(corrupt, embedder=embed_whole)
    outside = None
    if name != "cub50":
        candidates = searcher.search(read_mnist(data_root(run.data)).queries.images, stored)
        outside = {kind: with_uncertainty(searcher, candidates, kind).uncertainty for kind in kinds}
    return Trained(
        {kind: with_uncertainty(searcher, results, kind) for kind in kinds},
        {kind: unlabelled(searcher, results, kind) for kind in kinds if kind in WITHOUT_LABELS},
        {kind: with_uncertainty(searcher, others, kind) for kind in kinds},
        outside,
    )


def unlabelled(searcher: Searcher, labelled: LabelledResults, kind: str) -> LabelledResults:
    """Results that do not use labels, with an uncertainty that does not either."""
    results = replace(labelled.results, labels=None)
    values = QUERY_UNCERTAINTIES[kind].compute(searcher, results)
    return replace(labelled, results=results.with_uncertainty(values))


def without_variance(labelled: LabelledResults) -> LabelledResults:
    """Results without the uncertainties of candidates that the encoder states."""
    return replace(labelled, results=replace(labelled.results, candidate_uncertainty=None))


def certified_size(fitted: ScoreFunction, queries: LabelledResults, rows: Rows) -> float:
    """The certified mean size of the test queries; NaN if nothing can be certified."""
    _, calibration, test = (queries[each] for each in rows)
    rule = SetRule(fitted, score(fitted, queries[rows[0]]), score(fitted, calibration))
    try:
        guarantee = rule.guarantee(make_request(ALPHA, DELTA))
    except RiskUnattainable:
        return np.nan
    return float(rule.sets(test.results, guarantee)[1].mean())


def needed_size(fitted: ScoreFunction, queries: LabelledResults, rows: Rows) -> float:
    """The mean size of the test queries at the threshold that misses alpha of them."""
    scored = score(fitted, queries[rows[2]])
    ascending = scored.ascending_match_scores
    threshold = float(ascending[len(ascending) - 1 - int(ALPHA * len(ascending))])
    return float(scored.sizes(threshold).mean()) if np.isfinite(threshold) else np.nan


def sizes(
    kinds: Mapping[str, LabelledResults],
    rows: Rows,
    size: Callable[[ScoreFunction, LabelledResults, Rows], float],
) -> dict[str, float]:
    """Sizes by each uncertainty alone, by the neighbourhood, and with what the encoder states.

    Among several uncertainties, the tuning queries choose as `auto` does.
    """
    tuning = {kind: queries[rows[0]] for kind, queries in kinds.items()}
    by_column = {}
    for kind, queries in kinds.items():
        alone = without_variance(tuning[kind])
        by_column[kind] = size(Quantile.fit(alone.results, alone.relevant), queries, rows)
    near, _ = smallest_uncertainty(
        {kind: tuning[kind] for kind in NEIGHBOURHOOD if kind in kinds}, [ALPHA], DELTA
    )
    split = without_variance(tuning[near])
    fitted = Learned.fit(split.results, split.relevant)
    by_column["neighbourhood"] = size(fitted, without_variance(kinds[near]), rows)
    if stated := {kind: tuning[kind] for kind in STATED if kind in kinds}:
        best, _ = smallest_uncertainty(stated, [ALPHA], DELTA)
        fitted = Learned.fit(tuning[best].results, tuning[best].relevant)
        by_column["with variance"] = size(fitted, kinds[best], rows)
    return by_column


def divisions(n: int) -> Iterator[Rows]:
    """Random divisions of n queries into tuning, calibration and test queries."""
    for seed in range(DIVISIONS):
        order = np.random.default_rng(seed).permutation(n)
        yield np.split(order, [round(share * n) for share in SHARES])


def divisions_by_label(labels: NDArray[np.int64]) -> Iterator[Rows]:
    """The same, with half of the labels in tuning and the other half in the test queries."""
    names, number = np.unique(labels, return_inverse=True)
    for rows in divisions(len(names)):
        order = np.concatenate(rows)
        tunes = np.isin(number, order[: len(order) // 2])
        yield [np.flatnonzero(tunes), np.flatnonzero(tunes), np.flatnonzero(~tunes)]


def measured(trained: Trained) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the table and the sizes by column, of each division."""
    one_each, corrupt = (
        {kind: each.first_of_each_label() for kind, each in results.items()}
        for results in (trained.clean, trained.corrupt)
    )
    queries = one_each["cosine"]
    for rows in divisions(len(queries)):
        yield "labels", sizes(one_each, rows, certified_size)
        yield "no labels", sizes(trained.unlabelled, rows, certified_size)
        yield "corrupted", sizes(corrupt, rows, certified_size)
    assert queries.population.labels is not None
    for rows in divisions_by_label(queries.population.labels):
        yield "new labels", sizes(one_each, rows, needed_size)
    if trained.outside is not None:
        inside = {kind: each.results.uncertainty for kind, each in trained.clean.items()}
        yield "outside", {kind: auroc(inside[kind], far) for kind, far in trained.outside.items()}


def auroc(inside: NDArray[np.float64], outside: NDArray[np.float64]) -> float:
    """AUROC of detecting images of another data set by an uncertainty."""
    is_outside = np.repeat([False, True], [len(inside), len(outside)])
    return float(roc_auc_score(is_outside, np.concatenate([inside, outside])))


def cells(values: list[dict[str, float]]) -> list[str]:
    """The means of a table's row; the ratio with its range over seeds and divisions."""
    means = []
    for column in COLUMNS:
        each = [value[column] for value in values if column in value]
        means.append(f"{np.nanmean(each):.3f}" if each else "-")
    ratios = [
        value["with variance"] / value["neighbourhood"]
        for value in values
        if "with variance" in value
    ]
    if not ratios:
        return [*means, "-"]
    low, high = np.nanquantile(ratios, [0.05, 0.95])
    return [*means, f"{np.nanmean(ratios):.3f} ({low:.2f} to {high:.2f})"]


def worth(name: str, method: str, activation: str, seed: int, runs: Path) -> dict[str, Floats]:
    """AUROC of misses of one training; by division, sizes and their ratios in both tables."""
    changed = {} if activation == "leaky-relu" else {"activation": activation}
    trained = searched(name, method, seed, runs, changed)
    stated = trained.clean["encoder"]
    misses = roc_auc_score(~stated.relevant[:, 0], stated.results.uncertainty)
    found = {"AUROC": np.array([misses])}
    kinds = {kind: each.first_of_each_label() for kind, each in trained.clean.items()}
    for table, results in (("labels", kinds), ("no labels", trained.unlabelled)):
        each = [sizes(results, rows, certified_size) for rows in divisions(len(results["encoder"]))]
        for column in ("encoder", "neighbourhood", "with variance"):
            found[f"{table}/{column}"] = np.array([size[column] for size in each])
        before = found[f"{table}/neighbourhood"]
        found[f"{table}/ratio"] = found[f"{table}/with variance"] / before
    return found


def interval(trainings: Sequence[Floats]) -> Floats:
    """The geometric mean over trainings and divisions, and its 95% interval over trainings.

    One training has an interval of width 0, and one that certifies nothing makes all three NaN.
    """
    logs, n = [np.nanmean(np.log(values)) for values in trainings], len(trainings)
    margin = student.ppf(0.975, n - 1) * np.std(logs, ddof=1) / n**0.5 if n > 1 else 0.0
    return np.exp(np.mean(logs) + margin * np.array([0, -1, 1]))


def compare_activations(
    sets: Sequence[str], methods: Sequence[str], activations: Sequence[str], seeds: int, runs: Path
) -> tuple[list[list[str]], dict[str, float]]:
    """Rows of each activation and of the last over the first, and their means and intervals."""
    rows, figures = [], {}
    for name, method in product(sets, methods):
        by_seed = {
            activation: [worth(name, method, activation, seed, runs) for seed in range(seeds)]
            for activation in activations
        }
        first, last = by_seed[activations[0]], by_seed[activations[-1]]
        by_seed["last over first"] = [
            {key: after[key] / before[key] for key in before}
            for before, after in zip(first, last, strict=True)
        ]
        for activation, trainings in by_seed.items():
            for key in trainings[0]:
                numbers = interval([training[key] for training in trainings])
                rows.append([name, method, activation, key, *map("{:.3f}".format, numbers)])
                print(f"| {' | '.join(rows[-1])} |", flush=True)
                for kind, number in zip(("mean", "low", "high"), numbers, strict=True):
                    figures[f"{name}/{method}/{activation}/{key}/{kind}"] = float(number)
    return rows, figures


def main() -> None:
    """Train, search, measure and print."""
    command = parser(__doc__)
    runs = Path("runs", sized("methods", "methods-short"))
    command.add_argument("--runs", type=Path, default=runs, help="trained runs")
    command.add_argument("--sets", nargs="+", choices=SETS, default=sized(SETS, SETS[:1]))
    methods = sized(METHODS, ("deterministic", "btl"))
    command.add_argument("--encoders", nargs="+", choices=RECIPES, default=methods)
    command.add_argument("--seeds", type=int, help="how many trainings of each method")
    command.add_argument(
        "--activation",
        nargs="+",
        choices=ACTIVATIONS,
        default=sized((), ACTIVATIONS),
        help="compare these, of the encoders that have the option",
    )
    options = command.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if options.activation:
        methods = [method for method in options.encoders if method in WITH_ACTIVATION]
        rows, figures = compare_activations(
            options.sets, methods, options.activation, options.seeds or sized(5, 1), options.runs
        )
        columns = ["set", "method", "activation", "number", "mean", "low", "high"]
        report("Activation of the head", columns, rows, figures, options.json)
        if not sized(False, True):
            return
    tables: dict[str, list[list[str]]] = {title: [] for title in TITLES}
    figures = {}
    for name in options.sets:
        for method in options.encoders:
            values = defaultdict(list)
            for seed in range(options.seeds or sized(SEEDS[name], 1)):
                for table, row in measured(searched(name, method, seed, options.runs)):
                    values[table].append(row)
            for table, each in values.items():
                tables[table].append([name, method, *cells(each)])
                print(f"{table}: | {' | '.join(tables[table][-1])} |", flush=True)
            ratios = [
                row["with variance"] / row["neighbourhood"]
                for row in values["labels"]
                if "with variance" in row
            ]
            if ratios:
                figures[f"{name}_{method}_ratio".replace("-", "_")] = float(np.nanmean(ratios))
    columns = ["set", "method", *COLUMNS, "ratio"]
    *others, last = tables
    for table in others:
        report(TITLES[table], columns, tables[table], {}, None)
    report(TITLES[last], columns, tables[last], figures, options.json)


if __name__ == "__main__":
    main()
