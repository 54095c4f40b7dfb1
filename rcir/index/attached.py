"""Collections in other engines, searched where they are: never copied, never changed."""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Self
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, RcirError, StaleCalibration
from rcir.index.base import (
    Neighbours,
    check_vectors,
    lengths,
    no_neighbours,
    require_range,
    unit_vectors,
)
from rcir.options import require_choice
from rcir.stored_vectors import batches

SAMPLED = 1000  # rows whose vectors and columns tell whether a collection changed
QUERY_BATCH = 256  # queries that are sent together
NEAR = 0.1  # smaller distances are computed from the vectors: 1 - cos has lost their digits
KEYS_FILE, SAMPLE_FILE, STATE_FILE = "keys.npy", "sample.npy", "collection.json"
BOUNDS = {"from": ">=", "to": "<="}  # of a range of values
LAST_DIGITS = 1e-5  # of a length: smaller differences of a vector are not changes
Metric = Literal["cosine", "euclidean"]
Keys = NDArray[Any]  # (n,) int64, or bytes: what the engine names rows by
# Of the nearest rows of queries: number of the query from 0, key, and the engine's distance: L2, or
# one minus cosine or product
Hits = Iterable[tuple[int, Any, float]]


class Condition(NamedTuple):
    """A condition on a column: its value is one of several ("IN"), or at least or most one."""

    column: str
    operator: str  # "IN", ">=" or "<="
    values: list[Any]


class Rows(NamedTuple):
    """Rows of a collection: their keys (n,), vectors (n, d), and columns by the engine's names."""

    keys: Keys
    vectors: NDArray[np.float32]
    columns: dict[str, list[Any]]


@dataclass(frozen=True)
class AttachedOptions:
    """Where a collection is and how it is searched; options of engines are added by subclasses.

    Args:
        place: address without the name of the engine, such as "PATH#TABLE"; without credentials.
        columns: the collection's names of the columns id, vector, label, labels, x, y, uncertainty
            and key, where they differ; see `rcir.attach`.
        where: the rows that are the gallery, by column: a text, number or date, a list of these, or
            the bounds {"from": low, "to": high}, both included, one of which may be missing.
        metric: "cosine" or "euclidean", see `rcir.retrieval.queries.VectorOptions`.
        version: of the collection, as you declare it; of a LanceDB table, that which is searched.
        exact: compare all vectors, without the engine's index.
        check_s: seconds, at least 0, after which a search checks again whether the collection was
            changed.
    """

    place: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    where: dict[str, Any] = field(default_factory=dict)
    metric: Metric = "cosine"
    version: str = ""
    exact: bool = False
    check_s: float = 60.0

    def __post_init__(self) -> None:
        require_choice("metric", self.metric, Metric)
        require_range(self, check_s=(0, 1e9))
        where = {column: _as_plain(column, value) for column, value in self.where.items()}
        object.__setattr__(self, "where", where)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Servers that receive credentials."""
        parts = urlsplit(self.location)
        if "://" not in self.location:
            return ()
        if "@" in parts.netloc or parts.query or parts.fragment:  # it is stored
            raise InvalidConfig(
                "the address contains a user, a password or a query string: leave them out, and "
                "set the environment variables of the engine, such as QDRANT_API_KEY"
            )
        return (parts.hostname,) if parts.hostname else ()

    @property
    def location(self) -> str:
        """What is before the last "#" of the place."""
        return self.place.rpartition("#")[0]

    @property
    def collection(self) -> str:
        """What is behind the last "#" of the place: the name of a table or collection."""
        location, _, name = self.place.rpartition("#")
        if not (location and name):
            raise InvalidConfig("the address names no collection: pass ENGINE:PLACE#NAME")
        return name

    def column(self, name: str) -> str:
        """Return the collection's name of one of our columns."""
        return self.columns.get(name, name)

    def conditions(self, part: str | None = None) -> list[Condition]:
        """Return the conditions on rows that are searched: `where`, and the key `part`."""
        conditions = [] if part is None else [Condition(self.column("key"), "IN", [part])]
        for column, wanted in self.where.items():
            if isinstance(wanted, dict):
                conditions += [Condition(column, BOUNDS[name], [x]) for name, x in wanted.items()]
            else:
                values = wanted if isinstance(wanted, list) else [wanted]
                conditions.append(Condition(column, "IN", values))
        return conditions


