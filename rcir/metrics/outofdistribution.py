"""Whether uncertainty tells images of another kind from those an encoder was trained for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from rcir.metrics.checks import Floats, check_columns


@dataclass(frozen=True)
class OutOfDistribution:
    """How well uncertainty finds the out-of-distribution images, which are the positives.

    Attributes:
        auroc: area under the ROC curve: how often one of them is more uncertain than an image
            in distribution, like values counted half.
        auprc: average precision, which is the area under the precision-recall curve by steps.
        auprc_trapezoid: the same area by trapezoids, which is too large but is what some papers
            report (Warburg et al., NeurIPS 2023).
    """

    auroc: float
    auprc: float
    auprc_trapezoid: float

    @classmethod
    def of(cls, inside: Floats, outside: Floats) -> Self:
        """Measure the uncertainties of images in and out of distribution.

        Args:
            inside: (n,) of images in distribution, larger is less certain.
            outside: (m,) of images out of distribution.

        Raises:
            InvalidData: one of the two is empty, not one-dimensional, or holds NaN.

        Example:
            >>> found = OutOfDistribution.of(np.array([0.1, 0.2, 0.6]), np.array([0.5, 0.9]))
            >>> round(found.auroc, 4), round(found.auprc, 4)
            (0.8333, 0.8333)
        """
        check_columns(inside=inside)
        check_columns(outside=outside)
        from sklearn.metrics import (
            auc,
            average_precision_score,
            precision_recall_curve,
            roc_auc_score,
        )

        positive = np.arange(len(inside) + len(outside)) >= len(inside)
        score = np.concatenate([inside, outside])
        precision, recall, _ = precision_recall_curve(positive, score)
        return cls(
            float(roc_auc_score(positive, score)),
            float(average_precision_score(positive, score)),
            float(auc(recall, precision)),
        )
