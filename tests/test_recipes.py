"""The configuration files: they are valid, and recipes of papers have the published values."""

import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rcir.config import flatten, parse
from rcir.data.catalogue import find_dataset
from rcir.encoders import build_encoder
from tests.data.small_sets import write_lines, write_pictures
from training import TrainingConfig

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "configs"
RECIPES = ("recipe", "paper-text", "paper-code")
SETS = ("cub200", "car196", "pittsburgh", "chestxdet")
METHODS = ("deterministic", "mc-dropout", "deep-ensemble", "btl")
# Pittsburgh's settings differ from those of the other sets.
TRAININGS = [*product(SETS[:2], METHODS[:1]), *product(SETS[2:3], METHODS), (SETS[3], METHODS[3])]
TRIPLETS = METHODS[:3]  # trained by the triplet loss
# Cai et al. (AAAI 2025): the names of their data sets here.
NAMES = dict(zip(SETS, ("cub200", "cars196", "pitts30k", "chestx-det"), strict=True))
OTHERS = [(path.stem, ()) for path in sorted(FOLDER.glob("[!t]*-*.yaml"))]
OTHERS += [("warburg2021", ())]
OTHERS += [
    ("digits", ("--name", "digits", "--encoder.method", method))
    for method in (*TRIPLETS, "tripreg")
]

# What the text and the code of github.com/ramdrop/rcir agree on, or only the code says: conf/,
# run.py (recall at 1 stops early and selects the epoch), lightning_modules/lightning.py and
# networks/network.py (scale and shift of batch normalisation do not train).
PUBLISHED = {
    "epochs": 60,
    "batch": 8,
    "patience": 5,
    "min_delta": 5e-4,
    "selection": "recall",
    "precision": "float32",
    "freeze_batch_norm": "affine",
    "preprocessing": {"size": (224, 224)},
    "mining": {"cache": "full"},
    "encoder": {"dim": 2048, "pooling": "gem", "pretrained": "IMAGENET1K_V1", "freeze": False},
    "optimizer": {"kind": "adam", "lr": 1e-5, "weight_decay": 1e-3, "clip_norm": None}
    | {"schedule": "exponential", "gamma": 0.99, "warmup": 0},
}
# datasets/{cub200,car196,chestx}.py and datasets/pitts.py, which differ.
PHOTOGRAPHS = {
    "augmentation": {"flip": True, "rotation": 10, "crop": 0.4, "jitter": (0.2, 0.2, 0.2, 0.1)},
    "preprocessing": {"mean": (0.0,), "std": (1.0,)},
    "mining": {"num_negatives": 5},
}
BY_SET = dict.fromkeys(SETS, PHOTOGRAPHS) | {
    "pittsburgh": {
        "augmentation": {"flip": False, "rotation": 0, "crop": 1, "jitter": (0, 0, 0, 0)},
        "preprocessing": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
        "mining": {"num_negatives": 10},
        "data": {"options": {"radius": 10}},
    }
}
# Of networks/network.py, conf/train/mcd.yaml and rcir_beta.py; lightning_modules/lightning.py
# draws masks image by image and divides no mean by its length.
BY_METHOD = {
    "deterministic": {"unit": True},
    "mc-dropout": {"dropout": 0.1, "channels": False, "passes": 20}
    | {"masks": "independent", "unit": False},
    "deep-ensemble": {"members": 5, "combination": "reference"},
    "btl": {"variance_hidden": 500, "activation": "relu", "scaled": False, "distance": "mean"},
}
# Text; its supplement: the positive at the largest distance, and the nearest negatives.
TEXT = {
    "encoder": {"backbone": "resnet50"},
    "mining": {"positive": "farthest", "negatives": "hardest"},
}
TEXT_LOSS = {method: {"form": "squared", "margin": 0.1} for method in TRIPLETS}  # eq. 19
TEXT_LOSS |= {"btl": {"margin": 0.1, "kl_scale": 0}}  # eq. 18
# networks/network.py; datasets/*.py: the nearest positive, negatives within the margin.
CODE = {
    "encoder": {"backbone": "resnet101"},
    "mining": {"positive": "nearest", "negatives": "margin-violating"},
}
# lightning_modules/lightning.py
CODE_LOSS = {method: {"form": "unsquared", "margin": 0.1} for method in TRIPLETS}
CODE_LOSS |= {"btl": {"margin": 0, "kl_scale": 1e-6, "epsilon": 1e-8}}
# Margins of unsquared distances; datasets/pitts.py takes a root, the others do not.
CODE_MARGINS = dict.fromkeys(SETS, 0.1) | {"pittsburgh": math.sqrt(0.1)}


