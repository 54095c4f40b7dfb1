"""The configuration of an encoder, the class that every method extends, and all methods."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
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
from rcir.options import require_at_least, require_choice, require_options
from rcir.torch_settings import BY_DIFFERENCES, full_precision, shared_by_threads

Images: TypeAlias = "Sequence[ImageLike] | NDArray[np.uint8]"
Pooling = Literal["gem", "avg", "flatten"]
Activation = Literal["leaky-relu", "relu"]
Precision = Literal["float32", "bfloat16"]
EARLIER = "earlier"  # metadata of an option: its value in folders from before it existed

N_DRAWS = 20  # of a query whose encoder states a variance
MAX_HELD = 1 << 16  # embeddings that `TrainingImages.batches` holds: each time, workers start

METHODS = {
    "deterministic": "rcir.encoders.deterministic:Deterministic",
    "mc-dropout": "rcir.encoders.mc_dropout:MCDropout",
    "deep-ensemble": "rcir.encoders.deep_ensemble:DeepEnsemble",
    "btl": "rcir.encoders.btl:BayesianTriplet",
    "hib": "rcir.encoders.hib:HedgedInstance",
    "vmf": "rcir.encoders.btl:VonMisesFisher",
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
        method: a name in `rcir.encoders.METHODS`, or the import path of an encoder of your own,
            "package.module:Class", see `rcir.encoders.Encoder`.
        backbone: "mnist-cnn", "lenet", "cifar-cnn", "resnet10", "resnet50", "resnet101" or
            "densenet161"; "lstm" for sequences of features; or a model of a hub, "timm:NAME",
            "open_clip:NAME/TAG" or "transformers:NAME", of which the first two also take
            "hf-hub:ORG/NAME".
        pooling: "gem"; "avg", also of features that can be negative; or "flatten" where the place
            of a feature matters. Models that pool by themselves take either of the latter two.
        dim: length of the embedding, at least 2, or 1 if vectors need not have unit length (as of
            "hib"); method "pretrained" sets it to that of the pooled features.
        pretrained: start from pretrained weights: true for those of the hub, or torchvision's best
            of resnet50, resnet101 and densenet161; "IMAGENET1K_V1" for those that the papers
            started from, or "IMAGENET1K_V2" (not of densenet161).
        checkpoint_path: start from the weights of a .safetensors file instead, of the whole network
            with its classifier (of OpenCLIP, with its text tower).
        freeze: train only the heads, on the pooled features, which a training computes once. GeM
            keeps its exponent of 3.
        projected: embed by the projection that a CLIP model of transformers compares with texts,
            instead of the pooled vector before it.
        architecture: builds a backbone of a repository when its hub cannot be reached; filled in.
        options: of the method, see the `Options` of its class.

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
        require_at_least(self, "encoder.", dim=1)
        if not isinstance(self.pretrained, bool) and self.pretrained not in get_args(Weights):
            raise InvalidConfig(
                f"encoder.pretrained is {self.pretrained!r}; it is true, false or one of "
                f"{', '.join(get_args(Weights))}"
            )
        if self.pretrained and self.checkpoint_path is not None:
            raise InvalidConfig("encoder.pretrained and encoder.checkpoint_path exclude each other")
        options = self.method_options()
        if self.dim == 1 and find_method(self.method).unit_length(options):
            raise InvalidConfig(
                f"encoder.dim is 1; it must be at least 2, since {self.method} gives vectors unit "
                "length: in one dimension all would be 1 or -1"
            )

    def method_options(self) -> Any:
        """Return all options of the method, as its `Options`."""
        kind = find_method(self.method).Options
        require_options(f"encoder.options of {self.method}", kind, self.options)
        return kind(**self.options)

    def completed(self) -> EncoderConfig:
        """Return the configuration with all options of the method and the architecture."""
        architecture = self.architecture or model_architecture(self.backbone)
        return replace(self, options=asdict(self.method_options()), architecture=architecture)

    @property
    def starts_pretrained(self) -> bool:
        """True if the backbone starts from the weights of a hub or a file."""
        return bool(self.pretrained) or self.checkpoint_path is not None

    def without_weights(self) -> EncoderConfig:
        """Return the configuration without initial weights."""
        return replace(self, pretrained=False, checkpoint_path=None)


@dataclass(frozen=True)
class NoOptions:
    """Options of a method or of its loss that has none."""


@dataclass(frozen=True)
class HeadOptions:
    """The option of methods whose second head has a hidden layer.

    Args:
        activation: of the hidden layer: "leaky-relu", with a slope of 0.1 below 0, or "relu", as in
            the papers, with which the training can end with units that are 0 for every image.
    """

    activation: Activation = field(default="leaky-relu", metadata={EARLIER: "relu"})


def stored_encoder(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `EncoderConfig` that a folder holds as plain values.

    Options that did not exist when it was written have the value that they had in effect.
    """
    known = fields(find_method(values["method"]).Options)
    earlier = {each.name: each.metadata[EARLIER] for each in known if EARLIER in each.metadata}
    return {**values, "options": {**earlier, **values.get("options", {})}}


