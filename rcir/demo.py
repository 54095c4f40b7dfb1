"""`rcir demo`: calibrate, measure and retrieve on photographs of birds, or on digits."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from calibration import (
    CalibrationConfig,
    CertificationConfig,
    Outcome,
    calibrate,
    certify,
    cost,
    print_table,
    promise,
    write_results,
)
from rcir.data import Augmentation, DataConfig, data_root, read_image
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
    "photographs",
    "vectors",
)
MODEL = "timm:tf_efficientnet_lite0"
MARKER, EMBEDDINGS = ".rcir-demo", "embeddings"
SHOWN_LABELS, KINDS = 12, 50
QUERIES = {"easy": 0.05, "medium": 0.6, "hard": 0.9}  # quantiles of the uncertainty


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
    _print_next_commands(outcome, example)


def find_photographs() -> tuple[Path, Path] | None:
    """Return the folder of CUB-200-2011 and a file of weights below RCIR_DATA; None without both.

    The weights are those of EfficientNet-Lite0, in `models`.
    """
    root = data_root(DataConfig())
    weights = root / "models" / f"{MODEL.partition(':')[2]}.safetensors"
    folders = [*root.glob("CUB_200_2011/images"), *root.glob("*/CUB_200_2011/images")]
    return (folders[0], weights) if folders and weights.is_file() else None


def run_on_photographs(output: Path, folder: Path, weights: Path) -> None:
    """Calibrate a model that is not trained on class folders, and query new photographs.

    One photograph of each kind, the last by name, is not in the gallery.
    """
    clear_output(output)
    gallery, queries = output / "photographs", {}
    print(f"Photographs: {folder}, by {MODEL} as it is")
    for place in sorted(path for path in folder.iterdir() if path.is_dir())[:KINDS]:
        *files, queries[place.name] = sorted(place.glob("*.jpg"))
        (gallery / place.name).mkdir(parents=True)
        for file in files:
            _link(file, gallery / place.name / file.name)
    outcome = certify(
        CertificationConfig(str(gallery), model=MODEL, checkpoint=str(weights), output=str(output))
    )
    print_table(outcome.evaluation)
    answers = outcome.retriever.retrieve(list(queries.values()), ALPHA, DELTA)
    order = np.argsort([answer.uncertainty for answer in answers], kind="stable")
    kinds = list(queries)
    (output / "queries").mkdir()
    print(f"\nThree new photographs and their sets at alpha = {ALPHA}:")
    for name, quantile in QUERIES.items():
        row = int(order[int(quantile * len(order))])
        kind, labels = kinds[row], answers[row].labels or ()
        path = output / "queries" / f"{name}.png"
        Image.fromarray(read_image(queries[kind], channels=3)).save(path)
        verdict = "right" if kind in labels else "wrong"
        print(f"{name:>6}: {kind} -> {', '.join(map(str, labels))} ({verdict})")
    for sentence in (promise(outcome.evaluation), cost(outcome.evaluation)):
        console.print(sentence)
    _print_next_commands(outcome, path)


def _link(file: Path, place: Path) -> None:
    """Link a file, or copy it to another file system."""
    try:
        os.link(file, place)
    except OSError:
        shutil.copyfile(file, place)


def _print_next_commands(outcome: Outcome, example: Path) -> None:
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
    for name, quantile in QUERIES.items():
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
