"""The folder of a training run.

run.json                configuration, MLflow run, state
checkpoints/            one folder for each that is kept, see `training.checkpoint`
trained_on.json         images and classes it was trained on, see `TrainedOn`
metrics.json            of epochs and some steps, in MLflow or not yet, see `training.checkpoint`
training.log            output of the first Ray worker: a line for each epoch, and warnings
lock                    held by the process that trains
encoder.safetensors     the chosen weights, once training is finished
validation.safetensors  what was measured on the validation images, see `rcir.runs.results`
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from rcir import tracking
from rcir.config import flatten
from rcir.data import DataConfig, Preprocessing
from rcir.data.records import ImageSet, Splits
from rcir.data.repeats import digests
from rcir.encoders import EncoderConfig
from rcir.encoders.base import Encoder, stored_encoder
from rcir.encoders.weights import load_encoder
from rcir.errors import InvalidConfig, InvalidData
from rcir.files import write_json
from rcir.runs.bucket import RUN_FILE, fetch, place_of
from rcir.storage import is_uri
from rcir.trust import reading

TRAINED_ON_FILE, ENCODER_FILE = "trained_on.json", "encoder.safetensors"
LOCK_FILE = "lock"
SWEEP_FILE = "sweep.json"  # in the folder of a sweep, which holds those of its trials
FOLDER_TAG = "rcir.folder"
# Options that do not affect the result: they may change when a run continues.
RESOURCES = (
    *("num_workers", "max_failures", "use_gpu", "threads", "compile", "storage", "data.root"),
    *("preprocessing.max_pixels", "max_rejects", "memory_gib", "checkpoint_steps", "timeout_s"),
)
QUERIES = ("tuning", "calibration", "test")
MAX_NAMES = 5  # in a message
REMEDY = (
    "train again on the present data set, or restore its files. (Training classes do not change "
    "when a folder grows if data.options.train names them, nor when a table with a column split "
    "grows.)"
)


@dataclass(frozen=True)
class TrainedOn:
    """Training and validation images of a run at the time of training."""

    images: NDArray[np.bytes_]  # (n,) their unique digests, sorted, see `rcir.data.repeats`
    classes: list[str]  # see `list_classes`; sorted
    zero_shot: bool  # True if no query was of these classes

    @classmethod
    def from_splits(cls, splits: Splits) -> Self:
        """Return the record of a training on these splits."""
        parts = (splits.train, splits.validation)
        digested = np.concatenate([digests(part.images) for part in parts])
        classes = np.unique(np.concatenate([list_classes(part) for part in parts]))
        query_classes = np.concatenate([list_classes(getattr(splits, name)) for name in QUERIES])
        zero_shot = len(classes) > 0 and not np.isin(query_classes, classes).any()
        return cls(np.unique(digested), classes.tolist(), bool(zero_shot))

    def merge(self, later: Self) -> Self:
        """Return the union with the record of a later training; zero-shot if either is."""
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
        """Read what `write` wrote."""
        path = folder / TRAINED_ON_FILE
        try:
            values = json.loads(path.read_text())
            return cls(
                np.array([str(digest) for digest in values["images"]], np.bytes_),
                [str(name) for name in values["classes"]],
                bool(values["zero_shot"]),
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidData(
                f"{path} is missing or damaged ({error!r}): train again, under another name"
            ) from error

    def require_unseen(self, splits: Splits) -> None:
        """Raise `InvalidData` if a query, or in a zero-shot run its class, was trained on.

        Both happen if the data set has changed, such as a folder that is now divided differently.
        """
        names: list[str] = []
        classes: set[str] = set()
        for part in QUERIES:
            queries: ImageSet = getattr(splits, part)
            seen = np.isin(digests(queries.images), self.images)
            names += [queries.ids[row] for row in np.flatnonzero(seen).tolist()]
            if self.zero_shot:
                classes.update(np.intersect1d(list_classes(queries), self.classes).tolist())
        for kind, seen_names in (("classes of ", sorted(classes)), ("", names)):
            if seen_names:
                first = ", ".join(seen_names[:MAX_NAMES])
                first += ", ..." * (len(seen_names) > MAX_NAMES)
                raise InvalidData(
                    f"the run was trained on {len(seen_names)} {kind}of the queries ({first}): "
                    f"{REMEDY}"
                )


def list_classes(images: ImageSet) -> NDArray[np.str_]:
    """Return the attribute "class" (n,), else the labels; none where images have several labels."""
    if "class" in images.attributes:
        return images.attributes["class"].astype(str)
    return np.array([] if images.labels is None else images.labels, str)


@dataclass(frozen=True)
class RunFolder:
    """A training run on disk.

    Attributes:
        path: the folder; of a run in a bucket, its copy on this machine.
        config: its configuration, as plain values.
        mlflow_run: id of its MLflow run.
        tracking_uri: the tracking store of that run, without user and password.
        finished: True if training is complete.
    """

    path: Path
    config: dict[str, Any]
    mlflow_run: str
    tracking_uri: str
    finished: bool = False

    def __post_init__(self) -> None:
        uri = tracking.without_credentials(self.tracking_uri)
        object.__setattr__(self, "tracking_uri", uri)

    @property
    def tracked(self) -> tracking.TrackedRun:
        """The MLflow run; `UntrustedFolder` if its store is neither configured nor allowed."""
        uri = tracking.require_store(self.tracking_uri)
        return tracking.TrackedRun(self.mlflow_run, uri)

    @property
    def place(self) -> Path:
        """The folder, or its URI if it is in a bucket."""
        return place_of(self.path)

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

    def encoder(self, trust_code: bool = False) -> Encoder:
        """Load the trained encoder.

        Args:
            trust_code: import a class outside rcir that the run names, which runs its code.

        Raises:
            InvalidData: training is not finished.
            UntrustedFolder: the run names a class that is not allowed.
        """
        if not self.finished:
            raise InvalidData(f"the training in {self.path} is not finished: train it again")
        with reading(trust_code):
            try:
                config = EncoderConfig(**stored_encoder(self.config["encoder"]))
            except (KeyError, TypeError) as error:
                raise InvalidData(
                    f"{self.path / RUN_FILE} was written by another version of rcir ({error}): "
                    "train again"
                ) from error
            return load_encoder(config, self.preprocessing, self.path / ENCODER_FILE)


def read_run(folder: Path) -> RunFolder | None:
    """Return the training run in a folder, or None if there is none."""
    path = folder / RUN_FILE
    if not path.is_file():
        return None
    try:
        return RunFolder(**(json.loads(path.read_text()) | {"path": folder}))
    except (ValueError, TypeError) as error:
        raise InvalidData(
            f"{path} is damaged ({error}): remove {folder} and train again"
        ) from error


@contextmanager
def lock_run(folder: Path, patience: float = 0) -> Iterator[None]:
    """Keep other processes from training in a folder, which is created if needed.

    Wait `patience` seconds for one that trains there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / LOCK_FILE, timeout=patience):
            yield
    except Timeout as error:
        raise InvalidConfig(
            f"{folder} is being trained by another process: stop it, or choose another name"
        ) from error


