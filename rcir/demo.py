"""`rcir demo`: train, calibrate, measure and retrieve on data that needs no download."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from calibration import (
    CalibrationConfig,
    Outcome,
    calibrate,
    cost,
    print_table,
    promise,
    write_results,
)
from rcir.data import Augmentation, DataConfig, read_image
from rcir.encoders import EncoderConfig
from rcir.errors import InvalidConfig
from rcir.options import ALPHA, DELTA
from rcir.terminal import console
from training import OptimizerConfig, TrainingConfig, train

OUTPUT_NAMES = (
    "training",
    "queries",
    "retriever",
    "report.html",
    "results.json",
    "test.safetensors",
)
MARKER, EMBEDDINGS = ".rcir-demo", "embeddings"
SHOWN_LABELS = 12


def run(output: Path, method: str = "btl", epochs: int = 8) -> None:
    """Train an encoder, calibrate, measure and retrieve on handwritten two-digit numbers."""
    started = time.monotonic()
    torch.set_num_threads(1)  # more threads do not help with images this small
    config = TrainingConfig(
        name="training",
        data=DataConfig("digits", seed=1),  # options were chosen on seed 0
        storage=str(output),
        augmentation=Augmentation(occlusion=0.15),
        encoder=EncoderConfig(method),
        epochs=epochs,
        loss={"kl_scale": 1e-5} if method == "btl" else {},
        optimizer=OptimizerConfig(clip_norm=100),
    )
    clear_output(output)
    print(f"Training: {method} on pictures of two-digit numbers, digits hidden in part at random")
    trained = train(config)
    print("\nCalibration: on numbers that training has not seen, half of the digits hidden in part")
    outcome = calibrate(CalibrationConfig(str(trained.path), output=str(output)))
    evaluation = outcome.evaluation
    print_table(evaluation)
    example = _show_queries(outcome, output / "queries")
    write_results(output / "results.json", evaluation, time.monotonic() - started)
    assert outcome.splits.data is not None
    unseen = len(np.unique(np.asarray(outcome.splits.data.test.labels)))
    limit = (
        f"The {unseen} numbers of the gallery and the test queries are new to the encoder, but "
        "not to the calibration, which used queries of the same numbers: the promise does not "
        "cover a number that did not calibrate."
    )
    for sentence in (promise(evaluation), cost(evaluation), limit):
        console.print(sentence)
    print(f"\nThe report is {outcome.report}. Next, query one picture, or explore in a browser:")
    print(
        f"  {sys.argv[0]} retrieve {example} --retriever {outcome.folder} "
        f"--alpha {ALPHA} --delta {DELTA}"
    )
    print(f"  {sys.argv[0]} serve {outcome.folder}")


def clear_output(output: Path) -> None:
    """Remove the output of an earlier demo, killed or not; refuse a folder with anything else.

    A marker file, written first and removed last, shows that the folder is the demo's.
    """
    if output.exists():
        names = {path.name for path in output.iterdir()} if output.is_dir() else {output.name}
        aside = {
            name for name in names if name.startswith(tuple(f".{part}-" for part in OUTPUT_NAMES))
        }
        if names and not (MARKER in names and names <= {*OUTPUT_NAMES, *aside, MARKER, EMBEDDINGS}):
            raise InvalidConfig(
                f"{output} is not the output of a demo and is left alone: name another --output"
            )
        for name in names - {MARKER}:
            path = output / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).touch()


def _show_queries(outcome: Outcome, folder: Path) -> Path:
    """Retrieve for three test queries, easy to hard; save them as PNG; return the hardest."""
    assert outcome.splits.data is not None
    test = outcome.splits.data.test
    order = np.argsort(outcome.splits.test.results.uncertainty, kind="stable")
    folder.mkdir()
    print(f"\nThree test queries and their sets at alpha = {ALPHA}:")
    for name, quantile in (("easy", 0.05), ("medium", 0.6), ("hard", 0.9)):
        row = int(order[int(quantile * len(order))])
        path = folder / f"{name}.png"
        Image.fromarray(read_image(test.images[row], channels=1)).save(path)
        answer = outcome.retriever.retrieve(path, alpha=ALPHA, delta=DELTA)
        labels = answer.labels or ()
        numbers = " ".join(f"{label:02d}" for label in labels[:SHOWN_LABELS])
        if answer.size > SHOWN_LABELS:
            numbers += f" + {answer.size - SHOWN_LABELS} more"
        number = int(np.asarray(test.labels)[row])
        verdict = "right" if number in labels else "wrong"
        print(
            f"{name:>6}: a {number:02d}, uncertainty {answer.uncertainty:.2g} -> "
            f"{answer.size} image{'s' * (answer.size > 1)}: {numbers} ({verdict})"
        )
    print()
    return path
