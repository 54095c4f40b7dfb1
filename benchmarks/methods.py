"""Every method beside the others: what it retrieves, whether it knows, how small its sets are.

On two-digit numbers, 400 pictures of each kind of Fashion-MNIST, 240 characters of Omniglot (small
networks, trained by each method) and 50 kinds of birds (heads on the features of EfficientNet-Lite0
as ImageNet left it), half of the classes trained on and the others measured on: recall at 1 and
expected calibration error of test queries, AUROC of a wrong first image by the encoder's
uncertainty (where it has one) and by the one that sizes go by, AUROC of telling MNIST's digits by
the latter, mean certified sizes at delta = 0.1 by `auto` (score function and uncertainty, chosen on
the tuning split), the last over one size for all, and how long an embedding takes beside the
deterministic encoder's.
`--sets` and `--encoders` measure a part. `--seeds` repeats every training and prints means and
standard deviations, `--options` changes options of the encoders (JSON), and `--query-uncertainty`
names the uncertainty that sizes and OOD go by. Trained runs in `--runs` are used again.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from birds import KINDS, MODEL, class_folders, weights
from common import DIGITS, parser, report, sized, spread
from PIL import Image
from sklearn.metrics import roc_auc_score

from calibration import CalibrationConfig, Outcome, calibrate
from rcir.config import parse
from rcir.data import DataConfig, Preprocessing, data_root
from rcir.data.datasets.handwriting import read_omniglot
from rcir.data.datasets.small_images import read_fashion_mnist, read_mnist
from rcir.encoders import Encoder, EncoderConfig
from rcir.mining import MiningConfig
from rcir.retrieval.query_uncertainty import with_uncertainty
from rcir.runs.folder import RunFolder
from rcir.torch_settings import keep_freed_memory
from training import TrainingConfig, train
from training.config import override

ALPHAS, DELTA = sized((0.05, 0.1), (0.4, 0.5)), 0.1
CONFIGS = Path(__file__).parents[1] / "configs"
BASELINE = "deterministic"
# What a method is trained with where that is not its default, on every set.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    BASELINE: {},
    "mc-dropout": {},
    "deep-ensemble": {},
    "btl": {"loss": {"kl_scale": 1e-5}},
    "vmf": {},
    "tripreg": {},
    "hib": {},
    "pfe": {},
    "lam": {},
}
SETS = ("digits", "fashion", "omniglot", "cub50")
EPOCHS = sized({"digits": 8, "fashion": 8, "omniglot": 8, "cub50": 20}, dict.fromkeys(SETS, 1))
SIDES = {"fashion": 28, "omniglot": 32}
PICTURES, CHARACTERS = sized((400, 240), (12, 12))
TIMED = sized(256, 16)  # images
# Of the two-digit numbers: the figure of a column.
FIGURES = {"recall_at_1": "R@1", "auroc_miss": "AUROC", "size": "ratio"}


def folder_of(name: str, runs: Path) -> Path:
    """Class folders of some pictures of Fashion-MNIST or Omniglot, written once."""
    folder = runs / "pictures" / name
    if not folder.exists():
        read = read_omniglot if name == "omniglot" else read_fashion_mnist
        images = read(data_root(DataConfig())).train
        labels = np.unique(images.labels)
        if name == "omniglot":
            labels = np.random.default_rng(0).permutation(labels)[:CHARACTERS]
        begun = folder.with_name(f"{name}.begun")
        for label in labels:
            (begun / str(label)).mkdir(parents=True, exist_ok=True)
            for row in np.flatnonzero(images.labels == label)[:PICTURES]:
                Image.fromarray(images.images[row]).save(begun / f"{label}/{row}.png")
        begun.rename(folder)
    return folder.absolute()


def base(name: str, runs: Path) -> TrainingConfig:
    """The data of a set, and what its encoders share."""
    if name == "digits":
        file = ["--config", str(CONFIGS / "digits.yaml"), "--name", "base"]
        return override(parse(TrainingConfig, file, name), {"data.options": DIGITS})
    if name != "cub50":
        options: dict[str, Any] = {"path": str(folder_of(name, runs))}
        data, side = DataConfig("folder", options=options), SIDES[name]
        return TrainingConfig("base", data=data, preprocessing=Preprocessing((side, side), 1))
    pictures = class_folders(runs / "pictures", range(1, KINDS[-1] + 1))
    kinds = sorted(each.name for each in pictures.iterdir())
    trained = [kind for kind in kinds if int(kind[:3]) not in KINDS]
    options = {"path": str(pictures.absolute()), "train": trained}
    pretrained = {"checkpoint_path": str(weights()), "freeze": True}
    encoder = EncoderConfig(BASELINE, MODEL, "avg", dim=128, **pretrained)
    return TrainingConfig("base", encoder=encoder, data=DataConfig("folder", options=options))


def run_of(
    name: str, method: str, runs: Path, seed: int = 0, options: Mapping[str, Any] | None = None
) -> RunFolder:
    """A trained run, with its own folder for each seed and each choice of options."""
    config, recipe = base(name, runs), RECIPES[method]
    changed = [f"{key}-{value}" for key, value in (options or {}).items()]
    chosen = {**recipe.get("options", {}), **(options or {})}
    return train(
        replace(
            config,
            name="-".join([name, method, *changed, *([f"seed{seed}"] if seed else [])]),
            storage=str(runs),
            seed=seed,
            epochs=EPOCHS[name],
            encoder=replace(config.encoder, method=method, options=chosen),
            loss=recipe.get("loss", {}),
            mining=recipe.get("mining", MiningConfig()),
        )
    )


def calibrated(name: str, run: RunFolder, uncertainty: str = "auto") -> Outcome:
    """The run, calibrated and measured on unseen test queries."""
    with tempfile.TemporaryDirectory() as folder:
        return calibrate(
            CalibrationConfig(
                str(run.path),
                folder,
                query_uncertainty=uncertainty,
                alphas=ALPHAS,
                delta=DELTA,
            )
        )


def detection(outcome: Outcome, run: RunFolder) -> float:
    """AUROC of the digits of MNIST among the test queries, by their uncertainty."""
    searcher = outcome.retriever.searcher
    digits = searcher.search(read_mnist(data_root(run.data)).queries.images)
    kind = outcome.retriever.require_calibration().uncertainty
    scores = (outcome.splits.test.results, with_uncertainty(searcher, digits, kind))
    inside, outside = (each.uncertainty for each in scores)
    is_digit = np.arange(len(inside) + len(outside)) >= len(inside)
    return float(roc_auc_score(is_digit, np.concatenate([inside, outside])))


def seconds_to_embed(encoder: Encoder, size: tuple[int, int], channels: int) -> float:
    """Median of five embeddings of the same images."""
    images = torch.rand(TIMED, channels, *size, generator=torch.Generator().manual_seed(0))
    encoder.embed(images)
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        encoder.embed(images)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def numbers_of(
    name: str, run: RunFolder, uncertainty: str = "auto"
) -> tuple[dict[str, float | None], str]:
    """Return the figures of a run by column, and the uncertainty that sizes its sets."""
    outcome = calibrated(name, run, uncertainty)
    numbers, evaluation = outcome.evaluation.quality.numbers, outcome.evaluation
    states = outcome.retriever.searcher.gallery.uncertainty is not None
    found: dict[str, float | None] = {
        "R@1": numbers["recall_at_1"],
        "encoder": numbers.get("auroc_miss_encoder") if states else None,
        "AUROC": numbers.get("auroc_miss"),
        "OOD": None if name == "cub50" else detection(outcome, run),
        "ECE": evaluation.quality.reliability.error,
    }
    for row in evaluation.rows:
        found[f"size {row.alpha:g}"] = row.mean_size
    whole = row.mean_size is not None and row.constant_size is not None
    found["ratio"] = row.mean_size / row.constant_size if whole else None
    shape = run.preprocessing
    found["seconds"] = seconds_to_embed(run.encoder(), shape.size, shape.channels)
    return found, evaluation.uncertainty


def main() -> None:
    """Train, calibrate, measure and print."""
    command = parser(__doc__)
    runs = Path("runs", sized("methods", "methods-short"))
    command.add_argument("--runs", type=Path, default=runs, help="trained runs")
    sets = sized(SETS, SETS[:1])
    command.add_argument("--sets", nargs="+", choices=SETS, default=sets)
    methods = sized(tuple(RECIPES), (BASELINE, "deep-ensemble", "tripreg"))
    command.add_argument("--encoders", nargs="+", choices=RECIPES, default=methods)
    command.add_argument("--seeds", type=int, default=1, help="trainings per row")
    command.add_argument("--options", type=json.loads, default={}, help="of the encoders, as JSON")
    command.add_argument("--query-uncertainty", default="auto", help="that sizes go by")
    asked = command.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows, figures = [], {}
    for name in asked.sets:
        baseline: float | None = None
        for method in asked.encoders:
            runs = [
                run_of(name, method, asked.runs, seed, asked.options) for seed in range(asked.seeds)
            ]
            outcomes = [numbers_of(name, run, asked.query_uncertainty) for run in runs]
            measured = [each for each, _ in outcomes]
            uncertainty = " ".join(sorted({by for _, by in outcomes}))
            seconds = statistics.mean(each.pop("seconds") for each in measured)
            baseline = seconds if method == BASELINE else baseline
            for each in measured:
                each["cost"] = None if baseline is None else seconds / baseline
            numbers = {key: [each[key] for each in measured] for key in measured[0]}
            cells = [spread(values) for values in numbers.values()]
            rows.append([name, method, *cells, uncertainty])
            print(f"| {' | '.join(rows[-1])} |", flush=True)
            if name == "digits":
                prefix = f"digits_{method}".replace("-", "_")
                for key, column in FIGURES.items():
                    if present := [value for value in numbers[column] if value is not None]:
                        figures[f"{prefix}_{key}"] = statistics.mean(present)
    columns = ("set", "method", *numbers, "by")
    report("Methods", columns, rows, figures, asked.json)


if __name__ == "__main__":
    main()
