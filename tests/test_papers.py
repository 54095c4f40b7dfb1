"""The table of claims: its rows are complete, and the page of the papers holds them."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

ROOT = Path(__file__).parents[1]
SHARED = [ROOT / "benchmarks" / "common.py", ROOT / "benchmarks" / "papers" / "tables.py"]


def load(name):
    """Import a script, which is not part of a package."""
    path = ROOT / "benchmarks" / "papers" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_of_papers", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look names up
    spec.loader.exec_module(module)
    return module


claims = load("claims")
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
        written = json.loads((claims.RESULTS / claim.results).read_text())["script"]
        assert {*claim.command.split()} <= {*written.split()}
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
    prose = re.sub("^[|].*$|<!--[^>]*-->", "", page, flags=re.MULTILINE)
    assert len(prose.split()) <= 1500


def test_rows_of_a_paper_stay_together_in_the_order_of_the_page():
    order = [claim.paper for claim in CLAIMS]
    assert order == sorted(order, key=list(PAPERS).index)


def test_citations_name_every_paper():
    references = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    assert {paper["url"] for paper in PAPERS.values()} <= {one["url"] for one in references}


def test_calibration_errors_of_the_text_and_of_the_code_of_warburg_et_al():
    """By hand: 4 draws vote on 5 queries, two of them unanimously, and of equal votes 0 wins."""
    votes = np.array([[1, 1, 1, 1], [2, 2, 2, 2], [1, 1, 1, 0], [0, 0, 2, 2], [3, 3, 3, 1]]).T
    errors = load("tables").calibration_errors(votes, np.array([1, 0, 1, 2, 0]))
    # Bins of 1, .75 and .5 miss by |0 - 1|, |.25 - .75| and |-.5|; the code has no bin of 1.
    assert errors["ECE"] == pytest.approx((1 + 0.5 + 0.5) / 5)
    assert errors["ECE code"] == pytest.approx((0.5 + 0.5) / 3)
    assert errors["unanimous"] == pytest.approx(0.4)
    assert load("tables").calibration_errors(votes[:, :2], np.array([1, 0]))["ECE code"] is None
