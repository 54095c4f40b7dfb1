"""A retriever as it is served, where it comes from, and whether there is a new version."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rcir import api, tracking
from rcir.data.repeats import digests
from rcir.embedding import Embedding
from rcir.errors import InvalidConfig, NoRetriever, RiskUnattainable, StaleCalibration
from rcir.options import DELTA
from rcir.retrieval import storage
from rcir.retrieval.answer import Retrieval
from rcir.retrieval.queries import Queries
from rcir.retrieval.retriever import Retriever
from rcir.risk import RISKS, GuaranteeRequest, LabelledResults
from rcir.risk.request import Distinct
from rcir.serving.middleware import TooLarge
from rcir.serving.schemas import Terms

if TYPE_CHECKING:  # what needs no encoder needs no torch
    from torch import Tensor

    from rcir.data.images import UntrustedImage

    # Of pictures: decoded, and their digests; small ones are resized together later.
    Pictures = tuple[list[NDArray[np.uint8]] | Tensor, NDArray[np.bytes_]]

SHOWN_ALPHAS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
FEW_PIXELS = 2**16  # of a request, whose pictures are resized together with those of others
PIXELS_TOGETHER = 8  # times the pixels of one picture, that the pictures of a request may have
UNCERTAINTY_BINS = 40  # of the histogram of uncertainties
CURVES = 64  # of mean sizes that are kept


@dataclass(frozen=True, eq=False)
class Served:
    """A retriever that answers requests; nothing changes it meanwhile.

    Queries come in two steps: work for any thread (`pictures`, `vectors`), and the model's own
    work (`queries`), for many requests at once.

    Attributes:
        retriever: what answers.
        version: another one for another retriever; shown.
        manifest: digest of its manifest: equal for equal retrievers, wherever they are.
    """

    retriever: Retriever
    version: str
    manifest: str

    def pictures(self, files: Sequence[bytes], most_pixels: int, deadline: float) -> Pictures:
        """Pictures, decoded; and resized unless they are small, so that few bytes wait.

        Args:
            files: the pictures.
            most_pixels: of a picture, by its header; together they may have eight times as many.
            deadline: see `UntrustedImage`.

        Raises:
            InvalidImage: one cannot be read, or not before the deadline.
            InvalidConfig: there is no encoder.
            ImageTooLarge: one has more pixels.
            TooLarge: together they have more pixels.
        """
        preprocessing = self.retriever.preprocessing
        if preprocessing is None:
            raise InvalidConfig(
                "this retriever takes vectors, not pictures: send JSON with the field vector"
            )
        from rcir.data.images import UntrustedImage, read_image  # torch, which vectors do without

        images = [UntrustedImage(file, deadline) for file in files]
        if sum(_pixels(images, most_pixels)) > FEW_PIXELS:
            limited = replace(preprocessing, max_pixels=most_pixels)
            return limited.resized(images), digests(files)
        return [read_image(image, preprocessing.channels) for image in images], digests(files)

    def vectors(
        self,
        vectors: Sequence[Sequence[float]],
        uncertainty: Sequence[float] | None,
        model: str | None,
    ) -> Queries:
        """Vectors, checked.

        Raises:
            InvalidConfig: there is an encoder.
            InvalidData: they are not as long as those of the gallery, or are of another model.
        """
        retriever = self.retriever
        if retriever.encoder is not None:
            raise InvalidConfig(
                "this retriever takes pictures, not vectors: send multipart/form-data with a file "
                "in the field picture"
            )
        if len({len(vector) for vector in vectors}) > 1:
            raise InvalidConfig("the vectors are of different lengths: give each as many numbers")
        array = np.asarray(vectors, np.float64)
        if retriever.calibration is not None:
            dim = retriever.calibration.calibration_queries.vectors.shape[1]
            retriever.searcher.options.checked(array, dim)
        stated = None if uncertainty is None else np.asarray(uncertainty, np.float64)
        return retriever.searcher.prepared(array, None, stated, model).identified()

    def queries(self, prepared: Sequence[Any]) -> list[Queries]:
        """Embed what was prepared of each request: all pictures together."""
        encoder, preprocessing = self.retriever.encoder, self.retriever.preprocessing
        if encoder is None or preprocessing is None:
            return list(prepared)
        import torch

        from rcir.encoders.batches import BATCH, FEW
        from rcir.encoders.memory import batch_within

        device = next(encoder.parameters()).device
        small = [picture for some, _ in prepared if isinstance(some, list) for picture in some]
        resized = iter(preprocessing.resized(small) if small else ())
        pixels = torch.cat(
            [
                torch.stack([next(resized) for _ in some]) if isinstance(some, list) else some
                for some, _ in prepared
            ]
        )
        first = preprocessing.normalise(pixels[:1].to(device))
        batch = len(pixels) if len(pixels) <= FEW else batch_within(encoder, first, BATCH)
        embedded = Embedding.concatenate(
            [
                encoder.embed(preprocessing.normalise(part.to(device)))
                for part in torch.split(pixels, batch)
            ]
        )
        known = np.concatenate([own for _, own in prepared])
        every = replace(self.retriever.searcher.prepared(embedded), images=None, digests=known)
        ends = np.cumsum([len(some) for some, _ in prepared])
        return [every[start:end] for start, end in zip([0, *ends[:-1]], ends.tolist(), strict=True)]

    def labelled(self, queries: Queries, labels: list[Any]) -> LabelledResults:
        """Queries that were asked, searched with their labels; None if they match nothing.

        Raises:
            InvalidData: labels are not of the kind that the gallery has.
        """
        retriever = self.retriever
        relevance, _ = retriever.searcher.gallery.reported_relevance(labels, retriever.label_names)
        return retriever.search_labelled(replace(queries, relevance=relevance))

    @cached_property
    def positions(self) -> dict[str, int]:
        """The position of each item of the gallery, by id."""
        return {name: row for row, name in enumerate(self.retriever.ids.tolist())}

    def holds_match(self, items: Sequence[str], label: Any) -> bool:
        """Return whether a set of items holds a true match of a query with a label.

        Raises:
            InvalidData: the label is not of the kind that the gallery has.
        """
        retriever = self.retriever
        relevance, _ = retriever.searcher.gallery.query_relevance([label], retriever.label_names)
        rows = np.array([[self.positions[name] for name in items]], np.int64)
        gallery: Any = retriever.relevance
        return bool(relevance.of(gallery, rows).any())

    def only_label(self, items: Sequence[str]) -> int | str | None:
        """The label of all items of a set; None if they have several, or not one each."""
        retriever = self.retriever
        if retriever.labels is None or not items:
            return None
        first, *others = set(retriever.labels[[self.positions[name] for name in items]].tolist())
        return None if others else retriever.label_names.get(first, first)

    def is_certified(self, terms: Terms) -> bool:
        """Return True if the calibration has certified a guarantee already."""
        request = GuaranteeRequest(terms.alpha, terms.delta, **terms.options)
        return self.retriever.require_calibration().has_certified(request)

    def certify(self, terms: Terms) -> None:
        """Certify a guarantee, which takes up to a second the first time.

        Raises:
            RcirError: as `Retriever.guarantee` does.
        """
        self.retriever.guarantee(terms.alpha, terms.delta, **terms.options)

    def warm_up(self) -> None:
        """Answer once, so that the first request does not wait for what is done once."""
        calibration = self.retriever.calibration
        queries = None if calibration is None else calibration.calibration_queries
        shape = self.retriever.preprocessing
        if shape is not None:
            import torch

            pixels = torch.zeros(1, shape.channels, *shape.size, dtype=torch.uint8)
            (queries,) = self.queries([(pixels, np.zeros(1, "S32"))])
        if queries is not None:
            self.retriever.search(queries[:1])
        _ = self.guarantees, self.positions

    @cached_property
    def calibration_uncertainty(self) -> NDArray[np.float64]:
        """(n,) of the calibration queries, ascending; none where it is not calibrated."""
        if self.retriever.calibration is None:
            return np.empty(0)
        return np.sort(self.retriever.calibration.main.calibration.require("uncertainty"))

    def uncertainty_rank(self, answer: Retrieval) -> float:
        """Return the share of calibration queries that are less uncertain, in [0, 1]."""
        ascending = self.calibration_uncertainty
        if self.retriever.calibration is not None:
            answering = self.retriever.calibration.for_request(answer.guarantee.request)
            if answering is not self.retriever.calibration:
                ascending = self._uncertainty_on_gallery
        return float(np.searchsorted(ascending, answer.uncertainty) / max(1, len(ascending)))

    @cached_property
    def _uncertainty_on_gallery(self) -> NDArray[np.float64]:
        on_gallery = self.retriever.require_calibration().on_gallery
        assert on_gallery is not None
        return np.sort(on_gallery.main.calibration.require("uncertainty"))

    @cached_property
    def mean_sizes(self) -> Callable[..., list[float]]:
        """`mean_sizes(thresholds, distinct, group)`: of the calibration queries' sets at each."""
        return lru_cache(CURVES)(self._mean_sizes)

    def _mean_sizes(
        self, thresholds: tuple[float, ...], distinct: Distinct, group: str | None
    ) -> list[float]:
        main = self.retriever.require_calibration().rules[distinct].main
        queries = main.calibration.of_group(group)
        means = {each: float(queries.sizes(each).mean()) for each in set(thresholds)}
        return [means[each] for each in thresholds]

    @cached_property
    def guarantees(self) -> dict[str, Any]:
        """The levels that can be certified, with the sets that takes, as plain values."""
        calibration = self.retriever.calibration
        if calibration is None:
            return {"calibrated": False}
        main = calibration.main
        counts, edges = np.histogram(self.calibration_uncertainty, UNCERTAINTY_BINS)
        return {
            "calibrated": True,
            "n_calibration": len(main.calibration),
            "n_items": len(self.retriever.ids),
            "labels": None
            if calibration.coverage is None
            else asdict(calibration.coverage)
            | {"sentence": calibration.sentence_of(calibration.coverage)},
            "new_labels": calibration.can_cover_new_labels,
            "score_function": main.score_function.name,
            "uncertainty": calibration.uncertainty,
            "depth": self.retriever.depth,
            "takes": "vector" if self.retriever.encoder is None else "picture",
            "risks": list(RISKS),
            "distinct": [name for name in calibration.rules if name is not None],
            "groups": main.calibration.group_names(),
            "anytime": calibration.sequential,
            "delta": DELTA,
            "levels": {name or "item": self._levels(name) for name in calibration.rules},
            "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
        }

    def _levels(self, distinct: Any) -> list[dict[str, Any]]:
        """The miss risk at the usual levels."""
        calibration, rows = self.retriever.require_calibration(), []
        for alpha in SHOWN_ALPHAS:
            request = GuaranteeRequest(
                alpha, DELTA, distinct=distinct, anytime=calibration.sequential
            )
            row: dict[str, Any] = {"alpha": alpha, "certified": False, "mean_size": None}
            try:
                threshold = calibration.guarantee(request).threshold
            except RiskUnattainable as error:
                row["minimum_alpha"] = error.minimum_alpha
            else:
                sizes = calibration.rules[distinct].main.calibration.sizes(threshold)
                row |= {"certified": True, "mean_size": float(sizes.mean())}
            rows.append(row)
        return rows


