"""The folder of one training run: what training writes and calibration reads.

run.json             configuration, MLflow run, state
checkpoints/         one folder per kept epoch, see `training.checkpoint`
trained_on.json      pictures and classes it was trained on, see `TrainedOn`
metrics.json         of epochs and some steps, in MLflow or not yet, see `training.checkpoint`
training.log         what the first Ray worker printed: a line for each epoch, and warnings
lock                 held by the process that trains
encoder.safetensors  the chosen weights, once training is finished
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rcir import tracking
from rcir.data import DataConfig, Preprocessing
from rcir.data.records import ImageSet, Splits
from rcir.data.repeats import digests
from rcir.encoders import EncoderConfig
from rcir.encoders.base import Encoder
from rcir.errors import InvalidData
from rcir.files import write_json
from rcir.retrieval.stored_parts import load_encoder, save_encoder
from rcir.trust import reading

TRAINED_ON_FILE = "trained_on.json"
QUERIES = ("tuning", "calibration", "test")
NAMED = 5
REMEDY = (
    "train again on the data set as it is now, or restore its files as they were. (The classes "
    "that train stay the same while a folder grows if data.options.train names them, and while a "
    "table grows if it has a column split.)"
)


@dataclass(frozen=True)
class TrainedOn:
    """Training and validation images of a run, as they were when it was trained.

    Attributes:
        images: (n,) their digests, sorted, each once, see `rcir.data.repeats`.
        classes: their classes, sorted: the attribute "class" where the data set has it, else the
            labels; none where images have not one label each.
        zero_shot: whether no query was of these classes.
    """

    images: NDArray[np.bytes_]
    classes: list[str]
    zero_shot: bool

    @classmethod
    def of(cls, splits: Splits) -> Self:
        """The record of a training on these splits."""
        parts = (splits.train, splits.validation)
        digested = np.concatenate([digests(part.images) for part in parts])
        classes = np.unique(np.concatenate([classes_of(part) for part in parts]))
        query_classes = np.concatenate([classes_of(getattr(splits, name)) for name in QUERIES])
        zero_shot = len(classes) > 0 and not np.isin(query_classes, classes).any()
        return cls(np.unique(digested), classes.tolist(), bool(zero_shot))

    def joined(self, later: Self) -> Self:
        """The union with the record of a later training; zero-shot if one of the two was."""
        return type(self)(
            np.union1d(self.images, later.images),
            sorted({*self.classes, *later.classes}),
            self.zero_shot or later.zero_shot,
        )

    def write(self, folder: Path) -> None:
        """Write `trained_on.json` into the folder of a run, all of it or nothing."""
        plain = {"zero_shot": self.zero_shot, "classes": self.classes}
        write_json(folder / TRAINED_ON_FILE, plain | {"images": self.images.astype(str).tolist()})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read what `write` wrote.

        Raises:
            InvalidData: it is not there, as in a run of an earlier version, or damaged.
        """
        path = folder / TRAINED_ON_FILE
        try:
            values = json.loads(path.read_text())
            return cls(
                np.array([str(each) for each in values["images"]], np.bytes_),
                [str(name) for name in values["classes"]],
                bool(values["zero_shot"]),
            )
        except FileNotFoundError as error:
            raise InvalidData(
                f"there is no {path}, which says what the run was trained on: it is of an earlier "
                "version of rcir; train again, under another name"
            ) from error
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidData(f"{path} is damaged ({error!r}): train again") from error

    def require_unseen(self, splits: Splits) -> None:
        """Raise `InvalidData` if queries are among what was trained on.

        A query is if it is a picture that trained or validated; or, of a run that was zero-shot
        when it was trained, if its class is one that did. Either is so after the data set has
        changed, for instance where a folder grew and its classes are halved otherwise.
        """
        names: list[str] = []
        classes: set[str] = set()
        for part in QUERIES:
            queries: ImageSet = getattr(splits, part)
            seen = np.isin(digests(queries.images), self.images)
            names += [queries.ids[row] for row in np.flatnonzero(seen).tolist()]
            if self.zero_shot:
                classes.update(np.intersect1d(classes_of(queries), self.classes).tolist())
        if classes:
            raise InvalidData(
                f"the run was trained to be asked about classes that it never saw, and "
                f"{len(classes)} classes of the queries trained it "
                f"({_first_names(sorted(classes))}): {REMEDY}"
            )
        if names:
            raise InvalidData(
                f"the run was trained on {len(names)} of the queries ({_first_names(names)}): "
                f"{REMEDY}"
            )


