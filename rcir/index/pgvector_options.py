"""How vectors lie in PostgreSQL with pgvector, and how they are searched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from rcir.errors import InvalidConfig
from rcir.index.postgres import check_dsn

PgvectorMethod = Literal["hnsw", "ivfflat", "exact"]
PARAMETER_RANGES = {
    **{"m": (2, 100), "ef_construction": (4, 1000), "ef_search": (1, 1000)},
    **{"max_scan_tuples": (1, 2**31 - 1), "lists": (1, 32768), "probes": (1, 32768)},
}
# What decides an answer besides the vectors is never left to the server: neither to its planner,
# which takes or leaves an index by its statistics, nor to what its configuration says.
COMMON_SETTINGS = {"jit": "off", "work_mem": "64MB", "hnsw.scan_mem_multiplier": "1"}
BY_INDEX = {"enable_indexscan": "on"} | dict.fromkeys(
    ("enable_seqscan", "enable_sort", "enable_bitmapscan"), "off"
)
ONE_BY_ONE = {"enable_seqscan": "on", "enable_sort": "on"} | dict.fromkeys(
    ("enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan"), "off"
)


@dataclass(frozen=True)
class PgvectorOptions:
    """The options of `PgvectorIndex`.

    Args:
        dsn: libpq's connection string, without a password (PGPASSWORD, ~/.pgpass); what it leaves
            out is taken from PGHOST and the like.
        table: "name" or "schema.name", in small letters; it must not exist when it is built.
        method: "hnsw", "ivfflat", or "exact", which compares all vectors.
        m, ef_construction: of the HNSW graph: links, 2 to 100, and candidates while it is built, 4
            to 1,000, at least 2 m.
        ef_search, max_scan_tuples: of its search: candidates, 1 to 1,000; where they are fewer than
            asked for, it goes on until it has seen that many.
        lists, probes: of IVFFlat: number of lists, 1 to 32,768, and how many are searched.
        timeout: seconds to connect, and of a search; above 0.

    Raises:
        InvalidConfig: of one that is out of range.
        MissingPackage: psycopg is not installed.
    """

    dsn: str = ""
    table: str = "rcir_vectors"
    method: PgvectorMethod = "hnsw"
    m: int = 16
    ef_construction: int = 64
    ef_search: int = 200
    max_scan_tuples: int = 20_000
    lists: int = 100
    probes: int = 10
    timeout: float = 30.0

    def __post_init__(self) -> None:
        check_dsn(self.dsn)
        if not re.fullmatch(r"([a-z_][a-z0-9_]{0,49}\.)?[a-z_][a-z0-9_]{0,49}", self.table):
            raise InvalidConfig(
                f"table is {self.table!r}; a name, or schema.name, of small letters, digits and "
                "underscores, at most 50"
            )
        if self.method not in get_args(PgvectorMethod):
            raise InvalidConfig(
                f"method is {self.method!r}; one of {', '.join(get_args(PgvectorMethod))}"
            )
        for name, (least, most) in PARAMETER_RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; {least} to {most}")
        if self.ef_construction < 2 * self.m:
            raise InvalidConfig(
                f"ef_construction is {self.ef_construction}; at least twice m, which is {self.m}"
            )
        if self.probes > self.lists:
            raise InvalidConfig(f"probes is {self.probes}; at most lists, which is {self.lists}")
        if not 0 < self.timeout < 1e6:
            raise InvalidConfig(f"timeout is {self.timeout}; seconds above 0")

    @property
    def built(self) -> str:
        """The index as CREATE INDEX names it, with what it is built by."""
        if self.method == "hnsw":
            chosen = f"m = {self.m}, ef_construction = {self.ef_construction}"
        else:
            chosen = f"lists = {self.lists}"
        return f"{self.method} (embedding vector_l2_ops) WITH ({chosen})"

    @property
    def search_settings(self) -> dict[str, str]:
        """The settings of PostgreSQL that decide what a search finds."""
        if self.method == "exact":
            return COMMON_SETTINGS | ONE_BY_ONE
        named = {"hnsw": ("ef_search", "max_scan_tuples"), "ivfflat": ("probes",)}[self.method]
        own = {f"{self.method}.{name}": str(getattr(self, name)) for name in named}
        order = "strict_order" if self.method == "hnsw" else "relaxed_order"
        own[f"{self.method}.iterative_scan"] = order
        if self.method == "ivfflat":
            own["ivfflat.max_probes"] = str(self.lists)
        return COMMON_SETTINGS | BY_INDEX | own
