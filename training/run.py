"""A training run from start to end: its folder, MLflow run, workers, and the weights it keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from ray.train import UserCallback
from torch.nn.modules.batchnorm import _BatchNorm

from rcir import tracking
from rcir.cluster import in_submitted_job, read_cluster_tags, require_cluster
from rcir.config import flatten
from rcir.data import ImageSet, Splits, load_splits
from rcir.data.catalogue import require_enough
from rcir.data.rejects import REJECTS_FILE, find_unreadable, tolerate, write_rejects
from rcir.data.sufficiency import calibration_note, can_train
from rcir.encoders import Encoder, EncoderConfig, build_encoder, find_method
from rcir.encoders.base import TrainingImages
from rcir.encoders.embedder import Embedder
from rcir.encoders.features import frozen_backbone
from rcir.encoders.memory import GIB, TRAINING_GIB, memory_budget, saved_bytes
from rcir.errors import InvalidConfig, InvalidData, printable
from rcir.index import find_index
from rcir.runs.folder import FOLDER_TAG, RESOURCES, TRAINED_ON_FILE, RunFolder, TrainedOn, read_run
from rcir.runs.results import DIGEST_LENGTH, VALIDATION, digest_names
from rcir.terminal import console, progress_bar
from training import checkpoint
from training.checkpoint import LOSS, History, read_epochs
from training.config import MEMBERS, TrainingConfig, member_configs
from training.images import image_batches, number_labels, on_features
from training.loop import is_done, launch, run_side_by_side
from training.validation import CERTIFIED_SIZE, Validation, validate, warn_of_chance
from training.workers import LOG_FILE, follow

LOCK_FILE = "lock"
# Curves of members in the run of an ensemble; MLflow has a chart for each.
SHOWN_MEMBERS = 5
MEMBER_CURVES = {LOSS: LOSS, CERTIFIED_SIZE: CERTIFIED_SIZE.removeprefix("validation/")}


def find_existing_run(config: TrainingConfig) -> RunFolder | None:
    """Return the run in the folder, if any; `InvalidConfig` if its configuration differs."""
    folder = config.folder
    run = read_run(folder)
    if run is None:
        return None
    old, new = run.config, as_json(asdict(config))
    # A run keeps the values that it started with.
    if config.micro_batches is None:
        new["micro_batches"] = old.get("micro_batches")
    if config.batch_per_worker is not None:
        new |= {"batch": old.get("batch"), "batch_per_worker": None}
    require_same_options(old, new, RESOURCES, f"{folder} contains a run")
    return run


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


def create_run(
    config: TrainingConfig, parent: tracking.TrackedRun | None, trained: TrainedOn
) -> RunFolder:
    """Create a run in its folder and in MLflow; `trained` records the images of the training."""
    complete = replace(config, micro_batches=config.n_micro_batches, batch_per_worker=None)
    folder, plain = config.folder, asdict(complete)
    trained.write(folder)  # before the run, which cannot be used without it
    kind = "training"
    if parent is not None:
        kind = "member" if Path(config.storage).name == MEMBERS else "trial"
    tags = {
        FOLDER_TAG: str(folder),
        tracking.KIND_TAG: kind,
        tracking.ENCODER_TAG: config.encoder.method,
        tracking.DATASET_TAG: config.data.name,
    }
    with tracking.started_once(folder, config.name, tags, parent) as tracked:
        run = RunFolder(folder, plain, tracked.id, tracked.uri)
        run.write()
    return run


@contextmanager
def lock_run(folder: Path, patience: float = 0) -> Iterator[None]:
    """Keep other processes from training in a folder, which is created if it does not exist.

    Wait for another process so many seconds. The lock ends with the process.
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


