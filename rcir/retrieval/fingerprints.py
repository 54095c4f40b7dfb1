"""Digests of everything that a calibration depends on."""

from __future__ import annotations

import hashlib
import json
import operator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rcir.index import Index
from rcir.retrieval.gallery import Gallery
from rcir.retrieval.queries import VectorOptions

if TYPE_CHECKING:  # vectors need no torch
    from torch import Tensor

    from rcir.data.preprocessing import Preprocessing
    from rcir.encoders.base import Encoder


MODEL_OPTIONS = ("method", "backbone", "pooling", "dim", "projected", "options")


class Fingerprints:
    """Digests of encoder, preprocessing, gallery and index, recomputed only after a change.

    A change in memory is detected if a part is replaced, the version of the index changes, torch
    writes to a weight or replaces its memory (as a change of precision does), or a forward hook is
    added or removed. Writes to a weight that torch does not count are not detected (`.data`, NumPy
    views).
    """

    def __init__(self) -> None:
        # Parts, counts, tensors (which keep their addresses while they are referred to) and
        # digests, replaced in one assignment, because several threads may request them.
        self._last: tuple[list[object], list[object], list[Tensor], dict[str, str]] | None = None

    def compute(
        self,
        encoder: Encoder | None,
        preprocessing: Preprocessing | None,
        index: Index,
        gallery: Gallery,
        options: VectorOptions,
    ) -> dict[str, str]:
        """Return the digests by the name of the part.

        With an encoder these are "gallery", "index", "encoder" and "preprocessing". For vectors
        "options" replaces the last two; it names the model, with a digest of the encoder that is
        here, so that a calibration holds with the encoder as without.
        """
        parts: list[object] = [encoder, preprocessing, index, gallery, options]
        weights, hooks = ([], []) if encoder is None else encoder.parts()
        parts += hooks
        # Torch counts its writes to a tensor in `_version`.
        counts: list[object] = [index.version, len(parts)]
        counts += [count for weight in weights for count in (weight._version, weight.data_ptr())]
        last = self._last
        if last is not None and last[1] == counts and all(map(operator.is_, last[0], parts)):
            return last[3]
        fingerprints = {"gallery": gallery.fingerprint, "index": index.version}
        if encoder is not None and preprocessing is not None and options.model is not None:
            name = options.model.rpartition("@")[0]
            model = f"{name}@{model_digest(encoder, preprocessing)}"
            fingerprints["options"] = _digest(asdict(options) | {"model": model})
        elif encoder is not None and preprocessing is not None:
            fingerprints["encoder"] = encoder.fingerprint()
            fingerprints["preprocessing"] = _digest(preprocessing.identity())
        else:
            fingerprints["options"] = _digest(asdict(options))
        self._last = parts, counts, [weight.data for weight in weights], fingerprints
        return fingerprints


def model_digest(encoder: Encoder, preprocessing: Preprocessing) -> str:
    """Return a digest of weights, options, hooks and preprocessing, by which models are named."""
    options = {name: getattr(encoder.config, name) for name in MODEL_OPTIONS}
    described = encoder.weights_digest()
    described += json.dumps([preprocessing.identity(), options], sort_keys=True)
    for hook in encoder.parts()[1]:
        described += getattr(hook, "__qualname__", type(hook).__qualname__)
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def _digest(options: dict[str, Any]) -> str:
    plain = json.dumps(options, sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()
