"""Models that are not trained: pictures in place of vectors, and a model in place of a run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.config import CalibrationConfig, CertificationConfig
from rcir.data.catalogue import DataConfig
from rcir.errors import InvalidConfig, InvalidData, printable
from rcir.files import checksum
from rcir.retrieval.pictures import PICTURES
from rcir.retrieval.retriever import Retriever
from rcir.runs.bucket import local_folder
from rcir.terminal import console

if TYPE_CHECKING:  # vectors need no torch
    from rcir.data.folders import Pictures
    from rcir.data.preprocessing import Preprocessing
    from rcir.encoders import Encoder
    from rcir.runs import RunFolder

VECTORS = "vectors"  # folder in the output


@dataclass(frozen=True)
class PictureModel:
    """What embedded the pictures of gallery and queries, and the folders in which they are."""

    encoder: Encoder
    preprocessing: Preprocessing
    gallery: Path
    queries: Path

    def attach(self, retriever: Retriever) -> None:
        """Give a retriever of the pictures' vectors the encoder, and the place of the pictures."""
        try:
            retriever.attach_encoder(self.encoder, self.preprocessing)
        except InvalidConfig as error:  # a method that compares more than vectors
            console.print(f"note: the retriever accepts vectors only: {error}", soft_wrap=True)
        if files_in(self.gallery, retriever.ids.tolist()):
            retriever.origin[PICTURES] = str(self.gallery)
        else:
            console.print("note: no pictures are shown, because ids of items are not their paths")


def files_in(folder: Path, names: Sequence[str]) -> list[Path] | None:
    """Return the files in a folder by their names; None unless all are there."""
    files = [folder / name for name in names]
    return files if all(file.is_file() for file in files) else None


def embed_pictures_of(
    config: CertificationConfig,
) -> tuple[CertificationConfig, PictureModel | None]:
    """Return the configuration with files of vectors in place of pictures, and their model.

    Vectors that the output holds already are not computed again.
    """
    if config.model is None:
        place = Path(config.gallery)
        if place.is_dir() and not any(place.glob("*.parquet")):
            raise InvalidConfig(
                f"{place} is a folder without files of vectors: if it holds pictures, name a model "
                "that embeds them, such as --model timm:tf_efficientnet_lite0"
            )
        return config, None
    from rcir.data.manifest import list_pictures
    from rcir.runs.config import EmbeddingConfig
    from rcir.runs.embedding import embed_pictures

    folder = local_folder(Path(config.output)) / VECTORS
    folder.mkdir(parents=True, exist_ok=True)
    files, folders = {}, {}
    for part in ("gallery", "queries"):
        place = Path(getattr(config, part) or config.gallery)
        folders[part] = (place if place.is_dir() else place.parent).absolute()
        if getattr(config, part) is not None:
            pictures = list_pictures(place)
            if config.matches is None:
                _require_labels(place, pictures)
            # Another folder for other pictures or labels, or for another model.
            listed = [config.model, config.checkpoint, pictures.ids, dict(pictures.columns)]
            shards = folder / f"{part}-{_digest(listed)}"
            files[part] = str(shards)
            encoder, preprocessing = embed_pictures(
                EmbeddingConfig(
                    place,
                    config.model,
                    shards,
                    config.checkpoint,
                    shards=1,
                    max_rejects=config.max_rejects,
                )
            )
    embedded = replace(config, gallery=files["gallery"], queries=files.get("queries"))
    return embedded, PictureModel(encoder, preprocessing, **folders)


def _require_labels(place: Path, pictures: Pictures) -> None:
    """Raise `InvalidData` unless all pictures have labels or places, before they are embedded."""
    columns = pictures.columns
    if "label" not in columns and "labels" not in columns and not {"x", "y"} <= columns.keys():
        raise InvalidData(
            f"{place} has {len(pictures)} pictures but no class folders: use class folders, "
            "FOLDER/apple/1.jpg, or a table with a column label, labels, or x and y"
        )
    labels = columns.get("label", ())
    alone = [pictures.ids[row] for row, label in enumerate(labels) if label is None]
    if alone:
        raise InvalidData(
            f"{len(alone)} pictures of {place} are outside of class folders, such as "
            f"{printable(alone[0])}: move them into one, or out of {place}"
        )


def _digest(values: Any) -> str:
    """Return a short digest of plain values."""
    plain = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(plain.encode()).hexdigest()[:8]


def untrained_run(config: CalibrationConfig) -> RunFolder:
    """Return a run of a model: with the validation and record in MLflow of a training, no epoch."""
    assert config.model is not None
    from rcir.encoders import EncoderConfig
    from training.config import TrainingConfig
    from training.run import train

    data = config.data or DataConfig()
    weights = None
    if config.checkpoint is not None and Path(config.checkpoint).is_file():
        weights = checksum(Path(config.checkpoint))
    digest = _digest([config.model, weights, asdict(data)])
    return train(
        TrainingConfig(
            re.sub(r"[^\w.-]+", "-", f"{config.model} {data.name} {digest}"),
            max_rejects=config.max_rejects,
            num_workers=config.num_workers,
            use_gpu=config.use_gpu,
            data=data,
            encoder=EncoderConfig(
                "pretrained",
                config.model,
                "avg",
                pretrained=config.checkpoint is None,
                checkpoint_path=config.checkpoint,
            ),
        )
    )
