"""CUB-200-2011 with the encoders of Cai et al. (AAAI 2025), on 50 of its classes.

The backbone is EfficientNet-Lite0, pre-trained on ImageNet. Heads on its frozen features, and
fine-tuned encoders, are trained on classes 1 to 25 by `configs/cai2025` and measured on classes 26
to 50. All test images are searched among themselves for recall at 1, mAP@5, the AUROC of a wrong
first image, AUSC, and the ECE at 1: a random half sets its range of uncertainties, and its error is
that of the other half. The uncertainty of encoders without one is one minus the cosine to the
nearest image.

Set sizes are certified at delta = 0.1 over random halves of each class into gallery and queries:
300 queries calibrate, half of the others tune, and the rest is measured. "one size, order of auto"
gives every query the same number of images, in the order in which `auto` takes them: one of each
label where `auto` does so. "constant" takes the nearest images. "-" is what cannot be certified in
some division.

The deterministic encoders of three seeds are the members of the one deep ensemble. Frozen backbones
see no augmentation. Fine-tuning is short enough for two CPU cores: `EPOCHS` of batches of 8 classes
by 4 images, mined within the batch, as in `configs/own-folder-pretrained.yaml`. MC dropout is not
fine-tuned, because twenty passes through the whole network take too long. Trained runs in `--runs`
are reused. RCIR_DATA is the folder of the data sets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from tables import Searched, auroc, markdown, options, retrieval_scores, search, show, sized, spread

# isort: split
from birds import KINDS, MODEL, class_folders, weights

import rcir
from rcir.config import parse
from rcir.data import Augmentation, ImageSet, Preprocessing
from rcir.data.datasets.user_images import read_folder
from rcir.encoders import Encoder, EncoderConfig, build_encoder, model_preprocessing
from rcir.encoders.batches import embed
from rcir.encoders.features import BackboneFeatures, frozen_backbone
from rcir.errors import RiskUnattainable
from rcir.risk import Bound, ScoredResults, certify, make_request, score
from rcir.runs.folder import RunFolder, find_run
from training import TrainingConfig, train
from training.images import FeaturePreprocessing

CONFIGS = Path(__file__).parents[2] / "configs"
EPOCHS, BATCH, TRAINED, MEMBERS = sized((3, 32, range(1, 26), 3), (1, 8, range(24, 26), 2))
FROZEN = sized(60, 2)  # epochs
SPLITS, CALIBRATION = sized((10, 300), (1, 60))
ALPHAS, DELTA = sized((0.05, 0.1, 0.15, 0.2, 0.25, 0.3), (0.4,)), 0.1
MAIN = sized(0.1, 0.4)
PLAIN = "ImageNet's features"
METHODS = ("deterministic", "mc-dropout", "deep-ensemble", "btl")
ENCODERS = [(True, method) for method in METHODS]
ENCODERS += [(False, method) for method in METHODS if method != "mc-dropout"]
SCORES = ("R@1", "mAP@5", "AUROC", "AUSC", "ECE@1")
# Score function, uncertainty and bound.
RULES: dict[str, tuple[str, str, Bound]] = {
    "constant": ("constant", "encoder", "binomial"),
    "minmax, encoder, Hoeffding": ("minmax", "encoder", "hoeffding"),
    "minmax, encoder": ("minmax", "encoder", "binomial"),
    "minmax, 1 - cosine": ("minmax", "cosine", "binomial"),
    "auto": ("auto", "auto", "binomial"),
}
FAIR = "one size, order of auto"


def preprocessing(config: EncoderConfig) -> Preprocessing:
    """Return the preprocessing of the backbone."""
    full = model_preprocessing(config)
    return sized(full, replace(full, size=(32, 32)))


def configuration(method: str, frozen: bool, seed: int, runs: Path) -> TrainingConfig:
    """Return the configuration of one training run."""
    kinds = sorted(each.name for each in pictures(runs).iterdir())
    data = {"path": str(pictures(runs).absolute()), "train": kinds[: len(TRAINED)]}
    published = ("cai2025/recipe.yaml", f"cai2025/{method}.yaml")
    arguments = [
        *(part for file in published for part in ("--config", str(CONFIGS / file))),
        *("--name", f"cub50-{'frozen' if frozen else 'tuned'}-{method}-{seed}"),
        *("--storage", str(runs), "--seed", str(seed), "--data.name", "folder"),
        *("--data.options", json.dumps(data), "--encoder.backbone", MODEL),
        *("--encoder.dim", "1280", "--encoder.pretrained", "false"),
        *("--encoder.checkpoint_path", str(weights())),
    ]
    if method == "deep-ensemble":
        arguments += ["--encoder.options", json.dumps({"members": MEMBERS})]
    config = parse(TrainingConfig, arguments, "cub50")
    config = replace(config, preprocessing=preprocessing(config.encoder))
    if frozen:
        encoder = replace(config.encoder, freeze=True)
        return replace(config, epochs=FROZEN, augmentation=Augmentation(), encoder=encoder)
    mining = replace(config.mining, scope="batch", samples_per_class=4)
    return replace(config, epochs=EPOCHS, batch=BATCH, mining=mining)


def pictures(runs: Path) -> Path:
    """Return the class folders of the photographs."""
    return class_folders(runs / "pictures", range(TRAINED[0], KINDS[-1] + 1))


def runs_of(method: str, frozen: bool, seeds: int, runs: Path) -> list[RunFolder]:
    """Train the runs of an encoder."""
    ensemble = method in ("deterministic", "deep-ensemble")
    name = "deep-ensemble" if ensemble else method
    trained = [
        train(configuration(name, frozen, seed, runs)) for seed in range(1 if ensemble else seeds)
    ]
    if method != "deterministic":
        return trained
    members = trained[0].path / "members"
    return [find_run(str(members / f"member-{seed}")) for seed in range(MEMBERS)]


def features_of(test: ImageSet) -> tuple[Encoder, ImageSet]:
    """Return the pre-trained backbone, and the test images as its features.

    Encoders with a frozen backbone take features in place of images.
    """
    config = EncoderConfig("pretrained", MODEL, "gem", checkpoint_path=str(weights()), freeze=True)
    prepared = preprocessing(config)
    encoder = build_encoder(config, prepared.channels, prepared.size)
    backbone = frozen_backbone(encoder)
    assert backbone is not None
    features = embed(BackboneFeatures(backbone, config), prepared, test.images)
    return encoder, replace(test, images=features.vectors.numpy())


def scores(searched: Searched, test: ImageSet) -> dict[str, float]:
    """Return the scores of all test images searched among themselves."""
    labels = np.asarray(test.labels)
    right = labels[searched.positions[:, 0]] == labels
    uncertainty = searched.uncertainty
    wrong = auroc(uncertainty[right], uncertainty[~right])
    return retrieval_scores(searched, test) | {"AUROC": wrong}


def certified(searched: Searched, test: ImageSet) -> dict[tuple[str, float], tuple[float, float]]:
    """Return mean size and risk by rule and alpha; sizes are infinite if uncertified somewhere."""
    measured: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for split in range(SPLITS):
        for key, values in of_division(searched, np.asarray(test.labels), split):
            measured.setdefault(key, []).append(values)
    return {key: tuple(np.mean(values, axis=0)) for key, values in measured.items()}


def of_division(
    searched: Searched, labels: NDArray[np.generic], seed: int
) -> Iterator[tuple[tuple[str, float], tuple[float, float]]]:
    """Yield the same for one division into gallery and queries."""
    vectors, uncertainties = searched.vectors.numpy(), searched.uncertainty
    gallery, queries = halves(labels, seed)
    first, second = (
        uncertainties[rows] if searched.stated else None for rows in (gallery, queries)
    )
    retriever = rcir.Retriever.from_embeddings(
        vectors[gallery], labels=labels[gallery], uncertainty=first
    )
    labelled = retriever.labelled(vectors[queries], labels[queries], uncertainty=second)
    results = retriever.search_labelled(labelled)
    calibration, left = np.split(np.arange(len(queries)), [CALIBRATION])
    tuning, test = np.split(left, [len(left) // 2])
    for rule, (score_function, uncertainty, bound) in RULES.items():
        retriever.calibration = None  # each rule is compared as if it were the only one
        retriever.calibrate_splits(
            results[tuning],
            results[calibration],
            score_function,
            bound=bound,
            alphas=ALPHAS,
            delta=DELTA,
            query_uncertainty=uncertainty,
        )
        made = retriever.require_calibration()
        evidence = made.miss_rule.evidence
        arranged = made.arrange(retriever.searcher, results[test], made.miss_rule)
        measured = score(made.miss_rule.score_function, arranged)
        yield from at_levels(rule, bound, evidence, measured)
        if rule == "auto":
            yield from at_levels(FAIR, bound, evidence.of_constant_size, measured.of_constant_size)


def halves(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of half of the photographs of each kind, and of the others, in random order."""
    order = np.random.default_rng(seed).permutation(len(labels))
    kinds = pd.Series(order).groupby(labels[order])
    in_half = (kinds.cumcount() < kinds.transform("size") / 2).to_numpy()
    return order[in_half], order[~in_half]


