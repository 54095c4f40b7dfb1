"""Fashion-MNIST with MNIST out of distribution, beside the table of Warburg et al. (2023).

The network of "Bayesian metric learning for uncertainty quantification in image retrieval" (arXiv
2302.01332), embeddings of three dimensions, test images searched among themselves. Where the paper
has contrastive bases, so have we (deterministic, deep ensemble, MC dropout of whole channels at a
rate of 0.05, PFE), with its margin of 0.7. `deep-ensemble-raw` is the published read-out, the mean
of raw vectors. PFE takes a member of the ensemble of its seed, and so does the deterministic
encoder, whose AUROC, AUPRC, AP and AUSC are those of one minus the cosine to the nearest image.
Mining of near pairs was chosen on 20,000 training images by validation recall.

AUPRC is by trapezoids, as published, AP by steps. ECE is that of the text, "ECE code" that of the
authors' code, which leaves out the queries on which all draws agree; "unanimous" is the share of
these. AUSC is divided by the range of its shares: theirs is 98/99 of it. "cost" is the processor
time of an epoch over that of the deterministic encoder.

Five epochs of 58,999 images instead of the paper's 20; with `--reduced`, two epochs of 20,000
images of 14 x 14 pixels, 20 passes of MC dropout and 4,000 test images. `--use-gpu` trains on a
GPU, `--cost` measures the cost.
Trained runs in `--runs` are used again; `--encoders` measures some. RCIR_DATA names the data.
"""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from ray.train import UserCallback
from tables import (
    ood_scores,
    options,
    outside,
    retrieval_scores,
    search,
    show,
    sized,
    spread,
    vote_scores,
)

from rcir.data import Augmentation, DataConfig, ImageSet, Preprocessing, data_root
from rcir.data.datasets.small_images import read_fashion_mnist, read_mnist
from rcir.encoders import Encoder, EncoderConfig
from rcir.mining import MiningConfig
from rcir.runs.folder import ENCODER_FILE, RunFolder, find_run
from training import TrainingConfig, train

COLUMNS = (
    *("mAP@1", "mAP@5", "mAP@10", "AUROC", "AUPRC", "AP", "AUSC"),
    *("ECE", "ECE code", "unanimous", "cost"),
)
PUBLISHED = {
    "deterministic": ".78±.01 .73±.01 .72±.01 - - - - - - - -",
    "mc-dropout": ".76±.03 .71±.03 .70±.03 .93±.03 .93±.03 - .84±.06 - .03±.04 - -",
    "deep-ensemble": ".69 .62 .59 .41 .46 - .61 - .04 - -",
    "deep-ensemble-raw": ".69 .62 .59 .41 .46 - .61 - .04 - -",
    "hib": ".69±.08 .63±.09 .61±.09 .60±.12 .60±.11 - .65±.08 - .54±.08 - -",
    "pfe": ".78±.00 .74±.00 .72±.00 .53±.03 .46±.01 - .65±.01 - .26±.02 - -",
    "lam-post-hoc": ".78±.00 .74±.00 .72±.00 .96±.02 .96±.02 - .86±.01 - .03±.00 - -",
    "lam-online": ".81±.00 .77±.01 .76±.01 .98±.01 .98±.01 - .89±.01 - .02±.00 - -",
    "lam-published": ".81±.00 .77±.01 .76±.01 .98±.01 .98±.01 - .89±.01 - .02±.00 - -",
}
REDUCED = "--reduced" in sys.argv[1:]
PAIRS = MiningConfig("random", "semi-hard", num_negatives=8, pool=64, margin=0.5, scope="batch")
# All images of the batch that the paper's "all" triplets contain.
ALL = MiningConfig(
    "random", "margin-violating", num_negatives=64, pool=64, margin=0.7, scope="batch"
)
VALIDATION, TRAINED_ON = sized((500, 20_000) if REDUCED else (1000, 58_999), (100, 300))
CONTRASTIVE = {"form": "contrastive", "margin": 0.7}
CHANNELS = {"dropout": 0.05, "passes": 20 if REDUCED else 100, "channels": True}
# The scale of the paper, and its code: negatives count in full, and ReLU at every step.
AS_PUBLISHED = {
    **{"online": True, "passes": 100, "scale": float(TRAINED_ON**2), "initial": float(TRAINED_ON)},
    **{"prior_precision": 1.0, "negatives_weight": 1.0, "clamp": "step"},
    **{"hessian": "euclidean", "variant": "fixed"},
}
# Negatives weigh about what their share in the margin is among pairs that are not mined.
ONLINE = AS_PUBLISHED | {"negatives_weight": 0.1, "clamp": "use"}
# Method, its options, its loss, mining.
Recipe = tuple[str, dict[str, Any], dict[str, Any], MiningConfig]
TRAINED: dict[str, Recipe] = {
    "deterministic": ("deterministic", {}, CONTRASTIVE, PAIRS),
    "deep-ensemble": ("deep-ensemble", {}, CONTRASTIVE, PAIRS),
    "mc-dropout": ("mc-dropout", CHANNELS, CONTRASTIVE, PAIRS),
    "hib": ("hib", {}, {}, PAIRS),
    "pfe": ("pfe", {}, CONTRASTIVE, PAIRS),
    "lam-post-hoc": ("lam", {"passes": 100}, {"margin": 0.7}, PAIRS),
    "lam-online": ("lam", ONLINE, {"margin": 0.7}, PAIRS),
    "lam-published": ("lam", AS_PUBLISHED, {"margin": 0.7}, ALL),
}
MEMBERS = 5
QUERIES, EPOCHS = sized((4000, 2) if REDUCED else (10_000, 5), (60, 1))


