"""Use of a GPU: ResNet-50, 224 x 224, Bayesian Triplet Loss, bfloat16, images in memory.

`ours_over_synthetic` compares with steps on one batch that lies on the GPU already; the figures
beside it are those of benchmarks/training.py; `peak_gib` is the most GPU memory that was held;
`dropout_1` and `dropout_128` are the time of MC dropout with 20 passes over that of 20 forward
passes of the same network, for 1 and 128 images. Ends at once where there is no GPU.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from common import parser, report, sized
from loops import compare_loops, dropout, vmf_over_btl

from rcir.data import ImageSet, Preprocessing
from rcir.encoders import EncoderConfig
from rcir.mining import MiningConfig
from training import TrainingConfig

SIZE = sized((224, 224), (32, 32))
IMAGES, LABELS = sized((4096, 512), (256, 32))
CONFIG = TrainingConfig(
    name="gpu",
    batch=32,
    precision="bfloat16",
    preprocessing=Preprocessing(SIZE, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    encoder=EncoderConfig(
        "btl", sized("resnet50", "mnist-cnn"), "gem", dim=2048, options={"variance_hidden": 500}
    ),
    mining=MiningConfig("random", "hardest", num_negatives=5),
)


def main() -> None:
    """Measure and print."""
    options = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device: nothing is measured")
        sys.exit()
    device = torch.device("cuda")
    pixels = np.random.default_rng(0).integers(0, 256, (IMAGES, *SIZE, 3), np.uint8)
    labels = np.arange(IMAGES) % LABELS
    images = ImageSet(pixels, labels, [str(row) for row in range(IMAGES)])
    figures = compare_loops(CONFIG, images, device, rounds=sized(3, 1))
    figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    figures |= {f"dropout_{n}": dropout(CONFIG, n, device) for n in (1, 128)}
    figures |= vmf_over_btl(CONFIG, device)
    rows = [(name.replace("_", " "), f"{value:.4g}") for name, value in figures.items()]
    report(torch.cuda.get_device_name(), ["what", "value"], rows, figures, options.json)


if __name__ == "__main__":
    main()
