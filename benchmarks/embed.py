"""Embedding of photographs: speed beside a bare loop, memory of the driver, kills, damaged files.

`embed_over_bare`: images per second of `rcir embed` in this process over those of a bare loop that
decodes and runs the network, EfficientNet-Lite0 on JPEG files of 224 pixels; `ray_over_bare` that
with one worker of Ray, without the start of the cluster. Rounds take turns, and sums are compared.
`driver_growth_mb`: by how much the peak memory of the process that drives a worker grows from a
table of 10,000 rows to one of a million, whose pictures are not decoded; `listing_growth_mb`: the
same of listing folders. `identical_after_kills`: 1 if the vectors of pictures, 1% of them damaged,
are those of an undisturbed run after a worker was killed, and after the driver was; `rejects`: the
damaged ones that were found, over all. Needs RCIR_DATA. Takes ten minutes.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as Ray gives each worker one CPU

import numpy as np
import pyarrow as pa
import torch
from common import parser, report, sized
from PIL import Image
from pyarrow import parquet

from rcir.cluster import join_cluster
from rcir.data.manifest import read_manifest, write_plan
from rcir.data.preprocessing import Preprocessing
from rcir.data.rejects import read_rejects
from rcir.data.vector_files import read_all_vectors
from rcir.encoders import EncoderConfig, build_encoder
from rcir.runs import embedding
from rcir.runs.config import EmbeddingConfig

WEIGHTS = Path(os.environ.get("RCIR_DATA", "data"), "models/tf_efficientnet_lite0.safetensors")
MODEL, BATCH = "timm:tf_efficientnet_lite0", sized(64, 4)
ROUNDS, IN_ROUND = sized(4, 1), sized(500, 8)
ROWS = sized((10_000, 1_000_000), (100, 300))
KILLED = 4_000  # pictures
HERE = Path(__file__).resolve().parent


class Blank(Preprocessing):
    """Reads nothing; or ends the worker that reads a file named "deadly", once."""

    def resized(self, images):
        return torch.zeros(len(images), 1, *self.size, dtype=torch.uint8)


class Deadly(Preprocessing):
    """Ends the first worker that reads the last pictures."""

    def resized(self, images):
        died = Path(images[0]).parents[1] / "died"
        if int(Path(images[0]).stem) > KILLED // 2 and not died.exists():
            died.touch()
            os._exit(1)
        return super().resized(images)


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--step", nargs="+", help="used by the script itself")
    options = command.parse_args()
    if options.step:
        name, *arguments = options.step
        return {"drive": drive, "list": list_folder, "embed": embed_tiny}[name](*arguments)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        figures = growth(folder) | speed(folder)
        if not sized(0, 1):  # tests kill workers and drivers of fewer pictures
            figures |= kills(folder)
    rows = [(name.replace("_", " "), f"{value:.4g}") for name, value in figures.items()]
    report("Embedding", ["what", "value"], rows, figures, options.json)


def speed(folder: Path) -> dict[str, float]:
    """Images per second over those of a bare loop."""
    rng = np.random.default_rng(0)
    rounds = []
    for number in range(ROUNDS):
        rounds.append(folder / f"photos-{number}")
        rounds[-1].mkdir()
        for image in range(IN_ROUND):
            coarse = Image.fromarray(rng.integers(0, 256, (28, 28, 3), dtype=np.uint8))
            coarse.resize((224, 224)).save(rounds[-1] / f"{image}.jpg", quality=90)
    loaded = embedding.load_model(MODEL, str(WEIGHTS))
    join_cluster()
    seconds = {"bare": 0.0, "embed": 0.0, "ray": 0.0}

    def run(photos: Path, workers: int) -> None:
        output = folder / f"{photos.name}-{workers}.parquet"
        config = EmbeddingConfig(photos, MODEL, output, num_workers=workers, batch=BATCH)
        with patch.object(embedding, "load_model", lambda *_: loaded):
            embedding.embed_pictures(config)

    def bare(photos: Path) -> None:
        encoder, preprocessing, _ = loaded
        paths = sorted(photos.iterdir())
        with torch.inference_mode():
            for start in range(0, len(paths), BATCH):
                encoder(preprocessing(paths[start : start + BATCH]))

    works: dict[str, Callable[[Path], None]] = {
        "bare": bare,
        "embed": lambda photos: run(photos, 0),
        "ray": lambda photos: run(photos, 1),
    }
    for photos in rounds:
        for name, work in works.items():
            started = time.monotonic()
            work(photos)
            seconds[name] += time.monotonic() - started
    rate = ROUNDS * IN_ROUND / seconds["bare"]
    over = {f"{name}_over_bare": seconds["bare"] / seconds[name] for name in ("embed", "ray")}
    return over | {"bare_images_per_second": rate}


def step(*arguments: object) -> str:
    """Run a step of this script in a process of its own; return its last line."""
    command = [sys.executable, __file__, *(["--short"] * sized(0, 1)), "--step"]
    shown = subprocess.run([*command, *map(str, arguments)], check=True, stdout=subprocess.PIPE)
    return shown.stdout.decode().split()[-1]


def growth(folder: Path) -> dict[str, float]:
    """Growth of peak memory, of driving and of listing."""
    Image.new("L", (16, 8)).save(folder / "one.png")
    peaks = defaultdict(list)
    for n in ROWS:
        table = folder / f"{n}.parquet"
        rows = {"path": ["one.png"] * n, "key": [f"picture {row}" for row in range(n)]}
        parquet.write_table(pa.table(rows | {"label": ["a"] * n, "time": ["0"] * n}), table)
        if not sized(0, 1):  # it starts Ray
            peaks["driver"].append(float(step("drive", table)))
        files = folder / f"files-{n}"
        for row in range(n):
            if row % 1000 == 0:
                (inside := files / f"{row // 1000}").mkdir(parents=True)
            (inside / f"{row}.png").touch()
        peaks["listing"].append(float(step("list", files)))
    return {f"{name}_growth_mb": last - first for name, (first, last) in peaks.items()}


def drive(table: str) -> None:
    """Drive a worker that embeds blank pictures of a table; print the peak memory in MB."""
    _embed(Path(table), Path(table).with_suffix(""), Blank(), 1)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)


def list_folder(files: str) -> None:
    """List a folder; print the peak memory in MB."""
    write_plan(Path(files).with_suffix(".plan"), read_manifest(Path(files)))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)


def embed_tiny(pictures: str, output: str, kind: str) -> None:
    """Embed small pictures with two workers."""
    _embed(Path(pictures), Path(output), {"Deadly": Deadly, "plain": Preprocessing}[kind](), 2)


def _embed(pictures: Path, output: Path, preprocessing: Preprocessing, workers: int) -> None:
    torch.manual_seed(0)
    encoder = build_encoder(EncoderConfig("deterministic", dim=8), 1, (8, 16)).eval()
    config = EmbeddingConfig(
        pictures, "tiny", output, num_workers=workers, batch=64, max_rejects=0.02
    )
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != HERE]
    small = patch("rcir.encoders.batches.BLOCK_SIZE", 512)
    with (
        small,
        patch.object(embedding, "load_model", lambda *_: (encoder, preprocessing, "tiny@1")),
    ):
        embedding.embed_pictures(config)


def kills(folder: Path) -> dict[str, float]:
    """Return whether vectors are the same after kills, and the share of rejected pictures."""
    rng = np.random.default_rng(0)
    pictures = folder / "tiny" / "pictures"
    pictures.mkdir(parents=True)
    for row in range(KILLED):
        path = pictures / f"{row:06d}.png"
        Image.fromarray(rng.integers(0, 256, (8, 16), dtype=np.uint8)).save(path)
        if row % 100 == 50:
            path.write_bytes(path.read_bytes()[:40])
    step("embed", pictures, folder / "whole", "plain")
    step("embed", pictures, folder / "worker", "Deadly")
    command = [sys.executable, __file__, *(["--short"] * sized(0, 1)), "--step", "embed"]
    command += [str(pictures), str(folder / "driver"), "plain"]
    process = subprocess.Popen(command, start_new_session=True)
    while not [*folder.glob("driver/.parts/0*.parquet")]:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, 9)
    process.wait()
    step("embed", pictures, folder / "driver", "plain")
    whole, *others = (read_all_vectors(folder / name) for name in ("whole", "worker", "driver"))
    same = all(
        np.array_equal(other.vectors, whole.vectors) and other.ids == whole.ids for other in others
    )
    rejected = len(read_rejects(folder / "whole.rejects.csv")) / (KILLED // 100)
    return {
        "identical_after_kills": float(same and (folder / "tiny/died").exists()),
        "rejects": rejected,
    }


if __name__ == "__main__":
    main()
