"""Fashion-MNIST with MNIST out of distribution, beside the table of Warburg et al. (2023).

All methods with the small network of "Bayesian metric learning for uncertainty quantification in
image retrieval" (arXiv 2302.01332), embeddings of three dimensions, the 10,000 official test images
searched among themselves. Five epochs instead of their 20, tuples mined within batches. Triplet
margins and mining were chosen on 20,000 training images by validation recall, those of the Bayesian
Triplet Loss also by how 3,000 of the test images are told from digits; the contrastive margin of
the Laplacian metric learner and, online, scale and memory of the curvature are the paper's.
`mc-dropout-channels` is MC dropout as that paper has it: whole channels, a rate of 0.05, the
contrastive loss, 100 passes. The deterministic encoder is a member of the ensemble of its seed; its
AUROC, AUPRC and AUSC are those of one minus the cosine to the nearest image. Trained runs in
`--runs` are used again; `--encoders` measures some. RCIR_DATA names the data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tables import (
    closed_set_error,
    ood_scores,
    options,
    outside,
    retrieval_scores,
    search,
    show,
    sized,
    spread,
)

from rcir.data import Augmentation, DataConfig, Preprocessing, data_root
from rcir.data.datasets.small_images import read_fashion_mnist, read_mnist
from rcir.encoders import EncoderConfig
from rcir.mining import MiningConfig
from rcir.runs.folder import RunFolder, find_run
from training import TrainingConfig, train

COLUMNS = ("mAP@1", "mAP@5", "mAP@10", "AUROC", "AUPRC", "AUSC", "ECE")
PUBLISHED = {
    "deterministic": ".78±.01 .73±.01 .72±.01 - - - -",
    "mc-dropout": ".76±.03 .71±.03 .70±.03 .93±.03 .93±.03 .84±.06 .03±.04",
    "deep-ensemble": ".69 .62 .59 .41 .46 .61 .04",
    "mc-dropout-channels": ".76±.03 .71±.03 .70±.03 .93±.03 .93±.03 .84±.06 .03±.04",
    "btl": "- - - - - - -",
    "vmf": "- - - - - - -",
    "tripreg": "- - - - - - -",
    "hib": ".69±.08 .63±.09 .61±.09 .60±.12 .60±.11 .65±.08 .54±.08",
    "pfe": ".78±.00 .74±.00 .72±.00 .53±.03 .46±.01 .65±.01 .26±.02",
    "lam-post-hoc": ".78±.00 .74±.00 .72±.00 .96±.02 .96±.02 .86±.01 .03±.00",
    "lam-online": ".81±.00 .77±.01 .76±.01 .98±.01 .98±.01 .89±.01 .02±.00",
}
POINT = MiningConfig("random", "semi-hard", num_negatives=64, pool=64, margin=0.5, scope="batch")
PAIRS = MiningConfig("random", "semi-hard", num_negatives=8, pool=64, margin=0.5, scope="batch")
BAYESIAN = MiningConfig("nearest", "margin-violating", num_negatives=64, pool=64, scope="batch")
# Negatives weigh about what their share in the margin is among pairs that are not mined.
NARROW = {"scale": 3.6e9, "initial": 6e4, "prior_precision": 1.0, "negatives_weight": 0.1}
CHANNELS = {"dropout": 0.05, "passes": 100, "channels": True}
# Method, its options, its loss, mining.
TRAINED: dict[str, tuple[str, dict[str, Any], dict[str, Any], MiningConfig]] = {
    "deep-ensemble": ("deep-ensemble", {}, {"margin": 0.5}, POINT),
    "mc-dropout": ("mc-dropout", {}, {"margin": 0.5}, POINT),
    "mc-dropout-channels": ("mc-dropout", CHANNELS, {"form": "contrastive"}, PAIRS),
    "btl": ("btl", {}, {"kl_scale": 1e-4}, BAYESIAN),
    "vmf": ("vmf", {}, {"kl_scale": 1e-4}, BAYESIAN),
    "tripreg": ("tripreg", {"unit": True}, {}, POINT),
    "hib": ("hib", {}, {}, PAIRS),
    "pfe": ("pfe", {}, {"margin": 0.5}, POINT),
    "lam-post-hoc": ("lam", {"passes": 100}, {"margin": 0.7}, PAIRS),
    "lam-online": ("lam", {"online": True, "passes": 100} | NARROW, {"margin": 0.7}, PAIRS),
}
EVERYTHING = {"validation": 1000, "gallery": 1, "tuning": 2, "calibration": 1}
LITTLE = {"validation": 200, "gallery": 59_500, "tuning": 2, "calibration": 1}
QUERIES, EPOCHS = sized((10_000, 5), (200, 1))


def configuration(method: str, seed: int, runs: Path) -> TrainingConfig:
    """The recipe of one training."""
    encoder, chosen, loss, mining = TRAINED[method]
    return TrainingConfig(
        name=f"fashion-{method}-{seed}",
        storage=str(runs),
        seed=seed,
        epochs=EPOCHS,
        batch=128,
        precision="bfloat16",
        data=DataConfig("fashion-mnist", options=sized(EVERYTHING, LITTLE)),
        preprocessing=Preprocessing((28, 28), 1),
        augmentation=Augmentation(),
        encoder=EncoderConfig(encoder, dim=3, options=chosen),
        loss=loss,
        mining=mining,
    )


def run_of(method: str, seed: int, runs: Path) -> RunFolder:
    """A trained run."""
    if method == "deterministic":
        return find_run(str(run_of("deep-ensemble", seed, runs).path / "members" / "member-0"))
    return train(configuration(method, seed, runs))


def main() -> None:
    """Train, measure and print."""
    asked = options(__doc__, tuple(PUBLISHED))
    root = data_root(DataConfig())
    sets = read_fashion_mnist(root).queries, read_mnist(root).queries
    test, digits = (images.subset(np.arange(QUERIES)) for images in sets)
    rows, figures, runs = [], {}, {}
    for method, published in PUBLISHED.items():
        numbers: list[dict[str, float | None]] = []
        for seed in range(asked.seeds if method in asked.encoders else 0):
            run = run_of(method, seed, asked.runs)
            if method in TRAINED:
                runs[f"{method}, seed {seed}"] = run
            encoder = run.encoder().to(memory_format=torch.channels_last)  # half as fast again
            searched = search(run.preprocessing, encoder, test)
            numbers.append(
                retrieval_scores(searched, test)
                | ood_scores(searched.uncertainty, outside(run, encoder, searched, digits))
                | {"ECE": closed_set_error(run, encoder, test)}
            )
        if numbers:
            cells = (spread([one[name] for one in numbers]) for name in COLUMNS)
            rows.append((method, "here", *cells))
            for name in COLUMNS:
                values = [one[name] for one in numbers if one[name] is not None]
                if values:
                    figures[f"{method}_{name}".replace("-", "_")] = sum(values) / len(values)
        rows.append((method, "published", *published.split()))
    title = f"Fashion-MNIST, MNIST out of distribution, {asked.seeds} seeds from 0"
    show(title, ("encoder", "row", *COLUMNS), rows, figures, runs, asked.json)


if __name__ == "__main__":
    main()