def train(
    config: TrainingConfig,
    parent: tracking.TrackedRun | None = None,
    callback: UserCallback | None = None,
    rejects: Mapping[str, str] | None = None,
) -> RunFolder:
    """Train an encoder, or continue the run that its folder holds.

    The folder is `config.storage / config.name`. A run that was interrupted continues from its
    last checkpoint, in the same MLflow run; a finished one is returned as it is.

    Args:
        config: the run.
        parent: the MLflow run this one is part of.
        callback: called after every epoch, once its checkpoint is written, as Ray calls it:
            `after_report(context, metrics, None)`; metrics[0] are the metrics of the first worker,
            with the number of the epoch. Called in Ray's controller; with no workers, in this
            process and thread, without a context, where it may stop the run with `SystemExit`. Not
            called for members of an ensemble, which has no epochs of its own.
        rejects: ids and reasons of unreadable images to leave out; None to look for them.

    Raises:
        InvalidConfig: the folder contains a run of another configuration, its files would be lost
            with a submitted job, or no cluster answers at RAY_ADDRESS.
        TrackingUnavailable: MLflow cannot be reached at the start or at the end. In between, a run
            continues without it; the same command logs later what is missing.
        TrainingDiverged, CheckpointFailed, WorkersLost: training stopped; after the last two, the
            same command continues from the last checkpoint.
        DataUnavailable, InvalidData: of the data set.
        InvalidImage: more images than `config.max_rejects` cannot be read.
        MissingPackage: FAISS is not installed.

    Example:
        >>> from rcir.data import DataConfig
        >>> tiny = DataConfig("digits", options={"train": 200, "validation": 200})
        >>> run = train(TrainingConfig(name="tiny", epochs=1, data=tiny))
        epoch 1/1  ...
        >>> run.finished, run.encoder().config.method
        (True, 'btl')
    """
    check_places(config)
    if parent is not None:  # workers do not configure its store
        tracking.allow_store(parent.uri)
    find_index("flat")  # validation needs FAISS: fail now, not after the first epoch
    if config.most_workers:
        require_cluster()
    run = find_existing_run(config)
    if run is not None and run.finished:
        done = f"{run.path} is trained already; choose another name to train anew"
        console.print(done, soft_wrap=True)
        return run
    # Printed once, not by every member or trial.
    report = partial(console.print, soft_wrap=True) if parent is None else None
    splits = load_splits(config.data, report)
    require_enough(config.data, splits)
    if rejects is None:
        rejects = find_rejects(config, splits, config.folder)
    elif rejects:
        write_rejects(config.folder / REJECTS_FILE, rejects)
    if rejects:
        splits = splits.without(rejects)
        require_enough(config.data, splits)
    if report and (note := calibration_note(splits)):
        report(note)
    check_encoder(config)
    for epoch in (1, *(change.epoch for change in config.changes)):
        check_images(config.at(epoch), splits.train)
    with lock_run(config.folder):
        # Another process may have started it meanwhile.
        trained, run = _trained_on(config, splits), find_existing_run(config)
        if run is None:
            config = within_memory(config)
            run = create_run(config, parent, trained)
        else:  # the data set may have changed since
            TrainedOn.read(run.path).merge(trained).write(run.path)
        micro_batches, batch = run.config["micro_batches"], run.config["batch"]
        if micro_batches < config.most_workers:
            raise InvalidConfig(
                f"{run.path} has {micro_batches} micro-batches, too few for {config.most_workers} "
                "workers: use fewer, or train anew under another name"
            )
        config = replace(config, micro_batches=micro_batches, batch=batch, batch_per_worker=None)
        return _train_and_log(config, run, splits, callback, rejects)


def find_rejects(config: TrainingConfig, splits: Splits, folder: Path) -> Mapping[str, str]:
    """Decode the training and validation images; return the ids of unreadable ones, and reasons.

    They are listed in `rejects.csv` in the folder; `InvalidImage` if they are more than
    `config.max_rejects`.
    """
    parts = (splits.train, splits.validation)
    bar, total = progress_bar(), sum(map(len, parts))
    task = bar.add_task("checking images", total=total)
    with bar:
        rejects = find_unreadable(parts, config.preprocessing, partial(bar.advance, task))
    if line := tolerate(rejects, total, config.max_rejects, folder / REJECTS_FILE):
        console.print(printable(line), soft_wrap=True)
    return rejects


