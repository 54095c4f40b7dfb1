"""Probabilistic face embeddings: variances for a trained encoder (Shi and Jain, ICCV 2019).

The embedding of the trained encoder is the mean of a Gaussian. A branch on the same features learns
the variance of each dimension from images that match.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from rcir.data.relevance import Relevance
from rcir.embedding import Embedding
from rcir.encoders.base import (
    Encoder,
    EncoderConfig,
    TrainingImages,
    by_query,
    find_method,
    require_variance,
)
from rcir.encoders.deterministic import Deterministic
from rcir.encoders.features import Pretrained, frozen_backbone
from rcir.errors import InvalidConfig, InvalidData
from rcir.losses import PointLossOptions
from rcir.losses.mutual_likelihood import mutual_likelihood_loss, mutual_likelihood_score
from rcir.mining import genuine_batches
from rcir.options import require_at_least

MIN_VARIANCE = 1e-6
MAX_LOG_VARIANCE = 20.0  # of unit vectors, larger ones do not differ, and might overflow


@dataclass(frozen=True)
class ProbabilisticFaceEmbeddingOptions:
    """Options of probabilistic face embeddings.

    Args:
        base: the encoder whose embedding is the mean: "deterministic", "norm-softmax",
            "pretrained", or one of your own that extends one of these and keeps its `forward`. If
            it is trained by the triplet loss and has no weights, the same run trains it, with
            `loss` and `mining`.
        base_options: options of the base.
        base_weights: encoder.safetensors in the folder of a run of the base, with the same
            backbone, pooling and dim.
        distance: "mean" ranks by the distance of means; "mls" re-ranks the candidates by the mutual
            likelihood score.
        steps: of Adam, at `lr`, and for the last third at a tenth of it; at least 1.
        batch: images in a step, a multiple of `samples_per_class`, at least twice that.
        samples_per_class: images of a label in a batch, of which all pairs train; at least 2. If
            images do not have one label each, a batch consists of matching pairs.
        lr: above 0.
    """

    base: str = "deterministic"
    base_options: dict[str, Any] = field(default_factory=dict)
    base_weights: str | None = None
    distance: Literal["mean", "mls"] = "mean"
    steps: int = 1000
    batch: int = 256
    samples_per_class: int = 4
    lr: float = 1e-2

    def __post_init__(self) -> None:
        kind = find_method(self.base)
        EncoderConfig(self.base, options=self.base_options)
        unit = self.base_options.get("unit", True)
        if kind.forward not in (Deterministic.forward, Pretrained.forward) or not unit:
            raise InvalidConfig(
                f"encoder.options.base {self.base!r} with {self.base_options} must give the unit "
                "vectors of deterministic, norm-softmax or pretrained"
            )
        if not self.ready and kind.LossOptions is not PointLossOptions:
            raise InvalidConfig(
                f"encoder.options.base {self.base} is not trained by the triplet loss: train it "
                "first, and set encoder.options.base_weights to encoder.safetensors of that run"
            )
        require_at_least(self, "encoder.options.", steps=1, samples_per_class=2)
        group = self.samples_per_class
        if self.batch % group or self.batch < 2 * group:
            raise InvalidConfig(
                f"encoder.options.batch is {self.batch}; it must be a multiple of "
                f"samples_per_class, {group}, at least twice that"
            )
        if not 0 < self.lr < math.inf:
            raise InvalidConfig(f"encoder.options.lr is {self.lr}; it must be above 0, and finite")

    @property
    def ready(self) -> bool:
        """True if the base needs no training."""
        return self.base_weights is not None or issubclass(find_method(self.base), Pretrained)


class BaseFeatures(Encoder):
    """The vectors of a base, with the pooled features (n, C) before its last layer."""

    def __init__(self, base: Deterministic | Pretrained) -> None:
        super().__init__(base.config)
        self.base = base

    def forward(self, images: Tensor) -> Embedding:
        base = self.base
        pool, last = (
            (base.pooling, nn.Identity()) if isinstance(base, Pretrained) else base.mean_head
        )
        feature_map = base.backbone(images).float()
        with torch.autocast(images.device.type, enabled=False):
            features = pool(feature_map)
            return Embedding(F.normalize(last(features)), extra={"features": features})


class ProbabilisticFaceEmbedding(Encoder):
    """A trained or pretrained base, and a variance for each dimension of its unit vectors.

    `Embedding.vectors` are those of the base, `variance` is (n, dim), at least 1e-6, `uncertainty`
    (n,) its harmonic mean over the dimensions. The branch is fitted after training. Until then all
    images have about the same variance.
    """

    Options = ProbabilisticFaceEmbeddingOptions
    draws = True

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        kind = cast("type[Deterministic | Pretrained]", find_method(self.options.base))
        base = kind(base_config(self.config), channels, size)
        self.of_base = BaseFeatures(base)
        self.config = replace(self.config, dim=base.config.dim)
        last = None if isinstance(base, Pretrained) else cast(nn.Linear, base.mean_head[1])
        length = base.config.dim if last is None else last.in_features
        self.variance_branch = VarianceBranch(length, base.config.dim)
        self.requires_grad_(False)

    @classmethod
    def member_configs(cls, config: EncoderConfig) -> list[EncoderConfig]:
        """Return the base, if it needs training."""
        return [] if config.method_options().ready else [base_config(config)]

    def take_members(self, members: Sequence[Encoder]) -> None:
        (member,) = members
        self.of_base.base.load_state_dict(member.state_dict())

    def forward(self, images: Tensor) -> Embedding:
        embedding = self.of_base(images)
        variance = self.variance_branch(embedding.extra["features"])
        return Embedding(embedding.vectors, variance, 1 / variance.reciprocal().mean(dim=1))

    def fit_posthoc(self, training: TrainingImages) -> None:
        """Load the weights of the base from their file, if any, and train the variance branch."""
        if self.options.base_weights is not None:
            self._load_base(Path(self.options.base_weights))
        embedding = training.embed(self.of_base)
        self.fit_variance(
            embedding.vectors, embedding.extra["features"], training.images.relevance, training.seed
        )

    def fit_variance(
        self, vectors: Tensor, features: Tensor, relevance: Relevance, seed: int
    ) -> None:
        """Train a new variance branch by the mutual likelihood of images that match.

        The offset starts at half the mean squared difference per dimension of matching images.
        """
        options, device = self.options, self.variance_branch.offset.device
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)  # leaves the generators of GPUs unchanged
            branch = VarianceBranch(features.shape[1], vectors.shape[1])
        self.variance_branch = branch.to(device).train()
        optimizer = torch.optim.Adam(self.variance_branch.parameters(), options.lr)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2 * options.steps // 3])
        batches = genuine_batches(
            relevance, options.batch, options.samples_per_class, np.random.default_rng([seed])
        )
        rows, pairs = first_batch = next(batches)
        first, second = vectors[torch.from_numpy(rows[pairs])]
        shared = (first - second).square().mean().clamp(min=MIN_VARIANCE) / 2
        with torch.no_grad():
            self.variance_branch.offset.copy_(shared.log())
        for rows, pairs in islice(chain([first_batch], batches), options.steps):
            variance = self.variance_branch(features[rows].to(device))
            loss = mutual_likelihood_loss(
                vectors[rows].to(device), variance, torch.from_numpy(pairs).to(device)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        self.variance_branch.requires_grad_(False).settle(features, options.batch)

    @property
    def reranks(self) -> bool:
        return bool(self.options.distance == "mls")

    def rerank(self, queries: Embedding, candidates: Embedding) -> Tensor:
        """Return distances (n, k): ``-2 / dim`` times the score, shifted to be at least 0.

        A query's variance is at least 1e-6 in every dimension, so that minus twice the score, less
        ``dim log(2 pi)``, is at least ``dim log(1e-6)``. Differences of distances are
        log-likelihood ratios per dimension.
        """
        mean, other_mean = by_query(queries.vectors, candidates.vectors)
        variance, other_variance = by_query(*map(require_variance, (queries, candidates)))
        score = mutual_likelihood_score(mean, variance, other_mean, other_variance)
        shifted = -2 / mean.shape[-1] * score - math.log(2 * math.pi) - math.log(MIN_VARIANCE)
        return shifted.clamp(min=0)  # of rounding

    def _load_base(self, path: Path) -> None:
        frozen = frozen_backbone(self)
        before = {} if frozen is None else {k: v.clone() for k, v in frozen.state_dict().items()}
        try:
            self.of_base.base.load_state_dict(load_file(path))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise InvalidData(
                f"encoder.options.base_weights is {path}; it must be encoder.safetensors of a run "
                f"of {self.options.base} with this backbone, pooling, dim and freeze ({error})"
            ) from error
        after = {} if frozen is None else frozen.state_dict()
        if any(not torch.equal(values, after[name]) for name, values in before.items()):
            raise InvalidData(
                f"encoder.options.base_weights is {path}, whose frozen backbone has other weights "
                "than encoder.pretrained or encoder.checkpoint_path: set these as in its training"
            )


def base_config(config: EncoderConfig) -> EncoderConfig:
    """Return the configuration of the base."""
    options = config.method_options()
    return replace(config, method=options.base, options=options.base_options)


class VarianceBranch(nn.Module):
    """Two linear layers, each normalised over the batch: features (n, C) to variances (n, dim).

    All dimensions share scale and offset of their log variances, which start as in the authors'
    code. `settle` computes the statistics of evaluation.
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
        variance: Tensor = log_variance.clamp(max=MAX_LOG_VARIANCE).exp()
        return variance + MIN_VARIANCE

    @torch.no_grad()
    def settle(self, features: Tensor, batch: int) -> None:
        """Compute the statistics of all features; those of the training lag behind its weights."""
        for layer in self.layers:
            if isinstance(layer, nn.BatchNorm1d):
                layer.reset_running_stats()  # then averaged over the batches
        self.train()
        for part in features.tensor_split(max(1, len(features) // batch)):
            self(part.to(self.offset.device))
        self.eval()
