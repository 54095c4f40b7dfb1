"""Digests of all that a calibration depends on."""

from __future__ import annotations

import hashlib
import json
import operator
from dataclasses import asdict
from typing import TYPE_CHECKING

from rcir.index import Index
from rcir.retrieval.gallery import Gallery
from rcir.retrieval.queries import VectorOptions

if TYPE_CHECKING:
    from torch import Tensor

    from rcir.data.preprocessing import Preprocessing
    from rcir.encoders.base import Encoder


class Fingerprints:
    """Digests of encoder, preprocessing, gallery and index; computed once per change.

    A change in memory is noticed where a part is replaced, the index has another version, torch
    writes to a weight or replaces its memory (as a change of precision does), or a forward hook
    comes or goes; not where a weight is written to behind torch's back (`.data`, NumPy views).
    """

    def __init__(self) -> None:
        # Parts, counts, tensors (which keep their addresses while they are referred to) and
        # digests, replaced in one assignment: several threads may ask.
        self._last: tuple[list[object], list[object], list[Tensor], dict[str, str]] | None = None

    def of(
        self,
        encoder: Encoder | None,
        preprocessing: Preprocessing | None,
        index: Index,
        gallery: Gallery,
        options: VectorOptions,
    ) -> dict[str, str]:
        """The digests, by what they are of; those of an encoder only if there is one."""
        parts: list[object] = [encoder, preprocessing, index, gallery, options]
        weights, hooks = ([], []) if encoder is None else encoder.parts()
        parts += hooks
        # Torch counts its writes to a tensor.
        counts: list[object] = [index.version, len(parts)]
        counts += [number for values in weights for number in (values._version, values.data_ptr())]
        last = self._last
        if last is not None and last[1] == counts and all(map(operator.is_, last[0], parts)):
            return last[3]
        fingerprints = {"gallery": gallery.digest(), "index": index.version}
        if encoder is not None and preprocessing is not None:
            fingerprints["encoder"] = encoder.fingerprint()
            fingerprints["preprocessing"] = _digest(preprocessing)
        else:
            fingerprints["options"] = _digest(options)
        self._last = parts, counts, [values.data for values in weights], fingerprints
        return fingerprints


def _digest(described: Preprocessing | VectorOptions) -> str:
    plain = json.dumps(asdict(described), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()
