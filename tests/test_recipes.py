"""The configuration files: they are valid, and recipes of papers have the published values."""

import math
import os
import subprocess
import sys
import tarfile
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rcir.config import flatten, parse
from rcir.data.registry import find_dataset
from rcir.encoders import build_encoder
from training import TrainingConfig

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "configs"
RECIPES = ("recipe", "paper-text", "paper-code")
SETS = ("cub200", "car196", "pittsburgh", "chestxdet")
METHODS = ("deterministic", "mc-dropout", "deep-ensemble", "btl")
TRAININGS = list(product(SETS, METHODS))
TRIPLETS = METHODS[:3]  # trained by the triplet loss
# Cai et al. (AAAI 2025): the names of their data sets here.
NAMES = {"cub200": "cub200", "car196": "cars196", "pittsburgh": "pitts30k"}
NAMES |= {"chestxdet": "chestx-det"}
# Methods for which `digits.yaml` is used with the method's name.
DIGITS = ("deterministic", "mc-dropout", "deep-ensemble", "tripreg")
SINGLE = {path.stem for path in FOLDER.glob("*.yaml") if not path.stem.startswith("tune-")}
OTHERS = sorted((SINGLE | {f"digits-{method}" for method in DIGITS}) - {"digits"})

# What the text and the code of github.com/ramdrop/rcir agree on, or only the code says.
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
AUGMENTED = {"flip": True, "rotation": 10, "crop": 0.4, "jitter": (0.2, 0.2, 0.2, 0.1)}
PLAIN = {"flip": False, "rotation": 0, "crop": 1, "jitter": (0, 0, 0, 0)}
PUBLISHED = {
    # conf/train/*.yaml, conf/dataset/*.yaml
    **{"epochs": 60, "batch": 8, "optimizer.kind": "adam", "optimizer.lr": 1e-5},
    **{"optimizer.weight_decay": 1e-3, "optimizer.gamma": 0.99, "encoder.dim": 2048},
    **{"preprocessing.size": (224, 224), "mining.cache": "full"},
    # run.py: recall at 1 stops early and selects the epoch; fp32, no clipping.
    **{"patience": 5, "min_delta": 5e-4, "selection": "recall"},
    **{"precision": "float32", "optimizer.clip_norm": None},
    # lightning_modules/lightning.py: ExponentialLR after each epoch.
    **{"optimizer.schedule": "exponential", "optimizer.warmup": 0},
    # networks/network.py: GeM; weights of torchvision 0.10; scale and shift of batch
    # normalisation do not train.
    **{"encoder.pooling": "gem", "encoder.pretrained": "IMAGENET1K_V1"},
    **{"freeze_batch_norm": "affine", "encoder.freeze": False},
}
# datasets/{cub200,car196,chestx}.py and datasets/pitts.py, which differ.
BY_SET = {
    "pittsburgh": {
        **{f"preprocessing.{name}": values for name, values in IMAGENET.items()},
        **{f"augmentation.{name}": value for name, value in PLAIN.items()},
        **{"mining.num_negatives": 10, "data.options.radius": 10},
    }
}
for name in ("cub200", "car196", "chestxdet"):
    BY_SET[name] = {
        **{f"augmentation.{name}": value for name, value in AUGMENTED.items()},
        **{"preprocessing.mean": (0.0,), "preprocessing.std": (1.0,), "mining.num_negatives": 5},
    }
# Of networks/network.py, conf/train/mcd.yaml and rcir_beta.py; lightning_modules/lightning.py
# draws masks image by image and divides no mean by its length.
BY_METHOD = {
    "deterministic": {"unit": True},
    "mc-dropout": {
        **{"dropout": 0.1, "channels": False, "passes": 20},
        **{"masks": "independent", "unit": False},
    },
    "deep-ensemble": {"members": 5, "combination": "reference"},
    "btl": {"variance_hidden": 500, "scaled": False, "distance": "mean"},
}
TEXT = {
    "encoder.backbone": "resnet50",  # text
    # Supplement: the positive at the largest distance, and the J nearest negatives.
    **{"mining.positive": "farthest", "mining.negatives": "hardest"},
}
TEXT_LOSS = {
    **{method: {"form": "squared", "margin": 0.1} for method in TRIPLETS},  # eq. 19
    "btl": {"margin": 0.1, "kl_scale": 0},  # eq. 18
}
CODE = {
    "encoder.backbone": "resnet101",  # networks/network.py
    # datasets/*.py: the nearest positive, and the nearest negatives within the margin.
    **{"mining.positive": "nearest", "mining.negatives": "margin-violating"},
}
CODE_LOSS = {  # lightning_modules/lightning.py
    **{method: {"form": "unsquared", "margin": 0.1} for method in TRIPLETS},
    "btl": {"margin": 0, "kl_scale": 1e-6, "epsilon": 1e-8},
}
# Margins of unsquared distances; datasets/pitts.py takes a root, the others do not.
CODE_MARGINS = {**dict.fromkeys(SETS, 0.1), "pittsburgh": math.sqrt(0.1)}


