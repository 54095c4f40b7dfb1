"""Queries, and vectors of any model: checked, searched, and stored to be searched again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, TypedDict, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.data import repeats
from rcir.data.names import as_texts
from rcir.data.relevance import CELL, Relevance, WithinRadius
from rcir.embedding import Embedding, as_numpy, as_vectors
from rcir.errors import InvalidConfig, InvalidData, as_option, printable
from rcir.index import SAFE_LENGTHS, check_shape, check_vectors, unit_vectors
from rcir.options import require_choice, require_text
from rcir.risk.population import INDEPENDENT, LABEL, Population, set_population
from rcir.risk.results import TOLERANCE, LabelledResults
from rcir.store.codec import NOT_STORED, Array
from rcir.stored_vectors import StoredVectors, batches

Metric = Literal["cosine", "euclidean"]
Clusters = Literal["none", "found", "passed"]
MOMENT = "moment"  # what the clusters of a gallery are that are found
KEY = "key"  # what a part of a gallery is, unless it is named
MAX_OFFSET = TOLERANCE * 2**24  # standard deviations; float32 rounds by up to 2^-24 of a number


class LabelledKeywords(TypedDict, total=False):
    """Optional keywords that describe labelled queries, see `Retriever.labelled`."""

    model: str | None
    groups: ArrayLike | None
    clusters: ArrayLike | None
    cluster: str
    probabilities: ArrayLike | None
    keys: ArrayLike | None
    encounters: ArrayLike | None


@dataclass(frozen=True)
class VectorOptions:
    """Options of the search of vectors of another model.

    Args:
        metric: "cosine" scales all vectors to unit length, so that the nearest by angle is the
            nearest by distance; "euclidean" leaves them as they are.
        model: name of what embedded them, with its version; vectors of another one are refused.
        leave_one_out: True if queries may be gallery items. Items with the same vector, and the
            cluster of the item, are then left out of its search. Otherwise such queries cannot
            calibrate.
        clusters: with leave_one_out, where the clusters of the gallery's items come from: "found"
            by `rcir.data.bursts`, "passed", or "none".
        cluster: what a cluster is, such as "moment" or "encounter".
        key: what a part of the gallery is, such as "site", if queries are searched in one part.
    """

    metric: Metric = "euclidean"
    model: str | None = None
    leave_one_out: bool = False
    clusters: Clusters = "none"
    cluster: str = MOMENT
    key: str = KEY

    def __post_init__(self) -> None:
        object.__setattr__(self, "leave_one_out", bool(self.leave_one_out))
        if self.clusters not in get_args(Clusters):
            raise InvalidConfig(
                f"clusters is {self.clusters!r}; choose one of {', '.join(get_args(Clusters))}"
            )
        require_choice("metric", self.metric, Metric)
        object.__setattr__(self, "metric", str(self.metric))
        if self.model is not None:
            object.__setattr__(self, "model", require_text("model", self.model))
        for name in ("cluster", "key"):
            object.__setattr__(self, name, require_text(name, getattr(self, name)))

    @property
    def left_out(self) -> str | None:
        """The word for what the search of a gallery item leaves out; None if it leaves out none."""
        if not self.leave_one_out:
            return None
        return "item" if self.clusters == "none" else self.cluster

    def as_evidence(self, population: Population) -> Population:
        """Return the population of queries as it calibrates, by one query of each left-out unit."""
        return population.independent() if self.leave_one_out else population

    def prepare(self, vectors: Any, dim: int | None = None) -> NDArray[np.float32]:
        """Return vectors (n, d) ready to be searched.

        Args:
            vectors: real numbers, (n, d), see `rcir.embedding.as_vectors`. Those of a
                `numpy.memmap` are never all in memory: the result is mapped from a temporary file.
            dim: the required d.

        Raises:
            InvalidData: see `rcir.index.check_vectors`; or some vectors are zero and have no angle.

        Example:
            >>> VectorOptions("cosine").prepare([[3.0, 4.0]]).tolist()
            [[0.6000000238418579, 0.800000011920929]]
        """
        if isinstance(vectors, np.memmap) and vectors.ndim == 2:
            return self._stored(vectors, dim)
        array = as_vectors(vectors)
        check_shape(array, dim)
        return self._searchable(array)

    def _stored(self, vectors: NDArray[Any], dim: int | None) -> NDArray[np.float32]:
        """Return memory-mapped vectors ready to be searched, in a temporary file."""
        stored = StoredVectors(vectors.shape[1])
        for rows in batches(*vectors.shape):
            array = as_vectors(np.asarray(vectors[rows]))
            check_shape(array, dim)
            stored.append(self._searchable(array, rows.start))
        return stored.vectors

    def _searchable(self, vectors: NDArray[Any], first: int = 0) -> NDArray[np.float32]:
        """Return vectors as they are searched; `first` is the number of the first, for messages."""
        if self.metric == "euclidean":
            return check_vectors(vectors, first=first)
        return unit_vectors(vectors, first)

    @staticmethod
    def uncertainties(values: ArrayLike | None) -> NDArray[np.float64] | None:
        """(n,) uncertainties that come with vectors; None without any."""
        if values is None:
            return None
        try:
            return np.atleast_1d(np.asarray(as_numpy(values), np.float64))
        except (TypeError, ValueError):
            raise InvalidData(
                "uncertainty contains values that are not numbers: give a number for each vector, "
                "larger where it is less certain"
            ) from None

    def require_model(self, model: str | None) -> None:
        """Raise `InvalidData` if vectors are known to be of another model than the gallery's."""
        if None not in (model, self.model) and model != self.model:
            raise InvalidData(
                f"the vectors are of {printable(str(model))}, those of the gallery of "
                f"{printable(str(self.model))}: embed both with the same model"
            )


