"""The folder of one training run: what training writes and calibration reads.

run.json             configuration, MLflow run, state
checkpoints/         one folder per kept epoch, see `training.checkpoint`
trained_on.json      pictures and classes it was trained on, see `rcir.runs.trained_on`
metrics.json         of every epoch, logged to MLflow or not, see `training.history`
lock                 held by the process that trains
encoder.safetensors  the chosen weights, once training is finished
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rcir import tracking
from rcir.data import DataConfig, Preprocessing
from rcir.encoders import EncoderConfig
from rcir.encoders.base import Encoder
from rcir.errors import InvalidData
from rcir.files import write_json
from rcir.retrieval.stored_parts import load_encoder, save_encoder

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
        """The MLflow run."""
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

    def encoder(self) -> Encoder:
        """The trained encoder, or `InvalidData` if training is not finished."""
        if not self.finished:
            raise InvalidData(
                f"the training in {self.path} is not finished: run the same training command "
                "again, it continues from the last checkpoint"
            )
        try:
            config = EncoderConfig(**self.config["encoder"])
        except (KeyError, TypeError) as error:
            raise InvalidData(
                f"{self.path / RUN_FILE} was written by another version of rcir ({error}): train "
                "again"
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
