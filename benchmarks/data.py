"""Decoding against the fastest library calls, memory of a million images, matches of many labels.

Real JPEG files of CUB-200-2011, found under RCIR_DATA, and the same scaled up to photographs of
1,500 pixels. All decode to 224 x 224 RGB on one core; seconds are of CPU time, so that a busy
machine does not show. Library calls check nothing: neither size nor rotation.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from common import FORM, parser, report, sized
from PIL import Image
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2 import functional as F

from rcir.data import DataConfig, ImageSet, Preprocessing, data_root
from rcir.data.relevance import Relevance, SameLabel, SharedLabel, WithinRadius

SIZE, PHOTOGRAPH = (224, 224), 1500
FILES, PHOTOGRAPHS, REPEATS = sized((400, 60, 5), (10, 2, 1))
NEAR = 0.5  # mean difference of 255 from a full decode, up to which a call counts as equal
GALLERY, QUERIES = sized((1_000_000, 1000), (1000, 10))
DEPTH, LABELS = 200, 14
TAGGED, TAGS, EACH = sized((100_000, 1000, 5), (1000, 50, 5))
OURS, FULL = "Preprocessing.resized", "PIL, full decode"


def batch(image: Image.Image) -> torch.Tensor:
    """A decoded image, resized as a batch of one."""
    pixels = torch.from_numpy(np.array(image.convert("RGB")))
    return F.resize(pixels.permute(2, 0, 1)[None], list(SIZE), antialias=True)


def full(path: Path) -> torch.Tensor:
    """All pixels by Pillow, as an array, resized by torchvision."""
    with Image.open(path) as image:
        return batch(image)


def pillow(path: Path, times: int) -> torch.Tensor:
    """Draft of at least so many times the size, resized by Pillow."""
    with Image.open(path) as image:
        image.draft("RGB", (times * SIZE[1], times * SIZE[0]))
        resized = image.convert("RGB").resize(SIZE[::-1], Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)[None]


def draft(path: Path, times: int) -> torch.Tensor:
    """Draft of at least so many times the size, resized by torchvision."""
    with Image.open(path) as image:
        image.draft("RGB", (times * SIZE[1], times * SIZE[0]))
        return batch(image)


def torchvision(path: Path) -> torch.Tensor:
    """All pixels by torchvision."""
    pixels = decode_image(str(path), ImageReadMode.RGB)
    return F.resize(pixels[None], list(SIZE), antialias=True)


CALLS: dict[str, Callable[[Path], torch.Tensor]] = {
    FULL: full,
    "PIL draft, 1x, PIL resize": lambda path: pillow(path, 1),
    "PIL draft, 2x, PIL resize": lambda path: pillow(path, 2),
    "PIL draft, 1x": lambda path: draft(path, 1),
    "PIL draft, 2x": lambda path: draft(path, 2),
    "torchvision decode_image": torchvision,
}


def extract(folder: Path) -> tuple[list[Path], list[Path]]:
    """Some files of the data set, and photographs made of them."""
    archives = sorted(data_root(DataConfig("cub")).rglob("CUB_200_2011.t*"))
    if not archives:
        raise SystemExit("no CUB_200_2011.tar or .tgz: name its folder in RCIR_DATA")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    pictures = sorted(folder.rglob("*.jpg"))
    files = pictures[:: max(1, len(pictures) // FILES)][:FILES]
    photographs = []
    for number, path in enumerate(files[:: max(1, FILES // PHOTOGRAPHS)][:PHOTOGRAPHS]):
        image = Image.open(path).convert("RGB")
        scale = PHOTOGRAPH / max(image.size)
        size = (round(scale * image.width), round(scale * image.height))
        photographs.append(folder / f"photograph-{number}.jpg")
        image.resize(size, Image.Resampling.BICUBIC).save(photographs[-1], quality=90)
    return files, photographs


def seconds(clock: Callable[[], float], call: Callable[[], object]) -> float:
    """Duration of one call."""
    started = clock()
    call()
    return clock() - started


def decoding(paths: Sequence[Path], title: str) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Rows of the table, and images/s of the calls that give a full decode's values."""
    ours = Preprocessing(SIZE, 3, (0.0,) * 3, (1.0,) * 3)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        name: lambda call=call: torch.cat([call(path) for path in paths])  # type: ignore[misc]
        for name, call in CALLS.items()
    }
    ways[OURS] = lambda: ours.resized(paths)
    values = {name: way().to(torch.int16) for name, way in ways.items()}
    apart = {name: (pixels - values[FULL]).abs().float() for name, pixels in values.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):  # in alternation, so that a slow moment hits all alike
        for name, way in ways.items():
            taken[name].append(seconds(time.process_time, way))
    rates = {name: len(paths) / min(times) for name, times in taken.items()}
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    wall = min(seconds(time.perf_counter, ways[OURS]) for _ in range(REPEATS))
    torch.set_num_threads(1)
    alone = min(seconds(time.perf_counter, ways[OURS]) for _ in range(REPEATS))
    rows = []
    for name, rate in rates.items():
        mean, worst = apart[name].mean().item(), apart[name].mean((1, 2, 3)).max().item()
        differs = f"{mean:.3f}", f"{worst:.3f}"
        rows.append((f"{title}: {name}", f"{rate:.0f}", f"{rate / rates[FULL]:.2f}", *differs))
    name = f"{title}: {OURS}, {threads} threads, wall"
    rows.append((name, f"{len(paths) / wall:.0f}", f"{alone / wall:.2f} of 1 thread", "", ""))
    near = {name: rate for name, rate in rates.items() if apart[name].mean() <= NEAR}
    return rows, near