def require_digits(vectors: NDArray[np.float32], metric: Metric) -> None:
    """Raise `InvalidData` if float32 rounds distances between vectors by more than `TOLERANCE`,
    or cannot hold their squares.

    Coordinates in which the vectors (n, d) do not differ are left out.
    """
    n, dim = vectors.shape
    first = vectors[0].astype(np.float64)
    total, squares = np.zeros(dim), np.zeros(dim)
    for rows in batches(n, dim):
        differences = vectors[rows] - first
        total += differences.sum(axis=0)
        squares += np.square(differences, out=differences).sum(axis=0)
    mean = total / n
    variance = np.maximum(squares / n - mean**2, 0)
    offset = float(np.linalg.norm((first + mean)[variance > 0]))
    deviation = float(np.sqrt(variance.sum()))
    if 0 < deviation < SAFE_LENGTHS[0] and metric == "euclidean":
        raise InvalidData(
            f"the vectors differ by about {deviation:.2g}, and float32 cannot hold the squares of "
            "such numbers: multiply all vectors, of gallery and queries, by the same number"
        )
    if offset > MAX_OFFSET * deviation:
        advice = "subtract their mean, in float64, from the vectors of gallery and queries"
        if metric == "cosine":
            advice = f"{advice}, and pass {as_option('metric', 'euclidean')}, or check the model"
        raise InvalidData(
            f"the vectors are {offset / deviation:,.0f} standard deviations from the origin, where "
            f"float32 no longer distinguishes them; at most {MAX_OFFSET:,.0f} are allowed: {advice}"
        )


