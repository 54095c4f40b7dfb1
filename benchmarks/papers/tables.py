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
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score

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
from rcir.encoders.pfe import ProbabilisticFaceEmbedding
from rcir.encoders.rerank import rerank
from rcir.index import build_index, lengths, nearest_others, one_minus_cosine
from rcir.losses.hedged import mixture_samples
from rcir.metrics import (
    confidence,
    reliability,
    score_rankings,
    sparsification,
)
from rcir.runs.folder import RunFolder, find_run

DEPTH = 10
FEW_DIMENSIONS = 4
BINS = 10  # of confidences
DRAWS = 20  # of each image, unless the encoder states their number


def options(
    description: str | None,
    encoders: tuple[str, ...] = (),
    parts: tuple[str, ...] = (),
    *,
    reduced: bool = False,
) -> Namespace:
    """The command line of these benchmarks; of some, `--encoders` of which there are rows.

    With `parts`, also `--parts` and `--figures`; with `reduced`, also `--reduced` (which the script
    reads itself), `--cost` and `--use-gpu`.
    """
    command = parser(description)
    runs = Path("runs", sized("papers", "papers-short"))
    command.add_argument("--runs", type=Path, default=runs, help="trained runs")
    command.add_argument("--seeds", type=int, default=sized(3, 1), help="trainings per row")
    if encoders:
        command.add_argument("--encoders", nargs="+", choices=encoders, default=encoders)
    if parts:
        command.add_argument("--parts", nargs="+", choices=parts, default=parts)
        command.add_argument("--figures", type=Path, help="folder for drawn figures")
    if reduced:
        command.add_argument("--reduced", action="store_true", help="a smaller training")
        command.add_argument("--cost", action="store_true", help="measure the cost of training")
        command.add_argument("--use-gpu", action="store_true", help="train on a GPU")
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


def search(
    preprocessing: Preprocessing, encoder: Encoder, images: ImageSet, reranked: bool = False
) -> Searched:
    """Search a test set among itself; `reranked` by the encoder's own distances."""
    embedding = embed(encoder, preprocessing, images.images)
    distances, positions = nearest_others(embedding.vectors, len(images) - 1 if reranked else DEPTH)
    stated = embedding.uncertainty is not None
    if embedding.uncertainty is None:
        norms = lengths(embedding.vectors.numpy())
        uncertainty = one_minus_cosine(distances[:, 0], norms, norms[positions[:, 0]])
    else:
        uncertainty = embedding.uncertainty.numpy().astype(np.float64)
    if reranked:
        distances, positions = rerank(encoder, embedding, embedding, positions)
    nearest = distances[:, :DEPTH], positions[:, :DEPTH]
    return Searched(embedding.vectors, *nearest, uncertainty, stated)


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


def vote_scores(run: RunFolder, encoder: Encoder, images: ImageSet) -> dict[str, float | None]:
    """`calibration_errors` of samples that vote with the label of their nearest neighbour."""
    rng, parts = np.random.default_rng(0), []
    for start in range(0, len(images), BATCH):
        batch = run.preprocessing(images.images[start : start + BATCH])
        with torch.inference_mode():
            part = draw_embeddings(encoder, batch, rng)
        if part is None:
            return dict.fromkeys(("ECE", "ECE code", "unanimous"))
        parts.append(part)
    labels = np.asarray(images.labels)
    votes = np.stack([labels[_nearest_other(one)] for one in torch.cat(parts, dim=1)])
    return calibration_errors(votes, labels)


def calibration_errors(
    votes: NDArray[np.int64], labels: NDArray[np.int64]
) -> dict[str, float | None]:
    """The ECE of Warburg et al. (NeurIPS 2023), and the share of queries with unanimous votes.

    The most frequent label of `votes` (draws, n) is predicted, the smallest of several; its
    confidence is its share. Bins have equal width, and their mean confidence is expected of them.
    "ECE code" is that of the authors' code, whose last bin excludes 1: queries with unanimous votes
    are left out; None if there are no others.
    """
    predicted, count = stats.mode(votes, axis=0)
    share = count / len(votes)
    bins = np.minimum((share * BINS).astype(np.int64), BINS - 1)
    gaps, split = (predicted == labels) - share, count < len(votes)
    code = np.abs(np.bincount(bins[split], gaps[split])).sum() / max(1, split.sum())
    return {
        "ECE": float(np.abs(np.bincount(bins, gaps)).sum() / len(labels)),
        "ECE code": float(code) if split.any() else None,
        "unanimous": float(1 - split.mean()),
    }


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
    if variance is None or not isinstance(
        encoder, BayesianTriplet | HedgedInstance | ProbabilisticFaceEmbedding
    ):
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
    """R, mAP and ECE at 1, 5, 10, and the AUSC of the top-1 by the uncertainty of the pair.

    A pair is a query and its nearest item. The error of calibration at k is that of mAP@k, of a
    random half of the queries; the others set the range of uncertainties.
    """
    relevant = images.relevance.matches(images.relevance, searched.positions)
    totals = images.relevance.totals(images.relevance) - 1  # each image counts itself
    scores = score_rankings(relevant, totals, ks=(1, 5, 10))
    uncertainty = searched.uncertainty
    first, second = np.array_split(np.random.default_rng(0).permutation(len(images)), 2)
    low, high = uncertainty[first].min(), uncertainty[first].max()
    stated = confidence(uncertainty[second], low, high)
    named = {f"R@{k}": value for k, value in scores.recall.items()}
    named |= {f"mAP@{k}": value for k, value in scores.mean_average_precision.items()}
    for k, precisions in zip(scores.ks, scores.average_precisions[second].T, strict=True):
        named[f"ECE@{k}"] = reliability(stated, precisions).error
    pair = uncertainty + uncertainty[searched.positions[:, 0]]
    return named | {"AUSC": sparsification(pair, relevant[:, 0]).ausc}


def auroc(inside: NDArray[np.float64], out: NDArray[np.float64]) -> float:
    """Probability that one of the second is larger than one of the first."""
    outside_ones = np.arange(len(inside) + len(out)) >= len(inside)
    return float(roc_auc_score(outside_ones, np.concatenate([inside, out])))


def ood_scores(inside: NDArray[np.float64], out: NDArray[np.float64]) -> dict[str, float]:
    """AUROC, AUPRC (by trapezoids) and AP (by steps) of telling the images of another data set."""
    outside_ones = np.arange(len(inside) + len(out)) >= len(inside)
    score = np.concatenate([inside, out])
    precision, recall, _ = precision_recall_curve(outside_ones, score)
    area = float(-np.trapezoid(precision, recall))
    precisions = float(average_precision_score(outside_ones, score))
    return {"AUROC": auroc(inside, out), "AUPRC": area, "AP": precisions}


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
