"""Fusing the embeddings of several pictures of one thing into one embedding."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from rcir.embedding import Embedding
from rcir.errors import InvalidData
from rcir.losses import fuse_gaussians

LENGTH_TOLERANCE = 1e-3  # what rounding makes of a length of 1


def fuse(embedding: Embedding, template: Tensor, templates: int) -> Embedding:
    """One embedding for each template: what its pictures say together.

    Where the encoder states a variance, the vector is the mean of the product of the pictures'
    Gaussians, in which certain pictures count for more ("Fusion" in Shi and Jain,
    "Probabilistic Face Embeddings", ICCV 2019), and the variance is that of the product; the
    uncertainty is fused as a variance too, which gives that of the fused Gaussian for Bayesian
    triplet loss and for PFE. Without a variance, the vector is the mean of the vectors,
    and the uncertainty the mean. Unit vectors are fused to unit vectors.

    Args:
        embedding: of n pictures.
        template: (n,) int64 in [0, templates), the template of each picture; each at least once.
        templates: number of templates.

    Returns:
        The embedding of the templates.

    Raises:
        InvalidData: the embedding holds what is fused by no rule, or a variance of other
            dimensions than its vectors.

    Example:
        >>> import torch
        >>> vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> fuse(Embedding(vectors), torch.tensor([0, 0, 1]), 2).vectors
        tensor([[0.7071, 0.7071],
                [0.0000, 1.0000]])
    """
    vectors, variance, uncertainty = embedding.vectors, embedding.variance, embedding.uncertainty
    if embedding.extra:
        raise InvalidData(
            f"embeddings of this encoder hold {', '.join(embedding.extra)} too, which cannot be "
            "fused: build the gallery without templates, one entry for each picture"
        )

    def mean(values: Tensor) -> Tensor:  # Gaussians that are all alike
        return fuse_gaussians(values, values.new_ones(len(values), 1), template, templates)[0]

    if variance is None:
        centre, spread = mean(vectors), None
        stated = None if uncertainty is None else mean(uncertainty[:, None])
    elif variance.shape[1] in (1, vectors.shape[1]):
        centre, spread = fuse_gaussians(vectors, variance, template, templates)
        column = None if uncertainty is None else uncertainty[:, None]
        stated = None if column is None else fuse_gaussians(column, column, template, templates)[1]
    else:
        raise InvalidData(
            f"the variance of this encoder has {variance.shape[1]} dimensions and its vectors "
            f"{vectors.shape[1]}, so that they cannot be fused: build the gallery without templates"
        )
    unit = (vectors.norm(dim=1) - 1).abs().max() < LENGTH_TOLERANCE
    fused = F.normalize(centre, eps=1e-30) if unit else centre
    return Embedding(fused, spread, None if stated is None else stated.squeeze(1))