@dataclass(frozen=True, eq=False)
class Queries:
    """n embedded queries; values that are not known are None.

    Attributes:
        vectors: (n, d) to be searched.
        uncertainty: (n,) of the encoder, or given with the vectors; larger is less certain. Without
            it, one minus the cosine to the nearest gallery item is used.
        images: the images, if there are any and their digests are not in `population` yet.
        embedding: everything that the encoder returned, if it re-ranks or draws samples.
        relevance: which gallery items they match.
        population: their digests, labels, groups and clusters, see `with_population`; n
            independent queries by default.
        probabilities: (n, L) of the gallery's labels, by a model of the user's own.
        keys: (n,) the part of the gallery that each is searched in, see `Gallery.keys`.
        pictures: (n,) number of pictures that were fused to each query, see `Searcher.together`.

    Raises:
        InvalidData: lengths differ, or an uncertainty is NaN or infinite.
    """

    vectors: Annotated[NDArray[np.float32], Array(2)]
    uncertainty: Annotated[NDArray[np.float64], Array(1)] | None = None
    images: Any = field(default=None, metadata=NOT_STORED)
    embedding: Embedding | None = None
    relevance: Relevance | None = None
    population: Population = INDEPENDENT
    probabilities: Annotated[NDArray[np.float32], Array(2)] | None = None
    keys: Annotated[NDArray[np.str_], Array(1)] | None = None
    pictures: Annotated[NDArray[np.int64], Array(1)] | None = None

    def __post_init__(self) -> None:
        set_population(self)
        for name, values in self._parts().items():
            if len(values) != len(self.vectors):
                what = "uncertainties" if name == "uncertainty" else name
                raise InvalidData(f"got {len(values)} {what} for {len(self.vectors)} queries")
        if self.uncertainty is not None and not np.isfinite(self.uncertainty).all():
            wrong = np.flatnonzero(~np.isfinite(self.uncertainty))
            raise InvalidData(
                f"{len(wrong)} of {len(self)} uncertainties are NaN or infinite, first in row "
                f"{wrong[0]}: leave these queries out, or pass a number for each"
            )

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, rows: slice | NDArray[Any]) -> Queries:
        """Return some of the queries."""
        selected = np.arange(len(self))[rows]
        some: dict[str, Any] = {}
        for name, values in self._parts().items():
            if name == "relevance":
                some[name] = values.subset(selected)
            elif name == "images" and not isinstance(values, np.ndarray):
                some[name] = [values[row] for row in selected]
            else:
                some[name] = values[rows]
        return replace(self, **some)

    @property
    def digests(self) -> NDArray[np.bytes_]:
        """(n,) digests by which the same query is recognised, see `rcir.data.repeats`."""
        if self.population.digests is not None:
            return self.population.digests
        return repeats.digests(self.vectors if self.images is None else self.images)

    def with_digests(self) -> Queries:
        """Return the queries with digests in place of images."""
        population = replace(self.population, digests=self.digests)
        return replace(self, images=None, population=population)

    def with_population(
        self,
        relevance: Relevance | None = None,
        groups: NDArray[np.str_] | None = None,
        clusters: NDArray[np.str_] | None = None,
        cluster_word: str | None = None,
    ) -> Queries:
        """Return the queries with a population, and with what they match if it is known.

        Each query has a label if queries match by one label; places have cells of a grid. Digests
        replace images.
        """
        labels, label_word = None if relevance is None else relevance.single, LABEL
        if isinstance(relevance, WithinRadius):
            labels, label_word = relevance.cells, f"{CELL * relevance.radius:g}-wide cell"
        population = Population(
            len(self), self.digests, labels, groups, clusters, label_word, cluster_word
        )
        return replace(self, images=None, relevance=relevance, population=population)

    def with_probabilities(self, values: Any, classes: NDArray[np.int64]) -> Queries:
        """Return the queries with probabilities (n, L) of (L,) labels, or raise `InvalidData`."""
        shape = len(self), len(classes)
        try:
            table = np.atleast_2d(np.asarray(as_numpy(values), np.float64))
        except (TypeError, ValueError) as error:
            raise InvalidData(
                f"probabilities are not numbers ({error}): pass (n, L) numbers"
            ) from None
        if table.shape != shape:
            raise InvalidData(
                f"probabilities have shape {table.shape}; expected {shape}: a row for each query, "
                "a column for each of `Retriever.classes`"
            )
        right = (table >= 0).all(axis=1) & (np.abs(table.sum(axis=1) - 1) <= TOLERANCE)
        if not right.all():
            raise InvalidData(
                f"{np.count_nonzero(~right)} of {len(right)} rows of probabilities are negative, "
                f"NaN or do not sum to 1, first row {right.argmin()}"
            )
        return replace(self, probabilities=table.astype(np.float32))

    def with_keys(self, key: str | Sequence[str]) -> Queries:
        """Return the queries with one key for all, or with one for each."""
        keys = [key] * len(self) if isinstance(key, str) else key
        return replace(self, keys=as_names(keys, "keys"))

    @staticmethod
    def joined(parts: Sequence[Queries]) -> Queries:
        """Return the queries of several parts, one after the other."""
        first, *others = parts
        joined: dict[str, Any] = {}
        for name, values in first._parts().items():
            all_of = [values, *(getattr(other, name) for other in others)]
            if any(each is None for each in all_of):
                raise InvalidData(f"only some queries have {name}: give it for all, or none")
            if name == "relevance":
                for other in all_of[1:]:
                    values = values.joined(other)
                joined[name] = values
            elif name == "population":
                joined[name] = values.joined(*all_of[1:])
            elif name == "embedding":
                joined[name] = Embedding.concatenate(all_of)
            else:
                joined[name] = np.concatenate(all_of)
        return replace(first, **joined)

    def _parts(self) -> dict[str, Any]:
        """Return the values of the queries that are not None, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def queries_of(results: LabelledResults) -> Queries:
    """Return the queries of search results."""
    queries: Queries = results.results.require("queries")
    return queries


def require_alike(queries: Queries, others: Queries) -> None:
    """Raise `InvalidData` unless queries come with uncertainties, or label probabilities, if and
    only if those of the calibration do.
    """
    kinds = {
        "uncertainty": "uncertainties",
        "probabilities": "label probabilities",
        "keys": "keys",
        "pictures": "encounters (together)",
    }
    for name, what in kinds.items():
        known = getattr(others, name) is not None
        if known != (getattr(queries, name) is not None):
            word = "with" if known else "without"
            where = " in Python" if known and name == "probabilities" else ""
            raise InvalidData(
                f"the retriever was calibrated {word} {what} of the queries, on which set sizes "
                f"depend: query it{where} {word} them"
            )


def order_columns(table: Any, classes: Sequence[int | str]) -> Any:
    """Return a table (n, L) with its columns in the order of L classes, by name, or unchanged if
    the names are 0, 1, ..., L - 1; or raise `InvalidData` if they do not name the classes.
    """
    names = list(getattr(table, "column_names", table.columns))
    if names == list(range(len(classes))):
        return table
    places, wanted = {str(name): place for place, name in enumerate(names)}, list(map(str, classes))
    if sorted(map(str, names)) != sorted(wanted):
        raise InvalidData(
            f"{len(names)} columns of probabilities do not name the {len(wanted)} labels in "
            "`Retriever.classes`: rename them, or pass an array"
        )
    return as_numpy(table)[:, [places[name] for name in wanted]]


def embedded_vectors(
    embedding: Embedding,
) -> tuple[NDArray[np.float32], NDArray[np.float64] | None]:
    """Return the vectors of an embedding, and its uncertainty or None."""
    uncertainty = embedding.uncertainty
    return as_numpy(embedding.vectors), (
        None if uncertainty is None else as_numpy(uncertainty).astype(np.float64)
    )


def as_names(values: object, what: str) -> NDArray[np.str_]:
    """Return (n,) groups or clusters as strings, or raise `InvalidData` if some are missing."""
    names = as_numpy(values)
    several = isinstance(names, Sequence | np.ndarray) and not isinstance(names, str | bytes)
    if not several or getattr(names, "ndim", 1) != 1:
        raise InvalidData(f"{what} are of type {type(names).__name__}: pass one value per query")
    return np.array(as_texts(names, what), np.str_)
