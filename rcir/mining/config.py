"""The choice of tuples: the part `mining` of a training's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rcir.errors import InvalidConfig

Positive = Literal["nearest", "random", "farthest"]
Negatives = Literal["hardest", "margin-violating", "semi-hard", "top-random"]
Scope = Literal["epoch", "batch"]
Cache = Literal["full", "sampled"]


@dataclass(frozen=True)
class MiningConfig:
    """The choice of tuples of one anchor, one positive and several negatives.

    Args:
        positive: which of the images that match the anchor. "farthest" is the text of Cai et al.
            (AAAI 2025), "nearest" its code; the farthest is usually the noisiest image, and a
            variance trained on it turns upside down. In a training, None is what suits the encoder
            best.
        negatives: "hardest", the nearest of other labels; "margin-violating", those of them that
            are closer than the positive plus the margin; "semi-hard", those of them that are also
            farther than the positive; "top-random", a random draw from the `pool` nearest. None
            as above.
        num_negatives: number of negatives per anchor, at most.
        pool: "top-random": how many of the nearest to draw from.
        margin: "margin-violating" and "semi-hard": in units of the (unsquared) distance.
        scope: where to look: "epoch", among training images as they are embedded, without
            augmentation, at the start of an epoch; or "batch", among the images of one batch as
            they are embedded for the step itself: one forward pass serves all tuples.
        cache: scope "epoch": which images are embedded at its start: "full", all; or "sampled",
            only `sample` of them, drawn anew for every epoch, so that memory does not grow with
            the set. An epoch then is at most `refresh` steps (Warburg et al., ICCV 2021: 5,000
            images, 1,000 steps).
        sample: cache "sampled": number of images; at least 2.
        refresh: cache "sampled": number of steps after which others are drawn; at least 1.
        samples_per_class: scope "batch": so many images of each of batch / `samples_per_class`
            labels make a batch (Hermans et al., 2017); None for any images. With positive
            "farthest", negatives "hardest" and num_negatives 1 this is their batch-hard mining. At
            least 2, and a divisor of the batch.

    Raises:
        InvalidConfig: an argument is out of its range, or belongs to the other scope.
    """

    positive: Positive | None = None
    negatives: Negatives | None = None
    num_negatives: int = 2
    pool: int = 10
    margin: float = 0.1
    scope: Scope = "epoch"
    cache: Cache = "full"
    sample: int = 5000
    refresh: int = 1000
    samples_per_class: int | None = None

    def __post_init__(self) -> None:
        for name, choices, more in (
            ("positive", Positive, (None,)),
            ("negatives", Negatives, (None,)),
            ("scope", Scope, ()),
            ("cache", Cache, ()),
        ):
            if getattr(self, name) not in (*more, *get_args(choices)):
                raise InvalidConfig(
                    f"mining.{name} {getattr(self, name)!r} is unknown; choose one of "
                    f"{', '.join(get_args(choices))}"
                )
        if self.num_negatives < 1:
            raise InvalidConfig(
                f"mining.num_negatives is {self.num_negatives}; at least 1 negative is needed"
            )
        if self.pool < self.num_negatives:
            raise InvalidConfig(
                f"mining.pool is {self.pool}, smaller than mining.num_negatives "
                f"{self.num_negatives}: raise it"
            )
        if not self.margin >= 0:
            raise InvalidConfig(f"mining.margin is {self.margin}; it must not be negative")
        if self.sample < 2:
            raise InvalidConfig(f"mining.sample is {self.sample}; at least 2 images are needed")
        if self.refresh < 1:
            raise InvalidConfig(f"mining.refresh is {self.refresh}; at least 1 step is needed")
        if self.cache == "sampled" and self.scope == "batch":
            raise InvalidConfig(
                'mining.cache is "sampled" but mining.scope is "batch", which keeps no cache: '
                'leave it "full", or mine by "epoch"'
            )
        if self.samples_per_class is not None and self.samples_per_class < 2:
            raise InvalidConfig(
                f"mining.samples_per_class is {self.samples_per_class}; at least 2 images make a "
                "pair"
            )
        if self.samples_per_class is not None and self.scope != "batch":
            raise InvalidConfig(
                f"mining.samples_per_class is {self.samples_per_class} but mining.scope is "
                f'"{self.scope}": batches of labels need mining.scope "batch"'
            )
