"""Files of vectors: a gallery, and labelled queries that are divided into splits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.config import NO_CLUSTERS, CertificationConfig, calibration_options
from calibration.models import PictureModel, embed_pictures_of, files_in
from calibration.splits import SearchedSplits, warn_of_other_labels
from rcir.data import ImageSet
from rcir.data.bursts import MOMENT_SECONDS
from rcir.data.relevance import WithinRadius
from rcir.data.repeats import digests
from rcir.data.tables import missing_column
from rcir.data.vector_files import CLUSTER, VectorTable, read_all_vectors, read_matches
from rcir.errors import InvalidConfig, InvalidData
from rcir.retrieval.attach import attach, parse_address
from rcir.retrieval.queries import KEY, Queries
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.search import Searcher
from rcir.retrieval.tuning import chosen_tuning, divide_rows
from rcir.risk import required_calibration
from rcir.risk.guarantee import in_plural
from rcir.terminal import console, working

SPLIT_NOTE = (
    "note: the column split of {} divides nothing here. If its parts are gallery and queries, "
    "pass the folder of each by itself, as the gallery and as --queries"
)
# Shares of the queries, or of their clusters or labels; the other queries measure.
SHARES = {"tuning": 0.25, "calibration": 0.5}
SHARES_ON_GALLERY = {"calibration": 0.75}
SHOWN_MOMENTS = 3


def search_vectors(config: CertificationConfig) -> SearchedSplits:
    """Index the gallery in a file, divide the labelled queries in another one, and search them.

    Of queries with the very same vector the first is kept. A quarter of those kept fits the set
    sizes, half of them certify these, and the others measure; where queries have a column
    `cluster`, whole clusters are drawn. If the gallery's items tune, three quarters certify.

    Raises:
        DataUnavailable: there is no such file.
        InvalidData: of a file, or of what it holds; or there are too few queries to certify any of
            the levels.
    """
    name = Path(config.gallery).stem.rpartition("#")[2]
    config, model = embed_pictures_of(config)
    named = {"cluster": config.cluster_column, "key": config.key}
    if config.queries is None and parse_address(config.gallery) is not None:
        raise InvalidConfig("the gallery is a collection: name a file of --queries")
    file = Path(config.queries or config.gallery)
    table = read_all_vectors(file, **named, encounter=config.encounter)
    if "split" in table.columns:
        console.print(SPLIT_NOTE.format(table.file), soft_wrap=True)
    with working("building the index", logged=True):
        retriever = _build(config, table)
    if model is not None:
        model.attach(retriever)
    queries = _label(retriever, config, table)
    names = np.array(table.ids or [digest.hex() for digest in digests(queries.vectors)])
    if table.encounter is not None:
        names = np.array(list(dict.fromkeys(table.encounter.tolist())))
    rows = distinct_rows(queries)
    queries, names = queries[rows], names[rows]
    *tuning, calibration, test = _divide(retriever.searcher, queries, names, config)
    with working("searching", logged=True):
        return SearchedSplits(
            retriever,
            name,
            retriever.search_labelled(queries[tuning[0]]) if tuning else None,
            retriever.search_labelled(queries[calibration]),
            retriever.search_labelled(queries[test]),
            calibration_ids=names[calibration].tolist(),
            images=_image_set(retriever, queries[test], names[test].tolist(), model),
        )


def _build(config: CertificationConfig, query_table: VectorTable) -> Retriever:
    """Return the retriever of the gallery; vectors in shards are mapped into memory."""
    if (address := parse_address(config.gallery)) is not None:
        if config.index.kind not in ("flat", address[0]):
            raise InvalidConfig(
                f"--index is {config.index.kind}, and {address[0]} searches the collection: pass "
                f"--index {address[0]}, with its options, or none"
            )
        options = {"metric": config.metric} | dict(config.index.options)
        columns = options.pop("columns", {}) | ({"key": config.key} if config.key else {})
        return attach(
            config.gallery, columns=columns, radius=config.radius, depth=config.depth, **options
        )
    gallery = query_table
    if config.queries is not None:
        gallery = read_all_vectors(Path(config.gallery), key=config.key)
    are_items = config.queries is None or _overlap(gallery, query_table)
    if are_items and config.queries is not None:
        named = {"cluster": config.cluster_column, "key": config.key}
        gallery = read_all_vectors(Path(config.gallery), **named)
    clusters: Any = "auto"
    if are_items and config.cluster == NO_CLUSTERS:
        clusters = None
    elif are_items and gallery.cluster is not None:
        clusters = gallery.cluster
    retriever = Retriever.from_embeddings(
        gallery.vectors,
        gallery.ids,
        None if config.matches is not None else _read_labels(config, gallery),
        metric=config.metric,
        uncertainty=gallery.uncertainty,
        depth=config.depth,
        index=config.index,
        model=gallery.model,
        leave_one_out=are_items,
        clusters=clusters,
        cluster=config.cluster or CLUSTER,
        times=gallery.seconds() if are_items and isinstance(clusters, str) else None,
        keys=gallery.key,
        key=config.key or KEY,
    )
    if are_items:
        _print_population(retriever.searcher)
    return retriever


def _print_population(searcher: Searcher) -> None:
    """Print what queries that are gallery items leave out of their search, with examples."""
    options, gallery = searcher.options, searcher.gallery
    units, counts = np.unique(gallery.units, return_counts=True)
    several = units[counts > 1]
    lines = ["The queries are gallery items: each is left out of its own search."]
    if options.clusters != "none":
        lines[0] = (
            f"The queries are gallery items, {len(gallery):,} in {len(units):,} "
            f"{in_plural(options.cluster)}: each is searched without its whole {options.cluster}, "
            "which counts once."
        )
    if options.clusters == "found" and len(several):
        members = gallery.members(several[:SHOWN_MOMENTS])
        pairs = [" ~ ".join(gallery.ids[row[:2]].tolist()) for row in members]
        lines.append(
            f"{counts[counts > 1].sum():,} items share a moment with others: they are far nearer "
            "to each other than to the rest of their label, or were photographed within "
            f"{MOMENT_SECONDS} s. For instance {', '.join(pairs)}. --cluster COLUMN declares "
            "clusters, and --cluster none keeps all items apart."
        )
    console.print("\n".join(lines), soft_wrap=True, highlight=False)


def _read_labels(config: CertificationConfig, table: VectorTable) -> object:
    """Return the labels or the places in a file."""
    if table.places is not None:
        if config.radius is None:
            raise InvalidConfig(f"{table.file} has places: pass --radius, within which they match")
        return WithinRadius(table.places, config.radius)
    if config.radius is not None:
        raise InvalidConfig(f"--radius needs places: {table.file} has no places (columns x, y)")
    if table.labels is None:
        names = "label, labels, or x and y, which define true matches (or pass --matches)"
        raise missing_column(table.file, names, table.columns)
    return table.labels


def _overlap(gallery: VectorTable, query_table: VectorTable) -> bool:
    """Return True if all queries are gallery items: the same id and exactly the same vector.

    If only some are, they are refused later as queries that find themselves.
    """
    ids, query_ids = gallery.ids, query_table.ids
    if ids is None or query_ids is None or gallery.vectors.shape[1] != query_table.vectors.shape[1]:
        return False
    row_of = {name: row for row, name in enumerate(ids)}
    rows = np.array([row_of.get(name, -1) for name in query_ids])
    return bool((rows >= 0).all()) and np.array_equal(
        query_table.vectors.astype(np.float32), gallery.vectors[rows].astype(np.float32)
    )


def _label(retriever: Retriever, config: CertificationConfig, query_table: VectorTable) -> Queries:
    """Return the queries with what they match."""
    if config.matches is None:
        labels = _read_labels(config, query_table)
    else:
        labels = _matching_ids(Path(config.matches), query_table)
    return retriever.labelled(
        query_table.vectors,
        labels,
        query_table.uncertainty,
        model=query_table.model,
        groups=query_table.group,
        clusters=None if config.cluster == NO_CLUSTERS else query_table.cluster,
        cluster=config.cluster or CLUSTER,
        keys=query_table.key,
        encounters=query_table.encounter,
    )


def _matching_ids(path: Path, query_table: VectorTable) -> list[list[str]]:
    """Return the ids of the true matches of each query."""
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


def distinct_rows(queries: Queries) -> NDArray[np.int64]:
    """Return the rows of queries with distinct vectors, the first of each."""
    rows = np.sort(np.unique(digests(queries.vectors), return_index=True)[1])
    if len(rows) < len(queries):
        console.print(
            f"{len(queries) - len(rows)} of {len(queries)} queries repeat others and are left out: "
            "the guarantee is for different ones",
            soft_wrap=True,
        )
    return rows


def _divide(
    searcher: Searcher, queries: Queries, names: NDArray[np.str_], config: CertificationConfig
) -> list[NDArray[np.int64]]:
    """Return the rows that tune, unless the gallery's items do, that calibrate, and that measure.

    Names divide the queries, so that vectors of several models are measured on the same ones. Of
    gallery items, one of each cluster calibrates or measures.
    """
    tuning = chosen_tuning(searcher, queries, config.tuning, calibration_options(config))
    if tuning == "labels":
        warn_of_other_labels(queries.population.label_word)
    shares = SHARES_ON_GALLERY if tuning == "gallery" else SHARES
    clusters = searcher.units(queries)
    units = len(queries) if clusters is None else len(np.unique(clusters))
    alpha, share, apart = max(config.alphas), shares["calibration"], ""
    kind = "queries" if clusters is None else in_plural(queries.population.cluster_word or CLUSTER)
    needed = required_calibration(alpha, config.delta) or 0
    if searcher.options.left_out not in (None, "item"):
        kind = in_plural(searcher.options.cluster)
        if units < len(queries):
            apart = f", or keep the items of the {units} {kind} apart (--cluster none)"
    if units < 4 or needed > share * units:
        raise InvalidData(
            f"there are {units} {kind}, of which {round(share * units)} calibrate, and alpha "
            f"{alpha:g} at delta {config.delta:g} needs {needed}: label at least "
            f"{math.ceil(needed / share)} {kind}{apart}"
        )
    parts = divide_rows(searcher, queries, names, tuning, shares, config.seed)
    parts[-2:] = [rows[searcher.one_of_each_unit(queries[rows])] for rows in parts[-2:]]
    return parts


def _image_set(
    retriever: Retriever, queries: Queries, ids: list[str], model: PictureModel | None
) -> ImageSet:
    """Return queries as a set of images, for the report; vectors stand for missing pictures."""
    assert queries.relevance is not None
    labels, attributes = queries.relevance.single, {}
    if labels is not None and retriever.label_names:
        attributes["class"] = np.array([retriever.label_names[n] for n in labels.tolist()])
    files = None if model is None else files_in(model.queries, ids)
    images = queries.vectors if files is None else files
    return ImageSet(images, labels, ids, attributes, queries.relevance)
