"""The table of claims: its rows are complete, and the page of the papers holds them."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SHARED = [ROOT / "benchmarks" / "common.py", ROOT / "benchmarks" / "papers" / "tables.py"]


def load():
    """Import the script, which is not part of a package."""
    path = ROOT / "benchmarks" / "papers" / "claims.py"
    spec = importlib.util.spec_from_file_location("claims_of_papers", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look names up
    spec.loader.exec_module(module)
    return module


claims = load()
PAPERS, CLAIMS = claims.read()


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.paper}, {claim.item}")
def test_claim_is_complete(claim):
    assert claim.paper in PAPERS
    assert claim.item
    assert claim.what
    assert claim.status in {"reproduced", "partly", "needs data", "not done"}
    assert (claim.status == "reproduced") == (not claim.because)
    # A figure of ours comes from a file, and somebody can print it again.
    assert bool(claim.results) == bool(claim.ours)
    assert claim.command or not claim.results
    if claim.status == "reproduced":
        assert claim.results
    assert not re.search(r"[|\n<>\\]", "".join(map(str, vars(claim).values())))
    if claim.results:
        assert claims.FIGURE.search(claim.ours)
        assert re.search(r"\d", claim.measured())
        assert not re.search("[{}]", claim.measured())


@pytest.mark.parametrize("command", sorted({claim.command for claim in CLAIMS} - {""}))
def test_command_names_a_script_and_its_options(command):
    python, script, *words = command.split()
    assert python == "python"
    assert script.startswith("benchmarks/")
    sources = "".join(path.read_text() for path in (ROOT / script, *SHARED))
    for word in words:
        if word.startswith("--"):
            assert f'"{word}"' in sources, f"{script} has no option {word}"


def test_page_holds_the_tables_that_the_script_makes():
    page = claims.PAGE.read_text()
    assert claims.rewritten(page, claims.tables(PAPERS, CLAIMS)) == page, (
        "run python benchmarks/papers/claims.py --write"
    )
    for paper in PAPERS.values():
        assert f"\n## {paper['heading']}\n" in page
    prose = re.sub("^[|].*", "", page, flags=re.MULTILINE)
    assert len(prose.split()) <= 1500


def test_rows_of_a_paper_stay_together_in_the_order_of_the_page():
    order = [claim.paper for claim in CLAIMS]
    assert order == sorted(order, key=list(PAPERS).index)


def test_citations_name_every_paper():
    references = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    assert {paper["url"] for paper in PAPERS.values()} <= {one["url"] for one in references}
