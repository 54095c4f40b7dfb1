"""From files of vectors to a retriever with a guarantee, measured on held-out queries."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.config import check_levels
from calibration.evaluation import Evaluation, evaluate
from calibration.progress import print_reason, step
from calibration.publishing import check_output, measured, publish, start_tracking
from calibration.risk_results import SearchedSplits
from calibration.table import console
from rcir import tracking
from rcir.data import ImageSet
from rcir.data.clusters import draw_by_cluster
from rcir.data.digests import digests
from rcir.data.relevance import SameLabel
from rcir.data.vector_files import VectorTable, read_matches
from rcir.data.vector_shards import read_all_vectors
from rcir.data.within_radius import WithinRadius
from rcir.errors import InvalidConfig, InvalidData
from rcir.index import DEPTH, IndexConfig, check_depth, dropped_on_error
from rcir.levels import ALPHAS, DELTA
from rcir.retrieval import storage
from rcir.retrieval.queries import Metric, Queries
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.tuning import (
    CalibrationOptions,
    Tuning,
    chosen_tuning,
    division_rng,
    search_items,
)
from rcir.risk import required_calibration
from rcir.runs.results import TEST

# Of the queries, or of their clusters or labels; the others measure.
SHARES = {"tuning": 0.25, "calibration": 0.5}
SHARES_ON_GALLERY = {"calibration": 0.75}


@dataclass(frozen=True)
class CertificationConfig:
    """A calibration of vectors in files.

    Args:
        gallery: file of what is searched, see `rcir.data.vector_files`, or folder of shards.
        queries: file of labelled queries; None: the gallery's own items, each of which is left out
            of its own search.
        output: folder for `retriever`, `report.html` and `results.json`.
        matches: table of true matches, see `rcir.data.vector_files.read_matches`; where there are
            neither labels nor places.
        radius: distance up to which places match.
        metric: "cosine" or "euclidean".
        score_function: see `CalibrationConfig`.
        tuning: what fits the set sizes. "queries": a quarter of the queries. "labels": those of a
            quarter of the labels; others calibrate, and others measure. "gallery": the gallery's
            items. "auto": see `Retriever.calibrate`.
        depth: candidates searched per query; no set is larger.
        index: of the gallery, see `rcir.index.IndexConfig`.
        alphas, delta: levels to report. The retriever answers any.
        seed: decides which queries tune, calibrate and measure.
    """

    gallery: str
    queries: str | None = None
    output: str = "runs/certified"
    matches: str | None = None
    radius: float | None = None
    metric: Metric = "cosine"
    score_function: str = "auto"
    tuning: Tuning = "auto"
    depth: int = DEPTH
    index: IndexConfig = field(default_factory=IndexConfig)
    alphas: tuple[float, ...] = ALPHAS
    delta: float = DELTA
    seed: int | None = None

    def __post_init__(self) -> None:
        check_levels(self.alphas, self.delta)
        check_depth(self.depth)
        if self.seed is not None and self.seed < 0:
            raise InvalidConfig(f"seed is {self.seed}; at least 0")


@dataclass(frozen=True)
class Certification:
    """The outcome: the retriever, where it and the report's page lie, and what was measured."""

    retriever: Retriever
    folder: Path
    report: Path
    evaluation: Evaluation


