"""The configuration that names an encoder."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from rcir.encoders.backbones import Weights
from rcir.encoders.hub import model_architecture
from rcir.encoders.methods import find_method
from rcir.errors import InvalidConfig
from rcir.options import require_options

Pooling = Literal["gem", "avg", "flatten"]


@dataclass(frozen=True)
class EncoderConfig:
    """Which encoder, and its shape.

    Args:
        method: how the encoder knows its uncertainty: "pretrained" (it does not, and has no head to
            train), "deterministic", "mc-dropout", "deep-ensemble", "btl", "lam", "norm-softmax", or
            the import path of an encoder of your own, "package.module:Class"; see
            `rcir.encoders.Encoder`.
        backbone: "mnist-cnn", "cifar-cnn", "resnet10", "resnet50" or "densenet161"; or a model of
            a hub, "timm:NAME", "open_clip:NAME/TAG" or "transformers:NAME".
        pooling: "gem"; "avg", also of features that can be negative; or "flatten" where the place
            of a feature matters. Models that pool by themselves take either of the latter two.
        dim: length of the embedding; of method "pretrained" it is that of the pooled features.
        pretrained: start from pretrained weights: true for those that the hub has of a model, or
            for torchvision's best of resnet50 and densenet161; "IMAGENET1K_V1" for those of these
            that the papers started from, or "IMAGENET1K_V2" (resnet50 only).
        checkpoint_path: start from the weights of a .safetensors file instead, of the whole network
            with its classifier (of OpenCLIP, with its text tower).
        freeze: the backbone is not trained, and its batch statistics stay: a training embeds every
            image once, and trains heads on the pooled features. GeM keeps its exponent of 3.
        architecture: what builds a backbone of transformers where its hub cannot be reached; filled
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
    architecture: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise InvalidConfig(
                f"encoder.pooling {self.pooling!r} is unknown; choose one of "
                f"{', '.join(get_args(Pooling))}"
            )
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
            >>> EncoderConfig("mc-dropout", options={"passes": 5}).method_options()
            MCDropoutOptions(dropout=0.1, passes=5)
        """
        kind = find_method(self.method).Options
        require_options(f"encoder.options of {self.method}", kind, self.options)
        return kind(**self.options)

    def completed(self) -> EncoderConfig:
        """The same with the method's defaults and the backbone's architecture spelled out."""
        known = self.architecture or model_architecture(self.backbone)
        return replace(self, options=asdict(self.method_options()), architecture=known)

    @property
    def starts_pretrained(self) -> bool:
        """Whether the backbone starts from pretrained weights."""
        return bool(self.pretrained) or self.checkpoint_path is not None

    def without_weights(self) -> EncoderConfig:
        """The same without the weights that it starts from."""
        return replace(self, pretrained=False, checkpoint_path=None)
