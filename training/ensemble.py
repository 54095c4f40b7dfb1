"""The members of a deep ensemble: trained as runs of their own, then rotated onto each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rcir.data import ImageSet, data_root
from rcir.encoders import Encoder, build_encoder
from rcir.encoders.deep_ensemble import DeepEnsemble
from rcir.encoders.embedder import Embedder
from training.config import TrainingConfig
from training.randomness import numpy_generator

ALIGNED = 20_000  # images are many times what a rotation takes


def member_configs(config: TrainingConfig, folder: Path) -> list[TrainingConfig]:
    """The trainings of the members, whose runs lie in `members` of a run's folder."""
    return [
        replace(
            config,
            name=f"member-{number}",
            storage=str(folder / "members"),
            seed=_seed(config.seed, number),
            encoder=replace(config.encoder, method="deterministic"),
            data=replace(config.data, root=str(data_root(config.data))),  # trained elsewhere
        )
        for number in range(config.encoder.members)
    ]


def combined(
    config: TrainingConfig, members: Sequence[Encoder], images: ImageSet, embedder: Embedder
) -> Encoder:
    """The ensemble of trained members, rotated onto the first as they embed some of the images."""
    encoder = replace(config.encoder, pretrained=False)
    channels, size = config.preprocessing.channels, config.preprocessing.size
    with torch.random.fork_rng():
        # Its embedding in this mode is the members' vectors, side by side.
        joint = build_encoder(replace(encoder, ensemble="distance"), channels, size)
        ensemble = build_encoder(encoder, channels, size)
    assert isinstance(joint, DeepEnsemble)
    assert isinstance(ensemble, DeepEnsemble)
    for slot, member in zip(joint.members, members, strict=True):
        slot.load_state_dict(member.state_dict())
    rng = numpy_generator(config.seed)
    rows = np.sort(rng.permutation(len(images))[:ALIGNED])
    vectors = embedder(joint.eval(), config.preprocessing, images.pick(rows)).mean
    split = vectors.view(len(rows), len(members), -1).transpose(0, 1)
    ensemble.load_state_dict(joint.state_dict())
    ensemble.align(split * len(members) ** 0.5)
    ensemble.config = config.encoder
    return ensemble.eval()


def _seed(seed: int, number: int) -> int:
    """Seeds of members, apart also between ensembles of neighbouring seeds."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
