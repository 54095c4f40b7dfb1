"""A retriever with a guarantee for pictures of your own.

    python examples/own_images.py --run runs/digits-btl --images PICTURES --output my-retriever

PICTURES holds one folder per label (class, place, product) with image files in it. Half of the
pictures become the gallery; the others are queries: a third fits the score function, the rest
calibrates. No images are left to test the guarantee on.
"""

from __future__ import annotations

import argparse
from hashlib import sha256
from pathlib import Path

import numpy as np

import rcir
from rcir.data import ImageSet, read_class_folders
from rcir.errors import reporting_errors
from rcir.risk import minimum_alpha
from rcir.runs import RunFolder, find_run


def build(run: RunFolder, pictures: ImageSet, seed: int = 0) -> rcir.Retriever:
    """Index half of the pictures and calibrate on the others."""
    contents = [sha256(path.read_bytes()).hexdigest() for path in pictures.images]
    _, different = np.unique(contents, return_index=True)
    pictures = pictures.subset(np.sort(different))  # a copy in two parts would void the guarantee
    order = np.random.default_rng(seed).permutation(len(pictures))
    half, sixth = len(order) // 2, len(order) // 6
    gallery, tuning, calibration = (
        pictures.subset(rows) for rows in np.split(order, [half, half + sixth])
    )
    retriever = rcir.Retriever.build(run.encoder(), run.preprocessing, gallery)
    # The size rule is fitted on queries that calibrate nothing.
    retriever.calibrate_splits(
        retriever.search_labelled(tuning), retriever.search_labelled(calibration)
    )
    return retriever


def main() -> None:
    """Build and save the retriever, and print the smallest alpha that it can guarantee."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="folder of a training run")
    parser.add_argument("--images", required=True, type=Path, help="folder of label folders")
    parser.add_argument("--output", required=True, type=Path, help="folder for the retriever")
    options = parser.parse_args()
    with reporting_errors():
        _run(options)


def _run(options: argparse.Namespace) -> None:
    retriever = build(find_run(options.run), read_class_folders(options.images, tell=print))
    retriever.save(options.output)
    smallest = minimum_alpha(0.1, retriever.require_calibration().miss_rule.evidence)
    print(
        f"{options.output}: {len(retriever.ids)} images; smallest alpha at delta 0.1: "
        f"{'none' if smallest is None else round(smallest, 4)}"
    )


if __name__ == "__main__":
    main()
