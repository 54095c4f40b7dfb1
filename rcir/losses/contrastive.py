"""Contrastive losses of pairs of point embeddings."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor
from torch.nn import functional as F

from rcir.errors import InvalidConfig

ContrastiveForm = Literal["squared-gap", "linear", "hadsell", "soft"]


def contrastive_loss(
    first: Tensor,
    second: Tensor,
    match: bool,
    margin: float = 0.7,
    form: ContrastiveForm = "squared-gap",
    scale: float = 10.0,
) -> Tensor:
    """The loss of each pair, d being its distance: small if those that match are near each other.

    Args:
        first, second: (..., d), broadcast against each other.
        match: whether these are pairs that match.
        margin: m, larger than or equal to 0, in units of the distance (unit vectors are at most 2
            apart): pairs that do not match are pushed apart up to it.
        form: "squared-gap", ``d^2 / 2`` of pairs that match and ``max(0, m^2 - d^2) / 2`` of
            others, plus or minus the same function wherever there is a gradient (the likelihood of
            Warburg et al., 2023, arXiv 2302.01332); "linear", ``d`` and ``max(0, m - d)`` (what
            their code trains); "hadsell", ``d^2 / 2`` and ``max(0, m - d)^2 / 2`` (Hadsell, Chopra
            and LeCun, CVPR 2006, eq. 4); "soft", ``-log p`` and ``-log(1 - p)`` with
            ``p = sigmoid(scale (m - d))`` (Oh et al., ICLR 2019, eq. 2, who learn scale and margin,
            see `soft_contrastive_loss`).
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
    if form not in get_args(ContrastiveForm):
        raise InvalidConfig(
            f"contrastive form {form!r} is unknown; choose one of "
            f"{', '.join(get_args(ContrastiveForm))}"
        )
    squared = (first - second).square().sum(-1)
    if form == "squared-gap":
        return (squared if match else F.relu(margin**2 - squared)) / 2
    # The root has no gradient at 0, where two images have the same embedding.
    distance = (squared + 1e-12).sqrt()
    if form == "soft":
        return F.softplus(scale * (distance - margin) * (1 if match else -1))
    if form == "linear":
        return distance if match else F.relu(margin - distance)
    return (squared if match else F.relu(margin - distance).square()) / 2
