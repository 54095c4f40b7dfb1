"""Mining of the hardest positive and the hardest negatives of an anchor."""

from rcir.mining.sampling import genuine_batches, label_batches, matching_pairs, sample_images
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
    "matching_pairs",
    "mine",
    "sample_images",
]
