"""The retriever: a search and a calibration, which answer queries with certified sets."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import update_wrapper
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.data.records import ImageSet
from rcir.data.relevance import Relevance
from rcir.embedding import Embedding
from rcir.errors import InvalidConfig, InvalidData
from rcir.index import Index, IsRemote
from rcir.options import ALPHA, DELTA
from rcir.retrieval import storage
from rcir.retrieval.answer import AtLevels, Retrieval, Version
from rcir.retrieval.calibrate import calibrate, check_recent, extend, recalibrate
from rcir.retrieval.calibration import Calibration, CalibrationReport
from rcir.retrieval.queries import Queries
from rcir.retrieval.search import QueryInput, Searcher
from rcir.retrieval.tuning import CalibrationOptions, Tuning, divide_queries
from rcir.risk import Exchangeability, Guarantee, GuaranteeRequest, LabelledResults, SearchResults
from rcir.risk.bounds import check_levels
from rcir.risk.request import Alpha, Distinct
from rcir.trust import reading

if TYPE_CHECKING:  # vectors need no torch
    from rcir.data.images import ImageLike
    from rcir.data.preprocessing import Preprocessing
    from rcir.encoders.base import Encoder
    from rcir.encoders.batches import Embed

_SWAP = threading.RLock()  # held while a version is replaced
Several: TypeAlias = list[Any] | tuple[Any, ...] | Embedding | Queries
Options = ParamSpec("Options")
Result = TypeVar("Result")


def _attribute(name: str, doc: str) -> Any:
    """Return a property of the retriever that is an attribute of its search."""
    return property(attrgetter(f"searcher.{name}"), doc=doc)


def _method(
    method: Callable[Concatenate[Searcher, Options], Result],
    then: Callable[[Version], None] = lambda _: None,
) -> Callable[Concatenate[Retriever, Options], Result]:
    """Return a method of the retriever that calls the method of its search, and then another."""

    def call(self: Retriever, /, *args: Options.args, **options: Options.kwargs) -> Result:
        result = method(self.searcher, *args, **options)
        then(self._version)
        return result

    return update_wrapper(call, method)


def _constructor(make: Callable[Options, Searcher]) -> classmethod[Retriever, Options, Retriever]:
    """Return a constructor of the retriever that calls the constructor of its search."""

    def call(cls: type[Retriever], /, *args: Options.args, **options: Options.kwargs) -> Retriever:
        return cls(make(*args, **options))

    return classmethod(update_wrapper(call, make.__func__))  # type: ignore[attr-defined]


class Retriever:
    """Answers queries with sets of gallery items whose risk is certified.

    A search finds candidates, and a calibration decides how many of them an answer needs.

    Attributes:
        searcher: finds the candidates; it has further attributes of the gallery and the encoder.
        calibration: everything that calibration made; None until calibrated. It is replaced as a
            whole, and `update` replaces both together.
        origin: where the retriever comes from, as plain values: the configuration of its data set
            ("data") and the MLflow run of its training ("run"), if known. No answer depends on it.
        version_folder: the version on disk that it was loaded from or last saved as; None before.
    """

    encoder: Encoder | None = _attribute("encoder", "The encoder; None if vectors were given.")
    preprocessing: Preprocessing | None = _attribute("preprocessing", "How images are prepared.")
    index: Index = _attribute("index", "The index of the gallery's vectors.")
    label_names: dict[int, str] = _attribute("label_names", "Names of the labels, by label.")
    ids: NDArray[np.object_] = _attribute("ids", "(n,) ids of the gallery items.")
    labels: NDArray[np.int64] | None = _attribute("labels", "(n,) labels of the gallery items.")
    relevance: Relevance | None = _attribute("relevance", "Which queries match which items.")
    depth: int = _attribute("depth", "Number of candidates of each query; no set is larger.")

    build = _constructor(Searcher.build)
    from_embeddings = _constructor(Searcher.from_embeddings)
    embed = _method(Searcher.embed)
    labelled = _method(Searcher.labelled)
    add = _method(Searcher.add, Version.warn_of_new_labels)
    remove = _method(Searcher.remove)

    def __init__(self, searcher: Searcher, calibration: Calibration | None = None) -> None:
        self._version = Version(searcher, calibration)
        self.origin: dict[str, Any] = {}
        self.version_folder: Path | None = None

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write this retriever to a folder as its current version.

        Raises:
            CorruptRetriever: the folder contains something other than a retriever, which is kept.
            InvalidConfig: encoder or index could not be built again from their configuration.
            SaveConflict: the retriever was loaded from or saved to this folder, and another version
                has been saved to it since.
        """
        version = self._version
        parts = version.searcher, version.calibration, self.origin, self.version_folder
        self.version_folder = storage.save(storage.StoredRetriever(*parts), folder)
        return Path(folder)

    @staticmethod
    def load(
        folder: str | os.PathLike[str],
        *,
        trust_code: bool = False,
        trust_servers: Collection[str] = (),
    ) -> Retriever:
        """Read a retriever from a folder, every file of it checked against its checksum.

        Arguments and errors are those of `rcir.load`.
        """
        with reading(trust_code, trust_servers):
            stored = storage.load(folder)
        retriever = Retriever(stored.searcher, stored.calibration)
        retriever.origin, retriever.version_folder = stored.origin, stored.version_folder
        return retriever

    def __copy__(self) -> Retriever:
        """Return a retriever whose search and calibration can be replaced on their own."""
        version = self._version
        other = Retriever(copy(version.searcher), version.calibration)
        other.origin, other.version_folder = self.origin, self.version_folder
        return other

    def _replace(self, before: Version, after: Version) -> None:
        """Replace the version, or raise `InvalidData` if it is not the one from before."""
        with _SWAP:
            if self._version is not before:
                raise InvalidData("the retriever changed meanwhile: repeat this change")
            self._version = after

    @contextmanager
    def _restored_label_names(self) -> Iterator[None]:
        """Restore the names of labels if the block raises: a refused call leaves no trace."""
        searcher, names = self.searcher, self.label_names
        try:
            yield
        except BaseException:
            searcher.label_names = names
            raise

    @property
    def searcher(self) -> Searcher:
        """The search that finds the candidates."""
        return self._version.searcher

    @property
    def calibration(self) -> Calibration | None:
        """Everything that calibration made; None until calibrated."""
        return self._version.calibration

    @calibration.setter
    def calibration(self, calibration: Calibration | None) -> None:
        self._version = Version(self.searcher, calibration)

    def search(self, queries: QueryInput, embedder: Embed | None = None) -> SearchResults:
        """Find the nearest gallery items of each query without a guarantee.

        See `Searcher.search`; queries have the uncertainty of the calibration.
        """
        version = self._version
        return version.judged(version.searcher.search(queries, embedder))

    def search_labelled(
        self,
        queries: ImageSet | Queries,
        group: str | None = None,
        embedder: Embed | None = None,
        cluster: str | None = None,
    ) -> LabelledResults:
        """Search queries with known matches, see `Searcher.search_labelled`."""
        version = self._version
        return version.judged(version.searcher.search_labelled(queries, group, embedder, cluster))

    def changes(self) -> list[str]:
        """Return the names of what differs from what it was calibrated on."""
        return self._version.changes()

    def require_calibration(self) -> Calibration:
        """Return the calibration, whether it is stale or not.

        Raises:
            StaleCalibration: not calibrated.
        """
        return self._version.require_calibration()

    def calibrate(
        self,
        queries: ArrayLike,
        labels: object,
        score_function: str = "auto",
        *,
        tuning: Tuning = "auto",
        uncertainty: NDArray[np.floating[Any]] | None = None,
        model: str | None = None,
        groups: Sequence[str] | NDArray[Any] | None = None,
        clusters: Sequence[str] | NDArray[Any] | None = None,
        cluster: str = "cluster",
        **options: Any,
    ) -> CalibrationReport:
        """Calibrate on labelled vectors, some of which tune, and return what is certified.

        Args:
            queries: vectors (n, d), drawn independently of each other from the same source as
                future queries; if they come in clusters, clusters are.
            labels: of each, of the kind that the gallery has (`Retriever.from_embeddings`).
            tuning: "queries": a random three tenths tune. "labels": those of three tenths of the
                labels. "gallery": the gallery's items tune, each left out of its own search, and
                all queries calibrate. "auto": "gallery" for fewer than 200 queries without
                clusters if its items can tune, else "queries".
            uncertainty, model, groups, clusters, cluster: of the vectors, see `labelled`.
            score_function, options: see `calibrate_splits`.

        Raises:
            InvalidConfig: an option is wrong, or the queries were searched already.
            InvalidData: the queries are unsuitable, see `calibrate_splits`.

        Example:
            >>> import numpy as np, rcir
            >>> rng = np.random.default_rng(0)
            >>> labels = rng.integers(5, size=900)
            >>> vectors = np.eye(5)[labels] + 0.2 * rng.standard_normal((900, 5))
            >>> retriever = rcir.Retriever.from_embeddings(vectors[:400], labels=labels[:400])
            >>> retriever.calibrate(vectors[400:], labels[400:]).n_calibration
            350
        """
        with self._restored_label_names():
            labelled = self.labelled(queries, labels, uncertainty, model, groups, clusters, cluster)
            chosen = CalibrationOptions(score_function, **options)
            tuned, calibrated = divide_queries(self.searcher, labelled, tuning, chosen)
            tuning_split = None if tuned is None else self.searcher.search_labelled(tuned)
            split = self.searcher.search_labelled(calibrated)
            if tuned is None:  # nothing was divided
                options["seed"] = None
            return self.calibrate_splits(tuning_split, split, score_function, **options)

    def calibrate_splits(
        self,
        tuning: LabelledResults | None,
        calibration: LabelledResults,
        score_function: str = "auto",
        **options: Any,
    ) -> CalibrationReport:
        """Calibrate on two splits (see `search_labelled`), and return what is certified.

        Args:
            tuning: queries that fit the sizes and certify nothing; None for the gallery's items.
            calibration: other queries, drawn independently of each other from the same source as
                future queries; if they come in clusters, clusters are.
            score_function, options: bound, alphas, delta, recurring, query_uncertainty and seed,
                see `rcir.retrieval.tuning.CalibrationOptions`.

        Raises:
            StaleCalibration: the retriever has changed since it searched.
            InvalidData: the queries are unsuitable; or some of them are images of the gallery, of
                the tuning split too, or the same (by digests; for images that were encoded again it
                warns, but not for those in templates, whose vectors combine several images).
        """
        chosen, before = CalibrationOptions(score_function, **options), self._version
        calibration_made, report = calibrate(
            before.searcher, tuning, calibration, chosen, before.calibration
        )
        self._replace(before, Version(before.searcher, calibration_made))
        return report

    @overload
    def retrieve(
        self, query: ImageLike, alpha: Alpha, delta: float | None, **options: Any
    ) -> Retrieval: ...
    @overload
    def retrieve(
        self, query: Several, alpha: Alpha, delta: float | None, **options: Any
    ) -> list[Retrieval]: ...

    def retrieve(
        self,
        query: ImageLike | Several,
        alpha: Alpha,
        delta: float | None,
        *,
        uncertainty: float | NDArray[np.floating[Any]] | None = None,
        model: str | None = None,
        **options: Any,
    ) -> Retrieval | list[Retrieval]:
        """Retrieve a set that holds a true match with the requested guarantee.

        With probability at least 1 - delta over the calibration queries, at most a fraction alpha
        of further queries, drawn independently from where these were, get a set without a true
        match. Any (alpha, delta) is answered without calibrating again; the statement is for a pair
        fixed beforehand.

        Args:
            query: a path, the bytes of a file, a PIL image, a uint8 array (H, W), (H, W, 1) or
                (H, W, 3), or a list of such, which gives a list. Or what `embed` or `prepared`
                returns, which gives a list. Without an encoder, a vector (d,), or vectors (n, d),
                which give a list.
            alpha, delta, options: the guarantee that is requested: its options and their meaning
                are those of `rcir.risk.GuaranteeRequest`, listed by `rcir.risk.request_options`.
            uncertainty: of a vector, or (n,) of vectors, if and only if those calibrated with had
                theirs.
            model: what embedded the vectors; refused if that is not what embedded the gallery.

        Raises:
            InvalidRiskLevel, InvalidImage, InvalidConfig, InvalidData: of the arguments.
            StaleCalibration: not calibrated, or changed since.
            RiskUnattainable: nothing certifies the request.

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
        return self._version.answer(query, request, uncertainty, model)

    def guarantee(self, alpha: Alpha, delta: float | None, **options: Any) -> Guarantee:
        """Return the guarantee that `retrieve` would give with its answers.

        Raises:
            RcirError: as `retrieve` does, but for those of queries.
        """
        calibration = self._version.valid_calibration()
        return calibration.guarantee(GuaranteeRequest(alpha, delta, **options))

    def at_levels(
        self,
        query: Any,
        alphas: Sequence[float],
        delta: float,
        *,
        distinct: Distinct = None,
        group: str | None = None,
    ) -> list[AtLevels]:
        """Return the sets of queries at several alphas, from one search.

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
        """
        requests = [
            GuaranteeRequest(alpha, delta, distinct=distinct, group=group, simultaneous=True)
            for alpha in sorted(check_levels(alphas))
        ]
        return self._version.answer_at_levels(query, requests)

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
        before, folder, changed = self._version, self.version_folder, copy(self)
        fingerprints = before.searcher.fingerprints()
        changed.searcher.index = deepcopy(before.searcher.index)
        yield changed
        if changed.calibration is not None and changed.changes():
            changed.recalibrate()
        with _SWAP:
            if before.searcher.fingerprints() != fingerprints:
                raise InvalidData("the gallery changed during this update: repeat it")
            self._replace(before, changed._version)
            if changed.version_folder != folder:  # the block saved it
                self.version_folder = changed.version_folder

    def recalibrate(self) -> CalibrationReport:
        """Calibrate anew with the same queries, after the gallery has changed.

        No images are needed: the queries are kept as they were searched. The score functions are
        fitted anew, of the kinds that were chosen before, and the uncertainty is the same. Each
        gallery's guarantee holds with its own delta, also at every moment (`anytime`), if the
        gallery was not changed in view of these queries.

        Raises:
            StaleCalibration: not calibrated, or the encoder has changed, so that the vectors of the
                queries are no longer its own.
            InvalidData: it is not known which queries some gallery items match.
        """
        before = self._version
        made, report = recalibrate(before.searcher, before.require_calibration())
        self._replace(before, Version(before.searcher, made))
        return report

    def extend_calibration(
        self,
        queries: LabelledResults | NDArray[np.floating[Any]],
        labels: object = None,
        recurring: bool = False,
        **options: Any,
    ) -> None:
        """Add labelled queries to those calibrated on, in use, as often as needed.

        The score functions stay as they are. From then on only guarantees that hold at every moment
        since this gallery was calibrated are given (`anytime=True`), so that one may look at the
        sets and go on or stop. With the others, stopping early would favour misleading queries.

        Args:
            queries: exchangeable with the calibration queries, searched by this retriever; or
                vectors (n, d). With groups if those had some. Add them in the order in which they
                were asked, none left out before the last: if the order depends on the outcome, no
                guarantee holds. Wait for a query whose true matches are unknown yet, up to a limit
                that is fixed beforehand, and then add it as one that matches nothing. Queries by
                which this retriever was chosen among others must not be added.
            labels, options: of the vectors, see `labelled`.
            recurring: allow queries that were tuned or calibrated with before, or come twice, as in
                `calibrate`.

        Raises:
            StaleCalibration: not calibrated, or changed since, or another one searched the queries.
            InvalidData: the calibration queries come in clusters, or have groups and these do not;
                or some are of new groups, because `mix="any"` divides delta by their number; or
                some queries are items of the gallery, of those before, or the same.

        Example:
            >>> import numpy as np, rcir
            >>> rng = np.random.default_rng(0)
            >>> labels = rng.integers(5, size=1200)
            >>> vectors = np.eye(5)[labels] + 0.2 * rng.standard_normal((1200, 5))
            >>> retriever = rcir.Retriever.from_embeddings(vectors[:400], labels=labels[:400])
            >>> _ = retriever.calibrate(vectors[400:900], labels[400:900])
            >>> retriever.extend_calibration(vectors[900:], labels[900:])
            >>> retriever.guarantee(0.1, 0.1, anytime=True).n_calibration
            650
        """
        before = self._version
        calibration = before.valid_calibration()
        with self._restored_label_names():
            if not isinstance(queries, LabelledResults):
                queries = self.search_labelled(self.labelled(queries, labels, **options))
            made = extend(before.searcher, calibration, queries, recurring)
            self._replace(before, Version(before.searcher, made))

    def check(
        self, recent: LabelledResults, alpha: float = ALPHA, delta: float = DELTA
    ) -> Exchangeability:
        """Test whether recent labelled queries look like the calibration queries, and the risk.

        Args:
            recent: queries whose true matches are known by now, see `search_labelled`.
            alpha, delta: the guarantee for misses that they were, or would be, answered with.

        Raises:
            StaleCalibration: not calibrated, or changed since, or another one searched the queries.
            InvalidData: the queries come in clusters: the tests are of independent ones.
            InvalidRiskLevel, RiskUnattainable: a level is out of range, or nothing certifies it.
        """
        version = self._version
        return check_recent(version.searcher, version.valid_calibration(), recent, alpha, delta)