def files_of(recipe, data, method):
    """The files that a recipe consists of."""
    folder = FOLDER / "cai2025" / (recipe if recipe != "recipe" else "")
    return [folder / f"{layer}.yaml" for layer in ("recipe", data, method)]


def parsed(files, *options):
    """Return the configuration of some files and options."""
    words = [word for file in files for word in ("--config", str(file))]
    return parse(TrainingConfig, [*words, *options], "test", "")


def read(name):
    """Return the configuration of one file."""
    data, _, method = name.partition("-")
    if data == "digits" and method in DIGITS:
        options = ["--name", name, "--encoder.method", method]
        return parsed([FOLDER / "digits.yaml"], *options)
    return parsed([FOLDER / f"{name}.yaml"])


def recipe_of(recipe, data, method):
    return parsed(files_of(recipe, data, method), "--name", f"{data}-{method}")


@pytest.mark.parametrize(("data", "method"), TRAININGS)
@pytest.mark.parametrize(
    ("recipe", "published", "losses"),
    [("paper-text", TEXT, TEXT_LOSS), ("paper-code", CODE, CODE_LOSS)],
)
def test_a_recipe_of_the_paper_is_the_published_one(recipe, published, losses, data, method):
    config = recipe_of(recipe, data, method)
    find_dataset(config.data.name).require("data.options", config.data.options)
    expected = PUBLISHED | BY_SET[data] | published
    expected |= {"data.name": NAMES[data], "encoder.method": method}
    expected |= {f"encoder.options.{name}": value for name, value in BY_METHOD[method].items()}
    expected |= {f"loss.{name}": value for name, value in losses[method].items()}
    if recipe == "paper-code":
        expected["mining.margin"] = CODE_MARGINS[data]
    options = flatten(asdict(config))
    assert {name: options[name] for name in expected} == expected


@pytest.mark.parametrize(("data", "method"), TRAININGS)
def test_our_recipe_mines_by_the_margin_of_the_loss_and_clips_gradients(data, method):
    config = recipe_of("recipe", data, method)
    find_dataset(config.data.name).require("data.options", config.data.options)
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
def birds(data_root, tmp_path_factory):
    """A folder of CUB-200-2011 with 14 kinds: 64 images train, 48 validate, 84 evaluate."""
    root = tmp_path_factory.mktemp("birds")
    counts = {kind: 16 if kind <= 7 else 12 for kind in range(1, 15)}
    with tarfile.open(data_root / "cub200-50" / "CUB_200_2011.tar") as archive:
        members = {member.name: member for member in archive}
        tables = {
            name: archive.extractfile(members[f"CUB_200_2011/{name}.txt"]).read().decode()
            for name in ("images", "image_class_labels", "classes")
        }
        chosen, rows = set(), []
        for line in tables["images"].splitlines():
            number, name = line.split()
            kind = int(name[:3])
            if counts.get(kind, 0):
                counts[kind] -= 1
                chosen.add(number)
                rows.append(members[f"CUB_200_2011/images/{name}"])
        archive.extractall(root, rows, filter="data")
    for name in ("images", "image_class_labels"):
        lines = [line for line in tables[name].splitlines() if line.split()[0] in chosen]
        tables[name] = "\n".join(lines)
    for name, text in tables.items():
        (root / "CUB_200_2011" / f"{name}.txt").write_text(text + "\n")
    return root


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_command_trains_a_recipe(birds, tmp_path, recipe):
    """An epoch of 64 images of 64 x 64 pixels, from random weights."""
    command = [sys.executable, "-m", "training"]
    for file in files_of(recipe, "cub200", "btl"):
        command += ["--config", str(file.relative_to(ROOT))]
    command += ["--name", "birds", "--epochs", "1", "--encoder.pretrained", "false"]
    command += ["--storage", str(tmp_path), "--preprocessing.size", "[64, 64]"]
    command += ["--data.root", str(birds), "--data.options", "{validation: 0.4}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    weights = load_file(tmp_path / "birds" / "encoder.safetensors")
    config = recipe_of(recipe, "cub200", "btl")
    with torch.device("meta"):
        built = build_encoder(replace(config.encoder, pretrained=False), 3, (64, 64))
    norms = [name for name, each in built.named_modules() if isinstance(each, nn.BatchNorm2d)]
    assert len(norms) == {"recipe": 53, "paper-text": 53, "paper-code": 104}[recipe]
    # Running statistics start at mean 0, scale and shift at 1 and 0.
    moved = [weights[f"{name}.running_mean"].any().item() for name in norms]
    trained = [(weights[f"{name}.weight"] != 1).any().item() for name in norms]
    assert all(moved)
    assert any(trained) == (recipe == "recipe")


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
