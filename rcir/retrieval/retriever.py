"""The retriever: a search and a calibration, which answer queries with certified sets."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.data.labelling import gallery_relevance
from rcir.data.names import require_utf8
from rcir.data.records import ImageSet
from rcir.data.relevance import Relevance
from rcir.data.repeats import digests
from rcir.embedding import Embedding
from rcir.errors import InvalidConfig, InvalidData, SaveConflict
from rcir.index import (
    DEPTH,
    Index,
    IndexConfig,
    build_index,
    check_depth,
    lengths,
)
from rcir.metrics.ranking import Floats
from rcir.notebook import as_html
from rcir.options import ALPHA, DELTA
from rcir.retrieval import storage
from rcir.retrieval.answer import AtLevels, Retrieval, State
from rcir.retrieval.calibrate import calibrate, check_recent, extend, recalibrate
from rcir.retrieval.calibration import Calibration, CalibrationReport
from rcir.retrieval.drift import QueryMonitor
from rcir.retrieval.gallery import Gallery, check_ids
from rcir.retrieval.items import cluster_items, embed_gallery
from rcir.retrieval.queries import (
    KEY,
    LabelledKeywords,
    Metric,
    Queries,
    VectorOptions,
    as_names,
    require_digits,
)
from rcir.retrieval.search import QueryInput, Searcher
from rcir.retrieval.shift import draw_like_target
from rcir.retrieval.tuning import (
    CalibrateKeywords,
    CalibrationKeywords,
    OwnScoreFunction,
    Tuning,
    divide_keywords,
    divide_queries,
    make_options,
)
from rcir.risk import (
    Exchangeability,
    Guarantee,
    LabelledResults,
    RequestOptions,
    SearchResults,
    make_request,
)
from rcir.risk.bounds import check_levels
from rcir.risk.options import Alpha
from rcir.risk.planning import NUMBERS, Pilot, Plan
from rcir.terminal import working
from rcir.trust import reading

if TYPE_CHECKING:  # vectors need no torch
    from rcir.data.images import ImageLike
    from rcir.data.preprocessing import Preprocessing
    from rcir.encoders.base import Encoder, Images
    from rcir.encoders.batches import Embed

_SWAP = threading.RLock()  # held while a state is replaced
QueryBatch: TypeAlias = list[Any] | tuple[Any, ...] | Embedding | Queries


class Retriever:
    """Answers queries with sets of gallery items whose risk is certified.

    Make one of vectors by `from_embeddings`, of images by `build`, or read one by `rcir.load`.
    Then `calibrate` it on labelled queries (`plan` says how many), `retrieve`, and `save`. When the
    gallery changes, use `add`, `remove` and `recalibrate`, or `update`. `query_monitor` and `check`
    watch queries. A change raises `SaveConflict` if the retriever was changed otherwise meanwhile.

    Attributes:
        origin: where the retriever comes from, as plain values: the configuration of its data set
            ("data"), the folder in which each item's picture has the item's id as its path
            ("pictures"), and the MLflow run of its training ("run"), if known. No answer depends
            on it.
        version_folder: the version on disk that it was loaded from or last saved as; None before.
    """

    def __init__(self, searcher: Searcher, calibration: Calibration | None = None) -> None:
        self._state = State(searcher, calibration)
        self.origin: dict[str, Any] = {}
        self.version_folder: Path | None = None

    def __repr__(self) -> str:
        return f"Retriever({'; '.join(self._facts().values())})"

    def _repr_html_(self) -> str:
        calibration = self.calibration
        table = () if calibration is None or self.changes() else calibration.table
        return as_html("Retriever", facts=self._facts(), table=table)

    def _facts(self) -> dict[str, str]:
        """Return what it consists of, in words."""
        classes, changed = self.classes, self.calibration is not None and self.changes()
        encoder = "vectors" if self.encoder is None else type(self.encoder).__name__
        stale = f"stale calibration: {', '.join(changed)} changed" if changed else ""
        return {
            "gallery": f"{len(self.ids)} items" + (f" of {len(classes)} labels" if classes else ""),
            "encoder": self.searcher.options.model or encoder,
            "index": f"{type(self.index).__name__}, {self.depth} candidates per query",
            "calibration": stale or str(self.calibration or "not calibrated"),
        }

    @classmethod
    @working("building the retriever")
    def build(
        cls,
        encoder: Encoder,
        preprocessing: Preprocessing,
        gallery: ImageSet,
        depth: int = DEPTH,
        *,
        embedder: Embed | None = None,
        index: IndexConfig | None = None,
        templates: str | None = None,
        key: str | None = None,
    ) -> Self:
        """Embed and index a gallery; the result still has to be calibrated.

        Args:
            encoder, preprocessing: how images are embedded.
            gallery: the images with their labels.
            depth: number of candidates searched for each query; no set is larger.
            embedder: computes the embeddings, see `rcir.encoders.embedder.Embedder`; by default
                `rcir.encoders.batches.embed`.
            index: configuration of the index; by default an exact one.
            templates: the attribute of the gallery that names the template of each image, such as
                a person. The images of a template become one item with the name of the template,
                and their embeddings are fused (`rcir.encoders.batches.fuse`). By default, every
                image is an item.
            key: the attribute of the gallery that names the part of each item, such as a site; see
                `keys` of `from_embeddings`.

        Raises:
            InvalidData: the gallery is empty or does not have the attribute, or images of one
                template match different queries or their embeddings cannot be fused.
            InvalidImage: an image cannot be read.

        Example:
            >>> from rcir.data import Preprocessing
            >>> from rcir.encoders import EncoderConfig, build_encoder
            >>> encoder = build_encoder(EncoderConfig("btl"), channels=1, size=(8, 16))
            >>> images = np.arange(4 * 8 * 16, dtype=np.uint8).reshape(4, 8, 16)
            >>> names = {"person": np.array(["Ann", "Ann", "Bo", "Bo"])}
            >>> gallery = ImageSet(images, np.array([0, 0, 1, 1]), ["a", "b", "c", "d"], names)
            >>> Retriever.build(encoder, Preprocessing(), gallery, templates="person").ids
            array(['Ann', 'Bo'], dtype=object)
        """
        vectors, items = embed_gallery(encoder, preprocessing, gallery, embedder, templates, key)
        check_depth(depth)
        searcher = Searcher(
            gallery=items,
            index=build_index(vectors, index),
            encoder=encoder,
            preprocessing=preprocessing,
            max_depth=depth,
            options=VectorOptions(key=KEY if key is None else key),
            label_names=gallery.label_names,
        )
        return cls(searcher)

    @classmethod
    @working("building the retriever")
    def from_embeddings(
        cls,
        vectors: ArrayLike,
        ids: Sequence[str] | None = None,
        labels: object = None,
        *,
        metric: Metric = "cosine",
        uncertainty: Floats | None = None,
        depth: int = DEPTH,
        index: IndexConfig | None = None,
        model: str | None = None,
        leave_one_out: bool = False,
        clusters: ArrayLike | Literal["auto"] | None = "auto",
        cluster: str = "cluster",
        times: ArrayLike | None = None,
        keys: ArrayLike | None = None,
        key: str = KEY,
    ) -> Self:
        """Index precomputed embeddings; the result still has to be calibrated.

        Args:
            vectors: (n, d) embeddings of the gallery items. Vectors, ids, labels and uncertainties
                may be NumPy arrays, lists, PyTorch tensors, or columns or frames of pandas or
                Arrow.
            ids: (n,) names of the items; by default "0", "1", ...
            labels: (n,) integers or strings; or a list of strings for each item, where items that
                share a string match; or a `Relevance`, such as `rcir.data.WithinRadius`. If None,
                the labels of a query are a list of the ids of its true matches.
            metric, model, leave_one_out: see `VectorOptions`.
            uncertainty: (n,) uncertainties of the items; larger is less certain.
            depth: number of candidates searched for each query; no set is larger.
            index: configuration of the index; by default an exact one.
            clusters: with leave_one_out, (n,) the cluster of each item, such as the encounter in
                which it was photographed. An item is left out of its own search with its whole
                cluster, and each cluster calibrates as one query. "auto" finds the photographs of
                one moment (`rcir.data.bursts.find_moments`) if the items have a label each; None
                takes all items for independent.
            cluster: what a cluster is, such as "encounter".
            times: for "auto", (n,) capture times, see `rcir.data.bursts.as_seconds`: photographs of
                one label that follow each other within a minute are of one moment, too.
            keys: (n,) the part of the gallery that each item is in, such as a site or a tenant.
                Each query then names its part, and only items of this part are candidates and
                matches, in calibration and in use. Parts are searched exactly and in memory.
            key: what a part is, such as "site".

        Raises:
            InvalidData: vectors, ids, labels, uncertainties, clusters, times or keys are
                unsuitable.

        Example:
            >>> import rcir
            >>> vectors = np.random.default_rng(0).standard_normal((100, 8))
            >>> retriever = rcir.Retriever.from_embeddings(vectors, labels=np.arange(100) % 5)
            >>> retriever.search(vectors[:2]).positions[:, 0]
            array([0, 1])
        """
        options = VectorOptions(metric, model, leave_one_out, key=key)
        prepared = options.prepare(vectors)
        if not len(prepared):
            raise InvalidData("the gallery is empty: pass at least one vector")
        require_digits(prepared, metric)
        numbers = [str(row) for row in range(len(prepared))]
        names = check_ids(numbers if ids is None else ids, len(prepared))
        relevance, label_names = gallery_relevance(labels, names.tolist())
        require_utf8(label_names.values(), "the labels of the gallery")
        item_clusters, options = cluster_items(
            prepared, relevance, options, clusters=clusters, cluster=cluster, times=times
        )
        gallery = Gallery(
            ids=names,
            norms=lengths(prepared),
            relevance=relevance,
            uncertainty=options.uncertainties(uncertainty),
            digests=digests(prepared),
            clusters=item_clusters,
            keys=None if keys is None else as_names(keys, "keys"),
        )
        check_depth(depth)
        searcher = Searcher(
            gallery,
            build_index(prepared, index),
            max_depth=depth,
            options=options,
            label_names=label_names,
        )
        return cls(searcher)

    def attach_encoder(self, encoder: Encoder, preprocessing: Preprocessing) -> None:
        """Let queries be images, too, by the encoder that embedded the gallery's vectors.

        Uint8 arrays are then images, all others vectors. A calibration stays valid.

        Args:
            encoder, preprocessing: those that the gallery's `model` names
                (`rcir.runs.embedding.load_model`).

        Raises:
            InvalidData: weights or preprocessing differ from those that the gallery's model had.
            InvalidConfig: the gallery names no model, or the encoder compares more than vectors.
        """
        before = self._state
        searcher = before.searcher.with_encoder(encoder, preprocessing)
        self._replace(before, State(searcher, before.calibration))

    @property
    def encoder(self) -> Encoder | None:
        """The encoder; None if vectors were passed, and none was attached."""
        return self.searcher.encoder

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How images are prepared for the encoder."""
        return self.searcher.preprocessing

    @property
    def index(self) -> Index:
        """The index of the gallery's vectors."""
        return self.searcher.index

    @property
    def label_names(self) -> Mapping[int, str]:
        """Names of the labels, by label; they cannot be changed."""
        return MappingProxyType(self.searcher.label_names)

    @property
    def ids(self) -> NDArray[np.object_]:
        """(n,) ids of the gallery items."""
        return self.searcher.ids

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """(n,) labels of the gallery items; None unless they match by one label each."""
        return self.searcher.labels

    @property
    def classes(self) -> tuple[int, ...] | tuple[str, ...] | None:
        """The gallery's different labels, in the order of the columns of `probabilities`."""
        if self.labels is None:
            return None
        return self.searcher.named_labels(np.unique(self.labels, return_index=True)[1])

    @property
    def relevance(self) -> Relevance | None:
        """Which queries match which items; None if unknown."""
        return self.searcher.relevance

    @property
    def depth(self) -> int:
        """Number of candidates of each query; no set is larger."""
        return self.searcher.depth

    def embed(self, images: Images, embedder: Embed | None = None) -> Embedding:
        """Return the embeddings of images, with their uncertainty if the encoder states one.

        Args:
            images: n images that `rcir.data.read_image` accepts.
            embedder: see `build`.

        Raises:
            InvalidConfig: there is no encoder.
            InvalidImage: an image cannot be read.
        """
        return self.searcher.embed(images, embedder)

    def add(
        self,
        images: QueryInput,
        ids: Sequence[str],
        labels: object = None,
        uncertainty: Floats | None = None,
        *,
        model: str | None = None,
        clusters: ArrayLike | None = None,
        keys: ArrayLike | None = None,
    ) -> None:
        """Add items to the gallery; a calibration is then stale, see `Retriever.recalibrate`.

        Each call copies an index that is in memory, so add many items at once. Use `update` to go
        on answering queries meanwhile.

        Args:
            images: n images, embeddings or vectors, as for `search`.
            ids: (n,) names that no gallery item has.
            labels: labels of the same kind as the gallery's, or a `Relevance`; required if and only
                if the gallery has labels.
            uncertainty: (n,) uncertainties of vectors; required if the gallery has uncertainties.
            model: name of the model that embedded the vectors, see `VectorOptions`.
            clusters: (n,) the cluster of each item, if and only if those of the gallery were
                passed; moments that were found are found anew.
            keys: (n,) the part of each item, if and only if the gallery has keys.

        Raises:
            InvalidData: ids, labels, vectors, uncertainties or clusters are unsuitable; nothing was
                added.
            InvalidConfig, InvalidImage: see `embed`; or the gallery is attached.
        """
        before = self._state
        searcher = before.searcher.with_items(
            images, ids, labels, uncertainty, model=model, clusters=clusters, keys=keys
        )
        self._replace(before, State(searcher, before.calibration))
        self._state.warn_of_new_labels()

    def remove(self, ids: Sequence[str]) -> None:
        """Remove items from the gallery; a calibration is then stale, see `add`.

        Raises:
            InvalidData: some ids are not in the gallery, or no item would remain; nothing was
                removed.
        """
        before = self._state
        self._replace(before, State(before.searcher.without(ids), before.calibration))

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write this retriever to a folder as its current version.

        Raises:
            CorruptRetriever: the folder contains something other than a retriever, which is kept.
            InvalidConfig: encoder or index could not be built again from their configuration.
            SaveConflict: the retriever was loaded from or saved to this folder, and another version
                has been saved to it since.
        """
        state = self._state
        stored = storage.StoredRetriever(
            searcher=state.searcher,
            calibration=state.calibration,
            origin=self.origin,
            version_folder=self.version_folder,
        )
        self.version_folder = storage.save(stored, folder)
        return Path(folder)

    @staticmethod
    @working("loading the retriever")
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
        retriever.origin, retriever.version_folder = dict(stored.origin), stored.version_folder
        return retriever

    def __copy__(self) -> Retriever:
        """Return a retriever whose search and calibration can be replaced on their own."""
        state = self._state
        other = Retriever(state.searcher, state.calibration)
        other.origin, other.version_folder = dict(self.origin), self.version_folder
        return other

    def _replace(self, before: State, after: State) -> None:
        """Replace the state, or raise `SaveConflict` if it is not the one from before.

        Names of labels that queries had meanwhile are kept.
        """
        with _SWAP:
            now, names = self._state, before.searcher.label_names
            if now is not before:
                only_names = now.searcher.is_same_search(before.searcher)
                if now.calibration is not before.calibration or not only_names:
                    raise SaveConflict("the retriever changed meanwhile: repeat this change")
                if len(after.searcher.label_names) > len(names):
                    raise SaveConflict("labels were numbered meanwhile: repeat this change")
                searcher = after.searcher.with_label_names(now.searcher.label_names)
                after = State(searcher, after.calibration)
            self._state = after

    @property
    def searcher(self) -> Searcher:
        """The search that finds the candidates."""
        return self._state.searcher

    @searcher.setter
    def searcher(self, searcher: Searcher) -> None:
        with _SWAP:
            self._state = State(searcher, self._state.calibration)

    @property
    def calibration(self) -> Calibration | None:
        """Everything that calibration made; None until calibrated."""
        return self._state.calibration

    @calibration.setter
    def calibration(self, calibration: Calibration | None) -> None:
        with _SWAP:
            self._state = State(self._state.searcher, calibration)

    def search(self, queries: QueryInput, embedder: Embed | None = None) -> SearchResults:
        """Find the nearest gallery items of each query without a guarantee.

        See `Searcher.search`; queries have the uncertainty of the calibration.
        """
        state = self._state
        return state.with_uncertainty(state.searcher.search(queries, embedder))

    def search_labelled(
        self,
        queries: ImageSet | Queries,
        group: str | None = None,
        embedder: Embed | None = None,
        cluster: str | None = None,
        key: str | None = None,
    ) -> LabelledResults:
        """Search queries with known matches, see `Searcher.search_labelled`."""
        state = self._state
        return state.with_uncertainty(
            state.searcher.search_labelled(queries, group, embedder, cluster, key)
        )

    def changes(self) -> list[str]:
        """Return the names of what differs from what it was calibrated on."""
        return self._state.changes()

    def require_calibration(self) -> Calibration:
        """Return the calibration, whether it is stale or not.

        Raises:
            StaleCalibration: not calibrated.
        """
        return self._state.require_calibration()

    def labelled(
        self,
        vectors: ArrayLike | ImageSet,
        labels: object = None,
        uncertainty: Floats | None = None,
        **population: Unpack[LabelledKeywords],
    ) -> Queries:
        """Return labelled vectors or images as queries for `search_labelled`.

        The retriever keeps the names of labels that the gallery lacks, so that they get the same
        numbers later.

        Args:
            vectors: (n, d) vectors of the queries; with an encoder, n images, or an `ImageSet`.
            labels: (n,) labels of the kind that the gallery has; unless passed, those of the
                `ImageSet`, whose clusters are used, too.
            uncertainty: (n,) uncertainties, larger is less certain; all later queries then need
                them, too.
            model: name of the model that embedded the vectors, see `VectorOptions`.
            groups: (n,) group of each query, such as a camera; certificates are then per group.
            clusters: (n,) cluster of each query, such as a video; queries of one cluster are not
                independent.
            cluster: what a cluster is, such as "video".
            probabilities: (n, L) of the labels in `classes`, by a model of your own that was fitted
                on none of these queries; each row sums to 1. They size sets in place of a model of
                the gallery's labels, and all later queries need them. Columns of a table are
                named after the labels, in any order, or numbered from 0 in the order of `classes`.
            keys: (n,) the part of the gallery that each is searched in, if and only if the gallery
                has keys; the groups of the queries, unless others are passed.
            encounters: (n,) the encounter of each, such as a visit during which an animal was
                photographed several times. The vectors of an encounter are fused to one query; all
                later queries are then encounters (`together`), of as many pictures as there happen
                to be.

        Raises:
            InvalidConfig: probabilities cannot size sets of this gallery.
            InvalidData: the vectors or labels are unsuitable, or their lengths differ.
        """
        while True:
            before = self._state
            queries, searcher = before.searcher.labelled(vectors, labels, uncertainty, **population)
            if searcher is before.searcher:
                return queries
            with suppress(SaveConflict):  # further labels were numbered meanwhile
                self._replace(before, State(searcher, before.calibration))
                return queries

    @working("calibrating")
    def calibrate(
        self,
        queries: ArrayLike | ImageSet,
        labels: object = None,
        score_function: OwnScoreFunction = "auto",
        *,
        tuning: Tuning = "auto",
        uncertainty: Floats | None = None,
        target: QueryInput | None = None,
        **keywords: Unpack[CalibrateKeywords],
    ) -> CalibrationReport:
        """Calibrate on labelled queries, some of which tune, and return what is certified.

        Args:
            queries: vectors (n, d), drawn independently of each other from the same source as
                future queries; if they come in clusters, clusters are. With an encoder, images, or
                an `ImageSet` with its labels.
            labels: of each, of the kind that the gallery has (`Retriever.from_embeddings`).
            tuning: "queries": a random three tenths tune, or 12% of fewer than 200. "labels": those
                of three tenths of the labels. "gallery": the gallery's items tune, each left out of
                its own search, and all queries calibrate. "auto": "gallery" for queries without
                clusters if its items can tune, and either their labels size the sets or there are
                fewer than 200 queries; else "queries".
            uncertainty, model, groups, clusters, cluster, probabilities, keys, encounters: of the
                vectors, see `labelled`.
            target: unlabelled queries of another population that the guarantee is to cover. The
                calibration queries that are a sample of it are kept, see `rcir.retrieval.shift`,
                if both populations differ only in uncertainty and distance; "queries" tune.
            score_function, other keywords: see `calibrate_splits`.

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
            500
        """
        population, options = divide_keywords(keywords)
        chosen, before = make_options(score_function, **options), self._state
        labelled, searcher = before.searcher.labelled(queries, labels, uncertainty, **population)
        if target is not None:
            if tuning not in ("auto", "queries"):
                raise InvalidConfig(f"tuning is {tuning!r}; with a target it must be 'queries'")
            if labelled.keys is not None or labelled.pictures is not None:
                raise InvalidConfig("target cannot be combined with keys or encounters: omit one")
            tuning = "queries"
        tuned, calibrated = divide_queries(searcher, labelled, tuning, chosen)
        split, shift = searcher.search_labelled(calibrated), None
        if tuned is None:  # nothing was divided
            tuning_split, chosen = None, replace(chosen, seed=None)
        else:
            tuning_split = searcher.search_labelled(tuned)
            if target is not None:
                found = searcher.candidates(searcher.prepare(target))
                split, shift = draw_like_target(searcher, tuning_split, split, found)
        made, report = calibrate(
            searcher, tuning_split, split, chosen, before.calibration, shift=shift
        )
        self._replace(before, State(searcher, made))
        return report

    def calibrate_splits(
        self,
        tuning: LabelledResults | None,
        calibration: LabelledResults,
        score_function: OwnScoreFunction = "auto",
        **options: Unpack[CalibrationKeywords],
    ) -> CalibrationReport:
        """Calibrate on two splits (see `search_labelled`), and return what is certified.

        Args:
            tuning: queries that fit the sizes and certify nothing; None for the gallery's items.
            calibration: other queries, drawn independently of each other from the same source as
                future queries; if they come in clusters, clusters are.
            score_function, options: bound, alphas, delta, recurring, query_uncertainty and seed,
                see `rcir.retrieval.tuning.CalibrationOptions`; score_function may be your own
                object with `fit` and `rank`, see `rcir.risk.OwnRanking`, or its import path.

        Raises:
            StaleCalibration: the retriever has changed since it searched.
            InvalidData: the queries are unsuitable; or some of them are images of the gallery, of
                the tuning split too, or the same (by digests; for images that were encoded again it
                warns, but not for those in templates, whose vectors combine several images).
        """
        chosen, before = make_options(score_function, **options), self._state
        made, report = calibrate(before.searcher, tuning, calibration, chosen, before.calibration)
        self._replace(before, State(before.searcher, made))
        return report

    @overload
    def retrieve(
        self, query: ImageLike, alpha: Alpha, delta: float | None, **options: Unpack[RequestOptions]
    ) -> Retrieval: ...
    @overload
    def retrieve(
        self,
        query: QueryBatch,
        alpha: Alpha,
        delta: float | None,
        **options: Unpack[RequestOptions],
    ) -> list[Retrieval]: ...

    def retrieve(
        self,
        query: ImageLike | QueryBatch,
        alpha: Alpha,
        delta: float | None,
        *,
        uncertainty: float | Floats | None = None,
        model: str | None = None,
        probabilities: ArrayLike | None = None,
        **options: Unpack[RequestOptions],
    ) -> Retrieval | list[Retrieval]:
        """Retrieve a set that holds a true match with the requested guarantee.

        With probability at least 1 - delta over the calibration queries, at most a fraction alpha
        of further queries, drawn independently from where these were, get a set without a true
        match. Any (alpha, delta) is answered without calibrating again; the guarantee holds for a
        pair chosen before looking at results.

        Args:
            query: a path, the bytes of a file, a PIL image, a uint8 array (H, W), (H, W, 1) or
                (H, W, 3), or a list of such, which gives a list. Or what `embed` or
                `Searcher.prepare` returns, which gives a list. Without an encoder, a vector (d,),
                or vectors (n, d), which give a list.
            alpha, delta, options: the guarantee that is requested: its options and their meaning
                are those of `rcir.risk.make_request`, listed by `rcir.risk.request_options`.
            uncertainty: of a vector, or (n,) of vectors, if and only if those calibrated with had
                theirs.
            model: what embedded the vectors; refused if that is not what embedded the gallery.
            probabilities: (n, L) or (L,) of the labels in `classes`, if and only if those
                calibrated with had theirs.

        Raises:
            InvalidRiskLevel, InvalidImage, InvalidConfig, InvalidData: an argument is invalid.
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
        request = make_request(alpha, delta, **options)
        state = replace(self._state, origin=self.origin)
        return state.answer(
            query, request, uncertainty=uncertainty, model=model, probabilities=probabilities
        )

    def guarantee(
        self, alpha: Alpha, delta: float | None, **options: Unpack[RequestOptions]
    ) -> Guarantee:
        """Return the guarantee that `retrieve` would give with its answers.

        Raises:
            RcirError: as `retrieve`, except errors about queries.
        """
        calibration = self._state.valid_calibration()
        return calibration.guarantee(make_request(alpha, delta, **options))

    def plan(
        self,
        alpha: Alpha,
        delta: float | None,
        *,
        numbers: Sequence[int] = NUMBERS,
        pilot: Pilot = "calibration",
        **options: Unpack[RequestOptions],
    ) -> Plan:
        """Predict the mean size of sets after a new calibration with each number of queries.

        The queries of this calibration are the pilot, see `rcir.risk.plan_calibration`. A number
        that is chosen in view of calibration queries is for new ones: if those of the pilot were
        kept among them, the number would depend on results, and the guarantee would not hold.
        They may tune. Tuning queries certify nothing, so that a plan from them binds nobody; but
        sizes were fitted on them, and look a little smaller than they are.

        Args:
            alpha, delta, options: the guarantee, see `retrieve`.
            numbers: of new calibration queries.
            pilot: "calibration" or "tuning", the split that is the pilot.

        Raises:
            InvalidConfig: nothing can be planned for such a request, or no query tuned.
            StaleCalibration: not calibrated, or changed since.

        Example:
            >>> import rcir
            >>> plan = rcir.load("runs/demo/retriever").plan(0.1, 0.1, numbers=[100, 1000])
            >>> few, many = plan.rows
            >>> plan.required, bool(many.high - many.low < few.high - few.low)
            (22, True)
        """
        request = make_request(alpha, delta, **options)
        return self._state.valid_calibration().plan(request, numbers, pilot)

    def at_levels(
        self,
        query: QueryBatch | NDArray[Any],
        alphas: Sequence[float],
        delta: float,
        *,
        uncertainty: Floats | None = None,
        model: str | None = None,
        probabilities: ArrayLike | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[AtLevels]:
        """Return the sets of queries at several alphas, from one search.

        The guarantee for misses of each holds for all alphas at once (`simultaneous`).

        Args:
            query: several, as for `retrieve`.
            alphas: levels, each in (0, 1); those that nothing certifies are left out.
            delta, uncertainty, model, probabilities, options: as for `retrieve`; options that
                go with `simultaneous`, which always holds; the result is a list in any case.

        Raises:
            InvalidConfig: queries were added to the calibration (`extend_calibration`).
            RiskUnattainable: nothing certifies any of the alphas.
            RcirError: as `retrieve`.

        Example:
            >>> import rcir
            >>> retriever = rcir.load("runs/demo/retriever")
            >>> (hard,) = retriever.at_levels(["runs/demo/queries/hard.png"], [0.2, 0.1, 0.05], 0.1)
            >>> hard.alphas, bool((np.diff(hard.sizes) <= 0).all())
            ((0.05, 0.1, 0.2), True)
        """
        if "simultaneous" in options:
            raise InvalidConfig("at_levels always holds for all alphas: leave out simultaneous")
        options["simultaneous"] = True
        requests = [make_request(alpha, delta, **options) for alpha in sorted(check_levels(alphas))]
        state = replace(self._state, origin=self.origin)
        return state.answer_at_levels(
            query, requests, uncertainty=uncertainty, model=model, probabilities=probabilities
        )

    @contextmanager
    def update(self) -> Iterator[Retriever]:
        """Change the gallery without a gap: queries are answered by the old version meanwhile.

        The block changes a copy, by `add`, `remove` or `calibrate`. At its end the copy is
        recalibrated if it has to be, and takes over in one assignment: each query, from any thread,
        is answered by one version. If the block fails, nothing has changed. Both versions are in
        memory until then.

        Raises:
            InvalidData, StaleCalibration: as `recalibrate`.

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
        before, folder, changed = self._state, self.version_folder, copy(self)
        yield changed
        if changed.calibration is not None and changed.changes():
            changed.recalibrate()
        with _SWAP:
            self._replace(before, changed._state)
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
        before = self._state
        made, report = recalibrate(before.searcher, before.require_calibration())
        self._replace(before, State(before.searcher, made))
        return report

    def extend_calibration(
        self,
        queries: LabelledResults | Floats,
        labels: object = None,
        recurring: bool = False,
        *,
        uncertainty: Floats | None = None,
        **population: Unpack[LabelledKeywords],
    ) -> None:
        """Add labelled queries to those calibrated on, in use, as often as needed.

        The score functions stay as they are. From then on only guarantees that hold at every moment
        since this gallery was calibrated are given (`anytime=True`), so that one may look at the
        sets and go on or stop. With the others, stopping early would favour misleading queries.

        Args:
            queries: exchangeable with the calibration queries, searched by this retriever; or
                vectors (n, d). With groups if those had some. Add them in the order in which they
                arrived, without gaps: if the order depends on the outcome, no guarantee holds. Wait
                for a query whose true matches are unknown yet, up to a limit that is fixed
                beforehand, and then add it as one that matches nothing. Queries by which this
                retriever was chosen among others must not be added.
            labels, uncertainty, model, groups, clusters, cluster, probabilities, keys, encounters:
                of the vectors, see `labelled`.
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
            800
        """
        before = self._state
        calibration, searcher = before.valid_calibration(), before.searcher
        if not isinstance(queries, LabelledResults):
            labelled, searcher = searcher.labelled(queries, labels, uncertainty, **population)
            queries = searcher.search_labelled(labelled)
        elif given := [name for name, value in population.items() if value is not None]:
            raise InvalidConfig(
                f"these queries were searched already: leave out {', '.join(given)}"
            )
        self._replace(before, State(searcher, extend(searcher, calibration, queries, recurring)))

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
        state = self._state
        return check_recent(state.searcher, state.valid_calibration(), recent, alpha, delta)

    def query_monitor(self, level: float = 0.01) -> QueryMonitor:
        """Return a monitor that notices, without labels, that queries have changed.

        Make another one after the gallery or the calibration changes.

        Args:
            level: probability that it ever raises an alarm while queries do not change.

        Raises:
            StaleCalibration: not calibrated, or changed since.
            InvalidConfig: the calibration queries come in clusters or are gallery items.
            InvalidRiskLevel: level is out of range.

        Example:
            >>> rng = np.random.default_rng(0)
            >>> labels = rng.integers(20, size=1000)
            >>> vectors = np.eye(20)[labels] + 0.2 * rng.normal(size=(1000, 20))
            >>> retriever = Retriever.from_embeddings(vectors[:200], labels=labels[:200])
            >>> report = retriever.calibrate(vectors[200:700], labels[200:700])
            >>> monitor = retriever.query_monitor()
            >>> monitor.update(retriever.retrieve(vectors[700:], alpha=0.1, delta=0.1))
            False
            >>> monitor.update(retriever.retrieve(vectors[700:] / 2 + 0.1, alpha=0.1, delta=0.1))
            True
        """
        return QueryMonitor(self._state, level)
