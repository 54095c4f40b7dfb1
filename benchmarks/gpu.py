"""What a GPU does: steps of every method, embedding, loading, mining, search, our training loop.

ResNet-50 on images of 224 x 224 pixels. A step is of 8 tuples of 7 images, or of as many images
with labels, on a batch that is on the device already: forward pass, loss, gradients, Adam. Without
settings, a GPU computes convolutions by TF32. An ensemble trains its members as `deterministic`,
PFE its base. Embedding is in float32 always, of images in memory; loading is of JPEG files of
500 x 375 pixels. Mining takes a positive and 5 negatives for each of 5,900 vectors of 2,048
numbers, or of the 128 of a batch. Searches find the 200 nearest of a million clustered vectors of
128 numbers, for 1,000 queries at once and for one: by `flat`, and by `gpu` if FAISS finds a GPU.

`ours_over_synthetic` compares our loop, Bayesian Triplet Loss in bfloat16, with steps on one batch
that is on the device already; `peak` is the most GPU memory that was held; `dropout_1` and
`dropout_128` are the time of MC dropout with 20 passes over that of 20 forward passes of the same
network, for 1 and 128 images. Ends at once where there is no GPU; `--device cpu` measures the CPU.
"""

from __future__ import annotations

import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import faiss
import numpy as np
import torch
from common import parser, report, sized
from loops import bare_loop, by_tuples, compare_loops, dropout, fresh, synchronise, vmf_over_btl
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from rcir.data import ImageSet, Preprocessing
from rcir.data.relevance import SameLabel
from rcir.embedding import Embedding
from rcir.encoders import METHODS, Encoder, EncoderConfig
from rcir.encoders.batches import embed
from rcir.index import IndexConfig, build_index, recall_of
from rcir.mining import MiningConfig, mine
from training import TrainingConfig
from training.images import load_batches