def at_levels(
    rule: str, bound: Bound, calibration: ScoredResults, measured: ScoredResults
) -> Iterator[tuple[tuple[str, float], tuple[float, float]]]:
    """Yield the mean size and the risk of scored queries at each level."""
    for alpha in ALPHAS:
        try:
            threshold = certify(make_request(alpha, DELTA), calibration, bound=bound).threshold
        except RiskUnattainable:
            yield (rule, alpha), (np.inf, 0.0)
            continue
        missed = float(np.mean(measured.match_score > threshold))
        yield (rule, alpha), (float(measured.sizes(threshold).mean()), missed)


def main() -> None:
    """Train, measure and print."""
    arguments = options(__doc__)
    data = configuration("btl", True, 0, arguments.runs).data.options
    test = read_folder(Path(), data["path"], data["train"]).queries
    backbone, features = features_of(test)
    unchanged = FeaturePreprocessing()
    searched = {PLAIN: [search(unchanged, backbone, features)]}
    runs: dict[str, RunFolder] = {}
    for frozen, method in ENCODERS:
        name = f"{'frozen' if frozen else 'fine-tuned'}: {method}"
        trained = runs_of(method, frozen, arguments.seeds, arguments.runs)
        searched[name] = [
            search(unchanged, run.encoder(), features)
            if frozen
            else search(run.preprocessing, run.encoder(), test)
            for run in trained
        ]
        if method != "deterministic":  # members of the ensemble
            runs |= {f"{name}, seed {seed}": run for seed, run in enumerate(trained)}
    rows, sizes, figures = [], [], {}
    for name, seeds in searched.items():
        measured = [scores(each, test) for each in seeds]
        rows.append((name, *(spread([one[score] for one in measured]) for score in SCORES)))
        sets = [certified(each, test) for each in seeds]
        for rule in (*RULES, FAIR):
            means = {
                alpha: np.mean([each[rule, alpha] for each in sets], axis=0) for alpha in ALPHAS
            }
            cells = (f"{size:.2f} ({risk:.3f})" for size, risk in means.values())
            sizes.append((name, rule, *(cell if "inf" not in cell else "-" for cell in cells)))
            figures[name, rule] = float(means[MAIN][0])
        figures[name, "recall"] = float(np.mean([one["R@1"] for one in measured]))
    tuned = "fine-tuned: btl"
    named = {
        "cub_frozen_recall": figures[PLAIN, "recall"],
        "cub_finetuned_recall": figures[tuned, "recall"],
        "cub_finetuned_over_frozen_size": figures[tuned, "auto"] / figures[PLAIN, "auto"],
        "cub_finetuned_auto_over_one_size": figures[tuned, "auto"] / figures[tuned, FAIR],
    }
    columns = ("encoder", "sizes", *(f"alpha {alpha:g}: size (risk)" for alpha in ALPHAS))
    title = f"CUB-200-2011, classes 26 to 50, {arguments.seeds} seeds from 0"
    show(title, ("encoder", *SCORES), rows, named, runs, arguments.json)
    print("\nSizes of sets:\n")
    print(markdown(columns, sizes))
    for name, value in named.items():
        print(f"{name} = {value:.4g}")


if __name__ == "__main__":
    main()
