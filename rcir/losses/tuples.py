"""Tuples of an anchor, a positive and several negatives: their layout, and their point loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast, get_args

from torch import Tensor

from rcir.errors import InvalidConfig
from rcir.losses.contrastive import ContrastiveForm, contrastive_loss
from rcir.losses.triplet import TripletForm, triplet_loss

PointForm = Literal[
    TripletForm, "contrastive", "contrastive-linear", "contrastive-hadsell", "contrastive-soft"
]
FORMS: tuple[str, ...] = get_args(PointForm)
CONTRASTIVE: dict[str, ContrastiveForm] = {
    "contrastive": "squared-gap",
    "contrastive-linear": "linear",
    "contrastive-hadsell": "hadsell",
    "contrastive-soft": "soft",
}


@dataclass(frozen=True)
class PointLossOptions:
    """Options of the loss of point embeddings: `loss` in a training's configuration.

    Args:
        margin: at least 0, in units of the form's distance; unused by "soft". Left out, it is 0.1
            for the triplet forms, and 0.7 for the contrastive ones (Warburg et al., 2023, of small
            pictures).
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
        if self.form not in FORMS:
            raise InvalidConfig(
                f"loss.form {self.form!r} is unknown; choose one of {', '.join(FORMS)}"
            )
        if self.margin is None:
            object.__setattr__(self, "margin", 0.7 if self.form in CONTRASTIVE else 0.1)
        require_not_negative("margin", cast(float, self.margin))
        if not 0 < self.scale < math.inf:
            raise InvalidConfig(f"loss.scale is {self.scale}; it must be above 0, and finite")


def require_not_negative(name: str, value: float) -> None:
    """Raise `InvalidConfig` of an option of a loss that is below 0."""
    if not value >= 0:
        raise InvalidConfig(f"loss.{name} is {value}; it must not be negative")


def split_tuples(rows: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split the rows of b tuples: anchors and positives (b, 1, d), negatives (b, j, d).

    Args:
        rows: (b + b + b * j, d) of anchors, of their positives, and of their negatives anchor by
            anchor.
        valid: (b, j).
    """
    b, j = valid.shape
    anchor, positive, negative = rows.split([b, b, b * j])
    return anchor[:, None], positive[:, None], negative.view(b, j, -1)


def mean_of_valid(losses: Tensor, valid: Tensor) -> Tensor:
    """(b,) means over the negatives that count, of (b, j) losses."""
    return (losses * (valid / valid.sum(1, keepdim=True))).sum(1)


def point_tuple_loss(vectors: Tensor, valid: Tensor, options: PointLossOptions) -> Tensor:
    """The loss of each tuple of point embeddings, (b,).

    Of triplets, the mean over those of the tuple. Contrastive, the loss of its anchor with its
    positive plus the mean loss of its anchor with the negatives that count: pairs that match and
    pairs that do not have the same weight. (The code of Warburg et al., 2023, leaves pairs without
    a loss out of its means, so that the weight of a pair depends on the others of its batch; here
    it does not.)

    Args:
        vectors: (b + b + b * j, d), as `split_tuples` takes them.
        valid: (b, j) bool; negatives that count. Each anchor has at least one.
        options: margin and form.

    Example:
        >>> import torch
        >>> vectors = torch.tensor([[0., 0.], [3., 4.], [0., 1.], [9., 9.]])
        >>> valid = torch.tensor([[True, False]])
        >>> point_tuple_loss(vectors, valid, PointLossOptions(0.5))
        tensor([24.5000])
        >>> point_tuple_loss(vectors, valid, PointLossOptions(2.0, "contrastive"))
        tensor([14.])
    """
    anchor, positive, negative = split_tuples(vectors, valid)
    margin, form = cast(float, options.margin), options.form
    if form in CONTRASTIVE:
        contrast = partial(
            contrastive_loss, margin=margin, form=CONTRASTIVE[form], scale=options.scale
        )
        near, far = contrast(anchor, positive, True), contrast(anchor, negative, False)
        return near.squeeze(1) + mean_of_valid(far, valid)
    losses = triplet_loss(anchor, positive, negative, margin, cast(TripletForm, form))
    return mean_of_valid(losses, valid)
