"""Runs in their folders: trainings, trials of sweeps, outputs of calibrations.

What was measured of each is there, too, see `rcir.runs.results`. The folder of a training:

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
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from rcir import tracking
from rcir.config import flatten
from rcir.data import DataConfig, Preprocessing
from rcir.data.records import ImageSet, Splits
from rcir.data.repeats import digests
from rcir.encoders import EncoderConfig
from rcir.encoders.base import Encoder
from rcir.errors import InvalidData, RcirError
from rcir.files import write_json
from rcir.retrieval import storage
from rcir.retrieval.stored_parts import load_encoder, save_encoder
from rcir.risk import mean_size
from rcir.runs.results import TEST, VALIDATION, RunResults, Split
from rcir.trust import reading

RUN_FILE, SWEEP, TRAINED_ON_FILE = "run.json", "sweep.json", "trained_on.json"
ENCODER_FILE, RETRIEVER = "encoder.safetensors", "retriever"
FILES: Mapping[Split, str] = {"validation": VALIDATION, "test": TEST}
FOLDER_TAG = "rcir.folder"
CALIBRATION = "calibration"  # group of options in `Run.options`
# Options that say where and with what a run is trained, not what: its continuation may have others.
RESOURCES = (
    *("num_workers", "max_failures", "use_gpu", "threads", "compile", "storage", "data.root"),
    *("preprocessing.max_pixels", "max_rejects", "memory_gib"),
)
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
            InvalidData: it is missing or damaged.
        """
        path = folder / TRAINED_ON_FILE
        try:
            values = json.loads(path.read_text())
            return cls(
                np.array([str(each) for each in values["images"]], np.bytes_),
                [str(name) for name in values["classes"]],
                bool(values["zero_shot"]),
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidData(
                f"{path} is missing or damaged ({error!r}): train again, under another name"
            ) from error

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
                f"the run trained on {len(classes)} classes of the queries "
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


@dataclass(frozen=True)
class RunFolder:
    """A training run on disk.

    Attributes:
        path: the folder.
        config: the configuration it was trained with, as plain values.
        mlflow_run: id of its MLflow run.
        tracking_uri: the tracking store that run is in, without user and password.
        finished: whether training is complete.
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
        """The MLflow run.

        Raises:
            UntrustedFolder: its store is neither the configured one nor allowed.
        """
        uri = tracking.require_store(self.tracking_uri)
        return tracking.TrackedRun(self.mlflow_run, uri)

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
                f"the training in {self.path} is not finished: run the same command again"
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
    if run is None:
        folder, where = _tracked_folder(reference)
        run = read_run(folder) if folder else None
        if run is None:
            raise InvalidData(
                f"{reference} is no folder of a training run, and {where}: give the folder that "
                "`rcir train` printed"
            )
    return run


def _tracked_folder(run_id: str) -> tuple[Path | None, str]:
    """The folder of an MLflow run, wherever it is, and why it may not be of use."""
    tracked = tracking.find_tracked_run(run_id)
    folder = tracked.tag(FOLDER_TAG) if tracked else None
    if folder is None:
        return None, "MLflow has no such id"
    return Path(folder), f"its folder {folder} is not on this machine"


@dataclass(frozen=True)
class Run:
    """A run as it is found: its folder, options and results.

    Attributes:
        name: shown.
        folder: where it is.
        state: what became of it, such as "finished".
        options: of its training and calibration, by dotted name; empty if they are not known.
        measured: by split, what is there.
        reported: of a trial, its last metrics on the validation images, at delta = 0.1.
        tracked: by split, the run in MLflow that holds its metrics.
    """

    name: str
    folder: Path
    state: str
    options: dict[str, Any] = field(default_factory=dict)
    measured: dict[Split, RunResults] = field(default_factory=dict)
    reported: dict[str, float] = field(default_factory=dict)
    tracked: dict[Split, tracking.TrackedRun] = field(default_factory=dict)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders, the trials of a sweep best first; no two have one name.

    Raises:
        InvalidData: a folder holds no run, or one that is damaged.
    """
    runs = [run for folder in folders for run in _read(folder)]
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else replace(run, name=str(run.folder)) for run in runs
    ]


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of a sweep, which represents its trials."""
    return (folder / SWEEP).is_file()


def _read(folder: Path) -> list[Run]:
    """The run, or the trials of the sweep, in a folder."""
    if is_sweep(folder):
        return _trials(folder)
    run = _run(folder, folder.resolve().name)
    if run is None:
        raise InvalidData(
            f"{folder} holds no run ({RUN_FILE}, {SWEEP} or {TEST}): give the folder that "
            "`rcir train`, `rcir tune` or `rcir calibrate` wrote to"
        )
    return [run]


def run_folder(reference: str) -> Path:
    """The folder that a path or an MLflow id names.

    Raises:
        InvalidData: there is none on this machine.
    """
    if Path(reference).is_dir():
        return Path(reference)
    folder, where = _tracked_folder(reference)
    if folder is None or not folder.is_dir():
        raise InvalidData(
            f"{reference} is no folder, and {where}: give that of a run, sweep or calibration"
        )
    return folder


def _run(folder: Path, name: str) -> Run | None:
    """The run of a folder that training or calibration wrote, if it is one."""
    measured = {
        split: RunResults.read(folder / FILES[split])
        for split in get_args(Split)
        if (folder / FILES[split]).is_file()
    }
    trained = read_run(folder)
    if trained is not None:
        state = "finished" if trained.finished else "not finished"
        options = _options(trained) | _calibration_options(folder)
        tracked = _tracked(folder, trained)
        return Run(name, folder, state, options, measured, tracked=tracked)
    if "test" not in measured:
        return None
    options = _calibration_options(folder)
    try:
        trained = find_run(_retriever(folder)["origin"]["run"])
    except (OSError, ValueError, KeyError, TypeError, RcirError):
        return Run(name, folder, "calibrated", options, measured)  # elsewhere than it was trained
    path = trained.path / VALIDATION
    if path.is_file():
        measured["validation"] = RunResults.read(path)
    tracked = _tracked(folder, trained)
    return Run(name, folder, "calibrated", _options(trained) | options, measured, tracked=tracked)


def _tracked(folder: Path, trained: RunFolder) -> dict[Split, tracking.TrackedRun]:
    """The runs in MLflow of a training, and of its calibration in a folder, if it is there."""
    runs: dict[Split, tracking.TrackedRun] = {}
    with suppress(OSError, ValueError, LookupError, TypeError, RcirError):
        runs["validation"] = trained.tracked
        calibration = _retriever(folder)["origin"]["calibration"]
        runs["test"] = tracking.TrackedRun(calibration, trained.tracked.uri)
    return runs


def _retriever(folder: Path) -> dict[str, Any]:
    """The description of the retriever that a calibration left in a folder."""
    text = storage.read_current(
        folder / RETRIEVER, lambda version: (version / storage.DESCRIPTION_FILE).read_text()
    )
    description: dict[str, Any] = json.loads(text)
    return description


def _calibration_options(folder: Path) -> dict[str, Any]:
    """Options of the calibration in a folder, by dotted name; none if there is none."""
    try:
        described = _retriever(folder)
        return {
            f"{CALIBRATION}.depth": described["max_depth"],
            f"{CALIBRATION}.bound": described["controllers"][0]["bound"],
            f"{CALIBRATION}.score_function": described["controllers"][0]["score_functions"]["main"],
            **flatten({CALIBRATION: {"index": described["index"]}}),
            f"{CALIBRATION}.group": described["origin"].get("group"),
            f"{CALIBRATION}.cluster": described["origin"].get("cluster"),
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RcirError):
        return {}


def _options(run: RunFolder) -> dict[str, Any]:
    """Return the options of a training by dotted name, as they were in its last epoch."""
    options = flatten(run.config)
    for change in options.pop("changes", []):
        options |= change["options"]
    return options


def _trials(folder: Path) -> list[Run]:
    """The trials of a sweep, that of the smallest sets first, those that did not finish last.

    Of a trial with several seeds, what was measured of all is compared.
    """
    path = folder / SWEEP
    trials: list[tuple[bool, float, Run]] = []
    try:
        written = json.loads(path.read_text())
        alpha, delta = (float(written["config"][name]) for name in ("alpha", "delta"))
        for trial in written["trials"]:
            run = _trial(folder, trial)
            one = run.measured.get("validation")
            size = mean_size(one.parts, alpha, delta) if one and one.parts else math.inf
            trials.append((one is None, run.reported.get("certified_size", size), run))
    except RcirError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidData(
            f"{path} is damaged ({error!r}): give the folders of the trials instead"
        ) from error
    if not trials:
        raise InvalidData(f"{path} lists no trial: let the sweep run first")
    return [run for *_, run in sorted(trials, key=lambda each: each[:2])]


def _trial(folder: Path, written: Mapping[str, Any]) -> Run:
    """A trial as its sweep has written it down; measured once all its seeds are trained."""
    names, state = [str(name) for name in written["folders"]], str(written["state"])
    reported = {str(name): float(value) for name, value in written.get("metrics", {}).items()}
    runs = [_run(folder / name, names[0]) for name in names]
    first = runs[0] or Run(names[0], folder / names[0], "")
    validated = [run.measured["validation"] for run in runs if run and "validation" in run.measured]
    measured = dict(first.measured)
    measured.pop("validation", None)
    if len(validated) == len(names):
        parts = [part for each in validated for part in each.parts]
        measured["validation"] = replace(
            validated[0], parts=parts, metrics=validated[0].metrics | reported
        )
    return replace(first, state=state, measured=measured, reported=reported)