def configuration(name: str, recipe: Recipe, seed: int, asked: Namespace) -> TrainingConfig:
    """The configuration of one training."""
    method, chosen, loss, mining = recipe
    side, small = (14, "-reduced") if REDUCED else (28, "")
    gallery = 60_000 - VALIDATION - TRAINED_ON
    parts = {"validation": VALIDATION, "gallery": gallery, "tuning": 2, "calibration": 1}
    return TrainingConfig(
        name=f"fashion-{name}-{seed}{small}",
        storage=str(asked.runs),
        seed=seed,
        epochs=EPOCHS,
        batch=64,
        use_gpu=asked.use_gpu,
        data=DataConfig("fashion-mnist", options=parts),
        preprocessing=Preprocessing((side, side), 1),
        augmentation=Augmentation(),
        encoder=EncoderConfig(method, dim=3, options=chosen),
        loss=loss,
        mining=mining,
    )


def run_of(name: str, seed: int, asked: Namespace) -> RunFolder:
    """A trained run; members of the ensemble serve other rows too."""
    name = name.removesuffix("-raw")
    if name not in ("deterministic", "pfe"):
        return train(configuration(name, TRAINED[name], seed, asked))
    member = run_of("deep-ensemble", seed, asked).path / "members" / "member-0"
    if name == "deterministic":
        return find_run(str(member))
    method, _, loss, mining = TRAINED[name]
    base = {"base_weights": str((member / ENCODER_FILE).absolute())}
    return train(configuration(name, (method, base, loss, mining), seed, asked))


@dataclass
class Clock(UserCallback):
    """Processor times at the ends of epochs."""

    times: list[float] = field(default_factory=list)

    def after_report(self, run_context: object, metrics: object, checkpoint: object) -> None:
        """Note the time."""
        self.times.append(time.process_time())


def seconds_per_epoch(name: str, recipe: Recipe, asked: Namespace) -> float:
    """Least processor time of two epochs of few images."""
    method, chosen, loss, mining = recipe
    few = chosen | {"passes": 2} if "passes" in chosen else chosen  # of the validation images
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(name, (method, few, loss, mining), 0, asked)
        parts = {"validation": 50, "gallery": 57_950, "tuning": 2, "calibration": 1}
        data = replace(config.data, options=sized(parts, config.data.options))
        train(replace(config, storage=folder, epochs=3, data=data, use_gpu=False), callback=clock)
    return min(end - start for start, end in pairwise(clock.times))


def costs(names: list[str], asked: Namespace) -> dict[str, float]:
    """Cost of training of those encoders that are trained in epochs."""
    least = seconds_per_epoch("deterministic", TRAINED["deterministic"], asked)
    found = {"deterministic": 1.0}
    for name in names:
        if name.startswith("deep-ensemble"):
            found[name] = float(MEMBERS)
        elif name not in ("deterministic", "pfe"):
            found[name] = seconds_per_epoch(name, TRAINED[name], asked) / least
    return found


def scores(
    run: RunFolder, encoder: Encoder, test: ImageSet, digits: ImageSet
) -> dict[str, float | None]:
    """All columns of a trained encoder but its cost."""
    encoder = encoder.to(memory_format=torch.channels_last)  # half as fast again
    searched = search(run.preprocessing, encoder, test)
    return (
        retrieval_scores(searched, test)
        | ood_scores(searched.uncertainty, outside(run, encoder, searched, digits))
        | vote_scores(run, encoder, test)
    )


def means(name: str, numbers: list[dict[str, float | None]]) -> dict[str, float]:
    """Figures of a row: means over seeds of what there is."""
    found = {}
    for column in numbers[0]:
        values = [one[column] for one in numbers if one[column] is not None]
        if values:
            found[f"{name}_{column}".replace("-", "_").replace(" ", "_")] = float(np.mean(values))
    return found


def images_of_both() -> tuple[ImageSet, ImageSet]:
    """Test images of Fashion-MNIST and of MNIST."""
    root = data_root(DataConfig())
    sets = read_fashion_mnist(root).queries, read_mnist(root).queries
    test, digits = (images.subset(np.arange(QUERIES)) for images in sets)
    return test, digits


def titled(what: str, seeds: int) -> str:
    """A title with all sizes."""
    pixels = "14 x 14 pixels" if REDUCED else "28 x 28 pixels"
    return (
        f"{what}: {EPOCHS} epochs of {TRAINED_ON:,} pictures of {pixels}, {QUERIES:,} test "
        f"pictures, seeds 0 to {seeds - 1}"
    )


def main() -> None:
    """Train, measure and print."""
    asked = options(__doc__, tuple(PUBLISHED), reduced=True)
    test, digits = images_of_both()
    rows, figures, runs = [], {}, {}
    cost = costs(asked.encoders, asked) if asked.cost else {}
    for name, published in PUBLISHED.items():
        numbers: list[dict[str, float | None]] = []
        for seed in range(asked.seeds if name in asked.encoders else 0):
            run = run_of(name, seed, asked)
            encoder = run.encoder()
            if name.endswith("-raw"):
                encoder.combination = "reference"
            elif name != "deterministic":
                runs[f"{name}, seed {seed}"] = run
            numbers.append(scores(run, encoder, test, digits) | {"cost": cost.get(name)})
        if numbers:
            figures |= means(name, numbers)
            rows.append((name, "here", *(spread([n[c] for n in numbers]) for c in COLUMNS)))
        rows.append((name, "published", *published.split()))
    title = titled("Fashion-MNIST, MNIST out of distribution", asked.seeds)
    show(title, ("encoder", "row", *COLUMNS), rows, figures, runs, asked.json)


if __name__ == "__main__":
    main()
