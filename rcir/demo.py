"""`rcir demo`: everything once, on data that needs no download."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from calibration import Calibrated, CalibrationConfig, calibrate, print_table, write_results
from rcir.data import Augmentation, DataConfig, read_image
from rcir.encoders import EncoderConfig
from rcir.errors import InvalidConfig
from rcir.levels import ALPHA, DELTA
from training import TrainingConfig, train

OUTPUTS = ("training", "queries", "retriever", "report.html", "results.json", "test.safetensors")
MARKER, EMBEDDED = ".rcir-demo", "embeddings"


def run(output: Path, method: str = "btl") -> None:
    """Train, calibrate, measure and retrieve on handwritten two-digit numbers.

    Args:
        output: folder to write to.
        method: of the encoder, see `rcir.encoders.EncoderConfig`.

    Raises:
        InvalidConfig: there is no such method, or the folder holds anything else.
    """
    started = time.monotonic()
    torch.set_num_threads(1)  # on images this small, more threads only wait for each other
    encoder = EncoderConfig(method)
    _clear(output)
    config = TrainingConfig(
        name="training",
        data=DataConfig("digits", seed=1),  # options were chosen on seed 0
        storage=str(output),
        augmentation=Augmentation(occlusion=0.15),
        encoder=encoder,
        loss={"kl_scale": 1e-5} if method == "btl" else {},
    )
    print(f"Training: {method} on two-digit numbers, occluded at random")
    trained = train(config)
    print("\nCalibration: on unseen classes, half of the digits occluded")
    outcome = calibrate(CalibrationConfig(str(trained.path), output=str(output)))
    print_table(outcome.evaluation)
    example = _show_queries(outcome, output / "queries")
    write_results(output / "results.json", outcome.evaluation, time.monotonic() - started)
    print(f"\nreport:    {outcome.report}\nretriever: {outcome.folder}\ntry:")
    print(
        f"  {sys.argv[0]} retrieve {example} --retriever {outcome.folder} "
        f"--alpha {ALPHA} --delta {DELTA}"
    )
    print(f"explore it in a browser:\n  {sys.argv[0]} serve {outcome.folder}")


def _clear(output: Path) -> None:
    """Remove what an earlier demo wrote, killed or not; refuse a folder that holds anything else.

    A file that says whose folder it is, the first to come and the last to go, tells it.
    """
    if output.exists():
        names = {path.name for path in output.iterdir()} if output.is_dir() else {output.name}
        aside = {name for name in names if name.startswith(tuple(f".{part}-" for part in OUTPUTS))}
        marked = MARKER in names or (output / "training" / "run.json").is_file()
        if names and not (marked and names <= {*OUTPUTS, *aside, MARKER, EMBEDDED}):
            raise InvalidConfig(
                f"{output} exists and is not the output of a demo: it is left alone; name another "
                "folder with --output"
            )
        for name in names - {MARKER}:
            path = output / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).touch()


def _show_queries(outcome: Calibrated, folder: Path) -> Path:
    """Retrieve for three test queries, easy to hard; save them as PNG; return the hardest."""
    test = outcome.splits.test
    order = np.argsort(outcome.test.uncertainty, kind="stable")
    folder.mkdir()
    for name, quantile in (("easy", 0.05), ("medium", 0.6), ("hard", 0.9)):
        row = int(order[int(quantile * len(order))])
        path = folder / f"{name}.png"
        Image.fromarray(read_image(test.images[row], channels=1)).save(path)
        answer = outcome.retriever.retrieve(path, alpha=ALPHA, delta=DELTA)
        shown = " ".join(f"{label:02d}" for label in (answer.labels or ())[:12])
        more = f" + {answer.size - 12} more" if answer.size > 12 else ""
        number = int(np.asarray(test.labels)[row])
        print(
            f"{name:>6}: a {number:02d}, uncertainty {answer.uncertainty:.2g} -> "
            f"{answer.size} image{'s' * (answer.size > 1)}: {shown}{more}"
        )
    print(answer.guarantee)
    return path
