"""The random generators of a training, seeded by (seed of the run, epoch, purpose, ...).

Any number of workers draws the same, and a checkpoint needs no random states.
"""

from __future__ import annotations

import numpy as np
import torch

# Purposes.
ORDER, SAMPLE, MINING, AUGMENTATION, DROPOUT, LOSS = range(6)


def seed(*numbers: int) -> int:
    """Return a seed that depends on all of the numbers."""
    sequence = np.random.SeedSequence(numbers)
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)


def torch_generator(*numbers: int) -> torch.Generator:
    """Return a generator of torch, on the CPU."""
    return torch.Generator().manual_seed(seed(*numbers))


def numpy_generator(*numbers: int) -> np.random.Generator:
    """Return a generator of NumPy."""
    return np.random.default_rng(numbers)
