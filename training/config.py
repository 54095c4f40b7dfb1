"""The configuration of a training run, and of the members of an encoder that is made of others."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rcir.config import from_plain
from rcir.data import Augmentation, DataConfig, Preprocessing, data_root
from rcir.data.rejects import check_max_rejects
from rcir.encoders import Encoder, EncoderConfig, build_encoder, find_method, model_preprocessing
from rcir.encoders.memory import check_memory
from rcir.errors import InvalidConfig
from rcir.mining import MiningConfig
from rcir.options import require_options

MEMBERS = "members"  # folder of their runs, in that of the encoder's
CHANGING = ("optimizer", "loss", "mining", "augmentation")  # options that need not stay the same
FIXED = ("optimizer.kind", "optimizer.momentum")  # of these groups, what the state belongs to
FreezeBatchNorm = Literal["statistics", "affine", "nothing"]


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its schedule.

    Args:
        kind: "adam" (Kingma & Ba, ICLR 2015), or "sgd" with momentum.
        lr: learning rate at the start.
        reference_batch: the batch that `lr` is for. With another batch, `lr` is multiplied by the
            ratio of the two for sgd (Goyal et al., 2017), and by its square root for Adam (Malladi
            et al., NeurIPS 2022). None leaves it as it is.
        warmup: epochs in which the rate rises from 0, in equal steps (Goyal et al., 2017).
        weight_decay: L2 penalty.
        clip_norm: a gradient with a larger norm, over all weights, is scaled down to this (Pascanu
            et al., ICML 2013). None leaves it as it is.
        schedule: "cosine" to 0 over all epochs (Loshchilov & Hutter, ICLR 2017), "exponential" by
            `gamma` per epoch, or "constant".
        gamma: factor per epoch of the exponential schedule.
        momentum: of sgd.
    """

    kind: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-3
    reference_batch: int | None = None
    warmup: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    schedule: Literal["cosine", "exponential", "constant"] = "cosine"
    gamma: float = 0.99
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise InvalidConfig(f"optimizer.lr is {self.lr}; it must be above 0")
        if self.reference_batch is not None and self.reference_batch < 1:
            raise InvalidConfig(f"optimizer.reference_batch is {self.reference_batch}; at least 1")
        for name in ("warmup", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidConfig(f"optimizer.{name} is {getattr(self, name)}; at least 0")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise InvalidConfig(f"optimizer.clip_norm is {self.clip_norm}; it must be above 0")
        if not 0 < self.gamma <= 1:
            raise InvalidConfig(f"optimizer.gamma is {self.gamma}; it must lie in (0, 1]")
        if not 0 <= self.momentum < 1:
            raise InvalidConfig(f"optimizer.momentum is {self.momentum}; it must lie in [0, 1)")

    def build(self, weights: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of some weights; the training sets its learning rate before every step."""
        if self.kind == "sgd":
            return torch.optim.SGD(weights, momentum=self.momentum, fused=True)
        return torch.optim.Adam(weights, fused=True)

    def rate(self, epoch: int, epochs: int, batch: int | None = None, done: float = 1.0) -> float:
        """The learning rate of a step.

        Args:
            epoch: of the step, from 1 on.
            epochs: of the training.
            batch: of the training; None for the reference batch.
            done: share of the epoch that is done after the step.

        Example:
            >>> optimizer = OptimizerConfig(lr=0.1, reference_batch=8, warmup=1)
            >>> [round(optimizer.rate(epoch, 4), 3) for epoch in (1, 2, 3, 4)]
            [0.1, 0.085, 0.05, 0.015]
            >>> optimizer.rate(1, 4, batch=32, done=0.5)
            0.1
        """
        rate = self.lr
        if batch is not None and self.reference_batch is not None:
            rate *= (batch / self.reference_batch) ** (1 if self.kind == "sgd" else 0.5)
        if self.warmup:
            rate *= min(1.0, (epoch - 1 + done) / self.warmup)
        if self.schedule == "cosine":
            return rate * (1 + math.cos(math.pi * (epoch - 1) / epochs)) / 2
        return rate * self.gamma ** (epoch - 1) if self.schedule == "exponential" else rate


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
            raise InvalidConfig(
                f"changes name epoch {self.epoch}; the first that they can change is 2"
            )
        for name in self.options:
            group, dot, _ = name.partition(".")
            if group not in CHANGING or not dot or name in FIXED:
                raise InvalidConfig(
                    f"changes name {name}; only options of {', '.join(CHANGING)} may change, "
                    f"except {' and '.join(FIXED)}"
                )


@dataclass(frozen=True)
class TrainingConfig:
    """A training run.

    Args:
        name: of the run and of its folder.
        storage: folder of all runs; the environment variable RCIR_RUNS, or else `runs`. On a
            cluster, one that every node sees.
        seed: decides initial weights, order, mining and augmentation; at least 0.
        epochs: passes over the training images, each of them once an anchor (with mining.cache
            "sampled", of up to mining.refresh steps).
        selection: which epoch is kept: "certified-size", the one with the smallest certified sets
            of the validation images, of equal ones the one with the highest mean average precision;
            or "recall", the one with the highest recall at 1 (the code of Cai et al., AAAI 2025).
        patience: stop after so many epochs without a better mean average precision on the
            validation images, or with selection "recall" a better recall at 1; 0 trains all epochs.
        min_delta: by how much a better one must exceed the best so far, for `patience`.
        batch: tuples per step, over all workers; with mining.scope "batch", images.
        batch_per_worker: sets `batch` to so many times the number of workers (the most there may
            be) when the run is begun. None leaves `batch` as it is.
        micro_batches: a batch is computed in so many of them, each a forward pass of its own:
            dropout and batch normalisation see one of them at a time. What is computed depends on
            them, not on who computes it. More of them than workers take less memory, except with
            mining.scope "batch", where all of a batch is mined together. None for as many as there
            are workers (the most there may be) when the run is begun, or for more of them if one
            would not fit into `memory_gib` and nothing but dropout depends on their number. A last
            batch of fewer tuples than micro-batches is left out.
        memory_gib: memory of a process for what a micro-batch keeps for its backward pass; None for
            4 GiB, or 16 on a GPU.
        num_workers: Ray workers, or the fewest and the most of them, which come and go with the
            cluster; 0 trains in this process.
        max_failures: how often in a row, without a new checkpoint, lost workers are replaced.
        use_gpu: one GPU per worker; with 0 workers, the GPU of this process.
        threads: of the processor, per process; None for as many as torch, or Ray, takes. How many
            add up a sum decides its last digits: runs repeat each other with the same number.
        max_rejects: unreadable training and validation images that are left out: a number, or a
            share below 1. All of them are listed in `rejects.csv` in the folder of the run, also
            if there are more, which is an error.
        compile: let torch.compile fuse the encoder for training; takes a minute to start.
        precision: of the backbone while it is trained; "bfloat16" is several times as fast where
            the processor has it. Weights, heads and losses stay in float32, and so does all
            embedding outside of training.
        data: the data set.
        preprocessing: from images to the encoder's input; left out with a backbone of a model hub,
            it is the model's own.
        augmentation: random transforms of training images.
        freeze_batch_norm: what layers of batch normalisation keep: "statistics", the running ones,
            by which they then normalise in training too (Roth et al., ICML 2020); "affine", scale
            and shift (the code of Cai et al.); or "nothing". None for "statistics" with pretrained
            weights, else "nothing".
        encoder: what is trained.
        loss: options of the loss of encoder.method, such as margin: those of its `LossOptions`.
        mining: how tuples are chosen; what is left open becomes the best for the encoder.
        optimizer: Adam or SGD, and its schedule.
        changes: what of augmentation, loss, mining and optimizer changes at later epochs, in their
            order; each holds until another one.
    """

    name: str
    storage: str = field(default_factory=lambda: os.environ.get("RCIR_RUNS", "runs"))
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
            if self.batch_per_worker < 1:
                raise InvalidConfig(f"batch_per_worker is {self.batch_per_worker}; at least 1")
            object.__setattr__(self, "batch", self.batch_per_worker * max(1, self.most_workers))
        at_least = {"seed": 0, "epochs": 1, "patience": 0, "batch": 1, "max_failures": 0}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; at least {least}")
        check_max_rejects(self.max_rejects)
        check_memory("memory_gib", self.memory_gib)
        if not 0 <= self.min_delta < 1:
            raise InvalidConfig(f"min_delta is {self.min_delta}; it must lie in [0, 1)")
        if self.threads is not None and self.threads < 1:
            raise InvalidConfig(f"threads is {self.threads}; at least 1")
        if isinstance(self.num_workers, int):
            if self.num_workers < 0:
                raise InvalidConfig(f"num_workers is {self.num_workers}; at least 0")
        elif not (len(self.num_workers) == 2 and 1 <= self.num_workers[0] <= self.num_workers[1]):
            raise InvalidConfig(
                f"num_workers is {list(self.num_workers)}; give one number, or the least and most"
            )
        if not self.most_workers <= self.n_micro_batches <= self.batch:
            raise InvalidConfig(
                f"a batch of {self.batch} in {self.n_micro_batches} micro-batches does not fill "
                f"{self.most_workers} workers: micro_batches must be at least their number and at "
                "most batch; raise batch or batch_per_worker, or use fewer workers"
            )
        group = self.mining.samples_per_class
        if group is not None and (self.batch % group or self.batch < 2 * group):
            raise InvalidConfig(
                f"batch is {self.batch}; it must be at least two times mining.samples_per_class, "
                f"{group}, and a multiple of it"
            )
        if "://" in self.storage:
            raise InvalidConfig(
                f"storage is {self.storage}; give a folder, such as that of the mounted bucket"
            )
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise InvalidConfig(f"name is {self.name!r}; it must be usable as the name of a folder")
        # What is left open is spelled out, for a run to be the same under another version.
        object.__setattr__(self, "encoder", self.encoder.completed())
        if self.preprocessing == Preprocessing():
            of_model = model_preprocessing(self.encoder)
            max_pixels = self.preprocessing.max_pixels  # which is not compared
            object.__setattr__(self, "preprocessing", replace(of_model, max_pixels=max_pixels))
        height, width = self.preprocessing.size
        if self.augmentation.occlusion and width % height:
            raise InvalidConfig(
                f"augmentation.occlusion needs a width that is a multiple of the height, not "
                f"{height} x {width}: change preprocessing.size"
            )
        positive, negatives = find_method(self.encoder.method).mining
        mining = replace(
            self.mining,
            positive=self.mining.positive or positive,
            negatives=self.mining.negatives or negatives,
        )
        object.__setattr__(self, "mining", mining)
        object.__setattr__(self, "loss", asdict(self.loss_options()))
        if self.encoder.freeze:
            self._check_frozen()
        self._check_changes()

    def _check_frozen(self) -> None:
        if not self.encoder.starts_pretrained:
            raise InvalidConfig(
                "encoder.freeze keeps a random backbone: give encoder.pretrained or checkpoint_path"
            )
        if self.augmentation != Augmentation():
            raise InvalidConfig(
                "encoder.freeze embeds every image once: leave augmentation out, or do not freeze"
            )

    def _check_changes(self) -> None:
        epochs = [change.epoch for change in self.changes]
        if epochs != sorted(set(epochs)) or (epochs and epochs[-1] > self.epochs):
            raise InvalidConfig(
                f"changes name the epochs {epochs}; they go up, to {self.epochs} at most"
            )
        for epoch in epochs:
            try:
                self.at(epoch)
            except InvalidConfig as error:
                raise InvalidConfig(f"changes at epoch {epoch}: {error}") from error

    def at(self, epoch: int) -> TrainingConfig:
        """Return the configuration in force in an epoch, which has no changes itself.

        Example:
            >>> config = TrainingConfig("run", changes=(Change(3, {"optimizer.lr": 0.01}),))
            >>> [config.at(epoch).optimizer.lr for epoch in (2, 3, 4)]
            [0.001, 0.01, 0.01]
        """
        options: dict[str, Any] = {}
        for change in self.changes:
            if change.epoch <= epoch:
                options |= change.options
        return override(replace(self, changes=()), options)

    def loss_options(self) -> Any:
        """The options of the loss, as the method's own type.

        Example:
            >>> TrainingConfig("run", loss={"kl_scale": 1e-5}).loss_options()
            BayesianTripletOptions(margin=0.0, kl_scale=1e-05, epsilon=0.0)
        """
        method = self.encoder.method
        kind = find_method(method).LossOptions
        require_options(f"loss of {method}", kind, self.loss)
        return kind(**self.loss)

    @property
    def frozen_batch_norm(self) -> FreezeBatchNorm:
        """What layers of batch normalisation keep."""
        default: FreezeBatchNorm = "statistics" if self.encoder.starts_pretrained else "nothing"
        return self.freeze_batch_norm or default

    @property
    def most_workers(self) -> int:
        """The most processes that train at a time."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def n_micro_batches(self) -> int:
        """Number of micro-batches."""
        return max(1, self.most_workers) if self.micro_batches is None else self.micro_batches


def override(config: TrainingConfig, values: Mapping[str, Any]) -> TrainingConfig:
    """A copy of a configuration with other values of some options, by dotted name.

    With another encoder.method, what the former method decided by default (its options, its loss,
    its mining) becomes the new one's; so does the preprocessing with another encoder.backbone.

    Raises:
        InvalidConfig: there is no option of a name, a value is not of its type, or the values do
            not fit together.

    Example:
        >>> override(TrainingConfig("run"), {"seed": 3, "encoder.dim": 8}).encoder.dim
        8
        >>> override(TrainingConfig("run"), {"encoder.method": "deterministic"}).loss
        {'margin': 0.1, 'form': 'squared', 'scale': 10.0}
    """
    nested: dict[str, Any] = {}
    if values.get("encoder.method", config.encoder.method) != config.encoder.method:
        nested = _without_defaults(config)
    own: dict[str, Any] = {}
    backbone = config.encoder.backbone
    other_backbone = values.get("encoder.backbone", backbone) != backbone
    if other_backbone:
        nested.setdefault("encoder", asdict(config.encoder))["architecture"] = {}
    for name, value in values.items():
        group, dot, option = name.partition(".")
        if not dot:
            own[name] = value
            continue
        before = getattr(config, group, None)
        if isinstance(before, dict):
            into = nested.setdefault(group, dict(before))
        elif is_dataclass(before) and not isinstance(before, type):
            into = nested.setdefault(group, asdict(before))
        else:
            raise InvalidConfig(f"{name} is no option of a training")
        while "." in option:
            inner, _, option = option.partition(".")
            into = into.setdefault(inner, {})
            if not isinstance(into, dict):
                raise InvalidConfig(f"{name} is no option of a training")
        into[option] = value
    if own:
        dependent = ("name", "batch", "micro_batches", "num_workers")  # checked against each other
        present = {each: getattr(config, each) for each in dependent}
        parsed = from_plain(TrainingConfig, present | own)
        own = {name: getattr(parsed, name) for name in own}
        if "batch" in own:
            own.setdefault("batch_per_worker", None)
    for group, plain in nested.items():
        before = getattr(config, group)
        own[group] = plain if isinstance(before, dict) else from_plain(type(before), plain)
    other_backbone &= "preprocessing" not in own
    if other_backbone and config.preprocessing == model_preprocessing(config.encoder):
        # As if left out.
        own["preprocessing"] = Preprocessing(max_pixels=config.preprocessing.max_pixels)
    return replace(config, **own)


def _without_defaults(config: TrainingConfig) -> dict[str, Any]:
    """Encoder, loss and mining as plain values, without what the method decided by default."""
    method = find_method(config.encoder.method)
    options = _differing(config.encoder.options, method.Options)
    mining = asdict(config.mining)
    if (config.mining.positive, config.mining.negatives) == method.mining:
        mining |= {"positive": None, "negatives": None}
    return {
        "encoder": asdict(config.encoder) | {"options": options},
        "loss": _differing(config.loss, method.LossOptions),
        "mining": mining,
    }


def _differing(options: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """The options that are not the defaults of their dataclass."""
    defaults = {each.name: each.default for each in fields(kind)}
    return {name: value for name, value in options.items() if value != defaults.get(name)}


def member_configs(config: TrainingConfig, folder: Path | None = None) -> list[TrainingConfig]:
    """The trainings of the members of an encoder; none where it is trained itself.

    Args:
        folder: of the run; those of its members lie in `members` in it.
    """
    return [
        replace(
            config,
            name=f"member-{number}",
            storage=config.storage if folder is None else str(folder / MEMBERS),
            # Apart also between ensembles of neighbouring seeds.
            seed=int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0]),
            encoder=member,
            data=replace(config.data, root=str(data_root(config.data))),  # trained elsewhere
        )
        for number, member in enumerate(
            find_method(config.encoder.method).member_configs(config.encoder)
        )
    ]


def combined(config: TrainingConfig, members: Sequence[Encoder]) -> Encoder:
    """The encoder of trained members."""
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers are left alone
        encoder = build_encoder(
            config.encoder.without_weights(),
            config.preprocessing.channels,
            config.preprocessing.size,
        )
    encoder.take_members(members)
    encoder.config = config.encoder
    return encoder.eval()
