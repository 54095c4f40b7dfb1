"""The configuration that names an encoder."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from rcir.encoders.backbones import Weights
from rcir.encoders.methods import find_method
from rcir.errors import InvalidConfig
from rcir.options import require_options

Pooling = Literal["gem", "flatten"]


@dataclass(frozen=True)
class EncoderConfig:
    """Which encoder, and its shape.

    Args:
        method: how the encoder knows its uncertainty: "deterministic", "mc-dropout",
            "deep-ensemble", "btl", "norm-softmax", or the import path of an encoder of your own,
            "package.module:Class"; see `rcir.encoders.Encoder`.
        backbone: "mnist-cnn", "cifar-cnn", "resnet10", "resnet50" or "densenet161".
        pooling: "gem", or "flatten" where the place of a feature matters.
        dim: length of the embedding.
        pretrained: start from ImageNet weights (resnet50 and densenet161 only): true for
            torchvision's best, or "IMAGENET1K_V1" for those that the papers started from, or
            "IMAGENET1K_V2" (resnet50 only).
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
        """The same with the method's defaults spelled out."""
        return replace(self, options=asdict(self.method_options()))
