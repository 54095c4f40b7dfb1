"""Two-digit MNIST, clean and corrupt, beside the table of Oh et al. (ICLR 2019).

Their encoders with their network: a point, one Gaussian (MoG-1) and two (MoG-2), one seed each,
trained for 20 epochs of 64 images a step, from the second epoch on with near
negatives, instead of for 500,000 steps of 128 images. Of another network: a point encoder (triplet
loss) and Bayesian Triplet Loss with as many degrees of freedom, ours being unit vectors of one more
dimension; 4 epochs of 40,000 images.

Trained on the 70 released numbers with a fifth of the digits corrupt (hit by a black square of a
side that is uniform from none to the whole); tested on the same numbers made of MNIST's test
digits: all clean, all corrupt, and a fifth corrupt, beside the published row of corrupt ones. The
share of pairs of corrupt digits is printed that a classifier of single ones reads. Average
precision of 10,000 pairs, accuracy of 5 neighbours within the test set (of distributions by the
probability of a match, among the 100 nearest means), and the correlation (Kendall's tau over 20
bins) of both with the uncertainty. Trained runs in `--runs` are used again. RCIR_DATA names the
data.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from sklearn.metrics import average_precision_score
from tables import options, show, sized, spread
from torch import Tensor, nn

from rcir.data import Augmentation, DataConfig, ImageSet, Preprocessing, data_root
from rcir.data.augmentation import occlude
from rcir.data.datasets.handwriting import read_n_digit_mnist
from rcir.data.datasets.small_images import read_mnist
from rcir.encoders import Encoder, EncoderConfig
from rcir.encoders.batches import embed
from rcir.encoders.rerank import rerank
from rcir.index import nearest_others
from rcir.mining import MiningConfig
from training import Change, OptimizerConfig, TrainingConfig, train

BINS = 20  # of uncertainties
COLUMNS = ("AP", "5-NN", "tau AP", "tau 5-NN")
# Of point, MoG-1 (one Gaussian) and MoG-2 encoders.
PUBLISHED = {
    (2, "clean"): (".987 .871 - -", ".989 .879 .74 .71", ".990 .888 .43 .57"),
    (2, "corrupt"): (".880 .583 - -", ".907 .760 .81 .47", ".912 .757 .79 .43"),
    (3, "clean"): (".996 .942 - -", ".996 .953 .68 .72", ".996 .939 .48 .47"),
    (3, "corrupt"): (".913 .874 - -", ".926 .909 .86 .55", ".932 .885 .87 .52"),
}
PUBLISHED |= {(dim, "a fifth corrupt"): PUBLISHED[dim, "corrupt"] for dim in (2, 3)}
POINT = MiningConfig("random", "semi-hard", num_negatives=64, pool=64, margin=0.05, scope="batch")
BAYESIAN = MiningConfig("nearest", "margin-violating", num_negatives=64, pool=64, scope="batch")
EPOCHS, BATCH, TRAIN, TEST = sized((4, 128, 40_000, 10_000), (3, 32, 700, 700))
METHODS = {
    **{"deterministic": "point, triplet", "btl": "BTL"},
    **{"hib-point": "point", "hib-mog1": "MoG-1", "hib-mog2": "MoG-2"},
}
COMPONENTS = {"hib-point": 0, "hib-mog1": 1, "hib-mog2": 2}
# Two images of each of 32 numbers; every anchor with its match, and 16 others. From the second
# epoch on 8 of the 16 nearest others: few numbers lie side by side, and those decide.
PAIRS = MiningConfig(
    "random", "top-random", num_negatives=16, pool=62, scope="batch", samples_per_class=2
)
NEAREST = (Change(2, {"mining.num_negatives": 8, "mining.pool": 16}),)
HIB_EPOCHS, HIB_BATCH, HIB_TRAIN = sized((20, 64, 100_000), (3, 8, 700))
CANDIDATES = sized(100, 10)


def configuration(method: str, dim: int, seed: int, runs: Path) -> TrainingConfig:
    """The recipe of one training."""
    parts = {"validation": sized(2000, 200), "gallery": 1, "tuning": 2, "calibration": 1}
    hedged = method in COMPONENTS
    total = HIB_TRAIN if hedged else TRAIN
    common = TrainingConfig(
        name=f"two-digit-{method}-{dim}-{seed}",
        storage=str(runs),
        seed=seed,
        precision="bfloat16",
        data=DataConfig(
            "n-digit-mnist",
            options=parts | {"unseen": False, "total_train": total, "train_corrupt": 0.0},
        ),
        preprocessing=Preprocessing((28, 56), 1),
        augmentation=Augmentation(occlusion=0.2),
    )
    if hedged:
        return replace(
            common,
            epochs=HIB_EPOCHS,
            batch=HIB_BATCH,
            encoder=EncoderConfig(
                "hib", "lenet", dim=dim, options={"components": COMPONENTS[method]}
            ),
            loss={},
            mining=PAIRS,
            optimizer=OptimizerConfig(lr=1.5e-3),
            changes=NEAREST,
        )
    return replace(
        common,
        epochs=EPOCHS,
        batch=BATCH,
        encoder=EncoderConfig(method, dim=dim + 1),
        loss={"kl_scale": 1e-4} if method == "btl" else {"margin": 0.05},
        mining=BAYESIAN if method == "btl" else POINT,
    )


def scores(
    preprocessing: Preprocessing, encoder: Encoder, test: ImageSet
) -> dict[str, float | None]:
    """Average precision of pairs, accuracy of neighbours, and how uncertainty goes with them."""
    embedding = embed(encoder, preprocessing, test.images)
    labels = np.asarray(test.labels)
    left, other = sample_pairs(labels, 10_000).T
    match = labels[left] == labels[other]
    positions = nearest_others(embedding.vectors, CANDIDATES)[1]
    pairs = embedding[torch.from_numpy(left)], embedding[torch.from_numpy(other)]
    if encoder.reranks:
        positions = rerank(encoder, embedding, embedding, positions)[1]
        with torch.inference_mode():
            score = -encoder.rerank(*pairs).numpy()[:, 0]
    else:
        score = -(pairs[0].vectors - pairs[1].vectors).norm(dim=1).numpy()
    right = voted_right(labels[positions[:, :5]], labels)
    numbers = {"AP": float(average_precision_score(match, score)), "5-NN": float(right.mean())}
    if embedding.uncertainty is None:
        return numbers | {"tau AP": None, "tau 5-NN": None}
    uncertainty = embedding.uncertainty.numpy().astype(np.float64)
    pair = (uncertainty[left] + uncertainty[other]) / 2
    precisions = [average_precision_score(match[rows], score[rows]) for rows in binned(pair)]
    return numbers | {
        "tau AP": falling(precisions),
        "tau 5-NN": falling([right[rows].mean() for rows in binned(uncertainty)]),
    }


def sample_pairs(labels: NDArray[np.int64], n_pairs: int) -> NDArray[np.int64]:
    """(n_pairs, 2) rows of random pairs, first as many that match, then as many that do not.

    Every matching pair is as likely as every other, and so is every other pair; drawn with
    replacement, and no item with itself.
    """
    n, half, rng = len(labels), n_pairs // 2, np.random.default_rng(0)
    _, of, counts = np.unique(labels, return_inverse=True, return_counts=True)
    # Items in the order of their labels: those of one label are a run.
    order = np.argsort(of, kind="stable")
    size = np.repeat(counts, counts)
    start = np.repeat(np.cumsum(counts) - counts, counts)
    first = rng.choice(n, half, p=(size - 1) / (size - 1).sum())
    other = start[first] + rng.integers(0, size[first] - 1)
    matching = np.stack([first, other + (other >= first)], axis=1)
    first = rng.choice(n, half, p=(n - size) / (n - size).sum())
    other = rng.integers(0, n - size[first])
    other += np.where(other >= start[first], size[first], 0)
    return order[np.concatenate([matching, np.stack([first, other], axis=1)])]


def voted_right(neighbours: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(n,) whether the most frequent label of the neighbours is right; the nearest of several."""
    votes = (neighbours[:, :, None] == neighbours[:, None, :]).sum(axis=2)
    winner = np.take_along_axis(neighbours, votes.argmax(axis=1)[:, None], axis=1)
    return np.asarray(winner[:, 0] == labels)


