"""Checks of a training before it starts, and the encoders that they and the run build."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from rcir import tracking
from rcir.cluster import in_submitted_job
from rcir.data import Augmentation, ImageSet, Splits
from rcir.data.records import can_train
from rcir.data.rejects import REJECTS_FILE, find_unreadable, tolerate
from rcir.encoders import Encoder, EncoderConfig, build_encoder, find_method
from rcir.encoders.features import frozen_backbone
from rcir.encoders.memory import GIB, TRAINING_GIB, memory_budget, saved_bytes
from rcir.errors import InvalidConfig, InvalidData, printable
from rcir.storage import is_uri
from rcir.terminal import console
from training.config import TrainingConfig
from training.images import image_batches, number_labels


def check_places(config: TrainingConfig) -> None:
    """Refuse to write into the working directory of a submitted job, which Ray removes."""
    if not in_submitted_job():
        return
    if not (is_uri(config.storage) or Path(config.storage).is_absolute()):
        raise InvalidConfig(
            f"storage is {config.storage}, which Ray removes with the job: pass an absolute folder "
            "or s3://BUCKET/RUNS"
        )
    if not tracking.is_chosen():
        raise InvalidConfig("set MLFLOW_TRACKING_URI on the nodes or in the job's environment")


def check_encoder(config: TrainingConfig) -> None:
    """Raise `InvalidConfig` if the encoder cannot be built, frozen or trained as configured."""
    method, encoder = config.encoder.method, build_on_meta(config)
    if config.encoder.freeze and frozen_backbone(encoder) is None:
        raise InvalidConfig(f"encoder.freeze is true, but {method} has no backbone to freeze")
    # A pretrained model, or a method that only fits a trained base afterwards, has no epochs.
    has_epochs = has_trainable_weights(encoder) or config.encoder.starts_pretrained
    if not has_epochs and type(encoder).fit_posthoc is Encoder.fit_posthoc:
        raise InvalidConfig(f"{method} has no weights to train: choose another encoder.method")
    has_base = config.has_members or config.encoder.options.get("base_weights")
    if not (has_trainable_weights(encoder) or has_base or config.encoder.starts_pretrained):
        raise InvalidConfig(
            f"the backbone of {method} is random: give encoder.pretrained, "
            "encoder.checkpoint_path, or a base that trains"
        )


def check_images(config: TrainingConfig, images: ImageSet) -> None:
    """Raise `InvalidData` or `InvalidConfig` if the encoder cannot be trained with the images."""
    if not can_train(images, sampled=config.mining.cache == "sampled"):
        raise InvalidData("no training image can be an anchor with a positive and a negative")
    if not images.pictures and config.augmentation != Augmentation():
        raise InvalidConfig("augmentation is for pictures, not for features: leave it out")
    if len(images) < config.n_micro_batches:
        raise InvalidData(
            f"{len(images)} training images do not fill {config.n_micro_batches} micro-batches"
        )
    if find_method(config.encoder.method).by_label:
        build_on_meta(config).check_labels(int(number_labels(images).max()) + 1)
    elif config.mining.scope == "batch":
        image_batches(config, images, epoch=1)


def find_rejects(config: TrainingConfig, splits: Splits, folder: Path) -> Mapping[str, str]:
    """Decode the training and validation images; return the ids of unreadable ones, and reasons.

    They are listed in `rejects.csv`; `InvalidImage` if they are more than `config.max_rejects`.
    """
    parts = (splits.train, splits.validation)
    rejects, total = find_unreadable(parts, config.preprocessing), sum(map(len, parts))
    if line := tolerate(rejects, total, config.max_rejects, folder / REJECTS_FILE):
        console.print(printable(line), soft_wrap=True)
    return rejects


def within_memory(config: TrainingConfig) -> TrainingConfig:
    """Choose micro-batches by their memory, unless configured, or the result depends on them."""
    if config.micro_batches is not None or config.encoder.freeze or config.has_members:
        return config
    encoder = build_without_weights(config).train()
    if not has_trainable_weights(encoder):
        return config
    normalises = [module for module in encoder.modules() if isinstance(module, _BatchNorm)]
    if config.frozen_batch_norm == "statistics":
        for module in normalises:
            module.eval()
    pixels = torch.zeros(2, config.preprocessing.channels, *config.preprocessing.size)
    with torch.random.fork_rng(devices=[]):
        per_image = saved_bytes(lambda: encoder(pixels)) / 2
    tuples = not encoder.by_label and config.mining.scope == "epoch"
    n_images = config.batch * (2 + config.mining.num_negatives if tuples else 1)
    size = n_images * per_image / GIB
    budget = memory_budget(config.memory_gib, TRAINING_GIB, config.use_gpu)
    least = max(1, config.most_workers)
    if size <= budget * least:
        return config
    demand = f"a batch of {n_images} images keeps about {size:.1f} GiB for its backward pass"
    if not encoder.by_label and config.mining.scope == "batch":
        chosen, advice = None, "choose a smaller batch if that is too much"
    elif normalises and config.frozen_batch_norm != "statistics":
        chosen, advice = None, "--micro-batches takes less, and normalises in smaller parts"
    else:
        chosen = min(config.batch, math.ceil(size / budget))
        advice = f"computed in {chosen} micro-batches (--memory-gib, --micro-batches)"
    console.print(f"{demand}: {advice}", soft_wrap=True)
    return replace(config, micro_batches=chosen)


def build(config: TrainingConfig, encoder: EncoderConfig) -> Encoder:
    """Build an encoder for the images of a training; leave the caller's random numbers alone."""
    preprocessing = config.preprocessing
    with torch.random.fork_rng(devices=[]):
        return build_encoder(encoder, preprocessing.channels, preprocessing.size).eval()


def build_without_weights(config: TrainingConfig) -> Encoder:
    """Build the encoder of a training for weights that are not those of its configuration."""
    encoder = build(config, config.encoder.without_weights())
    encoder.config = config.encoder
    return encoder


def build_on_meta(config: TrainingConfig) -> Encoder:
    """Build the encoder of a training without memory for its weights."""
    with torch.device("meta"):
        return build_without_weights(config)


def has_trainable_weights(encoder: Encoder) -> bool:
    """Return True if an encoder has weights that epochs train."""
    return any(weights.requires_grad for weights in encoder.parameters())
