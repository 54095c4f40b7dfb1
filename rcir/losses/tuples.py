"""Tuples of an anchor, a positive and several negatives: their layout, and their point loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from rcir.errors import InvalidConfig
from rcir.losses.triplet import TripletForm, triplet_loss


@dataclass(frozen=True)
class TripletOptions:
    """Options of the triplet loss of point embeddings: `loss` in a training's configuration.

    Args:
        margin: at least 0, in units of the form's distance; unused by "soft".
        form: "squared", "unsquared" or "soft", see `triplet_loss`.
    """

    margin: float = 0.1
    form: TripletForm = "squared"

    def __post_init__(self) -> None:
        require_not_negative("margin", self.margin)
        if self.form not in get_args(TripletForm):
            raise InvalidConfig(
                f"loss.form {self.form!r} is unknown; choose one of "
                f"{', '.join(get_args(TripletForm))}"
            )


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


def triplet_tuple_loss(vectors: Tensor, valid: Tensor, options: TripletOptions) -> Tensor:
    """The triplet loss of each tuple, (b,): the mean over its triplets.

    Args:
        vectors: (b + b + b * j, d), as `split_tuples` takes them.
        valid: (b, j) bool; negatives that count. Each anchor has at least one.
        options: margin and form.

    Example:
        >>> import torch
        >>> vectors = torch.tensor([[0., 0.], [3., 4.], [0., 1.], [9., 9.]])
        >>> triplet_tuple_loss(vectors, torch.tensor([[True, False]]), TripletOptions(0.5))
        tensor([24.5000])
    """
    losses = triplet_loss(*split_tuples(vectors, valid), options.margin, options.form)
    return mean_of_valid(losses, valid)
