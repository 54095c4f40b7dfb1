"""Mine positives and negatives of anchors, and draw batches of matching images."""

from rcir.mining.sampling import genuine_batches, label_batches, sample_images
from rcir.mining.tuples import Cache, MiningConfig, Negatives, Positive, Scope, Tuples, mine

__all__ = [
    "Cache",
    "MiningConfig",
    "Negatives",
    "Positive",
    "Scope",
    "Tuples",
    "genuine_batches",
    "label_batches",
    "mine",
    "sample_images",
]