@dataclass(frozen=True)
class EmbeddedTuples:
    """Embeddings of b tuples: an anchor, a positive and j negatives each.

    Attributes:
        images: b anchors, then b positives, then b * j negatives, anchor by anchor.
        valid: (b, j) bool; negatives that count. Each anchor has at least one.
    """

    images: Embedding
    valid: Tensor

    @property
    def vectors(self) -> TupleRows:
        """The vectors by role."""
        return self.by_role(self.images.vectors)

    def by_role(self, values: Tensor) -> TupleRows:
        """Return (b + b + b * j, d) values of the images by role."""
        return TupleRows.split(values, self.valid)


class Encoder(nn.Module):
    """Images to `Embedding`: a method is a subclass of this, in one file.

    ``encoder(images)`` is one differentiable pass for training; ``encoder.embed(images)`` embeds a
    gallery and its queries. An image has the same embedding in every batch, up to rounding.

    A method needs `forward`, images (n, C, H, W) to their `Embedding` with gradients. It may
    override:

    - `Options`, `LossOptions`: frozen dataclasses of its options (``encoder.options``) and of its
      loss (``loss``), which check their values.
    - `mining`: the default choice of positive and negatives.
    - `loss` of each tuple; or, with `by_label`, `label_loss` of each image, and `check_labels`.
    - `after_step`, `fit_posthoc`: called after a step of the optimizer, and after training.
    - `unit_length`: False allows vectors of one number.
    - `reranks`, `rerank`: its own distances to the candidates of the index.
    - `draws`, `draw_distances`: distances of several draws of a query.
    - `member_configs`, `take_members`: it is made of separately trained encoders.
    - `_embed`: embedding at test time beyond a forward pass.

    `rcir.encoders.METHODS` has the methods of rcir. One of your own is named by its import path in
    ``encoder.method``, and works like the others wherever its module can be imported.

    Args:
        config: of the encoder. The ``__init__`` of a method takes (config, channels, size): the
            number of channels of images, 1 or 3, and their (height, width).

    Attributes:
        config: with all options spelled out.
        options: of the method, as its `Options`.
    """

    Options: ClassVar[type] = NoOptions
    LossOptions: ClassVar[type] = PointLossOptions
    mining: ClassVar[tuple[Positive, Negatives]] = ("nearest", "top-random")
    by_label: ClassVar[bool] = False  # trained by the labels of images, not by tuples
    revision: ClassVar[int] = 0  # raise it with any change of what is computed from the weights

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config.completed()
        self.options: Any = config.method_options()

    def loss(self, tuples: EmbeddedTuples, options: Any) -> Tensor:
        """Return the loss of each tuple, (b,); options are of type `LossOptions`."""
        return point_tuple_loss(tuples.vectors, tuples.valid, options)

    def label_loss(self, embedding: Embedding, labels: Tensor, options: Any) -> Tensor:
        """Return the loss of each of b images with labels (b,) int64 from 0; used if `by_label`."""
        raise NotImplementedError(f"{type(self).__name__} is trained by tuples, without labels")

    def check_labels(self, count: int) -> None:
        """Raise `InvalidConfig` if it cannot be trained by so many labels; called if `by_label`."""

    def after_step(self) -> None:
        """Called after every step of the optimizer, on every worker."""

    def fit_posthoc(self, training: TrainingImages) -> None:
        """Fit buffers or parameters, which are stored, after training."""

    @classmethod
    def unit_length(cls, options: Any) -> bool:
        """Return whether vectors have unit length, given `Options`; if so, `dim` is 2 or more."""
        return bool(getattr(options, "unit", True))

    @property
    def reranks(self) -> bool:
        """True if candidates are ranked by `rerank` instead of by the distance of vectors."""
        return False

    def rerank(self, queries: Embedding, candidates: Embedding) -> Tensor:
        """Return distances (n, k), at least 0, of n queries; called if `reranks`.

        There are n * k candidates, query by query.
        """
        raise NotImplementedError(f"{type(self).__name__} reranks, and has no method rerank")

    @property
    def draws(self) -> bool:
        """True if several draws of a query can rank candidates, see `draw_distances`."""
        return False

    def draw_distances(self, queries: Embedding, candidates: Tensor) -> Tensor:
        """Return L2 distances (t, n, k) of t draws of n queries; called if `draws`.

        Candidates are vectors (n, k, d) of the gallery. By default, draws are Gaussian by the
        variance, with the same noise for every query.
        """
        dim = queries.vectors.shape[1]
        if queries.variance is None or queries.variance.shape[1] not in (1, dim):
            raise InvalidConfig(
                f"{type(self).__name__} draws, but has no variance of its vectors: override "
                "draw_distances, or set draws to False"
            )
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(N_DRAWS, 1, dim, generator=generator, device="cpu")
        vectors = queries.vectors + queries.variance.sqrt() * noise.to(queries.vectors)
        distances = torch.cdist(vectors.transpose(0, 1), candidates, compute_mode=BY_DIFFERENCES)
        return distances.transpose(0, 1)

    @classmethod
    def member_configs(cls, config: EncoderConfig) -> list[EncoderConfig]:
        """Return the configurations of encoders that are trained in its place; often none."""
        return []

    def take_members(self, members: Sequence[Encoder]) -> None:
        """Take over the weights of the trained encoders of `member_configs`."""
        raise NotImplementedError(f"{type(self).__name__} has members, and no method take_members")

    def embed(self, images: Tensor, precision: Precision = "float32") -> Embedding:
        """Embed images (n, C, H, W) in evaluation mode without gradients.

        Queries must be embedded as the calibration queries were, up to
        `rcir.risk.results.TOLERANCE`, on any device and in any thread: in full precision, unless
        vectors of bfloat16 arithmetic are stored for gallery and queries alike.
        """
        mode = shared_by_threads(self, self._evaluation_mode)
        rounded = torch.autocast(images.device.type, torch.bfloat16, precision == "bfloat16")
        with mode, torch.inference_mode(), full_precision(), rounded:
            embedding = self._embed(images)
            return embedding if precision == "float32" else embedding.map(Tensor.float)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
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

    def parts(self) -> tuple[list[Tensor], list[Callable[..., Any]]]:
        """Return weights and buffers, and forward hooks: all that decides what is computed."""
        tensors: list[Tensor] = []
        hooks: list[Callable[..., Any]] = []
        for module in self.modules():  # walked once, since every query calls this
            for held in (module._parameters, module._buffers):
                tensors += [values for values in held.values() if values is not None]
            hooks += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        return tensors, hooks

    def fingerprint(self) -> str:
        """Return a digest of the configuration, modules, hooks, weights and `revision`."""
        config = asdict(self.config)
        del config["checkpoint_path"]  # the weights are digested
        for each in fields(self.options):  # modules and weights tell of what older digests lack
            if EARLIER in each.metadata:
                config["options"].pop(each.name, None)
        description = json.dumps(config, sort_keys=True) + repr(self)
        if self.revision:
            description += f" revision {self.revision}"
        for hook in self.parts()[1]:
            description += getattr(hook, "__qualname__", type(hook).__qualname__)
        digest = hashlib.sha256(description.encode())
        self._add_weights(digest)
        return digest.hexdigest()

    def weights_digest(self) -> str:
        """Return a digest of the weights alone."""
        digest = hashlib.sha256()
        self._add_weights(digest)
        return digest.hexdigest()

    def _add_weights(self, digest: Any) -> None:
        for name, values in sorted(self.state_dict().items()):
            digest.update(name.encode())
            as_bytes = values.cpu().contiguous().flatten().view(torch.uint8)  # also of bfloat16
            digest.update(as_bytes.numpy())


