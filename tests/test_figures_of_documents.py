"""Figures in documents are those that a benchmark wrote to `benchmarks/results`.

A comment at the end of a paragraph or behind a table names the file and the figures, in the order
in which the text has them:

    <!-- figures: birds.json 0.1/mean size, 0.1/one size -->

A name that ends in `*` stands for all figures that begin so, in the order of the file.
"""

import json
import re
import subprocess
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COMMENT = re.compile(r"<!-- figures: (\S+) (.+?) -->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def passages(text):
    """Yield each passage that ends in a comment, with the match of the comment."""
    for comment in COMMENT.finditer(text):
        before = text[: comment.start()].rstrip()
        opening = "```" if before.endswith("```") else "\n\n"
        yield before[before[:-3].rfind(opening) + 1 :], comment


def expected(comment):
    """Return names and values of the figures that a comment names."""
    figures = json.loads((RESULTS / comment[1]).read_text())["figures"]
    named = {}
    for name in " ".join(comment[2].split()).split(", "):
        if name.endswith("*"):
            begun = {key: figures[key] for key in figures if key.startswith(name[:-1])}
            assert begun, name
            named |= begun
        else:
            named[name] = figures[name]
    return named


def differing(passage, figures):
    """Return the first figure that the passage does not state, or None."""
    numbers = iter(NUMBER.findall(passage))
    for name, value in figures.items():
        for number in numbers:
            decimals = len(number.partition(".")[2])
            if f"{value:.{decimals}f}" == number.replace(",", ""):
                break
        else:
            return name
    return None


STATED = [
    pytest.param(passage, comment, id=f"{path.name}-{comment[1]}-{number}")
    for path in DOCUMENTS
    for number, (passage, comment) in enumerate(passages(path.read_text()))
]


@pytest.mark.parametrize(("passage", "comment"), STATED)
def test_documents_state_what_was_measured(passage, comment):
    assert differing(passage, expected(comment)) is None


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_name_script_commit_date_and_hardware(path):
    results = json.loads(path.read_text())
    assert results.keys() == {"script", "commit", "date", "hardware", "figures"}
    assert (ROOT / results["script"].split()[1]).is_file()
    assert "--short" not in results["script"]
    assert date.fromisoformat(results["date"]) <= date.today()
    assert results["hardware"]
    assert re.fullmatch("[0-9a-f]{40}", results["commit"])
    history = ["git", "-C", str(ROOT), "cat-file", "-e", f"{results['commit']}^{{commit}}"]
    if (ROOT / ".git").exists() and not is_shallow():
        subprocess.run(history, check=True)
    claims = (ROOT / "docs" / "papers.md").read_text()
    stated = any(path.name in comment[1] for _, comment in all_comments())
    assert stated or f"/{path.name})" in claims, "no document states it"


def is_shallow():
    command = ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() == "true"


def all_comments():
    return [stated for path in DOCUMENTS for stated in passages(path.read_text())]
