"""Monte Carlo dropout: the spread of randomly thinned networks (Gal and Ghahramani, ICML 2016).

The recipe of Cai et al. (AAAI 2025): dropout on the output of every convolution, in training and
at test time, with every other layer in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.base import Encoder, EncoderConfig
from rcir.encoders.deterministic import Deterministic
from rcir.errors import InvalidConfig


class DropoutConv(nn.Module):
    """A convolution whose output is thinned: at random in training, by a fixed mask in a pass."""

    def __init__(self, conv: nn.Conv2d, probability: float) -> None:
        super().__init__()
        self.conv = conv
        self.probability = probability
        self.generator: torch.Generator | None = None

    def forward(self, images: Tensor) -> Tensor:
        output = self.conv(images)
        if self.training:
            return F.dropout(output, self.probability)
        if self.generator is None:
            return output
        keep = 1 - self.probability
        mask = torch.rand(output.shape[1:], generator=self.generator) < keep
        return output * mask.to(output.device) / keep


class MCDropout(Encoder):
    """The mean direction and the spread of `passes` thinned networks.

    Each pass draws one mask per convolution and applies it to every image, so that a pass is one
    network: the embedding of an image depends neither on its batch nor on when it is computed, and
    two images are compared under the same networks. With ``z_t`` the unit vectors of the passes,
    `mean` is their mean at unit length, `variance` (n, d) their unbiased variance, and
    `uncertainty` (n,) the mean of that over the dimensions.
    """

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        self.network = Deterministic(config, channels, size)
        self.passes = config.passes
        self.convolutions = list(_wrap(self.network, config.dropout))
        if not self.convolutions:
            raise InvalidConfig(f"{config.backbone} has no convolution to put dropout on")

    def forward(self, images: Tensor) -> Embedding:
        embedding: Embedding = self.network(images)
        return embedding

    def _samples(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return self._passes(images)

    def _passes(self, images: Tensor) -> Tensor:
        """The unit vectors of the passes, (passes, n, dim)."""
        passes = []
        for seed in range(self.passes):
            with self._masks(seed):
                passes.append(self.network(images).mean)
        return torch.stack(passes)

    def _embed(self, images: Tensor) -> Embedding:
        stacked = self._passes(images)
        variance = stacked.var(dim=0)
        return Embedding(F.normalize(stacked.mean(dim=0)), variance, variance.mean(dim=1))

    @contextmanager
    def _masks(self, seed: int) -> Iterator[None]:
        generator = torch.Generator().manual_seed(seed)
        for convolution in self.convolutions:
            convolution.generator = generator
        try:
            yield
        finally:
            for convolution in self.convolutions:
                convolution.generator = None


def _wrap(module: nn.Module, probability: float) -> Iterator[DropoutConv]:
    """Put dropout behind every convolution below `module`."""
    for name, child in module.named_children():
        if isinstance(child, nn.Conv2d):
            wrapped = DropoutConv(child, probability)
            setattr(module, name, wrapped)
            yield wrapped
        else:
            yield from _wrap(child, probability)
