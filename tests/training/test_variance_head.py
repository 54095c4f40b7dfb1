"""The head behind a variance stays alive: its hidden units and its variance differ by image."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rcir.config import parse
from rcir.data import Preprocessing, load_splits
from rcir.encoders.batches import embed
from tests.training.helpers import ALONE, epochs, untrained
from training import TrainingConfig
from training.trainer import Trainer
from training.validation import CONSTANT_UNITS, constant_share, hidden_ranges

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs"
SEEDS = 4
IMAGES = 1500  # that an epoch trains on, in which a head with a ReLU loses most of its units


def shortened(name, method, seed):
    """The training of a configuration file, with images of 14 pixels where they are larger."""
    file = ["--config", str(CONFIGS / f"{name}-btl.yaml")]
    config = parse(TrainingConfig, file, name)
    if name != "digits":
        config = replace(config, preprocessing=Preprocessing((14, 14), 1))
    loss = config.loss if method == "btl" else {}
    encoder = replace(config.encoder, method=method, options={})
    return replace(config, encoder=encoder, loss=loss, seed=seed)


def after_an_epoch(config, splits):
    """The share of constant hidden units, and the standard deviation of the log variance."""
    rows = np.random.default_rng(config.seed).permutation(len(splits.train))
    images = splits.train.subset(rows[:IMAGES])
    encoder = untrained(config)
    optimizer = config.optimizer.build(encoder.parameters())
    torch.manual_seed(config.seed)
    epochs(Trainer(config, encoder, encoder, optimizer, images, ALONE))
    with hidden_ranges(encoder) as ranges:
        embedding = embed(encoder.eval(), config.preprocessing, splits.validation.images[:1000])
    return constant_share(ranges)[CONSTANT_UNITS], float(embedding.uncertainty.log().std())


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", ["btl", "vmf"])
@pytest.mark.parametrize(
    "name",
    ["digits", pytest.param("omniglot", marks=pytest.mark.data)],
)
def test_hidden_units_and_variance_differ_by_image_after_an_epoch(name, method, request):
    if name != "digits":
        request.getfixturevalue("data_root")
    splits = load_splits(shortened(name, method, 0).data)
    for seed in range(SEEDS):
        constant, deviation = after_an_epoch(shortened(name, method, seed), splits)
        assert constant == 0, seed
        assert deviation > 0, seed
