"""Time and memory of mining: the farthest positive and 5 violating negatives of every image.

Unit vectors of 128 numbers around the centres of their labels, about 5 to a label as in Stanford
Online Products, or ten labels in all; two threads, each set in a process of its own, whose peak
includes Python and torch. The naive loop takes one anchor at a time; both must choose the same.

A sampled cache embeds 5,000 images of any number (Warburg et al., ICCV 2021). Its vectors of 2,048
numbers are made up when asked for, a block at a time, as an encoder would; the full cache of as
many images is computed, not measured. Takes about two minutes.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import numpy as np
import torch
from common import FORM, parser, report, sized
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from rcir.data.relevance import SameLabel
from rcir.mining import MiningConfig, mine, sample_images
from rcir.mining.tuples import BLOCK_ELEMENTS

SIZES, DIM, EACH = sized((15_000, 30_000, 60_000), (500, 1000)), 128, 5
SAMPLED = sized((100_000, 400_000, 1_600_000), (1000, 2000))
SAMPLE, WIDE = sized((5000, 2048), (500, 64))
COLLAPSED = sized(20_000, 500)
SPREAD = 0.7  # of a label's images, in units of that of the labels
CONFIG = MiningConfig("farthest", "margin-violating", num_negatives=5)
REPEATS, NAIVE, BATCH, THREADS = 2, sized(200, 10), 512, 2


def embedded(labels: NDArray[np.int64], dim: int) -> Tensor:
    """(n, dim) unit vectors around the centres of their labels, made in blocks."""
    cache = torch.empty(len(labels), dim)
    for start in range(0, len(labels), BATCH):
        block = torch.from_numpy(labels[start : start + BATCH])
        names, which = block.unique(return_inverse=True)
        generators = [torch.Generator().manual_seed(label) for label in names.tolist()]
        centres = torch.stack([torch.randn(dim, generator=each) for each in generators])
        noise = torch.randn(len(block), dim, generator=torch.Generator().manual_seed(-1 - start))
        cache[start : start + BATCH] = normalize(centres[which] + SPREAD * noise, dim=1)
    return cache


def drawn(n: int, n_labels: int) -> NDArray[np.int64]:
    """(n,) labels, as often as each other, in random order."""
    return np.random.default_rng(0).permutation(n) % n_labels


def mined(cache: Tensor, labels: NDArray[np.int64], anchors: Tensor) -> tuple[float, float]:
    """Seconds of the fastest of some calls, and the peak memory of this process in GiB."""
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        mine(cache, SameLabel(labels), anchors, CONFIG, torch.Generator().manual_seed(0))
        taken.append(time.perf_counter() - started)
    return min(taken), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def product(cache: Tensor) -> float:
    """Seconds of the matrix product alone, in blocks of as many distances."""
    rows = BLOCK_ELEMENTS // len(cache)
    buffer = torch.empty(rows, len(cache))
    started = time.perf_counter()
    for block in cache.split(rows):
        torch.mm(block, cache.T, out=buffer[: len(block)])
    return time.perf_counter() - started


def naive(
    cache: Tensor, labels: Tensor, anchor: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The distances of the positive and of the negatives of one anchor."""
    distance = (cache - cache[anchor]).norm(dim=1)
    own = labels == labels[anchor]
    negative = distance[~own]
    own[anchor] = False
    if not own.any():
        return np.empty(0, np.float32), np.empty(0, np.float32)
    positive = distance[own].max()
    nearest = negative[negative < positive + CONFIG.margin].sort().values[: CONFIG.num_negatives]
    return positive[None].numpy(), nearest.numpy()


def compared(cache: Tensor, labels: NDArray[np.int64]) -> tuple[float, float]:
    """Seconds of the naive loop per anchor, and the largest difference of distances chosen."""
    anchors = torch.randperm(len(cache), generator=torch.Generator().manual_seed(1))[:NAIVE]
    known = torch.from_numpy(labels)
    started = time.perf_counter()
    expected = {anchor: naive(cache, known, anchor) for anchor in anchors.tolist()}
    taken = (time.perf_counter() - started) / NAIVE
    tuples = mine(cache, SameLabel(labels), anchors, CONFIG, torch.Generator())
    worst = 0.0
    for row, anchor in enumerate(tuples.anchor.tolist()):
        positive, negatives = expected.pop(anchor)
        chosen = torch.cat([tuples.positive[row, None], tuples.negatives[row][tuples.valid[row]]])
        distance = (cache[chosen] - cache[anchor]).norm(dim=1).numpy()
        worst = max(worst, np.abs(distance - np.concatenate([positive, negatives])).max())
    if any(len(negatives) for _, negatives in expected.values()):
        return taken, float("inf")  # an anchor was left out
    return taken, float(worst)


