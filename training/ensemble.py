"""Encoders that are made of others: their members are trained as runs of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rcir.data import data_root
from rcir.encoders import Encoder, build_encoder, find_method
from training.config import TrainingConfig

MEMBERS = "members"  # folder of their runs, in that of the encoder's


def member_configs(config: TrainingConfig, folder: Path | None = None) -> list[TrainingConfig]:
    """The trainings of the members of an encoder; none where it is trained itself.

    Args:
        folder: of the run; those of its members lie in `members` in it.
    """
    return [
        replace(
            config,
            name=f"member-{number}",
            storage=config.storage if folder is None else str(folder / MEMBERS),
            seed=_seed(config.seed, number),
            encoder=member,
            data=replace(config.data, root=str(data_root(config.data))),  # trained elsewhere
        )
        for number, member in enumerate(
            find_method(config.encoder.method).member_configs(config.encoder)
        )
    ]


def combined(config: TrainingConfig, members: Sequence[Encoder]) -> Encoder:
    """The encoder of trained members."""
    with torch.random.fork_rng():  # the caller's random numbers are left alone
        encoder = build_encoder(
            config.encoder.without_weights(),
            config.preprocessing.channels,
            config.preprocessing.size,
        )
    encoder.take_members(members)
    encoder.config = config.encoder
    return encoder.eval()


def _seed(seed: int, number: int) -> int:
    """Seeds of members, apart also between ensembles of neighbouring seeds."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