class AttachedIndex(ABC):
    """A collection as an index, see `rcir.index.Index`; positions are places among sorted keys.

    In memory are the keys of the rows, and no vectors. An adapter implements `names`, `scan`,
    `fetch`, `find`, `count`, and what differs of the other methods; it calls its engine in `with
    self.reading()`. A connection is a cached property `engine`, which copies in other processes
    make anew. If it sets `filters` to True, `scan`, `find` and `count` skip rows that do not meet
    `options.conditions()`.

    Attributes:
        errors: what the engine raises, which becomes `DataUnavailable`.
        filters: True if the option `where` can be used.
    """

    Options: ClassVar[type] = AttachedOptions
    errors: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    filters: ClassVar[bool] = False

    def __init__(self, options: Any) -> None:
        self.options = options
        self._keys: Keys = np.empty(0, np.int64)
        self._sample: NDArray[np.float32] | None = None
        self._dim, self._state, self._seen, self._checked = 0, "", "", -np.inf

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the columns."""

    @abstractmethod
    def scan(self, names: Sequence[str]) -> Iterator[Rows]:
        """Yield all rows with some columns, among them that of the ids, in blocks of any size."""

    @abstractmethod
    def fetch(self, keys: Keys, names: Sequence[str]) -> Rows:
        """Return the rows with different keys (n,), as far as they exist, in any order."""

    @abstractmethod
    def find(self, vectors: NDArray[np.float32], k: int, part: str | None) -> Hits:
        """Return the k nearest rows of each query (n, d), in any order.

        They are those that meet `self.options.conditions(part)`.
        """

    @abstractmethod
    def count(self) -> int:
        """Return the number of rows."""

    @property
    def engine_metric(self) -> str:
        """How the engine's index compares vectors: "cosine", "l2" or "dot"."""
        return "cosine" if self.options.metric == "cosine" else "l2"

    def token(self) -> str:
        """Return what else of the collection decides answers, such as its index."""
        return ""

    def latest(self) -> str:
        """Return the version to attach, unless one is named."""
        return ""

    def state(self) -> str:
        """Return a digest that differs once the collection is noticed to have changed."""
        drawn = np.random.default_rng(0).permutation(len(self))[:SAMPLED]
        keys = self._keys[np.sort(drawn)]
        names = [theirs for ours, theirs in self.options.columns.items() if ours != "vector"]
        rows = self.fetch(keys, list(dict.fromkeys([*names, *self.options.where])))
        order = np.argsort(rows.keys)
        columns = {name: [values[row] for row in order] for name, values in rows.columns.items()}
        vectors = rows.vectors[order]
        if self._sample is None:
            if len(vectors) < len(keys) or self.count() != len(self):
                raise InvalidData(
                    f"the collection {self.options.collection} was changed while it was read, or "
                    "some rows have no text or numeric id: correct them, and attach it again"
                )
            self._sample = vectors
        same = vectors.shape == self._sample.shape and self._alike(vectors, self._sample)
        facts = [self.options.version, self.token(), self.count(), columns, same]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def _alike(self, vectors: NDArray[np.float32], sample: NDArray[np.float32]) -> bool:
        """Return whether vectors (n, d) are those of a sample, up to what changes no answer.

        With cosine, lengths do not matter: Qdrant's local mode changes them when it searches.
        """
        sizes = lengths(sample)
        with np.errstate(divide="ignore", invalid="ignore"):  # a zero vector is unlike any other
            scale = sizes / lengths(vectors) if self.options.metric == "cosine" else 1 + 0 * sizes
            apart = np.abs(vectors * scale[:, None] - sample).max(axis=1)
        return bool(np.all(apart <= LAST_DIGITS * sizes))

    def attach(self, keys: Keys, dim: int, unit: bool) -> None:
        """Set the ascending keys (n,) of rows that were read; `unit`: their vectors have length 1.

        Raises:
            InvalidConfig: the engine compares vectors by another metric.
        """
        ours, theirs = self.options.metric, self.engine_metric
        if theirs != {"cosine": "cosine", "euclidean": "l2"}[ours] and not (
            ours == "cosine" and unit
        ):
            raise InvalidConfig(
                f"the collection is searched by {theirs}, and its vectors are not of length 1: "
                f"pass a metric that is the same, or build its index for {ours}"
            )
        self._keys, self._dim = keys, dim
        self._state = self._seen = self.state()
        self._checked = time.monotonic()

    def prepare(self, vectors: NDArray[Any]) -> NDArray[np.float32]:
        """Return vectors (n, d) as they are compared."""
        checked = check_vectors(vectors, self._dim or None)
        return unit_vectors(checked) if self.options.metric == "cosine" else checked

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise errors of the engine as `DataUnavailable`."""
        try:
            yield
        except RcirError:
            raise
        except self.errors as error:
            line = (str(error).strip() or type(error).__name__).partition("\n")[0]
            raise DataUnavailable(
                f"the collection {self.options.collection} cannot be searched ({line}): check its "
                "address, its server and your credentials; if it or its version was deleted, "
                "attach it again, and calibrate"
            ) from error

    def __len__(self) -> int:
        return len(self._keys)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "engine"}

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # nothing changes it

    @classmethod
    def build(cls, vectors: NDArray[np.float32], options: Any) -> Self:
        """Refuse: a collection exists."""
        raise InvalidConfig("such a gallery exists already: attach it with `rcir.attach`")

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Refuse, see `remove`."""
        self.remove(np.empty(0, np.int64))

    def remove(self, positions: NDArray[np.int64]) -> None:
        """Refuse: a collection is changed with its own tools."""
        raise InvalidConfig(
            f"the gallery is the collection {self.options.collection}, which is only read: change "
            "it with its own tools, then attach and calibrate it again"
        )

    def search(self, vectors: NDArray[np.float32], k: int) -> Neighbours:
        """See `Index.search`; raises `DataUnavailable`, and `StaleCalibration` after a change."""
        return self.search_part(vectors, k, None)

    def search_part(self, vectors: NDArray[np.float32], k: int, part: str | None) -> Neighbours:
        """Return what `search` does, of the items of a part."""
        vectors = check_vectors(vectors, self._dim)
        if self.version.partition(" ")[0] != self._state:
            self._refuse()
        distances, positions = no_neighbours(len(vectors), k)
        for start in range(0, len(vectors), QUERY_BATCH):
            block = vectors[start : start + QUERY_BATCH]
            rows = list(self.find(block, min(k, len(self)), part))
            number = np.array([row[0] for row in rows], np.int64)
            place = self._places([row[1] for row in rows])
            far = np.array([row[2] for row in rows], np.float64)
            if self.engine_metric != "l2":
                far = np.sqrt(2 * np.maximum(far, 0))
            near = np.flatnonzero(far < NEAR)
            if len(near) and self.options.metric == "cosine":
                apart = self.vectors_at(place[near]).astype(np.float64) - block[number[near]]
                far[near] = np.linalg.norm(apart, axis=1)
            order = np.lexsort((place, far, number))
            number = number[order]
            column = np.arange(len(number)) - np.searchsorted(number, number)
            distances[start + number, column] = far[order]
            positions[start + number, column] = place[order]
        return distances, positions

    def vectors_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Index.vectors_at`; raises the errors of `search`."""
        different, inverse = np.unique(positions, return_inverse=True)
        vectors = np.empty((len(different), self._dim), np.float32)
        for rows in batches(len(different), self._dim):
            keys = self._keys[different[rows]]
            fetched = self.fetch(keys, ())
            order = np.argsort(fetched.keys)
            if not np.array_equal(fetched.keys[order], keys):
                self._refuse()
            vectors[rows] = self.prepare(fetched.vectors[order])
        return vectors[inverse]

    @property
    def version(self) -> str:
        """The state of the collection, as checked within `check_s` seconds, and the options."""
        if time.monotonic() - self._checked >= self.options.check_s:
            self._seen = self.state()
            self._checked = time.monotonic()
        plain = {**vars(self.options), "check_s": None}
        return f"{self._seen} {json.dumps(plain, sort_keys=True)}"

    def save(self, folder: Path) -> None:
        """Write keys, the sample and state."""
        np.save(folder / KEYS_FILE, self._keys, allow_pickle=False)
        if self._sample is not None:
            np.save(folder / SAMPLE_FILE, self._sample, allow_pickle=False)
        (folder / STATE_FILE).write_text(json.dumps({"dim": self._dim, "state": self._state}))

    @classmethod
    def load(cls, folder: Path, options: Any) -> Self:
        """Read what `save` wrote; a change since makes the calibration stale."""
        values: Mapping[str, Any] = json.loads((folder / STATE_FILE).read_text())
        index = cls(options)
        index._keys = np.load(folder / KEYS_FILE, allow_pickle=False)
        if (folder / SAMPLE_FILE).exists():
            index._sample = np.load(folder / SAMPLE_FILE, allow_pickle=False)
        index._dim, index._state = int(values["dim"]), str(values["state"])
        return index

    def _places(self, names: Sequence[Any]) -> NDArray[np.int64]:
        """Return the positions (m,) of rows, or raise `StaleCalibration` for unknown ones."""
        keys = as_keys(names) if names else self._keys[:0]
        places = np.minimum(np.searchsorted(self._keys, keys), len(self) - 1)
        if not np.array_equal(self._keys[places], keys):
            self._refuse()
        return places

    def _refuse(self) -> NoReturn:
        raise StaleCalibration(
            f"the collection {self.options.collection} was changed since it was attached: attach "
            "it again, and calibrate"
        )


def _as_plain(column: object, wanted: Any) -> Any:
    """Return a value of `where` as JSON has it, or raise `InvalidConfig`."""
    bounds = wanted if isinstance(wanted, dict) else {}
    listed = wanted if isinstance(wanted, list | tuple) else [*bounds.values()] or [wanted]
    values = [value.item() if isinstance(value, np.generic) else value for value in listed]
    values = [value.isoformat() if isinstance(value, date) else value for value in values]
    fits = [
        value.isprintable() if isinstance(value, str) else abs(value) < 2**63
        for value in values
        if isinstance(value, str | int | float)
    ]
    if not (values and all(fits) and len(fits) == len(values) and bounds.keys() <= BOUNDS.keys()):
        raise InvalidConfig(
            f"where is {wanted!r} for column {column}: give a text, number or date, a list of "
            'these, or bounds, such as {"from": 2020, "to": 2024}'
        )
    if not (isinstance(column, str) and column.isprintable()):
        raise InvalidConfig(f"where names the column {column!r}: give its name as a text")
    if bounds:
        return dict(zip(bounds, values, strict=True))
    return values if isinstance(wanted, list | tuple) else values[0]


def as_date(column: str, value: Any) -> datetime:
    """Return the date that a value of `where` states, or raise `InvalidConfig`."""
    try:
        return datetime.fromisoformat(str(value))
    except ValueError:
        raise refused_value(column, value, "dates, such as 2024-01-31") from None


def refused_value(column: str, value: Any, kind: str) -> InvalidConfig:
    """Return the error for a value of `where` that a column cannot have."""
    return InvalidConfig(f"where has {value!r} for column {column}, which holds {kind}")


def as_rows(vectors: Sequence[Any]) -> NDArray[np.float32]:
    """Return the vectors of rows (n, d), or raise `InvalidData` if some have none."""
    try:
        array = np.array(vectors, np.float32)
    except (TypeError, ValueError):
        array = np.empty(0, np.float32)
    if len(vectors) and array.ndim != 2:
        raise InvalidData(
            "some rows have no vector, or one of another length: complete them, or leave them out"
        )
    return array.reshape(len(vectors), -1) if len(vectors) else np.empty((0, 0), np.float32)


def as_keys(values: Sequence[Any]) -> Keys:
    """Return names of rows as an array that can be sorted: of integers, or texts in UTF-8."""
    if values and not isinstance(values[0], int):
        return np.array([str(value).encode() for value in values])
    return np.array(values, np.int64)