def _train_and_log(
    config: TrainingConfig,
    run: RunFolder,
    splits: Splits,
    callback: UserCallback | None,
    rejects: Mapping[str, str],
) -> RunFolder:
    """Do the training that is left, choose the weights, log; return the finished run."""
    run.tracked.log_params(flatten(run.config))
    with run.tracked.active():
        members = member_configs(config, run.path)
        runs = run.path / MEMBERS if members else run.path.parent
        if config.encoder.freeze:  # embed with all workers before any of them trains
            on_features(config, splits, _build(config, config.encoder), runs, config.most_workers)
        validation = None
        if members:
            jobs = [partial(train, member, run.tracked, rejects=rejects) for member in members]
            with follow({member.folder / LOG_FILE: f"{member.name}: " for member in members}):
                together = config.most_workers > 0
                finished = run_side_by_side(jobs) if together else [job() for job in jobs]
            encoder = _build_without_weights(config)
            encoder.take_members([member.encoder(trust_code=True) for member in finished])
        elif not _trains(_build_on_meta(config)):
            encoder = _build(config, config.encoder)
        else:
            encoder, validation = _train_epochs(config, run, callback)
        config, splits = on_features(config, splits, encoder, runs, config.most_workers)
        with Embedder(config.most_workers, config.use_gpu).open() as embedder:
            if type(encoder).fit_posthoc is not Encoder.fit_posthoc:
                loss = config.at(config.epochs).loss_options()
                encoder.fit_posthoc(
                    TrainingImages(splits.train, config.preprocessing, embedder, config.seed, loss)
                )
                validation = None
            if validation is None:
                images = splits.validation
                embedding = embedder(encoder, config.preprocessing, images.images)
                validation = validate(embedding, images)
        warn_of_chance(validation)
        run.save_encoder(encoder)
        if validation.certified:
            validation.to_results(splits.validation).write(run.path / VALIDATION)
        _log(config, run, validation)
        run = replace(run, finished=True)
        run.write()
    return run


def _trained_on(config: TrainingConfig, splits: Splits) -> TrainedOn:
    """Return the images that the encoder will have seen, including those of its base weights."""
    trained = TrainedOn.from_splits(splits)
    weights = config.encoder.options.get("base_weights")
    if weights is None:
        return trained
    # Weights lie in the folder of their run, or in a checkpoint or retriever below it.
    for folder in Path(weights).absolute().parents[:3]:
        if (folder / TRAINED_ON_FILE).is_file():
            return TrainedOn.read(folder).merge(trained)
    raise InvalidData(
        f"encoder.options.base_weights is {weights}, without {TRAINED_ON_FILE} beside it: pass "
        "encoder.safetensors in the folder of the run that trained them"
    )


def check_places(config: TrainingConfig) -> None:
    """Refuse to write into the working directory of a submitted job, which Ray removes."""
    if not in_submitted_job():
        return
    if not Path(config.storage).is_absolute():
        raise InvalidConfig(
            f"storage is {config.storage}, which Ray removes with the job: pass an absolute folder"
        )
    if not tracking.is_chosen():
        raise InvalidConfig("set MLFLOW_TRACKING_URI on the nodes or in the job's environment")


def check_encoder(config: TrainingConfig) -> None:
    """Raise `InvalidConfig` if the encoder cannot be built, frozen or trained as configured."""
    method, encoder = config.encoder.method, _build_on_meta(config)
    if config.encoder.freeze and frozen_backbone(encoder) is None:
        raise InvalidConfig(f"encoder.freeze is true, but {method} has no backbone to freeze")
    # A method that only fits a trained base afterwards has no epochs.
    if not _trains(encoder) and type(encoder).fit_posthoc is Encoder.fit_posthoc:
        raise InvalidConfig(f"{method} has no weights to train: choose another encoder.method")
    has_base = config.has_members or config.encoder.options.get("base_weights")
    if not (_trains(encoder) or has_base or config.encoder.starts_pretrained):
        raise InvalidConfig(
            f"the backbone of {method} is random: give encoder.pretrained, "
            "encoder.checkpoint_path, or a base that trains"
        )


def _trains(encoder: Encoder) -> bool:
    """Return True if an encoder has weights that epochs train."""
    return any(weights.requires_grad for weights in encoder.parameters())


def check_images(config: TrainingConfig, images: ImageSet) -> None:
    """Raise `InvalidData` or `InvalidConfig` if the encoder cannot be trained with the images."""
    if not can_train(images, sampled=config.mining.cache == "sampled"):
        raise InvalidData("no training image can be an anchor with a positive and a negative")
    if len(images) < config.n_micro_batches:
        raise InvalidData(
            f"{len(images)} training images do not fill {config.n_micro_batches} micro-batches"
        )
    if find_method(config.encoder.method).by_label:
        _build_on_meta(config).check_labels(int(number_labels(images).max()) + 1)
    elif config.mining.scope == "batch":
        image_batches(config, images, epoch=1)


