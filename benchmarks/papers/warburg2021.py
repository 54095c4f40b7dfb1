"""Experiments of Warburg et al., "Bayesian Triplet Loss" (ICCV 2021), with the data at hand.

- `normal` (supplement, figures 1 to 9): the largest difference between the distribution function of
  tau, by 200,000 draws, and its normal approximation. Of 20 triplets for each dimension, means are
  drawn from the prior, variances between 0 and twice that of the prior.
- `curves` (figures 2 and 3): loss and gradients by mean and deviation of tau, beside the triplet
  loss and the published listing, which takes P(tau < m) + 1e-8 for P(tau < -m).
- `cub50` (table 1): heads on the frozen features of `cub50.py`, measured as there; others than its
  own have the recipe of its BTL. "expected" ranks all images by expected distance.
- `ood` (figure 8): how the variance of the query, and its sum with that of the nearest gallery
  image, tells queries of MNIST from test queries, and wrong first images from others, by the runs
  of `methods.py` in the folder `methods` beside `--runs`.

Trained runs are reused. RCIR_DATA is the folder of the data sets.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.special import ndtr
from tables import auroc, markdown, options, search, sized, spread, titled, write_figures

# isort: split
import cub50
from methods import run_of

from rcir.data import DataConfig, data_root, load_splits
from rcir.data.datasets.small_images import read_mnist
from rcir.data.datasets.user_images import read_folder
from rcir.encoders import Encoder
from rcir.encoders.base import require_variance
from rcir.encoders.batches import embed
from rcir.figures import add_labels
from rcir.index import build_index
from rcir.losses import order_nll, triplet_moments
from rcir.runs.folder import RunFolder
from training import train
from training.images import FeaturePreprocessing

Floats = NDArray[np.float64]
Outcomes = Mapping[str, Sequence[Mapping[str, float]]]  # by row, of each seed
DIMENSIONS = (1, 2, 4, 8, 16, 32, 128, 512, 2048)
TRIPLETS, DRAWS = sized((20, 200_000), (2, 1000))
# tau is the sum over dimensions of x' TAU x, where x = (a, p, n).
TAU = np.array([[0.0, -1, 1], [-1, 1, 0], [1, 0, -1]])
MARGIN, DEVIATIONS, MEANS = 0.1, (0.1, 0.3, 1.0), (-1.0, -0.5, 0.0, 0.5, 1.0)
COLUMNS = (*(f"{name}@{k}" for name in ("R", "mAP", "ECE") for k in (1, 5, 10)), "AUROC")
SCALED = {"variance_hidden": 500, "scaled": True}
# Encoders of rows, and their options where `cub50.py` does not train them.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "triplet": ("deterministic", {}),
    "MC dropout": ("mc-dropout", {}),
    "TripReg": ("tripreg", {"variance_hidden": 500, "unit": True}),
    "vMF": ("vmf", {"concentration_hidden": 500}),
    "BTL": ("btl", {}),
    "BTL expected": ("btl", {}),
    "BTL scaled": ("btl", SCALED),
    "BTL scaled expected": ("btl", SCALED),
}
PUBLISHED = """
triplet, ResNet-50: .648 .864 .917 .648 .505 .440 - - -
TripReg, ResNet-50: .643 .863 .916 .643 .503 .437 .196 .331 .397
vMF, ResNet-50: .635 .855 .911 .635 .492 .426 .138 .064 .089
BTL, ResNet-50: .612 .842 .902 .612 .467 .397 .119 .037 .099
BTL expected, ResNet-50: .632 .857 .912 .630 .489 .424 .137 .020 .072
triplet, DenseNet-161: .717 .894 .935 .717 .598 .537 - - -
MC dropout, DenseNet-161: .349 .591 .700 .349 .200 .143 .290 .428 .480
"""
OUTSIDE = sized(("digits", "digits scaled", "fashion"), ("digits",))


def panels(x: str, *titles: str) -> tuple[Figure, list[Any]]:
    """Return a figure and its panels, side by side."""
    figure = Figure(figsize=(3.7 * len(titles), 3.4), layout="constrained", dpi=100)
    every = zip(figure.subplots(1, len(titles), squeeze=False)[0], titles, strict=True)
    return figure, [add_labels(panel, x, "", title) for panel, title in every]


def finish(
    part: str, title: str, outcomes: Outcomes, figure: Figure | None, folder: Path | None
) -> dict[str, float]:
    """Print the table of a part, save its figure, and return its numbers by name."""
    rows, numbers = [], {}
    for row, results in outcomes.items():
        values = {name: [one[name] for one in results] for name in results[0]}
        rows.append((row, *map(spread, values.values())))
        numbers |= {f"{part}/{row}/{name}": float(np.mean(each)) for name, each in values.items()}
    if part == "cub50":
        published = (line.split(": ") for line in PUBLISHED.strip().splitlines())
        rows += [(f"published: {name}", *text.split(), "-") for name, text in published]
    print(f"### {titled(title)}\n\n{markdown(('row', *values), rows)}\n", flush=True)
    if figure is not None and folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"{part}.png")
    return numbers


def draw_tau(means: Floats, variances: Floats, count: int, rng: np.random.Generator) -> Floats:
    """Draw tau (count,) of Gaussians with means (3, d) and isotropic variances (3,).

    In standard coordinates, `TAU` has a negative eigenvalue, one that is 0, and a positive one: tau
    is a weighted difference of two independent noncentral chi-squares with d degrees of freedom.
    """
    root = np.sqrt(variances)[:, None]
    weights, axes = np.linalg.eigh(root * TAU * root.T)
    noncentral = np.square(axes.T @ (means / root)).sum(axis=1)
    dim = means.shape[1]
    low, high = (weights[i] * rng.noncentral_chisquare(dim, noncentral[i], count) for i in (0, 2))
    return np.asarray(low + high)


def normal(arguments: Namespace) -> dict[str, float]:
    """Measure the normal approximation."""
    rng, ranks, outcomes = np.random.default_rng(0), np.arange(DRAWS + 1) / DRAWS, {}
    figure, (left, right) = panels("tau, standardised", "simulated less normal CDF", "largest")
    for dim in DIMENSIONS:
        largest = []
        for _ in range(TRIPLETS):
            means, variances = rng.normal(size=(3, dim)) / dim**0.5, rng.uniform(0, 2, 3) / dim
            tensors = torch.from_numpy(means), torch.from_numpy(variances)[:, None]
            mean, variance = (float(each) for each in triplet_moments(*tensors))
            drawn = np.sort((draw_tau(means, variances, DRAWS, rng) - mean) / variance**0.5)
            above, below = ranks[1:] - ndtr(drawn), ranks[:-1] - ndtr(drawn)
            largest.append(max(above.max(), -below.min()))
        if dim in DIMENSIONS[:7:2]:
            left.plot(drawn[::99], above[::99], label=f"d = {dim}")
        outcomes[str(dim)] = [{"mean": np.mean(largest), "max": max(largest)}]
    left.set(xlim=(-4, 4))
    right.set(xlabel="dimension")
    for name in ("mean", "max"):
        values = [result[name] for (result,) in outcomes.values()]
        right.loglog(DIMENSIONS, values, "o-", label=f"{name} of {TRIPLETS} triplets")
    for panel in (left, right):
        panel.legend(frameon=False)
    return finish("normal", "Largest error, by dimension", outcomes, figure, arguments.figures)


def losses(mean: torch.Tensor, deviation: float) -> dict[str, Floats]:
    """Return losses at means (n,) of tau, and their gradients by mean and deviation of tau."""
    mean = mean.double().requires_grad_()
    deviations = torch.full_like(mean, deviation, requires_grad=True)
    listing = torch.special.ndtr((MARGIN - mean) / deviations) + 1e-8
    text = order_nll(mean, deviations.square(), MARGIN)
    found = {"triplet": (mean + MARGIN).relu()}
    for name, loss in {"loss": text, "listing": -listing.log()}.items():
        slopes = torch.autograd.grad(loss.sum(), (mean, deviations))
        found |= {name: loss, f"{name} by mean": slopes[0], f"{name} by deviation": slopes[1]}
    return {name: values.detach().numpy() for name, values in found.items()}


def curves(arguments: Namespace) -> dict[str, float]:
    """Compute the loss and its gradients."""
    means = torch.linspace(-1, 1, 201)
    figure, every = panels("mean of tau", "loss", "gradient by mean", "gradient by deviation")
    for panel, name in zip(every, ("loss", "loss by mean", "loss by deviation"), strict=True):
        for deviation in DEVIATIONS:
            panel.plot(means, losses(means, deviation)[name], label=f"deviation {deviation:g}")
        values = losses(means, DEVIATIONS[0])
        panel.plot(means, values[name.replace("loss", "listing")], "k:", label="listing, 0.1")
        panel.set(yscale="symlog")
    every[0].plot(means, values["triplet"], "k--", label="triplet loss")
    every[0].set(yscale="linear", ylim=(0, 25))
    every[0].legend(frameon=False)
    outcomes = {}
    for mean in MEANS:
        at = losses(torch.tensor([mean]), DEVIATIONS[0])
        outcomes[f"{mean:g}"] = [{name: float(value[0]) for name, value in at.items()}]
    title = f"Loss and gradients by mean of tau, deviation {DEVIATIONS[0]:g}, margin {MARGIN:g}"
    return finish("curves", title, outcomes, figure, arguments.figures)


def encoders(row: str, seeds: int, runs: Path) -> list[Encoder]:
    """Return the trained encoders of a row of table 1, seed by seed."""
    method, chosen = ENCODERS[row]
    if not chosen:
        return [run.encoder() for run in cub50.runs_of(method, True, seeds, runs)][:seeds]
    trained = []
    for seed in range(seeds):
        config = cub50.configuration("btl", True, seed, runs)
        name = f"cub50-frozen-{method}{'-scaled' * (chosen is SCALED)}-{seed}"
        encoder = replace(config.encoder, method=method, options=chosen)
        mining = replace(config.mining, positive=None)  # that which suits the method
        trained.append(train(replace(config, name=name, encoder=encoder, loss={}, mining=mining)))
    return [run.encoder() for run in trained]


def table(arguments: Namespace) -> dict[str, float]:
    """Train and measure the rows of table 1."""
    seeds, runs = arguments.seeds, arguments.runs
    data = cub50.configuration("btl", True, 0, runs).data.options
    _, features = cub50.features_of(read_folder(Path(), data["path"], data["train"]).queries)
    outcomes: dict[str, list[dict[str, float]]] = {row: [] for row in arguments.encoders}
    for row, results in outcomes.items():
        for encoder in encoders(row, seeds, runs):
            searched = search(FeaturePreprocessing(), encoder, features, row.endswith("expected"))
            found = cub50.scores(searched, features)
            results.append({name: found[name] for name in COLUMNS})
    title = f"CUB-200-2011, classes 26 to 50, frozen features, {seeds} seeds from 0"
    return finish("cub50", title, outcomes, None, None)


def detection(run: RunFolder) -> tuple[dict[str, float], list[Floats]]:
    """Return scores of a run, and variances of its test queries and of MNIST's with neighbours."""
    encoder, splits = run.encoder(), load_splits(run.data)
    sets = (splits.gallery, splits.test, read_mnist(data_root(DataConfig())).queries)
    embedded = [embed(encoder, run.preprocessing, images.images) for images in sets]
    items, *alone = (require_variance(each)[:, 0].double().numpy() for each in embedded)
    gallery, *queries = (each.vectors.numpy() for each in embedded)
    index = build_index(gallery)
    nearest = [index.search(each, 1)[1][:, 0] for each in queries]
    pairs = [own + items[rows] for own, rows in zip(alone, nearest, strict=True)]
    right = splits.test.relevance.matches(splits.gallery.relevance, nearest[0][:, None])[:, 0]
    numbers = {"R@1": float(right.mean())}
    for name, (inside, outside) in {"query": alone, "pair": pairs}.items():
        numbers[f"miss {name}"] = auroc(inside[right], inside[~right])
        numbers[f"OOD {name}"] = auroc(inside, outside)
    return numbers, pairs


