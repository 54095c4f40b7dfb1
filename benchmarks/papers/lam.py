"""Table 1 of Warburg et al. (2023) and settings of the online posterior, on Fashion-MNIST.

Two geometries and three variants of the Hessian, post hoc (one training, fitted six times, with
our defaults) and online (as published: `lam-published` of `fashion_mnist.py`), with MNIST out of
distribution. Published figures are those of LFW, with CUB out of distribution, which we do not
have. The other rows are settings of the online posterior: as published (scale N^2, with N training
images, negatives count in full, ReLU at every step, all pairs of a batch), clamped in use only,
with near pairs only, or with smaller scales; `tenth` with near pairs that count a tenth, clamped in
use; `auto` with the default weight. "deviation" is the median deviation of a weight of the last
layer, "free" the share of weights with at least half of the prior's. See `fashion_mnist.py` for
the other columns, options and forms.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import cast

from fashion_mnist import (
    ALL,
    AS_PUBLISHED,
    ONLINE,
    PAIRS,
    TRAINED,
    TRAINED_ON,
    configuration,
    images_of_both,
    means,
    run_of,
    scores,
    titled,
)
from tables import options, show, sized, spread

from rcir.data import load_splits
from rcir.encoders import build_encoder
from rcir.encoders.base import TrainingImages
from rcir.encoders.batches import embed
from rcir.encoders.lam import LaplacianMetric
from rcir.runs.folder import RunFolder
from training import train

COLUMNS = (
    *("mAP@1", "mAP@5", "AUROC", "AUSC", "ECE", "ECE code", "unanimous"),
    *("deviation", "free"),
)
PUBLISHED = {  # mAP@5, AUROC and AUSC
    "posthoc-euclidean-fixed": (".70±.00", ".57±.25", ".44±.01"),
    "posthoc-euclidean-positive": (".70", ".58±.23", ".45±.01"),
    "posthoc-euclidean-full": (".70", ".56±.26", ".44±.01"),
    "posthoc-arccos-fixed": (".69", ".53±.20", ".46±.02"),
    "posthoc-arccos-positive": (".70", ".29±.11", ".48±.01"),
    "posthoc-arccos-full": (".69", ".55±.18", ".45±.01"),
    "online-euclidean-fixed": (".63±.01", ".77±.04", ".31±.02"),
    "online-euclidean-positive": (".70", ".38±.10", ".47±.01"),
    "online-euclidean-full": (".67±.01", ".59±.04", ".42±.01"),
    "online-arccos-fixed": (".71", ".78±.18", ".50±.03"),
    "online-arccos-positive": (".70", ".23±.03", ".46±.00"),
    "online-arccos-full": (".71", ".70±.12", ".51±.01"),
}
N = {"scale": float(TRAINED_ON)}
# Options and mining of online settings. N^2 is the published scale.
SETTINGS = {
    "published": (AS_PUBLISHED, ALL),
    "published-in-use": (AS_PUBLISHED | {"clamp": "use"}, ALL),
    "published-near-pairs": (AS_PUBLISHED, PAIRS),
    "published-scale-n": (AS_PUBLISHED | N, ALL),
    "published-scale-1": (AS_PUBLISHED | {"scale": 1.0}, ALL),
    "tenth": (ONLINE, PAIRS),
    "tenth-scale-n": (ONLINE | N, PAIRS),
    "auto-scale-n": (ONLINE | N | {"negatives_weight": "auto"}, PAIRS),
    "defaults": ({"online": True, "passes": 100}, PAIRS),
}


def online(name: str, seed: int, asked: Namespace) -> RunFolder:
    """The run of a row that is trained online; two of them are rows of the other script."""
    options, mining = SETTINGS.get(name, (AS_PUBLISHED, ALL))
    if name in PUBLISHED:
        _, geometry, variant = name.split("-")
        options = AS_PUBLISHED | {"hessian": geometry, "variant": variant}
    recipe = ("lam", options, {"margin": 0.7}, mining)
    for known in ("lam-published", "lam-online"):
        if TRAINED[known] == recipe:
            return run_of(known, seed, asked)
    return train(configuration(f"lam-{name}", recipe, seed, asked))


def post_hoc(name: str, run: RunFolder, seed: int, asked: Namespace) -> LaplacianMetric:
    """The encoder of a run, its posterior fitted anew with the Hessian that a row names."""
    trained, shape = run.encoder(), run.preprocessing
    _, geometry, variant = name.split("-")
    options = trained.config.options | {"hessian": geometry, "variant": variant}
    config = replace(trained.config, options=options)
    encoder = build_encoder(config, shape.channels, shape.size).eval()
    encoder.load_state_dict(trained.state_dict())
    recipe = configuration("lam-post-hoc", TRAINED["lam-post-hoc"], seed, asked)
    images = load_splits(recipe.data).train
    encoder.fit_posthoc(TrainingImages(images, shape, embed, seed, recipe.loss_options()))
    return cast(LaplacianMetric, encoder)


def width(encoder: LaplacianMetric) -> dict[str, float | None]:
    """How wide the posterior of the last layer is."""
    precision = encoder.hessian.clamp(min=0) + encoder.prior_precision
    free = encoder.prior_precision / precision >= 0.25
    return {"deviation": float(precision.rsqrt().median()), "free": float(free.float().mean())}


def main() -> None:
    """Train, measure and print."""
    few = ("posthoc-arccos-full", "online-arccos-full", "published", "defaults")
    names = sized((*PUBLISHED, *SETTINGS), few)
    asked = options(__doc__, names, reduced=True)
    test, digits = images_of_both()
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    runs: dict[str, RunFolder] = {}
    for name in names:
        numbers: list[dict[str, float | None]] = []
        for seed in range(asked.seeds if name in asked.encoders else 0):
            if name.startswith("posthoc"):
                run = run_of("lam-post-hoc", seed, asked)
                encoder = post_hoc(name, run, seed, asked)
            else:
                run = online(name, seed, asked)
                encoder = cast(LaplacianMetric, run.encoder())
            runs[run.path.name] = run
            numbers.append(scores(run, encoder, test, digits) | width(encoder))
        if numbers:
            figures |= means(name, numbers)
            published = " / ".join(PUBLISHED.get(name, "-"))
            rows.append((name, published, *(spread([n[c] for n in numbers]) for c in COLUMNS)))
    title = titled("Laplacian metric learner, MNIST out of distribution", asked.seeds)
    columns = ("row", "published mAP@5 / AUROC / AUSC", *COLUMNS)
    show(title, columns, rows, figures, runs, asked.json)


if __name__ == "__main__":
    main()
