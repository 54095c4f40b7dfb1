"""The retriever: encoder, index and risk controller answering together."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from rcir.data.images import ImageLike
from rcir.data.preprocessing import Preprocessing
from rcir.data.records import ImageSet
from rcir.embedding import Embedding
from rcir.encoders.base import Encoder
from rcir.errors import InvalidConfig, InvalidData, StaleCalibration
from rcir.index.base import Index
from rcir.index.flat import FlatIndex
from rcir.retrieval import Guarantee, Retrieval
from rcir.risk.adapters import SizeAdapter
from rcir.risk.bounds import Bound, check_level
from rcir.risk.controller import RiskController

BATCH = 128  # images in a forward pass
CHUNK = 8 * BATCH  # images in memory as bytes


@dataclass(frozen=True)
class Candidates:
    """What a search found for n queries, before any size is decided.

    Attributes:
        distances: (n, depth) ascending L2 distances; infinite where the gallery ran out.
        positions: (n, depth) positions in the gallery; -1 where it ran out.
        uncertainty: (n,) of the queries: the encoder's own or, for an encoder without one, one
            minus the cosine to the nearest item.
        fingerprints: of the retriever that searched.
    """

    distances: NDArray[np.float32]
    positions: NDArray[np.int64]
    uncertainty: NDArray[np.float64]
    fingerprints: dict[str, str]


class Retriever:
    """Answers queries with sets of gallery images.

    Attributes:
        encoder, preprocessing, index: how an image is searched.
        ids: names of the gallery images.
        labels: (n,) labels of the gallery images, or None.
        max_depth: number of candidates to search for each query, if the gallery has as many.
        controller: decides the sizes; None until calibrated.
    """

    def __init__(
        self,
        encoder: Encoder,
        preprocessing: Preprocessing,
        index: Index,
        ids: Sequence[str],
        labels: NDArray[np.int64] | None = None,
        depth: int = 200,
    ) -> None:
        if depth < 1:
            raise InvalidConfig(f"depth is {depth}; at least 1 candidate must be searched")
        self.encoder = encoder
        self.preprocessing = preprocessing
        self.index = index
        self.ids = _frozen(np.array(ids, dtype=object))
        self.labels = None if labels is None else _frozen(np.array(labels, np.int64))
        self.controller: RiskController | None = None
        self.calibrated_on: dict[str, str] = {}
        self.max_depth = depth
        self._fingerprints: dict[str, str] = {}
        self._fingerprinted: tuple[list[object], list[int]] = ([], [])
        if not len(index) == len(self.ids) == len(self.ids if labels is None else labels):
            raise InvalidData("index, ids and labels of the gallery differ in length")

    @classmethod
    def build(
        cls, encoder: Encoder, preprocessing: Preprocessing, gallery: ImageSet, depth: int = 200
    ) -> Retriever:
        """Embed and index a gallery; the result still has to be calibrated."""
        if len(gallery) == 0:
            raise InvalidData("the gallery is empty: give at least one image")
        vectors = embed(encoder, preprocessing, gallery.images).mean.cpu().numpy()
        index = FlatIndex(vectors.shape[1])
        index.add(vectors)
        return cls(encoder, preprocessing, index, gallery.ids, gallery.labels, depth)

    @property
    def depth(self) -> int:
        """Number of candidates searched for each query; no set is larger."""
        return min(self.max_depth, len(self.index))

    def search(self, images: Sequence[ImageLike] | NDArray[np.uint8]) -> Candidates:
        """The nearest gallery images of each query, without any guarantee."""
        embedding = embed(self.encoder, self.preprocessing, images)
        distances, positions = self.index.search(embedding.mean.cpu().numpy(), self.depth)
        if embedding.uncertainty is None:
            # Unit vectors: 1 - cos = |x - y|^2 / 2.
            uncertainty = distances[:, 0].astype(np.float64) ** 2 / 2
        else:
            uncertainty = embedding.uncertainty.cpu().numpy().astype(np.float64)
        return Candidates(distances, positions, uncertainty, self.fingerprints())

    def calibrate(
        self,
        adapter: SizeAdapter,
        found: Candidates,
        ranks: NDArray[np.floating[Any]],
        bound: Bound = "binomial",
    ) -> None:
        """Calibrate on queries that this retriever, as it is now, has searched.

        Args:
            adapter: fitted on other queries.
            found: what `search` gave for the calibration queries.
            ranks: (n,) rank of each query's first true match, see `first_match_ranks`.
            bound: "binomial" or "hoeffding".

        Raises:
            StaleCalibration: the retriever has changed since it searched.
            InvalidData: of the queries, see `RiskController.calibrate`.
        """
        if found.fingerprints != self.fingerprints() or found.positions.shape[1] != self.depth:
            raise StaleCalibration(
                "the retriever has changed since it searched the calibration queries: search them "
                "again"
            )
        self.controller = RiskController.calibrate(
            adapter, found.uncertainty, ranks, self.depth, bound
        )
        self.calibrated_on = found.fingerprints

    def fingerprints(self) -> dict[str, str]:
        """Digests of everything that calibration depends on; computed once per change.

        A change in memory is noticed where a part is replaced, the gallery grows, or torch writes
        to a weight; not where a weight is written to behind torch's back (`.data`, NumPy views).
        """
        parts = [self.encoder, self.preprocessing, self.index, self.ids, self.labels]
        # Torch counts its writes to a tensor.
        weights = (*self.encoder.parameters(), *self.encoder.buffers())
        counts = [len(self.index), *(values._version for values in weights)]
        known, known_counts = self._fingerprinted
        if known_counts != counts or not all(map(operator.is_, known, parts)):
            preprocessing = json.dumps(asdict(self.preprocessing), sort_keys=True)
            gallery = json.dumps(
                [self.ids.tolist(), None if self.labels is None else self.labels.tolist()]
            )
            self._fingerprints = {
                "encoder": self.encoder.fingerprint(),
                "preprocessing": hashlib.sha256(preprocessing.encode()).hexdigest(),
                "gallery": hashlib.sha256(gallery.encode()).hexdigest(),
                "index": self.index.fingerprint(),
            }
            self._fingerprinted = (parts, counts)
        return self._fingerprints

    def add(
        self,
        images: Sequence[ImageLike] | NDArray[np.uint8],
        ids: Sequence[str],
        labels: Sequence[int] | None = None,
    ) -> None:
        """Add images to the gallery. The calibration is stale from then on: calibrate again."""
        if len(ids) != len(images) or (labels is None) != (self.labels is None):
            raise InvalidData(
                f"{len(images)} images, {len(ids)} ids: give one id per image, and labels if and "
                "only if the gallery has labels"
            )
        if labels is not None and len(labels) != len(images):
            raise InvalidData(f"{len(images)} images, {len(labels)} labels: give one each")
        vectors = embed(self.encoder, self.preprocessing, images).mean.cpu().numpy()
        longer = self.labels
        if longer is not None:
            longer = np.concatenate([longer, np.asarray(labels, np.int64)])
        self.index.add(vectors)
        self.ids = _frozen(np.concatenate([self.ids, np.array(ids, dtype=object)]))
        self.labels = longer if longer is None else _frozen(longer)

    @overload
    def retrieve(self, query: ImageLike, alpha: float, delta: float) -> Retrieval: ...
    @overload
    def retrieve(
        self, query: list[Any] | tuple[Any, ...], alpha: float, delta: float
    ) -> list[Retrieval]: ...

    def retrieve(
        self, query: ImageLike | list[Any] | tuple[Any, ...], alpha: float, delta: float
    ) -> Retrieval | list[Retrieval]:
        """Retrieve a set that holds a true match with the asked guarantee.

        With probability at least 1 - delta over the calibration queries, at most a fraction alpha
        of the queries exchangeable with them get a set without a true match. Any (alpha, delta) is
        answered without calibrating again; the statement is for a pair fixed beforehand.

        Args:
            query: a path, a PIL image, a uint8 array (H, W), (H, W, 1) or (H, W, 3), or a list of
                such, which gives a list.
            alpha, delta: each in (0, 1).

        Raises:
            InvalidRiskLevel, InvalidImage: of the arguments.
            StaleCalibration: not calibrated, or changed since.
            RiskUnattainable: no set size certifies (alpha, delta).

        Example:
            >>> import rcir
            >>> retriever = rcir.load("runs/demo/retriever")
            >>> queries = ["runs/demo/queries/easy.png", "runs/demo/queries/hard.png"]
            >>> [answer.size > 0 for answer in retriever.retrieve(queries, alpha=0.1, delta=0.1)]
            [True, True]
        """
        guarantee = self.guarantee(alpha, delta)
        if isinstance(query, list | tuple):
            return self._retrieve(query, guarantee)
        return self._retrieve([query], guarantee)[0]

    def guarantee(self, alpha: float, delta: float) -> Guarantee:
        """What `retrieve` guarantees at (alpha, delta); raises as it does."""
        check_level("alpha", alpha)
        check_level("delta", delta)
        controller = self._valid_controller()
        return Guarantee(
            alpha=float(alpha),
            delta=float(delta),
            kappa=controller.kappa(alpha, delta),
            bound=controller.bound,
            adapter=controller.adapter.name,
            n_calibration=controller.n_calibration,
            risk_bound=controller.risk_bound(alpha, delta),
        )

    def _retrieve(self, images: Sequence[ImageLike], guarantee: Guarantee) -> list[Retrieval]:
        found = self.search(images)
        sizes = self._valid_controller().sizes(found.uncertainty, guarantee.kappa)
        # One look-up for the whole batch; each answer is a slice of it.
        row = np.repeat(np.arange(len(sizes)), sizes)
        rank = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        positions, distances = found.positions[row, rank], found.distances[row, rank]
        ids = self.ids[positions].tolist()
        labels = None if self.labels is None else self.labels[positions].tolist()
        answers, start = [], 0
        for size, uncertainty in zip(sizes.tolist(), found.uncertainty.tolist(), strict=True):
            part = slice(start, start := start + size)
            answers.append(
                Retrieval(
                    tuple(ids[part]),
                    distances[part],
                    uncertainty,
                    guarantee,
                    None if labels is None else tuple(labels[part]),
                )
            )
        return answers

    def _valid_controller(self) -> RiskController:
        if self.controller is None:
            raise StaleCalibration(
                "this retriever is not calibrated: run `python -m calibration`, or use `search` "
                "for neighbours without a guarantee"
            )
        current = self.fingerprints()
        changed = [part for part in current if current[part] != self.calibrated_on.get(part)]
        if self.controller.depth != self.depth:
            changed.append("search depth")
        if changed:
            raise StaleCalibration(
                f"changed since calibration: {', '.join(changed)}. The guarantee does not cover "
                "that: run `python -m calibration` again, or use `search` for neighbours without a "
                "guarantee"
            )
        return self.controller


def embed(
    encoder: Encoder, preprocessing: Preprocessing, images: Sequence[ImageLike] | NDArray[np.uint8]
) -> Embedding:
    """Embed any number of images in batches, on the device of the encoder."""
    device = next(encoder.parameters()).device
    parts = []
    for start in range(0, max(1, len(images)), CHUNK):  # of none: `resized` refuses
        pixels = preprocessing.resized(images[start : start + CHUNK])
        for batch in torch.split(pixels, BATCH):
            parts.append(encoder.embed(preprocessing.normalise(batch.to(device))))
    return Embedding.concatenate(parts)


def _frozen(values: NDArray[Any]) -> NDArray[Any]:
    """Read-only: calibration depends on it."""
    values.setflags(write=False)
    return values
