"""Retrievers of collections that stay where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rcir.data.labelling import gallery_relevance
from rcir.data.names import require_utf8
from rcir.data.relevance import WithinRadius
from rcir.data.repeats import digests
from rcir.data.tables import missing_column, parse_columns
from rcir.data.vector_files import MATCH_COLUMNS
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData
from rcir.index import DEPTH, AttachedIndex, IndexConfig, check_depth, find_index, lengths
from rcir.retrieval.gallery import Gallery, check_ids
from rcir.retrieval.queries import KEY, Metric, VectorOptions, as_names, require_digits
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.search import Searcher
from rcir.terminal import Work, working
from rcir.trust import allow_servers

COLUMNS = ("id", "vector", "label", "labels", "x", "y", "uncertainty", "key")


def parse_address(address: str) -> tuple[str, str] | None:
    """Return the kind of index and the place in an address; None if it is a path.

    Example:
        >>> parse_address("lancedb:images#shoes"), parse_address("vectors.parquet")
        (('lancedb', 'images#shoes'), None)
    """
    kind, colon, place = address.partition(":")
    if kind in ("lancedb", "qdrant", "pgvector"):
        return kind, place
    name, second, place = place.partition(":")
    return (f"{kind}:{name}", place) if colon and second and "#" in place else None


def attach(
    address: str,
    *,
    columns: Mapping[str, str] | None = None,
    metric: Metric = "cosine",
    radius: float | None = None,
    depth: int = DEPTH,
    model: str | None = None,
    version: str = "",
    **options: Any,
) -> Retriever:
    """Make a retriever of an existing collection, which is neither copied nor changed.

    All rows are read once. Kept in memory are ids, what defines matches, and digests of the
    vectors, which recognise queries that are gallery items; no vectors.

    Args:
        address: "lancedb:PATH#TABLE", "qdrant:PATH_OR_URL#COLLECTION", "pgvector:DSN#TABLE", or
            "package.module:Class:PLACE#NAME" for an `rcir.index.AttachedIndex` of your own.
        columns: the collection's names of columns, by ours, where they differ: id, vector, label
            (or labels, a list; or x and y), uncertainty; and key, the part that a row is in (see
            `Retriever.from_embeddings`), which is read only if it is named here.
        metric, depth, model: see `Retriever.from_embeddings`.
        radius: distance up to which places (x, y) match.
        version: of the collection, if you number versions. A LanceDB table is read and searched at
            this version, by default the latest.
        options: where, such as {"site": "north", "year": {"from": 2020}}, the rows that are the
            gallery; and options of the search, such as nprobes, ef_search, hnsw_ef or exact; see
            `rcir.index.attached.AttachedOptions`.

    Raises:
        DataUnavailable: the collection is not there, or its server cannot be reached.
        InvalidConfig: an option is wrong, or the engine's index has another metric.
        InvalidData: a column is missing, or holds unsuitable values.
        MissingPackage: the extra of the engine is not installed.
    """
    parsed = parse_address(address)
    if parsed is None:
        raise InvalidConfig(
            "the address of a collection is lancedb:PATH#TABLE, qdrant:PATH_OR_URL#COLLECTION or "
            f"pgvector:DSN#TABLE; got {address.partition(':')[0]!r} as the engine, or no #NAME"
        )
    kind, place = parsed
    check_depth(depth)
    renamed = dict(columns or {})
    if unknown := sorted(renamed.keys() - set(COLUMNS)):
        raise InvalidConfig(f"columns are {', '.join(COLUMNS)}; got {', '.join(unknown)}")
    location, mark, name = place.rpartition("#")
    if kind in ("lancedb", "qdrant") and "://" not in location:
        place = f"{Path(location).absolute()}{mark}{name}"
    options |= {"place": place, "columns": renamed, "metric": metric, "version": version}
    index: Any = find_index(kind)
    configured = IndexConfig(kind, options).index_options()
    if not issubclass(index, AttachedIndex):
        raise InvalidConfig(f"{kind} is not an rcir.index.AttachedIndex")
    if configured.where and not index.filters:
        raise InvalidConfig(f"{kind} does not support filters: leave out where")
    allow_servers(configured.hosts)
    index = index(configured)
    with working("reading the collection") as work:
        names = index.names()
        present = _present(configured.collection, renamed, names)
        for column in configured.where:
            if column not in names:
                raise missing_column(f"the collection {configured.collection}", column, names)
        latest = version or index.latest()
        index.options = replace(configured, columns=present, version=latest)
        try:
            work.total = index.count()
        except DataUnavailable as error:
            if not configured.where:
                raise
            raise InvalidConfig(
                f"where is {configured.where}, by which the collection cannot be filtered "
                f"({str(error.__cause__).partition(chr(10))[0]}): correct columns and values"
            ) from error
        read = _read(index, work)
    labels = read.get("label", read.get("labels"))
    if "x" in read:
        if radius is None:
            raise InvalidConfig("the collection has places: pass radius, within which they match")
        labels = WithinRadius(np.column_stack([read["x"], read["y"]]), radius)
    ids = check_ids(read["id"], len(index))
    relevance, label_names = gallery_relevance(labels, ids.tolist())
    require_utf8(label_names.values(), "the labels of the gallery")
    gallery = Gallery(
        ids=ids,
        norms=read["norms"],
        relevance=relevance,
        uncertainty=read.get("uncertainty"),
        digests=read["digests"],
        keys=as_names(read["key"], "key") if "key" in read else None,
    )
    searched = VectorOptions(metric, model, key=renamed.get("key", KEY))
    searcher = Searcher(gallery, index, max_depth=depth, options=searched, label_names=label_names)
    return Retriever(searcher)


def _present(collection: str, renamed: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the collection's names of the columns to read, by ours."""
    present = {ours: ours for ours in COLUMNS if ours in names and ours != "key"} | dict(renamed)
    for ours, theirs in ({"id": "id", "vector": "vector"} | present).items():
        if theirs not in names:
            wanted = theirs if theirs != ours else f"{ours} (or name it: columns)"
            raise missing_column(f"the collection {collection}", wanted, names)
    kinds = [name for name in MATCH_COLUMNS if name in present]
    if kinds not in ([], ["label"], ["labels"], ["x", "y"]):
        raise InvalidData(
            f"the collection {collection} has {', '.join(kinds)}; matches are defined by one of: "
            "label, labels, x and y"
        )
    return present


