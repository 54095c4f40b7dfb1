"""Populations: who queries are, and which of them are independent of each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData
from rcir.metrics.labels import UNMATCHED
from rcir.store.codec import Array

LABEL = "label"  # what the labels of queries are called
KINDS = {"digests": "S", "labels": "iu", "groups": "U", "clusters": "Uiu"}  # of data types
KIND_WORDS = {
    "b": "bool",
    "iu": "integer",
    "S": "bytes",
    "U": "strings",
    "Uiu": "strings or integer",
}

Rows: TypeAlias = slice | NDArray[np.bool_ | np.integer]


def check_arrays(
    record: object, shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, str] | None = None
) -> None:
    """Raise `InvalidData` unless attributes are None or arrays of these shapes and data types."""
    for name, shape in shapes.items():
        values, kind = getattr(record, name), (kinds or {}).get(name)
        if values is None:
            continue
        if not isinstance(values, np.ndarray):
            raise InvalidData(f"{name} is a {type(values).__name__}: pass an array")
        if values.shape != shape:
            raise InvalidData(f"{name} has shape {values.shape}; expected {shape}")
        if kind is not None and values.dtype.kind not in kind:
            raise InvalidData(f"{name} is of type {values.dtype}; it must be {KIND_WORDS[kind]}")


@dataclass(frozen=True, eq=False)
class Population:
    """n queries as draws from a population; attributes that are not known are None.

    Independent units are the clusters if there are any, and otherwise the queries.

    Attributes:
        n: number of queries.
        digests: (n,) bytes, by which the same query is recognised and rows are chosen whatever
            their order.
        labels: (n,) integers, `UNMATCHED` for queries without a known label; None if queries have
            no single label each.
        groups: (n,) strings, the group of each query, such as a camera or a site.
        clusters: (n,) strings or integers, equal for queries of one cluster, such as a video or a
            patient, that are not independent of each other; None if all queries are independent.
        label_word: what a label is: "label", or such as "250-wide cell" for places.
        cluster_word: what a cluster is, such as "video"; None without clusters.

    Raises:
        InvalidData: shapes or types differ from these, or only one of `clusters` and
            `cluster_word` is passed.

    Example:
        >>> population = Population(3, clusters=np.array(["a", "b", "a"]), cluster_word="video")
        >>> population.n_units, population.unit_means(np.array([[1.0], [0.0], [0.0]])).tolist()
        (2, [[0.5], [0.0]])
    """

    n: int
    digests: Annotated[NDArray[np.bytes_], Array(1)] | None = None
    labels: Annotated[NDArray[np.int64], Array(1)] | None = None
    groups: Annotated[NDArray[np.str_], Array(1)] | None = None
    clusters: Annotated[NDArray[Any], Array(1)] | None = None
    label_word: str = LABEL
    cluster_word: str | None = None

    def __post_init__(self) -> None:
        check_arrays(self, dict.fromkeys(KINDS, (self.n,)), KINDS)
        for name, values in self._arrays().items():
            if name == "labels":
                if int(values.max(initial=0)) > np.iinfo(np.int64).max:
                    raise InvalidData("labels are integers that do not fit in 64 bits with a sign")
                values = values.astype(np.int64, copy=False)
            view = values.view()
            view.setflags(write=False)
            object.__setattr__(self, name, view)
        if (self.clusters is None) != (self.cluster_word is None):
            raise InvalidData("pass clusters and what a cluster is, such as 'video', or neither")

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, rows: Rows) -> Population:
        """Return the population of some queries."""
        arrays: dict[str, Any] = {name: values[rows] for name, values in self._arrays().items()}
        return replace(self, n=len(np.empty(self.n)[rows]), **arrays)

    def joined(self, *others: Population) -> Population:
        """Return these queries, then others; `InvalidData` if only some have labels, say."""
        parts = (self, *others)
        arrays: dict[str, Any] = {}
        for name in KINDS:
            values = [getattr(part, name) for part in parts]
            number = len(parts) - sum(part is None for part in values)
            if 0 < number < len(parts):
                raise InvalidData(f"only some queries have {name}: pass them for all, or for none")
            if number:
                arrays[name] = np.concatenate(values)
        return replace(self, n=sum(map(len, parts)), **arrays)

    def by_label(self) -> Population:
        """Return the queries with those of each label as one cluster.

        Raises:
            InvalidConfig: some queries have no known, single label.
        """
        if self.single_labels is None:
            raise InvalidConfig(
                "query_labels needs queries with one label each, which these do not have: pass "
                "their clusters to the calibration instead"
            )
        return replace(self, clusters=self.labels, cluster_word=self.label_word)

    def independent(self) -> Population:
        """Return the queries without their clusters, for one query of each."""
        return replace(self, clusters=None, cluster_word=None)

    @cached_property
    def single_labels(self) -> NDArray[np.int64] | None:
        """(n,) labels of the queries; None unless each has a known, single label."""
        return None if self.labels is None or (self.labels == UNMATCHED).any() else self.labels

    @property
    def n_labels(self) -> int | None:
        """Number of labels; None unless each query has a known, single label."""
        return None if self.single_labels is None else len(np.unique(self.single_labels))

    @property
    def known_labels(self) -> NDArray[np.int64] | None:
        """The labels of the queries that have one, ascending; None without single labels."""
        return None if self.labels is None else np.unique(self.labels[self.labels != UNMATCHED])

    @property
    def group_names(self) -> list[str]:
        """The names of the groups, ascending; empty if the queries have none."""
        return [] if self.groups is None else sorted(set(self.groups.tolist()))

    def in_group(self, group: str) -> NDArray[np.bool_]:
        """(n,) True for the queries of a group.

        Raises:
            InvalidConfig: no query is in this group.
        """
        names = self.group_names
        if self.groups is None or group not in names:
            raise InvalidConfig(
                f"group {group!r} has no calibration queries; "
                + (f"there are {', '.join(map(repr, names))}" if names else "none have a group")
            )
        return np.asarray(self.groups == group)

    @property
    def unit_word(self) -> str:
        """The word for independent units: "queries", "clusters", or what labels are called."""
        if self.clusters is None:
            return "queries"
        return f"{self.cluster_word}s" if self.cluster_word == self.label_word else "clusters"

    @property
    def units(self) -> NDArray[np.int64]:
        """(n,) number of the independent unit of each query, from 0."""
        return self._counted_units[0]

    @property
    def n_units(self) -> int:
        """Number of independent units."""
        return self.n if self.clusters is None else len(self._counted_units[1])

    @property
    def unit_sizes(self) -> NDArray[np.int64]:
        """(units,) number of queries of each independent unit."""
        return self._counted_units[1]

    def shuffled_units(self) -> NDArray[np.int64]:
        """Return the units in a random order that depends on neither rows nor sizes."""
        units = np.arange(self.n_units)
        if self.clusters is None and self.digests is not None:
            units = np.argsort(self.digests, kind="stable")
        return np.random.default_rng(0).permutation(units)

    @cached_property
    def _counted_units(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The unit (n,) of each query, and the number (units,) of queries of each unit."""
        clusters = np.arange(self.n) if self.clusters is None else self.clusters
        _, units, counts = np.unique(clusters, return_inverse=True, return_counts=True)
        return units.astype(np.int64), counts.astype(np.int64)

    def unit_means(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(units, g) means over each unit of (n, g) values, such as losses."""
        if self.clusters is None:
            return values
        units, counts = self._counted_units
        width = values.shape[1]
        cells = units[:, None] * width + np.arange(width)
        sums = np.bincount(cells.ravel(), values.ravel(), len(counts) * width)
        return sums.reshape(len(counts), width) / counts[:, None]

    def one_of_each_unit(self) -> NDArray[np.int64]:
        """Return the row of one query of each unit, chosen by digest, whatever the order."""
        if self.digests is None:
            order = np.random.default_rng(0).permutation(self.n)
        else:
            order = np.lexsort((self.digests, self.digests.astype("S8").view(np.int64)))
        return order[np.unique(self.units[order], return_index=True)[1]]

    @property
    def n_mixed_clusters(self) -> int:
        """Number of clusters that hold queries of several groups."""
        if self.clusters is None or self.groups is None:
            return 0
        group = np.unique(self.groups, return_inverse=True)[1]
        pairs = np.unique(np.stack([self.units, group]), axis=1)
        return int(np.count_nonzero(np.bincount(pairs[0]) > 1))

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that are known, by name."""
        arrays = {name: getattr(self, name) for name in KINDS}
        return {name: values for name, values in arrays.items() if values is not None}


INDEPENDENT = Population(0)  # the default, in place of n independent queries


class HasPopulation(Protocol):
    """Queries with a population."""

    def __len__(self) -> int: ...

    @property
    def population(self) -> Population: ...


def set_population(queries: HasPopulation) -> None:
    """Replace a default population by one of as many queries, or check their number."""
    if queries.population is INDEPENDENT:
        object.__setattr__(queries, "population", Population(len(queries)))
    elif len(queries.population) != len(queries):
        number = len(queries.population)
        raise InvalidData(f"got a population of {number} queries for {len(queries)} queries")
