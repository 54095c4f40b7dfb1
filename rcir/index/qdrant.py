"""Qdrant collections as galleries: of a server, or of a folder (local mode)."""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import ApiException

from rcir.errors import DataUnavailable, InvalidData
from rcir.index.attached import (
    AttachedIndex,
    AttachedOptions,
    Hits,
    Keys,
    Rows,
    as_date,
    as_keys,
    as_rows,
)
from rcir.index.base import require_range

SCANNED = 1 << 12  # points that are read together
METRICS = {"Cosine": "cosine", "Euclid": "l2", "Dot": "dot"}
_local: WeakValueDictionary[str, QdrantClient] = WeakValueDictionary()  # a folder has one client
_lock = threading.RLock()  # which serves one thread at a time


@dataclass(frozen=True)
class QdrantOptions(AttachedOptions):
    """The options of `QdrantIndex`, beside those of `AttachedOptions`.

    Args:
        hnsw_ef: candidates of the search of the graph, 1 to 100,000; at least the depth is used.
        timeout: seconds to wait for a server, at least 1.
    """

    hnsw_ef: int = 200
    timeout: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range(self, hnsw_ef=(1, 100_000), timeout=(1, 1e6))


class QdrantIndex(AttachedIndex):
    """A Qdrant collection: ids of points name rows, columns are payload; QDRANT_API_KEY is used."""

    Options = QdrantOptions
    errors = (ApiException, OSError, RuntimeError, ValueError)  # the last two in local mode
    filters = True

    @cached_property
    def engine(self) -> QdrantClient:
        """The connection; to a folder, the only one of this process."""
        place = self.options.location
        if "://" in place:
            # Compatibility would be checked by a thread that would print.
            key, seconds = os.environ.get("QDRANT_API_KEY"), self.options.timeout
            return QdrantClient(place, api_key=key, timeout=seconds, check_compatibility=False)
        client = _local.get(place)
        if client is None:
            if not Path(place).is_dir():  # it would be made
                raise DataUnavailable(f"the folder of {self.options.collection} was not found")
            client = QdrantClient(path=place, force_disable_check_same_thread=True)
            _local[place] = client
        return client

    def _call(self, method: str, *values: Any, **named: Any) -> Any:
        with _lock, self.reading():
            return getattr(self.engine, method)(self.options.collection, *values, **named)

    @property
    def _config(self) -> Any:
        return self._call("get_collection").config

    @cached_property
    def _using(self) -> str | None:
        """The name of the vectors; None if they have none."""
        named = isinstance(self._config.params.vectors, dict)
        return self.options.column("vector") if named else None

    @property
    def engine_metric(self) -> str:
        vectors = self._config.params.vectors
        metric = (vectors if self._using is None else vectors[self._using]).distance.value
        return str(METRICS.get(metric, metric))

    def token(self) -> str:
        return str(self._config.model_dump_json())

    def names(self) -> list[str]:
        payload = {x for point in self._call("scroll", limit=100)[0] for x in point.payload or {}}
        vectors = self._config.params.vectors or {}
        named = vectors if isinstance(vectors, dict) else [self.options.column("vector")]
        # Columns of `where` may be missing from the first points.
        return ["id", *named, *sorted((payload | {*self.options.where}) - {"id"})]

    def count(self) -> int:
        return int(self._call("count", count_filter=self._filter(), exact=True).count)

    def scan(self, names: Sequence[str]) -> Iterator[Rows]:
        asked: dict[str, Any] = {"limit": SCANNED, "with_vectors": True}
        asked |= {"with_payload": [*map(_path, names)], "scroll_filter": self._filter()}
        points, offset = self._call("scroll", **asked)
        yield self._rows(points, names)
        while offset is not None:
            points, offset = self._call("scroll", **asked, offset=offset)
            yield self._rows(points, names)

    def fetch(self, keys: Keys, names: Sequence[str]) -> Rows:
        ids: list[Any] = [int(key) if key.isdigit() else key.decode() for key in keys.tolist()]
        points = self._call("retrieve", ids, with_vectors=True, with_payload=[*map(_path, names)])
        return self._rows(points, names)

    def _rows(self, points: Sequence[Any], names: Sequence[str]) -> Rows:
        using, ids = self._using, [str(point.id) for point in points]
        vectors = [p.vector if using is None else (p.vector or {}).get(using) for p in points]
        columns = {name: [point.payload.get(name) for point in points] for name in names}
        keys = columns.get(self.options.columns.get("key", ""), [])
        if any(isinstance(key, float) for key in keys):  # Qdrant does not match them
            raise InvalidData("some keys are decimal numbers: write them as texts or whole numbers")
        return Rows(as_keys(ids), as_rows(vectors), columns | {"id": ids})

    def find(self, vectors: NDArray[np.float32], k: int, part: str | None) -> Hits:
        condition = self._filter(part)
        params = models.SearchParams(
            hnsw_ef=max(self.options.hnsw_ef, k),
            exact=self.options.exact,
            quantization=models.QuantizationSearchParams(rescore=True),
        )
        requests = [
            models.QueryRequest(
                query=vector, limit=k, filter=condition, params=params, using=self._using
            )
            for vector in vectors.tolist()
        ]
        with _lock, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Local mode")  # it is exact
            answers = self._call("query_batch_points", requests)
        is_score = self.engine_metric != "l2"
        for number, answer in enumerate(answers):
            for point in answer.points:
                yield number, str(point.id), 1 - point.score if is_score else point.score

    def _filter(self, part: str | None = None) -> models.Filter | None:
        """Return the condition of the points that are searched; None for all points."""
        tests: list[Any] = []
        for column, operator, values in self.options.conditions(part):
            key = _path(column)
            if operator == "IN":
                fields = [_equals(key, x) for value in values for x in _payload_values(value)]
                tests.append(models.Filter(should=list(fields)))
                continue
            (value,), name = values, "gte" if operator == ">=" else "lte"
            bound: Any = models.Range(**{name: value}) if not isinstance(value, str) else None
            bound = bound or models.DatetimeRange(**{name: as_date(column, value)})
            tests.append(models.FieldCondition(key=key, range=bound))
        return models.Filter(must=tests) if tests else None


def _path(name: str) -> str:
    """Return the path of a column; in other names than these, letters have a meaning in paths."""
    return name if re.fullmatch(r"[\w-]+", name) else f'"{name}"'


def _equals(key: str, value: Any) -> models.FieldCondition:
    if isinstance(value, float):  # Qdrant matches texts, integers and booleans
        return models.FieldCondition(key=key, range=models.Range(gte=value, lte=value))
    return models.FieldCondition(key=key, match=models.MatchValue(value=value))


def _payload_values(value: str | int | float) -> list[Any]:
    """Return the values of a payload that a value stands for: itself, and what a text spells."""
    if not isinstance(value, str):
        return [value]
    number = [int(value)] if re.fullmatch(r"-?\d{1,18}", value) else []
    return [value, *number, *([value == "True"] if value in ("True", "False") else [])]