def collapsed(n: int) -> Tensor:
    """(n, DIM) unit vectors of an encoder that embeds all images nearly alike."""
    noise = torch.randn(n, DIM, generator=torch.Generator().manual_seed(0))
    return normalize(1 + 0.005 * noise, dim=1)  # distances below 0.01


def alone(what: str, n: int) -> dict[str, float]:
    """One set in this process."""
    torch.set_num_threads(THREADS)
    if what == "sampled":
        labels = drawn(n, n // EACH)
        started = time.perf_counter()
        rows = sample_images(SameLabel(labels), SAMPLE, np.random.default_rng(0))
        drawing = time.perf_counter() - started
        cache = embedded(labels[rows], WIDE)
        seconds, peak = mined(cache, labels[rows], torch.arange(len(rows)))
        return {"seconds": drawing + seconds, "peak": peak}
    labels = drawn(n, 10 if what == "ten" else n // EACH)
    cache = collapsed(n) if what == "collapsed" else embedded(labels, DIM)
    anchors = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    seconds, peak = mined(cache, labels, anchors)
    found = {"seconds": seconds, "peak": peak}
    if n == SIZES[-1] and what != "collapsed":
        found["matmul"] = product(cache)
        found["naive"], found["difference"] = compared(cache, labels)
    return found


def fresh(what: str, n: int) -> dict[str, float]:
    """The same, in a process of its own."""
    line = [sys.executable, __file__, *FORM, "--alone", what, str(n)]
    return json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    """Measure each set, print and report."""
    command = parser(__doc__)
    command.add_argument("--alone", nargs=2, help="print what one set takes")
    options = command.parse_args()
    if options.alone:
        print(json.dumps(alone(options.alone[0], int(options.alone[1]))))
        return
    products = {n: fresh("products", n) for n in SIZES}
    ten = fresh("ten", SIZES[-1])
    alike = fresh("collapsed", COLLAPSED)
    sampled = {n: fresh("sampled", n) for n in SAMPLED}
    largest = products[SIZES[-1]]
    seconds = [found["seconds"] for found in products.values()]
    figures = {
        "seconds_60k": largest["seconds"],
        "matmul_seconds": largest["matmul"],
        "peak_gib_60k": largest["peak"],
        "growth_exponent": float(np.polyfit(np.log(SIZES), np.log(seconds), 1)[0]),
        "speedup_over_naive": largest["naive"] * SIZES[-1] / largest["seconds"],
        "largest_difference": largest["difference"],
        "seconds_60k_ten_labels": ten["seconds"],
        "peak_gib_60k_ten_labels": ten["peak"],
        "largest_difference_ten_labels": ten["difference"],
        "seconds_20k_collapsed": alike["seconds"],
        "sampled_peak_gib": max(found["peak"] for found in sampled.values()),
        "sampled_growth_gib": sampled[SAMPLED[1]]["peak"] - sampled[SAMPLED[0]]["peak"],
        "full_cache_gib": SAMPLED[-1] * WIDE * 4 / 2**30,
    }
    rows = [(f"{n:,} x {DIM}, {EACH} to a label", found) for n, found in products.items()]
    rows += [(f"{SIZES[-1]:,} x {DIM}, ten labels", ten)]
    rows += [(f"{COLLAPSED:,} x {DIM}, collapsed", alike)]
    rows += [(f"{SAMPLE:,} of {n:,} x {WIDE}, sampled", found) for n, found in sampled.items()]
    shown = [(name, f"{found['seconds']:.2f}", f"{found['peak']:.2f}") for name, found in rows]
    naively = f"{largest['naive'] * SIZES[-1]:.0f}"
    shown += [
        (f"{SIZES[-1]:,} x {DIM}, the matrix product alone", f"{largest['matmul']:.2f}", ""),
        (f"{SIZES[-1]:,} x {DIM}, anchor by anchor, from {NAIVE}", naively, ""),
        (f"{SAMPLED[-1]:,} x {WIDE}, full cache", "", f"{figures['full_cache_gib']:.1f} and more"),
    ]
    report("Mining", ["images", "seconds", "peak GiB"], shown, figures, options.json)


if __name__ == "__main__":
    main()
