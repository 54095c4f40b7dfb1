"""The variance branch of probabilistic face embeddings (Shi and Jain, ICCV 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEAST_VARIANCE = 1e-6
LARGEST_LOG_VARIANCE = 20.0  # vectors are of unit length: more says no more, and might overflow


class VarianceBranch(nn.Module):
    """Two linear layers, each normalised over the batch: features (n, C) to variances (n, dim).

    All dimensions share the scale and the offset of their log variances, which start at 1e-4 and -7
    as in the authors' code: every image starts with a variance of about 9e-4.

    In evaluation mode it normalises by the statistics that `settle` takes.
    """

    def __init__(self, length: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(length, dim),
            nn.BatchNorm1d(dim, eps=1e-3, momentum=None),
            nn.ReLU(),
            nn.Linear(dim, dim),
            nn.BatchNorm1d(dim, eps=1e-3, momentum=None, affine=False),
        )
        self.scale = nn.Parameter(torch.tensor(1e-4))
        self.offset = nn.Parameter(torch.tensor(-7.0))

    def forward(self, features: Tensor) -> Tensor:
        log_variance = self.scale * self.layers(features) + self.offset
        variance: Tensor = log_variance.clamp(max=LARGEST_LOG_VARIANCE).exp()
        return variance + LEAST_VARIANCE

    @torch.no_grad()
    def settle(self, features: Tensor, batch: int) -> None:
        """Take the statistics of all features, in batches of at least this size if they suffice.

        Those that moved along with the training would lag behind its weights.
        """
        for layer in self.layers:
            if isinstance(layer, nn.BatchNorm1d):
                layer.reset_running_stats()  # from then on the mean over the batches
        self.train()
        for some in features.tensor_split(max(1, len(features) // batch)):
            self(some.to(self.offset.device))
        self.eval()
