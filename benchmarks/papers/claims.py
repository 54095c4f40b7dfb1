"""Every table and figure of the papers: what prints our row, what was published, what we reach.

Reads `claims.toml` and the figures in `benchmarks/results`; `--write` brings the tables of
docs/papers.md up to date, between the comments that name a paper.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CLAIMS = Path(__file__).with_name("claims.toml")
PAGE = ROOT / "docs" / "papers.md"
STATUSES = ("reproduced", "partly", "needs data", "not done")
FIGURE = re.compile(r"\{(.+?):([^:{}]+)\}")
COLUMNS = ("item", "what it shows", "published", "here", "status")


@dataclass(frozen=True)
class Claim:
    """A row of `claims.toml`, which explains the fields."""

    paper: str
    item: str
    what: str
    command: str
    published: str
    results: str
    ours: str
    status: str
    because: str = ""

    @property
    def verdict(self) -> str:
        """The status, and why it is not "reproduced"."""
        return f"{self.status}: {self.because}" if self.because else self.status

    def measured(self) -> str:
        """Our figures, filled in.

        Raises:
            KeyError: the file of results has no such figure.
        """
        if not self.results:
            return ""
        figures = json.loads((RESULTS / self.results).read_text())["figures"]
        return FIGURE.sub(lambda found: format(figures[found[1]], found[2]), self.ours)


def read() -> tuple[dict[str, dict[str, str]], list[Claim]]:
    """The papers by key, each with `heading` and `url`, and all claims."""
    content = tomllib.loads(CLAIMS.read_text())
    return content["papers"], [Claim(**row) for row in content["claim"]]


def tables(papers: Mapping[str, Mapping[str, str]], claims: Sequence[Claim]) -> dict[str, str]:
    """The Markdown tables of the page by the names in its comments: "overview" and the papers."""
    made, overview = {}, []
    for key, paper in papers.items():
        chosen = [claim for claim in claims if claim.paper == key]
        counts = Counter(claim.status for claim in chosen)
        anchor = re.sub("[^a-z0-9 ]", "", paper["heading"].lower()).replace(" ", "-")
        overview.append([f"[{paper['heading']}](#{anchor})", *(str(counts[s]) for s in STATUSES)])
        made[key] = _markdown(COLUMNS, [_cells(claim) for claim in chosen])
    return {"overview": _markdown(("paper", *STATUSES), overview)} | made


def _cells(claim: Claim) -> list[str]:
    ours = f"[{claim.measured()}](../benchmarks/results/{claim.results})" if claim.results else ""
    return [claim.item, claim.what, claim.published, ours, claim.verdict]


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"|{'|'.join(cells)}|" for cells in (columns, ["---"] * len(columns), *rows))


def rewritten(page: str, made: Mapping[str, str]) -> str:
    """The page with these tables, each between `<!-- claims: NAME -->` and `<!-- end -->`."""
    for name, table in made.items():
        place = re.compile(f"(<!-- claims: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        parts = place.split(page)
        if len(parts) != 4:  # before, opening, end, after
            raise ValueError(f"docs/papers.md needs one place for the table {name!r}")
        page = f"{parts[0]}{parts[1]}\n{table}\n\n{parts[2]}{parts[3]}"
    return page


def main() -> None:
    """Print all claims, or write them."""
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("--write", action="store_true", help="write the tables of the page")
    papers, claims = read()
    if command.parse_args().write:
        PAGE.write_text(rewritten(PAGE.read_text(), tables(papers, claims)))
        return
    console = Console(highlight=False)
    for key, paper in papers.items():
        table = Table(title=paper["heading"], title_justify="left", show_lines=True)
        for column in (*COLUMNS, "command"):
            table.add_column(column, overflow="fold")
        for claim in claims:
            if claim.paper == key:
                cells = (claim.item, claim.what, claim.published, claim.measured())
                table.add_row(*cells, claim.verdict, claim.command)
        console.print(table)
    counts = Counter(claim.status for claim in claims)
    console.print(", ".join(f"{counts[status]} {status}" for status in STATUSES))


if __name__ == "__main__":
    main()
