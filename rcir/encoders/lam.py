"""Laplacian metric learner: a Gaussian posterior of the last layer (Warburg et al., 2023).

"Bayesian metric learning for uncertainty quantification in image retrieval", arXiv 2302.01332. The
contrastive loss is a negative log likelihood of pairs, so its curvature at the trained weights
gives a Gaussian of weights. The spread of embeddings under draws is the uncertainty of an image.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.encoders.base import EARLIER, EmbeddedTuples, Encoder, EncoderConfig, TrainingImages
from rcir.encoders.features import BackboneFeatures, build_features, pooling
from rcir.errors import InvalidConfig, InvalidData
from rcir.losses import PointLossOptions
from rcir.losses.curvature import HessianGeometry, PairCurvature, Variant
from rcir.options import require_at_least

FIT_BATCH = 256  # images whose pairs a post-hoc fit uses
ONLINE_SCALE = 1e6
MAX_SCALE = 1e30  # of factors of a curvature, which is stored in float32


@dataclass(frozen=True)
class LaplacianMetricOptions:
    """Options of the Laplacian metric learner.

    Args:
        online: train under draws of the last layer, and track its curvature; by default, it is
            computed once, after training.
        hessian: "euclidean" or "arccos", see `rcir.losses.curvature.pair_hessian_blocks`.
        variant: "full", "fixed" or "positive", see `PairCurvature`.
        negatives_weight: at least 0, of pairs within the margin that do not match; "auto" is
            their share of all pairs that do not match (online: of the pairs of different anchors).
        scale: above 0; number of pairs that the mean curvature represents, by default the number of
            training images (post-hoc), or a million (online; the paper: that number squared).
        memory: online: in (0, 1), the share of the curvature that a step keeps.
        initial: online: above 0, the curvature before the first step.
        clamp: online: when negative curvature counts as 0: "use", in the sum over steps when the
            layer is drawn, or "step", in that of each step before it is added (the authors' code),
            which is then biased upwards.
        prior_precision: above 0; or "marginal-likelihood", the most likely one for the training
            images (online: after training, and 1 before).
        passes: number of draws of the last layer; at least 2 (the paper: 100).
    """

    online: bool = False
    hessian: HessianGeometry = "euclidean"
    variant: Variant = "fixed"
    negatives_weight: Literal["auto"] | float = "auto"
    scale: float | None = None
    memory: float = 0.999
    initial: float = 1e6
    clamp: Literal["use", "step"] = field(default="use", metadata={EARLIER: "use"})
    prior_precision: Literal["marginal-likelihood"] | float = "marginal-likelihood"
    passes: int = 20

    def __post_init__(self) -> None:
        for name in ("scale", "initial", "prior_precision", "negatives_weight"):
            value, can_be_0 = getattr(self, name), name == "negatives_weight"
            if isinstance(value, int | float) and not (
                0 < value <= MAX_SCALE or (can_be_0 and value == 0)
            ):
                least = "at least 0" if can_be_0 else "above 0"
                raise InvalidConfig(
                    f"encoder.options.{name} is {value}; it must be {least}, at most {MAX_SCALE:g}"
                )
        if not 0 < self.memory < 1:
            raise InvalidConfig(f"encoder.options.memory is {self.memory}; it must lie in (0, 1)")
        require_at_least(self, "encoder.options.", passes=2)


@dataclass(frozen=True)
class LaplacianLossOptions(PointLossOptions):
    """Options of the loss of the Laplacian metric learner.

    Args:
        form: "contrastive", whose curvature is used, or "contrastive-linear", as in the code of
            Warburg et al.
    """

    form: Literal["contrastive", "contrastive-linear"] = "contrastive"


class LaplacianMetric(Encoder):
    """Backbone, pooling, a linear layer with a Gaussian of its weights, unit length.

    With ``z_t`` the unit vectors of an image under `passes` draws of the layer, `vectors` is their
    mean direction, `variance` (n, d) their unbiased variance, and `uncertainty` (n,) one over the
    concentration of the von Mises-Fisher distribution that fits them. The draws are the same for
    every image and every batch.

    Before it is fitted, a post-hoc encoder states no uncertainty.

    Attributes:
        hessian: (dim, length + 1), curvature by the weights and, in the last column, the biases of
            the layer; negative entries count as 0.
        prior_precision: of weights and biases; 0 before the fit.
    """

    Options = LaplacianMetricOptions
    LossOptions = LaplacianLossOptions
    mining = ("random", "semi-hard")
    hessian: Tensor
    prior_precision: Tensor

    def __init__(self, config: EncoderConfig, channels: int, size: tuple[int, int]) -> None:
        super().__init__(config)
        self.backbone, shape, pool = build_features(self.config, channels, size)
        self.pooling, length = pooling(pool, shape)
        self.layer = nn.Linear(length, config.dim)
        curvature, precision = 0.0, 0.0
        if self.options.online:
            curvature, precision = self.options.initial, self.options.prior_precision
            if precision == "marginal-likelihood":  # until it is fitted
                precision = 1.0
        self.register_buffer("hessian", torch.full((config.dim, length + 1), curvature))
        self.register_buffer("prior_precision", torch.tensor(float(precision)))
        self._step: PairCurvature | None = None  # pairs since the last step of the optimizer
        self._noise: Tensor | None = None  # (passes, dim, length + 1), drawn on demand

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a replica draws the same noise on demand.
        return self.__dict__ | {"_noise": None}

    def forward(self, images: Tensor) -> Embedding:
        features: Tensor = self.pooling(self.backbone(images).float())
        with torch.autocast(images.device.type, enabled=False):
            if not (self.training and self.options.online):
                return Embedding(F.normalize(self.layer(features)))
            noise = torch.randn_like(self.hessian)
            outputs = _extended(features) @ (self._weights() + self._deviation() * noise).T
        seen = {"features": features.detach(), "outputs": outputs.detach()}
        return Embedding(F.normalize(outputs), extra=seen)

    def loss(self, tuples: EmbeddedTuples, options: Any) -> Tensor:
        """Return the contrastive loss of each tuple, (b,); online, keep pairs for `after_step`."""
        embedding, valid = tuples.images, tuples.valid
        if "features" in embedding.extra:
            b, j = valid.shape
            device = valid.device
            anchors = torch.arange(b, device=device)
            others = torch.arange(b, 2 * b + b * j, device=device)  # positives, then negatives
            pairs = torch.stack([torch.cat([anchors, anchors.repeat_interleave(j)]), others], 1)
            if self._step is None:
                self._step = self._curvature(options)
            features, outputs = embedding.extra["features"], embedding.extra["outputs"]
            match = torch.arange(len(pairs), device=device) < b
            counted = torch.cat([valid.new_ones(b), valid.flatten()])
            self._step.add(features, outputs, pairs, match, counted)
            self._step.add_unmined(outputs, torch.triu_indices(b, b, 1, device=device).T)
        return super().loss(tuples, options)

    @torch.no_grad()
    def after_step(self) -> None:
        """Online: decay the curvature, and add that of the pairs of the step."""
        if self._step is not None:
            self._step.all_reduce()
            new = self._mean(self._step) * (self.options.scale or ONLINE_SCALE)
            if self.options.clamp == "step":
                new.clamp_(min=0)
            self.hessian.mul_(self.options.memory).add_(new)
            self._step = None

    def fit_posthoc(self, training: TrainingImages) -> None:
        """Fit the curvature by pairs within batches of training images, and the prior precision."""
        options = self.options
        if not options.online:
            pooled = nn.Sequential(self.backbone, self.pooling).train(self.training)
            network = BackboneFeatures(pooled, self.config)
            curvature = self._curvature(training.loss)
            for embedding, relevance in training.batches(network, FIT_BATCH):
                with torch.no_grad():
                    device, n = self.hessian.device, len(embedding)
                    features = embedding.vectors.to(device)
                    pairs = torch.triu_indices(n, n, 1, device=device).T
                    rows = np.broadcast_to(np.arange(n), (n, n))
                    match = torch.from_numpy(relevance.matches(relevance, rows)).to(device)
                    match = match[pairs[:, 0], pairs[:, 1]]
                    outputs = self.layer(features)
                    curvature.add(features, outputs, pairs, match)
                    curvature.add_unmined(outputs, pairs[~match])
            scale = options.scale or len(training.images)
            self.hessian.copy_((self._mean(curvature) * scale).clamp(min=0))
        if not (self.hessian > 0).any():
            raise InvalidData(
                "the loss of the training images has no positive curvature: batches of "
                f"{FIT_BATCH} must contain matches; lower encoder.options.negatives_weight, or set "
                'encoder.options.variant to "positive"'
            )
        precision = options.prior_precision
        if precision == "marginal-likelihood":
            squared = self._weights().detach().double().square().sum().item()
            precision = marginal_prior_precision(self.hessian.clamp(min=0), squared)
        self.prior_precision.fill_(precision)

    @property
    def draws(self) -> bool:
        return bool(self.prior_precision > 0)

    def _embed(self, images: Tensor) -> Embedding:
        if self.prior_precision == 0:
            return super()._embed(images)
        samples = self.pass_vectors(images)
        vectors = F.normalize(samples.mean(dim=0))
        return Embedding(vectors, samples.var(dim=0), inverse_concentration(samples))

    def pass_vectors(self, images: Tensor) -> Tensor:
        """Return the unit vectors under draws of the layer, (passes, n, dim)."""
        draws = self._noise
        if draws is None or draws.device != self.hessian.device:
            generator = torch.Generator().manual_seed(0)
            shape = (self.options.passes, *self.hessian.shape)
            draws = torch.randn(shape, generator=generator, device="cpu").to(self.hessian.device)
            self._noise = draws
        features = _extended(self.pooling(self.backbone(images).float()))
        weights, deviation = self._weights(), self._deviation()
        outputs = [features @ (weights + deviation * noise).T for noise in draws]
        return F.normalize(torch.stack(outputs), dim=2)

    def _weights(self) -> Tensor:
        """Return weights and biases of the layer, in the layout of `hessian`."""
        return torch.cat([self.layer.weight, self.layer.bias[:, None]], 1)

    def _deviation(self) -> Tensor:
        """Return standard deviations of the weights and biases."""
        return (self.hessian.clamp(min=0) + self.prior_precision).rsqrt()

    def _curvature(self, loss: PointLossOptions) -> PairCurvature:
        margin = cast(float, loss.margin)
        return PairCurvature(self.options.hessian, self.options.variant, margin)

    def _mean(self, curvature: PairCurvature) -> Tensor:
        weight = self.options.negatives_weight
        return curvature.mean(None if weight == "auto" else weight).to(self.hessian)


def _extended(features: Tensor) -> Tensor:
    """Return features with a constant one, whose weight is the bias."""
    return F.pad(features, (0, 1), value=1.0)


def marginal_prior_precision(hessian: Tensor, squared_norm: float) -> float:
    """Return the precision of a Gaussian prior that makes the data most likely (MacKay, 1992).

    It is the only solution of ``delta |theta|^2 = sum h / (h + delta)``, where the diagonal h is at
    least 0, and not 0 everywhere.
    """
    values = hessian.double().flatten().cpu().numpy()

    def excess(log_precision: float) -> float:
        precision = np.exp(log_precision)
        return float(precision * squared_norm - (values / (values + precision)).sum())

    # The largest value is that of data that determine every weight.
    largest = np.log(len(values) / squared_norm)
    least = largest
    while excess(least) > 0:
        least -= 10
    return float(np.exp(brentq(excess, least, largest + 1)))


def inverse_concentration(samples: Tensor) -> Tensor:
    """Return one over the concentration (n,) of von Mises-Fishers fitted to samples (t, n, d).

    ``kappa = R (d - R^2) / (1 - R^2)`` with R the length of the mean (Banerjee et al., JMLR 2005,
    eq. 4.4); ``1 - R^2`` is computed as the mean squared distance from the mean, which is
    accurate near 0.
    """
    mean = samples.mean(0)
    spread = (samples - mean).square().sum(-1).mean(0)
    squared = mean.square().sum(-1).clamp(min=torch.finfo(mean.dtype).tiny)
    return spread / (squared.sqrt() * (samples.shape[-1] - squared))
