"""Mean certified set sizes beside those of nine recipes that scikit-learn makes in an afternoon.

The recipes are {multinomial logistic regression, discriminant analysis with a shrunk covariance,
weighted vote} x {1 - p, cumulative mass, log ratio}, fitted on the gallery. They have the same
splits and the same exact binomial bound, all labelled queries calibrate, and a set holds one image
per label, the likeliest always. The best of the nine is taken after looking, separately for each
gallery, level and number of labelled queries: nobody could choose as well beforehand. `before` is
what the score functions of neighbours need (`auto`), chosen and fitted on three tenths of the
queries, of fewer than 200 on the gallery. Fewer queries than there are, and labels that calibrate,
are drawn several times in each split.

Data: 50 kinds of birds, 120 characters of Omniglot and 6,000 pictures of Fashion-MNIST, embedded by
EfficientNet-Lite0 as ImageNet left it, and two-digit numbers by a network trained as in `rcir
demo`; whole, and small galleries with few items per label. `--parts` measures some:

- `labels`: sizes over the best by hand, and over `before`, with all, 120, 60 and 22 queries;
- `new`: queries of labels that did not calibrate, against the same recipes with a bound on labels;
- `unlabelled`: a table of matches, against one size for all and the distance ratio;
- `violations`: the share of calibrations, drawn from a fixed population, that break their promise;
- `probabilities`: calibration errors of the probabilities that answers state;
- `photographs`: what `rcir certify` states of the birds, each left out of its own search;
- `large`: seconds and memory of a calibration on a large gallery, not among the default parts.

`--sets`, `--galleries` (items per label) and `--splits` measure less; vectors in `--embedded` are
used again. Figures are ratios of mean sizes, `mean_` the geometric mean of all, `worst_` the
largest with three or more items per label, `worst_few` with one or two;
`refused_` counts draws that only others certified.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from birds import MODEL, embedded, weights
from common import parser, report, sized
from methods import run_of
from numpy.typing import NDArray
from PIL import Image
from recipes import Floats, Part, bet, certified, recipes

from calibration import CertificationConfig, certify
from rcir.data import DataConfig, data_root, load_splits
from rcir.data.datasets.handwriting import read_omniglot
from rcir.data.datasets.small_images import read_fashion_mnist
from rcir.data.vector_files import read_vectors
from rcir.encoders.batches import embed
from rcir.errors import InvalidConfig, RiskUnattainable
from rcir.metrics import reliability
from rcir.retrieval.retriever import Retriever
from rcir.risk import (
    LabelledResults,
    ScoredResults,
    SearchResults,
    allowed_misses,
    fit_score_function,
    score,
    smallest_uncertainty,
)
from rcir.risk.request import make_request
from rcir.risk.results import widen
from rcir.risk.selection import Fits

SETS = ("cub50", "omniglot", "fashion", "digits")
GALLERIES = ("full", "1", "2", "3", "4", "8")  # items per label
PARTS = ("labels", "new", "unlabelled", "violations", "probabilities", "photographs")
ALPHAS, DELTA = sized((0.05, 0.1, 0.2), (0.3, 0.4)), 0.1
SPLITS = sized(10, 1)
COUNTS = ("all", "120", "60", "22")  # labelled queries
LABELLED, TEST = sized((800, 800), (100, 60))  # at most
CHARACTERS, PICTURES = sized((120, 600), (12, 20))
DEPTH = 50
FEW, TUNING_SHARE, MAX_ITEMS = 200, 0.3, 500  # of `before`
STAKES = (0.25, 0.5, 0.75, 1.0)  # of bets on labels, in units of the largest
POPULATION_DRAWS, DRAWS, CALIBRATIONS = sized((400, 10, 4), (20, 2, 2))  # of queries
BINS = 15
LARGE = sized((1_000_000, 128, 10_000, 5_000), (2_000, 16, 20, 300))  # items, d, labels, queries
Sizes = dict[tuple[str, str, str, float], dict[str, list[float]]]  # set, gallery, count, alpha


@dataclass(frozen=True)
class Pool:
    """Vectors (n, d) of length 1, labels (n,), and which rows may be in a gallery, or a query."""

    vectors: NDArray[np.float32]
    labels: NDArray[np.int64]
    items: NDArray[np.bool_]
    queries: NDArray[np.bool_]


@dataclass(frozen=True)
class Split:
    """A gallery, labelled queries in the order in which they are used, and test queries."""

    gallery: Part
    labelled: Part
    test: Part


def file_of(name: str, folder: Path) -> Path:
    """Return the file with the vectors of a set; embed it if it does not exist."""
    if name == "cub50":
        return embedded(folder)
    stem = sized(name, f"{name}-short")
    if name == "digits":
        return write_digits(folder / f"{stem}-numbers.npz", folder)
    path = folder / f"{stem}.parquet"
    if not path.is_file():
        read = read_omniglot if name == "omniglot" else read_fashion_mnist
        images = read(data_root(DataConfig())).train
        labels = np.unique(images.labels)
        if name == "omniglot":
            labels = np.random.default_rng(0).permutation(labels)[:CHARACTERS]
        with tempfile.TemporaryDirectory() as pictures:
            for label in labels:
                (place := Path(pictures, f"{label:04}")).mkdir()
                for row in np.flatnonzero(images.labels == label)[:PICTURES]:
                    Image.fromarray(images.images[row]).convert("RGB").save(place / f"{row}.png")
            command = ["embed", pictures, "--output", str(path), "--model", MODEL]
            command += ["--checkpoint", str(weights())]
            subprocess.run([sys.executable, "-m", "rcir.cli", *command], check=True)
    return path


def write_digits(path: Path, folder: Path) -> Path:
    """Write vectors of two-digit numbers, of a clean gallery and queries; return the file."""
    if not path.is_file():
        run = run_of("digits", "btl", folder)
        splits = load_splits(run.data)
        parts = [splits.gallery, splits.tuning, splits.calibration, splits.test]
        vectors = [embed(run.encoder(), run.preprocessing, part.images).vectors for part in parts]
        names = ("gallery", "queries", "queries", "queries")
        np.savez(
            path,
            vector=np.concatenate([each.numpy() for each in vectors]),
            label=np.concatenate([np.asarray(part.labels) for part in parts]),
            group=np.repeat(names, [len(part.labels) for part in parts]),
        )
    return path


def load(name: str, folder: Path) -> Pool:
    """Return the vectors of a set."""
    table = read_vectors(file_of(name, folder))
    vectors = table.vectors / np.linalg.norm(table.vectors, axis=1, keepdims=True)
    labels = np.unique(np.asarray(table.labels), return_inverse=True)[1].astype(np.int64)
    group = np.full(len(labels), "both") if table.group is None else table.group
    return Pool(vectors.astype(np.float32), labels, group != "queries", group != "gallery")


def draw(pool: Pool, gallery: str, seed: int) -> Split:
    """Draw a gallery with some items of each label, or half of those that could be queries.

    The gallery is in the order of its labels.
    """
    order = np.random.default_rng(seed).permutation(len(pool.labels))
    items = order[pool.items[order]]
    items = items[np.argsort(pool.labels[items], kind="stable")]
    _, starts, counts = np.unique(pool.labels[items], return_index=True, return_counts=True)
    whole = counts // 2 if pool.queries[items].any() else counts
    most = whole if gallery == "full" else np.full(len(counts), int(gallery))
    items = items[np.arange(len(items)) - np.repeat(starts, counts) < np.repeat(most, counts)]
    queries = order[pool.queries[order] & ~np.isin(order, items)]
    half = len(queries) // 2
    every = Part(pool.vectors, pool.labels)
    return Split(every[items], every[queries[:half][:LABELLED]], every[queries[half:][:TEST]])


def calibrated(gallery: Part, labelled: Part, **options: Any) -> Retriever:
    """Return a retriever of a gallery, calibrated."""
    retriever = Retriever.from_embeddings(gallery.vectors, labels=gallery.labels, depth=DEPTH)
    options = {"alphas": ALPHAS, "delta": DELTA, **options}
    retriever.calibrate(labelled.vectors, labelled.labels, **options)
    return retriever


def answered(retriever: Retriever, queries: Part, alpha: float, **options: Any) -> float:
    """Return the mean size of the answers; NaN if nothing certifies them."""
    try:
        answers = retriever.retrieve(queries.vectors, alpha, DELTA, **options)
    except (RiskUnattainable, InvalidConfig):  # one item per label may not tune for new labels
        return np.nan
    return float(np.mean([answer.size for answer in answers]))


def neighbours(
    gallery: Part, queries: Part, own: NDArray[np.int64] | None = None
) -> LabelledResults:
    """Search without the (n,) items of the queries themselves, if they are some."""
    cosines = queries.vectors @ gallery.vectors.T
    if own is not None:
        cosines[np.arange(len(queries)), own] = -np.inf
    positions = np.argsort(-cosines, axis=1, kind="stable")[:, :DEPTH]
    nearest = np.take_along_axis(cosines, positions, axis=1).astype(np.float64)
    distances = np.sqrt(np.maximum(2 - 2 * nearest, 0))
    positions[np.isinf(nearest)] = -1
    labels = np.where(positions < 0, np.iinfo(np.int64).min, gallery.labels[positions])
    results = SearchResults(1 - nearest[:, 0], positions.shape[1], distances, labels)
    right = np.bincount(gallery.labels, minlength=queries.labels.max() + 1)[queries.labels]
    relevant = labels == queries.labels[:, None]
    return LabelledResults(results, relevant, right - (own is not None), one_label=True)


def uncertainties(labelled: LabelledResults) -> dict[str, LabelledResults]:
    """Return the results with each uncertainty of the neighbourhood: cosine, gap and vote."""
    results = labelled.results
    labels, distances = results.require("labels"), results.require("distances")
    second = np.where(labels != labels[:, :1], distances, np.inf).min(axis=1)
    votes = (labels[:, :30] == labels[:, :1]).sum(axis=1) / min(30, results.depth)
    values = {
        "cosine": results.uncertainty,
        "gap": np.divide(distances[:, 0], second, out=np.ones(len(second)), where=second > 0),
        "vote": 1 - votes,
    }
    return {name: labelled.with_uncertainty(value) for name, value in values.items()}


def before(split: Split, rows: NDArray[np.int64] | None = None) -> tuple[Floats, Floats]:
    """Return scores of right answers (n,) and of candidates, by `auto` on neighbours, see above.

    Labelled queries tune at rows, without these the gallery.
    """
    gallery = split.gallery
    if rows is None:
        several = np.flatnonzero(np.bincount(gallery.labels)[gallery.labels] > 1)
        items = np.random.default_rng(0).permutation(several)[:MAX_ITEMS]
        tuned = uncertainties(neighbours(gallery, gallery[items], items))
    else:
        tuned = uncertainties(neighbours(gallery, split.labelled[rows]))
    kind, _ = smallest_uncertainty(tuned, ALPHAS, DELTA)
    first = tuned[kind].first_of_each_label()
    fitted, _ = fit_score_function(
        *("auto", first.results, first.relevant, ALPHAS, DELTA),
        n_relevant=first.n_relevant,
        fits=Fits(first),
    )
    evidence, tests = (
        score(fitted, uncertainties(neighbours(gallery, part))[kind].first_of_each_label())
        for part in (split.labelled, split.test)
    )
    return widen(evidence.match_score), tests.require("scores").astype(np.float64)


def scored(retriever: Retriever, queries: Part) -> ScoredResults:
    """Return the scores of labels for queries by a retriever that its gallery tuned."""
    calibration, searcher = retriever.calibration, retriever.searcher
    assert calibration is not None
    rule = calibration.rule_for(make_request())
    results = searcher.search_labelled(searcher.labelled(queries.vectors, queries.labels)[0])
    return score(rule.score_function, calibration.arrange(searcher, results, rule))


def sizes_of_labels(pool: Pool, gallery: str, seed: int) -> Iterator[tuple[str, float, str, float]]:
    """Yield number of labelled queries, alpha, method and mean size of one split."""
    split = draw(pool, gallery, seed)
    n, labelled = len(split.labelled), split.labelled
    right = np.searchsorted(np.unique(split.gallery.labels), labelled.labels)
    scores = recipes(split.gallery, np.concatenate([labelled.vectors, split.test.vectors]))
    methods = {name: (values[np.arange(n), right], values[n:]) for name, values in scores.items()}
    retriever = calibrated(split.gallery, labelled, tuning="gallery")
    match, sets = (scored(retriever, part) for part in (labelled, split.test))
    methods["ours"] = widen(match.match_score), sets.require("scores").astype(np.float64)
    several = np.unique(split.gallery.labels, return_counts=True)[1] > 1
    earlier = before(split) if several.mean() > 0.5 else None
    for count, rows in draws(n, COUNTS, DRAWS, seed):
        for alpha in ALPHAS:
            for name, (values, others) in methods.items():
                yield count, alpha, name, certified(values[rows], others, alpha, DELTA)
        if len(rows) < FEW and earlier is not None:
            values, others = earlier
        else:
            cut = round(TUNING_SHARE * len(rows))
            values, others = before(split, rows[:cut])
            rows = rows[cut:]
        for alpha in ALPHAS:
            yield count, alpha, "before", certified(values[rows], others, alpha, DELTA)


def draws(
    n: int, counts: tuple[str, ...], repeats: int, seed: int
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yield numbers of queries, and rows of that many of n; repeatedly unless these are all."""
    rng = np.random.default_rng(seed)
    for count in counts:
        if count == "all":
            yield count, np.arange(n)
        elif int(count) <= n:
            for _ in range(repeats):
                yield count, rng.permutation(n)[: int(count)]