def files_of(recipe, data, method):
    """The files that a recipe consists of."""
    folder = FOLDER / "cai2025" / (recipe if recipe != "recipe" else "")
    return [folder / f"{layer}.yaml" for layer in ("recipe", data, method)]


def parsed(files, *options):
    """Return the configuration of some files and options, which its data set has to know."""
    words = [word for file in files for word in ("--config", str(file))]
    config = parse(TrainingConfig, [*words, *options], "test")
    find_dataset(config.data.name).require("data.options", config.data.options)
    return config


def recipe_of(recipe, data, method):
    return parsed(files_of(recipe, data, method), "--name", f"{data}-{method}")


@pytest.mark.parametrize(("data", "method"), TRAININGS)
@pytest.mark.parametrize(
    ("recipe", "published", "losses"),
    [("paper-text", TEXT, TEXT_LOSS), ("paper-code", CODE, CODE_LOSS)],
)
def test_a_recipe_of_the_paper_is_the_published_one(recipe, published, losses, data, method):
    config = recipe_of(recipe, data, method)
    encoder = {"encoder": {"method": method, "options": BY_METHOD[method]}}
    expected = {"data.name": NAMES[data]} | flatten(encoder | {"loss": losses[method]})
    expected |= flatten(PUBLISHED) | flatten(BY_SET[data]) | flatten(published)
    if recipe == "paper-code":
        expected["mining.margin"] = CODE_MARGINS[data]
    options = flatten(asdict(config))
    assert {name: options[name] for name in expected} == expected


@pytest.mark.parametrize(("data", "method"), TRAININGS)
def test_our_recipe_mines_by_the_margin_of_the_loss_and_clips_gradients(data, method):
    config = recipe_of("recipe", data, method)
    assert (config.data.name, config.encoder.method) == (NAMES[data], method)
    assert config.optimizer.clip_norm is not None
    if method in TRIPLETS:  # the mining compares unsquared distances
        assert config.loss["form"] == "unsquared"
        assert config.mining.negatives == "margin-violating"
        assert config.loss["margin"] == config.mining.margin


