"""Digests of all that a calibration depends on."""

from __future__ import annotations

import hashlib
import json
import operator
from dataclasses import asdict
from typing import TYPE_CHECKING

from rcir.index import Index
from rcir.retrieval.gallery import Gallery
from rcir.retrieval.vector_options import VectorOptions

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
        self._known: dict[str, str] = {}
        self._parts: list[object] = []
        self._counts: list[object] = []
        # What is referred to keeps its address: no other memory can be taken for it.
        self._kept: list[Tensor] = []

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
        if self._counts != counts or not all(map(operator.is_, self._parts, parts)):
            self._known = {"gallery": gallery.digest(), "index": index.version}
            if encoder is not None and preprocessing is not None:
                self._known |= {
                    "encoder": encoder.fingerprint(),
                    "preprocessing": _digest(preprocessing),
                }
            else:
                self._known["options"] = _digest(options)
            self._parts, self._counts = parts, counts
            self._kept = [values.data for values in weights]
        return self._known


def _digest(described: Preprocessing | VectorOptions) -> str:
    plain = json.dumps(asdict(described), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()
