"""The retriever: a search and a calibration, which answer queries with certified sets."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.data.digests import digests
from rcir.data.labelling import gallery_relevance
from rcir.data.records import ImageSet
from rcir.data.relevance_protocol import Relevance
from rcir.data.repeats import require_new, warn_of_copies
from rcir.embedding import Embedding
from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable, StaleCalibration
from rcir.index import DEPTH, Index, IndexConfig, IsRemote, UnbuiltIndex, build_index, lengths
from rcir.inputs import as_vectors
from rcir.levels import ALPHA, ALPHAS, DELTA
from rcir.retrieval.answer import AtLevels, Retrieval
from rcir.retrieval.calibration import (
    Calibration,
    CalibrationOptions,
    CalibrationReport,
    calibrate,
    check_searched,
    digests_of,
    divide_queries,
    queries_to_store,
    vector_distances,
)
from rcir.retrieval.gallery import Gallery
from rcir.retrieval.queries import Queries, require_alike
from rcir.retrieval.search import Asked, Found, Searcher
from rcir.retrieval.vector_options import Metric, VectorOptions
from rcir.risk import (
    Bound,
    Exchangeability,
    Guarantee,
    LabelledResults,
    SearchResults,
    SetRule,
    check_exchangeability,
    score,
)
from rcir.risk.request import Alpha, Distinct, GuaranteeRequest, RequestOptions
from rcir.risk.results import set_sizes
from rcir.risk.score_functions import Ranking

if TYPE_CHECKING:  # vectors need no torch
    from rcir.data.images import ImageLike
    from rcir.data.preprocessing import Preprocessing
    from rcir.encoders.base import Encoder
    from rcir.encoders.batches import Embed, Images

_SWAP = threading.Lock()  # of versions, see `Retriever.update`
QUERY_BATCH_SIZE = 512  # larger batches need more memory, smaller ones more time per query


def _of_search(name: str, doc: str) -> Any:
    """Return a property of the retriever that is an attribute of its search."""
    return property(
        lambda self: getattr(self.searcher, name),
        lambda self, value: setattr(self.searcher, name, value),
        doc=doc,
    )


class Retriever:
    """Answers queries with sets of gallery items whose risk is certified.

    A search finds candidates, and a calibration decides how many of them an answer needs.

    Attributes:
        searcher: finds the candidates; its attributes are those of the retriever, too.
        calibration: everything that calibration made; None until calibrated. It is replaced as a
            whole, and `update` replaces both together.
        origin: where the retriever comes from, as plain values: the configuration of its data set
            ("data") and the MLflow run of its training ("run"), if known. No answer depends on it.
        version_folder: the version on disk that it was loaded from or last saved as; None before.
    """

    encoder: Encoder | None = _of_search("encoder", "The encoder; None if vectors were given.")
    preprocessing: Preprocessing | None = _of_search(
        "preprocessing", "How images are prepared for the encoder."
    )
    index: Index = _of_search("index", "The index of the gallery's vectors.")
    gallery: Gallery = _of_search("gallery", "The items in the order of the index.")
    max_depth: int = _of_search("max_depth", "Number of candidates to search for each query.")
    options: VectorOptions = _of_search("options", "How given vectors are searched.")
    label_names: dict[int, str] = _of_search("label_names", "Names of the labels, by label.")
    ids: NDArray[np.object_] = _of_search("ids", "(n,) ids of the gallery items.")
    labels: NDArray[np.int64] | None = _of_search("labels", "(n,) labels of the gallery items.")
    relevance: Relevance | None = _of_search("relevance", "Which queries match which items.")
    depth: int = _of_search("depth", "Number of candidates of each query; no set is larger.")
    item_uncertainty: NDArray[np.float64] | None = _of_search(
        "item_uncertainty", "(n,) uncertainties of the gallery items."
    )
    digests: NDArray[np.bytes_] | None = _of_search("digests", "Digests of the gallery items.")
    items: Embedding | None = _of_search("items", "Embeddings of the items, to re-rank by.")
    uncertainties: tuple[str, ...] = _of_search(
        "uncertainties", "The uncertainties that queries can have here, see `judged`."
    )

    def __init__(self, searcher: Searcher, calibration: Calibration | None = None) -> None:
        self._version = searcher, calibration
        self.origin: dict[str, Any] = {}
        self.version_folder: Path | None = None

    @classmethod
    def build(
        cls,
        encoder: Encoder,
        preprocessing: Preprocessing,
        gallery: ImageSet,
        depth: int = DEPTH,
        embedder: Embed | None = None,
        index: IndexConfig | None = None,
        templates: str | None = None,
    ) -> Self:
        """Embed and index a gallery, see `Searcher.build`; the result has to be calibrated."""
        return cls(
            Searcher.build(encoder, preprocessing, gallery, depth, embedder, index, templates)
        )

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
                one; or a `Relevance`, such as places (`rcir.data.WithinRadius`). None: the labels
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
        built = Searcher(
            encoder=None,
            preprocessing=None,
            index=unbuilt,
            ids=named.tolist(),
            labels=relevance,
            depth=depth,
            item_uncertainty=options.uncertainties(uncertainty),
            digests=digests(checked),
            norms=lengths(checked),
            options=options,
        )
        built.label_names = names
        built.take(build_index(checked, index))  # last: it may be a table on a server
        return cls(built)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write this retriever to a folder as its current version, see `rcir.retrieval.storage`.

        Raises:
            CorruptRetriever: the folder contains something other than a retriever, which is kept.
            InvalidConfig: encoder or index could not be built again from their configuration.
            SaveConflict: this retriever was loaded from or saved to this folder, and another
                version has been saved to it since.
        """
        from rcir.retrieval import storage  # which needs this module

        return storage.save(self, folder)

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> Retriever:
        """Read the current version of a retriever, checking every file against its checksum.

        Raises:
            NoRetriever: there is no retriever in the folder.
            CorruptRetriever: it is incomplete or was changed.
        """
        from rcir.retrieval import storage

        return storage.load(folder)

    @property
    def searcher(self) -> Searcher:
        """What finds the candidates."""
        return self._version[0]

    @searcher.setter
    def searcher(self, searcher: Searcher) -> None:
        self._version = searcher, self._version[1]

    @property
    def calibration(self) -> Calibration | None:
        """Everything that calibration made; None until calibrated."""
        return self._version[1]

    @calibration.setter
    def calibration(self, calibration: Calibration | None) -> None:
        self._version = self._version[0], calibration

    @property
    def uncertainty(self) -> str:
        """The uncertainty of queries that sizes depend on, see `judged`."""
        return "encoder" if self.calibration is None else self.calibration.uncertainty

    @property
    def tuning_queries(self) -> Queries | None:
        """The queries that fitted the score functions; None until calibrated."""
        return None if self.calibration is None else self.calibration.tuning_queries

    @property
    def calibration_queries(self) -> Queries | None:
        """The queries that certify; None until calibrated."""
        return None if self.calibration is None else self.calibration.calibration_queries

    @property
    def chosen_among(self) -> int:
        """Number of retrievers that this one was chosen among, see `rcir compare --choose`."""
        return 1 if self.calibration is None else self.calibration.chosen_among

    @property
    def known_digests(self) -> NDArray[np.bytes_]:
        """(n,) of the queries that are no evidence for further ones, ascending.

        Those that it was tuned or calibrated with, and the items of its gallery, unless these are
        the queries; none where queries recur.
        """
        calibration = self.calibration
        if calibration is not None and calibration.options.recurring:
            return digests([])
        known = digests([]) if calibration is None else calibration.query_digests
        gallery = None if self.options.leave_one_out else self.digests
        return np.sort(known if gallery is None else np.concatenate([known, gallery.ravel()]))

    def embed(self, images: Images, embedder: Embed | None = None) -> Embedding:
        """Embed images, see `Searcher.embed`."""
        return self.searcher.embed(images, embedder)

    def prepared(
        self,
        queries: Asked,
        embedder: Embed | None = None,
        uncertainty: NDArray[np.floating[Any]] | float | None = None,
        model: str | None = None,
    ) -> Queries:
        """Return queries ready to be searched, see `Searcher.prepared`."""
        return self.searcher.prepared(queries, embedder, uncertainty, model)

    def search(self, queries: Asked, embedder: Embed | None = None) -> SearchResults:
        """Find the nearest gallery items of each query without a guarantee.

        See `Searcher.search`; queries have the uncertainty of the calibration.
        """
        version = copy(self)
        return version.judged(version.searcher.search(queries, embedder))

    def search_labelled(
        self,
        queries: ImageSet | Queries,
        group: str | None = None,
        embedder: Embed | None = None,
        cluster: str | None = None,
    ) -> LabelledResults:
        """Search queries with known matches, see `Searcher.search_labelled`."""
        version = copy(self)
        return version.judged(version.searcher.search_labelled(queries, group, embedder, cluster))

    def labelled(self, vectors: ArrayLike, labels: object, *known: Any, **named: Any) -> Queries:
        """Return vectors with their labels, see `Searcher.labelled`."""
        return self.searcher.labelled(vectors, labels, *known, **named)

    def judged(self, results: Found, uncertainty: str | None = None) -> Found:
        """Return search results with an uncertainty, that of the calibration unless named.

        Raises:
            InvalidConfig: the search has no such uncertainty, see `Searcher.judged`.
        """
        return self.searcher.judged(results, uncertainty or self.uncertainty)

    def fingerprints(self) -> dict[str, str]:
        """Return digests of everything that calibration depends on, see `Fingerprints`."""
        return self.searcher.fingerprints()

    def changes(self) -> list[str]:
        """Return the names of what differs from what it was calibrated on."""
        current = dict(self.fingerprints(), uncertainty=self.uncertainty)
        if self.calibration is None:
            return list(current)
        changed = self.calibration.changed(current)
        if self.calibration.main.calibration.depth != self.depth:
            changed.append("search depth")
        return changed

    def require_calibration(self) -> Calibration:
        """Return the calibration, whether it is stale or not.

        Raises:
            StaleCalibration: not calibrated.
        """
        if self.calibration is None:
            raise StaleCalibration(
                "this retriever is not calibrated: call `calibrate` with labelled queries, or make "
                "one with `python -m calibration`; `search` gives neighbours without a guarantee"
            )
        return self.calibration

    def _valid_calibration(self) -> Calibration:
        """Return the calibration if nothing has changed since.

        Raises:
            StaleCalibration: not calibrated, or something has changed.
        """
        calibration = self.require_calibration()
        if changed := self.changes():
            raise StaleCalibration(
                f"changed since calibration: {', '.join(changed)}. The guarantee does not cover "
                "that: call `recalibrate`, or `calibrate` with labelled queries; `search` gives "
                "neighbours without a guarantee"
            )
        return calibration

    def calibrate(
        self,
        queries: ArrayLike,
        labels: object,
        score_function: str = "auto",
        bound: Bound = "binomial",
        alphas: Sequence[float] = ALPHAS,
        delta: float = DELTA,
        recurring: bool = False,
        *,
        query_uncertainty: str = "auto",
        seed: int = 0,
        **known: Any,
    ) -> CalibrationReport:
        """Calibrate on labelled vectors: a random three tenths tune, and the others certify.

        Args:
            queries: vectors (n, d), drawn independently of each other from the same source as
                future queries; if they come in clusters, clusters are.
            labels: of each, of the kind that the gallery has (`Retriever.from_embeddings`).
            score_function, bound, alphas, delta, recurring, query_uncertainty: see
                `calibrate_splits`.
            seed: decides which vectors tune and which calibrate.
            known: see `labelled`: uncertainty, model, groups, clusters.

        Returns:
            What is certified; `print` it.

        Raises:
            InvalidConfig: of the options; or the queries were searched already.
            InvalidData: of the queries, see `calibrate_splits`.

        Example:
            >>> import numpy as np, rcir
            >>> rng = np.random.default_rng(0)
            >>> labels = rng.integers(5, size=900)
            >>> vectors = np.eye(5)[labels] + 0.2 * rng.standard_normal((900, 5))
            >>> retriever = rcir.Retriever.from_embeddings(vectors[:400], labels=labels[:400])
            >>> retriever.calibrate(vectors[400:], labels[400:]).n_calibration
            350
        """
        if isinstance(queries, LabelledResults):
            raise InvalidConfig("these queries were searched already: call `calibrate_splits`")
        divided = divide_queries(self.labelled(queries, labels, **known), seed)
        tuning, calibration = (self.searcher.search_labelled(part) for part in divided)
        return self.calibrate_splits(
            tuning,
            calibration,
            score_function,
            bound,
            alphas,
            delta,
            recurring,
            query_uncertainty=query_uncertainty,
        )

    def calibrate_splits(
        self,
        tuning: LabelledResults,
        calibration: LabelledResults,
        score_function: str = "auto",
        bound: Bound = "binomial",
        alphas: Sequence[float] = ALPHAS,
        delta: float = DELTA,
        recurring: bool = False,
        *,
        query_uncertainty: str = "auto",
    ) -> CalibrationReport:
        """Calibrate on two splits that this retriever has searched, see `search_labelled`.

        Args:
            tuning: queries that fit the sizes and certify nothing.
            calibration: other queries, drawn independently of each other from the same source as
                future queries; if they come in clusters, clusters are.
            score_function: "constant", "minmax", "quantile", "learned", "reranked", or
                "auto", which chooses for each risk the one with the smallest sets on the tuning
                split; see `rcir.risk.fit_score_function`.
            bound: confidence bound of the risk, see `rcir.risk.p_value`.
            alphas, delta: levels at which "auto" compares, and to report.
            recurring: allow calibration queries that are in the tuning split too, or come twice:
                for images that recur in use exactly as they do here, each query drawn
                independently of all others. Copies of one list of images are not.
            query_uncertainty: the uncertainty of queries: one of `uncertainties`, see `judged`; or
                "auto", which chooses the one with the smallest sets on the tuning split, see
                `rcir.risk.smallest_uncertainty`.

        Returns:
            What is certified; `print` it.

        Raises:
            StaleCalibration: the retriever has changed since it searched.
            InvalidData: of the queries; or some of them are images of the gallery, of the tuning
                split too, or the same (by digests; for images that were encoded again it warns,
                but not for those in templates, whose vectors combine several images).

        Example:
            >>> import rcir
            >>> from rcir.data import DataConfig, load_splits
            >>> retriever = rcir.load("runs/demo/retriever")
            >>> splits = load_splits(DataConfig("digits", seed=1))
            >>> tuning = retriever.search_labelled(splits.tuning)
            >>> calibration = retriever.search_labelled(splits.calibration, group="occluded")
            >>> # These numbers are made of digits that recur.
            >>> report = retriever.calibrate_splits(tuning, calibration, recurring=True)
            >>> all(row.mean_size < row.constant_size for row in report.rows)
            True
            >>> query = splits.test.images[0]
            >>> retriever.retrieve(query, 0.1, 0.1, group="True").guarantee.n_calibration < 3000
            True
        """
        options = CalibrationOptions(
            score_function, bound, alphas, delta, recurring, query_uncertainty
        )
        self.calibration, made = calibrate(self.searcher, tuning, calibration, options)
        return made

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
        version = copy(self)  # the same search and calibration to the end of this call
        calibration = version._valid_calibration()
        rule, guarantee = calibration.rule_for(request), calibration.guarantee(request)
        many = isinstance(query, list | tuple | Embedding | Queries)
        asked: Any = query if many else [query]
        if version.encoder is None and not isinstance(query, Embedding | Queries):
            vectors = as_vectors(query)
            if vectors is not None:
                many, asked = vectors.ndim > 1, np.atleast_2d(vectors)
        embedded = version.prepared(asked, None, uncertainty, model)
        require_alike(embedded, calibration.calibration_queries)
        answers = version._retrieve(embedded, rule, guarantee)
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
        request = GuaranteeRequest(alpha, delta, **options)
        return copy(self)._valid_calibration().guarantee(request)

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
        version = copy(self)
        calibration = version._valid_calibration()
        guarantees: dict[float, Guarantee] = {}
        for alpha in sorted(alphas, reverse=True):  # a larger one tells more of what is possible
            request = GuaranteeRequest(
                alpha, delta, distinct=distinct, group=group, simultaneous=True
            )
            try:
                guarantee = calibration.guarantee(request)
            except RiskUnattainable:
                if not guarantees:
                    raise
                break
            guarantees = {alpha: guarantee} | guarantees
        queries = version.prepared(query)
        require_alike(queries, calibration.calibration_queries)
        results = version._search(queries, distinct)
        strictest, *_ = guarantees.values()
        ranking, largest = calibration.rule_for(strictest.request).sets(results, strictest)
        sizes = np.stack(
            [set_sizes(ranking.scores, each.threshold) for each in guarantees.values()], axis=1
        )
        answers = version._answers(results, ranking, largest, strictest)
        return [
            AtLevels(tuple(guarantees), own, answer, tuple(guarantees.values()))
            for own, answer in zip(sizes, answers, strict=True)
        ]

    def _retrieve(self, queries: Queries, rule: SetRule, guarantee: Guarantee) -> list[Retrieval]:
        answers: list[Retrieval] = []
        for start in range(0, len(queries), QUERY_BATCH_SIZE):
            batch = queries[start : start + QUERY_BATCH_SIZE]
            results = self._search(batch, guarantee.request.distinct)
            answers += self._answers(results, *rule.sets(results, guarantee), guarantee)
        return answers

    def _search(self, queries: Queries, distinct: Distinct) -> SearchResults:
        results = self.judged(self.searcher.candidates(queries))
        return results if distinct is None else results.first_of_each_label()

    def _answers(
        self,
        results: SearchResults,
        ranking: Ranking,
        sizes: NDArray[np.int64],
        guarantee: Guarantee,
    ) -> list[Retrieval]:
        # One look-up for all of them; each answer is a slice of it.
        row = np.repeat(np.arange(len(sizes)), sizes)
        rank = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        column = rank if ranking.columns is None else ranking.columns[row, rank]
        positions = results.require("positions")[row, column]
        distances = results.require("distances")[row, column]
        ids = self.ids[positions].tolist()
        labels = self.searcher.named_labels(positions)
        answers, start = [], 0
        for size, uncertainty in zip(sizes.tolist(), results.uncertainty.tolist(), strict=True):
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

    def add(
        self,
        images: Asked,
        ids: Sequence[str],
        labels: object = None,
        uncertainty: NDArray[np.floating[Any]] | None = None,
        model: str | None = None,
    ) -> None:
        """Add images to the gallery. The calibration is stale from then on: `recalibrate`.

        Args:
            images: pictures, or as for `search`.
            ids: a name for each, other than those of the gallery images.
            labels: of each, if and only if the gallery has labels, of the same kind; or its
                `Relevance`.
            uncertainty: (n,) of vectors, if and only if those of the gallery have any.
            model: what embedded the vectors, see `VectorOptions`.

        Raises:
            InvalidData: of ids, labels, vectors and uncertainties; nothing was added.
            InvalidConfig, InvalidImage: as `embed` does.
        """
        if isinstance(images, str | bytes | os.PathLike):
            raise InvalidData(f"images is {images!r}: give a list, of one image per id")
        named = self.gallery.new_ids(ids, len(images))
        numbered = self.encoder is not None  # then its data set gave the labels their numbers
        relevance, names = self.gallery.new_relevance(labels, named, self.label_names, numbered)
        added = self.prepared(images, None, uncertainty, model)
        longer = self.gallery.joined(
            Gallery(
                named,
                lengths(added.vectors),
                relevance,
                added.uncertainty,
                None if self.digests is None else added.identified().digests,
                added.embedding,
            )
        )
        self.index.add(added.vectors)
        self.gallery, self.label_names = longer, names

    def remove(self, ids: Sequence[str]) -> None:
        """Remove images from the gallery. The calibration is stale from then on: `recalibrate`.

        Raises:
            InvalidData: some ids are of no gallery image, or none would be left; nothing was
                removed.
        """
        gone = self.gallery.positions(ids)
        if len(gone) == len(self.gallery):
            raise InvalidData("no image would be left in the gallery: build another one")
        self.index.remove(gone)
        self.gallery = self.gallery.subset(np.delete(np.arange(len(self.gallery)), gone))

    @contextmanager
    def update(self) -> Iterator[Retriever]:
        """Change the gallery without a gap: queries are answered by the old version meanwhile.

        The block changes a copy, by `add`, `remove` or `calibrate`. At its end the copy is
        recalibrated if it has to be, and takes over in one assignment: each query, from any thread,
        is answered by one version. If the block fails, nothing has changed. Both versions are in
        memory until then.

        Raises:
            InvalidConfig: the index is on a server, which changes in place.
            InvalidData: the retriever was changed otherwise meanwhile; or as `recalibrate`.
            StaleCalibration: as `recalibrate`.

        Example:
            >>> import numpy as np, rcir
            >>> rng = np.random.default_rng(0)
            >>> labels = rng.integers(5, size=900)
            >>> vectors = np.eye(5)[labels] + 0.2 * rng.standard_normal((900, 5))
            >>> retriever = rcir.Retriever.from_embeddings(vectors[:400], labels=labels[:400])
            >>> _ = retriever.calibrate(vectors[400:800], labels[400:800])
            >>> with retriever.update() as next_version:
            ...     next_version.add(vectors[800:], [f"new {n}" for n in range(100)], labels[800:])
            >>> len(retriever.ids), retriever.changes()
            (500, [])
        """
        if isinstance(self.index, IsRemote):
            raise InvalidConfig(
                "the index is on a server and changes in place: call `add` or `remove`, then "
                "`recalibrate`, on the retriever itself"
            )
        changed, started = copy(self), self._version
        changed.searcher = copy(self.searcher)
        changed.index = deepcopy(self.index)
        yield changed
        if changed.calibration is not None and changed.changes():
            changed.recalibrate()
        with _SWAP:
            if self._version is not started:
                raise InvalidData(
                    "the retriever was changed by something else during this update, which "
                    "therefore had no effect: repeat it"
                )
            self._version = changed._version

    def recalibrate(self) -> CalibrationReport:
        """Calibrate anew with the same queries, after the gallery has changed.

        No pictures are needed: the queries are kept as they were searched. The score functions are
        fitted anew, of the kinds that were chosen before, and the uncertainty is the same. Each
        gallery's guarantee holds with its own delta, if the gallery was not changed in view of
        these queries.

        Raises:
            StaleCalibration: not calibrated, or the encoder has changed, of which the queries'
                vectors are no more.
            InvalidData: of some gallery items it is not known which queries they match.

        Example:
            >>> import numpy as np, rcir
            >>> rng = np.random.default_rng(0)
            >>> labels = rng.integers(5, size=900)
            >>> vectors = np.eye(5)[labels] + 0.2 * rng.standard_normal((900, 5))
            >>> retriever = rcir.Retriever.from_embeddings(vectors[:400], labels=labels[:400])
            >>> _ = retriever.calibrate(vectors[400:800], labels[400:800])
            >>> retriever.add(vectors[800:], [f"new {n}" for n in range(100)], labels[800:])
            >>> retriever.recalibrate().n_calibration
            280
        """
        before = self.require_calibration()
        tuning, calibration = (
            self.searcher.search_labelled(queries) for queries in self.kept_queries()
        )
        self.calibration, made = calibrate(
            self.searcher, tuning, calibration, before.options, like=before
        )
        return made

    def kept_queries(self) -> tuple[Queries, Queries]:
        """The tuning and calibration queries, to calibrate with them anew.

        Raises:
            StaleCalibration, InvalidData: as `recalibrate`.
        """
        calibration = self.require_calibration()
        for part in self.changes():
            if part in ("encoder", "preprocessing", "options"):
                raise StaleCalibration(
                    f"the {part} changed since calibration, so that the vectors of its queries are "
                    "no longer what it makes: search the labelled queries again and `calibrate`"
                )
        kept = calibration.tuning_queries, calibration.calibration_queries
        if self.relevance is None or any(queries.relevance is None for queries in kept):
            raise InvalidData(
                "it is not known which queries the gallery items match, so that the queries cannot "
                "be searched anew: give labelled queries to `calibrate`"
            )
        return kept

    def extend_calibration(
        self,
        queries: LabelledResults | NDArray[np.floating[Any]],
        labels: object = None,
        recurring: bool = False,
        **known: Any,
    ) -> None:
        """Add labelled queries to those calibrated on, in use, as often as wanted.

        The score functions stay as they are. From then on only guarantees that hold at every moment
        since calibration began are given (`anytime=True`), so that one may look at the sets and go
        on or stop; whoever does so with the others would stop where the queries mislead.

        Args:
            queries: exchangeable with the calibration queries, in the order in which their truth
                became known, searched by this retriever; or vectors (n, d). With groups if those
                had some.
            labels: of the vectors.
            recurring: allow queries that were tuned or calibrated with before, or come twice, as in
                `calibrate`.
            known: of vectors, see `labelled`.

        Raises:
            StaleCalibration: not calibrated, or changed since, or another one searched the queries.
            InvalidData: the calibration queries come in clusters, or have groups and these do not;
                or some queries are pictures of the gallery, of those before, or the same.

        Example:
            >>> import rcir
            >>> from rcir.data import DataConfig, load_splits
            >>> retriever = rcir.load("runs/demo/retriever")
            >>> test = load_splits(DataConfig("digits", seed=1)).test
            >>> retriever.extend_calibration(retriever.search_labelled(test))
            >>> answer = retriever.retrieve("runs/demo/queries/easy.png", 0.1, 0.1, anytime=True)
            >>> answer.guarantee.n_calibration > 5000
            True
        """
        calibration = self._valid_calibration()
        if not isinstance(queries, LabelledResults):
            queries = self.search_labelled(self.labelled(queries, labels, **known))
        check_searched(self.searcher, queries)
        require_alike(queries.require("queries"), calibration.calibration_queries)
        queries = self.judged(queries)
        added = queries_to_store(self.searcher, queries, calibration.uncertainty)
        gallery = None if self.options.leave_one_out else self.digests
        require_new(gallery, calibration.query_digests, digests_of(queries), recurring)
        if not self.options.leave_one_out:
            distances = vector_distances(self.searcher, queries)
            warn_of_copies("queries to add", distances, self.digests is not None)
        self.calibration = calibration.extended(queries, added, recurring)

    def check(
        self, recent: LabelledResults, alpha: float = ALPHA, delta: float = DELTA
    ) -> Exchangeability:
        """Test whether recent labelled queries look like the calibration queries, and the risk.

        Args:
            recent: queries of which `search_labelled`, or you, know the true matches.
            alpha, delta: the guarantee for misses that they were, or would be, answered with.

        Raises:
            StaleCalibration: not calibrated, or changed since, or another one searched the queries.
            InvalidData: the queries come in clusters: the tests are of independent ones.
            InvalidRiskLevel: alpha or delta is out of range.
            RiskUnattainable: nothing certifies alpha at delta.
        """
        calibration = self._valid_calibration()
        rule = calibration.main
        check_searched(self.searcher, recent)
        require_alike(recent.require("queries"), calibration.calibration_queries)
        recent = self.judged(recent)
        cluster = rule.calibration.cluster or recent.cluster
        if cluster is not None:
            raise InvalidData(
                f"queries come in clusters ({cluster}), and are compared as independent ones: "
                "calibrate and check with one query of each"
            )
        request = GuaranteeRequest(alpha, delta, anytime=calibration.sequential)
        threshold = calibration.guarantee(request).threshold
        scored = score(rule.score_function, recent)
        return check_exchangeability(rule.calibration, scored, certified=(threshold, alpha))
