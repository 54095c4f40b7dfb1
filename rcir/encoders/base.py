"""The configuration of an encoder, the class that every method extends, and all methods."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rcir.data.images import ImageLike
from rcir.data.preprocessing import Preprocessing
from rcir.data.records import ImageSet
from rcir.data.relevance import Relevance
from rcir.embedding import Embedding
from rcir.encoders.backbones import Weights
from rcir.encoders.hub import model_architecture
from rcir.errors import InvalidConfig
from rcir.imports import find_class, import_path
from rcir.losses import PointLossOptions, TupleRows, point_tuple_loss
from rcir.mining import Negatives, Positive
from rcir.options import require_choice, require_options
from rcir.torch_settings import full_precision, shared_by_threads

Images: TypeAlias = "Sequence[ImageLike] | NDArray[np.uint8]"
Pooling = Literal["gem", "avg", "flatten"]

N_DRAWS = 20  # of a query, where its encoder states a variance
AT_ONCE = 1 << 14  # embeddings held by `TrainingImages.batches`: 16 replicas embed a block each

METHODS = {
    "deterministic": "rcir.encoders.deterministic:Deterministic",
    "mc-dropout": "rcir.encoders.mc_dropout:MCDropout",
    "deep-ensemble": "rcir.encoders.deep_ensemble:DeepEnsemble",
    "btl": "rcir.encoders.btl:BayesianTriplet",
    "hib": "rcir.encoders.hib:HedgedInstance",
    "vmf": "rcir.encoders.vmf:VonMisesFisher",
    "tripreg": "rcir.encoders.tripreg:TripReg",
    "lam": "rcir.encoders.lam:LaplacianMetric",
    "norm-softmax": "rcir.encoders.deterministic:NormSoftmax",
    "pfe": "rcir.encoders.pfe:ProbabilisticFaceEmbedding",
    "pretrained": "rcir.encoders.features:Pretrained",
}


@dataclass(frozen=True)
class EncoderConfig:
    """The method, backbone and options of an encoder.

    Args:
        method: how the encoder knows its uncertainty: a name in `rcir.encoders.METHODS`, of which
            "pretrained" does not, and has no head to train; or the import path of an encoder of
            your own, "package.module:Class", see `rcir.encoders.Encoder`.
        backbone: "mnist-cnn", "lenet", "cifar-cnn", "resnet10", "resnet50", "resnet101" or
            "densenet161"; or a model of a hub, "timm:NAME", "open_clip:NAME/TAG" or
            "transformers:NAME", of which the first two also take "hf-hub:ORG/NAME".
        pooling: "gem"; "avg", also of features that can be negative; or "flatten" where the place
            of a feature matters. Models that pool by themselves take either of the latter two.
        dim: length of the embedding; of method "pretrained" it is that of the pooled features.
        pretrained: start from pretrained weights: true for those that the hub has of a model, or
            for torchvision's best of resnet50, resnet101 and densenet161; "IMAGENET1K_V1" for those
            that the papers started from, or "IMAGENET1K_V2" (not of densenet161).
        checkpoint_path: start from the weights of a .safetensors file instead, of the whole network
            with its classifier (of OpenCLIP, with its text tower).
        freeze: the backbone is not trained, and its batch statistics stay: a training embeds every
            image once, and trains heads on the pooled features. GeM keeps its exponent of 3.
        projected: of a CLIP model of transformers, embed by the projection that it compares with
            texts, instead of the pooled vector before it.
        architecture: what builds a backbone of a repository where its hub cannot be reached; filled
            in.
        options: of the method, see the `Options` of its class; those that are left out are the
            method's defaults.

    Raises:
        InvalidConfig: an argument is out of its range, or an option is another method's.

    Example:
        >>> EncoderConfig("btl", options={"members": 7})
        Traceback (most recent call last):
        rcir.errors.InvalidConfig: encoder.options of btl: there is no option members; there are ...
    """

    method: str = "btl"
    backbone: str = "mnist-cnn"
    pooling: Pooling = "flatten"
    dim: int = 16
    pretrained: bool | Weights = False
    checkpoint_path: str | None = None
    freeze: bool = False
    projected: bool = False
    architecture: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice("encoder.pooling", self.pooling, Pooling)
        if self.dim < 2:
            raise InvalidConfig(f"encoder.dim is {self.dim}; at least 2")
        if not isinstance(self.pretrained, bool) and self.pretrained not in get_args(Weights):
            raise InvalidConfig(
                f"encoder.pretrained is {self.pretrained!r}; it is true, false or one of "
                f"{', '.join(get_args(Weights))}"
            )
        if self.pretrained and self.checkpoint_path is not None:
            raise InvalidConfig(
                f"encoder.checkpoint_path is {self.checkpoint_path} and encoder.pretrained "
                f"{self.pretrained}: give one of them"
            )
        self.method_options()

    def method_options(self) -> Any:
        """The options as the method's own type, all of them.

        Example:
            >>> EncoderConfig("tripreg", options={"unit": True}).method_options()
            TripRegOptions(variance_hidden=128, unit=True)
        """
        kind = find_method(self.method).Options
        require_options(f"encoder.options of {self.method}", kind, self.options)
        return kind(**self.options)

    def completed(self) -> EncoderConfig:
        """The same with the method's defaults and the backbone's architecture spelled out."""
        architecture = self.architecture or model_architecture(self.backbone)
        return replace(self, options=asdict(self.method_options()), architecture=architecture)

    @property
    def starts_pretrained(self) -> bool:
        """True if the backbone starts from pretrained weights."""
        return bool(self.pretrained) or self.checkpoint_path is not None

    def without_weights(self) -> EncoderConfig:
        """The same without the weights that it starts from."""
        return replace(self, pretrained=False, checkpoint_path=None)


@dataclass(frozen=True)
class NoOptions:
    """The options of a method without any."""


@dataclass(frozen=True)
class EmbeddedTuples:
    """The embeddings of b tuples: an anchor, a positive and j negatives each.

    Attributes:
        images: of the b anchors, then the b positives, then the b * j negatives, anchor by anchor.
        valid: (b, j) bool; negatives that count. Each anchor has at least one.
    """

    images: Embedding
    valid: Tensor

    @property
    def vectors(self) -> TupleRows:
        """The vectors, by role."""
        return self.by_role(self.images.vectors)

    def by_role(self, values: Tensor) -> TupleRows:
        """Return (b + b + b * j, d) values of the images by role."""
        return TupleRows.split(values, self.valid)


class Encoder(nn.Module):
    """Images to `Embedding`: a method is a subclass of this, in one file.

    ``encoder(images)`` is one differentiable pass for training; ``encoder.embed(images)`` is what
    a gallery and its queries are embedded with. The same image gives the same embedding in every
    batch, up to the rounding of the arithmetic below.

    A method says here all that others need to know of it:

    - `Options`, `LossOptions`: frozen dataclasses of its options (``encoder.options``) and of those
      of its loss (``loss``), which check their values themselves.
    - `mining`: the positive and negatives it is best trained with.
    - `forward`: images (n, C, H, W) to their `Embedding`, with gradients.
    - `loss`: of each tuple; or, with `by_label`, `label_loss`: of each image, and `check_labels`.
    - `after_step`, `fit_posthoc`: what it does after a step of the optimizer, after training.
    - `reranks`, `rerank`: distances of its own to the candidates that the index found.
    - `draws`, `draw_distances`: what several draws of a query find nearest.
    - `member_configs`, `take_members`: if it is made of encoders that are trained by themselves.
    - `_embed`, `_samples`: where embedding at test time is more than a forward pass.

    Rcir's own are in `rcir.encoders.METHODS`. One of yours is named by its import path, as
    ``method``, in configurations; it is trained, stored and loaded like the others wherever its
    module can be imported.

    Args:
        config: of the encoder. The ``__init__`` of a method takes (config, channels, size), the
            latter two of its images: 1 or 3, and (height, width).

    Attributes:
        config: with all options spelled out.
        options: of the method, as its `Options`.
    """

    Options: ClassVar[type] = NoOptions
    LossOptions: ClassVar[type] = PointLossOptions
    mining: ClassVar[tuple[Positive, Negatives]] = ("nearest", "top-random")
    by_label: ClassVar[bool] = False  # whether it is trained by the labels of images, not by tuples
    revision: ClassVar[int] = 0  # raise it with any change of what is computed from given weights

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config.completed()
        self.options: Any = config.method_options()

    def loss(self, tuples: EmbeddedTuples, options: Any) -> Tensor:
        """The loss of each tuple, (b,): `point_tuple_loss` of the vectors, unless overridden.

        Args:
            tuples: the embedded tuples.
            options: `LossOptions` in force.
        """
        return point_tuple_loss(tuples.vectors, tuples.valid, options)

    def label_loss(self, embedding: Embedding, labels: Tensor, options: Any) -> Tensor:
        """The loss of each image, (b,), by its label; asked instead of `loss` if `by_label`.

        Args:
            embedding: of b images.
            labels: (b,) int64, of n training labels numbered from 0 to n - 1.
            options: `LossOptions` in force.
        """
        raise NotImplementedError(f"{type(self).__name__} is trained by tuples, without labels")

    def check_labels(self, count: int) -> None:
        """Raise `InvalidConfig` if it cannot be trained by so many labels.

        Called once before training if `by_label`. By default any number is possible.
        """

    def after_step(self) -> None:
        """Called after every step of the optimizer, on every worker."""

    def fit_posthoc(self, training: TrainingImages) -> None:
        """Fit what is fitted on the trained encoder, with its chosen weights.

        What it fits belongs in buffers or parameters, which are stored.
        """

    @property
    def reranks(self) -> bool:
        """True if candidates are ranked by `rerank` instead of by the distance of vectors."""
        return False

    def rerank(self, queries: Embedding, candidates: Embedding) -> Tensor:
        """Distances (n, k), at least 0, of n queries to k candidates each; asked if `reranks`.

        Args:
            queries: n of them.
            candidates: n * k gallery images, query by query.
        """
        raise NotImplementedError(f"{type(self).__name__} says that it reranks, and has no rerank")

    @property
    def draws(self) -> bool:
        """True if several draws of a query can rank candidates, see `draw_distances`."""
        return False

    def draw_distances(self, queries: Embedding, candidates: Tensor) -> Tensor:
        """L2 distances (t, n, k) of t draws of n queries to candidates; asked if `draws`.

        Gaussian draws of the vectors by their variance, with the same noise for every query, unless
        overridden.

        Args:
            queries: n of them.
            candidates: (n, k, d) vectors of the gallery.
        """
        dim = queries.vectors.shape[1]
        if queries.variance is None or queries.variance.shape[1] not in (1, dim):
            raise InvalidConfig(
                f"{type(self).__name__} says that it draws, and states no variance of its vectors: "
                "write its draw_distances, or let draws be false"
            )
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(N_DRAWS, 1, dim, generator=generator, device="cpu")
        vectors = queries.vectors + queries.variance.sqrt() * noise.to(queries.vectors)
        # Of differences: rounding in products would reorder candidates that are near each other.
        exact = "donot_use_mm_for_euclid_dist"
        return torch.cdist(vectors.transpose(0, 1), candidates, compute_mode=exact).transpose(0, 1)

    @classmethod
    def member_configs(cls, config: EncoderConfig) -> list[EncoderConfig]:
        """Configurations of the encoders that are trained instead of it; none for most methods."""
        return []

    def take_members(self, members: Sequence[Encoder]) -> None:
        """Take over the weights of the trained encoders of `member_configs`."""
        raise NotImplementedError(f"{type(self).__name__} has members, and no take_members")

    def embed(self, images: Tensor) -> Embedding:
        """Embed images (n, C, H, W) in evaluation mode without gradients."""
        with self._evaluating():
            return self._embed(images)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode, without gradients, in full precision.

        A query has to be embedded as the calibration queries were, up to the tolerance of
        `rcir.risk.score_functions`, on whatever device and in whatever thread it is asked.
        """
        mode = shared_by_threads(self, self._evaluation_mode)
        with mode, torch.inference_mode(), full_precision():
            yield

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Evaluation mode, and afterwards the mode before."""
        training = self.training
        if training:
            self.eval()
        try:
            yield
        finally:
            if training:
                self.train()

    def _embed(self, images: Tensor) -> Embedding:
        embedding: Embedding = self(images)
        return embedding

    def samples(self, images: Tensor, generator: torch.Generator) -> Tensor | None:
        """Draws of the embedding, (t, n, d), in evaluation mode without gradients.

        For instance the passes of MC dropout, or draws from the Gaussians of BTL. None for an
        encoder that is certain.

        Args:
            images: (n, C, H, W).
            generator: on the CPU, of the noise where there is any; hand on the same one from batch
                to batch.
        """
        with self._evaluating():
            return self._samples(images, generator)

    def _samples(self, images: Tensor, generator: torch.Generator) -> Tensor | None:
        return None

    def parts(self) -> tuple[list[Tensor], list[Callable[..., Any]]]:
        """Weights and buffers, and forward hooks: all that decides what is computed."""
        tensors: list[Tensor] = []
        hooks: list[Callable[..., Any]] = []
        for module in self.modules():  # one walk, for it is made for every query
            for held in (module._parameters, module._buffers):
                tensors += [values for values in held.values() if values is not None]
            hooks += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        return tensors, hooks

    def fingerprint(self) -> str:
        """A digest of the configuration, of every module, hook and weight, and of `revision`."""
        config = asdict(self.config)
        del config["checkpoint_path"]  # wherever the weights come from, they are digested
        description = json.dumps(config, sort_keys=True) + repr(self)
        if self.revision:
            description += f" revision {self.revision}"
        for hook in self.parts()[1]:
            description += getattr(hook, "__qualname__", type(hook).__qualname__)
        digest = hashlib.sha256(description.encode())
        self._add_weights(digest)
        return digest.hexdigest()

    def weights_digest(self) -> str:
        """A digest of the weights alone."""
        digest = hashlib.sha256()
        self._add_weights(digest)
        return digest.hexdigest()

    def _add_weights(self, digest: Any) -> None:
        for name, values in sorted(self.state_dict().items()):
            digest.update(name.encode())
            # As bytes: NumPy has no bfloat16.
            digest.update(values.cpu().contiguous().flatten().view(torch.uint8).numpy())


@dataclass(frozen=True)
class TrainingImages:
    """Training images, to be embedded by all workers of a training.

    Attributes:
        images: with what makes them match.
        preprocessing: to the encoder's input.
        embedder: embeds, see `rcir.encoders.embedder.Embedder`.
        seed: of the training.
        loss: the options of the loss that the encoder was trained with.
    """

    images: ImageSet
    preprocessing: Preprocessing
    embedder: Callable[[Encoder, Preprocessing, Images], Embedding]
    seed: int
    loss: Any

    def sample(self, size: int) -> TrainingImages:
        """At most so many of them, drawn at random, in their order."""
        rng = np.random.default_rng([self.seed])
        rows = np.sort(rng.permutation(len(self.images))[:size])
        return replace(self, images=self.images.subset(rows))

    def embed(self, encoder: Encoder) -> Embedding:
        """Embed all images, without augmentation; the result is on the CPU."""
        return self.embedder(encoder, self.preprocessing, self.images.images)

    def batches(self, encoder: Encoder, size: int) -> Iterator[tuple[Embedding, Relevance]]:
        """Yield all images in random batches, without holding more than `AT_ONCE` or one batch.

        Args:
            encoder: embeds them; it need not be the one that was trained, but a part of it.
            size: of a batch; the last may be smaller.
        """
        order = np.random.default_rng([self.seed]).permutation(len(self.images))
        at_once = max(1, AT_ONCE // size) * size
        for start in range(0, len(order), at_once):
            rows = order[start : start + at_once]
            embedding = self.embedder(encoder, self.preprocessing, self.images.pick(rows))
            for first in range(0, len(rows), size):
                batch = slice(first, first + size)
                yield embedding[batch], self.images.relevance.subset(rows[batch])


def find_method(name: str) -> type[Encoder]:
    """The class of a method: one of `METHODS`, or any subclass of `Encoder` by its import path.

    Args:
        name: a name in `METHODS`, or "package.module:Class". The module is imported, also by
            workers and wherever the trained encoder is loaded: it must be importable there.

    Raises:
        InvalidConfig: there is no such name, module or class, or it is not an `Encoder`.

    Example:
        >>> find_method("btl") is find_method("rcir.encoders.btl:BayesianTriplet")
        True
    """
    method = find_class("encoder.method", name, METHODS)
    if not issubclass(method, Encoder):
        raise InvalidConfig(
            f"encoder.method {name!r} is no encoder: it must be a subclass of rcir.encoders.Encoder"
        )
    return method


def require_encoder(encoder: object) -> None:
    """Raise `InvalidConfig` unless it is an `Encoder`."""
    if not isinstance(encoder, Encoder):
        raise InvalidConfig(
            f"the encoder is a {type(encoder).__name__}; a retriever takes an rcir.encoders."
            "Encoder: make a subclass whose forward returns an Embedding, in a module, and build "
            'it with EncoderConfig("package.module:Class") (docs/encoders.md shows one)'
        )


def method_name(kind: type[Encoder]) -> str:
    """Return the name by which `find_method` finds a class.

    Example:
        >>> method_name(find_method("btl"))
        'btl'
    """
    path = import_path(kind)
    return next((name for name, known in METHODS.items() if known == path), path)
