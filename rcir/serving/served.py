"""A served retriever: its queries, their labels, and what is known of its guarantees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.data.repeats import digests
from rcir.embedding import Embedding
from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.options import DELTA
from rcir.retrieval.answer import Retrieval
from rcir.retrieval.calibration import Calibration
from rcir.retrieval.queries import Queries
from rcir.retrieval.retriever import Retriever
from rcir.risk import RISKS, Population, make_request
from rcir.risk.losses import MISS
from rcir.risk.options import Distinct, RequestOptions
from rcir.serving.errors import TooLarge

if TYPE_CHECKING:  # retrievers of vectors need no torch
    from torch import Tensor

    # Decoded pictures and their digests; a list of small ones is resized later, with others.
    Pictures = tuple[list[NDArray[np.uint8]] | Tensor, NDArray[np.bytes_]]

SHOWN_ALPHAS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
FEW_PIXELS = 2**16  # of a request whose pictures are resized together with those of others
REQUEST_PIXELS = 8  # maximum of the pixels of a request, as a multiple of that of a picture
UNCERTAINTY_BINS = 40  # of the histogram of uncertainties
MAX_MEAN_SIZES = 1 << 13  # in memory


@dataclass(frozen=True, eq=False)
class Served:
    """A calibrated retriever that answers requests; nothing changes it meanwhile.

    Queries are prepared in any thread (`pictures`, `vectors`), then by the model (`queries`).
    """

    retriever: Retriever
    version: str  # differs between retrievers of a source
    manifest: str  # digest of its manifest, the same for equal retrievers in any place

    @property
    def calibration(self) -> Calibration:
        """The calibration of the retriever."""
        return self.retriever.require_calibration()

    def pictures(self, files: Sequence[bytes], most_pixels: int, deadline: float) -> Pictures:
        """Decode pictures, and resize them unless they are small, so that few bytes wait.

        `most_pixels` limits a picture by its header, and all of them to eight times as many.
        """
        preprocessing = self.retriever.preprocessing
        if preprocessing is None or preprocessing.interpolation == "none":
            kind, remedy = "vectors", "send JSON with the field vector"
            if preprocessing is not None:
                kind, remedy = "sequences of features", "embed them in Python"
            raise InvalidConfig(f"this retriever takes {kind}, not pictures: {remedy}")
        from rcir.data.images import UntrustedImage, image_size, read_image

        images = [UntrustedImage(file, deadline) for file in files]
        sizes = [image_size(image, most_pixels) for image in images]
        n_pixels = sum(width * height for width, height in sizes)
        limit = REQUEST_PIXELS * most_pixels
        if n_pixels > limit:
            raise TooLarge(
                f"the pictures have {n_pixels:,} pixels together, at most {limit:,} are allowed: "
                "send fewer at a time, or scale them down"
            )
        if n_pixels > FEW_PIXELS:
            limited = replace(preprocessing, max_pixels=most_pixels)
            return limited.resized(images), digests(files)
        return [read_image(image, preprocessing.channels) for image in images], digests(files)

    def vectors(
        self,
        vectors: Sequence[Sequence[float]],
        uncertainty: ArrayLike | None,
        model: str | None,
    ) -> Queries:
        """Return vectors as queries."""
        searcher = self.retriever.searcher
        if not searcher.takes_vectors:
            raise InvalidConfig(
                "this retriever takes pictures, not vectors: send multipart/form-data with a file "
                "in the field picture"
            )
        if len({len(vector) for vector in vectors}) > 1:
            raise InvalidConfig("the vectors differ in length: send vectors of equal length")
        array = np.asarray(vectors, np.float64)
        searcher.options.prepare(array, self.calibration.calibration_queries.vectors.shape[1])
        if uncertainty is not None:
            uncertainty = np.atleast_1d(np.asarray(uncertainty, np.float64))
        return searcher.prepare(array, None, uncertainty, model).with_population()

    def item(self, name: str) -> Queries:
        """Return a gallery item as a query, which is searched without itself."""
        searcher = self.retriever.searcher
        allowed, gallery = searcher.options.leave_one_out, searcher.gallery
        if not allowed or gallery.digests is None or name not in self.positions:
            words = "is not an item of the gallery" if allowed else "would find itself"
            raise InvalidConfig(f"{name!r} {words}: send another query")
        row = np.array([self.positions[name]])
        uncertainty = None if gallery.uncertainty is None else gallery.uncertainty[row]
        population = Population(1, gallery.digests[row])
        return Queries(searcher.index.vectors_at(row), uncertainty, population=population)

    def queries(self, prepared: Sequence[Any]) -> list[Queries]:
        """Return the queries of each request; the pictures of all are embedded together."""
        encoder, preprocessing = self.retriever.encoder, self.retriever.preprocessing
        pictures = [part for part in prepared if not isinstance(part, Queries)]
        if encoder is None or preprocessing is None or not pictures:
            return list(prepared)
        import torch

        from rcir.encoders.batches import BATCH, SMALL_BATCH
        from rcir.encoders.memory import batch_within

        device = next(encoder.parameters()).device
        parts, part_digests = zip(*pictures, strict=True)
        small = [picture for part in parts if isinstance(part, list) for picture in part]
        resized = iter(preprocessing.resized(small) if small else ())
        pixels = torch.cat(
            [
                torch.stack([next(resized) for _ in part]) if isinstance(part, list) else part
                for part in parts
            ]
        )
        first = preprocessing.normalise(pixels[:1].to(device))
        size = len(pixels) if len(pixels) <= SMALL_BATCH else batch_within(encoder, first, BATCH)
        batches = (preprocessing.normalise(batch.to(device)) for batch in torch.split(pixels, size))
        embedded = Embedding.concatenate([encoder.embed(batch) for batch in batches])
        queries = self.retriever.searcher.prepare(embedded).with_population()
        if not self.retriever.searcher.takes_vectors:  # whose digests are those of vectors
            population = Population(len(pixels), np.concatenate(part_digests))
            queries = replace(queries, population=population)
        ends = np.cumsum([len(part) for part in parts]).tolist()
        each = (queries[start:end] for start, end in zip([0, *ends], ends, strict=False))
        return [part if isinstance(part, Queries) else next(each) for part in prepared]

    @cached_property
    def positions(self) -> dict[str, int]:
        """The position of each gallery item, by id."""
        return {name: row for row, name in enumerate(self.retriever.ids.tolist())}

    def holds_match(self, items: Sequence[str], label: Any) -> bool:
        """Return True if a set of items contains a true match of a query with a label."""
        retriever = self.retriever
        relevance, _ = retriever.searcher.gallery.query_relevance([label], retriever.label_names)
        rows = np.array([[self.positions[name] for name in items]], np.int64)
        gallery: Any = retriever.relevance
        return bool(relevance.matches(gallery, rows).any())

    def only_label(self, items: Sequence[str]) -> int | str | None:
        """Return the label of all items of a set; None if they have several, or no labels."""
        retriever = self.retriever
        if retriever.labels is None or not items:
            return None
        first, *others = set(retriever.labels[[self.positions[name] for name in items]].tolist())
        return None if others else retriever.label_names.get(first, first)

    def warm_up(self) -> None:
        """Answer once, so that the first request does not wait for lazy computations."""
        queries = self.calibration.calibration_queries
        if (shape := self.retriever.preprocessing) is not None:
            import torch

            pixels = torch.zeros(1, shape.channels, *shape.size, dtype=torch.uint8)
            (queries,) = self.queries([(pixels, np.zeros(1, "S32"))])
        self.retriever.search(queries[:1])
        _ = self.guarantees, self.positions

    def uncertainty_rank(self, answer: Retrieval) -> float:
        """Return the share of calibration queries that are less uncertain, in [0, 1]."""
        rule = self.calibration.rule_for(answer.guarantee.request)
        ascending = self._ascending_uncertainty[rule.uncertainty]
        return float(np.searchsorted(ascending, answer.uncertainty) / len(ascending))

    @cached_property
    def _ascending_uncertainty(self) -> dict[str, NDArray[np.float64]]:
        """(n,) uncertainties of the calibration queries, by the name of the uncertainty."""
        rules = self.calibration.rules.items()
        of_items = [by_risk[MISS.name] for kind, by_risk in rules if kind.distinct is None]
        return {
            rule.uncertainty: np.sort(rule.evidence.require("uncertainty")) for rule in of_items
        }

    @cached_property
    def mean_size(self) -> Callable[[float, Distinct, str | None], float]:
        """`mean_size(threshold, distinct, group)`: of the sets of the calibration queries."""

        @lru_cache(MAX_MEAN_SIZES)
        def compute(threshold: float, distinct: Distinct, group: str | None) -> float:
            rule = self.calibration.rule_for(make_request(distinct=distinct))
            return float(rule.evidence.of_group(group).sizes(threshold).mean())

        return compute

    def sample(self, rng: np.random.Generator) -> dict[str, Any]:
        """Return a query to try: a gallery item, `new` if it did not calibrate, or a vector."""
        searcher, queries = self.retriever.searcher, self.calibration.calibration_queries
        gallery, row, uncertainty = searcher.gallery, rng.integers(len(queries)), None
        if left_out := searcher.options.left_out:
            units = gallery.units
            used = np.isin(units, gallery.units_of(self.calibration.query_digests))
            rows = np.flatnonzero(used.all() | ~used)
            row = rng.choice(rows[units[rows] == rng.choice(np.unique(units[rows]))])
            query = {"item": str(gallery.ids[row]), "new": not used[row], "left_out": left_out}
            labels, keys = gallery.labels, gallery.keys
        else:
            uncertainty = None if queries.uncertainty is None else float(queries.uncertainty[row])
            query = {"vector": queries.vectors[row].tolist(), "new": False}
            labels, keys = queries.population.single_labels, queries.keys
        number = None if labels is None or gallery.labels is None else int(labels[row])
        label = number if number is None else searcher.label_names.get(number, number)
        key = None if keys is None else str(keys[row])
        return query | {"uncertainty": uncertainty, "label": label, "key": key}

    @cached_property
    def guarantees(self) -> dict[str, Any]:
        """The levels that can be certified, with mean set sizes, as plain values."""
        calibration = self.calibration
        miss_rule, coverage = calibration.miss_rule, calibration.coverage
        counts, edges = np.histogram(
            self._ascending_uncertainty[calibration.uncertainty], UNCERTAINTY_BINS
        )
        labels, keys = None, calibration.calibration_queries.keys
        if coverage is not None:
            labels = asdict(coverage) | {"sentence": calibration.sentence_of(coverage)}
        return {
            "calibrated": True,
            "n_calibration": len(miss_rule.evidence),
            "n_items": len(self.retriever.ids),
            "labels": labels,
            "new_labels": calibration.can_cover_new_labels,
            "score_function": miss_rule.score_function.name,
            "uncertainty": calibration.uncertainty,
            "depth": self.retriever.depth,
            "takes": "vector" if self.retriever.encoder is None else "picture",
            "takes_vectors": self.retriever.searcher.takes_vectors,
            "risks": list(RISKS),
            "distinct": [name for name in calibration.distinct if name is not None],
            "groups": miss_rule.evidence.population.group_names,
            "key": calibration.key,
            "keys": [] if keys is None else np.unique(keys).tolist(),
            "encounters": calibration.calibration_queries.pictures is not None,
            "anytime": calibration.sequential,
            "beta": self._can_certify(beta=0.5),
            "balance": self._can_certify(balance="uncertainty"),
            "left_out": self.retriever.searcher.options.left_out,
            "delta": DELTA,
            "levels": {
                name or "item": [self._level(alpha, name) for alpha in SHOWN_ALPHAS]
                for name in calibration.distinct
            },
            "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
        }

    def _can_certify(self, **options: Unpack[RequestOptions]) -> bool:
        """Return True if the calibration certifies a weak request with these options."""
        try:
            self.calibration.guarantee(make_request(0.5, 0.5, **options))
        except (InvalidConfig, InvalidData, RiskUnattainable):
            return False
        return True

    def _level(self, alpha: float, distinct: Any) -> dict[str, Any]:
        calibration = self.calibration
        request = make_request(alpha, DELTA, distinct=distinct, anytime=calibration.sequential)
        try:
            threshold = calibration.guarantee(request).threshold
        except RiskUnattainable as error:
            refusal = {"alpha": alpha, "certified": False, "mean_size": None}
            return refusal | {"minimum_alpha": error.minimum_alpha}
        size = self.mean_size(threshold, distinct, None)
        return {"alpha": alpha, "certified": True, "mean_size": size}
