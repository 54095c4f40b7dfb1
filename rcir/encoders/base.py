"""The encoder every method extends, and the configuration that names one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rcir.embedding import Embedding
from rcir.errors import InvalidConfig

Method = Literal["deterministic", "mc-dropout", "deep-ensemble", "btl"]
Pooling = Literal["gem", "flatten"]
Combination = Literal["distance", "aligned", "reference"]


@dataclass(frozen=True)
class EncoderConfig:
    """Which encoder, and its shape.

    Args:
        method: how the encoder knows its uncertainty.
        backbone: "mnist-cnn", "cifar-cnn", "resnet50" or "densenet161".
        pooling: "gem", or "flatten" where the place of a feature matters.
        dim: length of the embedding.
        pretrained: start from ImageNet weights (resnet50 and densenet161 only).
        dropout: mc-dropout: probability of a feature to be dropped after every convolution.
        passes: mc-dropout: number of sampled networks; btl: of samples, where they are asked for.
        members: deep-ensemble: number of networks.
        ensemble: deep-ensemble: how members are combined.
        variance_hidden: btl: width of the variance head's hidden layer.
    """

    method: Method = "btl"
    backbone: str = "mnist-cnn"
    pooling: Pooling = "flatten"
    dim: int = 16
    pretrained: bool = False
    dropout: float = 0.1
    passes: int = 20
    members: int = 5
    ensemble: Combination = "distance"
    variance_hidden: int = 128

    def __post_init__(self) -> None:
        for name, choices in (
            ("method", Method),
            ("pooling", Pooling),
            ("ensemble", Combination),
        ):
            if getattr(self, name) not in get_args(choices):
                raise InvalidConfig(
                    f"encoder.{name} {getattr(self, name)!r} is unknown; choose one of "
                    f"{', '.join(get_args(choices))}"
                )
        for name, least in (("dim", 2), ("passes", 2), ("members", 2), ("variance_hidden", 1)):
            if getattr(self, name) < least:
                raise InvalidConfig(f"encoder.{name} is {getattr(self, name)}; at least {least}")
        if not 0 < self.dropout < 1:
            raise InvalidConfig(f"encoder.dropout is {self.dropout}; it must lie in (0, 1)")


class Encoder(nn.Module):
    """Images to `Embedding`.

    ``encoder(images)`` is one differentiable pass for training; ``encoder.embed(images)`` is what
    a gallery and its queries are embedded with. The same image gives the same embedding in every
    batch, up to the rounding of the arithmetic below.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config

    def embed(self, images: Tensor) -> Embedding:
        """Embed images (n, C, H, W) in evaluation mode without gradients."""
        with self._evaluating():
            return self._embed(images)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.training
        if training:
            self.eval()
        try:
            with torch.inference_mode(), _full_precision():
                yield
        finally:
            if training:
                self.train()

    def _embed(self, images: Tensor) -> Embedding:
        embedding: Embedding = self(images)
        return embedding

    def samples(self, images: Tensor, generator: torch.Generator) -> Tensor | None:
        """Draws of the embedding, (t, n, d), in evaluation mode without gradients.

        MC dropout: its passes; a deep ensemble: its members; BTL: `passes` draws from its
        Gaussians. None for an encoder that is certain.

        Args:
            images: (n, C, H, W).
            generator: on the CPU, of the noise where there is any; hand on the same one from batch
                to batch.
        """
        with self._evaluating():
            return self._samples(images, generator)

    def _samples(self, images: Tensor, generator: torch.Generator) -> Tensor | None:
        return None

    def parts(self) -> tuple[list[Tensor], list[Callable[..., Any]]]:
        """Weights and buffers, and forward hooks: all that decides what is computed."""
        tensors: list[Tensor] = []
        hooks: list[Callable[..., Any]] = []
        for module in self.modules():  # one walk, for it is made for every query
            for held in (module._parameters, module._buffers):
                tensors += [values for values in held.values() if values is not None]
            hooks += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        return tensors, hooks

    def fingerprint(self) -> str:
        """A digest of the configuration, of every module, hook and weight."""
        description = json.dumps(asdict(self.config), sort_keys=True) + repr(self)
        for hook in self.parts()[1]:
            description += getattr(hook, "__qualname__", type(hook).__qualname__)
        digest = hashlib.sha256(description.encode())
        for name, values in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(values.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


@contextmanager
def _full_precision() -> Iterator[None]:
    """Plain float32, whatever the caller's autocast, TF32 or bfloat16 settings.

    A query has to be embedded as the calibration queries were, up to the tolerance of
    `rcir.risk.score_functions`, on whatever device it is asked.
    """
    # Of each operation by itself: the getters of all at once raise where a caller set some.
    backends: Any = torch.backends
    operations = (
        *(backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn),
        *(backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
    )
    before = [operation.fp32_precision for operation in operations]
    for operation in operations:
        operation.fp32_precision = "ieee"
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        for operation, precision in zip(operations, before, strict=True):
            operation.fp32_precision = precision
