"""Sources of a retriever and its queries, such as files of vectors; without PyTorch."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from calibration.config import (
    NO_CLUSTERS,
    CalibrationConfig,
    CertificationConfig,
    EvaluationConfig,
)
from calibration.screen import print_population, step
from rcir import tracking
from rcir.data import ImageSet, Splits
from rcir.data.division import draw_by_cluster
from rcir.data.relevance import WithinRadius
from rcir.data.repeats import digests
from rcir.data.tables import missing_column
from rcir.data.vector_files import CLUSTER, VectorTable, read_all_vectors, read_matches
from rcir.errors import InvalidConfig, InvalidData
from rcir.retrieval.queries import Queries
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.search import Searcher
from rcir.retrieval.tuning import CalibrationOptions, Tuning, chosen_tuning, division_rng
from rcir.risk import LabelledResults, required_calibration
from rcir.risk.guarantee import in_plural
from rcir.risk.population import LABEL
from rcir.terminal import console

if TYPE_CHECKING:
    from calibration.evaluation import Evaluation

SPLIT_NOTE = (
    "note: the column split of {} divides nothing here. If its parts are gallery and queries, "
    "embed the folder of each by itself, and pass the files as --gallery and --queries"
)
# Of the queries, or of their clusters or labels; the others measure.
SHARES = {"tuning": 0.25, "calibration": 0.5}
SHARES_ON_GALLERY = {"calibration": 0.75}


@dataclass(frozen=True)
class Opened:
    """The queries of a source, searched.

    Attributes:
        dataset: name of the data, for the report.
        tuning, calibration, test: the three splits; without a tuning split the gallery's items
            tune.
        images: the test queries.
        gallery: what is searched.
        ids: of the calibration and the test queries.
        splits: the data set that they come from, if they come from one.
    """

    dataset: str
    tuning: LabelledResults | None
    calibration: LabelledResults
    test: LabelledResults
    images: ImageSet
    gallery: ImageSet
    ids: tuple[list[str], list[str]]
    splits: Splits | None = None


class Source(Protocol):
    """A source of a retriever and its queries."""

    def open(self) -> Retriever:
        """Return the retriever, built or loaded."""
        ...

    def search(self, retriever: Retriever) -> Opened:
        """Search the queries."""
        ...

    def example(self, retriever: Retriever) -> Any:
        """Return a query, for the model in MLflow."""
        ...

    def track(self, output: Path, evaluation: Evaluation) -> tracking.TrackedRun | None:
        """Start a run in MLflow for the outcome; None if nothing is tracked."""
        ...

    def uncertainty_outside(self, retriever: Retriever) -> NDArray[np.float64] | None:
        """Return (m,) uncertainties of queries of another data set; None without any."""
        return None

    def pixel_recall(self) -> float | None:
        """Return the recall at 1 of pixels; None if there are none."""
        return None

    @property
    def training(self) -> tracking.TrackedRun | None:
        """The run in MLflow of the training that is calibrated, if there is one."""
        return None

    def close(self) -> None:
        """Remove what was kept in case of an interruption."""
        return None


class VectorFiles(Source):
    """Vectors of any model in files: a gallery, and labelled queries that are divided.

    Of queries with the very same vector the first is kept. A quarter of those kept fits the set
    sizes, half of them certify these, and the others measure; where queries have a column
    `cluster`, whole clusters are drawn. If the gallery's items tune, three quarters certify.

    Args:
        config: of the certification.
    """

    def __init__(self, config: CertificationConfig) -> None:
        self._config = config
        self._tracks = tracking.is_chosen()

    def open(self) -> Retriever:
        """Index the gallery.

        Raises:
            DataUnavailable: there is no such file.
            InvalidData: of a file, or of what it holds.
            TrackingUnavailable: a tracking store is set, and cannot be used.
        """
        if self._tracks:
            tracking.require_experiment()  # fail now, not when the results are logged
        file = Path(self._config.queries or self._config.gallery)
        self._table = read_all_vectors(file, _cluster_column(self._config))
        if "split" in self._table.columns:
            console.print(SPLIT_NOTE.format(self._table.file), soft_wrap=True)
        with step("index"):
            retriever = _built(self._config, self._table)
        return retriever

    def search(self, retriever: Retriever) -> Opened:
        """Divide the queries and search them.

        Raises:
            InvalidData: there are too few queries to certify any of the levels.
        """
        config, table = self._config, self._table
        labelled = _labelled(retriever, config, table)
        different = _distinct(labelled)
        queries = labelled[different]
        names = np.array(table.ids or [one.hex() for one in digests(labelled.vectors).tolist()])
        options = CalibrationOptions(config.score_function)
        tuning = chosen_tuning(retriever.searcher, queries, config.tuning, options)
        if tuning == "labels":
            warn_of_other_labels(labelled.population.label_word)
        divided = _divided(retriever.searcher, queries, names[different], config, tuning)
        splits = [different[rows] for rows in divided]
        with step("search"):
            *tuned, calibration, test = (
                retriever.search_labelled(labelled[rows]) for rows in splits
            )
        images = _image_set(retriever, table, labelled, splits[-1])
        return Opened(
            dataset=Path(config.gallery).stem,
            tuning=tuned[0] if tuned else None,
            calibration=calibration,
            test=test,
            images=images,
            gallery=images,
            ids=(names[splits[-2]].tolist(), names[splits[-1]].tolist()),
        )

    def example(self, retriever: Retriever) -> Any:
        """See `Source`."""
        from rcir.registry.logged_model import vector_example  # imports torch

        return vector_example(retriever)

    def track(self, output: Path, evaluation: Evaluation) -> tracking.TrackedRun | None:
        """See `Source`."""
        if not self._tracks:
            return None
        return start_tracking("certification", self._config, output, evaluation)


def warn_of_other_labels(label: str = LABEL) -> None:
    """Warn that no test query has the label of a calibration query."""
    print(
        f"warning: no test query has the {label} of a calibration query; guarantees for the "
        f"{label}s of the calibration queries are measured on queries of other {label}s",
        file=sys.stderr,
    )


def start_tracking(
    kind: str,
    config: CalibrationConfig | EvaluationConfig | CertificationConfig,
    output: Path,
    evaluation: Evaluation,
    training: tracking.TrackedRun | None = None,
) -> tracking.TrackedRun:
    """Start a run in MLflow, below that of the training and with its parameters, too."""
    from rcir.config import flatten  # imports jsonargparse
    from rcir.runs.folder import FOLDER_TAG  # imports torch

    params = training.params if training else {}
    name = f"{output.resolve().name} ({kind})"
    if config.output is None and kind == "calibration":
        name = f"{evaluation.encoder} {evaluation.dataset} seed {params.get('seed', 0)}"
    tags = {
        FOLDER_TAG: str(output.absolute()),
        tracking.KIND_TAG: kind,
        tracking.ENCODER_TAG: evaluation.encoder,
        tracking.DATASET_TAG: evaluation.dataset,
    }
    tracked = tracking.start_run(name, tags, training)
    tracked.log_params(params | flatten(asdict(config)))
    return tracked


def _cluster_column(config: CertificationConfig) -> str | None:
    """Return the column of clusters that the configuration names, if it does."""
    return None if config.cluster == NO_CLUSTERS else config.cluster


def _built(config: CertificationConfig, query_table: VectorTable) -> Retriever:
    """Return the retriever of the gallery; vectors in shards are mapped into memory."""
    gallery = query_table if config.queries is None else read_all_vectors(Path(config.gallery))
    own = config.queries is None or _overlap(gallery, query_table)
    if own and config.queries is not None:
        gallery = read_all_vectors(Path(config.gallery), _cluster_column(config))
    clusters: Any = "auto"
    if own and config.cluster == NO_CLUSTERS:
        clusters = None
    elif own and gallery.cluster is not None:
        clusters = gallery.cluster
    retriever = Retriever.from_embeddings(
        gallery.vectors,
        gallery.ids,
        None if config.matches is not None else _gallery_labels(config, gallery),
        config.metric,
        gallery.uncertainty,
        config.depth,
        config.index,
        gallery.model,
        leave_one_out=own,
        clusters=clusters,
        cluster=config.cluster or CLUSTER,
        times=gallery.seconds() if own and isinstance(clusters, str) else None,
    )
    if own:
        print_population(retriever.searcher)
    return retriever


def _gallery_labels(config: CertificationConfig, gallery: VectorTable) -> object:
    """Return what matches gallery items, as their file states."""
    labels = _labels_of(config, gallery)
    if config.radius is not None and gallery.places is None:
        raise InvalidConfig(f"--radius needs places: {gallery.file} has no places (columns x, y)")
    if labels is None:
        names = "label, labels, or x and y, which define true matches (or pass --matches)"
        raise missing_column(gallery.file, names, gallery.columns)
    return labels


def _labels_of(config: CertificationConfig, table: VectorTable) -> object:
    """Return the labels or the places in a file; None if it has neither."""
    if table.places is None:
        return table.labels
    if config.radius is None:
        raise InvalidConfig(f"{table.file} has places: pass the --radius within which they match")
    return WithinRadius(table.places, config.radius)


def _overlap(gallery: VectorTable, query_table: VectorTable) -> bool:
    """Return whether all queries are gallery items: the same id and exactly the same vector.

    If only some are, these are refused as queries that find themselves.
    """
    if gallery.ids is None or query_table.ids is None:
        return False
    row = {name: number for number, name in enumerate(gallery.ids)}
    if gallery.vectors.shape[1:] != query_table.vectors.shape[1:] or not all(
        name in row for name in query_table.ids
    ):
        return False
    rows = np.array([row[name] for name in query_table.ids])
    items = np.asarray(gallery.vectors[rows], np.float32)
    return bool((np.asarray(query_table.vectors, np.float32) == items).all())


def _labelled(
    retriever: Retriever, config: CertificationConfig, query_table: VectorTable
) -> Queries:
    """The queries with what they match."""
    if config.matches is None:
        labels = _labels_of(config, query_table)
    else:
        labels = _listed(Path(config.matches), query_table)
    return retriever.labelled(
        query_table.vectors,
        labels,
        query_table.uncertainty,
        query_table.model,
        query_table.group,
        None if config.cluster == NO_CLUSTERS else query_table.cluster,
        config.cluster or CLUSTER,
    )


def _listed(path: Path, query_table: VectorTable) -> list[list[str]]:
    """The ids of the true matches of each query."""
    if query_table.ids is None:
        names = f"id, by which {path} names queries"
        raise missing_column(query_table.file, names, query_table.columns)
    matches: dict[str, list[str]] = {name: [] for name in query_table.ids}
    unknown = 0
    for query, item in read_matches(path):
        if query in matches:
            matches[query].append(item)
        else:
            unknown += 1
    if not any(matches.values()):
        raise InvalidData(f"{path} names no query of {query_table.file}: use the ids in that file")
    if unknown:
        console.print(f"{unknown} rows of {path} are of other queries, and were not used")
    return list(matches.values())


def _distinct(queries: Queries) -> NDArray[np.int64]:
    """Return the rows of queries with distinct vectors, the first of each."""
    rows = np.sort(np.unique(digests(queries.vectors), return_index=True)[1])
    if len(rows) < len(queries):
        console.print(
            f"{len(queries) - len(rows)} of {len(queries)} queries repeat others and are left out: "
            "the guarantee is for different ones",
            soft_wrap=True,
        )
    return rows


def _divided(
    searcher: Searcher,
    queries: Queries,
    names: NDArray[np.str_],
    config: CertificationConfig,
    tuning: Tuning,
) -> list[NDArray[np.int64]]:
    """Return the rows that tune, if any do, that calibrate, and that measure.

    Names divide the queries, so that vectors of several models are measured on the same ones. Of
    gallery items, one of each cluster calibrates or measures.
    """
    shares = SHARES_ON_GALLERY if tuning == "gallery" else SHARES
    units_of_queries = searcher.units(queries)
    clusters = None if units_of_queries is None else units_of_queries[0]
    units = len(queries) if clusters is None else len(np.unique(clusters))
    alpha, share, apart = max(config.alphas), shares["calibration"], ""
    needed = required_calibration(alpha, config.delta) or 0
    if searcher.options.left_out not in (None, "item"):
        kinds = in_plural(searcher.options.cluster)
        apart = f", or keep the items of the {units} {kinds} apart (--cluster none)"
    if units < 4 or needed > share * units:
        kind = "queries" if clusters is None else "clusters of queries"
        raise InvalidData(
            f"{round(share * units)} of {units} {kind} calibrate, and alpha {alpha:g} at delta "
            f"{config.delta:g} needs {needed}: label at least {math.ceil(needed / share)}{apart}"
        )
    rng, order = division_rng(names, config.seed)
    unit = "clusters"
    if tuning == "labels":
        clusters, unit = queries.population.labels, f"{queries.population.label_word}s"
    if clusters is not None:
        parts = [order[rows] for rows in draw_by_cluster(rng, clusters[order], shares, unit)]
        if searcher.options.leave_one_out:
            parts[-2:] = [rows[searcher.one_of_each_unit(queries[rows])] for rows in parts[-2:]]
        return parts
    numbers = [round(part * units) for part in shares.values()]
    return np.split(order[rng.permutation(units)], np.cumsum(numbers))


def _image_set(
    retriever: Retriever, query_table: VectorTable, queries: Queries, rows: NDArray[np.int64]
) -> ImageSet:
    """Return some of the queries as a set of images, for the evaluation."""
    relevance = queries.relevance
    assert relevance is not None
    labels = relevance.single
    attributes = {}
    if labels is not None and retriever.label_names:
        attributes["class"] = np.array([retriever.label_names[n] for n in labels.tolist()])
    ids = query_table.ids or [str(row) for row in range(len(queries))]
    return ImageSet(queries.vectors, labels, ids, attributes, relevance).subset(rows)
