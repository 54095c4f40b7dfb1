"""Triplet losses of point embeddings."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor
from torch.nn import functional as F

from rcir.errors import InvalidConfig

TripletForm = Literal["squared", "unsquared", "soft"]


def triplet_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 0.1,
    form: TripletForm = "squared",
) -> Tensor:
    """The loss of each triplet.

    Args:
        anchor, positive, negative: (..., d), broadcast against each other.
        margin: larger than or equal to 0, in units of the distance used; unused by "soft".
        form: "squared", ``max(0, |a-p|^2 - |a-n|^2 + m)`` (Warburg et al., ICCV 2021, eq. 2;
            Cai et al., AAAI 2025, eq. 19); "unsquared", the same with plain distances (what the
            code of the latter trains); "soft", ``log(1 + exp(|a-p| - |a-n|))`` (Hermans et al.,
            2017, arXiv 1703.07737).

    Returns:
        (...) losses; reduce them as the tuples demand.

    Example:
        >>> import torch
        >>> a, p, n = torch.tensor([[0., 0.], [3., 4.], [0., 1.]])
        >>> triplet_loss(a, p, n, margin=0.5), triplet_loss(a, p, n, 0.5, "unsquared")
        (tensor(24.5000), tensor(4.5000))
    """
    if form not in get_args(TripletForm):
        raise InvalidConfig(
            f"triplet form {form!r} is unknown; choose one of {', '.join(get_args(TripletForm))}"
        )
    near = (anchor - positive).square().sum(-1)
    far = (anchor - negative).square().sum(-1)
    if form == "squared":
        return F.relu(near - far + margin)
    # The root has no gradient at 0, where a positive equals its anchor.
    near, far = (near + 1e-12).sqrt(), (far + 1e-12).sqrt()
    return F.softplus(near - far) if form == "soft" else F.relu(near - far + margin)
