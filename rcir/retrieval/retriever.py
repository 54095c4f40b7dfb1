"""The retriever: encoder, index and risk controller answering together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from rcir.data.digests import digests
from rcir.data.labelling import gallery_relevance
from rcir.embedding import Embedding
from rcir.errors import InvalidData, RiskUnattainable
from rcir.index import DEPTH, IndexConfig, UnbuiltIndex, build_index, lengths
from rcir.inputs import as_vectors
from rcir.retrieval.answer import AtLevels, Retrieval
from rcir.retrieval.gallery import Gallery
from rcir.retrieval.maintained import MaintainedSearcher
from rcir.retrieval.queries import Queries, require_alike
from rcir.retrieval.vector_options import Metric, VectorOptions
from rcir.risk import (
    Guarantee,
    RiskController,
    SearchResults,
    decide_chosen,
)
from rcir.risk.request import Alpha, Distinct, GuaranteeRequest, RequestOptions
from rcir.risk.score_functions import set_sizes

if TYPE_CHECKING:
    from rcir.data.images import ImageLike

# Queries whose candidates are worked on at once: more take memory, which the system takes long to
# give, fewer take longer each.
TOGETHER = 512


class Retriever(MaintainedSearcher):
    """Answers queries with sets of gallery images, see `CalibratedSearcher` for its attributes."""

    @classmethod
    def from_embeddings(
        cls,
        vectors: NDArray[np.floating[Any]],
        ids: Sequence[str] | None = None,
        labels: object = None,
        metric: Metric = "cosine",
        uncertainty: NDArray[np.floating[Any]] | None = None,
        depth: int = DEPTH,
        index: IndexConfig | None = None,
        model: str | None = None,
        leave_one_out: bool = False,
    ) -> Self:
        """Index vectors that something else embedded; the result still has to be calibrated.

        Args:
            vectors: (n, d) of the gallery items; like all columns here a NumPy array, a list, a
                tensor of PyTorch, or a column or frame of pandas or Arrow.
            ids: a name for each; "0", "1", ... unless given.
            labels: of each, whole numbers or texts; lists of texts, where items match that share
                one; or a `Relevance`, such as places (`rcir.data.within_radius`). None: the labels
                of queries are lists of the ids of their true matches.
            metric, model, leave_one_out: see `VectorOptions`.
            uncertainty: (n,) of the items, larger is less certain.
            depth: candidates searched for each query; no set is larger.
            index: which index; an exact one unless given.

        Raises:
            InvalidData: of vectors, ids, labels or uncertainties.

        Example:
            >>> import rcir
            >>> vectors = np.random.default_rng(0).standard_normal((100, 8))
            >>> retriever = rcir.Retriever.from_embeddings(vectors, labels=np.arange(100) % 5)
            >>> retriever.search(vectors[:2]).positions[:, 0]
            array([0, 1])
        """
        options = VectorOptions(metric, model, leave_one_out)
        checked = options.checked(vectors)
        if not len(checked):
            raise InvalidData("the gallery is empty: give at least one vector")
        given = [str(row) for row in range(len(checked))] if ids is None else ids
        named = Gallery(np.empty(0, object), np.empty(0, np.float32)).new_ids(given, len(checked))
        relevance, names = gallery_relevance(labels, named.tolist())
        unbuilt: Any = UnbuiltIndex(*checked.shape)
        built = cls(
            *(None, None, unbuilt, named, relevance, depth),
            item_uncertainty=options.uncertainties(uncertainty),
            digests=digests(checked),
            norms=lengths(checked),
            options=options,
        )
        built.label_names = names
        built.take(build_index(checked, index))  # last: it may be a table on a server
        return built

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write this retriever to a folder, replacing a retriever that is there.

        Raises:
            CorruptRetriever: what is there is not a retriever and nothing else; it is kept.
            InvalidConfig: encoder or index could not be built again from their configuration.
        """
        from rcir.retrieval import storage  # which needs this module

        return storage.save(self, folder)

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> Retriever:
        """Read a retriever from a folder, every file of it checked against its checksum.

        Raises:
            NoRetriever: there is none.
            CorruptRetriever: it is incomplete or was changed.
        """
        from rcir.retrieval import storage

        return storage.load(folder)

    @overload
    def retrieve(
        self, query: ImageLike, alpha: Alpha, delta: float | None, **options: Unpack[RequestOptions]
    ) -> Retrieval: ...
    @overload
    def retrieve(
        self,
        query: list[Any] | tuple[Any, ...] | Embedding | Queries,
        alpha: Alpha,
        delta: float | None,
        **options: Unpack[RequestOptions],
    ) -> list[Retrieval]: ...

    def retrieve(
        self,
        query: ImageLike | list[Any] | tuple[Any, ...] | Embedding | Queries,
        alpha: Alpha,
        delta: float | None,
        *,
        uncertainty: float | NDArray[np.floating[Any]] | None = None,
        model: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Retrieval | list[Retrieval]:
        """Retrieve a set that holds a true match with the asked guarantee.

        With probability at least 1 - delta over the calibration queries, at most a fraction alpha
        of further queries, drawn independently from where these were, get a set without a true
        match. Any (alpha, delta) is answered without calibrating again; the statement is for a pair
        fixed beforehand.

        Args:
            query: a path, the bytes of a file, a PIL image, a uint8 array (H, W), (H, W, 1) or
                (H, W, 3), or a list of such, which gives a list. Or what `embed` or `prepared`
                returns, which gives a list. Where there is no encoder, a vector (d,), or vectors
                (n, d), which give a list.
            alpha, delta, options: the guarantee that is requested: its options and their meaning
                are those of `rcir.risk.GuaranteeRequest`, listed by `rcir.risk.request_options`.
            uncertainty: of a vector, or (n,) of vectors, if and only if those calibrated with had
                theirs.
            model: what embedded the vectors; refused if that is not what embedded the gallery.

        Raises:
            InvalidRiskLevel, InvalidImage, InvalidConfig, InvalidData: of the arguments.
            StaleCalibration: not calibrated, or changed since.
            RiskUnattainable: nothing certifies what is asked.

        Example:
            >>> import rcir
            >>> retriever = rcir.load("runs/demo/retriever")
            >>> queries = ["runs/demo/queries/easy.png", "runs/demo/queries/hard.png"]
            >>> [answer.size > 0 for answer in retriever.retrieve(queries, alpha=0.1, delta=0.1)]
            [True, True]
            >>> retriever.retrieve(queries[0], 0.1, 0.1, distinct="label").size > 0
            True
        """
        request = GuaranteeRequest(alpha, delta, **options)
        controller, guarantee = self._decided(request)
        many = isinstance(query, list | tuple | Embedding | Queries)
        asked: Any = query if many else [query]
        if self.encoder is None and not isinstance(query, Embedding | Queries):
            vectors = as_vectors(query)
            if vectors is not None:
                many, asked = vectors.ndim > 1, np.atleast_2d(vectors)
        embedded = self.prepared(asked, None, uncertainty, model)
        require_alike(embedded, self.calibration_queries)
        answers = self._retrieve(embedded, controller, guarantee)
        return answers if many else answers[0]

    def guarantee(
        self, alpha: Alpha, delta: float | None, **options: Unpack[RequestOptions]
    ) -> Guarantee:
        """The guarantee that `retrieve` would give with its answers.

        Raises:
            RcirError: as `retrieve` does, but for those of queries.

        Example:
            >>> import rcir
            >>> rcir.load("runs/demo/retriever").guarantee(0.1, 0.1).n_calibration
            3000
        """
        return self._decided(GuaranteeRequest(alpha, delta, **options))[1]

    def _decided(self, request: GuaranteeRequest) -> tuple[RiskController, Guarantee]:
        controller = self._valid_controller(request.distinct).for_risk(request)
        return controller, decide_chosen(controller, request, self.chosen_among)

    def at_levels(
        self,
        query: Any,
        alphas: Sequence[float],
        delta: float,
        *,
        distinct: Distinct = None,
        group: str | None = None,
    ) -> list[AtLevels]:
        """The sets of queries at several alphas, from one search, for whoever looks at all of them.

        The guarantee for misses of each holds for all alphas at once (`simultaneous`).

        Args:
            query: several, as for `retrieve`.
            alphas: levels, each in (0, 1); those that nothing certifies are left out.
            delta, distinct, group: as for `retrieve`.

        Raises:
            RiskUnattainable: nothing certifies any of the alphas.
            RcirError: as `retrieve` does.

        Example:
            >>> import rcir
            >>> retriever = rcir.load("runs/demo/retriever")
            >>> (hard,) = retriever.at_levels(["runs/demo/queries/hard.png"], [0.2, 0.1, 0.05], 0.1)
            >>> hard.alphas, bool((np.diff(hard.sizes) <= 0).all())
            ((0.05, 0.1, 0.2), True)
            >>> hard.largest.size == hard.sizes.tolist()[0]
            True
        """
        if not alphas:
            raise InvalidData("there are no alphas: give at least one")
        controller = self._valid_controller(distinct)
        guarantees: dict[float, Guarantee] = {}
        for alpha in sorted(alphas, reverse=True):  # a larger one tells more of what is possible
            request = GuaranteeRequest(
                alpha, delta, distinct=distinct, group=group, simultaneous=True
            )
            try:
                guarantee = decide_chosen(controller, request, self.chosen_among)
            except RiskUnattainable:
                if not guarantees:
                    raise
                break
            guarantees = {alpha: guarantee} | guarantees
        queries = self.prepared(query)
        require_alike(queries, self.calibration_queries)
        found = self._search(queries)
        if distinct is not None:
            found = found.distinct()
        strictest, *_ = guarantees.values()
        found, most = controller.sets(found, strictest)
        scores = controller.score_function.candidate_scores(found)
        sizes = np.stack([set_sizes(scores, each.threshold) for each in guarantees.values()], 1)
        answers = self._answers(found, most, strictest)
        return [
            AtLevels(tuple(guarantees), own, answer, tuple(guarantees.values()))
            for own, answer in zip(sizes, answers, strict=True)
        ]

    def _retrieve(
        self, queries: Queries, controller: RiskController, guarantee: Guarantee
    ) -> list[Retrieval]:
        answers: list[Retrieval] = []
        for start in range(0, len(queries), TOGETHER):
            some = queries[start : start + TOGETHER]
            found = self._search(some)  # the fingerprints were compared already
            if guarantee.distinct is not None:
                found = found.distinct()
            found, sizes = controller.sets(found, guarantee)
            answers += self._answers(found, sizes, guarantee)
        return answers

    def _answers(
        self, found: SearchResults, sizes: NDArray[np.int64], guarantee: Guarantee
    ) -> list[Retrieval]:
        # One look-up for all of them; each answer is a slice of it.
        row = np.repeat(np.arange(len(sizes)), sizes)
        rank = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        positions = found.known("positions")[row, rank]
        distances = found.known("distances")[row, rank]
        ids = self.ids[positions].tolist()
        labels = self.named_labels(positions)
        answers, start = [], 0
        for size, uncertainty in zip(sizes.tolist(), found.uncertainty.tolist(), strict=True):
            part = slice(start, start := start + size)
            answers.append(
                Retrieval(
                    tuple(ids[part]),
                    distances[part],
                    uncertainty,
                    guarantee,
                    None if labels is None else labels[part],
                )
            )
        return answers