def ood(arguments: Namespace) -> dict[str, float]:
    """Measure how variances detect images of another data set."""
    outcomes = {}
    figure, every = panels("variance of query and nearest image", *OUTSIDE)
    runs = arguments.runs.parent / sized("methods", "methods-short")
    for panel, name in zip(every, OUTSIDE, strict=True):
        data, *scaled = name.split()
        chosen = {"scaled": True} if scaled else {}
        trained = [run_of(data, "btl", runs, seed, chosen) for seed in range(arguments.seeds)]
        outcomes[name], variances = zip(*map(detection, trained), strict=True)
        bins = np.geomspace(*np.quantile(np.concatenate(variances[0]), (0, 1)), 40)
        panel.hist(variances[0], bins, density=True, label=("test queries", "MNIST"))
        panel.set(xscale="log")
        panel.legend(frameon=False)
    title = f"Queries of MNIST, BTL, {arguments.seeds} seeds from 0"
    return finish("ood", title, outcomes, figure, arguments.figures)


PARTS = {"normal": normal, "curves": curves, "cub50": table, "ood": ood}


def main() -> None:
    """Measure, print and draw."""
    arguments = options(__doc__, tuple(ENCODERS), tuple(PARTS))
    figures: dict[str, float] = {}
    for name in arguments.parts:
        figures |= PARTS[name](arguments)
    if arguments.json is not None:
        write_figures(figures, arguments.json)


if __name__ == "__main__":
    main()
