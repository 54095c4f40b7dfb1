"""Wrong labels and sequences, beside Clothing1M and HDD in Taha et al. (2019).

As in "Unsupervised data uncertainty learning in visual retrieval systems" (arXiv 1902.02586): an
encoder is trained on images of which some have a wrong label (here 30% of Fashion-MNIST, another
label at random), queries search a gallery with correct labels by whole rankings, and a fifth of the
gallery is left out: the images with the largest variances, or others at random. The encoders are
their heteroscedastic triplet loss and the soft triplet loss that it weighs, both on unnormalised
vectors, in batches of a few images of each class with semi-hard negatives. Pearson's correlation is
that of the average precision and the variance of a query; "percentiles" is that of the means of
groups of queries by average precision. "Wrong labels" is the share of them among the fifth of the
training images with the largest variances. The network is small, and the classes are ten instead of
fourteen.

Sequences are drawn: each class is a closed curve, a sequence has noise of its own strength, and an
LSTM reads features of its places. Trained runs in `--runs` are used again. RCIR_DATA names the
data.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tables import options, show, sized, spread

from rcir.data import DataConfig, ImageSet, Preprocessing, data_root, load_splits
from rcir.data.datasets.small_images import read_fashion_mnist
from rcir.encoders import EncoderConfig
from rcir.encoders.batches import embed
from rcir.metrics import average_precision_at_k
from rcir.mining import MiningConfig
from rcir.runs.folder import RunFolder
from training import OptimizerConfig, TrainingConfig, train

ENCODERS: dict[str, dict[str, Any]] = {"deterministic": {"unit": False}, "tripreg": {}}
WRONG_LABELS, SEQUENCES = "wrong labels", "sequences"
PUBLISHED = {
    (WRONG_LABELS, "deterministic"): "61.70±.001 - - - - -",
    (WRONG_LABELS, "tripreg"): "62.27±.001 62.33±.003 64.57±.002 -.5001 - -",
    (SEQUENCES, "deterministic"): "77.88±.003 - - - - -",
    (SEQUENCES, "tripreg"): "78.45±.004 - - - - -",
}
COLUMNS = ("mAP", "random cleaning", "cleaning", "Pearson", "percentiles", "wrong labels")
N_CLASSES, WRONG, CLEANED = 10, 0.3, 0.2
N_TRAIN, N_QUERIES, EPOCHS = sized((5_000, 2_500, 6), (400, 200, 1))
N_CURVES, EACH, STEPS, FEATURES = sized((40, 100, 16, 8), (8, 40, 8, 8))
SEQUENCE_EPOCHS = sized(15, 1)
NOISE = (0.1, 2.0)  # log-uniform standard deviation, of a unit curve
REPETITIONS = 5  # of random cleaning
GROUPS = sized(100, 10)


def write_table(runs: Path) -> tuple[Path, NDArray[np.bool_]]:
    """Write the training images and a table of their labels once; return which labels are wrong."""
    images = read_fashion_mnist(data_root(DataConfig())).train
    rng = np.random.default_rng(0)
    rows = rng.permutation(len(images))[: N_TRAIN + N_TRAIN // 10]
    labels = np.asarray(images.labels)[rows]
    is_wrong = (rng.random(len(rows)) < WRONG) & (np.arange(len(rows)) < N_TRAIN)
    others = (labels + rng.integers(1, N_CLASSES, len(rows))) % N_CLASSES
    file = runs / "wrong-labels" / "table.csv"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        table = [("path", "label", "split")]
        for number, row in enumerate(rows):
            Image.fromarray(images.images[row]).save(file.parent / f"{number:05d}.png")
            label = others[number] if is_wrong[number] else labels[number]
            split = "train" if number < N_TRAIN else "val" if number % 2 else "test"
            table.append((f"{number:05d}.png", label, split))
        with file.open("w", newline="") as opened:
            csv.writer(opened).writerows(table)
    return file.resolve(), is_wrong[:N_TRAIN]


def draw_sequences(runs: Path) -> Path:
    """Write drawn sequences of features with their labels once, to a file of vectors."""
    rng = np.random.default_rng(1)
    angles = np.linspace(0, 2 * np.pi, STEPS, endpoint=False)
    waves = np.stack([f(k * angles) for k in (1, 2, 3) for f in (np.sin, np.cos)])
    curves = rng.standard_normal((N_CURVES, 2, len(waves))) @ waves
    curves /= curves.std(axis=(1, 2), keepdims=True)
    labels = np.repeat(np.arange(N_CURVES), EACH)
    places = curves[labels].transpose(0, 2, 1)
    spread = np.exp(rng.uniform(*np.log(NOISE), len(labels)))[:, None, None]
    features = np.tanh(
        (places + spread * rng.standard_normal(places.shape)) @ rng.standard_normal((2, FEATURES))
    )
    file = runs / "sequences.npz"
    runs.mkdir(parents=True, exist_ok=True)
    np.savez(file, vector=features.astype(np.float32).reshape(len(labels), -1), label=labels)
    return file.resolve()


def configuration(data: str, method: str, seed: int, file: Path, runs: Path) -> TrainingConfig:
    """The recipe of one training; several images of each class in a batch, as on Clothing1M."""
    sequences = data == SEQUENCES
    further = {"steps": STEPS, "open_set": False} if sequences else {"gallery": 1}
    return TrainingConfig(
        name=f"{data.replace(' ', '-')}-{method}-{seed}",
        storage=str(runs),
        seed=seed,
        epochs=SEQUENCE_EPOCHS if sequences else EPOCHS,
        batch=sized(64, 28) if sequences else 70,
        data=DataConfig(
            "sequences" if sequences else "table", options={"path": str(file)} | further
        ),
        preprocessing=Preprocessing((STEPS, FEATURES), interpolation="none")
        if sequences
        else Preprocessing((28, 28)),
        encoder=EncoderConfig(
            method, "lstm" if sequences else "lenet", dim=128, options=ENCODERS[method]
        ),
        loss={"form": "soft"} if method == "deterministic" else {},
        optimizer=OptimizerConfig(lr=3e-3 if sequences else 1e-3),
        mining=MiningConfig(
            "random",
            "semi-hard",
            num_negatives=1,
            pool=1,
            margin=1e3,  # any negative that is farther than the positive
            scope="batch",
            samples_per_class=sized(4, 7) if sequences else 7,
        ),
    )


def numbers_of(run: RunFolder, queries: ImageSet, gallery: ImageSet) -> dict[str, float | None]:
    """The figures of a training but the share of wrong labels."""
    encoder = run.encoder()
    asked, searched = (
        embed(encoder, run.preprocessing, images.images) for images in (queries, gallery)
    )
    order = torch.cdist(asked.vectors, searched.vectors).argsort(dim=1, stable=True).numpy()
    relevant = np.asarray(queries.labels)[:, None] == np.asarray(gallery.labels)[order]

    def precision_without(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        kept = np.ones(len(gallery), bool)
        kept[rows] = False
        ranked = relevant[kept[order]].reshape(len(order), -1)
        return average_precision_at_k(ranked, ranked.sum(axis=1), ranked.shape[1])

    n, rng = round(CLEANED * len(gallery)), np.random.default_rng(0)
    draws = (rng.permutation(len(gallery))[:n] for _ in range(REPETITIONS))
    whole = precision_without(np.empty(0, np.int64))
    numbers: dict[str, float | None] = {
        "mAP": float(whole.mean()),
        "random cleaning": float(np.mean([np.nanmean(precision_without(rows)) for rows in draws])),
    }
    if searched.uncertainty is None or asked.uncertainty is None:
        return numbers
    most = searched.uncertainty.argsort(descending=True, stable=True).numpy()[:n]
    uncertainty = asked.uncertainty.numpy().astype(np.float64)
    groups = np.array_split(np.argsort(whole, kind="stable"), GROUPS)
    means = [(uncertainty[rows].mean(), whole[rows].mean()) for rows in groups]
    return numbers | {
        "cleaning": float(np.nanmean(precision_without(most))),
        "Pearson": float(np.corrcoef(uncertainty, whole)[0, 1]),
        "percentiles": float(np.corrcoef(np.array(means).T)[0, 1]),
    }


def wrong_labels_found(run: RunFolder, table: Path, is_wrong: NDArray[np.bool_]) -> float | None:
    """The share of wrong labels among the most uncertain training images."""
    images = [table.parent / f"{number:05d}.png" for number in range(N_TRAIN)]
    stated = embed(run.encoder(), run.preprocessing, images).uncertainty
    if stated is None:
        return None
    most = stated.argsort(descending=True, stable=True).numpy()[: round(CLEANED * N_TRAIN)]
    return float(is_wrong[most].mean())


def main() -> None:
    """Train, search, leave out, measure and print."""
    asked = options(__doc__, tuple(ENCODERS))
    table, is_wrong = write_table(asked.runs)
    files = {WRONG_LABELS: table, SEQUENCES: draw_sequences(asked.runs)}
    test = read_fashion_mnist(data_root(DataConfig())).queries
    order = np.random.default_rng(0).permutation(len(test))
    queries, gallery = test.subset(order[:N_QUERIES]), test.subset(order[N_QUERIES:])
    rows, figures, runs = [], {}, {}
    for (data, method), published in PUBLISHED.items():
        if method not in asked.encoders:
            continue
        numbers = []
        for seed in range(asked.seeds):
            run = train(configuration(data, method, seed, files[data], asked.runs))
            runs[f"{data}, {method}, seed {seed}"] = run
            if data == SEQUENCES:
                splits = load_splits(run.data)
                numbers.append(numbers_of(run, splits.test, splits.gallery))
            else:
                found = wrong_labels_found(run, table, is_wrong)
                numbers.append(numbers_of(run, queries, gallery) | {"wrong labels": found})
        cells = {name: [one.get(name) for one in numbers] for name in COLUMNS}
        rows.append((data, method, "here", *(spread(values) for values in cells.values())))
        rows.append((data, method, "published", *published.split()))
        for name, values in cells.items():
            if None not in values:
                key = f"{data}_{method}_{name}".replace(" ", "_")
                figures[key] = float(np.mean(values))
                if len(values) > 1:
                    figures[f"{key}_deviation"] = float(np.std(values, ddof=1))
    title = f"Fashion-MNIST with {WRONG:.0%} wrong labels, and drawn sequences, {asked.seeds} seeds"
    show(title, ("data", "encoder", "row", *COLUMNS), rows, figures, runs, asked.json)


if __name__ == "__main__":
    main()