def sizes_of_new_labels(
    pool: Pool, gallery: str, seed: int
) -> Iterator[tuple[str, float, str, float]]:
    """Yield the same for queries of the half of the labels that did not calibrate."""
    split = draw(pool, gallery, seed)
    names, n = np.unique(split.gallery.labels), len(split.labelled)
    right = np.searchsorted(names, split.labelled.labels)
    scores = recipes(split.gallery, np.concatenate([split.labelled.vectors, split.test.vectors]))
    rng = np.random.default_rng(seed)
    for _ in range(CALIBRATIONS):
        calibrate = rng.permutation(names)[: len(names) // 2]
        rows = np.flatnonzero(np.isin(split.labelled.labels, calibrate))
        new = np.flatnonzero(~np.isin(split.test.labels, calibrate))
        labelled, test = split.labelled[rows], split.test[new]
        first = np.unique(labelled.labels, return_index=True)[1]
        retriever = calibrated(split.gallery, labelled)
        for alpha in ALPHAS:
            for name, values in scores.items():
                match, sets = values[rows, right[rows]], values[n + new]
                yield "new", alpha, f"{name}, one", certified(match[first], sets, alpha, DELTA)
                for stake in STAKES:
                    threshold = bet(match, labelled.labels, alpha, DELTA, stake)
                    size = (sets <= threshold).sum(axis=1).mean() if threshold < np.inf else np.nan
                    yield "new", alpha, f"{name}, stake {stake}", float(size)
            yield "new", alpha, "ours", answered(retriever, test, alpha, query_labels="new")


def sizes_without_labels(
    pool: Pool, gallery: str, seed: int
) -> Iterator[tuple[str, float, str, float]]:
    """Yield sizes of sets of items, their matches a table, beside fixed k and distance ratios."""
    split = draw(pool, gallery, seed)
    items, n = split.gallery, len(split.labelled)
    vectors = np.concatenate([split.labelled.vectors, split.test.vectors])
    distances = np.sqrt(np.maximum(2 - 2 * (vectors @ items.vectors.T).astype(np.float64), 0))
    order = np.argsort(distances, axis=1, kind="stable")
    ordered = np.take_along_axis(distances, order, axis=1)
    ranks = np.broadcast_to(np.arange(len(items), dtype=np.float64), order.shape)
    scores = {"fixed": ranks, "ratio": ordered / np.maximum(ordered[:, :1], 1e-12)}
    first = (items.labels[order[:n]] == split.labelled.labels[:, None]).argmax(axis=1)
    matches = {
        label: [str(row) for row in np.flatnonzero(items.labels == label)]
        for label in np.unique(items.labels)
    }
    for count, rows in draws(n, ("all", "60"), CALIBRATIONS, seed):
        retriever = Retriever.from_embeddings(items.vectors, depth=DEPTH)
        known = split.labelled[rows]
        lists = [matches[label] for label in known.labels]
        retriever.calibrate(known.vectors, lists, alphas=ALPHAS, delta=DELTA)
        for alpha in ALPHAS:
            for name, values in scores.items():
                match = values[rows, first[rows]]
                yield count, alpha, name, certified(match, values[n:], alpha, DELTA)
            yield count, alpha, "ours", answered(retriever, split.test, alpha)


def violations(pool: Pool) -> Iterator[tuple[str, float, float]]:
    """Yield number of queries, alpha, and the share of calibrations that break their promise.

    The population is fixed: all queries of a split, scored by what the gallery alone fitted.
    Calibrations draw from it with replacement, so that the risk of each is known exactly.
    """
    split = draw(pool, "full", 0)
    queries = Part(
        np.concatenate([split.labelled.vectors, split.test.vectors]),
        np.concatenate([split.labelled.labels, split.test.labels]),
    )
    calibration = calibrated(split.gallery, queries, tuning="gallery").calibration
    assert calibration is not None
    match = np.asarray(calibration.rule_for(make_request()).evidence.match_score, np.float64)
    rng = np.random.default_rng(0)
    for count in COUNTS:
        number = len(match) if count == "all" else int(count)
        drawn = np.sort(rng.choice(match, (POPULATION_DRAWS, number)), axis=1)
        for alpha in ALPHAS:
            allowed = allowed_misses(number, alpha, DELTA)
            if allowed >= 0:
                thresholds = widen(drawn[:, number - 1 - allowed])
                risks = 1 - np.searchsorted(np.sort(match), thresholds, side="right") / len(match)
                yield count, alpha, float((risks > alpha).mean())


def calibration_errors(pool: Pool, splits: int) -> dict[str, float]:
    """Return the expected calibration errors of the probabilities of items and of sets."""
    stated = defaultdict(list)
    for seed in range(splits):
        split = draw(pool, "full", seed)
        retriever = calibrated(split.gallery, split.labelled)
        answers = retriever.retrieve(split.test.vectors, ALPHAS[1], DELTA)
        for answer, label in zip(answers, split.test.labels, strict=True):
            right = np.asarray(answer.labels) == label
            stated["item"] += zip(answer.probabilities, right, strict=True)
            stated["set"].append((answer.match_probability, right.any()))
    return {
        f"ece_{kind}": reliability(*np.transpose(pairs), BINS, equal_mass=True).error
        for kind, pairs in stated.items()
    }


def photographs(folder: Path) -> dict[str, float]:
    """Return the certified mean sizes of the photographs of birds, as the README states them."""
    with tempfile.TemporaryDirectory() as output:
        config = CertificationConfig(str(file_of("cub50", folder)), output=f"{output}/certified")
        rows = certify(config).evaluation.rows
    return {f"photographs_size_{row.alpha:g}": row.mean_size for row in rows if row.mean_size}


def peak_memory() -> float:
    """Return the largest memory of this process, in GiB, since this was called last (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(peak) / 2**20


def large() -> dict[str, float]:
    """Return seconds and memory (GiB) of a calibration on a large gallery, and of its answers."""
    n, dim, labels, queries = LARGE
    rng = np.random.default_rng(0)
    number = rng.integers(labels, size=n + 2 * queries)
    centres = rng.standard_normal((labels, dim), np.float32)
    vectors = centres[number]
    vectors += rng.standard_normal(vectors.shape, np.float32)
    retriever = Retriever.from_embeddings(vectors[:n], labels=number[:n])
    known, asked = slice(n, n + queries), vectors[n + queries :]
    peak_memory()
    resident = peak_memory()
    started = time.perf_counter()
    retriever.calibrate(vectors[known], number[known])
    _ = retriever.guarantee(0.1, DELTA)
    figures = {"fit_seconds": time.perf_counter() - started}
    figures["fit_memory"] = peak_memory() - resident
    for name, count, repeats in (("batch", 1000, 1), ("single", 1, 20)):
        part = asked[:count]
        retriever.retrieve(part, 0.1, DELTA)
        started = time.perf_counter()
        for _ in range(repeats):
            retriever.retrieve(part, 0.1, DELTA)
        figures[f"{name}_milliseconds"] = 1000 * (time.perf_counter() - started) / repeats
    return figures


def compared(
    name: str, sizes: Sizes, peers: Callable[[str], bool], rows: list[list[str]]
) -> dict[str, float]:
    """Return figures of the sizes over the best of the peers, and append rows to a raw table."""
    ratios, figures, refused = defaultdict(list), {}, 0
    for (data, gallery, count, alpha), by_method in sizes.items():
        values = {method: np.array(each) for method, each in by_method.items()}
        ours = values["ours"]
        means = {method: each.mean() for method, each in values.items() if peers(method)}
        best = min(means, key=lambda method: np.nan_to_num(means[method], nan=np.inf))
        refused += int((np.isnan(ours) & ~np.isnan(values[best])).sum())
        both = ~np.isnan(ours) & ~np.isnan(values[best])
        ratio = float(ours[both].mean() / values[best][both].mean()) if both.any() else np.nan
        other = values.get("before", ours)
        size, peer, old = (f"{each.mean():.3f}" for each in (ours, values[best], other))
        labels = [data, gallery, count, f"{alpha:g}"]
        rows.append([name, *labels, best, peer, old, size, f"{ratio:.3f}"])
        if not both.any():
            continue
        kind = "" if gallery == "full" else f"_{gallery}"
        suffix = "" if count in ("all", "new") else f"_{count}"
        figures[f"{data}{kind}_size_over_{name}_{alpha:g}{suffix}"] = ratio
        few = "_few" if gallery in ("1", "2") else ""
        ratios[f"mean_{name}{suffix}"].append(ratio)
        ratios[f"worst_{name}{few}{suffix}"].append(ratio)
    for key, each in ratios.items():
        mean = key.startswith("mean")
        figures[key] = float(np.exp(np.mean(np.log(each)))) if mean else max(each)
    figures[f"refused_{name}"] = float(refused)
    return figures


# Of a part: the name of its peers in figures, and what measures one split.
SIZES: Mapping[str, tuple[str, Callable[..., Iterator[tuple[str, float, str, float]]]]] = {
    "labels": ("hand", sizes_of_labels),
    "new": ("hand_new", sizes_of_new_labels),
    "unlabelled": ("fixed_or_ratio", sizes_without_labels),
}


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--embedded", type=Path, help="where vectors are, or go to")
    command.add_argument("--sets", nargs="+", choices=SETS, default=sized(SETS, SETS[-1:]))
    galleries = sized(GALLERIES, ("2", "8"))
    command.add_argument("--galleries", nargs="+", choices=GALLERIES, default=galleries)
    parts = sized(PARTS, PARTS[:-1])  # without photographs
    command.add_argument("--parts", nargs="+", choices=(*PARTS, "large"), default=parts)
    command.add_argument("--splits", type=int, default=SPLITS)
    options = command.parse_args()
    warnings.simplefilter("ignore")  # of recurring photographs and labels without queries
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.embedded or Path(temporary)
        pools = {name: load(name, folder) for name in options.sets}
        for part in sorted(SIZES.keys() & options.parts):
            peers, measure = SIZES[part]
            sizes: Sizes = defaultdict(lambda: defaultdict(list))
            for name, pool in pools.items():
                for gallery in options.galleries:
                    for seed in range(options.splits):
                        for count, alpha, method, size in measure(pool, gallery, seed):
                            sizes[name, gallery, count, alpha][method].append(size)
            figures |= compared(peers, sizes, lambda method: method not in ("ours", "before"), rows)
            if part == "labels":
                figures |= compared("before", sizes, lambda method: method == "before", [])
        for name, pool in pools.items():
            if "violations" in options.parts:
                for count, alpha, share in violations(pool):
                    figures[f"{name}_violated_{alpha:g}_{count}"] = share
            if "probabilities" in options.parts:
                errors = calibration_errors(pool, options.splits)
                figures |= {f"{name}_{key}": value for key, value in errors.items()}
        if "photographs" in options.parts:
            figures |= photographs(folder)
    if "large" in options.parts:
        figures |= large()
    columns = ["peers", "set", "gallery", "queries", "alpha", "best", "size", "before", "ours", ""]
    report("Mean certified sizes over those of others", columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
