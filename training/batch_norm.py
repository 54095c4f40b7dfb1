"""Batch normalisation in training: running statistics over micro-batches and workers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rcir.encoders.features import FrozenBackbone
from training.workers import Workers


class GhostBatchStatistics:
    """Moves running statistics once a step, towards the mean over its micro-batches.

    Torch would move them with every micro-batch that a worker computes, without the other workers.
    Here each micro-batch writes its statistics to tensors of its own; `finish` averages them over
    all workers. With one micro-batch, the result is torch's.

    A frozen backbone keeps its statistics. With `keep`, all layers do, as is best with pretrained
    weights: a few hundred steps of small batches would replace those of the millions of images that
    the weights belong to (Roth et al., ICML 2020, train so).
    """

    def __init__(self, encoder: nn.Module, workers: Workers, keep: bool = False) -> None:
        self._encoder = encoder
        self._workers = workers
        frozen = {
            layer
            for module in encoder.modules()
            if isinstance(module, FrozenBackbone)
            for layer in module.modules()
        }
        layers = [
            layer
            for layer in encoder.modules()
            if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer not in frozen
        ]
        self._kept, self._layers = (layers, []) if keep else ([], layers)
        self._momentum = [float(layer.momentum or 0) for layer in self._layers]
        self._running = self._current()
        self._parts: list[list[Tensor]] = []

    def train(self) -> None:
        """Set the encoder to training mode, except layers that keep their statistics."""
        self._encoder.train()
        for layer in self._kept:
            layer.eval()

    def start_part(self) -> None:
        """Call this before the forward pass of a micro-batch."""
        for layer in self._layers:
            layer.momentum = 1.0  # the statistics of this part alone
            layer.running_mean = torch.zeros_like(layer.running_mean)  # type: ignore[arg-type]
            layer.running_var = torch.zeros_like(layer.running_var)  # type: ignore[arg-type]
        self._parts.append(self._current())

    @torch.no_grad()
    def finish(self) -> None:
        """Call this after the forward passes of all micro-batches, on every worker."""
        if self._layers:
            sums = torch.stack([torch.cat(part) for part in self._parts]).sum(0)
            total = self._workers.all_reduce(
                torch.cat([sums, sums.new_full((1,), len(self._parts))])
            )
            mean = (total[:-1] / total[-1]).split([len(values) for values in self._running])
            for i, (layer, momentum) in enumerate(zip(self._layers, self._momentum, strict=True)):
                layer.running_mean, layer.running_var = self._running[2 * i : 2 * i + 2]
                layer.running_mean.lerp_(mean[2 * i], momentum)
                layer.running_var.lerp_(mean[2 * i + 1], momentum)
                layer.momentum = momentum
                if layer.num_batches_tracked is not None:
                    layer.num_batches_tracked -= len(self._parts) - 1
        self._parts = []

    def _current(self) -> list[Tensor]:
        """Return means and variances, two for each layer."""
        statistics = [(layer.running_mean, layer.running_var) for layer in self._layers]
        return [values for pair in statistics for values in pair if values is not None]


def freeze_affine(encoder: nn.Module) -> None:
    """Exclude scale and shift of all layers of batch normalisation from training."""
    for layer in encoder.modules():
        if isinstance(layer, _BatchNorm):
            for weights in layer.parameters(recurse=False):
                weights.requires_grad_(False)
