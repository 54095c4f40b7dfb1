"""Command line, leave-one-out scores and tables that the benchmarks of the papers share."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import faiss
import mlflow
import numpy as np
import ray
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.spatial import cKDTree

sys.path.append(str(Path(__file__).parents[1]))
from common import parser, sized, titled, write_figures
from common import spread as spread  # for the scripts

from rcir.data import ImageSet, Preprocessing
from rcir.encoders import Encoder
from rcir.encoders.batches import BATCH, embed
from rcir.encoders.btl import BayesianTriplet, VonMisesFisher
from rcir.encoders.deep_ensemble import DeepEnsemble
from rcir.encoders.hib import HedgedInstance
from rcir.encoders.lam import LaplacianMetric
from rcir.encoders.mc_dropout import MCDropout
from rcir.index import build_index, lengths, nearest_others, one_minus_cosine
from rcir.losses.hedged import mixture_samples
from rcir.metrics import out_of_distribution, score_rankings, sparsification
from rcir.runs.folder import RunFolder, find_run

DEPTH = 10
FEW_DIMENSIONS = 4
BINS = 10  # of confidences
DRAWS = 20  # of each image, unless the encoder states their number


def options(description: str | None, encoders: tuple[str, ...] = ()) -> Namespace:
    """The command line of these benchmarks; of some, `--encoders` of which there are rows."""
    command = parser(description)
    runs = Path("runs", sized("papers", "papers-short"))
    command.add_argument("--runs", type=Path, default=runs, help="trained runs")
    command.add_argument("--seeds", type=int, default=sized(3, 1), help="trainings per row")
    if encoders:
        command.add_argument("--encoders", nargs="+", choices=encoders, default=encoders)
    parsed = command.parse_args()
    torch.set_num_threads(1)  # two scripts side by side use two cores better than one script does
    return parsed


@dataclass(frozen=True)
class Searched:
    """A test set searched among itself.

    Attributes:
        vectors: (n, d) embeddings.
        distances, positions: (n, 10) of the nearest other images.
        uncertainty: (n,) as a retriever would state it.
        stated: whether the encoder states it.
    """

    vectors: torch.Tensor
    distances: NDArray[np.float32]
    positions: NDArray[np.int64]
    uncertainty: NDArray[np.float64]
    stated: bool


def search(preprocessing: Preprocessing, encoder: Encoder, images: ImageSet) -> Searched:
    """Search a test set among itself."""
    embedding = embed(encoder, preprocessing, images.images)
    distances, positions = nearest_others(embedding.vectors, DEPTH)
    stated = embedding.uncertainty is not None
    if embedding.uncertainty is None:
        norms = lengths(embedding.vectors.numpy())
        uncertainty = one_minus_cosine(distances[:, 0], norms, norms[positions[:, 0]])
    else:
        uncertainty = embedding.uncertainty.numpy().astype(np.float64)
    return Searched(embedding.vectors, distances, positions, uncertainty, stated)


def outside(
    run: RunFolder, encoder: Encoder, inside_results: Searched, images: ImageSet
) -> NDArray[np.float64]:
    """Uncertainties of out-of-distribution queries of the searched test set."""
    embedding = embed(encoder, run.preprocessing, images.images)
    if embedding.uncertainty is not None:
        return embedding.uncertainty.numpy().astype(np.float64)
    searched, asked = inside_results.vectors.numpy(), embedding.vectors.numpy()
    distances, positions = build_index(searched).search(asked, 1)
    return one_minus_cosine(distances[:, 0], lengths(asked), lengths(searched)[positions[:, 0]])


def closed_set_error(run: RunFolder, encoder: Encoder, images: ImageSet) -> float | None:
    """The ECE of Warburg et al. (NeurIPS 2023): samples vote with the labels of their neighbours.

    The most frequent label is predicted, the smallest of several; its confidence is its share of
    the votes. Bins have equal width, and their mean confidence is expected of them.
    """
    rng, parts = np.random.default_rng(0), []
    for start in range(0, len(images), BATCH):
        batch = run.preprocessing(images.images[start : start + BATCH])
        with torch.inference_mode():
            part = draw_embeddings(encoder, batch, rng)
        if part is None:
            return None
        parts.append(part)
    drawn = torch.cat(parts, dim=1)
    labels = np.asarray(images.labels)
    predicted, count = stats.mode([labels[_nearest_other(one)] for one in drawn], axis=0)
    share = count / len(drawn)
    bins = np.minimum((share * BINS).astype(np.int64), BINS - 1)
    return float(np.abs(np.bincount(bins, (predicted == labels) - share)).sum() / len(labels))


def draw_embeddings(
    encoder: Encoder, images: torch.Tensor, rng: np.random.Generator
) -> torch.Tensor | None:
    """Draw embeddings (draws, n, d) of images; None if the encoder has no distribution of them."""
    if isinstance(encoder, DeepEnsemble):
        return encoder.member_vectors(images)
    if isinstance(encoder, MCDropout | LaplacianMetric):
        return encoder.pass_vectors(images)
    embedding = encoder.embed(images)
    mean, variance, extra = embedding.vectors, embedding.variance, embedding.extra
    if isinstance(encoder, VonMisesFisher):
        pairs = zip(mean.double().numpy(), extra["concentration"][:, 0].tolist(), strict=True)
        drawn = [
            stats.vonmises_fisher(mu / np.linalg.norm(mu), kappa).rvs(DRAWS, rng)
            for mu, kappa in pairs
        ]
        return torch.from_numpy(np.stack(drawn, axis=1)).float()
    if variance is None or not isinstance(encoder, BayesianTriplet | HedgedInstance):
        return None
    means = extra.get("component_means", mean[:, None])
    variances = extra.get("component_variances", variance[:, None].expand_as(means))
    count = encoder.options.samples if isinstance(encoder, HedgedInstance) else DRAWS
    noise = torch.from_numpy(rng.standard_normal((len(mean), count, mean.shape[1])))
    return mixture_samples(means, variances, noise.float()).transpose(0, 1)


def _nearest_other(vectors: torch.Tensor) -> NDArray[np.int64]:
    """Where the nearest other vector of each vector is; in few dimensions a tree knows sooner."""
    if vectors.shape[1] > FEW_DIMENSIONS:
        return nearest_others(vectors, 1)[1][:, 0]
    nearest = cKDTree(vectors.numpy()).query(vectors.numpy(), 2)[1]
    return np.where(nearest[:, 0] == np.arange(len(nearest)), nearest[:, 1], nearest[:, 0])


def retrieval_scores(searched: Searched, images: ImageSet) -> dict[str, float]:
    """mAP@1, 5, 10 and the AUSC of the top-1 by the uncertainty of query and nearest item."""
    relevant = images.relevance.matches(images.relevance, searched.positions)
    totals = images.relevance.totals(images.relevance) - 1  # each image counts itself
    scores = score_rankings(relevant, totals, ks=(1, 5, 10))
    pair = searched.uncertainty + searched.uncertainty[searched.positions[:, 0]]
    named = {f"mAP@{k}": value for k, value in scores.mean_average_precision.items()}
    return named | {"AUSC": sparsification(pair, relevant[:, 0]).ausc}


def ood_scores(inside: NDArray[np.float64], out: NDArray[np.float64]) -> dict[str, float]:
    """AUROC and AUPRC of telling the images of another data set by their uncertainty."""
    found = out_of_distribution(inside, out)
    return {"AUROC": found.auroc, "AUPRC": found.auprc}


def history(run: RunFolder, name: str) -> list[float]:
    """A metric of a training, epoch by epoch."""
    client = mlflow.MlflowClient(tracking_uri=run.tracking_uri)
    logged = client.get_metric_history(run.mlflow_run, name)
    return [metric.value for metric in sorted(logged, key=lambda metric: metric.step)]


def trainings(runs: Mapping[str, RunFolder]) -> dict[str, RunFolder]:
    """The same runs, an ensemble's members in place of the ensemble."""
    folders = {}
    for name, run in runs.items():
        members = sorted((run.path / "members").glob("member-*"))
        folders |= {f"{name}, {member.name}": find_run(str(member)) for member in members}
        if not members:
            folders[name] = run
    return folders


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    lines = (columns, ["---"] * len(columns), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def show(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: Mapping[str, float],
    runs: Mapping[str, RunFolder],
    path: Path | None,
) -> None:
    """Print the table as Markdown, how it was made, and how the trainings went."""
    versions = ", ".join(
        f"{module.__name__} {module.__version__}" for module in (torch, np, faiss, ray, mlflow)
    )
    print(f"### {titled(title)}\n")
    print(markdown(columns, rows))
    print(
        f"\nPrinted by `python {' '.join(sys.argv)}`, Python {sys.version.split()[0]}, {versions}."
    )
    every = trainings(runs)
    hours = sum(sum(history(run, "seconds")) for run in every.values()) / 3600
    print(f"Trainings: {hours:.1f} hours on one core.\n\nValidation recall at 1 by epoch:\n")
    for name, run in every.items():
        recalls = " ".join(f"{value:.3f}" for value in history(run, "validation/recall_at_1"))
        print(f"- {name}: {recalls}")
    if path is not None:
        write_figures(figures, path)