def classes_of(images: ImageSet) -> NDArray[np.str_]:
    """(n,) names; none where images have not one label each."""
    if "class" in images.attributes:
        return images.attributes["class"].astype(str)
    return np.array([] if images.labels is None else images.labels, str)


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + ", ..." * (len(names) > NAMED)


# Options that say where and with what a run is trained, not what: its continuation may have others.
RESOURCES = (
    *("num_workers", "max_failures", "use_gpu", "threads", "compile", "storage", "data.root"),
)
RUN_FILE = "run.json"
ENCODER_FILE = "encoder.safetensors"
FOLDER_TAG = "rcir.folder"


@dataclass(frozen=True)
class RunFolder:
    """A training run on disk.

    Attributes:
        path: the folder.
        config: the configuration it was trained with, as plain values.
        mlflow_run: id of its MLflow run.
        tracking_uri: the tracking store that run is in.
        finished: whether training is complete.
    """

    path: Path
    config: dict[str, Any]
    mlflow_run: str
    tracking_uri: str
    finished: bool = False

    @property
    def tracked(self) -> tracking.TrackedRun:
        """The MLflow run.

        Raises:
            UntrustedFolder: its store is neither the configured one nor allowed.
        """
        tracking.require_store(self.tracking_uri)
        return tracking.TrackedRun(self.mlflow_run, self.tracking_uri)

    @property
    def data(self) -> DataConfig:
        """The data set it was trained on."""
        return DataConfig(**self.config["data"])

    @property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing it was trained with."""
        return Preprocessing.from_dict(self.config["preprocessing"])

    def write(self) -> None:
        """Write `run.json`, all of it or nothing."""
        values = asdict(self) | {"path": None}
        write_json(self.path / RUN_FILE, values)

    def save_encoder(self, encoder: Encoder) -> None:
        """Write the chosen weights."""
        save_encoder(encoder, self.path / ENCODER_FILE)

    def encoder(self, trust_code: bool = False) -> Encoder:
        """The trained encoder.

        Args:
            trust_code: import a class outside rcir that the run names, which runs its code.

        Raises:
            InvalidData: training is not finished.
            UntrustedFolder: the run names a class that is not allowed.
        """
        if not self.finished:
            raise InvalidData(
                f"the training in {self.path} is not finished: run the same training command "
                "again, it continues from the last checkpoint"
            )
        with reading(trust_code):
            try:
                config = EncoderConfig(**self.config["encoder"])
            except (KeyError, TypeError) as error:
                raise InvalidData(
                    f"{self.path / RUN_FILE} was written by another version of rcir ({error}): "
                    "train again"
                ) from error
            return load_encoder(config, self.preprocessing, self.path / ENCODER_FILE)


def read_run(folder: Path) -> RunFolder | None:
    """The training run in a folder, or None if there is none.

    Raises:
        InvalidData: its `run.json` cannot be read.
    """
    path = folder / RUN_FILE
    if not path.is_file():
        return None
    try:
        return RunFolder(**(json.loads(path.read_text()) | {"path": folder}))
    except (ValueError, TypeError) as error:
        raise InvalidData(
            f"{path} is damaged ({error}): remove {folder} and train again"
        ) from error


def find_run(reference: str) -> RunFolder:
    """The training run of a folder, or of the id of its MLflow run.

    Raises:
        InvalidData: there is no such run, or its folder is not on this machine.
    """
    run = read_run(Path(reference))
    if run is not None:
        return run
    tracked = tracking.find_tracked_run(reference)
    folder = tracking.run_tag(tracked, FOLDER_TAG) if tracked else None
    run = read_run(Path(folder)) if folder else None
    if run is None:
        where = f"its folder {folder} is not on this machine" if folder else "MLflow has no such id"
        raise InvalidData(
            f"{reference} is no folder of a training run, and {where}: give the folder that "
            "`python -m training` printed"
        )
    return run