def certify(config: CertificationConfig) -> Certification:
    """Index a gallery of vectors, calibrate on labelled queries, measure on others, write.

    Where a tracking store was chosen, a run of its own holds the outcome in MLflow.

    Of queries with the very same vector the first is kept. A quarter of those kept fits the set
    sizes, half of them certify these, and the others measure; where queries have a column
    `cluster`, whole clusters are drawn. If the gallery's items tune, three quarters certify.

    Raises:
        DataUnavailable: there is no such file.
        InvalidData: of a file, or of what it holds; or there are too few queries to certify any of
            the levels; or the output holds something else. Nothing was written, and an index on a
            server is dropped.
        CorruptRetriever: what lies at the retriever's place is something else.
    """
    started = time.monotonic()
    output = Path(config.output)
    place = output / "retriever"
    tracks = tracking.is_chosen()
    check_output(output)
    storage.check_place(place)
    asked = read_all_vectors(Path(config.queries or config.gallery))
    with step("index"):
        retriever = _built(config, asked)
    print_reason(retriever.index)
    with dropped_on_error(retriever.index):
        labelled = _labelled(retriever, config, asked)
        different = _different(labelled)
        identities = np.array(_names(asked, labelled, different))
        options = CalibrationOptions(config.score_function)
        tuning = chosen_tuning(retriever.searcher, labelled[different], config.tuning, options)
        divided = _divided(labelled[different], identities, config, tuning)
        splits = [different[rows] for rows in divided]
        with step("search"):
            *tuned, calibration, test = (
                retriever.search_labelled(labelled[rows]) for rows in splits
            )
        with step("calibration"):
            retriever.calibration = storage.earlier_calibration(place)
            made = retriever.calibrate_splits(
                tuned[0] if tuned else None,
                calibration,
                config.score_function,
                alphas=config.alphas,
                delta=config.delta,
                seed=config.seed,
            )
        tuning_split = tuned[0] if tuned else search_items(retriever.searcher, calibration)
        queries = SearchedSplits(tuning_split, calibration, test).judged(retriever)
        held = _image_set(retriever, asked, labelled, splits[-1])
        with step("evaluation"):
            evaluation = evaluate(
                Path(config.gallery).stem,
                retriever,
                queries,
                held,
                config.alphas,
                config.delta,
                made,
            )
        tracked = start_tracking("certification", config, output, None) if tracks else None
    with tracked.active() if tracked else nullcontext():
        if tracked is not None:
            retriever.origin["calibration"] = tracked.id
        folder = retriever.save(place)
        page = publish(output, retriever, evaluation, queries.test, held, held, tracked, started)
        names = [_names(asked, labelled, rows) for rows in splits[-2:]]
        measured(retriever, evaluation, queries.test, *names).write(output / TEST)
        if tracked is not None:
            from rcir.registry.logged_model import log_calibration, vector_example  # imports torch

            with step("model"):
                log_calibration(tracked, output, retriever, vector_example(retriever))
    return Certification(retriever, folder, page, evaluation)


def _built(config: CertificationConfig, asked: VectorTable) -> Retriever:
    """The retriever of the gallery, whose vectors are mapped into memory where it is in shards."""
    gallery = asked if config.queries is None else read_all_vectors(Path(config.gallery))
    own = config.queries is None or _overlap(gallery, asked)
    if own:
        console.print(
            "The queries are gallery items: each is left out of its own search, and the guarantee "
            "covers queries like these items.",
            soft_wrap=True,
        )
    return Retriever.from_embeddings(
        gallery.vectors,
        gallery.ids,
        _gallery_labels(config, gallery),
        config.metric,
        gallery.uncertainty,
        config.depth,
        config.index,
        gallery.model,
        leave_one_out=own,
    )


def _gallery_labels(config: CertificationConfig, gallery: VectorTable) -> object:
    """What matches gallery items, as their file says."""
    labels: object = gallery.labels
    if config.matches is not None:
        labels = None
    elif gallery.places is not None:
        labels = _places(config, gallery)
    elif config.radius is not None:
        raise InvalidConfig(
            f"--radius is {config.radius}, and {gallery.file} has no places: give columns x and y"
        )
    elif labels is None:
        raise InvalidData(
            f"{gallery.file} has no column label, labels, or x and y: what is a true match cannot "
            "be told; add one, or name a table of true matches (--matches)"
        )
    return labels


def _overlap(gallery: VectorTable, asked: VectorTable) -> bool:
    """Whether some queries are gallery items: the same id, and the very same vector."""
    if (
        gallery.ids is None
        or asked.ids is None
        or gallery.vectors.shape[1:] != (asked.vectors.shape[1:])
    ):
        return False
    row = {name: number for number, name in enumerate(gallery.ids)}
    pairs = [(n, row[name]) for n, name in enumerate(asked.ids) if name in row]
    if not pairs:
        return False
    first, second = np.array(pairs).T
    mine, theirs = (
        np.asarray(table.vectors[rows], np.float32)
        for table, rows in ((asked, first), (gallery, second))
    )
    return bool((mine == theirs).all(axis=1).any())


