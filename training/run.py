"""One training run: its folder, its MLflow run, its workers, its chosen weights."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import ray.train
import torch
from ray.train.torch import TorchTrainer

from rcir import figures, tracking
from rcir.config import flatten
from rcir.data import Splits, data_root, load_splits
from rcir.encoders import Encoder, EncoderConfig, build_encoder
from rcir.encoders.batches import BATCH
from rcir.encoders.deep_ensemble import DeepEnsemble
from rcir.errors import InvalidConfig, RcirError
from rcir.metrics import confidence, reliability
from rcir.runs import FOLDER_TAG, RunFolder, read_run
from training import checkpoint
from training.config import TrainingConfig
from training.loop import Job, training_loop
from training.progress import console
from training.validation import validate

# What may differ between a run and its continuation.
RESOURCES = ("num_workers", "use_gpu", "storage")


def train(config: TrainingConfig, parent: tracking.TrackedRun | None = None) -> RunFolder:
    """Train an encoder, or continue the run that its folder holds.

    The folder is `config.storage / config.name`. A run that was interrupted continues from its
    last checkpoint, in the same MLflow run; a finished one is returned as it is.

    Args:
        config: the run.
        parent: the MLflow run this one is part of.

    Raises:
        InvalidConfig: the folder holds a run of another configuration.
        DataUnavailable, InvalidData: of the data set.

    Example:
        >>> from rcir.data import DataConfig
        >>> tiny = DataConfig("digits", options={"train": 200, "validation": 200})
        >>> run = train(TrainingConfig(name="tiny", epochs=1, data=tiny))
        epoch 1/1  ...
        >>> run.finished, run.encoder().config.method
        (True, 'btl')
    """
    run = _found(config)
    if run is not None and run.finished:
        done = f"{run.path} is trained already; choose another name to train anew"
        console.print(done, soft_wrap=True)
        return run
    splits = load_splits(config.data)
    _build(config.encoder, config)  # what cannot be built leaves nothing behind
    run = run or _start(config, parent)
    with run.tracked.active():
        if config.encoder.method == "deep-ensemble":
            encoder = _train_members(config, run, splits)
        else:
            encoder = _train_one(config, run)
        run.save_encoder(encoder)
        _log(run, encoder, splits)
        run = replace(run, finished=True)
        run.write()
    return run


def _found(config: TrainingConfig) -> RunFolder | None:
    """The run that the folder holds, if any; it must be of the same configuration."""
    folder = _folder(config)
    found = read_run(folder)
    if found is None:
        return None
    old, new = flatten(found.config), flatten(asdict(config))
    changed = sorted(
        name
        for name in old.keys() | new.keys()
        if name not in RESOURCES and _json(old.get(name)) != _json(new.get(name))
    )
    if changed:
        raise InvalidConfig(
            f"{folder} holds a run with another {', '.join(changed)}: choose another name, or "
            "remove that folder"
        )
    return found


def _start(config: TrainingConfig, parent: tracking.TrackedRun | None) -> RunFolder:
    """A new run, in its folder and in MLflow."""
    folder, plain = _folder(config), asdict(config)
    folder.mkdir(parents=True, exist_ok=True)
    tracked = tracking.start_run(config.name, {FOLDER_TAG: str(folder)}, parent)
    tracked.log_params(flatten(plain))
    run = RunFolder(folder, plain, tracked.id, tracked.uri)
    run.write()
    return run


def _folder(config: TrainingConfig) -> Path:
    return Path(config.storage).absolute() / config.name


def _train_one(config: TrainingConfig, run: RunFolder) -> Encoder:
    """Train on Ray; the weights of the epoch that was best on the validation images."""
    data = replace(config.data, root=str(data_root(config.data)))  # workers run elsewhere
    job = Job(replace(config, data=data), str(run.path), (run.mlflow_run, run.tracking_uri))
    with _quiet_ray(), _own_errors():
        TorchTrainer(
            training_loop,
            train_loop_config={"job": job},
            scaling_config=ray.train.ScalingConfig(
                num_workers=config.num_workers, use_gpu=config.use_gpu
            ),
            run_config=ray.train.RunConfig(name="ray", storage_path=str(run.path)),
        ).fit()
    encoder = _build(config.encoder, config)
    best = checkpoint.best_epoch(run.path)
    checkpoint.restore_weights(run.path, best, encoder)
    run.tracked.log_folder(checkpoint.checkpoint_folder(run.path, best), "checkpoint")
    return encoder.eval()


def _train_members(config: TrainingConfig, run: RunFolder, splits: Splits) -> Encoder:
    """Train the members of an ensemble one after the other, and rotate them onto the first."""
    members = []
    for number in range(config.encoder.members):
        console.print(f"member {number + 1}/{config.encoder.members}")
        member = replace(
            config,
            name=f"member-{number}",
            storage=str(run.path / "members"),
            seed=_member_seed(config.seed, number),
            encoder=replace(config.encoder, method="deterministic"),
        )
        members.append(train(member, parent=run.tracked).encoder())
    ensemble = _build(config.encoder, config)
    assert isinstance(ensemble, DeepEnsemble)
    for slot, trained in zip(ensemble.members, members, strict=True):
        slot.load_state_dict(trained.state_dict())
    ensemble.eval()
    images = splits.train.images
    with torch.inference_mode():
        vectors = [
            ensemble.member_vectors(config.preprocessing(images[start : start + BATCH]))
            for start in range(0, len(images), BATCH)
        ]
    ensemble.align(torch.cat(vectors, dim=1))
    return ensemble


def _build(encoder: EncoderConfig, config: TrainingConfig) -> Encoder:
    """An encoder to load weights into; the caller's random numbers are left alone."""
    with torch.random.fork_rng():
        built = build_encoder(
            replace(encoder, pretrained=False),
            config.preprocessing.channels,
            config.preprocessing.size,
        )
    built.config = encoder
    return built


def _member_seed(seed: int, number: int) -> int:
    """Seeds of members, apart also between ensembles of neighbouring seeds."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def _log(run: RunFolder, encoder: Encoder, splits: Splits) -> None:
    """Final metrics and the reliability diagram of the chosen weights."""
    found = validate(encoder, run.preprocessing, splits.validation)
    run.tracked.log_metrics(
        {name.replace("validation", "chosen"): value for name, value in found.metrics().items()}
    )
    half = found.uncertainty[::2]  # its range scales the other half
    scaled = confidence(found.uncertainty[1::2], half.min(), half.max())
    diagram = reliability(scaled, found.correct[1::2])
    svg = figures.to_svg(figures.reliability_diagram(diagram))
    run.tracked.log_figure(svg, "validation_reliability")


def _json(value: object) -> object:
    """A value as it is after a round trip through JSON."""
    return list(value) if isinstance(value, tuple) else value


@contextlib.contextmanager
def _quiet_ray() -> Iterator[None]:
    """Ray's notes on itself are for its log, not for the screen."""
    logger = logging.getLogger("ray.train")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """What rcir raises on purpose in a Ray worker is raised here as what it is."""
    try:
        yield
    except ray.train.WorkerGroupError as error:
        for failure in error.worker_failures.values():
            if isinstance(failure, RcirError):
                raise failure from error
        raise
