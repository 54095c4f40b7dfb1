"""The configuration of a training run, and of the members of an encoder that is made of others."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rcir.config import from_plain
from rcir.data import Augmentation, DataConfig, Preprocessing, data_root
from rcir.data.rejects import check_max_rejects
from rcir.encoders import EncoderConfig, find_method, model_preprocessing
from rcir.encoders.memory import check_memory
from rcir.errors import InvalidConfig
from rcir.mining import MiningConfig
from rcir.options import require_at_least, require_options
from rcir.runs.bucket import local_folder, place_of
from rcir.storage import as_text, is_uri

MEMBERS = "members"  # folder of their runs, in that of the encoder's
# Options that may change in later epochs are in these groups, except those that the state of an
# optimizer depends on.
CHANGEABLE_GROUPS = ("optimizer", "loss", "mining", "augmentation")
FIXED_OPTIONS = ("optimizer.kind", "optimizer.momentum")
FreezeBatchNorm = Literal["statistics", "affine", "nothing"]


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its schedule.

    Args:
        kind: "adam" (Kingma & Ba, ICLR 2015), or "sgd" with momentum.
        lr: initial learning rate.
        reference_batch: the batch size that `lr` is meant for. With another batch, `lr` is
            multiplied by the ratio of the two for sgd (Goyal et al., 2017), and by its square root
            for Adam (Malladi et al., NeurIPS 2022). None never scales it.
        warmup: epochs in which the rate rises linearly from 0 (Goyal et al., 2017).
        weight_decay: L2 penalty.
        clip_norm: maximum norm of the gradient over all weights (Pascanu et al., ICML 2013); None
            does not clip.
        schedule: "cosine" to 0 over all epochs (Loshchilov & Hutter, ICLR 2017), "exponential" by
            `gamma` per epoch, or "constant".
        gamma: factor per epoch of the exponential schedule.
        hold: epochs at the initial rate before the schedule begins; None for none. Hermans et al.,
            2017, decay exponentially in the last 40% of the steps.
        momentum: of sgd.
    """

    kind: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-3
    _: KW_ONLY
    reference_batch: int | None = None
    warmup: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    schedule: Literal["cosine", "exponential", "constant"] = "cosine"
    gamma: float = 0.99
    hold: int | None = None
    momentum: float = 0.9

    def __post_init__(self) -> None:
        require_at_least(self, "optimizer.", reference_batch=1, warmup=0, weight_decay=0, hold=0)
        for name in ("lr", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidConfig(f"optimizer.{name} is {value}; it must be above 0")
        if not 0 < self.gamma <= 1:
            raise InvalidConfig(f"optimizer.gamma is {self.gamma}; it must lie in (0, 1]")
        if not 0 <= self.momentum < 1:
            raise InvalidConfig(f"optimizer.momentum is {self.momentum}; it must lie in [0, 1)")

    def build(self, weights: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer of weights; training sets its learning rate before every step."""
        if self.kind == "sgd":
            return torch.optim.SGD(weights, momentum=self.momentum, fused=True)
        return torch.optim.Adam(weights, fused=True)

    def rate(self, epoch: int, epochs: int, batch: int | None = None, done: float = 1.0) -> float:
        """Return the learning rate of a step in an epoch, from 1 on, of which it completes `done`.

        `batch` is that of the training, None the reference batch.
        """
        rate = self.lr
        if batch is not None and self.reference_batch is not None:
            rate *= (batch / self.reference_batch) ** (1 if self.kind == "sgd" else 0.5)
        if self.warmup:
            rate *= min(1.0, (epoch - 1 + done) / self.warmup)
        held = self.hold or 0
        passed = max(0, epoch - 1 - held)
        if self.schedule == "cosine" and passed:
            return rate * (1 + math.cos(math.pi * passed / (epochs - held))) / 2
        return rate * self.gamma**passed if self.schedule == "exponential" else rate


@dataclass(frozen=True)
class Change:
    """Options that change while a run is trained.

    Args:
        epoch: the first with these values; at least 2.
        options: values by dotted name, of optimizer, loss, mining or augmentation.
    """

    epoch: int
    options: dict[str, Any]

    def __post_init__(self) -> None:
        if self.epoch < 2:
            raise InvalidConfig(f"changes name epoch {self.epoch}; the first possible one is 2")
        for name in self.options:
            group, dot, _ = name.partition(".")
            if group not in CHANGEABLE_GROUPS or not dot or name in FIXED_OPTIONS:
                raise InvalidConfig(
                    f"changes name {name}; only options of {', '.join(CHANGEABLE_GROUPS)} may "
                    f"change, except {' and '.join(FIXED_OPTIONS)}"
                )


@dataclass(frozen=True)
class TrainingConfig:
    """A training run.

    Args:
        name: of the run and of its folder.
        storage: folder of all runs; by default the environment variable RCIR_RUNS, or `runs`. On a
            cluster, every node must see it; s3://BUCKET/RUNS and other URIs need no shared folder.
        seed: decides initial weights, order, mining and augmentation; at least 0.
        epochs: passes over the training images, each of which is an anchor once per epoch (with
            mining.cache "sampled", an epoch has up to mining.refresh steps).
        selection: the epoch to keep: "certified-size", the one with the smallest certified sets of
            the validation images, of which one within 1% of the smallest so far takes the place if
            its mean average precision is higher; or "recall", the highest recall at 1 (the code of
            Cai et al., AAAI 2025).
        patience: stop after so many epochs without a better mean average precision (with selection
            "recall", recall at 1) on the validation images; 0 trains all epochs.
        min_delta: by how much an epoch must exceed the best so far to count for `patience`.
        batch: tuples per step, over all workers; with mining.scope "batch", images.
        batch_per_worker: sets `batch` to so many times the maximum number of workers when the run
            starts. None leaves `batch` as it is.
        micro_batches: forward passes per batch; dropout and batch normalisation see one micro-batch
            at a time. The result depends on their number, not on that of the workers. More
            micro-batches than workers need less memory, except with mining.scope "batch". None
            takes the maximum number of workers when the run starts, or more if one would not fit
            into `memory_gib` and nothing but dropout depends on their number. A last batch of fewer
            tuples than micro-batches is dropped.
        memory_gib: memory of a process for what a micro-batch keeps for its backward pass; None for
            4 GiB, or 16 on a GPU.
        num_workers: Ray workers, or their minimum and maximum, between which the number follows the
            cluster; 0 trains in this process.
        max_failures: how often in a row, without a checkpoint between them, workers may fail.
        checkpoint_steps: also write a checkpoint after so many steps of an epoch, while training
            goes on; None for the ends of epochs only.
        timeout_s: seconds after which a worker fails that waits for the others, such as for one
            that hangs on its GPU.
        use_gpu: one GPU per worker; with 0 workers, the GPU of this process.
        threads: CPU threads per process; None for the default of torch or Ray. Their number decides
            the last digits of sums: runs are reproducible with the same number.
        max_rejects: unreadable training and validation images to leave out: a number, or a share
            below 1. All of them are listed in `rejects.csv` in the folder of the run, also if there
            are more, which is an error.
        compile: let torch.compile fuse the encoder for training; takes a minute to start.
        precision: of the backbone during training; "bfloat16" is several times as fast on
            processors that have it. Weights, heads, losses and later embedding stay in float32.
        data: the data set.
        preprocessing: from images to the encoder's input; by default, a backbone of a model hub
            brings its own.
        augmentation: random transforms of training images.
        freeze_batch_norm: what layers of batch normalisation keep: "statistics", the running ones,
            by which they then normalise in training too (Roth et al., ICML 2020); "affine", scale
            and shift (the code of Cai et al.); or "nothing". None for "statistics" with pretrained
            weights, else "nothing".
        encoder: what is trained.
        loss: options of the loss of encoder.method, such as margin: those of its `LossOptions`.
        mining: how tuples are chosen; options left out become the best for the encoder.
        optimizer: Adam or SGD, and its schedule.
        changes: options of augmentation, loss, mining and optimizer that change at later epochs, in
            ascending order; each holds until it changes again.
    """

    name: str
    storage: str = field(default_factory=lambda: os.environ.get("RCIR_RUNS", "runs"))
    _: KW_ONLY
    seed: int = 0
    epochs: int = 8
    selection: Literal["certified-size", "recall"] = "certified-size"
    patience: int = 0
    min_delta: float = 0.0
    batch: int = 64
    batch_per_worker: int | None = None
    micro_batches: int | None = None
    memory_gib: float | None = None
    num_workers: int | tuple[int, int] = 0
    max_failures: int = 3
    checkpoint_steps: int | None = None
    timeout_s: int = 1800
    use_gpu: bool = False
    threads: int | None = None
    max_rejects: float = 0
    compile: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    data: DataConfig = field(default_factory=DataConfig)
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    augmentation: Augmentation = field(default_factory=Augmentation)
    freeze_batch_norm: FreezeBatchNorm | None = None
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    loss: dict[str, Any] = field(default_factory=dict)
    mining: MiningConfig = field(default_factory=MiningConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        if self.batch_per_worker is not None:
            require_at_least(self, batch_per_worker=1)
            object.__setattr__(self, "batch", self.batch_per_worker * max(1, self.most_workers))
        require_at_least(self, seed=0, epochs=1, patience=0, batch=1, max_failures=0, threads=1)
        require_at_least(self, checkpoint_steps=1, timeout_s=1)
        check_max_rejects(self.max_rejects)
        check_memory("memory_gib", self.memory_gib)
        if not 0 <= self.min_delta < 1:
            raise InvalidConfig(f"min_delta is {self.min_delta}; it must lie in [0, 1)")
        self._check_workers()
        if "://" in self.storage and not is_uri(self.storage):
            raise InvalidConfig(
                f"storage is {self.storage}; pass a folder, shared by all nodes, or s3://BUCKET/RUNS"
            )
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise InvalidConfig(f"name is {self.name!r}; it must be usable as the name of a folder")
        self._set_defaults()
        height, width = self.preprocessing.size
        if self.augmentation.occlusion and width % height:
            raise InvalidConfig(
                f"augmentation.occlusion needs a width that is a multiple of the height, not "
                f"{height} x {width}: change preprocessing.size"
            )
        if self.encoder.freeze and not self.encoder.starts_pretrained:
            raise InvalidConfig(
                "encoder.freeze keeps a random backbone: give encoder.pretrained or checkpoint_path"
            )
        if self.encoder.freeze and self.augmentation != Augmentation():
            raise InvalidConfig(
                "encoder.freeze embeds every image once: leave augmentation out, or do not freeze"
            )
        self._check_changes()

    def _check_workers(self) -> None:
        workers = self.num_workers
        if isinstance(workers, int):
            require_at_least(self, num_workers=0)
        elif not (len(workers) == 2 and 1 <= workers[0] <= workers[1]):
            raise InvalidConfig(f"num_workers is {list(workers)}; pass a number, or [least, most]")
        if not self.most_workers <= self.n_micro_batches <= self.batch:
            raise InvalidConfig(
                f"a batch of {self.batch} in {self.n_micro_batches} micro-batches does not fill "
                f"{self.most_workers} workers: micro_batches must be at least their number and at "
                "most batch; raise batch or batch_per_worker, or use fewer workers"
            )
        group = self.mining.samples_per_class
        if group is not None and (self.batch % group or self.batch < 2 * group):
            raise InvalidConfig(
                f"batch is {self.batch}; it must be a multiple of mining.samples_per_class, "
                f"{group}, and at least twice as large"
            )

    def _set_defaults(self) -> None:
        """Spell out what depends on the encoder, so that a run stays the same in later versions."""
        encoder = self.encoder.completed()
        object.__setattr__(self, "encoder", encoder)
        if self.preprocessing == Preprocessing():
            max_pixels = self.preprocessing.max_pixels  # which is not compared
            preprocessing = replace(model_preprocessing(encoder), max_pixels=max_pixels)
            object.__setattr__(self, "preprocessing", preprocessing)
        positive, negatives = find_method(encoder.method).mining
        mining = replace(
            self.mining,
            positive=self.mining.positive or positive,
            negatives=self.mining.negatives or negatives,
        )
        object.__setattr__(self, "mining", mining)
        object.__setattr__(self, "loss", asdict(self.loss_options()))

    def _check_changes(self) -> None:
        epochs = [change.epoch for change in self.changes]
        if epochs != sorted(set(epochs)) or (epochs and epochs[-1] > self.epochs):
            raise InvalidConfig(
                f"changes name the epochs {epochs}; they must ascend, to {self.epochs} at most"
            )
        for epoch in epochs:
            try:
                self.at(epoch)
            except InvalidConfig as error:
                raise InvalidConfig(f"changes at epoch {epoch}: {error}") from error

    def at(self, epoch: int) -> TrainingConfig:
        """Return the configuration of one epoch, without changes."""
        options: dict[str, Any] = {}
        for change in self.changes:
            if change.epoch <= epoch:
                options |= change.options
        unchanged = replace(self, changes=())
        if not options:
            return unchanged
        changed = override(unchanged, options)
        return replace(unchanged, **{group: getattr(changed, group) for group in CHANGEABLE_GROUPS})

    def loss_options(self) -> Any:
        """Return the options of the loss as an instance of the method's `LossOptions`."""
        method = self.encoder.method
        kind = find_method(method).LossOptions
        require_options(f"loss of {method}", kind, self.loss)
        return kind(**self.loss)

    @property
    def frozen_batch_norm(self) -> FreezeBatchNorm:
        """The part of batch normalisation that does not train, with the default filled in."""
        default: FreezeBatchNorm = "statistics" if self.encoder.starts_pretrained else "nothing"
        return self.freeze_batch_norm or default

    @property
    def folder(self) -> Path:
        """The absolute folder of the run; of a run in a bucket, its copy on this machine."""
        return local_folder(Path(self.storage) / self.name, training=True)

    @property
    def has_members(self) -> bool:
        """True if the encoder is made of others, which train instead of it."""
        return bool(find_method(self.encoder.method).member_configs(self.encoder))

    @property
    def most_workers(self) -> int:
        """Maximum number of processes that train together."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def n_micro_batches(self) -> int:
        """Number of micro-batches, with the default filled in."""
        return max(1, self.most_workers) if self.micro_batches is None else self.micro_batches


def override(config: TrainingConfig, values: Mapping[str, Any]) -> TrainingConfig:
    """Return a copy of a configuration with other values of some options, by dotted name.

    With another encoder.method, options, loss and mining that the former method set by default
    become those of the new one; so does the preprocessing with another encoder.backbone.
    `InvalidConfig` if an option does not exist, or a value has the wrong type or does not fit.

    Example:
        >>> override(TrainingConfig("run"), {"encoder.method": "deterministic"}).loss
        {'margin': 0.1, 'form': 'squared', 'scale': 10.0}
    """
    if not values:
        return config
    encoder, plain = config.encoder, asdict(config)
    if values.get("encoder.method", encoder.method) != encoder.method:
        plain |= _without_defaults(config)
    if values.get("encoder.backbone", encoder.backbone) != encoder.backbone:
        plain["encoder"]["architecture"] = {}
        chosen = any(name.startswith("preprocessing.") for name in values)
        if not chosen and config.preprocessing == model_preprocessing(encoder):
            plain["preprocessing"] = {"max_pixels": config.preprocessing.max_pixels}
    if "batch" in values:
        plain["batch_per_worker"] = None
    for name, value in values.items():
        *groups, option = name.split(".")
        target = plain
        for group in groups:
            target = target.setdefault(group, {}) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            raise InvalidConfig(f"{name} is not an option of a training")
        target[option] = value
    return from_plain(TrainingConfig, plain)


def _without_defaults(config: TrainingConfig) -> dict[str, Any]:
    """Return encoder, loss and mining as plain values, without the defaults of the method."""
    method = find_method(config.encoder.method)

    def without(options: Mapping[str, Any], kind: Any) -> dict[str, Any]:
        defaults = {option.name: option.default for option in fields(kind)}
        return {name: value for name, value in options.items() if value != defaults.get(name)}

    mining = asdict(config.mining)
    if (config.mining.positive, config.mining.negatives) == method.mining:
        mining |= {"positive": None, "negatives": None}
    options = without(config.encoder.options, method.Options)
    return {
        "encoder": asdict(config.encoder) | {"options": options},
        "loss": without(config.loss, method.LossOptions),
        "mining": mining,
    }


def member_configs(config: TrainingConfig, folder: Path) -> list[TrainingConfig]:
    """Return the trainings of an encoder's members, below the folder of its run; often none."""
    members = find_method(config.encoder.method).member_configs(config.encoder)
    return [
        replace(
            config,
            name=f"member-{number}",
            storage=as_text(place_of(folder) / MEMBERS),
            # Ensembles of neighbouring seeds share no member.
            seed=int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0]),
            encoder=member,
            data=replace(config.data, root=str(data_root(config.data))),  # trained elsewhere
        )
        for number, member in enumerate(members)
    ]