@dataclass(frozen=True)
class TrainingImages:
    """Training images that all workers of a training embed.

    Attributes:
        images: with their relevance.
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
        """Return at most so many of them, drawn at random, in their order."""
        rng = np.random.default_rng([self.seed])
        rows = np.sort(rng.permutation(len(self.images))[:size])
        return replace(self, images=self.images.subset(rows))

    def embed(self, encoder: Encoder) -> Embedding:
        """Embed all images, without augmentation; the result is on the CPU."""
        return self.embedder(encoder, self.preprocessing, self.images.images)

    def batches(self, encoder: Encoder, size: int) -> Iterator[tuple[Embedding, Relevance]]:
        """Yield embeddings, by an encoder or a part of it, and relevance in random batches."""
        order = np.random.default_rng([self.seed]).permutation(len(self.images))
        held = max(1, MAX_HELD // size) * size
        for start in range(0, len(order), held):
            rows = order[start : start + held]
            embedding = self.embedder(encoder, self.preprocessing, self.images.pick(rows))
            for first in range(0, len(rows), size):
                batch = slice(first, first + size)
                yield embedding[batch], self.images.relevance.subset(rows[batch])


def find_method(name: str) -> type[Encoder]:
    """Return the class of a method by its name in `METHODS`, or by its path "package.module:Class".

    Raises:
        InvalidConfig: there is no such name, module or class, or it is not an `Encoder`.
    """
    method = find_class("encoder.method", name, METHODS)
    if not issubclass(method, Encoder):
        raise InvalidConfig(f"encoder.method {name!r} is not a subclass of rcir.encoders.Encoder")
    return method


def require_encoder(encoder: object) -> None:
    """Raise `InvalidConfig` unless it is an `Encoder`."""
    if not isinstance(encoder, Encoder):
        raise InvalidConfig(
            f"the encoder is a {type(encoder).__name__}; it must be an rcir.encoders.Encoder: "
            'write a subclass in a module, and build it with EncoderConfig("package.module:Class") '
            "(docs/encoders.md shows one)"
        )


def by_query(queries: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Return values (n, 1, d) of n queries, and (n, k, d) of their n * k candidates."""
    return queries[:, None], candidates.view(len(queries), -1, candidates.shape[1])


def require_variance(embedding: Embedding) -> Tensor:
    """Return the variance of an embedding; raise `InvalidConfig` if it has none."""
    if embedding.variance is None:
        raise InvalidConfig("this loss or distance needs embeddings with a variance")
    return embedding.variance


def method_name(kind: type[Encoder]) -> str:
    """Return the name by which `find_method` finds a class."""
    path = import_path(kind)
    return next((name for name, target in METHODS.items() if target == path), path)
