"""What a GPU is used for: ResNet-50, 224 x 224, Bayesian Triplet Loss, bfloat16, images in memory.

`ours_over_bare` and the rest are those of benchmarks/training.py; `peak_gib` is the most GPU memory
that was held; `dropout_1` and `dropout_64` are the time of MC dropout with 20 passes over that of
20 forward passes of the same network, for 1 and 64 images. Ends at once where there is no GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace

import numpy as np
import torch
from common import parser, report
from loops import compare_loops, synchronise

from rcir.data import ImageSet, Preprocessing
from rcir.encoders import Encoder, EncoderConfig, build_encoder
from rcir.mining import MiningConfig
from training import TrainingConfig

CONFIG = TrainingConfig(
    name="gpu",
    batch=32,
    precision="bfloat16",
    preprocessing=Preprocessing((224, 224), 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    encoder=EncoderConfig("btl", "resnet50", "gem", dim=2048, variance_hidden=500),
    mining=MiningConfig("random", "hardest", count=5),
)
IMAGES, LABELS = 4096, 512
PASSES = 20


def main() -> None:
    """Measure and print."""
    options = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device: nothing is measured")
        sys.exit()
    device = torch.device("cuda")
    pixels = np.random.default_rng(0).integers(0, 256, (IMAGES, 224, 224, 3), np.uint8)
    labels = np.arange(IMAGES) % LABELS
    images = ImageSet(pixels, labels, [str(row) for row in range(IMAGES)])
    figures = compare_loops(CONFIG, images, device, rounds=3)
    figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    figures |= {f"dropout_{n}": dropout(n, device) for n in (1, 64)}
    rows = [(name.replace("_", " "), f"{value:.4g}") for name, value in figures.items()]
    report(torch.cuda.get_device_name(), ["what", "value"], rows, figures, options.json)


def dropout(n: int, device: torch.device) -> float:
    """Time of MC dropout over that of as many forward passes as it has samples."""
    config = replace(CONFIG.encoder, method="mc-dropout", passes=PASSES)
    size = CONFIG.preprocessing.size
    sampled = build_encoder(config, 3, size).to(device).eval()
    plain = build_encoder(replace(config, method="deterministic"), 3, size).to(device).eval()
    images = torch.rand(n, 3, *size, device=device)

    def seconds(encoder: Encoder, times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            encoder.embed(images)
        synchronise(device)
        return time.perf_counter() - started

    seconds(sampled, 1), seconds(plain, 1)  # the first draws masks and chooses algorithms
    ratios = [seconds(sampled, 1) / seconds(plain, PASSES) for _ in range(5)]
    return statistics.median(ratios)


if __name__ == "__main__":
    main()
