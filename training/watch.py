"""Warnings of trainings that go wrong without an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from training.progress import console
from training.validation import MEAN_AVERAGE_PRECISION, Validation

CLOSE = 0.01  # of a loss to that of a collapsed encoder, relative
FEWEST = 20  # hits and misses, to say anything of an AUROC
QUANTILE = 1.645  # of the normal distribution, at 95%


@dataclass
class TrainingWatch:
    """Warns, once each, of a mean average precision of 1 and of a collapsed encoder.

    An encoder has collapsed that gives all images the same embedding: the triplet loss then stays
    at its margin, the soft one and the Bayesian one at log 2.
    """

    saturated: bool = False
    collapsed: int = 0  # epochs in a row

    def after(self, epoch: int, metrics: Mapping[str, float], collapsed_loss: float) -> None:
        """Look at an epoch that is done.

        Args:
            collapsed_loss: of tuples whose images all have the same embedding.
        """
        if metrics[MEAN_AVERAGE_PRECISION] >= 1 and not self.saturated:
            self.saturated = True
            warn(
                f"from epoch {epoch} on, every validation image has all of its matches first: "
                "epochs cannot be told apart, and the last one is taken; give validation images "
                "of more classes, at least three"
            )
        near = abs(metrics["loss"] - collapsed_loss) <= CLOSE * collapsed_loss
        self.collapsed = self.collapsed + 1 if near and metrics["tuples"] else 0
        if self.collapsed == 2:
            warn(
                f"the loss stays at {collapsed_loss:.4g}, that of an encoder which embeds all "
                "images alike: it has collapsed; take easier negatives (mining.negatives "
                "semi-hard or top-random with a larger mining.pool) or a lower optimizer.lr"
            )


def warn_of_chance(found: Validation) -> None:
    """Warn where uncertainties tell misses from hits no better than chance."""
    misses, hits = int((~found.correct).sum()), int(found.correct.sum())
    area = found.metrics().get("validation/auroc_miss")
    if area is None or min(misses, hits) < FEWEST:
        return
    # The standard error of the area under a curve that is by chance (Mann and Whitney, 1947).
    error = np.sqrt((misses + hits + 1) / (12 * misses * hits))
    if area < 0.5 + QUANTILE * error:
        warn(
            f"the uncertainty of the validation images tells misses from hits no better than "
            f"chance (AUROC {area:.3f}, {misses} misses): sets will be as large as without it; "
            "train longer, with other mining, or with another encoder"
        )


def warn(text: str) -> None:
    """Print a warning."""
    console.print(f"warning: {text}", soft_wrap=True)
