"""`rcir retrieve PICTURE ...`"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from json import dumps
from typing import Any

from rcir.levels import ALPHA, DELTA
from rcir.printable import printable
from rcir.retrieval.answer import Options
from rcir.risk.risks import risk_names


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: queries, the retriever, the guarantee."""
    parser.add_argument(
        "image", nargs="+", help="image file; for a retriever of vectors, a file of vectors"
    )
    parser.add_argument(
        "--retriever", help="folder or MLflow URI; without it, RCIR_RETRIEVER names it"
    )
    parser.add_argument(
        "--alpha", type=float, default=ALPHA, help="share of queries whose set may hold no match"
    )
    parser.add_argument(
        "--delta", type=float, default=DELTA, help="probability of misleading calibration queries"
    )
    parser.add_argument("--risk", choices=risk_names(), default="miss", help="what to control")
    parser.add_argument("--distinct", choices=["label"], help="one image of each label")
    parser.add_argument("--group", help="the group that the queries belong to")
    parser.add_argument(
        "--abstain", action="store_true", help="one image, or none if too uncertain"
    )
    parser.add_argument(
        "--simultaneous", action="store_true", help="alpha was chosen after looking"
    )
    parser.add_argument(
        "--anytime", action="store_true", help="calibration queries were added one by one"
    )
    parser.add_argument("--mix", choices=["any"], help="whatever the mix of the groups")
    parser.add_argument(
        "--json", action="store_true", help="print JSON: of several pictures, a list"
    )


def run(options: Namespace) -> None:
    """Print the answer of each picture."""
    from rcir.api import default_retriever, use

    retriever = use(options.retriever) if options.retriever else default_retriever()
    asked = {name: getattr(options, name) for name in Options.__annotations__}
    names: list[str] = options.image
    queries: dict[str, Any] = {}
    if retriever.encoder is None:
        names, queries = _vectors(options.image)
    query = queries.pop("query", names)
    answers = retriever.retrieve(query, options.alpha, options.delta, **asked, **queries)
    if options.json:
        found = [answer.to_dict() for answer in answers]
        print(dumps(found if len(found) > 1 else found[0], indent=1))
    elif len(answers) == 1:
        print(answers[0])
    else:
        for name, answer in zip(names, answers, strict=True):
            print(f"{printable(name)}:\n{answer}\n")


def _vectors(files: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Names of the vectors of one file, and what `Retriever.retrieve` is asked."""
    from pathlib import Path

    from rcir.data.vector_shards import read_all_vectors
    from rcir.errors import InvalidConfig

    if len(files) > 1:
        raise InvalidConfig(f"{len(files)} files: of vectors give one, with a row for each query")
    table = read_all_vectors(Path(files[0]))
    names = table.ids or [f"row {row}" for row in range(len(table))]
    known = {"query": table.vectors, "uncertainty": table.uncertainty, "model": table.model}
    return names, known