def _pixels(pictures: Sequence[UntrustedImage], most: int) -> list[int]:
    """Return the size of each picture that its header declares."""
    from rcir.data.images import image_size  # with Pillow, which vectors do without

    sizes = [image_size(picture, most) for picture in pictures]
    pixels = [width * height for width, height in sizes]
    if sum(pixels) > PIXELS_TOGETHER * most:
        raise TooLarge(
            f"the pictures have {sum(pixels):,} pixels together; at most "
            f"{PIXELS_TOGETHER * most:,} are decoded for one request: send fewer at a time, or "
            "scale them down"
        )
    return pixels


class RetrieverSource(Protocol):
    """A place of retrievers, one of which is the present one."""

    name: str

    def version(self) -> str:
        """Return the version of the present retriever, without loading it.

        Raises:
            NoRetriever: there is none.
            TrackingUnavailable: the registry cannot be reached.
        """
        ...

    def load(self, version: str) -> Served:
        """The retriever of a version that was the present one, every file checked.

        Raises:
            RcirError: as `rcir.load` does.
        """
        ...


class Folder:
    """A retriever folder, whose current version is served.

    The name of a version here is the digest of its manifest.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, str(folder)

    def version(self) -> str:
        try:
            return _digest(storage.read_manifest(self.folder))
        except OSError as error:
            raise NoRetriever(f"there is no retriever in {self.folder} ({error})") from error

    def load(self, version: str) -> Served:
        retriever, version = _loaded(lambda _: self.folder, self.version, version)
        return Served(retriever, version, version)


class RegistryName:
    """A version of a registered model, `models:/NAME/VERSION`, or that which an alias names,
    `models:/NAME@ALIAS`.

    Its version is `NAME/NUMBER-MANIFEST`: `rcir compare --choose` marks a retriever in its place.
    """

    def __init__(self, uri: str) -> None:
        self.name = uri

    def version(self) -> str:
        name, at, alias = self.name.removeprefix("models:/").partition("@")
        if at:
            registered = tracking.find_version(name, alias)
            if registered is None:
                raise NoRetriever(
                    f"MLflow's registry has no {self.name}: make it with `rcir register`"
                )
            name = f"{name}/{registered.version}"
        manifest = f"models:/{name}/{tracking.INSIDE}/{storage.MANIFEST}"
        return f"{name}-{_digest(tracking.read_file(manifest))}"

    def load(self, version: str) -> Served:
        retriever, version = _loaded(
            lambda version: f"models:/{version.rpartition('-')[0]}", self.version, version
        )
        return Served(retriever, version, version.rpartition("-")[2])


def _loaded(
    place: Callable[[str], Path | str], present: Callable[[], str], version: str
) -> tuple[Retriever, str]:
    """A retriever and its version; the next one, if that took its place meanwhile."""
    while True:
        retriever = api.load(place(version))
        now = present()
        if now == version:
            return retriever, version
        version = now


def _digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()[:12]


def source_of(place: str | os.PathLike[str]) -> RetrieverSource:
    """The source that a folder or an MLflow URI names.

    Raises:
        InvalidConfig: it is a URI of another kind.

    Example:
        >>> source_of("runs/demo/retriever").name
        'runs/demo/retriever'
    """
    text = str(place)
    if text.startswith("models:/"):
        return RegistryName(text)
    if "://" in text or text.startswith("runs:/"):
        raise InvalidConfig(
            f"{text} cannot be served: name a folder, or models:/NAME@ALIAS (`rcir register` makes "
            "one)"
        )
    return Folder(Path(place))


def ready_to_serve(source: RetrieverSource, version: str | None = None) -> Served:
    """The retriever of a source, loaded, verified and warmed up.

    Raises:
        StaleCalibration: it is not calibrated, or was changed since.
        RcirError: as `RetrieverSource.version` and `RetrieverSource.load` do.
    """
    served = source.load(version or source.version())
    if served.retriever.calibration is None:
        raise StaleCalibration(f"{source.name} is not calibrated: nothing could be answered")
    if changed := served.retriever.changes():
        raise StaleCalibration(f"{source.name} changed since calibration: {', '.join(changed)}")
    served.warm_up()
    return served
