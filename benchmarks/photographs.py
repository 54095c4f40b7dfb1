"""The recipe for pictures of one's own, from nothing, against principal components of the pixels.

`configs/own-folder.yaml` on class folders of three sets: photographs of birds (50 kinds of CUB-200-
2011, shrunk to 64 pixels), drawings (240 characters of Omniglot) and clothes (400 pictures of each
kind of Fashion-MNIST). Half of the classes train, drawn at random but for the birds, whose first
half does. Queries are of the other classes, and so is the gallery that they share with the
components, which are fitted to all pictures of the training classes. Of 32, 64 and 128 components,
whitened or not, the best on these very queries count. Sets named `_lite0` are the same pictures by
EfficientNet-Lite0 as ImageNet left it, the birds at their own size. The AUROC says how well a first
picture of another class is told from a right one: by one minus the cosine to it, and by the share
of the first 30 neighbours that do not have its label. Trained runs in `--runs` are used again.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
from common import parser, report, sized
from cub import KINDS, MODEL, birds, weights
from numpy.typing import NDArray
from PIL import Image

from rcir.config import parse
from rcir.data import DataConfig, Preprocessing, Splits, data_root, load_splits
from rcir.data.datasets.handwriting import read_omniglot
from rcir.data.datasets.small_images import read_fashion_mnist
from rcir.encoders import Encoder, EncoderConfig, build_encoder, model_preprocessing
from rcir.encoders.batches import embed
from rcir.index import build_index
from rcir.metrics import OutOfDistribution
from rcir.torch_settings import keep_freed_memory
from training import TrainingConfig, train

RECIPE = Path(__file__).parents[1] / "configs" / "own-folder.yaml"
GREY = ("--preprocessing.channels", "1", "--preprocessing.size")
OPTIONS = {
    "cub50": (),
    "omniglot": (*GREY, "[32, 32]", "--augmentation.flip", "false"),
    "fashion": (*GREY, "[28, 28]"),
}
SIDE, NEIGHBOURS, COMPONENTS = 64, 30, (32, 64, 128)
FIRST, PICTURES, CHARACTERS = sized((1, 400, 240), (21, 12, 12))
SHORTER = sized((), ("--epochs", "1", "--batch", "16"))
Vectors = NDArray[np.float32]
Labels = NDArray[np.int64]


def pictures_of_birds() -> Iterator[tuple[str, Image.Image]]:
    """Photographs by the name of their file."""
    with tarfile.open(Path(os.environ["RCIR_DATA"], "cub200-50", "CUB_200_2011.tar")) as archive:
        seen: dict[str, int] = {}
        for member in archive:
            if not member.name.endswith(".jpg"):
                continue
            kind, name = member.name.split("/")[-2:]
            seen[kind] = seen.get(kind, 0) + 1
            file = archive.extractfile(member)
            if FIRST <= int(kind[:3]) <= KINDS[-1] and seen[kind] <= PICTURES and file is not None:
                yield f"{kind}/{Path(name).stem}", Image.open(file).resize((SIDE, SIDE))


def pictures_of(name: str) -> Iterator[tuple[str, Image.Image]]:
    """The pictures of a set, by class and name."""
    if name == "cub50":
        yield from pictures_of_birds()
        return
    root = data_root(DataConfig())
    images = (read_omniglot(root) if name == "omniglot" else read_fashion_mnist(root)).train
    labels = np.unique(images.labels)
    if name == "omniglot":
        labels = np.random.default_rng(0).permutation(labels)[:CHARACTERS]
    for label in labels:
        for row in np.flatnonzero(images.labels == label)[:PICTURES]:
            yield f"{label}/{row}", Image.fromarray(images.images[row])


def folder_of(name: str, runs: Path) -> Path:
    """Class folders of a set, written once."""
    folder = runs / "pictures" / name
    if not folder.exists():
        begun = folder.with_name(f"{name}.begun")
        for path, image in pictures_of(name):
            (begun / path).parent.mkdir(parents=True, exist_ok=True)
            image.save(begun / f"{path}.png")
        begun.rename(folder)
    return folder.absolute()


def configuration(name: str, runs: Path) -> TrainingConfig:
    """The recipe for a folder."""
    folder = folder_of(name, runs)
    options: dict[str, object] = {"path": str(folder)}
    if name == "cub50":
        kinds = sorted(each.name for each in folder.iterdir())
        options["train"] = [kind for kind in kinds if int(kind[:3]) not in KINDS]
    given = ["--config", str(RECIPE), "--name", f"photographs-{name}", "--storage", str(runs)]
    given += ["--data.options", json.dumps(options), *OPTIONS[name], *SHORTER]
    return parse(TrainingConfig, given, "photographs", "")


def scores(gallery: Vectors, queries: Vectors, labels: tuple[Labels, Labels]) -> dict[str, float]:
    """Recall at 1, and AUROC of a wrong first picture, of searches by the cosine."""
    gallery, queries = (
        rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (gallery, queries)
    )
    distances, positions = build_index(gallery).search(queries, NEIGHBOURS)
    candidates = labels[0][positions]
    right = candidates[:, 0] == labels[1]
    stated = {
        "one_minus_cosine": distances[:, 0].astype(np.float64) ** 2 / 2,
        "votes": 1 - np.mean(candidates == candidates[:, :1], axis=1),
    }
    areas = {
        name: OutOfDistribution.of(values[right], values[~right]).auroc
        for name, values in stated.items()
    }
    return {"recall": float(right.mean()), **areas}


def components(config: TrainingConfig, splits: Splits) -> float:
    """The best recall at 1 of principal components of the pixels."""

    def pixels(*parts: str) -> Vectors:
        images = [config.preprocessing(getattr(splits, part).images) for part in parts]
        return np.concatenate([each.flatten(1).numpy() for each in images])

    fitted = pixels("train", "validation")
    mean = fitted.mean(axis=0)
    _, deviations, axes = np.linalg.svd(fitted - mean, full_matrices=False)
    gallery, queries = pixels("gallery") - mean, pixels("tuning", "calibration", "test") - mean
    projected = []
    for count, whitened in product(COMPONENTS, (False, True)):
        project = (axes[:count] / (deviations[:count, None] if whitened else 1)).T
        projected.append(scores(gallery @ project, queries @ project, labels_of(splits))["recall"])
    return max(projected)


def labels_of(splits: Splits) -> tuple[Labels, Labels]:
    """Labels of gallery and queries."""
    asked = (splits.tuning, splits.calibration, splits.test)
    return splits.gallery.labels, np.concatenate([part.labels for part in asked])


def ids_of(splits: Splits) -> tuple[list[str], list[str]]:
    """Ids of gallery and queries."""
    asked = (splits.tuning, splits.calibration, splits.test)
    return splits.gallery.ids, [name for part in asked for name in part.ids]


def embedded(
    encoder: Encoder, preprocessing: Preprocessing, splits: Splits
) -> tuple[Vectors, Vectors]:
    """Vectors of gallery and queries."""
    parts = (splits.gallery, splits.tuning, splits.calibration, splits.test)
    gallery, *asked = (embed(encoder, preprocessing, part.images).vectors.numpy() for part in parts)
    return gallery, np.concatenate(asked)


def by_the_recipe(config: TrainingConfig, splits: Splits) -> tuple[tuple[Vectors, Vectors], float]:
    """Vectors by the trained encoder, and the seconds of its training."""
    run = train(config)
    epochs = json.loads((run.path / "metrics.json").read_text()).values()
    vectors = embedded(run.encoder(), run.preprocessing, splits)
    return vectors, sum(epoch["seconds"] for epoch in epochs)


def birds_as_imagenet_left_it(splits: Splits) -> tuple[Vectors, Vectors]:
    """Vectors of the same birds, at their own size, by EfficientNet-Lite0."""
    table = birds()
    ids = [Path(name).with_suffix("").as_posix() for name in table.ids or []]
    rows = {name: row for row, name in enumerate(ids)}
    gallery, queries = (
        table.vectors[[rows[name.removesuffix(".png")] for name in ids]] for ids in ids_of(splits)
    )
    return gallery, queries


def as_imagenet_left_it(splits: Splits) -> tuple[Vectors, Vectors]:
    """Vectors of the same pictures by EfficientNet-Lite0."""
    config = EncoderConfig("pretrained", MODEL, "avg", checkpoint_path=str(weights()))
    preprocessing = model_preprocessing(config)
    encoder = build_encoder(config, preprocessing.channels, preprocessing.size)
    keep_freed_memory()
    return embedded(encoder, preprocessing, splits)


def main() -> None:
    """Train, measure and print."""
    command = parser(__doc__)
    runs = Path("runs", sized("photographs", "photographs-short"))
    command.add_argument("--runs", type=Path, default=runs, help="pictures and trained runs")
    asked = command.parse_args()
    rows, figures = [], {}
    for name in OPTIONS:
        config = configuration(name, asked.runs)
        splits = load_splits(config.data)
        base = components(config, splits)
        vectors, seconds = by_the_recipe(config, splits)
        pretrained = birds_as_imagenet_left_it if name == "cub50" else as_imagenet_left_it
        embeddings = {name: (vectors, f"{seconds:.0f}"), f"{name}_lite0": (pretrained(splits), "-")}
        for which, (pair, took) in embeddings.items():
            scored = scores(*pair, labels_of(splits))
            ratio = scored["recall"] / base
            areas = [f"{scored[each]:.3f}" for each in ("one_minus_cosine", "votes")]
            row = [which, f"{base:.3f}", f"{scored['recall']:.3f}", f"{ratio:.2f}", *areas, took]
            rows.append(row)
            figures |= {
                f"{which}_recall_over_pca": ratio,
                f"{which}_auroc_miss": scored["votes"],
                f"{which}_auroc_miss_one_minus_cosine": scored["one_minus_cosine"],
            }
    areas_of = ("AUROC, 1 - cosine", "AUROC, votes")
    columns = ("set", "R@1, pixels", "R@1, ours", "ratio", *areas_of, "seconds")
    report("Unseen classes, trained from nothing", columns, rows, figures, asked.json)


if __name__ == "__main__":
    main()