SIZE = sized((224, 224), (16, 16))
IMAGES, LABELS = sized((2048, 256), (128, 16))
TUPLES, REPEATS = sized(8, 4), sized(3, 1)
CACHE, BATCH, DIM = sized((5900, 128, 2048), (300, 32, 64))
EMBEDDED, FILES, PICTURE = sized(1024, 32), sized(2048, 16), (500, 375)
VECTORS, QUERIES, WIDTH, DEPTH = sized((1_000_000, 1000, 128, 200), (3000, 20, 16, 20))
SEARCHES = {
    "flat": IndexConfig("flat"),
    "gpu": IndexConfig("gpu"),
    "gpu, float16": IndexConfig("gpu", {"float16": True}),
    "gpu, lists": IndexConfig("gpu", {"nlist": sized(1024, 16), "nprobe": 32}),
}
# By what float32 is computed, and the precision of a training.
PRECISIONS = {
    "float32": ("ieee", "float32"),
    "tf32": ("tf32", "float32"),
    "bfloat16": ("ieee", "bfloat16"),
}
STEPS: dict[str, EncoderConfig] = {
    name: EncoderConfig(method, sized("resnet50", "mnist-cnn"), "gem", DIM, options=options)
    for name, method, options in (
        *(
            (name, name, {})
            for name in METHODS
            if name not in ("deep-ensemble", "pfe", "pretrained")
        ),
        ("lam online", "lam", {"online": True}),
    )
}
CONFIG = TrainingConfig(
    name="gpu",
    batch=TUPLES,
    preprocessing=Preprocessing(SIZE, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    mining=MiningConfig("random", "hardest", num_negatives=5),
)


def compute_float32(way: str) -> None:
    """Let a GPU compute float32 by "ieee" or by "tf32"."""
    torch.backends.cuda.matmul.fp32_precision = way
    torch.backends.cudnn.conv.fp32_precision = way


def by_label(
    encoder: Encoder, config: TrainingConfig, embedding: Embedding, labels: Tensor
) -> Tensor:
    """The loss of images with labels."""
    return encoder.label_loss(embedding, labels, config.loss_options()).mean()


def step(config: TrainingConfig, images: ImageSet, device: torch.device) -> float:
    """Milliseconds of a step."""
    size = TUPLES * (2 + config.mining.num_negatives)
    labels = config.encoder.method == "norm-softmax"
    loss = by_label if labels else by_tuples
    return 1e3 * size * bare_loop(config, images, device, size, loss, synthetic=True)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median duration of some calls, after one that warms up."""
    taken = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        call()
        synchronise(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def embedding_rate(config: TrainingConfig, images: ImageSet, device: torch.device) -> float:
    """Images per second that an encoder embeds."""
    encoder = fresh(config, device)[0].eval()
    some = images.images[:EMBEDDED]
    return len(some) / seconds(lambda: embed(encoder, config.preprocessing, some), device)


def loading_rate(device: torch.device) -> float:
    """Images per second that are read, resized and copied to the device in batches."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.jpg") for number in range(FILES)]
        for path in paths:
            coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8))
            coarse.resize(PICTURE, Image.Resampling.BICUBIC).save(path, quality=90)
        names = [path.name for path in paths]
        images = ImageSet(paths, np.arange(FILES), names)
        rows = np.split(np.arange(FILES), FILES // sized(64, 8))

        def load() -> None:
            for _ in load_batches(images, CONFIG.preprocessing, rows, device):
                pass

        return FILES / seconds(load, device)


def mining_time(n: int, device: torch.device) -> float:
    """Seconds to mine a tuple for each of n vectors."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(n, DIM, generator=generator).to(device)
    labels: NDArray[np.int64] = np.arange(n) % (n // 5)
    config = MiningConfig("random", "semi-hard", num_negatives=5)
    anchors = torch.arange(n)
    return seconds(lambda: mine(cache, SameLabel(labels), anchors, config, generator), device)


def clustered(n: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Vectors around a thousand centres, which are the same each time."""
    centres = np.random.default_rng(1).standard_normal((1000, WIDTH), np.float32)
    noise = rng.standard_normal((n, WIDTH), np.float32)
    return centres[rng.integers(len(centres), size=n)] + np.float32(0.5) * noise


def searches(device: torch.device) -> dict[str, tuple[float, float, float]]:
    """Queries per second of each index, in a batch and alone, and its recall."""
    rng = np.random.default_rng(0)
    vectors, queries = clustered(VECTORS, rng), clustered(QUERIES, rng)
    rates, truth = {}, None
    for name, config in SEARCHES.items():
        if config.kind == "gpu" and (device.type == "cpu" or faiss.get_num_gpus() == 0):
            continue
        index = build_index(vectors, config)
        positions = index.search(queries, DEPTH)[1]
        truth = positions if truth is None else truth
        batch, alone = (
            seconds(partial(index.search, some, DEPTH), device) for some in (queries, queries[:1])
        )
        rates[name] = len(queries) / batch, 1 / alone, recall_of(positions, truth)
    return rates


def name_of(device: torch.device) -> str:
    """The name of the hardware."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor()
    return f"{name or platform.machine()}, torch {torch.__version__}"


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = command.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device: nothing is measured")
        sys.exit()
    device = torch.device(options.device)
    pixels = np.random.default_rng(0).integers(0, 256, (IMAGES, *SIZE, 3), np.uint8)
    images = ImageSet(pixels, np.arange(IMAGES) % LABELS, [str(row) for row in range(IMAGES)])
    rows: list[list[str]] = []
    figures: dict[str, float] = {}

    def add(what: str, unit: str, **values: float) -> None:
        cells = (f"{values[name]:.4g}" if name in values else "" for name in PRECISIONS)
        rows.append([what, unit, *cells])
        key = what.replace(",", "").replace(" ", "_").replace("-", "_")
        figures.update({f"{key}_{name}": value for name, value in values.items()})

    for name, encoder in STEPS.items():
        times = {}
        for precision, (way, trained) in PRECISIONS.items():
            compute_float32(way)
            config = replace(CONFIG, encoder=encoder, precision=trained, loss={})
            times[precision] = step(config, images, device)
        add(f"step, {name}", "ms", **times)
    for method in METHODS:
        encoder = replace(STEPS["btl"], method=method, options={})
        rate = embedding_rate(replace(CONFIG, encoder=encoder, loss={}), images, device)
        add(f"embedding, {method}", "images/s", float32=rate)
    add("loading", "images/s", float32=loading_rate(device))
    add("mining, epoch", "ms", float32=1e3 * mining_time(CACHE, device))
    add("mining, batch", "ms", float32=1e3 * mining_time(BATCH, device))
    for name, (batch, alone, recall) in searches(device).items():
        add(f"search, {name}", "queries/s", float32=batch)
        add(f"search, {name}, one query", "queries/s", float32=alone)
        add(f"search, {name}, recall", "", float32=recall)
    own = replace(CONFIG, encoder=STEPS["btl"], precision="bfloat16")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    loop = compare_loops(own, images, device, rounds=sized(3, 1))
    for name in ("ours_over_synthetic", "ours_images_per_second"):
        add(name, "", bfloat16=loop[name])
    if device.type == "cuda":
        add("peak", "GiB", bfloat16=torch.cuda.max_memory_allocated() / 2**30)
    for n in sized((1, 128), (1, 2)):
        add(f"dropout {n}", "", float32=dropout(own, n, device))
    for name, ratio in vmf_over_btl(own, device).items():
        add(name, "", float32=ratio)
    report(name_of(device), ["what", "unit", *PRECISIONS], rows, figures, options.json)


if __name__ == "__main__":
    main()
