"""The table of methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rcir.errors import InvalidConfig
from rcir.import_paths import find_class, import_path

if TYPE_CHECKING:
    from rcir.encoders.base import Encoder

METHODS = {
    "deterministic": "rcir.encoders.deterministic:Deterministic",
    "mc-dropout": "rcir.encoders.mc_dropout:MCDropout",
    "deep-ensemble": "rcir.encoders.deep_ensemble:DeepEnsemble",
    "btl": "rcir.encoders.btl:BayesianTriplet",
    "hib": "rcir.encoders.hib:HedgedInstance",
    "vmf": "rcir.encoders.vmf:VonMisesFisher",
    "tripreg": "rcir.encoders.tripreg:TripReg",
    "lam": "rcir.encoders.lam:LaplacianMetric",
    "norm-softmax": "rcir.encoders.norm_softmax:NormSoftmax",
    "pfe": "rcir.encoders.pfe:ProbabilisticFaceEmbedding",
    "pretrained": "rcir.encoders.pretrained:Pretrained",
}


def find_method(name: str) -> type[Encoder]:
    """The class of a method: one of `METHODS`, or any subclass of `Encoder` by its import path.

    Args:
        name: a name in `METHODS`, or "package.module:Class". The module is imported, also by
            workers and by whoever loads what was trained: it must be importable there.

    Raises:
        InvalidConfig: there is no such name, module or class, or it is no `Encoder`.

    Example:
        >>> find_method("btl") is find_method("rcir.encoders.btl:BayesianTriplet")
        True
    """
    from rcir.encoders.base import Encoder  # which needs the configuration, and that this module

    found = find_class("encoder.method", name, METHODS)
    if not issubclass(found, Encoder):
        raise InvalidConfig(
            f"encoder.method {name!r} is no encoder: it must be a subclass of rcir.encoders.Encoder"
        )
    return found


def require_encoder(encoder: object) -> None:
    """Raise `InvalidConfig` unless it is an `Encoder`."""
    from rcir.encoders.base import Encoder

    if not isinstance(encoder, Encoder):
        raise InvalidConfig(
            f"the encoder is a {type(encoder).__name__}; a retriever takes an rcir.encoders."
            "Encoder: make a subclass whose forward returns an Embedding, in a module, and build "
            'it with EncoderConfig("package.module:Class") (docs/encoders.md shows one)'
        )


def method_name(kind: type[Encoder]) -> str:
    """By what name `find_method` finds a class.

    Example:
        >>> method_name(find_method("btl"))
        'btl'
    """
    path = import_path(kind)
    return next((name for name, known in METHODS.items() if known == path), path)