def _train_epochs(
    config: TrainingConfig, run: RunFolder, callback: UserCallback | None
) -> tuple[Encoder, Validation]:
    """Train, then return the encoder and the validation of the best epoch."""
    # All epochs may be trained if the tracking server was away at the end.
    if not (checkpoint.last_epoch(run.path) and is_done(checkpoint.read_state(run.path), config)):
        launch(config, run, callback)
    encoder = _build_without_weights(config)
    best = checkpoint.read_state(run.path).best_epoch
    checkpoint.restore_weights(run.path, best, encoder)
    return encoder, checkpoint.restore_validation(run.path, best)


def within_memory(config: TrainingConfig) -> TrainingConfig:
    """Choose the number of micro-batches by their memory, and print it.

    A configured number is kept, as is the default where the result depends on it.
    """
    if config.micro_batches is not None or config.encoder.freeze or config.has_members:
        return config
    encoder = _build_without_weights(config).train()
    if not _trains(encoder):
        return config
    normalises = [module for module in encoder.modules() if isinstance(module, _BatchNorm)]
    if config.frozen_batch_norm == "statistics":
        for module in normalises:
            module.eval()
    pixels = torch.zeros(2, config.preprocessing.channels, *config.preprocessing.size)
    with torch.random.fork_rng(devices=[]):
        per_image = saved_bytes(lambda: encoder(pixels)) / 2
    tuples = not encoder.by_label and config.mining.scope == "epoch"
    n_images = config.batch * (2 + config.mining.num_negatives if tuples else 1)
    size = n_images * per_image / GIB
    budget = memory_budget(config.memory_gib, TRAINING_GIB, config.use_gpu)
    least = max(1, config.most_workers)
    if size <= budget * least:
        return config
    demand = f"a batch of {n_images} images keeps about {size:.1f} GiB for its backward pass"
    if not encoder.by_label and config.mining.scope == "batch":
        chosen, advice = None, "choose a smaller batch if that is too much"
    elif normalises and config.frozen_batch_norm != "statistics":
        chosen, advice = None, "--micro-batches takes less, and normalises in smaller parts"
    else:
        chosen = min(config.batch, math.ceil(size / budget))
        advice = f"computed in {chosen} micro-batches (--memory-gib, --micro-batches)"
    console.print(f"{demand}: {advice}", soft_wrap=True)
    return replace(config, micro_batches=chosen)


def _build(config: TrainingConfig, encoder: EncoderConfig) -> Encoder:
    """Build an encoder for the images of a training; leave the caller's random numbers alone."""
    preprocessing = config.preprocessing
    with torch.random.fork_rng(devices=[]):
        return build_encoder(encoder, preprocessing.channels, preprocessing.size).eval()


def _build_without_weights(config: TrainingConfig) -> Encoder:
    """Build the encoder of a training for weights that are not those of its configuration."""
    encoder = _build(config, config.encoder.without_weights())
    encoder.config = config.encoder
    return encoder


def _build_on_meta(config: TrainingConfig) -> Encoder:
    """Build the encoder of a training without memory for its weights."""
    with torch.device("meta"):
        return _build_without_weights(config)


def _log(config: TrainingConfig, run: RunFolder, validation: Validation) -> None:
    """Log everything of a finished training to MLflow."""
    images = TrainedOn.read(run.path).images.astype(str).tolist()
    digest = digest_names(images)[:DIGEST_LENGTH]
    tracked = run.tracked
    tracked.log_dataset(config.data.name, digest, "training", run.config["data"])
    tracked.log_tags(read_cluster_tags())
    if checkpoint.last_epoch(run.path):
        History(run.path, tracked).log()
        best = checkpoint.read_state(run.path).best_epoch
        tracked.log_metrics({"best_epoch": best})
        tracked.log_folder(checkpoint.checkpoint_folder(run.path, best), "checkpoint")
    tracked.log_points(
        (f"{curve}/{member.name}", int(epoch), metrics[name], metrics["time"])
        for member in member_configs(config, run.path)[:SHOWN_MEMBERS]
        for epoch, metrics in read_epochs(member.folder).items()
        for name, curve in MEMBER_CURVES.items()
        if name in metrics
    )
    metrics = validation.metrics()
    tracked.log_metrics({name.replace("validation", "chosen"): metrics[name] for name in metrics})
    from rcir import figures  # slow to import; workers need none

    svg = figures.to_svg(figures.draw_reliability(validation.reliability()))
    tracked.log_figure(svg, "validation_reliability")
