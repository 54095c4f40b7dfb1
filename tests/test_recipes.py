"""The configuration files: they are valid, and recipes of papers have the published values."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from rcir.config import parse
from rcir.data.registry import find_dataset
from rcir.encoders import build_encoder
from training import TrainingConfig

FOLDER = Path(__file__).parents[1] / "configs"
# Data sets of Cai et al. (AAAI 2025): their names here, and the negatives per anchor.
SETS = {
    "cub200": ("cub200", 5),
    "car196": ("cars196", 5),
    "pittsburgh": ("pitts30k", 10),
    "chestxdet": ("chestx-det", 5),
}
# Options of the methods; only the variance head of 500 units is published.
METHODS = {
    "deterministic": {"unit": True},
    "mc-dropout": {"dropout": 0.1, "passes": 20, "channels": False},
    "deep-ensemble": {"members": 5, "combination": "distance"},
    "btl": {"variance_hidden": 500, "scaled": False, "distance": "mean", "passes": 20},
}
# Methods for which `digits.yaml` is used with the method's name.
DIGITS = ("deterministic", "mc-dropout", "deep-ensemble", "tripreg")
RECIPES = [f"{name}-{method}" for name, method in product(SETS, METHODS)]
SINGLE = {path.stem for path in FOLDER.glob("*.yaml") if not path.stem.startswith("tune-")}
OTHERS = sorted((SINGLE | {f"digits-{method}" for method in DIGITS}) - {"digits"})


def read(name, *options):
    """Return the configuration of one file, or of the files that a recipe consists of."""
    data, _, method = name.partition("-")
    files, options = [name], list(options)
    if name in RECIPES:
        files = [f"cai2025/{layer}" for layer in ("recipe", data, method)]
        options += ["--name", name]
    elif data == "digits" and method in DIGITS:
        files = [data]
        options += ["--name", name, "--encoder.method", method]
    words = [word for file in files for word in ("--config", str(FOLDER / f"{file}.yaml"))]
    return parse(TrainingConfig, [*words, *options], "test", "")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_has_the_published_values(name):
    config = read(name)
    data, negatives = SETS[name.partition("-")[0]]
    assert config.name == name
    assert (config.data.name, config.encoder.method) == (data, name.partition("-")[2])
    find_dataset(config.data.name).require("data.options", config.data.options)
    # Section 4 and supplement of the paper, and its code.
    assert (config.batch, config.epochs, config.patience, config.min_delta) == (8, 60, 5, 5e-4)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (1e-5, 1e-3)
    assert (optimizer.schedule, optimizer.gamma) == ("exponential", 0.99)
    augmentation = config.augmentation
    assert (augmentation.flip, augmentation.rotation, augmentation.crop) == (True, 10, 0.4)
    assert (augmentation.jitter, augmentation.occlusion) == ((0.2, 0.2, 0.2, 0.1), 0)
    assert config.preprocessing.size == (224, 224)
    assert config.preprocessing.mean == (0.485, 0.456, 0.406)
    assert config.preprocessing.std == (0.229, 0.224, 0.225)
    encoder = config.encoder
    assert (encoder.backbone, encoder.pooling, encoder.dim) == ("resnet50", "gem", 2048)
    assert encoder.pretrained
    assert encoder.options == METHODS[encoder.method]
    assert config.loss.get("kl_scale", 1e-6) == 1e-6
    mining = config.mining
    assert (mining.negatives, mining.margin) == ("margin-violating", 0.1)
    assert mining.num_negatives == negatives
    # Not the farthest, as the paper's text has it: that reverses the order of the variances.
    assert mining.positive == ("random" if encoder.method == "btl" else "nearest")


def test_recipes_build_networks_with_the_published_number_of_parameters():
    """ResNet-50 without its classifier, GeM, and a linear layer; for BTL also a variance head."""
    for method in METHODS:
        encoder = replace(read(f"cub200-{method}").encoder, pretrained=False)
        with torch.device("meta"):  # shapes without numbers
            built = build_encoder(encoder, 3, (64, 64))
        expected = 25_557_032 - (2048 * 1000 + 1000) + 1 + (2048 * 2048 + 2048)
        if method == "btl":
            expected += 1 + (2048 * 500 + 500) + (500 + 1)
        if method == "deep-ensemble":
            expected *= 5
        assert sum(weights.numel() for weights in built.parameters()) == expected, method


@pytest.mark.parametrize("name", OTHERS)
def test_other_configurations_are_valid_and_build_encoders(name):
    config = read(name)
    assert config.name == name
    find_dataset(config.data.name).require("data.options", config.data.options)
    channels, size = config.preprocessing.channels, config.preprocessing.size
    if config.encoder.pretrained:
        size = (64, 64)  # large networks accept any size
    encoder = build_encoder(replace(config.encoder, pretrained=False), channels, size)
    embedding = encoder.embed(torch.zeros(2, channels, *size))
    members = config.encoder.options.get("members", 1)
    assert embedding.vectors.shape == (2, config.encoder.dim * members)