def as_json(value: Any) -> Any:
    """Return a value as it is after a round trip through JSON."""
    return json.loads(json.dumps(value))


def require_same_options(
    old: Mapping[str, Any], new: Mapping[str, Any], ignored: Collection[str], found: str
) -> None:
    """Raise `InvalidConfig` if two plain configurations differ, except in ignored options."""
    old, new = flatten(old), flatten(new)
    names = sorted((old.keys() | new.keys()) - set(ignored))
    changed = [name for name in names if old.get(name) != new.get(name)]
    if changed:
        raise InvalidConfig(
            f"{found} with another {', '.join(changed)}: choose another name, or remove that folder"
        )


def find_run(reference: str) -> RunFolder:
    """Return the training run in a folder or bucket, or with an MLflow id.

    Raises `InvalidData` if there is none.
    """
    run = read_run(Path(reference)) or read_run(run_folder(reference))
    if run is None:
        raise InvalidData(
            f"{reference} is not a folder of a training run: pass the folder that `rcir train` "
            "printed"
        )
    return run


def run_title(folder: Path) -> str:
    """Return the name of a run in MLflow; that of a trial begins with the name of its sweep."""
    place = folder.resolve()
    is_trial = (place.parent / SWEEP_FILE).is_file()
    return f"{place.parent.name}/{place.name}" if is_trial else place.name


def run_folder(reference: str) -> Path:
    """Return the folder of a path or an MLflow id, or a copy of the one of a URI."""
    if is_uri(reference):
        return fetch(Path(reference))
    if Path(reference).is_dir():
        return Path(reference)
    tracked = tracking.find_tracked_run(reference)
    folder = tracked.tag(FOLDER_TAG) if tracked else None
    if is_uri(folder):
        return fetch(Path(str(folder)))
    if folder is None or not Path(folder).is_dir():
        reason = (
            f"its folder {folder} is not on this machine" if folder else "MLflow has no such id"
        )
        raise InvalidData(
            f"{reference} is not a folder, and {reason}: pass the folder of a run, sweep or "
            "calibration"
        )
    return Path(folder)
