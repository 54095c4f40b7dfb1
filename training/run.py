"""A training run from start to end: its folder, MLflow run, workers, and the weights it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

from ray.train import UserCallback

from rcir import tracking
from rcir.cluster import count_groups, join_cluster, read_cluster_tags, require_cluster
from rcir.config import flatten
from rcir.data import Splits, load_splits
from rcir.data.catalogue import require_enough
from rcir.data.records import calibration_note
from rcir.data.rejects import REJECTS_FILE, write_rejects
from rcir.encoders import Encoder
from rcir.encoders.base import TrainingImages, stored_encoder
from rcir.encoders.embedder import Embedder
from rcir.encoders.weights import save_tensors
from rcir.errors import InvalidConfig, InvalidData
from rcir.index import find_index
from rcir.runs.bucket import claimed, fetch, place_of, push
from rcir.runs.folder import (
    ENCODER_FILE,
    FOLDER_TAG,
    RESOURCES,
    TRAINED_ON_FILE,
    RunFolder,
    TrainedOn,
    as_json,
    lock_run,
    read_run,
    require_same_options,
)
from rcir.runs.results import DIGEST_LENGTH, VALIDATION, digest_names
from rcir.storage import as_text
from rcir.terminal import console, working
from training import checkpoint
from training.checkpoint import LOSS, History, read_epochs
from training.checks import (
    build,
    build_on_meta,
    build_without_weights,
    check_encoder,
    check_images,
    check_places,
    find_rejects,
    has_trainable_weights,
    within_memory,
)
from training.config import MEMBERS, TrainingConfig, member_configs
from training.images import on_features
from training.loop import describe_start, is_done, launch
from training.validation import CERTIFIED_SIZE, QUANTILE_NAME, Validation, validate, warn_of_chance
from training.workers import LOG_FILE, follow

# Curves of members in the run of an ensemble; MLflow has a chart for each.
SHOWN_MEMBERS = 5
MEMBER_CURVES = {LOSS: LOSS, CERTIFIED_SIZE: CERTIFIED_SIZE.removeprefix("validation/")}


def find_existing_run(config: TrainingConfig) -> RunFolder | None:
    """Return the run in the folder, if any; `InvalidConfig` if its configuration differs."""
    run = read_run(config.folder)
    if run is None:
        return None
    old, new = run.config, as_json(asdict(config))
    if old.get("encoder", {}).get("method") == config.encoder.method:
        old = old | {"encoder": stored_encoder(old["encoder"])}
    # A run keeps the values that it started with.
    if config.micro_batches is None:
        new["micro_batches"] = old.get("micro_batches")
    if config.batch_per_worker is not None:
        new |= {"batch": old.get("batch"), "batch_per_worker": None}
    require_same_options(old, new, RESOURCES, f"{as_text(run.place)} contains a run")
    return run


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
        FOLDER_TAG: as_text(place_of(folder)),
        tracking.KIND_TAG: kind,
        tracking.ENCODER_TAG: config.encoder.method,
        tracking.DATASET_TAG: config.data.name,
    }
    with tracking.started_once(folder, config.name, tags, parent) as tracked:
        run = RunFolder(folder, plain, tracked.id, tracked.uri)
        run.write()
        push(folder)
    return run


@working("preparing the training", logged=True)
def train(
    config: TrainingConfig,
    parent: tracking.TrackedRun | None = None,
    callback: UserCallback | None = None,
    rejects: Mapping[str, str] | None = None,
) -> RunFolder:
    """Train an encoder, or continue the run that its folder holds.

    The folder is `config.storage / config.name`. A run that was interrupted continues from its
    last checkpoint, in the same MLflow run; a finished one is returned as it is. A run in a bucket
    is trained in a copy, see `rcir.runs.bucket`.

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
    place = place_of(config.folder)
    with claimed(place):
        fetch(place, training=True)
        return _train(config, parent, callback, rejects)


def _train(
    config: TrainingConfig,
    parent: tracking.TrackedRun | None,
    callback: UserCallback | None,
    rejects: Mapping[str, str] | None,
) -> RunFolder:
    """Do what `train` does, once the copy of a run in a bucket is there."""
    run = find_existing_run(config)
    if run is not None and run.finished:
        done = f"{as_text(run.place)} is trained already; choose another name to train anew"
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
            push(run.path)
        micro_batches, batch = run.config["micro_batches"], run.config["batch"]
        if micro_batches < config.most_workers:
            raise InvalidConfig(
                f"{run.path} has {micro_batches} micro-batches, too few for {config.most_workers} "
                "workers: use fewer, or train anew under another name"
            )
        config = replace(config, micro_batches=micro_batches, batch=batch, batch_per_worker=None)
        return _train_and_log(config, run, splits, callback, rejects)


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
            on_features(config, splits, build(config, config.encoder), runs, config.most_workers)
        validation = None
        if members:
            job = partial(train, parent=run.tracked, rejects=rejects)
            logs = {member.folder / LOG_FILE: f"{member.name}: " for member in members}
            together = config.most_workers > 0
            state = partial(describe_start, config) if together else lambda: "training members"
            with follow(logs, state):
                if together:
                    join_cluster()
                    at_once = max(1, count_groups(config.most_workers, config.use_gpu))
                    # Threads wait for workers; an error is raised once all have ended.
                    with ThreadPool(min(at_once, len(members))) as pool:
                        finished = pool.map(job, members, chunksize=1)
                else:
                    finished = [job(member) for member in members]
            encoder = build_without_weights(config)
            encoder.take_members([member.encoder(trust_code=True) for member in finished])
        elif not has_trainable_weights(build_on_meta(config)):
            encoder = build(config, config.encoder)
        else:
            encoder, validation = _train_epochs(config, run, callback)
        config, splits = on_features(config, splits, encoder, runs, config.most_workers)
        embedder = Embedder(config.most_workers, config.use_gpu)
        with working("choosing the weights", logged=True):
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
        save_tensors(encoder.state_dict(), run.path / ENCODER_FILE)
        if validation.certified:
            validation.to_results(splits.validation).write(run.path / VALIDATION)
        _log(config, run, validation)
        run = replace(run, finished=True)
        run.write()
        checkpoint.upload(run.path)
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


def _train_epochs(
    config: TrainingConfig, run: RunFolder, callback: UserCallback | None
) -> tuple[Encoder, Validation]:
    """Train, then return the encoder and the validation of the best epoch."""
    # All epochs may be trained if the tracking server was away at the end.
    if not (checkpoint.last_epoch(run.path) and is_done(checkpoint.read_state(run.path), config)):
        launch(config, run, callback)
        if config.most_workers:
            fetch(run.place, training=True)  # what they have made on other machines
    encoder = build_without_weights(config)
    best = checkpoint.read_state(run.path).best_epoch
    checkpoint.restore_weights(run.path, best, encoder)
    return encoder, checkpoint.restore_validation(run.path, best)


@working("logging to MLflow", logged=True)
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
    kept = [name for name in metrics if not name.startswith(QUANTILE_NAME)]
    tracked.log_metrics({name.replace("validation", "chosen"): metrics[name] for name in kept})
    from rcir import figures  # slow to import; workers need none

    svg = figures.to_svg(figures.draw_reliability(validation.reliability()))
    tracked.log_figure(svg, "validation_reliability")