def transform() -> list[tuple[str, ...]]:
    """The resize alone, of 128 decoded images of 256 x 256."""
    pixels = np.random.default_rng(0).integers(0, 256, (128, 256, 256, 3), np.uint8)
    ours = Preprocessing(SIZE, 3, (0.0,) * 3, (1.0,) * 3)
    tensor = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    rows = []
    for name, call in (
        ("v2 resize, channels first", lambda: F.resize(tensor, list(SIZE), antialias=True)),
        (OURS, lambda: ours.resized(pixels)),
    ):
        rate = 128 / min(seconds(time.process_time, call) for _ in range(REPEATS))
        rows.append((f"uint8 batch: {name}", f"{rate:.0f}", "", "", ""))
    return rows


def relevance(kind: str, n: int, rng: np.random.Generator) -> Relevance:
    """Random: ten images to a label, up to three of 14 labels, or one in 300 square metres."""
    if kind == "SameLabel":
        return SameLabel(rng.integers(0, GALLERY // 10, n))
    if kind == "SharedLabel":
        lists = [sorted(set(row[: row[0] % 4])) for row in rng.integers(0, LABELS, (n, 3)).tolist()]
        return SharedLabel.of_lists(lists, LABELS)
    return WithinRadius(rng.uniform(0, 17_000, (n, 2)), 25.0)


def tagged(skew: float) -> tuple[float, float]:
    """Seconds and GiB to count the matches of many-label images among themselves.

    Args:
        skew: of the tags: the k-th is drawn in proportion to k to the power of minus `skew`.
    """
    share = 1 / np.arange(1, TAGS + 1) ** skew
    drawn = np.random.default_rng(0).choice(TAGS, (TAGGED, EACH), p=share / share.sum())
    images = SharedLabel.of_lists(drawn.tolist(), TAGS)
    taken = seconds(time.process_time, lambda: images.totals(images))
    tracemalloc.start()
    images.totals(images)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return taken, peak / 2**30


def remember(kind: str) -> None:
    """In a process of its own: print the peak memory in GiB."""
    rng = np.random.default_rng(0)
    matching = relevance(kind, GALLERY, rng)
    gallery = ImageSet(
        [f"/data/gallery/{row // 1000:04d}/image_{row:07d}.jpg" for row in range(GALLERY)],
        matching.single,
        [f"image_{row:07d}" for row in range(GALLERY)],
        relevance=matching,
    )
    queries = relevance(kind, QUERIES, rng)
    queries.totals(gallery.relevance)
    queries.of(gallery.relevance, rng.integers(-1, GALLERY, (QUERIES, DEPTH)))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def main() -> None:
    """Measure decoding in this process, and memory in one process for each kind."""
    command = parser(__doc__)
    command.add_argument("--remember", help="print the memory of one kind of relevance only")
    options = command.parse_args()
    if options.remember:
        remember(options.remember)
        return
    # First: a process's peak starts at that of the one that starts it.
    memory = {}
    for kind in ("SameLabel", "SharedLabel", "WithinRadius"):
        line = [sys.executable, __file__, *FORM, "--remember", kind]
        memory[kind] = float(subprocess.run(line, check=True, capture_output=True).stdout)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        files, photographs = extract(Path(folder))
        rows, rates = decoding(files, "files")
        more, large = decoding(photographs, "photographs")
    ratios = [
        found[OURS] / max(rate for name, rate in found.items() if name != OURS)
        for found in (rates, large)
    ]
    many = {f"tags of skew {skew:g}": tagged(skew) for skew in (0.0, 1.0)}
    figures = {
        "images_per_second_per_core": rates[OURS],
        "speedup_over_full_decode": large[OURS] / large[FULL],
        "ours_over_best_library_call": min(ratios),
        "million_gallery_gib": max(memory.values()),
        "many_label_totals_seconds": max(taken for taken, _ in many.values()),
        "many_label_totals_gib": max(peak for _, peak in many.values()),
    }
    rows += more + transform()
    rows += [(f"GiB, {GALLERY:,} images, {k}", f"{v:.2f}", "", "", "") for k, v in memory.items()]
    for name, (taken, peak) in many.items():
        what = f"matches of {TAGGED:,} images, {EACH} of {TAGS:,} {name}"
        rows.append((what, f"{taken:.1f} s", f"{peak:.2f} GiB", "", ""))
    columns = ["way", "images/s", "to full decode", "mean difference", "of the worst image"]
    report(f"To {SIZE[0]} x {SIZE[1]} RGB", columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
