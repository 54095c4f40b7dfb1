"""Which mining suits which encoder: the measurement behind the defaults.

Every encoder is trained on two-digit numbers with every choice of positives and negatives, and
calibrated; unseen classes, half of the digits occluded, alpha = delta = 0.1. Takes about half an
hour on two cores; `--encoders btl` and the like measures a part.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace

from common import DIGITS, parser, report, sized

from calibration import CalibrationConfig, calibrate
from rcir.data import Augmentation, DataConfig
from rcir.encoders import EncoderConfig
from rcir.mining import MiningConfig
from training import TrainingConfig, train

ENCODERS = ("deterministic", "mc-dropout", "btl")  # an ensemble's members are the first
POSITIVES = sized(("nearest", "random", "farthest"), ("nearest",))
NEGATIVES = sized(("hardest", "margin-violating", "semi-hard", "top-random"), ("hardest",))
QUALITY = ("recall_at_1", "auroc_miss", "auroc_occlusion")
BASE = TrainingConfig(
    name="base",
    epochs=sized(5, 1),
    data=DataConfig("digits", options={"train": 8000} | DIGITS),
    augmentation=Augmentation(occlusion=0.15),
)


def main() -> None:
    """Train, calibrate and print each combination."""
    command = parser(__doc__)
    command.add_argument("--encoders", nargs="+", default=ENCODERS, choices=ENCODERS)
    options = command.parse_args()
    rows, figures = [], {}
    for encoder, positive, negatives in itertools.product(options.encoders, POSITIVES, NEGATIVES):
        with tempfile.TemporaryDirectory() as folder:
            config = replace(
                BASE,
                storage=folder,
                encoder=EncoderConfig(encoder),
                loss={"kl_scale": 1e-5} if encoder == "btl" else {},
                mining=MiningConfig(positive, negatives),
            )
            outcome = calibrate(CalibrationConfig(str(train(config).path), alphas=(0.1,)))
        quality, row = outcome.evaluation.quality.numbers, outcome.evaluation.rows[0]
        numbers = {name: quality.get(name) for name in QUALITY}
        numbers |= {"mean_size": row.mean_size, "constant_size": row.constant_size}
        shown = ["-" if value is None else f"{value:.3f}" for value in numbers.values()]
        rows.append((encoder, positive, negatives, *shown))
        print(*rows[-1], flush=True)
        prefix = f"{encoder}_{positive}_{negatives}".replace("-", "_")
        figures |= {
            f"{prefix}_{name}": float(value) for name, value in numbers.items() if value is not None
        }
    columns = ["encoder", "positive", "negatives", *(name.replace("_", " ") for name in numbers)]
    report("Mining and uncertainty", columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
