"""Guarantees for the results of any search engine, from tables of what it returned."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rcir.data.vector_files import read_table
from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable, printable
from rcir.index import DEPTH
from rcir.options import ALPHAS, DELTA
from rcir.risk import (
    Guarantee,
    LabelledResults,
    Population,
    SearchResults,
    SetRule,
    fit_score_function,
    make_request,
    score,
)
from rcir.store.codec import read, write
from rcir.store.folder import checksums, verified, write_manifest

RULE = "rule"
SHARES = (0.25, 0.75)  # of the queries: those before tune, those between calibrate, others measure


@dataclass(frozen=True, eq=False)
class ResultTable:
    """What an engine returned for n queries, nearest first.

    Attributes:
        queries: (n,) names.
        ids: (n, depth) of items.
        results: their distances, minus the scores if the table has scores.
        column: "distance" or "score", which orders the items.
        relevant: (n, depth) True where the item is a true match; None if the table does not say.
    """

    queries: list[str]
    ids: NDArray[np.object_]
    results: SearchResults
    column: str
    relevant: NDArray[np.bool_] | None

    @classmethod
    def read(cls, path: Path, depth: int = DEPTH) -> Self:
        """Read a table, .csv or .parquet, with a row for each query and item that was returned.

        Columns: query, id; distance (small is near) or score (large is near); and, to certify,
        relevant (0 or 1), or label (of the item) and query_label, where equal ones match. Of items
        that are equally far, the one with the lesser id comes first, in any order of the rows.

        Args:
            path: of the table.
            depth: number of items of each query that are used, the nearest; all of shorter lists,
                if they have one length.

        Raises:
            InvalidData: there are no rows, a column or a value is missing or wrong, an item is
                twice in the list of a query, or shorter lists have different lengths.
        """
        columns = read_table(
            path,
            ("query", "id"),
            ("distance", "score", "relevant", "label", "query_label"),
        )
        near = {"distance", "score"} & columns.keys()
        if len(near) != 1:
            problem = "has both columns distance and score: leave one out"
            raise InvalidData(f"{path} {problem if near else 'has no column distance or score'}")
        name = near.pop()
        distances = columns[name] if name == "distance" else -columns[name]
        names, first, number = np.unique(
            np.array(columns["query"], object), return_index=True, return_inverse=True
        )
        ids = np.array(columns["id"], object)
        if not len(ids):
            raise InvalidData(f"{path} has no rows: write one for each query and item")
        pairs = Counter(zip(columns["query"], columns["id"], strict=True))
        if (pair := pairs.most_common(1)[0])[1] > 1:
            query, item = pair[0]
            raise InvalidData(
                f"{path}: item {printable(item)} is {pair[1]} times among the results of query "
                f"{printable(query)}: leave it there once"
            )
        counts = np.bincount(number)
        least, most = int(counts.min()), int(counts.max())
        depth = min(depth, most)
        if least < depth:
            raise InvalidData(
                f"{path}: queries have {least} to {most} results, and lists of different depth "
                f"cannot be compared: search all to one depth, or use the first {least} "
                f"(depth={least}, --depth {least})"
            )
        order = np.lexsort((np.unique(ids, return_inverse=True)[1], distances, number))
        kept = (np.cumsum(counts) - counts)[:, None] + np.arange(depth)
        rows = order[kept]
        relevant = None
        if "relevant" in columns:
            if (wrong := ~np.isin(columns["relevant"], (0, 1))).any():
                value = columns["relevant"][wrong.argmax()]
                raise InvalidData(f"{path}: column relevant must hold 0 or 1, and has {value:g}")
            relevant = columns["relevant"][rows] == 1
        elif {"label", "query_label"} <= columns.keys():
            if isinstance(columns["label"], list) != isinstance(columns["query_label"], list):
                raise InvalidData(
                    f"{path}: of the columns label and query_label, one holds numbers and the "
                    "other texts, which never match: write both alike"
                )
            labels, of_queries = (np.array(columns[n], object) for n in ("label", "query_label"))
            if (other := of_queries != of_queries[first][number]).any():
                query = printable(names[number[other.argmax()]])
                raise InvalidData(f"{path}: query {query} has two labels in column query_label")
            relevant = labels[rows] == of_queries[first][:, None]
        far = distances[rows]
        return cls(names.tolist(), ids[rows], SearchResults(far[:, 0], depth, far), name, relevant)


@dataclass(frozen=True, eq=False)
class CertifiedResults:
    """A certified rule that cuts the lists of a search engine.

    Attributes:
        rule: sizes the sets; calibrated by queries of a table.
        column: of that table, "distance" or "score", which future ones must have.
        measured: by alpha, share of the test queries whose set holds no match, and mean size.
    """

    rule: SetRule
    column: str
    measured: dict[str, tuple[float, float]]

    @classmethod
    def certify(
        cls,
        table: ResultTable,
        score_function: str = "auto",
        alphas: Sequence[float] = ALPHAS,
        delta: float = DELTA,
    ) -> Self:
        """Fit on a quarter of the queries, calibrate on half of them, and measure on the others.

        The queries must be drawn independently of each other from the same source as future ones,
        and searched with one state and one setting of the engine. Their names divide them.

        Raises:
            InvalidData: the table does not say what matches, or there are too few queries.
            RiskUnattainable: nothing certifies any of the levels.
        """
        if table.relevant is None:
            raise InvalidData(
                "the table does not say what matches: add a column relevant, or label and "
                "query_label"
            )
        digests = np.array([hashlib.sha256(name.encode()).digest() for name in table.queries])
        order = np.argsort(digests)
        ends = [round(share * len(order)) for share in SHARES]
        labelled = LabelledResults(
            table.results,
            table.relevant,
            table.relevant.sum(axis=1),
            population=Population(len(order)),
        )
        tuning, calibration, test = (labelled[np.sort(rows)] for rows in np.split(order, ends))
        fitted, _ = fit_score_function(score_function, tuning.results, tuning.ranks, alphas, delta)
        rule = SetRule(fitted, score(fitted, tuning), score(fitted, calibration))
        scored, measured = score(fitted, test), {}
        for alpha in alphas:
            try:
                threshold = rule.guarantee(make_request(alpha, delta)).threshold
            except RiskUnattainable as error:
                if alpha == max(alphas):  # then smaller ones are refused, too
                    absent = 1 - calibration.relevant.any(axis=1).mean()
                    raise RiskUnattainable(
                        f"{len(calibration)} calibration queries certify no alpha up to {alpha:g}: "
                        f"{absent:.1%} of them have no match among their results; search deeper, "
                        "add queries, or raise alpha",
                        minimum_alpha=error.minimum_alpha,
                        required_calibration=error.required_calibration,
                    ) from error
                continue
            sizes = scored.sizes(threshold)
            missed = scored.require("match_rank") > sizes
            measured[f"{alpha:g}"] = float(missed.mean()), float(sizes.mean())
        return cls(rule, table.column, measured)

    def sets(
        self, table: ResultTable, alpha: float, delta: float
    ) -> tuple[dict[str, list[str]], Guarantee]:
        """Return the ids of the set of each query, and the guarantee.

        Raises:
            InvalidData: the lists are shorter than those that calibrated, or scores are in place of
                distances.
            RiskUnattainable: nothing certifies the request.
        """
        if table.column != self.column:
            raise InvalidData(
                f"the results have the column {table.column}, and {self.column} calibrated: write "
                "what the engine returned then, or certify again"
            )
        guarantee = self.rule.guarantee(make_request(alpha, delta))
        ranking, sizes = self.rule.sets(table.results, guarantee)
        ids = table.ids
        if ranking.columns is not None:
            ids = np.take_along_axis(ids, ranking.columns, axis=1)
        sets = zip(table.queries, ids, sizes, strict=True)
        return {name: row[:size].tolist() for name, row, size in sets}, guarantee

    def save(self, folder: Path) -> None:
        """Write the rule to a folder, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        write(self, folder, RULE)
        write_manifest(folder, checksums(folder))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what `save` wrote; `CorruptRetriever` if a file was changed or is missing."""
        if folder.is_dir() and not (folder / f"{RULE}.json").exists():
            raise InvalidConfig(
                f"{folder} holds no rule for tables of results: pass the folder rule that "
                "`rcir certify --results` wrote"
            )
        with verified(folder, {f"{RULE}.json", f"{RULE}.safetensors"}):
            return read(cls, folder, RULE)

    def __str__(self) -> str:
        rows = [f"{a:>6}  {risk:>7.4f}  {size:>9.2f}" for a, (risk, size) in self.measured.items()]
        return "\n".join([" alpha   missed  mean size", *rows])