def binned(uncertainty: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """Rows in bins of equal count, from the least to the most uncertain."""
    number = np.arange(len(uncertainty)) * BINS // len(uncertainty)
    order = np.argsort(uncertainty, kind="stable")
    return np.split(order, np.searchsorted(number, np.arange(1, BINS)))


def falling(means: list[float]) -> float:
    """Minus Kendall's tau-b of the order of bins and what they reach."""
    return -float(stats.kendalltau(np.arange(len(means)), means).statistic)


def legible(root: Path) -> float:
    """The share of pairs of corrupt digits that a classifier of single ones reads."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    source = read_mnist(root)
    tiles = [np.asarray(part.images).reshape(-1, 28, 28) for part in (source.train, source.queries)]
    train_labels, labels = (
        torch.from_numpy(part.labels) for part in (source.train, source.queries)
    )

    def corrupt(images: NDArray[np.uint8]) -> Tensor:
        return torch.from_numpy(occlude(images, 1.0, rng)[0][:, None]).float() / 255

    convolved = (
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
    )
    net = nn.Sequential(*convolved, nn.Flatten(), nn.LazyLinear(256), nn.ReLU(), nn.LazyLinear(10))
    net(torch.zeros(1, 1, 28, 28))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(sized(4, 1)):
        for rows in np.array_split(rng.permutation(len(tiles[0])), 468)[: sized(468, 3)]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(corrupt(tiles[0][rows])), train_labels[rows])
            loss.backward()
            optimizer.step()
    with torch.inference_mode():
        guesses = [net(corrupt(part)).argmax(1) for part in np.array_split(tiles[1], 100)]
    return float((torch.cat(guesses) == labels).float().mean() ** 2)


def main() -> None:
    """Train, measure and print."""
    asked = options(__doc__, tuple(METHODS))
    root = data_root(DataConfig())
    tests = {
        name: read_n_digit_mnist(
            root, unseen=False, corrupt=p, total_train=7000, total_test=TEST
        ).queries
        for name, p in (("clean", 0.0), ("corrupt", 1.0), ("a fifth corrupt", 0.2))
    }
    rows, figures, runs = [], {}, {}
    for (dim, state), published in PUBLISHED.items():
        for name, row in zip(("point", "MoG-1", "MoG-2"), published, strict=True):
            rows.append((f"D = {dim}, {state}", name, "published", *row.split()))
        for method in asked.encoders:
            name, found = METHODS[method], []
            for seed in range(1 if method in COMPONENTS else asked.seeds):
                run = train(configuration(method, dim, seed, asked.runs))
                runs[f"{name}, D = {dim}, seed {seed}"] = run
                found.append(scores(run.preprocessing, run.encoder(), tests[state]))
            cells = (spread([values[column] for values in found]) for column in COLUMNS)
            rows.append((f"D = {dim}, {state}", name, "here", *cells))
            for column in COLUMNS:
                values = [one[column] for one in found if one[column] is not None]
                if values:
                    key = f"{method}_{dim}_{state}_{column}".replace(" ", "_").replace("-", "_")
                    figures[key] = sum(values) / len(values)
    title = f"Two-digit MNIST, {asked.seeds} seeds from 0, of points and mixtures one"
    show(title, ("test", "encoder", "row", *COLUMNS), rows, figures, runs, asked.json)
    print(f"\nRead by a classifier where both digits are corrupt: {legible(root):.3f}")


if __name__ == "__main__":
    main()
