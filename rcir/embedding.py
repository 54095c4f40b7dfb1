"""What every encoder returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Embedding:
    """Embeddings of a batch of images, with what the encoder knows of its own uncertainty.

    Attributes:
        mean: (n, d) float32; the vectors that are indexed and searched by squared L2 distance.
        variance: (n, 1) for an isotropic, (n, d') for a per-dimension variance, larger than or
            equal to 0; None for an encoder without one. A deep ensemble ranks by the joint vector
            of its members and states one variance per image.
        uncertainty: (n,) float32, larger is less certain; None for an encoder without one.

    Example:
        >>> import torch
        >>> embedding = Embedding(torch.zeros(3, 8), torch.ones(3, 1), torch.tensor([.1, .2, .3]))
        >>> len(embedding), embedding[1:].uncertainty.tolist()
        (3, [0.20000000298023224, 0.30000001192092896])
    """

    mean: Tensor
    variance: Tensor | None = None
    uncertainty: Tensor | None = None

    def __post_init__(self) -> None:
        n = len(self.mean)
        if self.mean.ndim != 2:
            raise ValueError(f"mean has shape {tuple(self.mean.shape)}; it must be (n, d)")
        if self.variance is not None and (self.variance.ndim != 2 or len(self.variance) != n):
            raise ValueError(
                f"variance has shape {tuple(self.variance.shape)}; it must be ({n}, 1) or ({n}, d)"
            )
        if self.uncertainty is not None and self.uncertainty.shape != (n,):
            raise ValueError(
                f"uncertainty has shape {tuple(self.uncertainty.shape)}; it must be ({n},)"
            )

    def __len__(self) -> int:
        return len(self.mean)

    def __getitem__(self, rows: slice | Tensor) -> Embedding:
        return Embedding(
            self.mean[rows],
            None if self.variance is None else self.variance[rows],
            None if self.uncertainty is None else self.uncertainty[rows],
        )

    @staticmethod
    def concatenate(parts: Sequence[Embedding]) -> Embedding:
        """The embeddings of several batches of one encoder, one after the other."""

        def join(tensors: list[Tensor | None]) -> Tensor | None:
            present = [tensor for tensor in tensors if tensor is not None]
            return torch.cat(present) if present else None

        return Embedding(
            torch.cat([part.mean for part in parts]),
            join([part.variance for part in parts]),
            join([part.uncertainty for part in parts]),
        )
