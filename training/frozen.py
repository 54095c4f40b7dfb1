"""Training on features: what a frozen backbone makes of each image is computed once, and kept."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from rcir.data import ImageSet, Preprocessing, Splits
from rcir.encoders import Encoder
from rcir.encoders.embedder import Embedder
from rcir.encoders.features import BackboneFeatures, frozen_backbone
from training.config import TrainingConfig
from training.progress import console

FOLDER = ".features"  # beside the runs, which share it; it may be removed when none trains


@dataclass(frozen=True)
class FeaturePreprocessing(Preprocessing):
    """Takes features (n, C) in the place of images, and leaves them as they are."""

    def resized(self, images: Any) -> Tensor:
        """Features as an encoder with a frozen backbone takes them, (n, C, 1, 1)."""
        return torch.from_numpy(np.asarray(images))[:, :, None, None]

    def normalise(self, images: Tensor) -> Tensor:
        """The same."""
        return images


def on_features(
    config: TrainingConfig, splits: Splits, encoder: Encoder, runs: Path, num_workers: int = 0
) -> tuple[TrainingConfig, Splits]:
    """A training with the features of a frozen backbone in the place of images.

    Args:
        config: of the run.
        splits: of its data set; training and validation images are replaced.
        encoder: to be trained, or trained; one whose backbone is not frozen changes nothing.
        runs: the folder of the run's folder, where features are kept: what was embedded before is
            not embedded again.
        num_workers: replicas that embed, see `Embedder`.
    """
    frozen = frozen_backbone(encoder)
    if frozen is None:
        return config, splits
    backbone = BackboneFeatures(frozen, config.encoder)
    embedder = Embedder(num_workers, config.use_gpu, runs / FOLDER)
    train, validation = (
        replace(images, images=_features(images, embedder, backbone, config.preprocessing))
        for images in (splits.train, splits.validation)
    )
    passed = FeaturePreprocessing(**vars(config.preprocessing))
    return (
        replace(config, preprocessing=passed),
        replace(splits, train=train, validation=validation),
    )


def _features(
    images: ImageSet, embedder: Embedder, backbone: Encoder, preprocessing: Preprocessing
) -> Any:
    """Features (n, C) of images; what takes long is shown."""
    bar = Progress(
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task, made, started = bar.add_task("frozen backbone", total=len(images)), 0, time.monotonic()

    def advance(count: int, found: bool) -> None:
        nonlocal made
        made += count * (not found)
        bar.advance(task, count)

    with bar:
        found = replace(embedder, progress=advance)(backbone, preprocessing, images.images)
    if made:
        seconds = time.monotonic() - started
        console.print(f"frozen backbone: {made:,} images embedded  {seconds:.1f} s", soft_wrap=True)
    return found.vectors.numpy()
