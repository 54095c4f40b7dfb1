"""Two-digit MNIST, clean and corrupt, beside the table of Oh et al. (ICLR 2019).

A point encoder (triplet loss) and Bayesian Triplet Loss with two and three degrees of freedom, as
the published ones: ours are unit vectors of one more dimension. Trained on the 70 released numbers
with a fifth of the digits corrupt, 4 epochs of 40,000 images instead of the 500,000 steps of 128
images of the paper; tested on the same numbers made of MNIST's test digits: average precision of
10,000 pairs, accuracy of 5 neighbours within the test set, and the correlation (Kendall's tau over
20 bins) of both with the uncertainty. Trained runs in `--runs` are used again.
RCIR_DATA names the data.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tables import options, search, show, sized, spread

from rcir.data import Augmentation, DataConfig, ImageSet, Preprocessing, data_root
from rcir.data.datasets.n_digit_mnist import read
from rcir.encoders import EncoderConfig
from rcir.metrics import (
    kendall_of_pairs,
    kendall_over_bins,
    knn_correct,
    sample_pairs,
    verification_ap,
)
from rcir.mining import MiningConfig
from rcir.runs.folder import RunFolder
from training import TrainingConfig, train

COLUMNS = ("AP", "5-NN", "tau AP", "tau 5-NN")
# Of point, MoG-1 (one Gaussian) and MoG-2 encoders.
PUBLISHED = {
    (2, "clean"): (".987 .871 - -", ".989 .879 .74 .71", ".990 .888 .43 .57"),
    (2, "corrupt"): (".880 .583 - -", ".907 .760 .81 .47", ".912 .757 .79 .43"),
    (3, "clean"): (".996 .942 - -", ".996 .953 .68 .72", ".996 .939 .48 .47"),
    (3, "corrupt"): (".913 .874 - -", ".926 .909 .86 .55", ".932 .885 .87 .52"),
}
POINT = MiningConfig("random", "semi-hard", num_negatives=64, pool=64, margin=0.05, scope="batch")
BAYESIAN = MiningConfig("nearest", "margin-violating", num_negatives=64, pool=64, scope="batch")
EPOCHS, BATCH, TRAIN, TEST = sized((4, 128, 40_000, 10_000), (3, 32, 700, 700))
METHODS = {"deterministic": "point", "btl": "BTL"}


def configuration(method: str, dim: int, seed: int, runs: Path) -> TrainingConfig:
    """The recipe of one training."""
    parts = {"validation": sized(2000, 200), "gallery": 1, "tuning": 2, "calibration": 1}
    return TrainingConfig(
        name=f"two-digit-{method}-{dim}-{seed}",
        storage=str(runs),
        seed=seed,
        epochs=EPOCHS,
        batch=BATCH,
        precision="bfloat16",
        data=DataConfig(
            "n-digit-mnist",
            options=parts | {"unseen": False, "total_train": TRAIN, "train_corrupt": 0.0},
        ),
        preprocessing=Preprocessing((28, 56), 1),
        augmentation=Augmentation(occlusion=0.2),
        encoder=EncoderConfig(method, dim=dim + 1),
        loss={"kl_scale": 1e-4} if method == "btl" else {"margin": 0.05},
        mining=BAYESIAN if method == "btl" else POINT,
    )


def scores(run: RunFolder, test: ImageSet) -> dict[str, float | None]:
    """Average precision of pairs, accuracy of neighbours, and how uncertainty goes with them."""
    found = search(run.preprocessing, run.encoder(), test)
    labels = np.asarray(test.labels)
    right = knn_correct(labels[found.positions], labels, k=5)
    left, other = sample_pairs(labels, 10_000, np.random.default_rng(0)).T
    vectors = found.vectors.numpy()
    score = -np.linalg.norm(vectors[left] - vectors[other], axis=1)
    match = labels[left] == labels[other]
    pair = (found.uncertainty[left] + found.uncertainty[other]) / 2
    stated = run.config["encoder"]["method"] != "deterministic"
    return {
        "AP": verification_ap(score, match),
        "5-NN": float(right.mean()),
        "tau AP": kendall_of_pairs(pair, score, match) if stated else None,
        "tau 5-NN": kendall_over_bins(found.uncertainty, right) if stated else None,
    }


def main() -> None:
    """Train, measure and print."""
    asked = options(__doc__)
    root = data_root(DataConfig())
    tests = {
        name: read(root, unseen=False, corrupt=p, total_train=7000, total_test=TEST).queries
        for name, p in (("clean", 0.0), ("corrupt", 1.0))
    }
    rows, figures, runs = [], {}, {}
    for (dim, state), (point, one, two) in PUBLISHED.items():
        rows += [
            (f"D = {dim}, {state}", name, "published", *text.split())
            for name, text in (("point", point), ("MoG-1", one), ("MoG-2", two))
        ]
        for method, name in METHODS.items():
            found = []
            for seed in range(asked.seeds):
                run = train(configuration(method, dim, seed, asked.runs))
                runs[f"{name}, D = {dim}, seed {seed}"] = run
                found.append(scores(run, tests[state]))
            cells = (spread([values[column] for values in found]) for column in COLUMNS)
            rows.append((f"D = {dim}, {state}", name, "here", *cells))
            for column in COLUMNS:
                values = [one[column] for one in found if one[column] is not None]
                if values:
                    key = f"{method}_{dim}_{state}_{column}".replace(" ", "_").replace("-", "_")
                    figures[key] = sum(values) / len(values)
    title = f"Two-digit MNIST, {asked.seeds} seeds from 0"
    show(title, ("test", "encoder", "row", *COLUMNS), rows, figures, runs, asked.json)


if __name__ == "__main__":
    main()
