"""The encoder every method extends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from rcir.embedding import Embedding
from rcir.encoders.config import EncoderConfig
from rcir.errors import InvalidConfig
from rcir.losses import PointLossOptions, point_tuple_loss
from rcir.mining import Negatives, Positive

if TYPE_CHECKING:
    from rcir.encoders.posthoc import TrainingImages


N_DRAWS = 20  # of a query, where its encoder states a variance
UNDIGESTED_DEFAULT = "undigested"  # marks options younger than calibrations of their method


@dataclass(frozen=True)
class NoOptions:
    """The options of a method without any."""


class Encoder(nn.Module):
    """Images to `Embedding`: a method is a subclass of this, in one file.

    ``encoder(images)`` is one differentiable pass for training; ``encoder.embed(images)`` is what
    a gallery and its queries are embedded with. The same image gives the same embedding in every
    batch, up to the rounding of the arithmetic below.

    A method says here all that others need to know of it:

    - `Options`, `LossOptions`: frozen dataclasses of its options (``encoder.options``) and of those
      of its loss (``loss``), which check their values themselves.
    - `mining`: the positive and negatives it is best trained with.
    - `forward`: images (n, C, H, W) to their `Embedding`, with gradients.
    - `loss`: of each tuple; or, with `by_label`, `label_loss`: of each image.
    - `after_step`, `fit_posthoc`: what it does after a step of the optimizer, after training.
    - `reranks`, `rerank`: distances of its own to the candidates that the index found.
    - `draws`, `draw_distances`: what several draws of a query find nearest.
    - `member_configs`, `take_members`: if it is made of encoders that are trained by themselves.
    - `_embed`, `_samples`: where embedding at test time is more than a forward pass.

    Rcir's own are in `rcir.encoders.METHODS`. One of yours is named by its import path, as
    ``method``, in configurations; it is trained, stored and loaded like the others wherever its
    module can be imported.

    Args:
        config: of the encoder. The ``__init__`` of a method takes (config, channels, size), the
            latter two of its images: 1 or 3, and (height, width).

    Attributes:
        config: with all options spelled out.
        options: of the method, as its `Options`.
    """

    Options: ClassVar[type] = NoOptions
    LossOptions: ClassVar[type] = PointLossOptions
    mining: ClassVar[tuple[Positive, Negatives]] = ("nearest", "top-random")
    by_label: ClassVar[bool] = False  # whether it is trained by the labels of images, not by tuples

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config.completed()
        self.options: Any = config.method_options()

    def loss(self, embedding: Embedding, valid: Tensor, options: Any) -> Tensor:
        """The loss of each tuple, (b,): `point_tuple_loss` of the vectors, unless overridden.

        Args:
            embedding: of b anchors, then their b positives, then their b * j negatives, anchor by
                anchor; see `rcir.losses.split_tuples`.
            valid: (b, j) bool; negatives that count. Each anchor has at least one.
            options: `LossOptions` in force.
        """
        return point_tuple_loss(embedding.vectors, valid, options)

    def label_loss(self, embedding: Embedding, labels: Tensor, options: Any) -> Tensor:
        """The loss of each image, (b,), by its label; asked instead of `loss` if `by_label`.

        Args:
            embedding: of b images.
            labels: (b,) int64, of n training labels numbered from 0 to n - 1.
            options: `LossOptions` in force.
        """
        raise NotImplementedError(f"{type(self).__name__} is trained by tuples, without labels")

    def after_step(self) -> None:
        """Called after every step of the optimizer, on every worker."""

    def fit_posthoc(self, training: TrainingImages) -> None:
        """Fit what is fitted on the trained encoder, with its chosen weights.

        What it fits belongs in buffers or parameters, which are stored.
        """

    @property
    def reranks(self) -> bool:
        """Whether candidates are ranked by `rerank` instead of by the distance of vectors."""
        return False

    def rerank(self, queries: Embedding, candidates: Embedding) -> Tensor:
        """Distances (n, k), at least 0, of n queries to k candidates each; asked if `reranks`.

        Args:
            queries: n of them.
            candidates: n * k gallery images, query by query.
        """
        raise NotImplementedError(f"{type(self).__name__} says that it reranks, and has no rerank")

    @property
    def draws(self) -> bool:
        """Whether several draws of a query can rank candidates, see `draw_distances`."""
        return False

    def draw_distances(self, queries: Embedding, candidates: Tensor) -> Tensor:
        """L2 distances (t, n, k) of t draws of n queries to candidates; asked if `draws`.

        Gaussian draws of the vectors by their variance, with the same noise for every query, unless
        overridden.

        Args:
            queries: n of them.
            candidates: (n, k, d) vectors of the gallery.
        """
        dim = queries.vectors.shape[1]
        if queries.variance is None or queries.variance.shape[1] not in (1, dim):
            raise InvalidConfig(
                f"{type(self).__name__} says that it draws, and states no variance of its vectors: "
                "write its draw_distances, or let draws be false"
            )
        noise = torch.randn(N_DRAWS, 1, dim, generator=torch.Generator().manual_seed(0))
        drawn = queries.vectors + queries.variance.sqrt() * noise.to(queries.vectors)
        # Of differences: rounding in products would reorder candidates that are near each other.
        exact = "donot_use_mm_for_euclid_dist"
        return torch.cdist(drawn.transpose(0, 1), candidates, compute_mode=exact).transpose(0, 1)

    @classmethod
    def member_configs(cls, config: EncoderConfig) -> list[EncoderConfig]:
        """Configurations of the encoders that are trained instead of it; none for most methods."""
        return []

    def take_members(self, members: Sequence[Encoder]) -> None:
        """Take over the weights of the trained encoders of `member_configs`."""
        raise NotImplementedError(f"{type(self).__name__} has members, and no take_members")

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

        For instance the passes of MC dropout, or draws from the Gaussians of BTL. None for an
        encoder that is certain.

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
        # Wherever the weights come from, they are digested themselves.
        stated = {
            name: value
            for name, value in asdict(self.config).items()
            if name != "checkpoint_path" and (value or name not in ("freeze", "architecture"))
        }
        later = {
            each.name: each.default
            for each in fields(self.Options)
            if UNDIGESTED_DEFAULT in each.metadata
        }
        stated["options"] = {  # older calibrations hold
            name: value
            for name, value in self.config.options.items()
            if name not in later or value != later[name]
        }
        description = json.dumps(stated, sort_keys=True) + repr(self)
        for hook in self.parts()[1]:
            description += getattr(hook, "__qualname__", type(hook).__qualname__)
        digest = hashlib.sha256(description.encode())
        self._add_weights(digest)
        return digest.hexdigest()

    def weights_digest(self) -> str:
        """A digest of the weights alone."""
        digest = hashlib.sha256()
        self._add_weights(digest)
        return digest.hexdigest()

    def _add_weights(self, digest: Any) -> None:
        for name, values in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(values.cpu().contiguous().numpy().tobytes())


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