def _labelled(retriever: Retriever, config: CertificationConfig, asked: VectorTable) -> Queries:
    """The queries with what they match."""
    labels: object = asked.labels
    if config.matches is not None:
        labels = _listed(Path(config.matches), asked)
    elif asked.places is not None:
        labels = _places(config, asked)
    return retriever.labelled(
        asked.vectors, labels, asked.uncertainty, asked.model, asked.group, asked.cluster
    )


def _listed(path: Path, asked: VectorTable) -> list[list[str]]:
    """The ids of the true matches of each query."""
    if asked.ids is None:
        raise InvalidData(f"{asked.file} has no column id, by which {path} names queries")
    found: dict[str, list[str]] = {name: [] for name in asked.ids}
    unknown = 0
    for query, item in read_matches(path):
        if query in found:
            found[query].append(item)
        else:
            unknown += 1
    if not any(found.values()):
        raise InvalidData(f"{path} names no query of {asked.file}: give ids as they are there")
    if unknown:
        console.print(f"{unknown} rows of {path} are of other queries, and were not used")
    return list(found.values())


def _places(config: CertificationConfig, table: VectorTable) -> WithinRadius:
    if config.radius is None:
        raise InvalidConfig(
            f"{table.file} has places: say within which radius they match (--radius)"
        )
    assert table.places is not None
    return WithinRadius(table.places, config.radius)


def _different(queries: Queries) -> NDArray[np.int64]:
    """Rows of queries that are all different: the first of those of the very same vector."""
    rows = np.sort(np.unique(digests(queries.vectors), return_index=True)[1])
    if len(rows) < len(queries):
        console.print(
            f"{len(queries) - len(rows)} of {len(queries)} queries came before among them, and are "
            "left out: the guarantee is for different ones",
            soft_wrap=True,
        )
    return rows


def _divided(
    queries: Queries, names: NDArray[np.str_], config: CertificationConfig, tuning: Tuning
) -> list[NDArray[np.int64]]:
    """Return the rows that tune, if any do, that calibrate, and that measure.

    Names divide the queries, so that vectors of several models are measured on the same ones.
    """
    n = len(queries)
    shares = SHARES_ON_GALLERY if tuning == "gallery" else SHARES
    clusters: NDArray[Any] | None = queries.clusters
    units = n if clusters is None else len(np.unique(clusters))
    alpha = max(config.alphas)
    needed = required_calibration(alpha, config.delta)
    share = shares["calibration"]
    if units < 4 or (needed or 0) > share * units:
        raise InvalidData(
            f"{units} {'queries' if clusters is None else 'clusters of queries'}, of which "
            f"{round(share * units)} calibrate: no alpha up to {alpha:g} can be certified at delta "
            f"{config.delta:g} with fewer than {needed}; label "
            f"{round((needed or 0) / share)} at least"
        )
    rng, order = division_rng(names, config.seed)
    if tuning == "labels":
        clusters = queries.labels
    if clusters is not None:
        return [order[rows] for rows in draw_by_cluster(rng, clusters[order], shares)]
    numbers = [round(part * n) for part in shares.values()]
    return np.split(order[rng.permutation(n)], np.cumsum(numbers))


def _image_set(
    retriever: Retriever, asked: VectorTable, queries: Queries, rows: NDArray[np.int64]
) -> ImageSet:
    """Some of the queries, as what is measured on them takes them."""
    relevance = queries.relevance
    assert relevance is not None
    labels = relevance.labels if isinstance(relevance, SameLabel) else None
    attributes = {}
    if labels is not None and retriever.label_names:
        attributes["class"] = np.array([retriever.label_names[n] for n in labels.tolist()])
    ids = asked.ids or [str(row) for row in range(len(queries))]
    return ImageSet(queries.vectors, labels, ids, attributes, relevance).subset(rows)


def _names(asked: VectorTable, queries: Queries, rows: NDArray[np.int64]) -> list[str]:
    """By what some of the queries are known: their ids, or else digests of their vectors."""
    if asked.ids is not None:
        return [asked.ids[row] for row in rows]
    return [digest.hex() for digest in digests(queries.vectors[rows]).tolist()]