def test_recipes_build_networks_with_the_published_number_of_parameters():
    """ResNets without their classifier, GeM, and a linear layer; for BTL also a variance head."""
    networks = {"recipe": 25_557_032, "paper-code": 44_549_160}
    for recipe, method in [*(("recipe", method) for method in METHODS), ("paper-code", "btl")]:
        encoder = replace(recipe_of(recipe, "cub200", method).encoder, pretrained=False)
        with torch.device("meta"):  # shapes without numbers
            built = build_encoder(encoder, 3, (64, 64))
        expected = networks[recipe] - (2048 * 1000 + 1000) + 1 + (2048 * 2048 + 2048)
        if method == "btl":
            expected += 1 + (2048 * 500 + 500) + (500 + 1)
        if method == "deep-ensemble":
            expected *= 5
        assert sum(weights.numel() for weights in built.parameters()) == expected, method


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    """A folder like that of CUB-200-2011, of 14 classes with 12 images each."""
    root = tmp_path_factory.mktemp("birds")
    folder = root / "CUB_200_2011"
    classes = {number: f"{number:03d}.Bird" for number in range(1, 15)}
    images = [(label, f"{kind}/{n}.jpg") for label, kind in classes.items() for n in range(12)]
    write_pictures(folder / "images", [name for _, name in images])
    write_lines(folder / "classes.txt", [f"{label} {kind}" for label, kind in classes.items()])
    write_lines(folder / "images.txt", [f"{n} {name}" for n, (_, name) in enumerate(images)])
    labels = [f"{n} {label}" for n, (label, _) in enumerate(images)]
    write_lines(folder / "image_class_labels.txt", labels)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_command_trains_a_recipe(birds, tmp_path, recipe):
    """An epoch on images of 64 x 64 pixels, from random weights."""
    command = [sys.executable, "-m", "training"]
    for file in files_of(recipe, "cub200", "btl"):
        command += ["--config", str(file)]
    command += ["--name", "birds", "--epochs", "1", "--encoder.pretrained", "false"]
    command += ["--storage", str(tmp_path), "--preprocessing.size", "[64, 64]"]
    command += ["--data.root", str(birds), "--data.options", "{validation: 0.4}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    weights = load_file(tmp_path / "birds" / "encoder.safetensors")
    mean = ".running_mean"  # of each batch normalisation
    norms = [name.removesuffix(mean) for name in weights if name.endswith(mean)]
    assert len(norms) == {"recipe": 53, "paper-text": 53, "paper-code": 104}[recipe]
    # Running statistics start at mean 0, scale and shift at 1 and 0.
    assert all(weights[f"{name}{mean}"].any() for name in norms)
    trained = any((weights[f"{name}.weight"] != 1).any() for name in norms)
    assert trained == (recipe == "recipe")


def test_the_recipe_of_taha_et_al_is_the_published_one():
    """Section 4.1, and the schedule of Hermans et al. (2017), which they use."""
    config = parsed([FOLDER / "taha2019.yaml"])
    assert (config.encoder.method, config.encoder.dim) == ("tripreg", 128)
    assert not config.encoder.options["unit"]
    assert (config.preprocessing.size, config.optimizer.weight_decay) == ((256, 128), 1e-3)
    mining = config.mining
    assert (config.batch // mining.samples_per_class, mining.samples_per_class) == (18, 4)
    assert (mining.scope, mining.positive, mining.negatives) == ("batch", "farthest", "hardest")
    assert mining.num_negatives == 1
    per_epoch = 12_936 / 72  # Market-1501's training images
    for step in (0, 7_000, 14_000, 16_000, 20_000, 24_900):
        expected = 3e-4 * (1e-7 / 3e-4) ** (max(0, step - 15_000) / 10_000)
        epoch = round(step / per_epoch) + 1
        assert config.optimizer.rate(epoch, config.epochs) == pytest.approx(expected, rel=0.12)


def test_the_recipe_of_warburg_et_al_is_the_published_one():
    """ICCV 2021, sections 3 and 4; hidden layer and margins are those of Cai et al.'s code."""
    config = parsed([FOLDER / "warburg2021.yaml"])
    # An anchor, a positive and five negatives, from 5,000 images that change after 1,000 steps.
    mining = {"cache": "sampled", "sample": 5000, "refresh": 1000, "num_negatives": 5}
    mining |= {"negatives": "margin-violating", "scope": "epoch"}
    options = {"scaled": True, "activation": "relu"}
    # 2,048 numbers for each image: the mean and one variance.
    expected = {"batch": 25, "encoder": {"method": "btl", "dim": 2048 - 1, "options": options}}
    expected |= {"loss": {"kl_scale": 1e-6, "epsilon": 1e-8}, "mining": mining}
    expected |= {"optimizer": PUBLISHED["optimizer"], "augmentation": PHOTOGRAPHS["augmentation"]}
    found = flatten(asdict(config))
    assert {name: found[name] for name in flatten(expected)} == flatten(expected)


@pytest.mark.parametrize(("name", "options"), OTHERS)
def test_other_configurations_are_valid_and_build_encoders(name, options):
    config = parsed([FOLDER / f"{name}.yaml"], *options)
    assert config.name == name
    channels, size = config.preprocessing.channels, config.preprocessing.size
    if config.encoder.pretrained:  # large networks accept any size
        size = (64, 64)
    encoder = build_encoder(replace(config.encoder, pretrained=False), channels, size)
    embedding = encoder.embed(torch.zeros(2, channels, *size))
    members = config.encoder.options.get("members", 1)
    assert embedding.vectors.shape == (2, config.encoder.dim * members)