def _read(index: AttachedIndex, work: Work) -> dict[str, Any]:
    """Return norms, digests and columns of all rows, in the order in which the index keeps them."""
    names = {ours: theirs for ours, theirs in index.options.columns.items() if ours != "vector"}
    parts: dict[str, list[Any]] = {"unit": [], "keys": [], "norms": [], "digests": []}
    columns: dict[str, list[Any]] = {name: [] for name in names}
    texts: dict[Any, Any] = {}  # equal ones share their memory
    for rows in index.scan(list(names.values())):
        if not len(rows.keys):
            continue
        vectors = index.prepare(rows.vectors)
        if not parts["keys"]:
            require_digits(vectors, index.options.metric)
        facts = (lengths(rows.vectors) == 1).all(), rows.keys, lengths(vectors), digests(vectors)
        for part, values in zip(parts.values(), facts, strict=True):
            part.append(np.atleast_1d(values))
        for ours, theirs in names.items():
            values = rows.columns[theirs]
            if ours in ("label", "key"):
                if any(isinstance(value, list) for value in values):
                    raise InvalidData(
                        f"column {theirs} holds lists, as {ours}: name it labels, or another column"
                    )
                values = [texts.setdefault(value, value) for value in values]
            columns[ours] += values
        work.advance(len(rows.keys))
    if not parts["keys"]:
        name, where = index.options.collection, index.options.where
        raise InvalidData(
            f"no row of the collection {name} meets where = {where}: change the condition"
            if where
            else f"the collection {name} is empty: fill it first"
        )
    unit, keys, norms, digest = map(np.concatenate, parts.values())
    order = np.argsort(keys)
    index.attach(keys[order], vectors.shape[1], bool(unit.all()))
    ordered = {name: [values[row] for row in order.tolist()] for name, values in columns.items()}
    read = parse_columns(Path(index.options.collection), ordered, ordered)
    return read | {"norms": norms[order], "digests": digest[order]}
