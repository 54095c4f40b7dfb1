"""Losses of points: of tuples of an anchor, a positive and several negatives, and of labels.

- Heteroscedastic triplet loss, which every image may discount at a price: Taha, Chen, Misu,
  Shrivastava and Davis, "Unsupervised data uncertainty learning in visual retrieval systems", 2019,
  arXiv 1902.02586. Their regulariser is the weight decay of the optimizer.
- Normalised softmax loss: Zhai and Wu, "Classification is a strong baseline for deep metric
  learning", BMVC 2019, with the proxies of Movshovitz-Attias et al., ICCV 2017.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Self, cast

from torch import Tensor
from torch.nn import functional as F

from rcir.errors import InvalidConfig
from rcir.options import require_at_least, require_choice

ContrastiveForm = Literal["squared-gap", "linear", "hadsell", "soft"]
TripletForm = Literal["squared", "unsquared", "soft"]
PointForm = Literal[
    TripletForm, "contrastive", "contrastive-linear", "contrastive-hadsell", "contrastive-soft"
]
CONTRASTIVE: dict[str, ContrastiveForm] = {
    "contrastive": "squared-gap",
    "contrastive-linear": "linear",
    "contrastive-hadsell": "hadsell",
    "contrastive-soft": "soft",
}
MAX_LOG_VARIANCE = 10.0  # of either sign


def contrastive_loss(
    first: Tensor,
    second: Tensor,
    match: bool,
    margin: float = 0.7,
    form: ContrastiveForm = "squared-gap",
    scale: float = 10.0,
) -> Tensor:
    """Return the loss of each pair at distance d.

    Args:
        first, second: (..., d), broadcast against each other.
        match: whether these are pairs that match.
        margin: m, at least 0, in units of the distance (unit vectors are at most 2 apart), up to
            which pairs that do not match are pushed apart.
        form: "squared-gap", ``d^2 / 2`` of pairs that match and ``max(0, m^2 - d^2) / 2`` of
            others, plus or minus the same function wherever there is a gradient (the likelihood of
            Warburg et al., 2023, arXiv 2302.01332); "linear", ``d`` and ``max(0, m - d)`` (what
            their code trains); "hadsell", ``d^2 / 2`` and ``max(0, m - d)^2 / 2`` (Hadsell, Chopra
            and LeCun, CVPR 2006, eq. 4); "soft", ``-log p`` and ``-log(1 - p)`` with
            ``p = sigmoid(scale (m - d))`` (Oh et al., ICLR 2019, eq. 2 and 3, who learn scale and
            margin, see `soft_contrastive_loss`).
        scale: above 0; of "soft".

    Returns:
        (...) losses. Where a distance is 0, so is its gradient.

    Raises:
        InvalidConfig: there is no such form.

    Example:
        >>> import torch
        >>> a, b = torch.tensor([[0., 0.], [.3, .4]])
        >>> contrastive_loss(a, b, True), contrastive_loss(a, b, False, margin=1.0)
        (tensor(0.1250), tensor(0.3750))
    """
    require_choice("contrastive form", form, ContrastiveForm)
    squared = (first - second).square().sum(-1)
    if form == "squared-gap":
        return (squared if match else F.relu(margin**2 - squared)) / 2
    # The root has no gradient at 0.
    distance = (squared + 1e-12).sqrt()
    if form == "soft":
        return F.softplus(scale * (distance - margin) * (1 if match else -1))
    if form == "linear":
        return distance if match else F.relu(margin - distance)
    return (squared if match else F.relu(margin - distance).square()) / 2


def triplet_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 0.1,
    form: TripletForm = "squared",
) -> Tensor:
    """Return the loss of each triplet.

    Args:
        anchor, positive, negative: (..., d), broadcast against each other.
        margin: at least 0, in units of the distance of the form; unused by "soft".
        form: "squared", ``max(0, |a-p|^2 - |a-n|^2 + m)`` (Warburg et al., ICCV 2021, eq. 2;
            Cai et al., AAAI 2025, eq. 19); "unsquared", the same with plain distances (what the
            code of the latter trains); "soft", ``log(1 + exp(|a-p| - |a-n|))`` (Hermans et al.,
            2017, arXiv 1703.07737).

    Returns:
        (...) losses.

    Raises:
        InvalidConfig: there is no such form.

    Example:
        >>> import torch
        >>> a, p, n = torch.tensor([[0., 0.], [3., 4.], [0., 1.]])
        >>> triplet_loss(a, p, n, margin=0.5), triplet_loss(a, p, n, 0.5, "unsquared")
        (tensor(24.5000), tensor(4.5000))
    """
    require_choice("triplet form", form, TripletForm)
    near = (anchor - positive).square().sum(-1)
    far = (anchor - negative).square().sum(-1)
    if form == "squared":
        return F.relu(near - far + margin)
    # The root has no gradient at 0.
    near, far = (near + 1e-12).sqrt(), (far + 1e-12).sqrt()
    return F.softplus(near - far) if form == "soft" else F.relu(near - far + margin)


@dataclass(frozen=True)
class PointLossOptions:
    """Options of the loss of point embeddings: `loss` in a training's configuration.

    Args:
        margin: at least 0, in units of the form's distance; unused by "soft". By default 0.1 for
            triplets, and 0.7 for pairs (Warburg et al., 2023, on small images).
        form: of triplets, "squared", "unsquared" or "soft", see `triplet_loss`; or of pairs,
            "contrastive", "contrastive-linear", "contrastive-hadsell" or "contrastive-soft", the
            forms "squared-gap", "linear", "hadsell" and "soft" of `contrastive_loss`.
        scale: above 0; of "contrastive-soft", per unit of distance.

    Example:
        >>> PointLossOptions(), PointLossOptions(form="contrastive").margin
        (PointLossOptions(margin=0.1, form='squared', scale=10.0), 0.7)
    """

    margin: float | None = None
    form: PointForm = "squared"
    scale: float = 10.0

    def __post_init__(self) -> None:
        require_choice("loss.form", self.form, PointForm)
        if self.margin is None:
            object.__setattr__(self, "margin", 0.7 if self.form in CONTRASTIVE else 0.1)
        require_at_least(self, "loss.", margin=0)
        if not 0 < self.scale < math.inf:
            raise InvalidConfig(f"loss.scale is {self.scale}; it must be above 0, and finite")


class TupleRows(NamedTuple):
    """Values of the images of b tuples, such as their vectors, by the role of the image.

    Attributes:
        anchor, positive: (b, 1, d).
        negatives: (b, j, d).
    """

    anchor: Tensor
    positive: Tensor
    negatives: Tensor

    @classmethod
    def split(cls, rows: Tensor, valid: Tensor) -> Self:
        """Split rows (b + b + b * j, d): anchors, positives, and negatives anchor by anchor.

        Of `valid`, (b, j), only the shape is used.
        """
        b, j = valid.shape
        anchor, positive, negatives = rows.split([b, b, b * j])
        return cls(anchor[:, None], positive[:, None], negatives.view(b, j, -1))


def mean_of_valid(losses: Tensor, valid: Tensor) -> Tensor:
    """Return the means (b,) of losses (b, j) over the negatives that count."""
    weights = valid / valid.sum(1, keepdim=True).to(losses.dtype)
    return (losses * weights).sum(1)


def point_tuple_loss(vectors: TupleRows, valid: Tensor, options: PointLossOptions) -> Tensor:
    """Return the loss of each tuple of point embeddings, (b,).

    For triplet forms, the mean over the triplets of the tuple. For contrastive forms, the loss of
    the matching pair plus the mean loss of the other pairs. (The code of Warburg et al., 2023,
    leaves pairs without a loss out of its means, so that the weight of a pair depends on its
    batch.)

    Args:
        vectors: of the tuples.
        valid: (b, j) bool; negatives that count. Each anchor has at least one.
        options: margin, form and scale.
    """
    anchor, positive, negatives = vectors
    margin, form = cast(float, options.margin), options.form
    if form in CONTRASTIVE:
        contrast = partial(
            contrastive_loss, margin=margin, form=CONTRASTIVE[form], scale=options.scale
        )
        near, far = contrast(anchor, positive, True), contrast(anchor, negatives, False)
        return near.squeeze(1) + mean_of_valid(far, valid)
    losses = triplet_loss(anchor, positive, negatives, margin, cast(TripletForm, form))
    return mean_of_valid(losses, valid)


def bounded_log_variance(values: Tensor) -> Tensor:
    """Map any numbers to log variances between -10 and 10, almost unchanged near 0.

    Without a bound, the loss of an easy triplet falls without end as its variances go to 0. Values
    beyond a clamp, or far in a hyperbolic tangent, would have no gradient in float32; those of an
    arc tangent do.
    """
    slope = math.pi / 2 / MAX_LOG_VARIANCE
    return (values * slope).atan() / slope


def heteroscedastic_tuple_loss(vectors: TupleRows, variance: TupleRows, valid: Tensor) -> Tensor:
    """Return the loss of each tuple, (b,): the mean over its triplets.

    The loss of a triplet is ``1/2 sum_x (L / v_x + log v_x)``, x its anchor, positive and negative,
    v_x the variance of x, and L the soft triplet loss ``log(1 + exp(|a-p| - |a-n|))``. The sum is
    least where the variance of an image is its expected L. (The printed eq. 12 has the inverse of
    the variance in the logarithm, by which the sum has no least value, and one loss for all images
    of a tuple.)

    Variances are (..., 1), above 0; for `valid` see `point_tuple_loss`. Losses have either sign.
    """
    soft = triplet_loss(*vectors, form="soft")
    a, p, n = (values.log().squeeze(-1) for values in variance)
    losses = ((-a).exp() + (-p).exp() + (-n).exp()) * soft / 2 + (a + p + n) / 2
    return mean_of_valid(losses, valid)


@dataclass(frozen=True)
class NormSoftmaxOptions:
    """Options of the normalised softmax loss: `loss` in a training's configuration.

    Args:
        temperature: above 0; cosines are divided by it.
    """

    temperature: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise InvalidConfig(f"loss.temperature is {self.temperature}; it must be above 0")


def norm_softmax_loss(
    vectors: Tensor, proxies: Tensor, labels: Tensor, temperature: float = 0.1
) -> Tensor:
    """Return ``-log softmax(cos(x, w) / t)`` of the proxy of each vector's label.

    Args:
        vectors: (b, d), of any length above 0.
        proxies: (n, d), likewise; one per label.
        labels: (b,) int64 in [0, n).
        temperature: above 0.

    Returns:
        (b,) losses, at least 0.
    """
    cosines = F.normalize(vectors) @ F.normalize(proxies).T
    return F.cross_entropy(cosines / temperature, labels, reduction="none")
