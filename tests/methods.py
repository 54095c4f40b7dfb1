"""Every method, small enough to be tested beside all others."""

from rcir.encoders import METHODS, EncoderConfig

OPTIONS = {
    "mc-dropout": {"passes": 4},
    "deep-ensemble": {"members": 2},
    "pfe": {"steps": 20, "batch": 32},
    "norm-softmax": {"classes": 100},
}
TRAINED = sorted(METHODS.keys() - {"pretrained"})  # what has something to train
CERTAIN = ("deterministic", "norm-softmax", "pretrained")  # what states no uncertainty
MADE_OF_OTHERS = ("deep-ensemble", "pfe")


def config_of(method, **changes):
    """The configuration of a method, with changes of it."""
    options = OPTIONS.get(method, {}) | changes.pop("options", {})
    return EncoderConfig(method, options=options, **changes)
